"""Links: losses as functions of the scores of compared or labelled responses, which determine the size of gradients.

Losses are in nats, one per comparison [C] or label [V]. Their weights are computed in `comparison_weights`.

    C    comparisons of a micro-batch    V    labels    s_w, s_l    scores of the better and of the worse response
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.core.component import Component, Need, setting
from posttrain.core.lazy_torch import torch
from posttrain.core.rollouts import Comparison

if TYPE_CHECKING:
    from torch import Tensor

BETA = "Scale of the score differences. The larger it is, the closer the policy stays to its reference."


@dataclass(frozen=True)
class Pairs:
    """Comparisons of a micro-batch, the input of links."""

    better: Tensor  # [C], score of the better response
    worse: Tensor  # [C]
    margin: Tensor  # [C], required margin of the better response
    unit: Tensor  # int64 [C], equal for comparisons with the same better response
    coefficients: Mapping[str, float]  # measured over a whole optimizer batch, or before it


class PreferenceLink(Component):
    """Loss on scores. It reads comparisons (`compare`), or labels (`judge`)."""

    reads_labels = False
    takes_margin = False  # whether the loss uses a margin between the scores
    of_difference = False  # whether the loss is a function of the difference of two scores alone

    def compare(self, pairs: Pairs) -> Tensor:
        """Return losses [C]. Comparisons that form one element of the loss (see `units`) all get the element's loss."""
        raise NotImplementedError

    def judge(self, score: Tensor, label: Tensor, coefficients: Mapping[str, float]) -> Tensor:
        """Return losses [V] of scores [V] and labels [V]. `coefficients`: as in `Pairs`."""
        raise NotImplementedError

    def units(self, comparisons: Sequence[Comparison]) -> list[int]:
        """Return a number for each comparison of a preference example, equal for those that form one element of the
        loss.
        """
        return list(range(len(comparisons)))


@dataclass(frozen=True)
class Sigmoid(PreferenceLink):
    """Raises the probability that the better response wins: Bradley and Terry's model of comparisons.

    -(1 - e) log sigma(x) - e log sigma(-x), x = beta (s_w - s_l) - margin; e: the share of labels assumed to be wrong.
    """

    beta: float = setting(0.1, "beta", BETA, above=0, first_hour=True)
    smoothing: float = setting(
        0.0, "smoothing", "Label smoothing: share of the comparisons assumed to be mislabelled.", least=0, below=0.5
    )
    takes_margin = True
    of_difference = True

    @property
    def source(self) -> str:
        return "DPO, arXiv 2305.18290, eq. 7" + ("; smoothing: Mitchell 2023, cDPO" if self.smoothing else "")

    @property
    def formula(self) -> str:
        x = f"x = {self.beta:g} (s_w - s_l) - margin"
        if not self.smoothing:
            return f"-log sigma(x), {x}"
        return f"-{1 - self.smoothing:g} log sigma(x) - {self.smoothing:g} log sigma(-x), {x}"

    def compare(self, pairs: Pairs) -> Tensor:
        x = self.beta * (pairs.better - pairs.worse) - pairs.margin
        return -(1 - self.smoothing) * _log_sigmoid(x) - self.smoothing * _log_sigmoid(-x)


@dataclass(frozen=True)
class Robust(PreferenceLink):
    """Removes the bias of wrong labels: with labels flipped with probability e, its mean is DPO's loss on true labels.

    ((1 - e) (-log sigma(x)) - e (-log sigma(-x))) / (1 - 2 e), x = beta (s_w - s_l).
    """

    beta: float = setting(0.1, "beta", BETA, above=0, first_hour=True)
    noise: float = setting(
        0.1, "noise", "Share of the comparisons that are mislabelled (robust DPO).", least=0, below=0.5
    )
    source = "robust DPO, arXiv 2403.00409"
    of_difference = True

    @property
    def formula(self) -> str:
        e = self.noise
        return f"(-{1 - e:g} log sigma(x) + {e:g} log sigma(-x)) / {1 - 2 * e:g}, x = {self.beta:g} (s_w - s_l)"

    def compare(self, pairs: Pairs) -> Tensor:
        x = self.beta * (pairs.better - pairs.worse)
        return (-(1 - self.noise) * _log_sigmoid(x) + self.noise * _log_sigmoid(-x)) / (1 - 2 * self.noise)


