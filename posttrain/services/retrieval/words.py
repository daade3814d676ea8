"""Decides what of a text is searched for: its words, in lower case and without accents."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

LONGEST_WORD = 64  # characters: what is longer is no word, and is taken in pieces
MOST_WORDS = 1024  # of a query: Lucene, too, stops at so many

STOP_WORDS = frozenset(
    ["a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no", "not", "of", "on",
     "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to", "was", "will", "with"]
)  # fmt: skip
"""Lucene's for English. They are in the index, but left out of a query that has other words: most passages have them."""

_ONE_BY_ONE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Chinese and Japanese have no spaces
_WORD = re.compile(rf"[{_ONE_BY_ONE}]|[^\W{_ONE_BY_ONE}]{{1,{LONGEST_WORD}}}")
_ACCENT = re.compile("[\u0300-\u036f]")


def words_of(text: str) -> list[str]:
    """The words in their order.

    >>> words_of("Beyoncé's 1st No. 1: 東京")
    ['beyonce', 's', '1st', 'no', '1', '東', '京']
    """
    if not text.isascii():
        text = unicodedata.normalize("NFKC", _ACCENT.sub("", unicodedata.normalize("NFKD", text)))
    return _WORD.findall(text.casefold())


def asked_words(query: str) -> Sequence[str]:
    """What of a query is searched for.

    >>> asked_words("who wrote The Hobbit"), asked_words("The Who"), asked_words("to be or not to be")
    (['who', 'wrote', 'hobbit'], ['who'], ['to', 'be', 'or', 'not', 'to', 'be'])
    """
    words = words_of(query)
    return ([word for word in words if word not in STOP_WORDS] or words)[:MOST_WORDS]
