"""Evaluation of a reward model on held-out preference examples, compared with rules of length and a bag of words.

Intervals are clustered by prompt. The evaluation also finds the offset that shifts the mean score of the training rows
to 0, which is written into every checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain.algorithms.links import SquaredError
from posttrain.algorithms.reward_model_table import RewardModelObjective
from posttrain.core.batch import Stats
from posttrain.core.intervals import ratio_interval, share_interval, stated
from posttrain.core.rollouts import PreferenceExample
from posttrain.data.tasks import ENDLESS
from posttrain.learners.local_learner import LocalLearner
from posttrain.models.reward_model import RewardModel
from posttrain.training.reward_baselines import ComparedTexts, Perceptron, longer_wins
from posttrain.training.sources.preferences import PreferenceExamples
from posttrain.training.sources.reward_examples import RewardExamples

AT_ONCE = 256  # preference examples packed into micro-batches together
CENTRED_ON = 128  # training examples whose mean score is the offset
PARTS = 4  # parts of the comparisons, by margin
BINS = 10  # bins of the probability that the better response wins


class Scored:
    """The evaluation of a reward model, called at each evaluation step; `report` holds the figures of the last one."""

    def __init__(
        self,
        source: RewardExamples,
        unseen: PreferenceExamples | None,
        learner: LocalLearner,
        objective: RewardModelObjective,
        model: RewardModel,
    ) -> None:
        self.source, self.unseen, self.learner, self.objective, self.model = source, unseen, learner, objective, model
        self.report: dict[str, Any] = {}
        self._words: Perceptron | None = None
        self._centre: tuple[int, float] = (-1, 0.0)  # version of the weights, their mean score
        model.measured = self.offset

    def __call__(self, stats: Stats) -> None:
        stats.add("score/training", self.mean())
        if self.unseen is None:
            return
        found = self._items(self.unseen)
        items = [item for _, item in found]
        of_items = self._scores(items)
        if any(item.comparisons for item in items):
            self.report = self._compared(
                [self._said(self.unseen, place, item) for place, item in found], items, of_items
            )
        else:
            self.report = self._labelled(items, of_items)
        for name, figure in self.report["figures"].items():
            stats.add(f"eval/{name.replace(' ', '_')}", figure["mean"])
        stats.add("eval/tasks", len(items))

    def offset(self) -> float:
        """Return the offset that services add to scores. Comparisons do not define a score of 0; labels do."""
        return 0.0 if self.objective.algorithm.link.reads_labels else -self.mean()

    def mean(self) -> float:
        """Return the mean score of `CENTRED_ON` evenly spread training examples under the current weights."""
        if self._centre[0] != self.learner.version:
            seen = self._items(self.source.items, CENTRED_ON)
            scores = [score for of_item in self._scores([item for _, item in seen]) for score in of_item]
            self._centre = self.learner.version, float(np.mean(scores)) if scores else 0.0
        return self._centre[1]

    def _items(self, items: PreferenceExamples, most: int | None = None) -> list[tuple[int, PreferenceExample]]:
        count = len(items)
        some = count if most is None else min(most, count)
        places = range(some) if count == ENDLESS else [place * count // some for place in range(some)]
        return [(place, item) for place in places for item in (items[place],) if item is not None]

    def _scores(self, items: Sequence[PreferenceExample]) -> list[list[float]]:
        """Return the scores of each preference example's responses (or of their steps), in order."""
        found: list[list[float]] = [[] for _ in items]
        for first in range(0, len(items), AT_ONCE):
            for places, batch in self.source.batches(items[first : first + AT_ONCE]):
                (outputs,) = self.learner.evaluate([batch], want=self.objective.wants)
                scores = self.objective.scores(outputs, batch).tolist()
                done = 0
                for place in places:
                    own = items[first + place].responses
                    steps = sum(sum(1 for s in t.spans if s.learned) for t in own)
                    count = len(own) if self.objective.mean else steps
                    found[first + place] = scores[done : done + count]
                    done += count
        return found

    def _compared(
        self, said: Sequence[ComparedTexts], items: Sequence[PreferenceExample], scores: Sequence[list[float]]
    ) -> dict[str, Any]:
        margins = [
            [own[c.better] - own[c.worse] for c in item.comparisons] for item, own in zip(items, scores, strict=True)
        ]
        won = [[0.5 if m == 0 else float(m > 0) for m in own] for own in margins]
        longer = [longer_wins(item) for item in said]
        if self._words is None:
            training = [self._said(self.source.items, place, item) for place, item in self._items(self.source.items)]
            self._words = Perceptron.learned(training)
        figures = {
            "accuracy": _figure(won),
            "longer wins": _figure(longer),
            "shorter wins": _figure([[1 - x for x in own] for own in longer]),
            "bag of words": _figure([self._words.wins(item) for item in said]),
        }
        flat = np.array([m for own in margins for m in own])
        figures["calibration error"] = {"mean": _calibration_error(flat)}
        return {
            "prompts": len(items),
            "comparisons": len(flat),
            "figures": figures,
            "by_margin": _by_margin(flat),
            "offset": self.offset(),
        }

    def _labelled(self, items: Sequence[PreferenceExample], scores: Sequence[list[float]]) -> dict[str, Any]:
        """Return the report on labels. `gain`: the accuracy less that of always giving the commoner label."""
        gain: dict[str, Any] = {}
        labels = [[value for own in item.labels for value in own] for item in items]
        if isinstance(self.objective.algorithm.link, SquaredError):
            errors = [[(s - y) ** 2 for s, y in zip(a, b, strict=True)] for a, b in zip(scores, labels, strict=True)]
            mean = float(np.mean([y for own in labels for y in own]))
            constant = [[(y - mean) ** 2 for y in own] for own in labels]
            both = {"squared error": errors, "squared error of a constant": constant}
            figures = {name: _figure(values, share=False) for name, values in both.items()}
        else:
            pairs = [list(zip(a, b, strict=True)) for a, b in zip(scores, labels, strict=True)]
            right = [[float((s > 0) == (y > 0.5)) for s, y in own] for own in pairs]
            common = bool(np.mean([y > 0.5 for own in labels for y in own]) >= 0.5)
            guessed = [[float((y > 0.5) == common) for y in own] for own in labels]
            apart = [
                [a - b for a, b in zip(own, other, strict=True)] for own, other in zip(right, guessed, strict=True)
            ]
            gain = {"gain": _figure(apart, share=False)}
            figures = {
                "accuracy": _figure(right),
                "always the commoner": _figure(guessed),
                "area under the curve": {"mean": _area(pairs)},
            }
            if any(len(own) > 1 for own in labels):
                figures["verdict on solutions"] = _figure(
                    [[float(all(s > 0 for s, _ in own) == all(y > 0.5 for _, y in own))] for own in pairs]
                )
        count = {"prompts": len(items), "labels": sum(map(len, labels))}
        return {**count, "figures": figures, **gain, "offset": self.offset()}

    def _said(self, items: PreferenceExamples, place: int, item: PreferenceExample) -> ComparedTexts:
        texts = items.tasks[place]["responses"]
        return ComparedTexts(texts, [(c.better, c.worse) for c in item.comparisons])