@dataclass(frozen=True)
class Square(PreferenceLink):
    """Regresses the difference to a fixed size, so that certain labels do not overfit.

    (s_w - s_l - 1 / (2 beta))^2 (IPO, arXiv 2310.12036, eq. 17).
    """

    beta: float = setting(0.1, "beta", BETA, above=0, first_hour=True)
    source = "IPO, arXiv 2310.12036, eq. 17"
    of_difference = True

    @property
    def formula(self) -> str:
        return f"(s_w - s_l - {1 / (2 * self.beta):g})^2"

    def compare(self, pairs: Pairs) -> Tensor:
        return (pairs.better - pairs.worse - 1 / (2 * self.beta)).square()


@dataclass(frozen=True)
class Hinge(PreferenceLink):
    """Has a gradient only until the better response wins by a margin.

    max(0, 1 - x), x = beta (s_w - s_l) - margin (SLiC-HF, arXiv 2305.10425, eq. 1; on log ratios: RSO, arXiv 2309.06657).
    """

    beta: float = setting(0.1, "beta", BETA, above=0, first_hour=True)
    source = "SLiC-HF, arXiv 2305.10425, eq. 1; on log ratios: RSO, arXiv 2309.06657, hinge-norm"
    takes_margin = True
    of_difference = True

    @property
    def formula(self) -> str:
        return f"max(0, 1 - x), x = {self.beta:g} (s_w - s_l) - margin"

    def compare(self, pairs: Pairs) -> Tensor:
        return torch.relu(1 - self.beta * (pairs.better - pairs.worse) + pairs.margin)


@dataclass(frozen=True)
class SelfPlay(PreferenceLink):
    """Gives each response a target of its own: 1 / (2 beta) above the reference for a win, as much below for a loss.

    (s_w - 1 / (2 beta))^2 + (s_l + 1 / (2 beta))^2, both terms, unscaled (SPPO, arXiv 2405.00675, eq. 4.7 with P = 1).
    """

    beta: float = setting(0.001, "beta", BETA, above=0, first_hour=True)
    source = "SPPO, arXiv 2405.00675, eq. 4.7, hard labels"

    @property
    def formula(self) -> str:
        target = f"{1 / (2 * self.beta):g}"
        return f"(s_w - {target})^2 + (s_l + {target})^2"

    def compare(self, pairs: Pairs) -> Tensor:
        target = 1 / (2 * self.beta)
        return (pairs.better - target).square() + (pairs.worse + target).square()


@dataclass(frozen=True)
class AnchoredUp(PreferenceLink):
    """Raises the better response and lowers the worse one: for better responses than the policy's own.

    1 - sigma(beta s_w) + sigma(beta s_l) (APO-zero, arXiv 2408.06266, eq. 7).
    """

    beta: float = setting(0.1, "beta", BETA, above=0, first_hour=True)
    source = "APO-zero, arXiv 2408.06266, eq. 7"

    @property
    def formula(self) -> str:
        return f"1 - sigma({self.beta:g} s_w) + sigma({self.beta:g} s_l)"

    def compare(self, pairs: Pairs) -> Tensor:
        return 1 - torch.sigmoid(self.beta * pairs.better) + torch.sigmoid(self.beta * pairs.worse)


@dataclass(frozen=True)
class AnchoredDown(PreferenceLink):
    """Lowers both responses, the worse one more: for worse responses than the policy's own.

    sigma(beta s_w) + 1 - sigma(beta (s_w - s_l)) (APO-down, arXiv 2408.06266, eq. 8).
    """

    beta: float = setting(0.1, "beta", BETA, above=0, first_hour=True)
    source = "APO-down, arXiv 2408.06266, eq. 8"

    @property
    def formula(self) -> str:
        return f"sigma({self.beta:g} s_w) + 1 - sigma({self.beta:g} (s_w - s_l))"

    def compare(self, pairs: Pairs) -> Tensor:
        return torch.sigmoid(self.beta * pairs.better) + 1 - torch.sigmoid(self.beta * (pairs.better - pairs.worse))


