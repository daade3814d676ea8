"""The rollouts of an evaluation, from the tasks that they are sampled of to the figures that they give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.core.rollouts import Rollout
from posttrain.core.seeds import seed_of
from posttrain.core.types import Invalid, Task
from posttrain.envs.play.episode import Episode
from posttrain.verify.answer import voted_answer


def repeated(tasks: Sequence[Task], samples: int, seed: int) -> list[Episode]:
    """Return each task `samples` times, with seeds of the evaluation's own, independent of the state of training."""
    return [
        Episode(task, str(task["id"]), seed_of(seed, "evaluation", task["id"], sample))
        for task in tasks
        for sample in range(samples)
    ]


def rewards_by_task(rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
    """Return task id -> valid rewards of its samples; if the policy plays several sides, the key is "ID as SIDE"."""
    return _by_task(rollouts, lambda valid: valid.reward)


def outcomes_by_task(rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
    """Return task id -> valid outcomes, the numbers that `success` is compared with: see `Rollout.outcome`."""
    return _by_task(rollouts, lambda valid: valid.outcome)


def ranked_by_task(
    rollouts: Sequence[Rollout], scores: Sequence[float | Invalid]
) -> dict[str, list[tuple[float, float]]]:
    """Return task id -> (score, outcome) of its samples whose reward and score are valid, for best@k."""
    found: dict[str, list[tuple[float, float]]] = {}
    for rollout, score in zip(rollouts, scores, strict=True):
        if not isinstance(rollout.reward, Invalid) and not isinstance(score, Invalid):
            found.setdefault(key_of(rollout), []).append((score, rollout.outcome))
    return found


def votes_by_task(rollouts: Sequence[Rollout]) -> dict[str, list[str]]:
    """Return task id -> final answers of its valid samples, for maj@k."""
    return _by_task(rollouts, lambda valid: voted_answer(valid.text))


def paired(own: Sequence[Rollout], other: Sequence[Rollout]) -> list[tuple[int, int]]:
    """Return the rollouts of two models in pairs, by their places: the same task (and side), and the same number among its
    samples. Those without a counterpart are left out.
    """
    waiting: dict[str, list[int]] = {}
    for place in reversed(range(len(other))):
        waiting.setdefault(key_of(other[place]), []).append(place)
    return [(place, waiting[key_of(r)].pop()) for place, r in enumerate(own) if waiting.get(key_of(r))]


def task_of_each(rollouts: Sequence[Rollout]) -> dict[str, str]:
    """Return key of `rewards_by_task` -> task id, of which each side has a key."""
    return {key_of(rollout): rollout.task["id"] for rollout in rollouts}


def key_of(rollout: Rollout) -> str:
    return f"{rollout.task['id']} as {rollout.side}" if rollout.side else rollout.task["id"]


def _by_task(rollouts: Sequence[Rollout], read: Callable[[Rollout], Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for r in rollouts:
        own = found.setdefault(key_of(r), [])
        if not isinstance(r.reward, Invalid):
            own.append(read(r))
    return found


def headline(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figure of a part that averages use: accuracy, or reward if no success threshold exists."""
    found: dict[str, Any] = figures.get("accuracy", figures["reward"])
    return found


def rates(rollouts: Sequence[Rollout], price: float | None = None) -> dict[str, float]:
    """Return rates of these rollouts, and means per rollout.

    "invalid", "truncated": shares of all rollouts. "length": mean number of sampled tokens. "part/NAME": mean of a
    named part of the reward, over the rollouts that have it. "total_tokens": sum of sampled tokens. If there are tool calls,
    "tool_calls": mean number, and "valid_calls": share of the calls that are well-formed, so that they can be executed;
    where `Tools` answer them, "successful_calls": share of the answers that are results and no error. With a `price` of a
    million tokens, "cost": of all sampled tokens.
    """
    sampled = [rollout.n_sampled for rollout in rollouts]
    found = {
        "invalid": float(np.mean([isinstance(rollout.reward, Invalid) for rollout in rollouts])),
        "truncated": float(np.mean([rollout.stop.truncated for rollout in rollouts])),
        "length": float(np.mean(sampled)),
        "total_tokens": float(sum(sampled)),
    }
    calls = [call.problem is None for rollout in rollouts for turn in rollout.turns for call in turn.calls]
    if calls:
        found |= {"tool_calls": len(calls) / len(rollouts), "valid_calls": float(np.mean(calls))}
    answered = [turn.answered for rollout in rollouts for turn in rollout.turns]
    if answers := sum(count for count, _ in answered):
        found["successful_calls"] = 1 - sum(failed for _, failed in answered) / answers
    if price is not None:
        found["cost"] = sum(sampled) * price / 1e6
    for name in sorted({name for rollout in rollouts for name in rollout.rewards}):
        found[f"part/{name}"] = float(np.mean([r.rewards[name] for r in rollouts if name in r.rewards]))
    return found
