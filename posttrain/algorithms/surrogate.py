"""Surrogate objectives: the quantity maximised for each token. Each class has one idea.

A component is a callable frozen dataclass. Its fields are its settings, `formula` is its equation in plain mathematics,
and `source` is the origin of the equation. Components get the scoreboard or flat tensors of scored tokens, never a
mask, a prompt or a world size.

    N    scored tokens of a micro-batch    S = B    rollouts of the optimizer batch    n_i    sampled tokens of rollout i
    lp   current log-probability           old      the learner's before the update    A      advantage
    r    the ratio, exp(lp - old) after the ratio steps                                sg     without a gradient
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from posttrain.core.batch import Batch, Outputs, Stats
from posttrain.core.component import Component, setting
from posttrain.core.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


class Surrogate(Component):
    """Surrogate objective, maximised for each token."""

    uses_ratio = True
    samples = True  # whether it is a mean over sampled tokens, and so depends on the weights that sampled them

    @property
    def clips(self) -> bool:
        """Whether ratios far from 1 are treated differently, which has no effect if every ratio is 1."""
        return False

    def __call__(self, ratio: Tensor, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the surrogate [N], given the ratio [N], the models' outputs, and the batch with `old_logp` set."""
        raise NotImplementedError

    def measure(self, ratio: Tensor, outputs: Outputs, batch: Batch, stats: Stats) -> None:
        """Add the metrics of this component."""


@dataclass(frozen=True)
class LogProbability(Surrogate):
    """The plain policy gradient, for rollouts of the current policy: lp A (Williams 1992, eq. 4)."""

    formula = "lp A"
    source = "REINFORCE, Williams 1992, eq. 4"
    uses_ratio = False

    def __call__(self, ratio: Tensor, outputs: Outputs, batch: Batch) -> Tensor:
        return outputs.logp * _advantage(batch)


@dataclass(frozen=True)
class ImportanceRatio(Surrogate):
    """Lets several updates use the same rollouts, where another component keeps the steps small.

    r A: importance sampling without a clip (TRPO's surrogate, arXiv 1502.05477, eq. 14).
    """

    formula = "r A"
    source = "TRPO, arXiv 1502.05477, eq. 14"

    def __call__(self, ratio: Tensor, outputs: Outputs, batch: Batch) -> Tensor:
        return ratio * _advantage(batch)


@dataclass(frozen=True)
class Clip(Surrogate):
    """Keeps several updates on the same rollouts from moving the policy too far: gains beyond the clip have no gradient.

    min(r A, clip(r, 1 - low, 1 + high) A), a pessimistic bound (PPO, arXiv 1707.06347, eq. 7).

    high > low lets the probability of rare tokens rise further: DAPO's clip-higher (arXiv 2503.14476, eq. 10). `dual`,
    above 1, bounds the loss of a bad token: where A < 0, the objective is at least dual A (Ye et al. 2020, arXiv
    1912.09729, eq. 5).
    """

    low: float = setting(0.2, "clip-low", "Clip the ratio below 1 minus this.", least=0, most=1)
    high: float = setting(0.2, "clip-high", "Clip the ratio above 1 plus this.", least=0)
    dual: float | None = setting(
        None,
        "clip-dual",
        "Dual clip: where A < 0, bound the objective by this times A; above 1 (0: none).",
        above=1,
        off=0,
    )

    @property
    def clips(self) -> bool:
        return True

    @property
    def formula(self) -> str:
        bound = f"min(r A, clip(r, {1 - self.low:g}, {1 + self.high:g}) A)"
        return bound if self.dual is None else f"{bound}, where A < 0 at least {self.dual:g} A"

    @property
    def source(self) -> str:
        higher = "; clip-higher: DAPO, arXiv 2503.14476, eq. 10" if self.high > self.low else ""
        dual = "; dual clip: arXiv 1912.09729, eq. 5" if self.dual is not None else ""
        return f"PPO, arXiv 1707.06347, eq. 7{higher}{dual}"

    def __call__(self, ratio: Tensor, outputs: Outputs, batch: Batch) -> Tensor:
        advantage = _advantage(batch)
        bound = torch.minimum(ratio * advantage, ratio.clamp(1 - self.low, 1 + self.high) * advantage)
        if self.dual is None:
            return bound
        return torch.where(advantage < 0, torch.maximum(bound, self.dual * advantage), bound)

    def measure(self, ratio: Tensor, outputs: Outputs, batch: Batch, stats: Stats) -> None:
        """Add the shares of tokens that the clip leaves without a gradient."""
        advantage = _advantage(batch)
        low = ((ratio < 1 - self.low) & (advantage < 0)).sum().item()
        high = ((ratio > 1 + self.high) & (advantage > 0)).sum().item()
        stats.add("ratio/clipped_low", low, ratio.numel())
        stats.add("ratio/clipped_high", high, ratio.numel())
        if self.dual is not None:
            dual = ((ratio > self.dual) & (advantage < 0)).sum().item()
            stats.add("ratio/clipped_dual", dual, ratio.numel())


