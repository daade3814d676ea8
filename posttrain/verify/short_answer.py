"""Compares short answers as in question answering: exact match, F1 and containment, after SQuAD's normalisation.

Rajpurkar et al. 2016 (SQuAD, arXiv 1606.05250, section 6.1), as in the official script of version 2.0. Of several gold
answers the best match counts. Golds that normalisation makes empty are left out; if all are empty, the question has no
answer, and an empty answer is right.

An answer of None, the result if no answer was found in a reply, is wrong.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from posttrain.core.types import Invalid

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """Return the text in lower case, without ASCII punctuation and a, an, the, words one space apart.

    >>> normalised("The  U.S.A., an example!")
    'usa example'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str | None, golds: str | Sequence[str]) -> float | Invalid:
    """1.0 if the answer equals one of the golds after normalisation. Invalid if there is no gold.

    >>> exact_match("the Eiffel Tower!", ["Eiffel tower", "La tour Eiffel"])
    1.0
    """
    return _compared(answer, golds, lambda said, known: said in known)


def f1(answer: str | None, golds: str | Sequence[str]) -> float | Invalid:
    """The harmonic mean of precision and recall of the answer's words, for the best gold. Invalid if there is no gold.

    >>> f1("in the city of Paris", "Paris")
    0.4
    """
    return _compared(answer, golds, lambda said, known: max(_f1(said.split(), gold.split()) for gold in known))


def contains_answer(answer: str | None, golds: str | Sequence[str], *, words: bool = False) -> float | Invalid:
    """1.0 if the answer contains a gold answer after normalisation, else 0.0.

    It is the sub-EM of Search-R1 (arXiv 2503.09516), its `subem_check`. Characters are compared, so "13" contains "3";
    with `words`, a gold must match whole words. An answer that lists every candidate is right in both cases, so limit
    the length of the answer. Invalid if there is no gold.

    >>> contains_answer("It was Marie Curie.", "Marie Curie")
    1.0
    """

    def contained(said: str, known: list[str]) -> bool:
        if known == [""]:
            return not said
        return any(f" {gold} " in f" {said} " if words else gold in said for gold in known)

    return _compared(answer, golds, contained)


def _compared(
    answer: str | None, golds: str | Sequence[str], score: Callable[[str, list[str]], float]
) -> float | Invalid:
    """Return the score of (answer, golds), both normalised; 0.0 without an answer."""
    every = [golds] if isinstance(golds, str) else list(golds)
    if not every:
        return Invalid("there is no gold answer")
    if not all(isinstance(gold, str) for gold in every):
        return Invalid("gold answers must be text")
    known = [found for gold in every if (found := normalised(gold))] or [""]
    return 0.0 if answer is None else float(score(normalised(answer), known))


def _f1(said: list[str], gold: list[str]) -> float:
    if not said or not gold:
        return float(said == gold)
    common = (Counter(said) & Counter(gold)).total()
    # 2 P R / (P + R) with P = common / words and R = common / gold
    return 2 * common / (len(said) + len(gold))
