"""Text shared by replies to different prompts: openings and closings that spread, and near-duplicates."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rapidfuzz import process
from rapidfuzz.distance import Indel

from posttrain.apps.audit.correlation import Estimate, Floats, centred, change, correlation
from posttrain.apps.audit.replies import Replies

SIZES = (1, 3)  # words of an opening or a closing: a mark, a phrase
COMPARED = 128  # replies of a step that are compared for near-duplicates
CHARACTERS = 2000  # only the first characters of a reply are compared
ALIKE = 0.9  # from this similarity on (2 x longest common subsequence / both lengths) two replies are nearly the same

_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # written without spaces: each counts as a word
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\W{_IDEOGRAPHS}]+|[^\w\s\ufffd]")  # the last: half a character, cut off

Gram = tuple[str, ...]


@dataclass(frozen=True)
class Spread:
    """The opening or closing, of a given number of words, whose share of the replies grew most from early to late."""

    place: str  # "opening" or "closing"
    size: int  # words
    gram: Gram
    early: float  # share, every group counting the same
    late: float
    growth: Estimate
    reward: Estimate  # correlation with the reward among replies to one prompt in one step

    def as_dict(self) -> dict[str, object]:
        own = {
            "place": self.place,
            "words": self.size,
            "text": " ".join(self.gram),
            "early": self.early,
            "late": self.late,
        }
        return {**own, "growth": self.growth.as_dict(), "correlation with reward": self.reward.as_dict()}


def words(text: str) -> list[str]:
    """Return the words in lower case; a punctuation mark is a word.

    >>> words("Sure! It's 42.")
    ['sure', '!', 'it', "'", 's', '42', '.']
    """
    return _WORD.findall(text.lower())


def spreads(replies: Replies) -> list[Spread]:
    """Return a Spread for each place and size, fastest growth first.

    Replies with fewer words than the size do not count.
    """
    if not replies.ends[0].any():
        return []
    said = [words(text) for text in replies.text]
    equal = 1 / np.bincount(replies.cell)[replies.cell]  # every group counts as one, whatever its size
    found = []
    for place in ("opening", "closing"):
        for size in SIZES:
            grams = [tuple(w[:size] if place == "opening" else w[-size:]) for w in said]
            found.append(_fastest(replies, grams, equal, place, size))
    return sorted((s for s in found if s is not None), key=lambda s: s.early - s.late)


def _fastest(replies: Replies, grams: Sequence[Gram], equal: Floats, place: str, size: int) -> Spread | None:
    early, late = replies.ends
    shares = [_shares(grams, equal, side) for side in (early, late)]
    if not (candidates := [gram for gram in shares[1] if len(gram) == size]):
        return None
    gram = max(candidates, key=lambda g: (shares[1][g] - shares[0].get(g, 0.0), g))
    has = np.array([g == gram for g in grams], dtype=np.float64)
    ends = early | late
    growth = change(has[ends], late[ends], replies.prompt[ends])
    reward = correlation(centred(has, replies.cell), centred(replies.reward, replies.cell), replies.prompt)
    return Spread(place, size, gram, shares[0].get(gram, 0.0), shares[1][gram], growth, reward)


def _shares(grams: Sequence[Gram], equal: Floats, side: NDArray[np.bool_]) -> dict[Gram, float]:
    weight: dict[Gram, float] = defaultdict(float)
    for place in np.flatnonzero(side).tolist():
        weight[grams[place]] += equal[place]
    total = sum(weight.values())
    return {gram: value / total for gram, value in weight.items()}


def commonest_opening(replies: Replies) -> Floats:
    """Return, for each step, the share of replies that begin with its commonest three words, [steps]."""
    opening = [tuple(words(text)[:3]) for text in replies.text]
    found = []
    for step in replies.steps:
        counted = Counter(opening[place] for place in np.flatnonzero(replies.step == step).tolist())
        found.append(max(counted.values()) / counted.total() if counted else np.nan)
    return np.array(found)


def near_duplicates(replies: Replies) -> Floats:
    """Return 1.0 for a reply that is nearly the same as one to another prompt in its step, else 0.0; nan: not
    compared. [n]

    At most `COMPARED` replies of a step, evenly spread, are compared. Pairs whose prompts have the same text or answer
    are not compared, as their correct replies may well be the same.
    """
    prompt = np.array([str(t["prompt"]) for t in replies.tasks])
    answer = np.array([str(t.get("answer")) if t.get("answer") is not None else f"#{t['id']}" for t in replies.tasks])
    found = np.full(len(replies), np.nan)
    for step in replies.steps:
        inside = np.flatnonzero(replies.step == step)
        some = (
            inside[np.linspace(0, len(inside) - 1, min(COMPARED, len(inside))).round().astype(int)]
            if len(inside)
            else inside
        )
        texts = [" ".join(replies.text[place][:CHARACTERS].lower().split()) for place in some.tolist()]
        alike = (
            process.cdist(texts, texts, scorer=Indel.normalized_similarity, score_cutoff=ALIKE, dtype=np.float32)
            >= ALIKE
        )
        other = (prompt[some][:, None] != prompt[some]) & (answer[some][:, None] != answer[some])
        found[some] = (alike & other).any(1)
    return found
