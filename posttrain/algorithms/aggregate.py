"""Aggregation: the weight of each token of a rollout in the loss. Only this module computes a denominator.

A component is a callable frozen dataclass. Its fields are its settings, `formula` is its equation in plain mathematics,
and `source` is the origin of the equation.

    S = B    rollouts of the optimizer batch    n_i    sampled tokens of rollout i
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from posttrain.core.batch import Scores
from posttrain.core.component import Component, Need, RunLimits, setting
from posttrain.core.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


class Aggregate(Component):
    """Map from `Scores` to the weight of each token of a rollout in the loss, float32 [S]."""

    def __call__(self, scores: Scores) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class SequenceMean(Aggregate):
    """Gives every rollout the same weight, whatever its length, so tokens of long replies count less.

    1 / (B n_i) (GRPO, DeepSeekMath, arXiv 2402.03300, eq. 3).
    """

    formula = "1 / (B n_i)"
    source = "GRPO, DeepSeekMath, arXiv 2402.03300, eq. 3"

    def __call__(self, scores: Scores) -> Tensor:
        return 1.0 / (len(scores.length) * scores.length)


@dataclass(frozen=True)
class TokenMean(Aggregate):
    """Gives every token the same weight, so that the tokens of long replies are not diluted.

    1 / sum_j n_j (DAPO, arXiv 2503.14476, eq. 12).
    """

    formula = "1 / sum_j n_j"
    source = "PPO, arXiv 1707.06347, eq. 7; DAPO, arXiv 2503.14476, eq. 12"

    def __call__(self, scores: Scores) -> Tensor:
        return (1.0 / scores.length.sum()).expand_as(scores.length)


@dataclass(frozen=True)
class PromptMean(Aggregate):
    """Gives every prompt the same weight, so that prompts with long replies do not dominate the step.

    1 / (prompts x tokens of the prompt's group) (ScaleRL, arXiv 2510.13786, section 3.2).
    """

    formula = "1 / (prompts x tokens of the prompt's group)"
    source = "between GRPO's and DAPO's: ScaleRL, arXiv 2510.13786, section 3.2"

    def __call__(self, scores: Scores) -> Tensor:
        groups, group = scores.group.unique(return_inverse=True)
        tokens = torch.zeros(len(groups), dtype=scores.length.dtype).index_add_(0, group, scores.length)
        return 1.0 / (len(groups) * tokens[group])


@dataclass(frozen=True)
class SequenceSum(Aggregate):
    """Treats a whole response as one action: the unbiased policy gradient, whose noise grows with length.

    1 / B for each token, so that log-probabilities are summed over a response (REINFORCE; RLOO, arXiv 2402.14740, eq. 7).
    """

    formula = "1 / B"
    source = "REINFORCE; RLOO, arXiv 2402.14740, eq. 7"

    def __call__(self, scores: Scores) -> Tensor:
        return torch.full_like(scores.length, 1.0 / len(scores.length))


@dataclass(frozen=True)
class ConstantLength(Aggregate):
    """Removes the bias towards long wrong replies, as the sequence sum does, at a scale independent of the budget.

    1 / (B length), `length` being the episode's token budget, never the padded width (Dr. GRPO, arXiv 2503.20783,
    section 3.2 and listing 1, MAX_TOKENS).
    """

    # in tokens; None: the episode's budget, filled in when the run is configured
    length: int | None = setting(None, above=0)
    source = "Dr. GRPO, arXiv 2503.20783, listing 1"

    @property
    def formula(self) -> str:
        return f"1 / (B {self.length or 'budget'})"

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset(() if self.length else {Need.EPISODE_TOKENS})

    def configured(self, limits: RunLimits) -> Self:
        return replace(self, length=self.length or limits.episode_tokens)

    def __call__(self, scores: Scores) -> Tensor:
        assert self.length, "the length is filled in when the run is configured"
        return torch.full_like(scores.length, 1.0 / (len(scores.length) * self.length))


AGGREGATES: dict[str, Aggregate] = {
    "sequence-mean": SequenceMean(),
    "token-mean": TokenMean(),
    "sequence-sum": SequenceSum(),
    "constant": ConstantLength(),
    "prompt-mean": PromptMean(),
}
"""Choices of --aggregate."""
