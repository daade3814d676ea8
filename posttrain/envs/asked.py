"""Environments whose reward is what a service says: the prompt is shown, the reply sent there, the answer returned.

They are what `--reward-model FOLDER` and `--judge RECIPE` play by themselves, without `--env`. What plays where nothing
scores stands here too.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from posttrain.envs.load import opening
from posttrain.types import Ask, Reply, Task, Turn, Verdict

Asking = Generator[Turn | Ask, Any, Verdict]


def reward_model(task: Task) -> Asking:
    """The score of the service "reward-model". It is told of a reply that was cut off, which has no end to be read."""
    turn = opening(task)
    reply: Reply = yield turn
    cut = {"cut": True} if reply.stop.truncated else {}
    if turn.messages is not None:
        said = {"role": "assistant", "content": reply}
        answer = yield Ask("reward-model", {"messages": [*turn.messages, said], **cut})
    else:
        answer = yield Ask("reward-model", {"prompt": turn.text, "response": reply, **cut})
    verdict: Verdict = answer
    return verdict


def judge(task: Task) -> Asking:
    """The verdict of the service "judge", which also gets the task's own response or answer, if it has one."""
    turn = opening(task)
    reply: Reply = yield turn
    asked: dict[str, Any] = {"prompt": turn.text} if turn.messages is None else {"messages": list(turn.messages)}
    own = next((task[name] for name in ("response", "answer") if isinstance(task.get(name), str)), None)
    reference = {} if own is None else {"reference": own}
    answer = yield Ask("judge", {**asked, "response": reply, **reference})
    verdict: Verdict = answer
    return verdict


def unscored(task: Task, reply: str) -> float:
    """Nobody scores: what `posttrain sample` plays without an environment."""
    return 0.0