def _figure(values: Sequence[Sequence[float]], share: bool = True) -> dict[str, Any]:
    """Return the mean over all values, with an interval clustered by preference example."""
    sums, counts = [sum(own) for own in values], [float(len(own)) for own in values]
    interval = (share_interval if share else ratio_interval)(sums, counts, of="items")
    return stated(sum(sums) / max(1.0, sum(counts)), interval)


def _calibration_error(margins: np.ndarray[Any, Any]) -> float:
    """Return the expected calibration error, in equal bins, of sigma(|margin|) as the probability that the higher
    score is right.
    """
    confidence = 1 / (1 + np.exp(-np.abs(margins)))
    right = np.where(margins == 0, 0.5, margins > 0)
    bins = np.minimum(((confidence - 0.5) * 2 * BINS).astype(int), BINS - 1)
    gaps = [
        abs(confidence[bins == b].mean() - right[bins == b].mean()) * (bins == b).mean() for b in set(bins.tolist())
    ]
    return float(sum(gaps))


def _by_margin(margins: np.ndarray[Any, Any]) -> list[dict[str, float]]:
    """Return the accuracy of equal parts of the comparisons, sorted by the absolute difference of scores."""
    ordered = margins[np.argsort(np.abs(margins), kind="stable")]
    parts = [part for part in np.array_split(ordered, PARTS) if len(part)]
    return [
        {
            "most": float(np.abs(part).max()),
            "accuracy": float(np.where(part == 0, 0.5, part > 0).mean()),
            "n": len(part),
        }
        for part in parts
    ]


def _area(pairs: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Return the chance that a good response outscores a bad one (area under the ROC curve); ties count half."""
    good = np.sort([s for own in pairs for s, y in own if y > 0.5])
    bad = np.array([s for own in pairs for s, y in own if y <= 0.5])
    if not len(good) or not len(bad):
        return float("nan")
    above = len(good) - (np.searchsorted(good, bad, "left") + np.searchsorted(good, bad, "right")) / 2
    return float(above.mean() / len(good))
