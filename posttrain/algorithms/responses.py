"""Scores of responses, computed from the log-probabilities of their tokens; the input of links.

N    scored tokens of a micro-batch    R    responses in it    M    selected responses, which may repeat
n    scored tokens of a response       lp, ref    their log-probabilities under the policy and the reference
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from posttrain.algorithms.ratio import LARGEST_LOG_RATIO
from posttrain.core.batch import Batch, Outputs
from posttrain.core.component import Component, Need, setting
from posttrain.core.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

TAIL = "Weight of the tokens by which a response is longer than the other one of its comparison. 1: as other tokens."
LENGTH_DESENSITISED = "; LD-DPO, arXiv 2409.06411"


@dataclass(frozen=True)
class Responses:
    """Responses of a micro-batch, and the response that each flat token belongs to."""

    transcript: Tensor  # int64 [N], index of the token's response in [R]; tokens of a response are contiguous
    length: Tensor  # int64 [R], tokens of each response

    @staticmethod
    def of(batch: Batch) -> Responses:
        return Responses(batch.transcript, torch.bincount(batch.transcript))

    def total(self, values: Tensor, which: Tensor, first: Tensor | None = None, tail: float = 1.0) -> Tensor:
        """Return sums [M] of the values [N] over the tokens of the responses `which` [M], in float64.

        `first` int64 [M]: tokens of a response beyond this number have weight `tail`; None: all have weight 1.
        """
        values = values.double()
        if first is None or tail == 1.0:
            sums = values.new_zeros(len(self.length)).index_add(0, self.transcript, values)
            return sums[which]
        lengths = self.length[which]
        starts = (self.length.cumsum(0) - self.length)[which]
        owner = torch.repeat_interleave(lengths)
        place = torch.arange(len(owner), device=which.device) - (lengths.cumsum(0) - lengths)[owner]
        picked = values[starts[owner] + place]
        weighed = torch.where(place < first[owner], picked, tail * picked)
        return values.new_zeros(len(which)).index_add(0, owner, weighed)


class Score(Component):
    """Map from (outputs, batch, responses, number of first tokens with weight 1) to scores [M], with a gradient."""

    def __call__(
        self, outputs: Outputs, batch: Batch, responses: Responses, which: Tensor, first: Tensor | None
    ) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class LogRatio(Score):
    """Log ratio of the response to the reference: the reward for which the policy would be optimal.

    s = sum_t (lp_t - ref_t), or its mean over the response's tokens (DPO, arXiv 2305.18290, eq. 5). With another
    divergence than the reverse KL, s = f'(pi / ref): forward 1 - e^-d, Jensen-Shannon log(2 / (1 + e^-d)), alpha (e^((a -
    1) d) - 1) / (a - 1), d the sum and a = 1 - the paper's alpha (f-DPO, arXiv 2309.16240, table 1; constants that make
    them 0 where both models agree). With a tail below 1, tokens beyond the length of the shorter of two compared
    responses weigh less, so that length itself is not learned (LD-DPO, arXiv 2409.06411).
    """

    mean: bool = setting(
        False, "length-normalised", "Average scores over a response's tokens, instead of summing them."
    )
    divergence: Literal["reverse-kl", "forward-kl", "jensen-shannon", "alpha"] = setting(
        "reverse-kl", "divergence", "Divergence from the reference, in place of the reverse KL."
    )
    alpha: float = setting(0.5, least=0)  # 1 - the paper's alpha: 1 is the reverse KL, 0 the forward KL
    tail: float = setting(1.0, "tail", TAIL, least=0, most=1)
    needs = frozenset({Need.REFERENCE})

    @property
    def source(self) -> str:
        base = "DPO, arXiv 2305.18290, eq. 5"
        if self.divergence != "reverse-kl":
            base = "f-DPO, arXiv 2309.16240, table 1"
        return base + ("" if self.tail == 1 else LENGTH_DESENSITISED)

    @property
    def formula(self) -> str:
        weighed = "" if self.tail == 1 else f" (x {self.tail:g} behind the shorter one's length)"
        total = f"sum_t (lp - ref){weighed}"
        by = {
            "reverse-kl": total,
            "forward-kl": f"1 - exp(-d), d = {total}",
            "jensen-shannon": f"log(2 / (1 + exp(-d))), d = {total}",
            "alpha": f"(exp({self.alpha - 1:g} d) - 1) / {self.alpha - 1:g}, d = {total}",
        }[self.divergence]
        return f"({by}) / n" if self.mean else by

    def __call__(
        self, outputs: Outputs, batch: Batch, responses: Responses, which: Tensor, first: Tensor | None
    ) -> Tensor:
        assert batch.ref_logp is not None
        ratio = responses.total(outputs.logp.double() - batch.ref_logp.double(), which, first, self.tail)
        score = self._derived(ratio)
        return score / responses.length[which] if self.mean else score

    def _derived(self, ratio: Tensor) -> Tensor:
        if self.divergence == "forward-kl":
            return -torch.expm1((-ratio).clamp(max=LARGEST_LOG_RATIO))
        if self.divergence == "jensen-shannon":
            return math.log(2) + torch.nn.functional.logsigmoid(ratio)
        if self.divergence == "alpha" and self.alpha != 1:
            power = self.alpha - 1
            return torch.expm1((power * ratio).clamp(max=LARGEST_LOG_RATIO)) / power
        return ratio


@dataclass(frozen=True)
class ResponseLikelihood(Score):
    """Likelihood of the response, without a reference.

    s = sum_t lp_t (CPO, arXiv 2401.08417), or its mean over the tokens (SimPO, arXiv 2405.14734, eq. 3). With `alpha`, the
    reward has another shape: (1 - exp(-alpha s)) / alpha, which is s at 0 and whose slope for unlikely responses is steeper
    the larger alpha is (AlphaPO, arXiv 2501.03884).
    """

    mean: bool = setting(
        False, "length-normalised", "Average scores over a response's tokens, instead of summing them."
    )
    tail: float = setting(1.0, "tail", TAIL, least=0, most=1)
    alpha: float = 0.0

    @property
    def source(self) -> str:
        if self.alpha:
            return "AlphaPO, arXiv 2501.03884" + ("" if self.tail == 1 else LENGTH_DESENSITISED)
        base = "SimPO, arXiv 2405.14734, eq. 3" if self.mean else "CPO, arXiv 2401.08417"
        return base + ("" if self.tail == 1 else LENGTH_DESENSITISED)

    @property
    def formula(self) -> str:
        weighed = "" if self.tail == 1 else f" (x {self.tail:g} behind the shorter one's length)"
        total = f"sum_t lp{weighed}" + (" / n" if self.mean else "")
        return f"(1 - exp(-{self.alpha:g} m)) / {self.alpha:g}, m = {total}" if self.alpha else total

    def __call__(
        self, outputs: Outputs, batch: Batch, responses: Responses, which: Tensor, first: Tensor | None
    ) -> Tensor:
        total = responses.total(outputs.logp, which, first, self.tail)
        score = total / responses.length[which] if self.mean else total
        return -torch.expm1((-self.alpha * score).clamp(max=LARGEST_LOG_RATIO)) / self.alpha if self.alpha else score


@dataclass(frozen=True)
class Odds(Score):
    """The log-odds of the response, its probability taken as the geometric mean of its tokens'.

    s = m - log(1 - e^m), m = mean_t lp_t (ORPO, arXiv 2403.07691, eq. 4).
    """

    source = "ORPO, arXiv 2403.07691, eq. 4"
    formula = "m - log(1 - exp(m)), m = sum_t lp / n"

    def __call__(
        self, outputs: Outputs, batch: Batch, responses: Responses, which: Tensor, first: Tensor | None
    ) -> Tensor:
        mean = responses.total(outputs.logp, which) / responses.length[which]
        certain = mean.clamp(max=-1e-12)  # a response of probability 1 has infinite odds
        return certain - torch.log(-torch.expm1(certain))


SCORES: dict[str, Score] = {
    "log-ratio": LogRatio(),
    "likelihood": ResponseLikelihood(),
    "odds": Odds(),
}


@dataclass(frozen=True)
class PolicyWeight(Component):
    """Weighs comparisons by the policy's probability of their responses, to approximate on-policy data.

    A comparison has the additional weight w(y_w) w(y_l), a label w(y), w(y) = exp(mean_t (lp_t - log sum_v pi_v^2)),
    without a gradient (WPO, arXiv 2406.11827, eq. 2, with sampled alignment: section 3.2).
    """

    source = "WPO, arXiv 2406.11827, eq. 2 and section 3.2"
    formula = "x w(y) of each of its responses, w(y) = exp(mean_t (lp - log sum_v pi_v^2)), without a gradient"
    interpretation = "The weight of a comparison is that of the equation. The authors' code bounds it by 1."
    wants = frozenset({"collision"})

    def __call__(self, outputs: Outputs, batch: Batch, responses: Responses, which: Tensor) -> Tensor:
        """Return weights [M] of these responses."""
        assert outputs.collision is not None
        aligned = outputs.logp.detach().double() - outputs.collision.double()
        return (responses.total(aligned, which) / responses.length[which]).exp()
