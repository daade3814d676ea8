"""Policy-gradient algorithms as sets of components, and the objective that all of them share.

A new paper is one entry of the table and, if it has a new idea, one component. No code checks an algorithm's name.

    N    scored tokens of a micro-batch    S = B    rollouts of the optimizer batch
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from posttrain.algorithms.advantages import ADVANTAGES
from posttrain.algorithms.aggregate import AGGREGATES, Aggregate
from posttrain.algorithms.algorithm_base import AlgorithmBase
from posttrain.algorithms.branching import Branching
from posttrain.algorithms.credit import Advantage, Unrewarded
from posttrain.algorithms.critic_loss import CriticLoss
from posttrain.algorithms.filters import CovariancePenalty, DynamicSampling, OverlongFilter, Replay, TokenSelection
from posttrain.algorithms.moving_models import MovingReference
from posttrain.algorithms.penalty import KL, EarlyStop, Entropy
from posttrain.algorithms.ratio import LARGEST_LOG_RATIO, RATIOS, Correction, OffPolicyMask, RatioStep, over_rollouts
from posttrain.algorithms.redistribution import Redistribution
from posttrain.algorithms.shaping import Shaping
from posttrain.algorithms.surrogate import SURROGATES, Surrogate
from posttrain.algorithms.teacher import Distillation
from posttrain.algorithms.token_weights import FORMULAS, SOURCES, TokenWeight, weighed_likelihood
from posttrain.core.batch import Batch, Outputs, Stats
from posttrain.core.component import Component, Need, setting
from posttrain.core.lazy_torch import torch
from posttrain.core.trust_region import TrustRegion

if TYPE_CHECKING:
    from torch import Tensor

    from posttrain.core.protocols import Objective


@dataclass(frozen=True)
class Imitation(Component):
    """Adds a likelihood loss on rare successes to the signal of their advantage.

    coefficient x the negative log-likelihood of successes, a mean over their tokens (VAPO, arXiv 2504.05118, eq. 11 and 12).
    """

    coefficient: float = setting(
        0.1, "imitation", "Weight of the likelihood of right replies in the loss (0: none).", least=0, absent=0
    )
    needs = frozenset({Need.SUCCESS})
    source = "VAPO, arXiv 2504.05118, eq. 11 and 12"

    @property
    def formula(self) -> str:
        return f"{self.coefficient:g} x mean of -lp over the tokens of rollouts that are a success"


@dataclass(frozen=True)
class Pretraining(Component):
    """Retains abilities from pretraining during RL.

    coefficient x the language-model loss on the user's texts, in every update (PPO-ptx, InstructGPT, arXiv 2203.02155,
    eq. 2).

    weight        of each token: see `posttrain.algorithms.token_weights`. mask_prompt   whether only the response is
    learned, in rows with prompt and response.
    """

    coefficient: float = setting(
        1.0, "ptx-coefficient", "Weight of the likelihood of --ptx texts in the loss.", least=0
    )
    rows: int = setting(16, above=0)  # number of texts in each update
    weight: TokenWeight = setting(
        "equal",
        "ptx-weight",
        "Weight of each token of --ptx texts, without a gradient: equal, its probability p (DFT), or uncertainty, p (1 - "
        "p) "
        "(CHORD).",
    )
    mask_prompt: bool = False

    @property
    def source(self) -> str:
        return "; ".join(filter(None, ["InstructGPT, arXiv 2203.02155, eq. 2", SOURCES[self.weight]]))

    @property
    def formula(self) -> str:
        texts = "responses of demonstrations" if self.mask_prompt else "pretraining texts"
        weight = f"-{FORMULAS[self.weight]}lp"
        return f"{self.coefficient:g} x mean of {weight} over the tokens of {self.rows} {texts}"


@dataclass(frozen=True)
class Algorithm(AlgorithmBase):
    """Policy-gradient algorithm: an entry of `policy_table`."""

    advantage: Advantage = setting(flag="advantage", help="Advantage estimator; gae adds a critic.", choices=ADVANTAGES)
    surrogate: Surrogate = setting(
        flag="surrogate",
        help="Surrogate objective: min(r A, clip(r) A), r A, lp A, sg(r) lp A, or another with a soft or a masked ratio.",
        choices=SURROGATES,
    )
    aggregate: Aggregate = setting(flag="aggregate", help="Aggregation of the loss over tokens.", choices=AGGREGATES)
    ratio: tuple[RatioStep, ...] = setting(  # applied left to right to the log ratio; they do not commute
        (),
        "ratio",
        "Importance ratio: per token or per sequence. geometric is GMPO's clipped geometric mean.",
        choices=RATIOS,
    )
    old: Literal["start", "sampler"] = setting(
        "start",
        "old-policy",
        "Denominator of the ratio: log-probabilities under the weights at the start of the step, or under the sampler's.",
    )
    # for an engine whose log-probabilities differ from the learner's, or whose weights are older
    correction: Correction | None = None
    off_policy_mask: OffPolicyMask | None = None
    kl: KL | None = None
    entropy: Entropy | None = None
    select: tuple[TokenSelection, ...] = ()  # tokens keep their advantage if all selections keep them
    covariance: CovariancePenalty | None = None
    critic: CriticLoss | None = setting(None, brought="--advantage gae")
    teacher: Distillation | None = setting(None, brought="posttrain distill --teacher FOLDER")
    branching: Branching | None = None
    sampling: DynamicSampling | None = None
    filters: tuple[OverlongFilter, ...] = setting(  # rollouts that are in the loss
        (),
        "overlong-filter",
        "Exclude truncated episodes from the loss.",
        choices={"true": (OverlongFilter(),), "false": ()},
    )
    shaping: tuple[Shaping, ...] = ()  # added to the reward
    redistribution: Redistribution | None = None  # of the final reward over tokens
    imitation: Imitation | None = None
    pretraining: Pretraining | None = setting(None, brought="--ptx FILE")
    trust_region: TrustRegion | None = None
    early_stop: EarlyStop | None = None
    replay: Replay | None = None
    moving: MovingReference | None = None
    epochs: int = setting(1, "epochs", "Passes over the rollouts of a step.", above=0, first_hour=True)
    minibatches: int = setting(1, "minibatches", "Optimizer updates per pass.", above=0, first_hour=True)
    stated: str = ""  # the number of updates in the paper, or in its authors' code
    idea: str = ""  # what is new about it, in at most eight words
    best_for: str = ""  # when to take it, in at most twelve words

    @property
    def on_policy(self) -> bool:
        """Whether the rollouts of a step serve one update only, so that old and current log-probabilities coincide."""
        return self.epochs * self.minibatches == 1

    @property
    def looks_back(self) -> bool:
        """Whether later updates of a step need the log-probabilities from its start."""
        weighed = self.kl is not None and self.kl.weighed
        parts = self.off_policy_mask, self.covariance, self.early_stop
        compares = self.surrogate.uses_ratio or weighed or any(part is not None for part in parts)
        return compares and not self.on_policy and self.old == "start"

    @property
    def needs(self) -> frozenset[Need]:
        found = super().needs
        # with one update per step the old policy is the current one
        return found | {Need.OLD} if self.looks_back else found

    @property
    def reinforces(self) -> bool:
        """Whether the loss reinforces sampled tokens, by rewards or by a teacher's log-probabilities."""
        return not isinstance(self.advantage, Unrewarded) or (self.teacher is not None and self.teacher.sampled)

    @property
    def weighs_older(self) -> bool:
        """Whether the expected gradient is independent of the weights that sampled, as far as corrections allow."""
        exact = not self.reinforces or not self.surrogate.samples  # over the vocabulary, for any sampled tokens
        return exact or self.correction is not None or (self.old == "sampler" and self.surrogate.uses_ratio)

    @property
    def weighs_updates(self) -> bool:
        """Whether it is independent of the changes of the weights in earlier updates of the same step."""
        return self.weighs_older or (self.surrogate.uses_ratio and self.replay is None)

    @property
    def multiplies(self) -> bool:
        """Whether the ratio is an unbounded product over tokens, which is exact for any sampling policy."""
        return self.surrogate.uses_ratio and not self.surrogate.clips and any(step.multiplies for step in self.ratio)

    @property
    def widens(self) -> bool:
        """Whether an entropy bonus is in the loss."""
        return self.entropy is not None and self.entropy.where == "loss"

    @property
    def moves_every_token(self) -> bool:
        """Whether rollouts can have a gradient, or bound the step, even if their advantage is 0."""
        penalised = (self.kl is not None and self.kl.where == "loss") or self.widens
        region = self.trust_region is not None  # its KL is over all tokens, not only those with an advantage
        others = self.critic, self.imitation, self.teacher, self.surrogate.wants
        return penalised or region or any(others)


