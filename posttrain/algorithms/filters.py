"""Filters: the groups, rollouts and tokens that an update learns from.

S    rollouts    n_i    sampled tokens of rollout i    G    rollouts of a group    N    scored tokens of a micro-batch
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from posttrain.algorithms.earned_rewards import equal_rewards
from posttrain.core.batch import Scores
from posttrain.core.component import Component, Need, setting
from posttrain.core.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


COVARIANCE = (
    "The paper computes cov from the log-probabilities of each update, verl from those of each micro-batch; here it is "
    "computed once, at the step's start."
)


@dataclass(frozen=True)
class DynamicSampling(Component):
    """Keeps the number of groups with a signal constant as tasks become too easy or stay too hard.

    Groups whose rewards are all equal give no gradient and are replaced by others until the step is full (DAPO, arXiv
    2503.14476, eq. 11). A group is kept if its rewards differ and, where asked for, its share of successes is within
    (low, high). `rounds` is the budget: at most `rounds` times the step's prompts are sampled; then the step continues
    with the groups that were kept.
    """

    rounds: int = setting(
        4,
        "dynamic-sampling",
        "Dynamic sampling: replace groups without signal, up to N times --prompts (0: off).",
        above=0,
        absent=0,
    )
    low: float = setting(0.0, least=0, below=1)
    high: float = setting(1.0, above=0, most=1)
    source = "DAPO, arXiv 2503.14476, eq. 11"

    @property
    def formula(self) -> str:
        share = "" if (self.low, self.high) == (0, 1) else f" and {self.low:g} < share of successes < {self.high:g}"
        return f"only groups with unequal rewards{share}; at most {self.rounds} x the step's prompts are sampled"

    @property
    def exclusion_reason(self) -> str:
        """Return the reason why the filter drops a group whose rewards differ."""
        return f"the share of successes of its group is not between {self.low:g} and {self.high:g}"

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.GROUP} if (self.low, self.high) == (0, 1) else {Need.GROUP, Need.SUCCESS})

    def __call__(self, scores: Scores) -> Tensor:
        """Return whether the rollout's group is kept, bool [S]."""
        kept = ~equal_rewards(scores)
        if (self.low, self.high) != (0, 1):
            assert scores.success is not None
            groups, group = scores.group.unique(return_inverse=True)
            sums = torch.zeros(2, len(groups), dtype=torch.float64)
            sums[0].index_add_(0, group, scores.success.double())
            sums[1].index_add_(0, group, torch.ones_like(group, dtype=torch.float64))
            share = (sums[0] / sums[1])[group]
            kept &= (share > self.low) & (share < self.high)
        return kept


@dataclass(frozen=True)
class OverlongFilter(Component):
    """Avoids punishing good reasoning that was merely cut off.

    Truncated episodes are excluded from the loss and its denominators, but not from their group's statistics (DAPO, arXiv
    2503.14476, section 3.4). Truncated means out of tokens, context or turns, according to the stop reason.
    """

    formula = "without episodes that were cut off, which count in their group's statistics only"
    source = "DAPO, arXiv 2503.14476, section 3.4"

    def __call__(self, scores: Scores) -> Tensor:
        """Return whether the rollout is in the loss, bool [S]."""
        assert scores.truncated is not None
        return ~scores.truncated

    def why(self, sampled: int, stop: str) -> str:
        """Return the reason why an episode with `sampled` tokens, which ended by `stop`, is not in the loss."""
        return f"cut off after {sampled} tokens ({stop})"


