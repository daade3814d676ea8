"""Environments whose reward is what a service says: the prompt is shown, the reply sent there, the answer returned.

They are what `--reward-model FOLDER` and `--judge RECIPE` play by themselves, without `--env`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from posttrain.core.types import Ask, Reply, Task, Turn, Verdict
from posttrain.envs.play.load_env import opening

Asking = Generator[Turn | Ask, Any, Verdict]


def reward_model(task: Task) -> Asking:
    """The score of the service "reward-model". It is told of a reply that was cut off, which has no end to be read."""
    turn = opening(task)
    reply: Reply = yield turn
    verdict: Verdict = yield Ask("reward-model", question("reward-model", turn, reply))
    return verdict


def judge(task: Task) -> Asking:
    """The verdict of the service "judge", which also gets the task's own response or answer, if it has one."""
    turn = opening(task)
    reply: Reply = yield turn
    own = next((task[name] for name in ("response", "answer") if isinstance(task.get(name), str)), None)
    reference = {} if own is None else {"reference": own}
    verdict: Verdict = yield Ask("judge", {**question("judge", turn, reply), **reference})
    return verdict


def question(kind: str, turn: Turn, reply: Reply) -> dict[str, Any]:
    """Return the request to a service of a kind ("reward-model" or "judge") about a reply to a turn."""
    if kind == "judge":
        shown = {"prompt": turn.text} if turn.messages is None else {"messages": list(turn.messages)}
        return {**shown, "response": reply}
    cut = {"cut": True} if reply.stop.truncated else {}
    if turn.messages is None:
        return {"prompt": turn.text, "response": reply, **cut}
    return {"messages": [*turn.messages, {"role": "assistant", "content": reply}], **cut}