@dataclass(frozen=True)
class WeightedLogProbability(Surrogate):
    """Keeps the gradient of every off-policy token: a capped weight shrinks a gradient that PPO's clip would remove.

    sg(r) lp A, the off-policy policy gradient, its importance weight without a gradient. With `high`, the weight is
    capped at 1 + high (CISPO, arXiv 2506.13585, eq. 4). The cap applies to the weight, so it is always above 1.

    at   the factor that a weight r_t multiplies. `token`: the advantage of token t. `reward`: the reward earned
         at token t, A_t - A_{t+1}, wherever that counts: sg(sum_{k>=t} r_k (A_k - A_{k+1})) lp, A_{n+1} = 0: per-decision
         importance sampling (Precup et al. 2000).

    The weight that makes the expected gradient the true one, for any sampling policy, depends on A (r without a cap):

    --ratio causal,       each reward by the product of ratios up to it: exact for sums of rewards, also less a baseline.
      --weight-at reward  As the next where only the whole reply is rewarded, and usually less variance where its steps are.
    --ratio sequence-sum  the product over the whole reply: exact for every A that is exact on policy.
    --ratio causal,       the product up to the token: exact where A is the action value of the policy itself, as of an
      --weight-at token   exact critic (--advantage gae --gae-lambda 0; one that learns from older rollouts is of their
                          weights). Of rewards that come later, where other weights have chosen the tokens between, it is
                          an approximation.
    --ratio token         the token's own ratio (Degris et al. 2012): an approximation also then, for the tokens before it
                          are taken as they were sampled. Exact for replies of one token.
    """

    high: float | None = setting(None, "clip-high", "Clip the ratio above 1 plus this.", least=0)
    at: Literal["token", "reward"] = setting(
        "token",
        "weight-at",
        "Ratios weigh the advantage of their token, or the reward that is earned at it. With --ratio causal, reward is "
        "exact for replies that any policy has sampled.",
    )

    @property
    def clips(self) -> bool:
        return self.high is not None

    @property
    def formula(self) -> str:
        r = "r" if self.at == "token" else "r_k"
        weight = r if self.high is None else f"min({r}, {1 + self.high:g})"
        return f"sg({weight}) lp A" if self.at == "token" else f"sg(sum_{{k>=t}} {weight} (A_k - A_{{k+1}})) lp"

    @property
    def source(self) -> str:
        if self.high is not None:
            return "CISPO, MiniMax-M1, arXiv 2506.13585, eq. 4"
        return "Precup et al. 2000, per-decision" if self.at == "reward" else "Precup et al. 2000; Degris et al. 2012"

    def __call__(self, ratio: Tensor, outputs: Outputs, batch: Batch) -> Tensor:
        weight, advantage = ratio.detach(), _advantage(batch)
        if self.high is not None:
            weight = weight.clamp(max=1 + self.high)
        if self.at == "token":
            return weight * outputs.logp * advantage
        _, sizes = batch.rollout.unique_consecutive(return_counts=True)
        rollouts = zip(weight.split(sizes.tolist()), advantage.split(sizes.tolist()), strict=True)
        earned = [(w * (a - torch.cat([a[1:], 0 * a[:1]]))).flip(0).cumsum(0).flip(0) for w, a in rollouts]
        return torch.cat([*earned, weight[:0]]) * outputs.logp

    def measure(self, ratio: Tensor, outputs: Outputs, batch: Batch, stats: Stats) -> None:
        if self.high is not None:
            stats.add("ratio/clipped_high", (ratio > 1 + self.high).sum().item(), ratio.numel())


