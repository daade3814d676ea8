"""A small classifier of hacked and honest replies: logistic regression on n-grams of letters and words.

Its accuracy is measured on prompts that it has not seen: a classifier that knows the prompts by heart would look good
on labelled replies and fail on others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from zlib import crc32

import numpy as np

from posttrain.apps.audit.correlation import Floats, Integers, ranks
from posttrain.apps.audit.shared_phrases import words
from posttrain.core import user_files
from posttrain.core.messages import clip
from posttrain.core.seeds import seed_of
from posttrain.core.types import UserError
from posttrain.data.rows import load_rows

LETTERS = (1, 2, 3, 4)  # sizes of the n-grams of letters
CHARACTERS = 4000  # of a reply, the first ones that are looked at
BUCKETS = 2**15  # n-grams are hashed into so many
FOLDS = 5  # prompts are dealt into so many parts; each is judged by a classifier of the others
PENALTY = 1e-4  # of half the squared norm of the weights, beside the mean loss
UPDATES = 400  # of accelerated gradient descent: the loss is convex, and changes in its sixth digit by then
KIND = "posttrain reply classifier 1"

TEXT, LABEL = ("text", "reply", "response"), ("hacked", "label")
"""The columns that may hold a reply, and its label: whether it is hacked."""


@dataclass(frozen=True, eq=False)
class NgramFeatures:
    """A sparse matrix [n, BUCKETS], row by row; every row has length 1 or is empty."""

    row: Integers  # [entries]
    column: Integers  # [entries]
    value: Floats  # [entries]
    rows: int

    def times(self, weights: Floats) -> Floats:
        """[BUCKETS] -> [n]."""
        out: Floats = np.bincount(self.row, weights=self.value * weights[self.column], minlength=self.rows).astype(
            float
        )
        return out

    def transposed_times(self, residuals: Floats) -> Floats:
        """[n] -> [BUCKETS]."""
        out: Floats = np.bincount(self.column, weights=self.value * residuals[self.row], minlength=BUCKETS).astype(
            float
        )
        return out

    def some(self, places: Integers) -> NgramFeatures:
        """Return the rows at these places, in ascending order."""
        number = np.full(self.rows, -1)
        number[places] = np.arange(len(places))
        kept = number[self.row] >= 0
        return NgramFeatures(number[self.row[kept]], self.column[kept], self.value[kept], len(places))


@dataclass(frozen=True, eq=False)
class HackClassifier:
    """The chance that a reply is hacked."""

    weights: Floats  # [BUCKETS]
    bias: float
    held_out: dict[str, float]  # figures on prompts that were not seen: see `judged`

    def __call__(self, texts: Sequence[str]) -> Floats:
        """[n] probabilities."""
        return _sigmoid(features(texts).times(self.weights) + self.bias)

    def save(self, path: Path) -> None:
        """Write it as JSON, with the weights that are not 0. Raises UserError if it cannot be written."""
        at = np.flatnonzero(self.weights)
        weights = {str(place): float(f"{self.weights[place]:.6g}") for place in at.tolist()}
        content = {"kind": KIND, "bias": self.bias, "held_out": self.held_out, "weights": weights}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            user_files.writable(path).write_text(json.dumps(content) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--classifier {path} cannot be written: {error.strerror}") from error

    @staticmethod
    def load(path: Path) -> HackClassifier:
        """Read the file that `save` wrote. Raises UserError if the file holds no classifier."""
        try:
            content = json.loads(user_files.text(path))
            assert content["kind"] == KIND
            weights = np.zeros(BUCKETS)
            for place, value in content["weights"].items():
                weights[int(place)] = value
            return HackClassifier(weights, float(content["bias"]), dict(content["held_out"]))
        except OSError as error:
            raise UserError(f"--classifier {path} cannot be read: {error.strerror}") from error
        except Exception as error:  # any other content
            raise UserError(
                f"--classifier {path} holds no classifier: make one with --train-classifier labelled.jsonl"
            ) from error


@dataclass(frozen=True)
class LabelledReplies:
    """Replies of which it is known whether they are hacked."""

    texts: list[str]
    hacked: list[bool]
    prompts: list[str]


def read_labelled(path: str) -> LabelledReplies:
    """Rows with "prompt", "text" (or "reply", "response") and "hacked" (or "label"): true or false, 1 or 0.

    Raises UserError for a row without them, and if only one kind is there, or only one prompt.
    """
    texts, hacked, prompts = [], [], []
    for number, row in enumerate(load_rows(path), 1):
        text, label = (
            next((row[name] for name in names if row.get(name) is not None), None) for names in (TEXT, LABEL)
        )
        if not isinstance(text, str):
            raise UserError(f"{path}: row {number} has no reply: name it {', '.join(TEXT)}")
        if label not in (0, 1):
            raise UserError(f'{path}: row {number} has {clip(repr(label), 40)} as "hacked": it is true or false')
        if not isinstance(row.get("prompt"), str):
            raise UserError(f'{path}: row {number} has no "prompt": figures are measured on prompts that were not seen')
        texts.append(text)
        hacked.append(bool(label))
        prompts.append(row["prompt"])
    for label in (True, False):
        if len({p for p, h in zip(prompts, hacked, strict=True) if h is label}) < FOLDS:
            kind = "hacked" if label else "honest"
            raise UserError(f"{path}: {kind} replies to at least {FOLDS} prompts are needed, to measure on unseen ones")
    return LabelledReplies(texts, hacked, prompts)


def train(labelled: LabelledReplies, seed: int = 0) -> HackClassifier:
    """Return a classifier of all replies, with figures of others that were each kept from a fifth of the prompts."""
    x, y = features(labelled.texts), np.array(labelled.hacked, dtype=np.float64)
    fold = np.array([seed_of(seed, "fold", prompt) % FOLDS for prompt in labelled.prompts])
    unseen = np.full(len(y), np.nan)
    for part in range(FOLDS):
        away, kept = np.flatnonzero(fold == part), np.flatnonzero(fold != part)
        if len(away) and 0 < y[kept].sum() < len(kept):
            weights, bias = fit(x.some(kept), y[kept])
            unseen[away] = _sigmoid(x.some(away).times(weights) + bias)
    known = np.isfinite(unseen)
    weights, bias = fit(x, y)
    return HackClassifier(weights, bias, judged(unseen[known], y[known]))


def fit(x: NgramFeatures, y: Floats) -> tuple[Floats, float]:
    """(weights, bias) of the least mean logistic loss + PENALTY / 2 |weights|^2, by Nesterov's method.

    Rows have length 1, so with the bias no curvature exceeds 2/4 + PENALTY: the step is one over that.
    """
    step = 1 / (0.5 + PENALTY)
    weights, bias = np.zeros(BUCKETS), float(np.log(y.mean() / (1 - y.mean())))
    ahead, ahead_bias = weights, bias
    for update in range(1, UPDATES + 1):
        residuals = (_sigmoid(x.times(ahead) + ahead_bias) - y) / len(y)
        new = ahead - step * (x.transposed_times(residuals) + PENALTY * ahead)
        new_bias = ahead_bias - step * float(residuals.sum())
        momentum = (update - 1) / (update + 2)
        ahead, ahead_bias = new + momentum * (new - weights), new_bias + momentum * (new_bias - bias)
        weights, bias = new, new_bias
    return weights, bias


def judged(probability: Floats, y: Floats) -> dict[str, float]:
    """Accuracy at one half, that of always naming the commoner kind, area under the curve, and how many replies."""
    return {
        "accuracy": float(np.mean((probability >= 0.5) == (y == 1))),
        "commoner": float(max(y.mean(), 1 - y.mean())),
        "auc": area(probability, y),
        "replies": float(len(y)),
    }


def area(score: Floats, y: Floats) -> float:
    """Chance that a hacked reply has a higher score than an honest one, ties counting half (Mann and Whitney 1947)."""
    positive = y == 1
    count = int(positive.sum())
    others = len(y) - count
    if not count or not others:
        return float("nan")
    return float((ranks(score)[positive].sum() - count * (count + 1) / 2) / (count * others))


def features(texts: Sequence[str]) -> NgramFeatures:
    """1 + log(count) of each n-gram of a text, hashed, scaled to length 1."""
    rows, columns, values = [], [], []
    for number, text in enumerate(texts):
        hashed = np.array([crc32(gram.encode("utf-8", "replace")) % BUCKETS for gram in _grams(text)], dtype=np.int64)
        if not len(hashed):
            continue
        column, count = np.unique(hashed, return_counts=True)
        value = 1 + np.log(count)
        rows.append(np.full(len(column), number))
        columns.append(column)
        values.append(value / np.linalg.norm(value))
    if not rows:
        return NgramFeatures(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), len(texts))
    return NgramFeatures(np.concatenate(rows), np.concatenate(columns), np.concatenate(values), len(texts))


def _grams(text: str) -> Iterator[str]:
    """n-grams of letters, with the borders of the text; words and pairs of them."""
    cut = text[:CHARACTERS].lower()
    framed = f"\x02{cut}\x03"
    for size in LETTERS:
        yield from (f"c{framed[i : i + size]}" for i in range(len(framed) - size + 1))
    said = words(cut)
    yield from (f"w{word}" for word in said)
    yield from (f"b{one} {other}" for one, other in pairwise(said))


def _sigmoid(x: Floats) -> Floats:
    out: Floats = 0.5 * (1 + np.tanh(0.5 * x))
    return out
