"""The rewards of a run's evaluations on held-out tasks, by task, and the reward from which on a reply is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.core.types import succeeds
from posttrain.runs.record.rollout_reading import read_table
from posttrain.runs.run_files import EVALS, kept_file


def held_out_rewards(run: Path, step: int) -> dict[str, list[float]]:
    """Return task -> the valid rewards of its samples, in the evaluation after a step; {} if none is recorded."""
    if kept_file(run, EVALS, step) is None:
        return {}
    table = read_table(run, step, ["task", "reward"], held_out=True)
    rewards: dict[str, list[float]] = {}
    for task, reward in zip(table["task"].to_pylist(), table["reward"].to_pylist(), strict=True):
        if reward is not None:
            rewards.setdefault(task, []).append(reward)
    return rewards


def success_threshold(
    about: Mapping[str, Any], rewards: Sequence[float], accuracy: float | None = None
) -> float | None:
    """Return the reward from which on a reply is right: the run's own, that of this accuracy of these rewards, or 1
    where all rewards are 0 or 1.
    """
    given = about["config"].get("success")
    if isinstance(given, int | float):
        return float(given)
    found = None if accuracy is None else threshold(rewards, accuracy)
    return 1.0 if found is None and set(rewards) <= {0.0, 1.0} else found


def threshold(rewards: Sequence[float], accuracy: float) -> float | None:
    """Return the threshold at which a share of exactly `accuracy` succeeds; None: there is none."""
    if not rewards or not 0 < accuracy < 1:
        return None
    for limit in sorted(set(rewards), reverse=True):
        share = sum(succeeds(reward, limit) for reward in rewards) / len(rewards)
        if abs(share - accuracy) < 1e-9:
            return float(limit)
    return None
