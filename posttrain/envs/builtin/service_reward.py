"""Environments with the reward of a service: they show the prompt, send the reply to the service, and return its
answer.

`--reward-model FOLDER` and `--judge RECIPE` use them without `--env`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from posttrain.core.types import Ask, Reply, Task, Turn, Verdict
from posttrain.envs.play.load_env import opening

Asking = Generator[Turn | Ask, Any, Verdict]


def reward_model(task: Task) -> Asking:
    """Run an episode scored by the service "reward-model", which is informed if the reply was cut off."""
    turn = opening(task)
    reply: Reply = yield turn
    verdict: Verdict = yield Ask("reward-model", question("reward-model", turn, reply))
    return verdict


def judge(task: Task) -> Asking:
    """Run an episode scored by the service "judge", which also gets the task's own response or answer, if any."""
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
