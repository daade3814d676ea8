"""The figures of an evaluation, of the rollouts and the scores of each model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.config.inference import Evaluation
from posttrain.core.rollouts import Rollout
from posttrain.training.figures import bests, majorities, summary
from posttrain.training.reply_scorer import ScorerResults
from posttrain.training.rollout_figures import outcomes_by_task, ranked_by_task, rewards_by_task, votes_by_task


def figures_of(
    config: Evaluation,
    every: Sequence[Sequence[Rollout]],
    success: float | None,
    scored: ScorerResults,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Return the figures of each model's rollouts."""
    rewards = [rewards_by_task(rollouts) for rollouts in every]
    ranked = [ranked_by_task(*side) for side in zip(every, scored.scores, strict=True)] if scored.scores else []
    wanted, few = _of_valid(_wanted(config, ("pass", "maj")), rewards)
    chosen, fewer = _of_valid(_wanted(config, ("best",)), ranked, "rewards and scores") if ranked else ([], ())
    for line in (*few, *fewer):
        say(line)
    ks = {kind: [k for own, k in (*wanted, *chosen) if own == kind] for kind in ("pass", "maj", "best")}
    found = []
    for place, (earned, rollouts) in enumerate(zip(rewards, every, strict=True)):
        outcomes = list(outcomes_by_task(rollouts).values())
        figures = summary(list(earned.values()), ks["pass"], success, outcomes=outcomes)
        figures |= majorities(list(votes_by_task(rollouts).values()), outcomes, ks["maj"], success)
        figures |= bests(list(ranked[place].values()), ks["best"], success) if ranked else {}
        found.append(figures | scored.figures(place, rollouts))
    return found


def _wanted(config: Evaluation, kinds: Sequence[str]) -> list[tuple[str, int]]:
    """Return (kind, k) of the figures that the samples suffice for, as not all default values of --k do."""
    asked = {"pass": config.k, "maj": config.maj, "best": config.best}
    return [(kind, k) for kind in kinds for k in asked[kind] if k <= config.samples]


def _of_valid(
    wanted: list[tuple[str, int]], sides: Sequence[Mapping[str, Sequence[Any]]], what: str = "rewards"
) -> tuple[list[tuple[str, int]], tuple[str, ...]]:
    """Return those for which each side has a task with enough valid rewards, and a note on the others."""
    most = min(max(map(len, rewards.values()), default=0) for rewards in sides)
    few = [f"{kind}@{k}" for kind, k in wanted if k > most]
    told = f"{', '.join(few)} left out: no task has more than {most} valid {what}"
    return [(kind, k) for kind, k in wanted if k <= most], (told,) if few else ()
