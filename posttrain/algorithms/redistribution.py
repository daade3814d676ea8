"""Redistribution of a rollout's reward over its tokens, before credit is assigned.

S    rollouts    n_i    sampled tokens of rollout i    H_t    entropy of the policy at token t, when it was sampled
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from posttrain.core.batch import Scores
from posttrain.core.component import Component, Need, setting
from posttrain.core.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Redistribution(Component):
    """Gives every token a part of the final reward, so that credit is dense and little of it is left to predict.

    Token t earns share x w_t of the final reward, and the last one the rest besides; the sum stays the reward.

    weight   `even`: w_t = 1 / n_i (Gangwani et al. 2020, arXiv 2010.12718). `entropy`: w_t = H_t / sum of H over the reply:
             uncertain tokens decide (GTPO, arXiv 2508.04349, which has that ratio over the replies of a group; in ABC,
             arXiv 2402.00782, the weights are a reward model's attention).
    share    the part that is redistributed; ABC mixes both forms in the same way.

    The expected return is the same, but rewards to go have another expected gradient: a token gets no credit for the parts
    that earlier tokens earned, although it contributed to the whole reward.
    """

    weight: Literal["even", "entropy"] = setting(
        "even",
        "redistribution",
        "Redistribute the final reward over the tokens of a reply: evenly, or by the policy's entropy (none: the last token "
        "earns it).",
        absent="none",
    )
    share: float = setting(
        1.0, "redistribution-share", "Share of the final reward that is redistributed.", above=0, most=1
    )

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.ENTROPY} if self.weight == "entropy" else ())

    @property
    def formula(self) -> str:
        weight = "1 / n_i" if self.weight == "even" else "H_t / sum of H over the reply"
        rest = "" if self.share == 1 else f", the last one {1 - self.share:g} R besides"
        return f"{'' if self.share == 1 else f'{self.share:g} '}w_t R, w_t = {weight}{rest}; R the final reward"

    @property
    def source(self) -> str:
        if self.weight == "even":
            return "Gangwani et al. 2020, arXiv 2010.12718"
        return "GTPO, arXiv 2508.04349, its entropy ratio within a reply; ABC, arXiv 2402.00782"

    def __call__(self, scores: Scores, entropy: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the part of the final reward that each token earns, float64 [n_i] for each rollout; each adds up to 1.

        `entropy`: [n_i] for each rollout, where it is the weight. A reply whose tokens were all certain shares evenly.
        """
        found = []
        for i, length in enumerate(scores.length.long().tolist()):
            weight = torch.ones(length, dtype=torch.float64)
            if self.weight == "entropy":
                own = entropy[i].double().cpu().clamp_min(0.0)
                weight = own if own.sum() > 0 else weight
            shares = self.share * weight / weight.sum()
            shares[-1] += 1 - self.share
            found.append(shares)
        return tuple(found)