@dataclass(frozen=True)
class Contrast(PreferenceLink):
    """Keeps the likelihood of the better response from falling, with a term for each single response.

    -log sigma(x_w) - 1/2 log sigma(-x_w) - 1/2 log sigma(-x_l), x = beta s (NCA, arXiv 2402.05369, for pairs).
    """

    beta: float = setting(0.1, "beta", BETA, above=0, first_hour=True)
    source = "NCA, arXiv 2402.05369, with two responses"

    @property
    def formula(self) -> str:
        return f"-log sigma(x_w) - log sigma(-x_w) / 2 - log sigma(-x_l) / 2, x = {self.beta:g} s"

    def compare(self, pairs: Pairs) -> Tensor:
        good, bad = self.beta * pairs.better, self.beta * pairs.worse
        return -_log_sigmoid(good) - 0.5 * _log_sigmoid(-good) - 0.5 * _log_sigmoid(-bad)


@dataclass(frozen=True)
class ReverseKL(PreferenceLink):
    """Matches the policy's preference to the labels' by the mode-seeking reverse KL, where DPO uses the forward KL.

    KL((q, 1 - q) || (1 - e, e)), q = sigma(beta (s_w - s_l)) (EXO, arXiv 2402.00856, eq. 16 for pairs).
    """

    beta: float = setting(0.1, "beta", BETA, above=0, first_hour=True)
    smoothing: float = setting(0.001, "smoothing", above=0, below=0.5)
    source = "EXO, arXiv 2402.00856, eq. 16 with two responses"
    of_difference = True

    @property
    def formula(self) -> str:
        e = self.smoothing
        return f"q log(q / {1 - e:g}) + (1 - q) log((1 - q) / {e:g}), q = sigma({self.beta:g} (s_w - s_l))"

    def compare(self, pairs: Pairs) -> Tensor:
        x, e = self.beta * (pairs.better - pairs.worse), torch.tensor(self.smoothing, dtype=pairs.better.dtype)
        won = torch.sigmoid(x) * (_log_sigmoid(x) - torch.log1p(-e))
        return won + torch.sigmoid(-x) * (_log_sigmoid(-x) - torch.log(e))


@dataclass(frozen=True)
class ClassifierLink(PreferenceLink):
    """Classifies single responses as good or bad, by a threshold between their rewards.

    -log sigma(x_w - d) - log sigma(-(x_l - d)), x = beta s, d the mean of x over all responses so far (BCO, arXiv
    2404.04656, without its density-ratio weights for good and bad responses to different prompts).
    """

    beta: float = setting(0.1, "beta", BETA, above=0, first_hour=True)
    shift: bool = setting(True)  # whether d is subtracted; d is a running mean of earlier batches, as the authors'
    source = "BCO, arXiv 2404.04656, without density ratios"

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.SHIFT}) if self.shift else frozenset()

    @property
    def formula(self) -> str:
        d = "d = running mean of x" if self.shift else "d = 0"
        return f"-log sigma(x_w - d) - log sigma(d - x_l), x = {self.beta:g} s, {d}"

    def compare(self, pairs: Pairs) -> Tensor:
        shift = pairs.coefficients["shift"] if self.shift else 0.0
        return -_log_sigmoid(self.beta * pairs.better - shift) - _log_sigmoid(shift - self.beta * pairs.worse)


