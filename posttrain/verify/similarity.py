"""Similarity of two texts: edit similarity, ROUGE-L, BLEU and chrF, each from 0.0 to 1.0.

Lengths are bounded, so that no reply is slow: the first 20,000 characters of a reply count. A reference that is longer,
or empty, is Invalid. Of several references the best match counts, except in BLEU, which defines its own use of several.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence

from posttrain.core.types import Invalid, UserError

LONGEST = 20_000  # most characters of a text

References = str | Sequence[str]


def edit_similarity(reply: str, references: References) -> float | Invalid:
    """2 LCS / (n + m) over characters, LCS: length of the longest common subsequence (rapidfuzz: `fuzz.ratio` / 100).

    >>> edit_similarity("abcd", "abxd")
    0.75
    """
    from rapidfuzz.distance import Indel

    return _best(reply, references, lambda text, gold: float(Indel.normalized_similarity(text, gold)))


def rouge_l(reply: str, references: References, beta: float = 1.0) -> float | Invalid:
    """ROUGE-L, the F measure of the longest common subsequence of words (Lin 2004, section 3, eq. 2 to 4).

    (1 + beta^2) P R / (R + beta^2 P), where P and R are its shares of the reply's and of the reference's words. Words
    are runs of letters and digits in lower case, without stemming; Google's rouge-score uses beta 1.

    >>> round(rouge_l("police kill the gunman", "police killed the gunman"), 3)
    0.75
    """
    from rapidfuzz.distance import LCSseq

    def score(text: str, gold: str) -> float:
        said, wanted = _words(text), _words(gold)
        common = LCSseq.similarity(said, wanted)
        if not common:
            return 0.0
        precision, recall = common / len(said), common / len(wanted)
        return (1 + beta**2) * precision * recall / (recall + beta**2 * precision)

    return _best(reply, references, score)


def bleu(reply: str, references: References, order: int = 4) -> float | Invalid:
    """BLEU of one sentence (Papineni et al. 2002, section 2), as sacrebleu's `sentence_bleu` computes it, over 100.

    brevity penalty x exp(mean of log p_n) with clipped n-gram precisions p_n. High orders often have no match in a
    single sentence: such a precision counts as 1 / (2^k n-grams), with k the number of such orders so far. Orders for
    which the reply is too short are left out (Post 2018, arXiv 1804.08771: smoothing "exp", effective order, tokeniser
    13a).

    >>> round(bleu("the cat sat on the mat", "the cat sat on a mat"), 4)
    0.5373
    """
    golds = _references(references)
    if isinstance(golds, Invalid):
        return golds
    if order < 1:
        raise UserError(f"order must be at least 1, not {order}")
    said, wanted = _tokens_13a(reply[:LONGEST]), [_tokens_13a(gold) for gold in golds]
    logs, missed = [], 0
    for n in range(1, min(order, len(said)) + 1):
        own = _ngrams(said, n)
        most: Counter[tuple[str, ...]] = Counter()
        for gold in wanted:
            most |= _ngrams(gold, n)
        matched, total = (own & most).total(), own.total()
        if n == 1 and not matched:
            return 0.0
        missed += not matched
        logs.append(math.log(matched / total) if matched else -math.log(2**missed * total))
    if not logs:
        return 0.0
    closest = min((abs(len(gold) - len(said)), len(gold)) for gold in wanted)[1]
    brevity = 1.0 if len(said) >= closest else math.exp(1 - closest / len(said))
    return min(1.0, brevity * math.exp(sum(logs) / len(logs)))


def chrf(reply: str, references: References, order: int = 6, beta: float = 2.0) -> float | Invalid:
    """chrF: the F measure of character n-grams (Popovic 2015, eq. 1), as in sacrebleu's `sentence_chrf`, over 100.

    (1 + beta^2) P R / (beta^2 P + R), where P and R are the means over n = 1 .. order of the shares of n-grams, without
    white space, that reply and reference have in common. Orders for which either is too short are left out. It does not
    need words.

    >>> round(chrf("the cat", "the cats"), 4)
    0.7757
    """

    def score(text: str, gold: str) -> float:
        said, wanted = "".join(text.split()), "".join(gold.split())
        precisions, recalls = [], []
        for n in range(1, min(order, len(said), len(wanted)) + 1):
            own, other = (Counter(t[i : i + n] for i in range(len(t) - n + 1)) for t in (said, wanted))
            matched = (own & other).total()
            precisions.append(matched / own.total())
            recalls.append(matched / other.total())
        precision, recall = (sum(x) / len(x) if x else 0.0 for x in (precisions, recalls))
        below = beta**2 * precision + recall
        return (1 + beta**2) * precision * recall / below if below else 0.0

    return _best(reply, references, score)


def _best(reply: str, references: References, score: Callable[[str, str], float]) -> float | Invalid:
    golds = _references(references)
    return golds if isinstance(golds, Invalid) else max(score(reply[:LONGEST], gold) for gold in golds)


def _references(references: References) -> list[str] | Invalid:
    golds = [references] if isinstance(references, str) else list(references)
    if not golds or not all(gold.strip() for gold in golds):
        return Invalid("there is no reference text")
    if any(len(gold) > LONGEST for gold in golds):
        return Invalid(f"a reference has more than {LONGEST:,} characters")
    return golds


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def _ngrams(tokens: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def _tokens_13a(text: str) -> list[str]:
    """Tokenize as mteval-v13a: case is kept, and English punctuation is separated."""
    text = f" {text.replace('<skipped>', '').replace('-' + chr(10), '').replace(chr(10), ' ')} "
    for name, sign in (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">")):
        text = text.replace(name, sign)
    text = re.sub(r"([\{-\~\[-\` -\&\(-\+\:-\@\/])", r" \1 ", text)
    text = re.sub(r"([^0-9])([\.,])", r"\1 \2 ", text)
    text = re.sub(r"([\.,])([^0-9])", r" \1 \2", text)
    return re.sub(r"([0-9])(-)", r"\1 \2 ", text).split()
