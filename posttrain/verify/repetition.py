"""Measures the repetition in a text: n-grams, the longest repeated substring, a loop at the end."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from posttrain.core.types import UserError
from posttrain.verify.length import words

if TYPE_CHECKING:  # numpy is imported where an array is made
    import numpy as np
    from numpy.typing import NDArray

LONGEST = 100_000  # most characters read of a text where time grows faster than length
TIMES = 4  # repeats from which on the end of a text is a loop


def distinct(text: str | Sequence[Hashable], n: int = 2) -> float:
    """Distinct n-grams / all n-grams, 1.0 if there are none: distinct-n (Li et al. 2016, arXiv 1510.03055, sec. 5.1).

    The n-grams of a text are of lower-case words; those of a list (of tokens, for example) are of its elements.

    >>> distinct("a b a b a", 2)
    0.5
    """
    if n < 1:
        raise UserError(f"n must be at least 1, not {n}")
    items = [word.lower() for word in words(text)] if isinstance(text, str) else list(text)
    total = len(items) - n + 1
    if total < 1:
        return 1.0
    return len(set(zip(*(islice(items, i, None) for i in range(n)), strict=False))) / total


def repetition_penalty(text: str | Sequence[Hashable], n: int = 3, most: float = 1.0) -> float:
    """-most (1 - distinct-n): from 0.0, if no n-gram is repeated, towards -most (Yeo et al. 2025, arXiv 2502.03373).

    It depends on the share of repeated n-grams alone. Any long text repeats more than a short one, so compare texts of
    similar length.

    >>> repetition_penalty("yes yes yes yes", n=1)
    -0.75
    """
    return -most * (1.0 - distinct(text, n))


def longest_repeat(text: str) -> int:
    """The length in characters of the longest substring that occurs at least twice; occurrences may overlap.

    Ranks of substrings are doubled as in a suffix array (Manber and Myers 1993), so the result does not depend on a
    hash.

    >>> longest_repeat("banana")
    3
    """
    import numpy as np

    text = text[:LONGEST]
    if len(text) < 2:
        return 0
    letters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    # ranks[k][i]: of the 2^k characters from index i on
    ranks = [np.unique(letters, return_inverse=True)[1].astype(np.int64)]
    while (size := 2 ** (len(ranks) - 1)) * 2 <= len(text):
        joined = _paired(ranks[-1][:-size], ranks[-1][size:])
        ranks.append(joined)
        if int(joined.max()) + 1 == len(joined):  # all substrings of this length are different
            break
    best = np.zeros(len(text), dtype=np.int64)  # ranks of the substrings of the length found so far
    length = 0
    for k in reversed(range(len(ranks))):
        size = 2**k
        if length + size >= len(text):
            continue
        count = len(text) - length - size + 1
        longer = _paired(best[:count], ranks[k][length : length + count])
        if int(longer.max()) + 1 < count:
            best, length = longer, length + size
    return length


def _paired(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number pairs from 0 on; equal pairs get equal numbers."""
    import numpy as np

    both = first * (int(second.max()) + 1) + second
    return np.unique(both, return_inverse=True)[1].astype(np.int64)


def looping(text: str, times: int = TIMES) -> float:
    """The share of a text that is a loop at its end: one block of any length, `times` times or more; else 0.0.

    A model that is stuck writes the same line until its budget ends; the last repeat may be truncated. Only the last
    100,000 characters are read.

    >>> looping("Wait, " * 6)
    1.0
    """
    if times < 2:
        raise UserError(f"times must be at least 2, not {times}")
    end = text[-LONGEST:][::-1]
    best = 0
    for period, more in enumerate(_prefix_matches(end)):
        if period and more >= (times - 1) * period:
            best = max(best, period + more)
    return best / len(text) if text else 0.0


def _prefix_matches(text: str) -> list[int]:
    """Return for each index the number of characters from there that equal the text's beginning: the Z function
    (Gusfield 1997).
    """
    found = [0] * len(text)
    left = right = 0
    for i in range(1, len(text)):
        same = min(right - i, found[i - left]) if i < right else 0
        while i + same < len(text) and text[same] == text[i + same]:
            same += 1
        found[i] = same
        if i + same > right:
            left, right = i, i + same
    return found