@dataclass(frozen=True)
class Prospect(PreferenceLink):
    """Learns from labels of single responses, by prospect theory's value of gains and losses.

    good: w_d (1 - sigma(beta (s - z))); bad: w_u (1 - sigma(beta (z - s))). z, the drift, is the mean of s over the
    optimizer batch, each prompt paired with another prompt's response, at least 0 and without a gradient (KTO, arXiv
    2402.01306, eq. 8).
    """

    beta: float = setting(0.1, "beta", BETA, above=0, first_hour=True)
    desirable: float = setting(1.0, "desirable", "Weight of responses that are labelled good (KTO).", least=0)
    undesirable: float = setting(1.0, "undesirable", "Weight of responses that are labelled bad (KTO).", least=0)
    source = "KTO, arXiv 2402.01306, eq. 8; drift: section 4.2"
    needs = frozenset({Need.DRIFT})
    reads_labels = True

    @property
    def formula(self) -> str:
        good, bad = f"{self.desirable:g} (1 - sigma(x))", f"{self.undesirable:g} (1 - sigma(-x))"
        return f"good: {good}; bad: {bad}; x = {self.beta:g} (s - z), z = max(0, mean of s over mismatched pairs)"

    def judge(self, score: Tensor, label: Tensor, coefficients: Mapping[str, float]) -> Tensor:
        x = self.beta * (score - coefficients["drift"])
        good = self.desirable * torch.sigmoid(-x)
        return torch.where(label > 0.5, good, self.undesirable * torch.sigmoid(x))


@dataclass(frozen=True)
class PlackettLuce(PreferenceLink):
    """Models a whole ranking as successive choices: the best of all, the best of the rest, and so on.

    For each response w that is better than others l: log(1 + sum_l e^(beta (s_l - s_w))). Over a ranking without ties
    that is the Plackett-Luce likelihood (DPO, arXiv 2305.18290, appendix A.3, eq. 18); tied responses are not compared.
    """

    beta: float = setting(1.0, "beta", BETA, above=0, first_hour=True)
    source = "Plackett 1975; DPO, arXiv 2305.18290, appendix A.3"

    @property
    def formula(self) -> str:
        return f"for each w: log(1 + sum over the l that it beats of e^({self.beta:g} (s_l - s_w)))"

    def units(self, comparisons: Sequence[Comparison]) -> list[int]:
        return [c.better for c in comparisons]

    def compare(self, pairs: Pairs) -> Tensor:
        above = self.beta * (pairs.worse - pairs.better)
        rows, unit = pairs.unit.unique(return_inverse=True)
        top = above.new_zeros(len(rows)).scatter_reduce(0, unit, above.detach(), "amax")  # at least 0, the better's own
        total = (-top).exp().index_add(0, unit, (above - top[unit]).exp())
        return (top + total.log())[unit]


@dataclass(frozen=True)
class CrossEntropy(PreferenceLink):
    """Learns the probability that a response, or a step of it, is good.

    -y log sigma(s) - (1 - y) log sigma(-s), y a label from 0 to 1 (process rewards: Lightman et al., arXiv 2305.20050).
    """

    source = "Cobbe et al., arXiv 2110.14168, section 4.2; steps: arXiv 2305.20050, section 2.6"
    reads_labels = True
    formula = "-y log sigma(s) - (1 - y) log sigma(-s)"

    def judge(self, score: Tensor, label: Tensor, coefficients: Mapping[str, float]) -> Tensor:
        return -label * _log_sigmoid(score) - (1 - label) * _log_sigmoid(-score)


@dataclass(frozen=True)
class SquaredError(PreferenceLink):
    """Regresses on the scores of responses, such as ratings by several people.

    (s - y)^2.
    """

    source = "HelpSteer2, arXiv 2406.08673, section 3"
    reads_labels = True
    formula = "(s - y)^2"

    def judge(self, score: Tensor, label: Tensor, coefficients: Mapping[str, float]) -> Tensor:
        return (score - label).square()


LINKS: dict[str, PreferenceLink] = {
    "sigmoid": Sigmoid(),
    "robust": Robust(),
    "square": Square(),
    "hinge": Hinge(),
    "self-play": SelfPlay(),
    "anchored-up": AnchoredUp(),
    "anchored-down": AnchoredDown(),
    "contrast": Contrast(),
    "reverse-kl": ReverseKL(),
    "classifier": ClassifierLink(),
    "prospect": Prospect(),
    "plackett-luce": PlackettLuce(),
}


def _log_sigmoid(x: Tensor) -> Tensor:
    return torch.nn.functional.logsigmoid(x)
