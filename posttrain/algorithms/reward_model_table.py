"""Reward-model algorithms: link x margin x penalty over the scores of a head; their objective and their table.

N    scored hidden states ("readings") of a micro-batch    U    scores    C    comparisons    V    labels
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.algorithms.algorithm_base import AlgorithmBase
from posttrain.algorithms.comparison_weights import DENOMINATORS, Denominator, PerComparison, PerPrompt
from posttrain.algorithms.links import CrossEntropy, Pairs, PlackettLuce, PreferenceLink, Sigmoid, SquaredError
from posttrain.algorithms.preference import Margin
from posttrain.core.batch import Batch, Outputs, Preferences, Stats
from posttrain.core.component import Component, setting
from posttrain.core.lazy_torch import torch
from posttrain.core.protocols import Objective

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclass(frozen=True)
class ScorePenalty(Component):
    """Keeps scores near 0, better responses above and worse ones below: comparisons alone do not fix the zero point.

    sign (relu(-r_w) + relu(r_l)) + size (r_w^2 + r_l^2).
    """

    sign: float = setting(
        0.1,
        "sign-penalty",
        "Penalty for better responses that score below 0, and worse ones above.",
        least=0,
        creates=True,
    )
    size: float = setting(0.01, "size-penalty", "Penalty on squared scores.", least=0, creates=True)
    source = "size: Eisenstein et al., arXiv 2312.09244, section 2; sign: hinges at 0 on either side"

    @property
    def formula(self) -> str:
        return f"{self.sign:g} (relu(-r_w) + relu(r_l)) + {self.size:g} (r_w^2 + r_l^2)"

    def __call__(self, better: Tensor, worse: Tensor) -> Tensor:
        """Return penalties [C], given the scores [C] of better and of worse responses."""
        sign = torch.relu(-better) + torch.relu(worse)
        return self.sign * sign + self.size * (better.square() + worse.square())


LINKS: dict[str, PreferenceLink] = {
    "sigmoid": Sigmoid(1.0),
    "plackett-luce": PlackettLuce(),
    "cross-entropy": CrossEntropy(),
    "squared-error": SquaredError(),
}


@dataclass(frozen=True)
class RewardModelAlgorithm(AlgorithmBase):
    """Reward-model algorithm: an entry of `REWARD_MODELS`."""

    link: PreferenceLink = setting(flag="link", help="Loss on the scores of responses.", choices=LINKS)
    denominator: Denominator = setting(
        PerComparison(), "denominator", "Average the loss over comparisons, or over prompts.", choices=DENOMINATORS
    )
    margin: Margin | None = None
    penalty: ScorePenalty | None = None
    idea: str = ""  # what is new about it, in at most eight words
    best_for: str = ""  # when to take it, in at most twelve words


@dataclass(frozen=True)
class RewardModelObjective:
    """Loss of one micro-batch of preference examples, and metrics of their scores."""

    algorithm: RewardModelAlgorithm
    mean: bool = False  # whether a score is the mean over a response's readings; otherwise each reading is a score
    wants = frozenset({"score"})

    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        said = batch.preferences
        assert said is not None
        scores = self.scores(outputs, batch)
        algorithm = self.algorithm
        if algorithm.link.reads_labels:
            losses = algorithm.link.judge(scores[said.labelled], said.label, batch.coefficients)
            loss = (said.label_weight * losses).sum()
        else:
            better, worse = scores[said.better], scores[said.worse]
            margin = torch.zeros_like(better) if algorithm.margin is None else algorithm.margin(said.margin)
            losses = algorithm.link.compare(Pairs(better, worse, margin, said.better, batch.coefficients))
            if algorithm.penalty is not None:
                losses = losses + algorithm.penalty(better, worse)
            loss = (said.weight * losses).sum()
        self.measure(scores.detach(), said, stats)
        return loss

    def scores(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the scores, float64 [U]."""
        assert outputs.score is not None
        given = outputs.score.double()
        if not self.mean:
            return given
        length = torch.bincount(batch.transcript)
        return given.new_zeros(len(length)).index_add(0, batch.transcript, given) / length

    def measure(self, scores: Tensor, said: Preferences, stats: Stats) -> None:
        """Add accuracy, margin and mean scores to the metrics."""
        stats.add("score", scores.sum().item(), len(scores))
        if len(said.better):
            margin = scores[said.better] - scores[said.worse]
            won = (margin > 0).double() + 0.5 * (margin == 0).double()
            stats.add("accuracy", won.sum().item(), len(margin))
            stats.add("margin", margin.sum().item(), len(margin))
        elif len(said.label) and isinstance(self.algorithm.link, CrossEntropy):
            right = (scores[said.labelled] > 0) == (said.label > 0.5)
            stats.add("accuracy", right.double().sum().item(), len(right))
        elif len(said.label):
            error = (scores[said.labelled] - said.label).square()
            stats.add("squared_error", error.sum().item(), len(error))


_ALGORITHMS = (
    RewardModelAlgorithm(
        "bradley-terry",
        "A reward model from pairs (InstructGPT, arXiv 2203.02155; margins of the rows: Llama 2, arXiv 2307.09288)",
        link=Sigmoid(1.0),
        margin=Margin(0.0, 1.0),
        idea="Better responses are likelier to win",
        best_for="pairs: the first to try",
    ),
    RewardModelAlgorithm(
        "k-wise",
        "A reward model from all comparisons of a prompt as one element (InstructGPT, arXiv 2203.02155, eq. 1)",
        link=Sigmoid(1.0),
        denominator=PerPrompt(),
        idea="All comparisons of a prompt weigh as one",
        best_for="many comparisons per prompt",
    ),
    RewardModelAlgorithm(
        "plackett-luce",
        "A reward model from rankings (Plackett 1975; arXiv 2305.18290, appendix A.3)",
        link=PlackettLuce(),
        denominator=PerPrompt(),
        idea="The best of the rest is chosen, repeatedly",
        best_for="rankings of several responses",
    ),
    RewardModelAlgorithm(
        "outcome",
        "A verifier from labels of whole responses, or of their steps (arXiv 2110.14168; steps: arXiv 2305.20050)",
        link=CrossEntropy(),
        idea="The probability that it is right",
        best_for="right-or-wrong labels; safer to optimise than bradley-terry on sums",
    ),
    RewardModelAlgorithm(
        "regression",
        "A reward model from scores (HelpSteer2, arXiv 2406.08673)",
        link=SquaredError(),
        idea="The score that people gave",
        best_for="scores that people gave",
    ),
)
REWARD_MODELS: dict[str, RewardModelAlgorithm] = {algorithm.name: algorithm for algorithm in _ALGORITHMS}


if TYPE_CHECKING:
    _proof: Callable[..., Objective] = RewardModelObjective
