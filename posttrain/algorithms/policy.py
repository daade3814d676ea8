"""What an algorithm is, a row of parts, and the one objective that all rows share.

A new paper is one row and, if it has a new idea, one part. Nothing anywhere asks for a row's name.

    N    scored tokens of a micro-batch    S = B    rollouts of the optimizer batch
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from posttrain.algorithms.aggregate import Aggregate
from posttrain.algorithms.credit import Advantage
from posttrain.algorithms.critic import CriticLoss
from posttrain.algorithms.filters import DynamicSampling, OverlongFilter, Replay, TopEntropy
from posttrain.algorithms.penalty import KL, Entropy
from posttrain.algorithms.ratio import Correction, RatioStep
from posttrain.algorithms.shaping import GroupLength, SoftOverlong
from posttrain.algorithms.surrogate import Surrogate
from posttrain.types import Batch, Objective, Outputs, Stats


@dataclass(frozen=True)
class TrustRegion:
    """A natural gradient step within KL(old || new) <= delta, instead of AdamW (TRPO, arXiv 1502.05477, appendix C).

    The direction solves F x = g by conjugate gradient on Fisher-vector products; the step is then shortened by halves
    until the surrogate has grown and the KL, exact over the vocabulary, is within bounds.
    """

    delta: float = 0.01  # nats per token
    iterations: int = 10  # of conjugate gradient
    damping: float = 0.01
    halvings: int = 10
    source: ClassVar[str] = "TRPO, arXiv 1502.05477, appendix C"

    @property
    def formula(self) -> str:
        return f"natural gradient within mean KL(old || new) <= {self.delta:g}, then a backtracking line search"


@dataclass(frozen=True)
class Imitation:
    """coefficient x the negative log-likelihood of correct rollouts, a mean over their tokens (VAPO, arXiv 2504.05118)."""

    coefficient: float = 0.1
    source: ClassVar[str] = "VAPO, arXiv 2504.05118, eq. 11 and 12"

    @property
    def formula(self) -> str:
        return f"{self.coefficient:g} x mean of -lp over the tokens of correct rollouts"


@dataclass(frozen=True)
class Pretraining:
    """coefficient x the language-model loss on text of its own, in every update (PPO-ptx, InstructGPT, eq. 2)."""

    coefficient: float = 1.0
    rows: int = 16  # texts in each update
    source: ClassVar[str] = "InstructGPT, arXiv 2203.02155, eq. 2"

    @property
    def formula(self) -> str:
        return f"{self.coefficient:g} x mean of -lp over the tokens of {self.rows} pretraining texts"


@dataclass(frozen=True)
class Algorithm:
    """A row of the table."""

    name: str
    paper: str
    advantage: Advantage
    surrogate: Surrogate
    aggregate: Aggregate
    ratio: tuple[RatioStep, ...] = ()  # applied left to right to the log ratio; they do not commute
    correction: Correction | None = None  # for an engine whose numbers differ from the learner's
    kl: KL | None = None
    entropy: Entropy | None = None
    select: TopEntropy | None = None
    critic: CriticLoss | None = None
    sampling: DynamicSampling | None = None
    filters: tuple[OverlongFilter, ...] = ()  # rollouts that are in the loss
    shaping: tuple[SoftOverlong | GroupLength, ...] = ()  # added to the reward
    imitation: Imitation | None = None
    pretraining: Pretraining | None = None
    trust_region: TrustRegion | None = None
    replay: Replay | None = None
    refresh: int = 0  # steps after which the reference becomes the policy; 0: never
    epochs: int = 1  # passes over the rollouts of a step
    minibatches: int = 1  # optimizer updates per pass

    @property
    def on_policy(self) -> bool:
        """Whether the rollouts of a step serve one update only, so that old and current log-probabilities coincide."""
        return self.epochs * self.minibatches == 1

    @property
    def needs_reference(self) -> bool:
        return self.kl is not None and self.kl.against == "reference"

    @property
    def moves_every_token(self) -> bool:
        """Whether a rollout can have a gradient, or bound the step, though its advantage is 0."""
        penalised = self.kl is not None and self.kl.where == "loss"
        region = self.trust_region is not None  # its KL is over all tokens, not those alone that the advantage moves
        return penalised or region or any((self.entropy, self.critic, self.imitation, self.surrogate.wants))

    @property
    def wants(self) -> frozenset[str]:
        """Fields of `Outputs` that the loss reads, besides logp."""
        found = self.surrogate.wants
        if self.kl is not None and self.kl.where == "loss":
            found |= self.kl.wants
        if self.entropy is not None:
            found |= {"entropy"}
        if self.critic is not None:
            found |= self.critic.wants
        return found


@dataclass(frozen=True)
class PolicyObjective:
    """The loss of one micro-batch: minus the weighted sum of what is maximised, plus the penalties."""

    row: Algorithm

    @property
    def wants(self) -> frozenset[str]:
        return self.row.wants

    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        """A scalar. Metrics are averaged over the tokens that are fed."""
        row = self.row
        if batch.advantage is None:  # pretraining text: its weights already hold the coefficient
            stats.add("ptx/nll", -outputs.logp.detach().sum().item(), outputs.logp.numel())
            return -(batch.weight * outputs.logp).sum()
        loss = outputs.logp.new_zeros(())
        if row.critic is not None:
            loss = loss + row.critic.coefficient * (batch.weight * row.critic(outputs, batch, stats)).sum()
        if batch.coefficients.get("policy", 1.0) == 0:  # the critic's warm-up
            return loss
        gain = self._surrogate(outputs, batch, stats)
        if row.kl is not None:
            gain = gain - self._penalty(row.kl, outputs, batch, stats)
        if row.entropy is not None:
            assert outputs.entropy is not None
            gain = gain + batch.coefficients.get("entropy", row.entropy.coefficient) * outputs.entropy
            stats.add("entropy/policy", outputs.entropy.detach().sum().item(), outputs.entropy.numel())
        if row.imitation is not None:
            assert batch.imitate is not None
            loss = loss - (batch.imitate * outputs.logp).sum()
        return loss - (batch.weight * gain).sum()

    def _surrogate(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        """[N]: what is maximised, with the correction for the engine's numbers."""
        row, logp = self.row, outputs.logp
        assert batch.advantage is not None
        old = logp.detach() if batch.old_logp is None else batch.old_logp
        log_ratio = logp - old
        for step in row.ratio:
            log_ratio = step(log_ratio, batch)
        ratio = log_ratio.exp()
        gain = row.surrogate(ratio, outputs, batch.advantage)
        if batch.sampler_logp is not None and row.correction is not None:
            gain = gain * row.correction(old - batch.sampler_logp, batch)
        self._measure(ratio.detach(), old, batch, stats)
        return gain

    def _penalty(self, kl: KL, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        """[N], 0 where the KL is in the reward."""
        logp, current = outputs.logp, outputs.logp.detach()
        count = logp.numel()
        if kl.against == "old":
            old = current if batch.old_logp is None else batch.old_logp
            stats.add("kl/old", KL("k3")(old, current).sum().item(), count)
            return batch.coefficients.get("kl", kl.beta) * kl(old, logp)
        assert batch.ref_logp is not None
        # Reported with one estimator whatever the row uses: k3 has no bias and little variance.
        stats.add("kl", KL("k3")(current, batch.ref_logp).sum().item(), count)
        if kl.where == "reward":
            return torch.zeros_like(logp)
        if kl.estimator != "exact":
            return batch.coefficients.get("kl", kl.beta) * kl(logp, batch.ref_logp)
        assert outputs.kl is not None
        stats.add("kl/exact", outputs.kl.detach().sum().item(), count)
        return batch.coefficients.get("kl", kl.beta) * outputs.kl

    def _measure(self, ratio: Tensor, old: Tensor, batch: Batch, stats: Stats) -> None:
        assert batch.advantage is not None
        count = ratio.numel()
        if batch.old_logp is None:
            exact = (ratio == 1) | ~old.isfinite()
            assert bool(exact.all()), "on policy the ratio is exactly 1"
            stats.add("ratio/first", ratio.double().sum().item(), count)
        stats.add("ratio", ratio.double().sum().item(), count)
        if count:
            stats.add("ratio/max", ratio.max().item())
            stats.add("ratio/min", ratio.min().item())
        self.row.surrogate.measure(ratio, batch.advantage, stats)
        if batch.sampler_logp is not None:
            # How far the engine's numbers are from the learner's: estimates KL(sampler || learner), unclipped.
            gap = (old - batch.sampler_logp).double()
            stats.add("sampler/kl", (gap.expm1() - gap).sum().item(), count)
            stats.add("sampler/gap", gap.abs().sum().item(), count)
            stats.add("sampler/ratio", gap.exp().sum().item(), count)
            stats.add("sampler/ratio/square", (2 * gap).exp().sum().item(), count)
            if count:
                stats.add("sampler/gap/max", gap.abs().max().item())


def policy_objective(row: Algorithm) -> Objective:
    """The loss that `row` stands for."""
    return PolicyObjective(row)
