"""Data-parallel learner: each process gets all micro-batches, and computes its share of them.

With context parallelism a group of processes shares a micro-batch, and each of them computes a part of its tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from posttrain.core.batch import Batch, Outputs, Packed, Stats
from posttrain.core.protocols import Learner, Measured, Model, Objective, World
from posttrain.core.token_probe import sink_of
from posttrain.learners.devices import moved
from posttrain.learners.local_learner import LocalLearner, Optimization, TrainedModule
from posttrain.models.adapters.adapter_writer import stored_adapters
from posttrain.models.backbone import Backbone, decoders_in
from posttrain.models.native.context_parallel import refuse_undealt, tokens_each
from posttrain.models.native.merged_weights import plain_weights
from posttrain.models.peers import Peers, joined
from posttrain.models.row_shards import marked, part_of, whole
from posttrain.models.tensor_files import write_state

if TYPE_CHECKING:
    from posttrain.learners.process_mesh import ProcessMesh

P = TypeVar("P", bound=Packed)


class DataParallelLearner(LocalLearner):
    """Data-parallel learner; implements `posttrain.core.protocols.Learner`. In one process it equals a `LocalLearner`.

    Every process makes the same calls with the same micro-batches, and gets the results of all micro-batches. Gradients
    are sums, so the assignment of micro-batches to processes affects only the order of additions.
    """

    _divides = False  # whether each process has only a part of some weights

    def __init__(
        self,
        model: Model,
        optimization: Optimization,
        *,
        world: World | None = None,
        mesh: ProcessMesh | None = None,
        others: Mapping[str, Model] | None = None,
        critic: Any = None,
        **options: Any,
    ) -> None:
        """Create the learner. `mesh`: where several processes share a micro-batch, the groups of processes; None: each
        process of the `world` has its own micro-batches.
        """
        self.mesh = mesh
        self.context: Peers | None = None if mesh is None else mesh.context
        for decoder in self._decoders_of(model, critic, *(others or {}).values()) if self.context else ():
            refuse_undealt(cast(Any, decoder), cast(Peers, self.context).size)
        super().__init__(
            model, optimization, world=world if mesh is None else mesh.same, others=others, critic=critic, **options
        )
        if mesh is not None:
            self.groups = mesh.groups

    @staticmethod
    def _decoders_of(*held: Any) -> list[Backbone]:
        return [decoder for model in held if model is not None for decoder in decoders_in(model)]

    def evaluate(
        self, batches: Sequence[Packed], of: str = "policy", want: frozenset[str] = frozenset()
    ) -> list[Outputs]:
        def compute(own: Sequence[Packed]) -> list[Outputs]:
            with self._noticing():
                return super(DataParallelLearner, self).evaluate(own, of, want)

        return self._together(batches, compute, lambda found: moved(found, self.device))

    def update(self, batches: Sequence[Batch], objective: Objective) -> Stats:
        with self._noticing():
            own = super().update(self._own(batches) if self.groups.size > 1 else batches, objective)
        if self.groups.size == 1:
            return own
        stats = Stats()
        sink = sink_of(batches)
        for told, found in self.groups.gather((own, sink.settle() if sink else None)):
            stats.merge(told)
            if sink is not None:
                sink.hear(found)
        if sink is not None:
            sink.skipped = stats["skipped"][0] > 0
        return stats

    def _noticing(self) -> AbstractContextManager[None]:
        """Return a context that reports in words a process lost between the meetings: a backward pass needs them all."""
        return nullcontext() if self.mesh is None else self.mesh.group.noticing()

    def squared_gradients(self, batches: Sequence[Packed]) -> Tensor:
        assert self.mesh is None, "no process has whole gradients of a rollout"

        def one_by_one(own: Sequence[Packed]) -> list[float]:
            return super(DataParallelLearner, self).squared_gradients(own).tolist()

        return torch.tensor(self._together(batches, one_by_one, lambda found: found), dtype=torch.float64)

    def _own(self, batches: Sequence[P]) -> list[P]:
        return [batches[place] for place in self._shares(batches)[self.groups.rank]]

    def _shares(self, batches: Sequence[Packed]) -> list[list[int]]:
        return deal([batch.layout.tokens.numel() for batch in batches], self.groups.size)

    def _together(
        self, batches: Sequence[P], compute: Callable[[Sequence[P]], list[Any]], here: Callable[[Any], Any]
    ) -> list[Any]:
        """Apply a function to each micro-batch, in one of the groups. Return all results, in order, everywhere."""
        if self.groups.size == 1:
            return compute(batches)
        shares = self._shares(batches)
        own = [_there(found) for found in compute(self._own(batches))[: len(shares[self.groups.rank])]]
        found = chain.from_iterable(self.groups.gather(own))
        every = dict(zip(chain.from_iterable(shares), found, strict=True))
        return [here(every[place]) for place in range(len(batches))]

    # -- context parallelism -------------------------------------------------------------------------------------------

    def _outputs(
        self, model: Model, batch: Packed, want: frozenset[str], measured: bool = False, of: str = "policy"
    ) -> Outputs:
        """Compute the outputs; with context parallelism those of this process's tokens, joined with the others'."""
        context = self.context
        if context is None:
            return super()._outputs(model, batch, want, measured, of)
        with self._autocast():  # as within the model, since the type of products decides
            each = tokens_each(len(batch.layout.tokens), context.size, batch.at.device)
        owner = batch.at // each
        rows = [(owner == rank).nonzero().squeeze(1) for rank in range(context.size)]
        own = rows[context.rank]
        packed = Packed(
            batch.layout,
            *(column[own] for column in (batch.at, batch.target, batch.rollout, batch.transcript)),
            temperature=None if batch.temperature is None else batch.temperature[own],
        )
        found = super()._outputs(model, packed, want, measured, of)
        order, sizes = torch.cat(rows).argsort(), [len(of_rank) for of_rank in rows]
        columns = {f.name: getattr(found, f.name) for f in fields(found)}
        told = {
            name: joined(x, sizes, context)[..., order]
            for name, x in columns.items()
            if x is not None and (name != "logp" or "score" not in want)  # with scores there are no log-probabilities
        }
        return replace(found, **told)

    @contextmanager
    def _computing(self, device: torch.device | None = None) -> Iterator[None]:
        """Return the context for a forward pass: all processes of the group have reached it, and share its tokens."""
        with ExitStack() as left:
            if self.mesh is not None:
                left.enter_context(self.mesh.group.meeting())
            decoders: list[Any] = (
                self._decoders_of(self.model, self.critic, *self.others.values()) if self.context else []
            )
            for decoder in decoders:
                decoder.context = self.context
            try:
                with super()._computing(device):
                    yield
            finally:
                for decoder in decoders:
                    decoder.context = None

    # -- weights of which a process has a part -------------------------------------------------------------------------

    def _in_parts(self, parameter: nn.Parameter) -> bool:
        """Return whether this process has only a part of a parameter, and `_holders` the others."""
        return part_of(parameter) is not None

    @property
    def _holders(self) -> World:
        return self.world

    def _as_stored(self, parameter: nn.Parameter, moment: Tensor) -> Tensor:
        part = part_of(parameter)
        return moment if part is None or moment.shape != parameter.shape else marked(moment.view_as(moment), part)

    def _clip_part(self, part: TrainedModule, limit: float) -> float:
        """Clip as torch.nn.utils.clip_grad_norm_ does; if processes have parts, by the norm over all of them."""
        if not self._divides:
            return super()._clip_part(part, limit)
        gradients = {p: p.grad for p in part.parameters.values() if p.grad is not None}
        squares = torch.zeros(2, dtype=torch.float64, device=self.device)  # of parts, of whole parameters
        for parameter, gradient in gradients.items():
            squares[0 if self._in_parts(parameter) else 1] += gradient.double().square().sum()
        norm = float((self._holders.sum(squares[:1]) + squares[1]).sqrt().item())
        share = min(1.0, limit / (norm + 1e-6))
        if share < 1:
            for gradient in gradients.values():
                gradient.mul_(share)
        return norm

    def _finite(self, part: TrainedModule) -> bool:
        if not any(map(self._in_parts, part.parameters.values())):
            return super()._finite(part)
        odd = sum(int((~parameter.isfinite()).sum()) for parameter in part.parameters.values())
        return not self._holders.sum(torch.tensor([odd], device=self.device)).item()

    def save(self, folder: Path | None) -> None:
        """Save the state, see `LocalLearner`. Every process has to call it, the first with a folder."""
        if folder is not None or not self._divides:
            super().save(folder)
            return
        self._check_finite()
        if isinstance(self.model, Measured):
            self.model.measure()
        for decoder in decoders_in(cast(nn.Module, self.model)):
            if decoder.lora is not None:
                stored_adapters(decoder)
            else:  # each gathered weight is freed at once
                deque((whole(weight) for _, weight in plain_weights(cast(nn.Module, decoder))), maxlen=0)
        for _, tensors in self._state():
            write_state(None, tensors)


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
    return moved(found, torch.device("cpu")) if isinstance(found, Outputs) else found


if TYPE_CHECKING:
    _proof: Callable[..., Learner] = DataParallelLearner
