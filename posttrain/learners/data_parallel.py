"""Data-parallel learner: each process gets all micro-batches, and computes its share of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from posttrain.core.batch import Batch, Outputs, Packed, Stats
from posttrain.core.protocols import Learner, Objective
from posttrain.core.token_probe import sink_of
from posttrain.learners.local_learner import LocalLearner

P = TypeVar("P", bound=Packed)


class DataParallelLearner(LocalLearner):
    """Data-parallel learner; implements `posttrain.core.protocols.Learner`. In one process it equals a `LocalLearner`.

    Every process makes the same calls with the same micro-batches, and gets the results of all micro-batches. Gradients
    are sums, so the assignment of micro-batches to processes affects only the order of additions.
    """

    def evaluate(
        self, batches: Sequence[Packed], of: str = "policy", want: frozenset[str] = frozenset()
    ) -> list[Outputs]:
        return self._together(batches, lambda own: super(DataParallelLearner, self).evaluate(own, of, want), self._here)

    def update(self, batches: Sequence[Batch], objective: Objective) -> Stats:
        if self.world.size == 1:
            return super().update(batches, objective)
        stats, own = Stats(), super().update(self._own(batches), objective)
        sink = sink_of(batches)
        for told, found in self.world.gather((own, sink.settle() if sink else None)):
            stats.merge(told)
            if sink is not None:
                sink.hear(found)
        if sink is not None:
            sink.skipped = stats["skipped"][0] > 0
        return stats

    def squared_gradients(self, batches: Sequence[Packed]) -> Tensor:
        def one_by_one(own: Sequence[Packed]) -> list[float]:
            return super(DataParallelLearner, self).squared_gradients(own).tolist()

        return torch.tensor(self._together(batches, one_by_one, lambda found: found), dtype=torch.float64)

    def _own(self, batches: Sequence[P]) -> list[P]:
        return [batches[place] for place in self._shares(batches)[self.world.rank]]

    def _shares(self, batches: Sequence[Packed]) -> list[list[int]]:
        return deal([batch.layout.tokens.numel() for batch in batches], self.world.size)

    def _together(
        self, batches: Sequence[P], compute: Callable[[Sequence[P]], list[Any]], here: Callable[[Any], Any]
    ) -> list[Any]:
        """Apply a function to each micro-batch, in one of the processes. Return all results, in order, everywhere."""
        if self.world.size == 1:
            return compute(batches)
        shares = self._shares(batches)
        own = [_there(found) for found in compute(self._own(batches))[: len(shares[self.world.rank])]]
        found = chain.from_iterable(self.world.gather(own))
        every = dict(zip(chain.from_iterable(shares), found, strict=True))
        return [here(every[place]) for place in range(len(batches))]

    def _here(self, outputs: Outputs) -> Outputs:
        return _moved(outputs, self.device)


def deal(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Split the indices of `sizes` into `count` shares of about equal sums, each in ascending order."""
    shares: list[list[int]] = [[] for _ in range(count)]
    total = [0] * count
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        least = min(range(count), key=lambda share: (total[share], share))
        shares[least].append(place)
        total[least] += sizes[place]
    return [sorted(share) for share in shares]


def _there(found: Any) -> Any:
    return _moved(found, torch.device("cpu")) if isinstance(found, Outputs) else found


def _moved(outputs: Outputs, device: torch.device) -> Outputs:
    told = {f.name: getattr(outputs, f.name) for f in fields(outputs)}
    return replace(outputs, **{name: t.to(device) for name, t in told.items() if t is not None})


if TYPE_CHECKING:
    _proof: Callable[..., Learner] = DataParallelLearner
