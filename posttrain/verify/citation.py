"""Checks the form of citations: every cited id was shown, every sentence cites, every quote is in a source.

A citation is an id in square brackets: [3], [3, 5], [doc-7]. Whether a source supports a statement is not checked
(ALCE, Gao et al. 2023, arXiv 2305.14627, uses an entailment model for its citation recall and precision).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Sequence

from posttrain.verify.length import sentences, words

MOST_QUOTES = 200  # most lookups per text; further quotes count as not found
LONGEST = 2**20  # most characters searched in a text, and in all sources together

_CITATION = re.compile(r"\[([^\[\]\n]{1,80})\](?!\()")
_QUOTE = re.compile(
    '"([^"\n]{1,2000})"|\u201c([^\u201c\u201d\n]{1,2000})\u201d|\u00ab([^\u00ab\u00bb\n]{1,2000})\u00bb'
)
_ALIKE = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-"})


def cited(text: str) -> list[str]:
    """Return the ids cited in a text, in order, with repetitions. A link, `[text](address)`, is not a citation.

    >>> cited("Rain [2, 7]. Snow [2].")
    ['2', '7', '2']
    """
    found = []
    for match in _CITATION.finditer(text[:LONGEST]):
        found += [part.strip() for part in re.split("[,;]", match[1]) if part.strip()]
    return found


def cites_what_was_shown(text: str, shown: Collection[str | int]) -> float:
    """The share of citations whose id is in `shown`; 0.0 for a text without citations.

    >>> cites_what_was_shown("Rain [1]. Snow [9].", shown=[1, 2, 3])
    0.5
    """
    known, ids = {str(one) for one in shown}, cited(text)
    return sum(one in known for one in ids) / len(ids) if ids else 0.0


def cites_every_sentence(text: str) -> float:
    """The share of the sentences that have a citation; 0.0 for a text without sentences.

    >>> cites_every_sentence("Rain fell [1]. It was cold. Then snow.[2]")
    0.6666666666666666
    """
    every = sentences(text[:LONGEST])
    return sum(bool(cited(sentence)) for sentence in every) / len(every) if every else 0.0


def quotes_verbatim(text: str, sources: Sequence[str], least_words: int = 3) -> float:
    """The share of quotes that are in a source word for word; 1.0 for a text without quotes.

    A quote is text between quotation marks with at least `least_words` words: shorter ones are names and irony. Case,
    white space, the kind of apostrophes and dashes, and full stops at a quote's end do not matter. "..." and [...] mark
    omissions, and the parts between them are looked up separately.

    >>> quotes_verbatim('He said "the war is over" and "all is well now".', ["In 1945 the war is over, they wrote."])
    0.5
    """
    quotes = [next(filter(None, m.groups())) for m in _QUOTE.finditer(text[:LONGEST])]
    quotes = [quote for quote in quotes if len(words(quote)) >= least_words]
    if not quotes:
        return 1.0
    where = [_plain(source) for source in _bounded(sources)]
    found = 0
    for quote in quotes[:MOST_QUOTES]:
        parts = [part for raw in re.split(r"\[?(?:\.\.\.|\u2026)\]?", quote) if (part := _plain(raw).strip(" .,;:!?"))]
        found += bool(parts) and any(all(part in source for part in parts) for source in where)
    return found / len(quotes)


def _bounded(sources: Sequence[str]) -> list[str]:
    left, found = LONGEST, []
    for source in sources:
        found.append(source[:left])
        left = max(0, left - len(source))
    return found


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text.translate(_ALIKE)).casefold().split())