class TokenSelection(Component):
    """Map from a step's tokens, before its updates, to the tokens that keep their advantage. It becomes 0 elsewhere, and
    every denominator stays that of the full batch.
    """

    option: ClassVar[str] = "a selection of tokens of your own"  # the option that selects it, for messages

    def __call__(self, own: Mapping[str, list[Tensor]], advantage: list[Tensor]) -> list[Tensor]:
        """Return the tokens that are kept, bool [n_i] for each rollout.

        `own`: outputs of the policy, by field of `Outputs`, those that are in `needs`; [n_i] for each rollout, as
        `advantage`.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class TopEntropy(TokenSelection):
    """Restricts the update to the tokens with high entropy, at which replies diverge.

    The `share` of the step's tokens with the highest entropy keep their advantage, that of the others becomes 0; every
    denominator stays that of the full batch (arXiv 2506.01939, eq. 6).
    """

    share: float = setting(
        0.2,
        "top-entropy",
        "Learn only from this share of the tokens, those with the highest entropy (1: all).",
        above=0,
        most=1,
        absent=1,
    )
    option = "--top-entropy"
    needs = frozenset({Need.ENTROPY})
    source = "Beyond the 80/20 rule, arXiv 2506.01939, eq. 6"

    @property
    def formula(self) -> str:
        return f"A = 0 except at the {self.share:g} of the step's tokens with the highest entropy"

    def __call__(self, own: Mapping[str, list[Tensor]], advantage: list[Tensor]) -> list[Tensor]:
        """Return the tokens that are kept, bool [n_i] for each rollout; ties at the threshold are kept."""
        entropy = own["entropy"]
        every = torch.cat([e.float().cpu() for e in entropy])
        kept = max(1, round(self.share * len(every)))
        threshold = every.topk(kept).values[-1]
        return [e.float().cpu() >= threshold for e in entropy]


@dataclass(frozen=True)
class CovarianceClip(TokenSelection):
    """Prevents entropy collapse: leaves out a few of the tokens whose update would lower the entropy most.

    These are likely tokens with a high advantage, or unlikely ones with a low one: the entropy falls by the covariance of
    lp and A over all tokens of the step (Clip-Cov, arXiv 2505.22617). cov = (old - mean(old)) (A - mean(A)). Of the
    tokens with low < cov < high, share x (tokens of the step) get advantage 0, at least one.

    The loss of the other tokens is the paper's -r A. verl's `clip_cov` keeps PPO's clip in it, max(-r A, -clip(r, 1 - low,
    1 + high) A), and a token that it clips is no candidate.
    """

    share: float = setting(
        2e-4,
        "clip-cov",
        "Clip-Cov: leave out this share of the tokens, among those whose update lowers the entropy most (0: none).",
        above=0,
        most=1,
        absent=0,
    )
    low: float = 1.0
    high: float = 5.0
    option = "--clip-cov"
    needs = frozenset({Need.OLD})
    source = "Clip-Cov, arXiv 2505.22617"
    interpretation = (
        "The paper draws the tokens that are left out at random; here they are evenly spaced in the order of cov, which "
        "needs no random numbers. " + COVARIANCE
    )

    @property
    def formula(self) -> str:
        return (
            f"A = 0 at {self.share:g} of the step's tokens, among those with {self.low:g} < cov < {self.high:g}, "
            "cov = (old - mean(old)) (A - mean(A))"
        )

    def __call__(self, own: Mapping[str, list[Tensor]], advantage: list[Tensor]) -> list[Tensor]:
        """Return the tokens that are kept, bool [n_i] for each rollout."""
        every = covariances(own["logp"], advantage)
        (candidates,) = torch.where((every > self.low) & (every < self.high))
        candidates = candidates[every[candidates].argsort(stable=True)]
        count = min(len(candidates), max(1, int(self.share * len(every))))
        places = torch.arange(count, dtype=torch.float64).add(0.5).mul(len(candidates) / max(1, count)).long()
        kept = torch.ones(len(every), dtype=torch.bool)
        kept[candidates[places]] = False
        return list(kept.split([len(a) for a in advantage]))


@dataclass(frozen=True)
class CovariancePenalty(Component):
    """Prevents entropy collapse: holds the tokens whose update would lower the entropy most near the old policy.

    coefficient x |lp - old| is subtracted from what is maximised at the `share` of the step's tokens with the highest cov
    = (old - mean(old)) (A - mean(A)), at least one (KL-Cov, arXiv 2505.22617). |lp - old| in place of the KL is as in the
    authors' code.
    """

    share: float = setting(
        2e-4,
        "kl-cov",
        "KL-Cov: penalise the distance to the old policy at this share of the tokens, those whose update lowers the "
        "entropy "
        "most (0: none).",
        above=0,
        most=1,
        absent=0,
    )
    coefficient: float = setting(1.0, above=0)
    needs = frozenset({Need.OLD})
    source = "KL-Cov, arXiv 2505.22617, and the authors' code"
    interpretation = COVARIANCE

    @property
    def formula(self) -> str:
        return (
            f"{self.coefficient:g} |lp - old| at the {self.share:g} of the step's tokens with the highest "
            "(old - mean(old)) (A - mean(A))"
        )

    def __call__(self, own: Mapping[str, list[Tensor]], advantage: list[Tensor]) -> list[Tensor]:
        """Return the weight of |lp - old| of each token, [n_i] for each rollout."""
        every = covariances(own["logp"], advantage)
        weight = torch.zeros_like(every)
        weight[every.topk(max(1, int(self.share * len(every)))).indices] = self.coefficient
        return [w.to(a.dtype) for w, a in zip(weight.split([len(a) for a in advantage]), advantage, strict=True)]


def covariances(logp: list[Tensor], advantage: list[Tensor]) -> Tensor:
    """Return each token's term in the covariance of log-probability and advantage, float64 [sum of n_i]."""
    lp, a = (torch.cat([own.double().cpu() for own in of]) for of in (logp, advantage))
    return (lp - lp.mean()) * (a - a.mean())


@dataclass(frozen=True)
class Replay(Component):
    """Uses each rollout more than once, where sampling is the main cost.

    Every update learns from as many rollouts as a minibatch of the step has, drawn from the last `capacity` ones. Older
    weights sampled most of them, so a correction, or a ratio to the sampler, is needed.
    """

    capacity: int = setting(
        4096,
        "replay",
        "Replay buffer, in rollouts (0: on-policy, only the step's own). A --correction, or a ratio with --old-policy "
        "sampler, corrects for the weights that sampled them.",
        above=0,
        absent=0,
    )
    source = "Lin 1992; soft actor-critic, arXiv 1812.05905, algorithm 1"

    @property
    def formula(self) -> str:
        return f"drawn from the last {self.capacity} rollouts"
