"""Ratio steps: transformations of each token's log ratio before it is exponentiated, applied left to right.

An algorithm has a sequence of steps because they do not commute: GSPO averages and then clips, GMPO clips and then
averages. Each step takes the log ratio [N] and the micro-batch and returns a log ratio [N]. Rollouts are whole within a
micro-batch and their tokens are contiguous, which `over_rollouts` relies on.

    N    scored tokens of a micro-batch    r    exp(log ratio)    n_i    sampled tokens of rollout i
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from posttrain.core.batch import Batch, Stats
from posttrain.core.component import Component, setting
from posttrain.core.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_LOG_RATIO = 40.0  # nats: e^40 = 2e17, whose square is still finite in float32


class RatioStep(Component):
    """Step of a ratio. `formula` is the right-hand side of "r_it = ..."."""

    @property
    def multiplies(self) -> bool:
        """Whether the result is a product over tokens: the ratio of probabilities of a whole prefix or reply."""
        return False

    def __call__(self, log_ratio: Tensor, batch: Batch) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class OverSequence(RatioStep):
    """Matches the unit of the ratio to the unit of the reward: one ratio for all tokens of a rollout.

    `mean`: the geometric mean of its tokens' ratios, free of length (GSPO, arXiv 2507.18071, eq. 7). `sum`: their product,
    the ratio of the whole response (DeepSeek-R1, arXiv 2501.12948, eq. 1); its spread grows with length.
    """

    reduce: Literal["mean", "sum"] = "mean"

    @property
    def multiplies(self) -> bool:
        return self.reduce == "sum"

    @property
    def source(self) -> str:
        return "GSPO, arXiv 2507.18071, eq. 7" if self.reduce == "mean" else "DeepSeek-R1, arXiv 2501.12948, eq. 1"

    @property
    def formula(self) -> str:
        inside = "sum_t (lp_t - old_t)"
        return f"exp({inside} / n_i)" if self.reduce == "mean" else f"exp({inside})"

    def __call__(self, log_ratio: Tensor, batch: Batch) -> Tensor:
        total, count, inverse = over_rollouts(log_ratio, batch.rollout)
        return (total / count if self.reduce == "mean" else total)[inverse]


@dataclass(frozen=True)
class SequenceValueTokenGradient(RatioStep):
    """Clips by the whole sequence, and allows advantages that differ between tokens.

    The value of the sequence's ratio with each token's own gradient (GSPO-token, arXiv 2507.18071, eq. 14).
    """

    formula = "sg(exp(sum_t (lp_t - old_t) / n_i)) exp(lp - sg(lp))"
    source = "GSPO-token, arXiv 2507.18071, eq. 14"

    def __call__(self, log_ratio: Tensor, batch: Batch) -> Tensor:
        total, count, inverse = over_rollouts(log_ratio.detach(), batch.rollout)
        return (total / count)[inverse] + log_ratio - log_ratio.detach()


@dataclass(frozen=True)
class PessimisticClip(RatioStep):
    """Limits the effect of single outlying tokens on the ratio of a sequence, with a wide clip per token.

    Each token's log ratio is clipped to (-width, width), but only where that lowers the objective (GMPO, arXiv 2507.20673,
    eq. 4).
    """

    width: float = setting(0.4, above=0)  # nats
    source = "GMPO, arXiv 2507.20673, eq. 4"

    @property
    def formula(self) -> str:
        return f"exp(sgn(A) min(sgn(A) (lp - old), sgn(A) clip(lp - old, -{self.width:g}, {self.width:g})))"

    def __call__(self, log_ratio: Tensor, batch: Batch) -> Tensor:
        assert batch.advantage is not None
        sign = torch.where(batch.advantage >= 0, 1.0, -1.0).to(log_ratio.dtype)
        return sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-self.width, self.width))


@dataclass(frozen=True)
class Causal(RatioStep):
    """Weighs each token by the probability of reaching it: the product of the ratios up to and including it.

    Exact for a reward earned at that token (`--weight-at reward`, Precup et al. 2000) and for an action value of the
    policy itself. Later rewards depend on later tokens, whose sampling it does not correct. Its variance grows with
    length.
    """

    formula = "exp(sum_{s<=t} (lp_s - old_s))"
    source = "Precup et al. 2000"
    multiplies = True

    def __call__(self, log_ratio: Tensor, batch: Batch) -> Tensor:
        _, sizes = batch.rollout.unique_consecutive(return_counts=True)
        return torch.cat([own.cumsum(0) for own in log_ratio.split(sizes.tolist())])


@dataclass(frozen=True)
class Correction(Component):
    """Corrects for an engine whose log-probabilities differ from the learner's: vLLM's, older weights (`async_steps`), or a
    mixture with uniform tokens (`epsilon_greedy`).

    A weight without a gradient, c = pi_old / mu per token. This gap is not the ratio's (pi / pi_old); the weight
    multiplies the objective, outside any clip.

    truncate   min(c, cap) for each token (truncated importance sampling, Yao et al. 2025, "Your efficient RL framework
               secretly brings you off-policy RL training").
    icepop     c within [1 / cap, cap], else 0: the token is masked (Ling team 2025, arXiv 2510.18855, eq. 3).
    sequence   1 if the geometric mean of c over the rollout is within [1 / cap, cap], else 0 for all of its tokens.
    sequence-truncate   min(product of c over the rollout, cap) for all of its tokens (Liu et al. 2025, "When speed kills
               stability").

    Below the cap, a weight per token is unbiased only for replies of one token, as it does not correct the tokens before
    and after. It removes much of the bias at little variance. The product over the rollout has no such bias, but its
    variance grows with length: nearly all weights of long replies are 0 or the cap.
    """

    kind: Literal["truncate", "icepop", "sequence", "sequence-truncate"] = setting(
        "truncate",
        "correction",
        "Importance weight for an engine that differs from the learner, lags behind (--async-steps, --replay) or explores "
        "(--epsilon-greedy). none: no weight. A weight per token is unbiased only for replies of one token.",
        absent="none",
    )
    cap: float = setting(2.0, "correction-cap", "Cap of the weight of --correction, above 1.", above=1)

    @property
    def formula(self) -> str:
        inside = f"within [{1 / self.cap:g}, {self.cap:g}]"
        return {
            "truncate": f"c = min(exp(old - mu), {self.cap:g})",
            "icepop": f"c = exp(old - mu) where {inside}, else 0",
            "sequence": f"c = 1 where exp(sum_t (old_t - mu_t) / n_i) is {inside}, else 0",
            "sequence-truncate": f"c = min(exp(sum_t (old_t - mu_t)), {self.cap:g})",
        }[self.kind]

    @property
    def source(self) -> str:
        return {
            "truncate": "truncated importance sampling, Yao et al. 2025",
            "icepop": "IcePop, arXiv 2510.18855, eq. 3",
            "sequence": "geometric sequence masking, Liu et al. 2025, When speed kills stability",
            "sequence-truncate": "sequence-level truncation, Liu et al. 2025, When speed kills stability",
        }[self.kind]

    def __call__(self, gap: Tensor, rollout: Tensor) -> Tensor:
        """Return weights [N], given gap [N] = old - mu, without a gradient, and the rollout of each token, [N]."""
        if self.kind in ("sequence", "sequence-truncate"):
            total, count, inverse = over_rollouts(gap, rollout)
            if self.kind == "sequence-truncate":
                return total.clamp(max=math.log(self.cap)).exp()[inverse]
            return ((total / count).abs() <= math.log(self.cap))[inverse].to(gap.dtype)
        ratio = gap.exp()
        if self.kind == "truncate":
            return ratio.clamp(max=self.cap)
        return ratio * (gap.abs() <= math.log(self.cap))


@dataclass(frozen=True)
class OffPolicyMask(Component):
    """Leaves out bad replies that are unlikely under the current policy, which teach little and destabilise training.

    M = 0 for the tokens with A < 0 of a rollout whose mean of old - lp is above `delta`, in nats per token, else 1; M
    multiplies the objective (DeepSeek-V3.2, arXiv 2512.02556, section 3.1). The mean estimates KL(old || policy). `old`
    is that of the ratio; the paper uses the sampler's probabilities, as --old-policy sampler does.
    """

    delta: float = setting(
        0.5,
        "off-policy-mask",
        "Leave out tokens with A < 0 of rollouts whose mean of old - lp is above this, in nats per token (0: none).",
        above=0,
        absent=0,
    )
    source = "DeepSeek-V3.2, arXiv 2512.02556, section 3.1"

    @property
    def formula(self) -> str:
        return f"M = 0 where A < 0 and sum_t (old_t - lp_t) / n_i > {self.delta:g}, else 1"

    def __call__(self, gap: Tensor, batch: Batch, stats: Stats) -> Tensor:
        """Return M [N], given gap [N] = old - lp, without a gradient. Add the share of masked tokens to the metrics."""
        assert batch.advantage is not None
        total, count, inverse = over_rollouts(gap, batch.rollout)
        masked = (batch.advantage < 0) & (total / count > self.delta)[inverse]
        stats.add("ratio/masked", masked.sum().item(), masked.numel())
        return (~masked).to(gap.dtype)


RATIOS: dict[str, tuple[RatioStep, ...]] = {
    "token": (),
    "sequence-mean": (OverSequence("mean"),),
    "sequence-sum": (OverSequence("sum"),),
    "sequence-value": (SequenceValueTokenGradient(),),
    "causal": (Causal(),),
    "geometric": (PessimisticClip(), OverSequence("mean")),
}
"""Choices of --ratio."""


def over_rollouts(x: Tensor, rollout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (sums of x [N] over each rollout of the micro-batch [R], token counts [R], rollout of each token [N])."""
    _, inverse, count = rollout.unique_consecutive(return_inverse=True, return_counts=True)
    total = torch.zeros(len(count), dtype=x.dtype, device=x.device).index_add(0, inverse, x)
    return total, count.to(x.dtype), inverse
