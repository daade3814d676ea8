"""Preference algorithms: link x score x margin x likelihood term, and the objective that all of them share.

The objective serves pairs, rankings and labels. In reward models, which use the same links, a head outputs the score.

    N    scored tokens of a micro-batch    R    responses in it    C    comparisons    V    labels
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from posttrain.algorithms.algorithm_base import AlgorithmBase
from posttrain.algorithms.comparison_weights import DENOMINATORS, Denominator, PerComparison
from posttrain.algorithms.links import LINKS, Pairs, PreferenceLink
from posttrain.algorithms.moving_models import MovingReference
from posttrain.algorithms.optimal_transport import OptimalTransport
from posttrain.algorithms.responses import SCORES, LogRatio, PolicyWeight, Responses, Score
from posttrain.core.batch import Batch, Outputs, Preferences, Stats
from posttrain.core.component import Component, setting
from posttrain.core.lazy_torch import torch
from posttrain.core.protocols import Objective

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Margin(Component):
    """Requires the better response to win by a margin: a constant, or the margin of the data row.

    constant + scale x the comparison's own margin (SimPO, arXiv 2405.14734, eq. 6; Llama 2, arXiv 2307.09288, eq. 2).
    """

    constant: float = setting(
        0.0,
        "margin",
        "Target margin: how much higher the better response's scaled score must be (0: none).",
        creates=True,
    )
    scale: float = setting(
        0.0, "row-margins", "Weight of the margins in the rows (0: ignore them).", least=0, creates=True
    )

    @property
    def source(self) -> str:
        constant, scaled = "SimPO, arXiv 2405.14734, eq. 6", "Llama 2, arXiv 2307.09288, eq. 2"
        return "; ".join([constant] * bool(self.constant) + [scaled] * bool(self.scale)) or constant

    @property
    def formula(self) -> str:
        scaled = f"{self.scale:g} x the row's" if self.scale else ""
        return " + ".join(filter(None, [f"{self.constant:g}" if self.constant or not scaled else "", scaled]))

    def __call__(self, margin: Tensor) -> Tensor:
        return self.constant + self.scale * margin


@dataclass(frozen=True)
class Imitated(Component):
    """Keeps the better responses likely, as comparisons alone may lower both responses.

    coefficient x the negative log-likelihood of responses that are better than another and worse than none. per "tokens":
    the mean over all their tokens of the optimizer batch; "responses": the mean over them of each one's mean (RPO); "sums":
    the mean over them of each one's sum.
    """

    coefficient: float = setting(
        1.0, "imitation", "Weight of the likelihood of the better responses in the loss (0: none).", least=0, absent=0
    )
    per: Literal["tokens", "responses", "sums"] = setting(
        "tokens", "imitation-per", "Normalise --imitation by all tokens, by each response's tokens, or not at all."
    )

    @property
    def source(self) -> str:
        return {
            "tokens": "ORPO, arXiv 2403.07691, eq. 6",
            "responses": "RPO, arXiv 2404.19733, eq. 1",
            "sums": "CPO, arXiv 2401.08417",
        }[self.per]

    @property
    def formula(self) -> str:
        by = {
            "tokens": "mean of -lp over the tokens of the better responses",
            "responses": "mean over the better responses of (sum_t -lp) / n",
            "sums": "mean over the better responses of sum_t -lp",
        }[self.per]
        return f"{self.coefficient:g} x {by}"

    def shares(self, lengths: list[int]) -> list[float]:
        """Return the weight of a token in each imitated response of an optimizer batch, given the lengths."""
        if self.per == "tokens":
            return [self.coefficient / sum(lengths)] * len(lengths)
        of_each = [1 if self.per == "sums" else n for n in lengths]
        return [self.coefficient / (len(lengths) * n) for n in of_each]


@dataclass(frozen=True)
class PreferenceAlgorithm(AlgorithmBase):
    """Preference algorithm: an entry of `preference_table`."""

    link: PreferenceLink = setting(flag="link", help="Loss on the scores of responses.", choices=LINKS)
    score: Score = setting(
        LogRatio(),
        "score",
        "Score of a response: log ratio to the reference, likelihood, or odds.",
        choices=SCORES,
    )
    denominator: Denominator = setting(
        PerComparison(), "denominator", "Average the loss over comparisons, or over prompts.", choices=DENOMINATORS
    )
    coefficient: float = setting(
        1.0, "preference", "Weight of the comparisons in the loss, relative to --imitation.", above=0
    )
    margin: Margin | None = None
    imitation: Imitated | None = None
    weight: PolicyWeight | None = setting(
        None,
        "policy-weight",
        "Weight comparisons by the policy's probability of their responses (WPO).",
        choices={"true": PolicyWeight(), "false": None},
    )
    transport: OptimalTransport | None = setting(
        None,
        "transport",
        "Compare sorted distributions instead of responses: margins of policy and reference, or good and bad scores (AOT).",
        choices={"paired": OptimalTransport("paired"), "unpaired": OptimalTransport("unpaired"), "none": None},
    )
    moving: MovingReference | None = None
    idea: str = ""  # what is new about it, in at most eight words
    best_for: str = ""  # when to take it, in at most twelve words

    @property
    def reads_labels(self) -> bool:
        """Whether single responses with their labels are read, and not comparisons."""
        return self.link.reads_labels or (self.transport is not None and self.transport.data == "unpaired")


@dataclass(frozen=True)
class PreferenceObjective:
    """Loss of one micro-batch of preference examples."""

    algorithm: PreferenceAlgorithm

    @property
    def wants(self) -> frozenset[str]:
        return self.algorithm.wants

    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        """Return a scalar: the weighted sum of the losses of comparisons, or of labels, plus the likelihood term."""
        said = batch.preferences
        assert said is not None
        responses = Responses.of(batch)
        if self.algorithm.transport is not None:
            loss = self._matched(outputs, batch, said, responses)
        elif self.algorithm.reads_labels:
            loss = self._labels(outputs, batch, said, responses)
        else:
            loss = self._pairs(outputs, batch, said, responses)
        self.measure(outputs, batch, stats)
        loss = self.algorithm.coefficient * loss
        if batch.imitate is not None:
            loss = loss - (batch.imitate.double() * outputs.logp.double()).sum()
        return loss

    def measure(self, outputs: Outputs, batch: Batch, stats: Stats, before: str = "") -> None:
        """Add the metrics of these responses, under names that begin with `before`.

        Rewards and margins are computed from the compared scores, which include the weight of the tail if there is one.
        """
        said = batch.preferences
        assert said is not None
        with torch.no_grad():
            responses, beta = Responses.of(batch), getattr(self.algorithm.link, "beta", 1.0)
            everyone = torch.arange(len(responses.length), device=batch.transcript.device)
            logp = responses.total(outputs.logp, everyone)

            def score(side: Tensor) -> Tensor:
                return self.algorithm.score(outputs, batch, responses, side, None)

            if len(said.better):
                which = said.better, said.worse
                scores = self._compared(outputs, batch, said, responses)
            else:
                good = said.label > 0.5
                which = said.labelled[good], said.labelled[~good]
                scores = (score(which[0]), score(which[1]))
            for name, side, own in zip(("chosen", "rejected"), which, scores, strict=True):
                stats.add(f"{before}logp/{name}", logp[side].sum().item(), len(side))
                stats.add(f"{before}logp_per_token/{name}", (logp / responses.length)[side].sum().item(), len(side))
                stats.add(f"{before}implicit_reward/{name}", beta * own.sum().item(), len(side))
            if len(said.better):
                margin = beta * (scores[0] - scores[1])
                won = (margin > 0).double() + 0.5 * (margin == 0).double()
                stats.add(f"{before}accuracy", won.sum().item(), len(margin))
                stats.add(f"{before}margin", margin.sum().item(), len(margin))
            if batch.ref_logp is not None:
                # The sampling policy of the data's tokens is unknown: k2 is near the KL of either direction.
                ratio = (outputs.logp - batch.ref_logp).double()
                stats.add(f"{before}kl/data", (0.5 * ratio.square()).sum().item(), ratio.numel())

    def _compared(
        self, outputs: Outputs, batch: Batch, said: Preferences, responses: Responses
    ) -> tuple[Tensor, Tensor]:
        """Return the scores, [C] each, of better and worse responses; tokens beyond the shorter length weigh `tail`."""
        shorter = torch.minimum(responses.length[said.better], responses.length[said.worse])
        better, worse = (self.algorithm.score(outputs, batch, responses, w, shorter) for w in (said.better, said.worse))
        return better, worse

    def _pairs(self, outputs: Outputs, batch: Batch, said: Preferences, responses: Responses) -> Tensor:
        algorithm = self.algorithm
        better, worse = self._compared(outputs, batch, said, responses)
        margin = torch.zeros_like(better) if algorithm.margin is None else algorithm.margin(said.margin.double())
        losses = algorithm.link.compare(Pairs(better, worse, margin, said.better, batch.coefficients))
        if algorithm.weight is not None:
            weights = algorithm.weight(outputs, batch, responses, said.better)
            losses = losses * weights * algorithm.weight(outputs, batch, responses, said.worse)
        return (said.weight.double() * losses).sum()

    def _matched(self, outputs: Outputs, batch: Batch, said: Preferences, responses: Responses) -> Tensor:
        """Return the loss of comparisons or labels against the numbers that the transport matches them with."""
        algorithm, matched = self.algorithm, said.matched
        assert matched is not None and algorithm.transport is not None, "the source transports every update"
        own, other = matched.own, matched.other
        constant = torch.zeros_like(other)
        if algorithm.margin is not None:
            constant = algorithm.margin(constant)
        if algorithm.transport.data == "paired":
            better, worse = self.margins(outputs, batch, responses)[0][own], other
        else:
            score = self.algorithm.score(outputs, batch, responses, said.labelled, None)[own]
            good = said.label[own] > 0.5
            better, worse = torch.where(good, score, other), torch.where(good, other, score)
        losses = algorithm.link.compare(Pairs(better, worse, constant, own, batch.coefficients))
        if algorithm.transport.data == "unpaired":  # each piece is there twice, with the gradient of one side each time
            losses = losses - losses.detach() / 2
        return (matched.weight * losses).sum()

    def margins(self, outputs: Outputs, batch: Batch, responses: Responses) -> tuple[Tensor, Tensor]:
        """Return the difference of log-probabilities of each comparison, float64 [C], of the policy and the reference."""
        said = batch.preferences
        assert said is not None and batch.ref_logp is not None
        none = replace(batch, ref_logp=torch.zeros_like(batch.ref_logp))
        u, v = (
            better - worse
            for of in (outputs, replace(outputs, logp=batch.ref_logp))
            for better, worse in (self._compared(of, none, said, responses),)
        )
        return u, v

    def _labels(self, outputs: Outputs, batch: Batch, said: Preferences, responses: Responses) -> Tensor:
        score = self.algorithm.score(outputs, batch, responses, said.labelled, None)
        losses = self.algorithm.link.judge(score, said.label.double(), batch.coefficients)
        if self.algorithm.weight is not None:
            losses = losses * self.algorithm.weight(outputs, batch, responses, said.labelled)
        return (said.label_weight.double() * losses).sum()


if TYPE_CHECKING:
    from collections.abc import Callable

    _proof: Callable[..., Objective] = PreferenceObjective
