"""The rule that stands in for a judge in `recipes.real.preferences`, and the environment in which policies play for it.

A module of its own, without torch: environment processes import it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from posttrain import Ask, Invalid, Reply, Task
from posttrain.envs.builtin.service_reward import question
from posttrain.envs.play.load_env import opening
from posttrain.verify.similarity import chrf


def mark(reply: str, reference: str) -> float:
    """The judge's mark of a reply, 0 to 1: chrF with beta 2 (Popovic 2015) beside a reference that no learner sees.

    It counts character n-grams that reply and reference share. Recall weighs four times as much as precision, so neither
    a short reply nor a long one is good in itself.
    """
    found = chrf(reply, reference)
    return 0.0 if isinstance(found, Invalid) else found


def judged(task: Task) -> Generator[Any, Any, Any]:
    """One turn. The reward is the reward model's score; the judge's mark is recorded, and nothing learns from it."""
    turn = opening(task)
    reply: Reply = yield turn
    score = yield Ask("reward-model", question("reward-model", turn, reply))
    return score if isinstance(score, Invalid) else {"reward": score, "judge": mark(reply, task["reference"])}
