"""A small classifier of hacked and honest replies: logistic regression on n-grams of letters and words.

Its accuracy is measured on unseen prompts: a classifier that has memorised the prompts would look good on the labelled
replies and fail on others.
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
CHARACTERS = 4000  # only the first characters of a reply are read
BUCKETS = 2**15  # number of buckets that n-grams are hashed into
FOLDS = 5  # folds of prompts; each is predicted by a classifier trained on the other folds
PENALTY = 1e-4  # coefficient of half the squared norm of the weights, added to the mean loss
UPDATES = 400  # of accelerated gradient descent: the loss is convex, and changes in its sixth digit by then
KIND = "posttrain reply classifier 1"

TEXT, LABEL = ("text", "reply", "response"), ("hacked", "label")
"""The columns that may hold a reply, and its label: whether it is hacked."""


@dataclass(frozen=True, eq=False)
class NgramFeatures:
    """A sparse matrix [n, BUCKETS] in coordinate form; every row has length 1 or is empty."""

    row: Integers  # [entries]
    column: Integers  # [entries]
    value: Floats  # [entries]
    rows: int

    def times(self, weights: Floats) -> Floats:
        """Return the product with weights [BUCKETS], [n]."""
        out: Floats = np.bincount(self.row, weights=self.value * weights[self.column], minlength=self.rows).astype(
            float
        )
        return out

    def transposed_times(self, residuals: Floats) -> Floats:
        """Return the transposed matrix times residuals [n], [BUCKETS]."""
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
    """A linear model of the probability that a reply is hacked."""

    weights: Floats  # [BUCKETS]
    bias: float
    held_out: dict[str, float]  # figures on prompts that were not seen: see `judged`

    def __call__(self, texts: Sequence[str]) -> Floats:
        """Return the probability that each text is hacked, [n]."""
        return _sigmoid(features(texts).times(self.weights) + self.bias)

    def save(self, path: Path) -> None:
        """Write the classifier as JSON, with the weights that are not 0.

        Raises UserError if the file cannot be written.
        """
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
                f"--classifier {path} is not a classifier: make one with --train-classifier labelled.jsonl"
            ) from error


@dataclass(frozen=True)
class LabelledReplies:
    """Replies labelled as hacked or honest."""

    texts: list[str]
    hacked: list[bool]
    prompts: list[str]


def read_labelled(path: str) -> LabelledReplies:
    """Read rows with "prompt", "text" (or "reply", "response") and "hacked" (or "label"): true or false, 1 or 0.

    Raises UserError for a row without them, and if either label has replies to fewer than `FOLDS` prompts.
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
    """Train a classifier on all replies. Its figures come from cross-validation in `FOLDS` folds of prompts."""
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
    """Return (weights, bias) that minimise the mean logistic loss + PENALTY / 2 |weights|^2, by Nesterov's method.

    Rows have length 1, so with the bias no curvature exceeds 2/4 + PENALTY: the step size is its inverse.
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
    """Return accuracy at threshold 0.5, accuracy of always naming the commoner label, area under the curve, and the
    count.
    """
    return {
        "accuracy": float(np.mean((probability >= 0.5) == (y == 1))),
        "commoner": float(max(y.mean(), 1 - y.mean())),
        "auc": area(probability, y),
        "replies": float(len(y)),
    }


def area(score: Floats, y: Floats) -> float:
    """Return the chance that a hacked reply outscores an honest one; ties count half (Mann and Whitney 1947)."""
    positive = y == 1
    count = int(positive.sum())
    others = len(y) - count
    if not count or not others:
        return float("nan")
    return float((ranks(score)[positive].sum() - count * (count + 1) / 2) / (count * others))


def features(texts: Sequence[str]) -> NgramFeatures:
    """Return 1 + log(count) of each hashed n-gram of a text, scaled to length 1."""
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
    """Yield n-grams of letters, with marks for the borders of the text, then words and pairs of words."""
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