@dataclass(frozen=True)
class PolicyObjective:
    """Loss of one micro-batch: minus the weighted sum of the surrogate, plus the penalties."""

    algorithm: Algorithm

    @property
    def wants(self) -> frozenset[str]:
        return self.algorithm.wants

    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        """Return the loss, a scalar. Metrics are averaged over the tokens of the batch."""
        algorithm = self.algorithm
        if algorithm.old == "sampler" and batch.advantage is not None:
            assert batch.sampler_logp is not None, "rollouts were sampled"
            batch = replace(batch, old_logp=batch.sampler_logp)
        if batch.advantage is None:  # only text to imitate
            assert batch.imitate is not None and algorithm.pretraining is not None
            stats.add("ptx/nll", -outputs.logp.detach().sum().item(), outputs.logp.numel())
            return -(batch.imitate * weighed_likelihood(outputs.logp, algorithm.pretraining.weight)).sum()
        imitated = outputs.logp.new_zeros(())
        if batch.imitate is not None:
            imitated = -(batch.imitate * outputs.logp).sum()
        loss = outputs.logp.new_zeros(())
        if algorithm.critic is not None:
            loss = loss + algorithm.critic.coefficient * (batch.weight * algorithm.critic(outputs, batch, stats)).sum()
        if batch.coefficients.get("policy", 1.0) == 0:  # the critic's warm-up
            return loss
        gain = self._surrogate(outputs, batch, stats)
        if not algorithm.reinforces:
            gain = torch.zeros_like(gain)
        if algorithm.teacher is not None and not algorithm.teacher.sampled:
            distance = algorithm.teacher.distance(outputs)
            stats.add("divergence", distance.detach().sum().item(), distance.numel())
            gain = gain - algorithm.teacher.coefficient * distance
        if algorithm.kl is not None:
            gain = gain - self._penalty(algorithm.kl, outputs, batch, stats)
        if batch.held is not None and batch.old_logp is not None:
            gain = gain - batch.held * (outputs.logp - batch.old_logp).abs()
        if algorithm.entropy is not None and algorithm.widens:
            assert outputs.entropy is not None
            gain = gain + batch.coefficients.get("entropy", algorithm.entropy.coefficient) * outputs.entropy
            stats.add("entropy/policy", outputs.entropy.detach().sum().item(), outputs.entropy.numel())
        return loss + imitated - (batch.weight * gain).sum()

    def _surrogate(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        """Return the surrogate per token, [N], with the correction for the engine's log-probabilities."""
        algorithm, logp = self.algorithm, outputs.logp if self.algorithm.reinforces else outputs.logp.detach()
        first = batch.old_logp is None  # first update of the step: the old policy is the current one
        old = logp.detach() if batch.old_logp is None else batch.old_logp
        start = logp.detach() if algorithm.old == "sampler" else old
        batch = replace(batch, old_logp=old)
        if algorithm.teacher is not None and algorithm.teacher.sampled:
            assert batch.advantage is not None and batch.teacher_logp is not None
            stats.add("divergence", (start - batch.teacher_logp).sum().item(), start.numel())
            # with log-probabilities of older weights it would not be the gradient of the reverse KL
            batch = replace(batch, advantage=batch.advantage + algorithm.teacher.worth(batch.teacher_logp, start))
        log_ratio = logp - old
        for step in algorithm.ratio:
            log_ratio = step(log_ratio, batch)
        # Far beyond any clip; without this limit a product over a sequence overflows, and its gradient is NaN.
        ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()
        gain = algorithm.surrogate(ratio, replace(outputs, logp=logp), batch)
        if batch.sampler_logp is not None and algorithm.correction is not None:
            gain = gain * algorithm.correction(old - batch.sampler_logp, batch.rollout)
        if algorithm.off_policy_mask is not None:
            gain = gain * algorithm.off_policy_mask((old - logp).detach(), batch, stats)
        self._measure(ratio.detach(), start, first, outputs, batch, stats)
        return gain

    def _penalty(self, kl: KL, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        """Return the KL penalty per token, [N]; 0 if the KL is in the reward."""
        logp, current = outputs.logp, outputs.logp.detach()
        count = logp.numel()
        if kl.against == "old":
            old = current if batch.old_logp is None else batch.old_logp
            stats.add("kl/old", KL("k3")(old, current).sum().item(), count)
            return batch.coefficients.get("kl", kl.beta) * self._estimate(kl, old, logp, batch)
        assert batch.ref_logp is not None
        # Reported with the same estimator for all algorithms: k3 has no bias and little variance.
        stats.add("kl", KL("k3")(current, batch.ref_logp).sum().item(), count)
        if kl.where == "reward":
            return torch.zeros_like(logp)
        if kl.estimator != "exact":
            estimate = self._estimate(kl, logp, batch.ref_logp, batch)
            if kl.weighed:
                old = current if batch.old_logp is None else batch.old_logp
                estimate = estimate * (logp - old).clamp(max=LARGEST_LOG_RATIO).exp()
            return batch.coefficients.get("kl", kl.beta) * estimate
        assert outputs.kl is not None
        stats.add("kl/exact", outputs.kl.detach().sum().item(), count)
        return batch.coefficients.get("kl", kl.beta) * outputs.kl

    @staticmethod
    def _estimate(kl: KL, logp: Tensor, other: Tensor, batch: Batch) -> Tensor:
        """Return the KL estimate of each token, [N]: the token's own, or that of its whole response."""
        if kl.unit == "token":
            return kl(logp, other)
        total, _, inverse = over_rollouts(other - logp, batch.rollout)
        return kl(torch.zeros_like(total), total.clamp(max=LARGEST_LOG_RATIO))[inverse]

    def _measure(self, ratio: Tensor, start: Tensor, first: bool, outputs: Outputs, batch: Batch, stats: Stats) -> None:
        """Add the metrics of the ratio.

        `start`: log-probabilities at the step's start, or the current ones if those are unknown.
        """
        count = ratio.numel()
        if first:
            exact = (ratio == 1) | ~start.isfinite()
            assert bool(exact.all()), "on policy the ratio is exactly 1"
            stats.add("ratio/first", ratio.double().sum().item(), count)
        stats.add("ratio", ratio.double().sum().item(), count)
        if count:
            stats.add("ratio/max", ratio.max().item())
            stats.add("ratio/min", ratio.min().item())
        if outputs.top is not None:
            stats.add("top_mass", outputs.top.double().sum().item(), count)
        self.algorithm.surrogate.measure(ratio, outputs, batch, stats)
        if self.algorithm.early_stop is not None:
            assert batch.old_logp is not None
            moved = (outputs.logp.detach() - batch.old_logp).double()
            stats.add("kl/step", (moved.expm1() - moved).sum().item(), count)
        if batch.sampler_logp is not None:
            # Difference of the engine's log-probabilities from the learner's: estimates of KL(sampler || learner).
            gap = (start - batch.sampler_logp).double()
            stats.add("sampler/kl", (gap.expm1() - gap).sum().item(), count)
            stats.add("sampler/gap", gap.abs().sum().item(), count)
            stats.add("sampler/ratio", gap.exp().sum().item(), count)
            stats.add("sampler/ratio/square", (2 * gap).exp().sum().item(), count)
            if count:
                stats.add("sampler/gap/max", gap.abs().max().item())


if TYPE_CHECKING:
    _proof: Callable[..., Objective] = PolicyObjective
