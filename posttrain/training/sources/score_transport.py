"""The optimal transport of an optimizer batch, measured before its update: see `posttrain.algorithms.optimal_transport`.

C    comparisons of a micro-batch    V    labels of it    P    pieces of the transport
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.algorithms.optimal_transport import monotone
from posttrain.algorithms.preference import PreferenceAlgorithm, PreferenceObjective
from posttrain.algorithms.responses import Responses
from posttrain.core.batch import Batch, Matched, Preferences
from posttrain.core.protocols import Learner


def transported(algorithm: PreferenceAlgorithm, learner: Learner, batches: Sequence[Batch]) -> list[Matched]:
    """Return what each micro-batch of an optimizer batch is matched with, over all of them, under the current weights.

    An optimizer batch without a good or without a bad response has nothing to transport: its loss is 0.
    """
    assert algorithm.transport is not None
    outputs = learner.evaluate(batches)
    objective, pieces = PreferenceObjective(algorithm), list[tuple[int, float, float]]()
    if algorithm.transport.data == "paired":
        weights = _joined([_of(batch).weight for batch in batches])
        found = [objective.margins(o, batch, Responses.of(batch)) for o, batch in zip(outputs, batches, strict=True)]
        ours, theirs = (_joined([pair[side] for pair in found]) for side in (0, 1))
        pieces += [(i, theirs[j], weight) for i, j, weight in monotone(ours, weights, theirs, weights)]
        sizes = [len(_of(batch).better) for batch in batches]
    else:
        scores = _joined(
            [
                algorithm.score(o, batch, Responses.of(batch), _of(batch).labelled, None)
                for o, batch in zip(outputs, batches, strict=True)
            ]
        )
        good, weights = (
            _joined([getattr(_of(batch), name) for batch in batches]) for name in ("label", "label_weight")
        )
        sides = [[i for i, label in enumerate(good) if (label > 0.5) is side] for side in (True, False)]
        (a, b), (x, y) = sides, ([weights[i] for i in side] for side in sides)
        for i, j, weight in monotone([scores[i] for i in a], x, [scores[i] for i in b], y):
            pieces += [(a[i], scores[b[j]], weight), (b[j], scores[a[i]], weight)]
        sizes = [len(_of(batch).labelled) for batch in batches]
    return _split(pieces, sizes, learner.device)


def _of(batch: Batch) -> Preferences:
    assert batch.preferences is not None
    return batch.preferences


def _joined(parts: Sequence[Tensor]) -> list[float]:
    return [x for part in parts for x in part.double().tolist()]


def _split(pieces: Sequence[tuple[int, float, float]], sizes: Sequence[int], device: torch.device) -> list[Matched]:
    """Return the pieces (own place, other number, weight) of micro-batches with so many comparisons or labels each."""
    own, before = sorted(pieces), 0
    found = []
    for size in sizes:
        here = [piece for piece in own if before <= piece[0] < before + size]
        places = torch.tensor([place - before for place, _, _ in here], dtype=torch.int64, device=device)
        other, weight = (torch.tensor([p[k] for p in here], dtype=torch.float64, device=device) for k in (1, 2))
        found.append(Matched(places, other, weight))
        before += size
    return found
