"""Credit assignment: from rollouts to the inputs of the loss: scoreboard, advantages and outputs of the models.

S    rollouts of an optimizer batch    n_i    scored tokens of rollout i
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from posttrain.algorithms.earned_rewards import per_token
from posttrain.algorithms.policy import Algorithm
from posttrain.core.batch import Scores, Stats
from posttrain.core.component import Need
from posttrain.core.protocols import Learner
from posttrain.core.rollouts import Rollout
from posttrain.training.sources.model_outputs import evaluate_rollouts
from posttrain.training.sources.packing import pack
from posttrain.training.sources.scoreboard import scoreboard
from posttrain.training.sources.teacher_targets import Teachers

EVALUATED = {Need.VALUE: "value", Need.ENTROPY: "entropy", Need.KL: "kl"}
"""Output of the learner after sampling -> its field of `Outputs`."""


@dataclass(frozen=True)
class Credited:
    """Rollouts with the loss inputs of each."""

    rollouts: Sequence[Rollout]
    scores: Scores
    per_token: Mapping[str, list[Tensor]]  # field of `Batch` -> [n_i] of each rollout, or [n_i, k + 1]
    views: Mapping[str, list[Tensor]]  # log-probabilities "old" and "reference", if needed
    shaping: Tensor | None = None  # float64 [S], added to each reward
    selected: Sequence[Tensor] = ()  # bool [n_i], whether a token has kept its advantage; (): all have

    def advantages(self) -> tuple[list[float], list[bool]]:
        """Return the mean advantage of each rollout, and whether any of its tokens has one.

        Vectorised for thousands of rollouts.
        """
        if not self.rollouts:
            return [], []
        sizes = self.scores.length.long().numpy()
        assert sizes.all(), (
            "a rollout without a scored token has left the step, and reduceat would read its neighbour's"
        )
        first = np.concatenate([[0], sizes.cumsum()[:-1]])
        every = torch.cat(self.per_token["advantage"]).double().cpu().numpy()
        return (np.add.reduceat(every, first) / sizes).tolist(), np.logical_or.reduceat(every != 0, first).tolist()

    def of(self, rows: Tensor) -> Credited:
        """Return the rollouts at these places, int64 [S']."""
        chosen = rows.tolist()

        def some(columns: Mapping[str, list[Tensor]]) -> dict[str, list[Tensor]]:
            return {name: [values[i] for i in chosen] for name, values in columns.items()}

        return Credited(
            [self.rollouts[i] for i in chosen],
            self.scores.of(rows),
            some(self.per_token),
            some(self.views),
            None if self.shaping is None else self.shaping[rows],
            [self.selected[i] for i in chosen] if self.selected else (),
        )


def credit(
    algorithm: Algorithm,
    rollouts: Sequence[Rollout],
    learner: Learner,
    tokens_per_microbatch: int,
    coefficients: Mapping[str, float],
    success: float | None,
    stats: Stats,
    teachers: Teachers | None = None,
) -> Credited:
    """Compute the scoreboard and the advantages of these rollouts, with the outputs that the algorithm's components
    need.
    """
    if not rollouts:
        return Credited([], scoreboard([]), {"advantage": []}, {})
    needs = algorithm.needs
    want = frozenset(field for need, field in EVALUATED.items() if need in needs)
    own = evaluate_rollouts(learner, rollouts, tokens_per_microbatch, want=want) if want or Need.OLD in needs else {}
    views = {"old": own["logp"]} if own else {}
    if Need.REFERENCE in needs:
        views["reference"] = evaluate_rollouts(learner, rollouts, tokens_per_microbatch, of="reference")["logp"]
    penalty, value = _penalty(algorithm, own, views, coefficients), own.get("value", [])
    scores = scoreboard(rollouts, penalty, value, success, needs)
    added: Tensor | None = None
    if algorithm.shaping:
        added = torch.stack([shape(scores) for shape in algorithm.shaping]).sum(0)
        stats.add("reward/shaping", added.sum().item(), len(added))
        scores = replace(scores, reward=scores.reward + added)
    if algorithm.redistribution is not None:
        scores = replace(scores, shares=algorithm.redistribution(scores, own.get("entropy", [])))
    if Need.GRADIENT_NORM in needs:
        alone = [pack([r.transcripts], [i], learner.device) for i, r in enumerate(rollouts)]
        scores = replace(scores, squared_gradient_norm=learner.squared_gradients(alone))
    fields = {"advantage": per_token(algorithm.advantage(scores), scores)}
    if algorithm.branching is not None:
        fields["advantage"] = algorithm.branching.shared(fields["advantage"], scores)
    if algorithm.looks_back:
        fields["old_logp"] = views["old"]
    if "reference" in views:
        fields["ref_logp"] = views["reference"]
    if teachers is not None:
        fields |= _teacher_fields(algorithm, teachers, learner, rollouts, tokens_per_microbatch)
    if algorithm.critic is not None:
        fields |= _returns(algorithm, scores, stats)
    if algorithm.covariance is not None:
        fields["held"] = algorithm.covariance(own, fields["advantage"])
    chosen = [select(own, fields["advantage"]) for select in algorithm.select]
    kept = [torch.stack(of_rollout).all(0) for of_rollout in zip(*chosen, strict=True)]
    if kept:
        fields["advantage"] = [a * keep for a, keep in zip(fields["advantage"], kept, strict=True)]
    every = torch.cat(fields["advantage"])
    stats.add("advantage/abs", every.abs().sum().item(), len(every))
    stats.add("advantage/std", every.std(correction=0).item())
    return Credited(rollouts, scores, fields, views, added, kept)


def _penalty(
    algorithm: Algorithm,
    own: Mapping[str, list[Tensor]],
    views: Mapping[str, list[Tensor]],
    coefficients: Mapping[str, float],
) -> list[Tensor]:
    """Return the KL and entropy penalty subtracted from tokens' rewards, [n_i] for each rollout; [] without any."""
    kl, entropy, found = algorithm.kl, algorithm.entropy, list[list[Tensor]]()
    if kl is not None and kl.where == "reward":
        exact = kl.estimator == "exact"
        every = own["kl"] if exact else [kl(a, b) for a, b in zip(views["old"], views["reference"], strict=True)]
        found.append([coefficients["kl"] * x.cpu() for x in every])
    if entropy is not None and entropy.where == "reward":
        found.append([coefficients["entropy"] * logp.cpu() for logp in views["old"]])
    return [sum(of_rollout[1:], of_rollout[0]) for of_rollout in zip(*found, strict=True)]


def _teacher_fields(
    algorithm: Algorithm, teachers: Teachers, learner: Learner, rollouts: Sequence[Rollout], tokens_per_microbatch: int
) -> dict[str, list[Tensor]]:
    """Return the log-probabilities of the teachers that the algorithm needs before the updates."""
    if Need.TEACHER_TOP in algorithm.needs:
        assert algorithm.teacher is not None
        top = teachers.top(rollouts, algorithm.teacher.top_k, learner.device)
        return {
            "teacher_logp": [own.sampled for own in top],
            "teacher_ids": [own.ids for own in top],
            "teacher_top": [own.logp for own in top],
        }
    if Need.TEACHER in algorithm.needs:
        return {"teacher_logp": teachers.logp(learner, rollouts, tokens_per_microbatch)}
    return {}


def _returns(algorithm: Algorithm, scores: Scores, stats: Stats) -> dict[str, list[Tensor]]:
    """Return the critic's values after sampling and its target returns, if it learns returns."""
    assert algorithm.critic is not None
    aim = algorithm.critic.targets(algorithm.advantage, scores)
    if aim is None:
        return {}
    target, value = torch.cat(aim), torch.cat([v.double().cpu() for v in scores.value])
    spread = target.var(correction=0).item()
    if spread > 1e-12:  # equal returns leave nothing to explain
        stats.add("explained_variance", 1 - (target - value).var(correction=0).item() / spread)
    stats.add("value", value.sum().item(), len(value))
    stats.add("return", target.sum().item(), len(target))
    return {"value": list(scores.value), "returns": [x.float() for x in aim]}
