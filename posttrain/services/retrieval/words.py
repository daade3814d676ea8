"""Words of a text for search, in lower case and without accents."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

LONGEST_WORD = 64  # most characters of a word: longer ones are split into pieces
MOST_WORDS = 1024  # most words of a query, as in Lucene

STOP_WORDS = frozenset(
    ["a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no", "not", "of", "on",
     "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to", "was", "will", "with"]
)  # fmt: skip
"""Lucene's English stop words. They are indexed, but dropped from a query that has other words, as most passages
contain them.
"""

_ONE_BY_ONE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Chinese and Japanese have no spaces
_WORD = re.compile(rf"[{_ONE_BY_ONE}]|[^\W{_ONE_BY_ONE}]{{1,{LONGEST_WORD}}}")
_ACCENT = re.compile("[\u0300-\u036f]")


def words_of(text: str) -> list[str]:
    """Return the words in order.

    >>> words_of("Beyoncé's 1st No. 1: 東京")
    ['beyonce', 's', '1st', 'no', '1', '東', '京']
    """
    if not text.isascii():
        text = unicodedata.normalize("NFKC", _ACCENT.sub("", unicodedata.normalize("NFKD", text)))
    return _WORD.findall(text.casefold())


def query_words(query: str) -> Sequence[str]:
    """Return the words of a query to search for.

    >>> query_words("who wrote The Hobbit"), query_words("The Who"), query_words("to be or not to be")
    (['who', 'wrote', 'hobbit'], ['who'], ['to', 'be', 'or', 'not', 'to', 'be'])
    """
    words = words_of(query)
    return ([word for word in words if word not in STOP_WORDS] or words)[:MOST_WORDS]
