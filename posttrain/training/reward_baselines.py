"""Baselines of reward models: rules of length, and a bag-of-words classifier.

A pair is (index of the better response, index of the worse) among the texts of a preference example.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.data.tasks import order

WORD = re.compile(r"\w+|[^\w\s]")
PASSES = 10  # passes over the comparisons
MOST = 20_000  # most comparisons that the perceptron is trained on

Texts = Sequence[str]
Pair = tuple[int, int]


@dataclass(frozen=True)
class ComparedTexts:
    """The texts of a preference example, and their comparisons."""

    texts: Texts
    pairs: Sequence[Pair]


def longer_wins(item: ComparedTexts) -> list[float]:
    """Return for each pair 1 if the better text is longer in words, 0 if it is shorter, 0.5 for a tie."""
    lengths = [len(WORD.findall(text)) for text in item.texts]
    return [_won(lengths[better] - lengths[worse]) for better, worse in item.pairs]


@dataclass(frozen=True)
class Perceptron:
    """An averaged perceptron: word weights, averaged over their values at all examples (Freund and Schapire 1999;
    Collins 2002).
    """

    weights: dict[str, float]

    @staticmethod
    def learned(items: Sequence[ComparedTexts], seed: int = 0) -> Perceptron:
        """Train a perceptron on the differences in word counts of compared texts."""
        differences = [_difference(item, pair) for item in items for pair in item.pairs][:MOST]
        weights: dict[str, float] = {}
        weighed: dict[str, float] = {}  # sum of each update times the number of its example
        seen = 0
        for epoch in range(PASSES):
            for place in order(len(differences), epoch, seed):
                seen += 1
                words = differences[int(place)]
                if sum(weights.get(word, 0.0) * count for word, count in words.items()) <= 0:
                    for word, count in words.items():
                        weights[word] = weights.get(word, 0.0) + count
                        weighed[word] = weighed.get(word, 0.0) + seen * count
        return Perceptron({word: value - weighed[word] / max(1, seen) for word, value in weights.items()})

    def wins(self, item: ComparedTexts) -> list[float]:
        """Return for each pair 1 if the better text scores higher, 0 if it scores lower, 0.5 for a tie."""
        scores = [sum(self.weights.get(w, 0.0) for w in _words(text)) for text in item.texts]
        return [_won(scores[better] - scores[worse]) for better, worse in item.pairs]


def _words(text: str) -> list[str]:
    return [word.lower() for word in WORD.findall(text)]


def _difference(item: ComparedTexts, pair: Pair) -> dict[str, int]:
    better, worse = (Counter(_words(item.texts[place])) for place in pair)
    better.subtract(worse)
    return {word: count for word, count in better.items() if count}


def _won(difference: float) -> float:
    return 0.5 if difference == 0 else float(difference > 0)
