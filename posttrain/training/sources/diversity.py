"""Diversity of the replies of a group: a group whose members are all alike has no signal.

The measures are distinct n-grams (distinct-n of Li et al. 2016, arXiv:1510.03055) and, in place of self-BLEU, the mean
similarity of two replies of a group: 2 x their longest common subsequence / the sum of their lengths. All are computed
on token ids, so that no text is decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from rapidfuzz import process
from rapidfuzz.distance import Indel

GROUPS = 16  # first groups of a step that are measured: 0.2 ms for replies of 10 tokens, 2 ms for 100, 100 ms at most
MEMBERS = 8  # first replies of a group that are measured
TOKENS = 1024  # first tokens of a reply that are measured: comparison is quadratic in the length


def diversity(groups: Sequence[Sequence[Sequence[int]]]) -> dict[str, tuple[float, float]]:
    """Return (sum, count) of each measure, for `Stats.merge`; a count of 0 if it is undefined.

    `groups`: for each group the sampled token ids of its replies.

    diversity/distinct_1, diversity/distinct_2: distinct tokens, and pairs of neighbours, of a group / all of them.
      Near 1: nothing is repeated. Longer replies have lower values, so compare within a run.
    diversity/similarity: mean over all pairs of one group. 1: the same reply every time; 0: no token in common.
    """
    distinct, total = (0, 0), (0, 0)
    alike, pairs = 0.0, 0
    for group in groups[:GROUPS]:
        members = [reply[:TOKENS] for reply in group[:MEMBERS]]
        tokens = [token for reply in members for token in reply]
        neighbours = [pair for reply in members for pair in pairwise(reply)]
        distinct = distinct[0] + len(set(tokens)), distinct[1] + len(set(neighbours))
        total = total[0] + len(tokens), total[1] + len(neighbours)
        similarity = process.cdist(members, members, scorer=Indel.normalized_similarity, dtype=np.float64)
        alike += (float(similarity.sum()) - len(members)) / 2  # symmetric, and each reply is wholly similar to itself
        pairs += len(members) * (len(members) - 1) // 2
    return {
        "diversity/distinct_1": (float(distinct[0]), float(total[0])),
        "diversity/distinct_2": (float(distinct[1]), float(total[1])),
        "diversity/similarity": (alike, float(pairs)),
    }