@dataclass(frozen=True)
class SoftGate(Surrogate):
    """Fades a token's gradient out smoothly as its ratio moves away from 1, where a clip cuts it off.

    (4 / tau) sigma(tau (r - 1)) A, whose gradient at r = 1 is that of r A (SAPO, arXiv 2511.20347, eq. 5 and 6). tau is
    `positive` where A > 0 and `negative` elsewhere: a larger tau fades faster. It suits tokens that are pushed down,
    since that raises many other tokens.
    """

    positive: float = setting(1.0, above=0)  # temperature where A > 0
    negative: float = setting(1.05, above=0)  # temperature elsewhere
    source = "SAPO, arXiv 2511.20347, eq. 5 and 6"

    @property
    def clips(self) -> bool:
        return True

    @property
    def formula(self) -> str:
        return f"(4 / tau) sigma(tau (r - 1)) A, tau = {self.positive:g} where A > 0, else {self.negative:g}"

    def __call__(self, ratio: Tensor, outputs: Outputs, batch: Batch) -> Tensor:
        advantage = _advantage(batch)
        tau = _either(advantage > 0, self.positive, self.negative, ratio)
        return 4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage


@dataclass(frozen=True)
class DivergenceMask(Surrogate):
    """Holds each token within a trust region of probabilities, not of ratios: a rare token may double its probability.

    M r A with M = 0 for a token that has left the region in the direction that its advantage pushes (A > 0 and r > 1, or
    A < 0 and r < 1), else 1 (DPPO, arXiv 2602.04879, with its binary divergences of the sampled token against all others,
    p and q its probabilities now and before). `tv`: |p - q|. `kl`: q log(q / p) + (1 - q) log((1 - q) / (1 - p)).

    low, high   maximum divergence where A < 0, and where A > 0. The authors' code has 0.15 for tv and 0.05 for kl.
    """

    divergence: Literal["tv", "kl"] = "tv"
    low: float = setting(0.15, least=0)
    high: float = setting(0.15, least=0)
    source = "DPPO, arXiv 2602.04879, binary divergences"

    @property
    def clips(self) -> bool:
        return True

    @property
    def formula(self) -> str:
        binary = {
            "tv": "abs(p - q)",
            "kl": "q log(q / p) + (1 - q) log((1 - q) / (1 - p))",
        }[self.divergence]
        bound = f"{self.high:g}" if self.low == self.high else f"{self.high:g} ({self.low:g} where A < 0)"
        return f"M r A, M = 0 where D > {bound} and (lp - old) A > 0, else 1; D = {binary}, p = exp(lp), q = exp(old)"

    def __call__(self, ratio: Tensor, outputs: Outputs, batch: Batch) -> Tensor:
        assert batch.old_logp is not None
        advantage, logp = _advantage(batch), outputs.logp.detach()
        outside = self._outside(logp, batch.old_logp, advantage)
        return torch.where(outside, 0.0, ratio * advantage)

    def _outside(self, logp: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
        """Return whether the token is masked, bool [N]."""
        bound = _either(advantage > 0, self.high, self.low, logp)
        return ((logp - old) * advantage > 0) & (self._distance(logp, old) > bound)

    def _distance(self, logp: Tensor, old: Tensor) -> Tensor:
        if self.divergence == "tv":
            return (logp.exp() - old.exp()).abs()
        least = torch.finfo(logp.dtype).tiny  # with a probability of 1 the other tokens have probability 0
        others, before = (-torch.expm1(x.clamp(max=-least)) for x in (logp, old))
        return old.exp() * (old - logp) + before * (before.log() - others.log())

    def measure(self, ratio: Tensor, outputs: Outputs, batch: Batch, stats: Stats) -> None:
        """Add the shares of tokens that the mask leaves without a gradient."""
        assert batch.old_logp is not None
        advantage = _advantage(batch)
        outside = self._outside(outputs.logp.detach(), batch.old_logp, advantage)
        stats.add("ratio/clipped_low", (outside & (advantage < 0)).sum().item(), ratio.numel())
        stats.add("ratio/clipped_high", (outside & (advantage > 0)).sum().item(), ratio.numel())


@dataclass(frozen=True)
class GammaWeight(Surrogate):
    """Uses replies of far older policies: the weight of a whole reply peaks near ratio 1, and fades beyond it.

    sg(r^k exp(lambda (1 - r))) lp A, r the ratio of the whole reply, not normalised by its length (VESPO, arXiv 2602.10693).
    The weight is 1 at r = 1 and largest at k / lambda. Replies with A < 0 have a k and a lambda of their own.
    """

    power: float = setting(2.0, above=0)  # k where A >= 0
    decay: float = setting(3.0, above=0)  # lambda where A >= 0
    negative_power: float = setting(3.0, above=0)  # k where A < 0
    negative_decay: float = setting(2.0, above=0)  # lambda where A < 0
    source = "VESPO, arXiv 2602.10693, and the authors' code"

    @property
    def clips(self) -> bool:
        return True

    @property
    def formula(self) -> str:
        return (
            f"sg(r^k exp(lambda (1 - r))) lp A, k = {self.power:g} and lambda = {self.decay:g}, "
            f"where A < 0 {self.negative_power:g} and {self.negative_decay:g}"
        )

    def __call__(self, ratio: Tensor, outputs: Outputs, batch: Batch) -> Tensor:
        advantage, r = _advantage(batch), ratio.detach()
        bad = advantage < 0
        power = _either(bad, self.negative_power, self.power, r)
        decay = _either(bad, self.negative_decay, self.decay, r)
        return (power * r.log() + decay * (1 - r)).exp() * outputs.logp * advantage


@dataclass(frozen=True)
class ExpectedQ(Surrogate):
    """Learns from the values of all tokens instead of only the sampled one, which removes the variance of sampling.

    sum_a pi(a) min_k Q_k(a), exact over the vocabulary: discrete soft actor-critic (arXiv 1910.07207, eq. 12).
    """

    formula = "sum_a pi(a) min(Q_1(a), Q_2(a))"
    source = "discrete soft actor-critic, Christodoulou 2019, arXiv 1910.07207, eq. 12"
    interpretation = (
        "Actions are tokens of a vocabulary, so the expectation over them is exact: the papers' Gaussian policy and its "
        "reparametrised gradient do not apply."
    )
    uses_ratio = False
    samples = False
    wants = frozenset({"expected_q"})

    def __call__(self, ratio: Tensor, outputs: Outputs, batch: Batch) -> Tensor:
        assert outputs.expected_q is not None
        return outputs.expected_q


SURROGATES: dict[str, Surrogate] = {
    "clip": Clip(),
    "ratio": ImportanceRatio(),
    "log-probability": LogProbability(),
    "weighted": WeightedLogProbability(),
    "soft-gate": SoftGate(),
    "divergence-mask": DivergenceMask(),
    "gamma-weight": GammaWeight(),
    "expected-q": ExpectedQ(),
}
"""Choices of --surrogate."""


def _advantage(batch: Batch) -> Tensor:
    assert batch.advantage is not None
    return batch.advantage


def _either(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """Return one of two numbers for each token, [N], in the precision of `like`."""
    return torch.where(condition, like.new_tensor(yes), like.new_tensor(no))
