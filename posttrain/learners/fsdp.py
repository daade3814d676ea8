"""Learner of several processes that shard every weight: the data-parallel learner with torch's FSDP2.

A decoder layer is gathered for its forward and for its backward pass, and its gradients are reduced to the processes
that hold the rows. Weights outside the layers (embedding, last norm, output head) remain gathered from the first pass
of a call to its end, since the head is used outside the model's forward. Modules other than decoders (heads of critics
and reward models) are replicated, and so are teachers if there are several.

All processes have to make the same forward and backward passes. So each makes as many passes as the process with most
micro-batches, and each backward pass goes through every trained decoder, even if the loss does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from posttrain.core.batch import Batch, Outputs, Packed, Stats
from posttrain.core.protocols import Learner, Model, Objective
from posttrain.learners.data_parallel import DataParallelLearner
from posttrain.learners.gradient_sums import sum_gradients
from posttrain.learners.local_learner import REFERENCE, LocalLearner, Optimization, TrainedModule
from posttrain.learners.process_group import Processes
from posttrain.learners.router_losses import Routing
from posttrain.learners.sharded_decoder import forget_order, gathered, open_shards
from posttrain.models.backbone import Backbone, decoders_in
from posttrain.models.native.linear import collected
from posttrain.models.row_shards import GATHER, here, whole

P = TypeVar("P", bound=Packed)


class FSDPLearner(DataParallelLearner):
    """FSDP learner; implements `posttrain.core.protocols.Learner`, with the results of `DataParallelLearner`.

    The tensors of `parts`, which are clipped, updated and saved, are views of this process's rows of the parameters.
    """

    world: Processes
    _divides = True
    _keeps = False  # narrowed weights that are kept would be the whole model

    def __init__(
        self,
        model: Model,
        optimization: Optimization,
        *,
        world: Processes,
        others: Mapping[str, Model] | None = None,
        critic: Any = None,
        **options: Any,
    ) -> None:
        """Shard the decoders of all models that are not sharded yet."""
        assert options.get("trust_region") is None, "a natural step needs whole gradients"
        others = dict(others or {})
        teachers = [name for name in others if name != REFERENCE]
        kept = set(teachers if len(teachers) > 1 else [])  # not sharded: micro-batches use different ones
        self._held: dict[nn.Parameter, nn.Parameter] = {}  # this process's rows -> their parameter
        self._decoders: list[Backbone] = []
        products = torch.bfloat16 if options.get("precision") == "bfloat16" else None
        for held in (model, critic, *(other for name, other in others.items() if name not in kept)):
            self._decoders += [] if held is None else self._sharded(cast(nn.Module, held), world, products)
        self._learning = [d for d in self._decoders if any(p.requires_grad for p in d.parameters())]
        self._idle: list[Batch] = []  # micro-batches computed only because other processes have more
        self._passes: list[Tensor] = []  # hidden states of the trained decoders for the current micro-batch
        self._reached: set[Backbone] = set()  # trained decoders that a gradient has reached in this update
        super().__init__(model, optimization, world=world, others=others, critic=critic, **options)
        for decoder in self._learning:
            decoder.register_forward_hook(self._record_hidden)

    def _sharded(self, held: nn.Module, world: Processes, products: torch.dtype | None) -> list[Backbone]:
        decoders = decoders_in(held)
        with world.meeting():
            for decoder in decoders:
                open_shards(decoder, world, products)
        return decoders

    # -- evaluation and update -----------------------------------------------------------------------------------------

    def evaluate(
        self, batches: Sequence[Packed], of: str = "policy", want: frozenset[str] = frozenset()
    ) -> list[Outputs]:
        with self._at_work():
            return super().evaluate(batches, of, want)

    def update(self, batches: Sequence[Batch], objective: Objective) -> Stats:
        own = self._own(batches)
        self._idle = own[len(self._shares(batches)[self.groups.rank]) :]
        self._reached.clear()
        with self._at_work():
            return super().update(batches, objective)

    def squared_gradients(self, batches: Sequence[Packed]) -> Tensor:
        raise AssertionError("gradients of single rollouts are whole nowhere")

    def _own(self, batches: Sequence[P]) -> list[P]:
        """Return this process's micro-batches, padded to the same number in all processes with the smallest one, whose
        results are ignored.
        """
        shares = self._shares(batches)
        own = [batches[place] for place in shares[self.groups.rank]]
        missing = max(map(len, shares)) - len(own)
        return [*own, *[min(batches, key=lambda batch: batch.layout.tokens.numel())] * missing] if missing else own

    def _counted(self, batches: Sequence[P]) -> Sequence[P]:
        return batches[: len(batches) - len(self._idle)]

    def _accumulate(
        self, batches: Sequence[Batch], objective: Objective, stats: Stats, routing: Routing | None
    ) -> None:
        counted = len(self._counted(batches))
        for place, batch in enumerate(batches):
            self._passes.clear()
            mine = place < counted
            with self._watched(routing) as routed:
                outputs = self._tapped(batch if mine else replace(batch, tap=None), objective.wants)
            loss = objective(outputs, batch, stats) if mine else outputs.logp.new_zeros(())
            if mine and routing is not None and routed is not None:
                of_routers = routing.loss(routed)
                alone, loss = loss, self._with_routers(loss, batch, of_routers)
                if loss is not alone:  # its gradient enters the layers without passing the decoder's hidden states
                    self._reached.add(cast(Backbone, routing.model))
            del outputs, routed
            for decoder in self._learning:  # all processes must reduce the same gradients, even if a loss uses no head
                for own in (decoder.head.weight, decoder.head.bias):
                    _ = own is None or collected(own)
            anchored: Tensor = _Anchored.apply(loss, *self._passes)
            self._passes.clear()
            anchored.backward()
            if mine:
                stats.add("loss", loss.item(), 0)

    @contextmanager
    def _computing(self, device: torch.device | None = None) -> Iterator[None]:
        with self.world.meeting(), super()._computing(device):  # a sequence of collectives follows
            yield

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Context in which the weights outside the layers stay gathered; they are sharded again at its end."""
        try:
            with self.world.meeting():
                yield
        finally:
            self._let_go()

    def _let_go(self) -> None:
        for decoder in self._decoders:
            cast(FSDPModule, decoder).reshard()
            forget_order(decoder)

    def _record_hidden(self, decoder: nn.Module, arguments: Any, hidden: Tensor) -> Tensor | None:
        """Record the hidden states of a decoder, and, in the backward pass, that a gradient reaches them."""
        if not hidden.requires_grad:
            return None
        self._passes.append(hidden)
        heard: Tensor = _GradientProbe.apply(hidden, partial(self._reached.add, cast(Backbone, decoder)))
        return heard

    def _share_gradients(self) -> None:
        """Assign this process's rows of the gradients that FSDP2 has summed, and sum gradients of replicated
        parameters.
        """
        self._let_go()
        for part in self.parts:
            held = {rows: self._held[rows] for rows in part.parameters.values() if rows in self._held}
            others = [p for p in part.parameters.values() if p not in self._held]
            owners = {id(p): d for d in self._learning for p in d.parameters()}
            within = {owners[id(p)] for p in (*held.values(), *others) if id(p) in owners}
            # a gradient of adapters may be the zeros of a pass that no loss reaches
            moved = bool(within & self._reached) or any(p.grad is not None for p in others if id(p) not in owners)
            anywhere = torch.tensor([float(moved)], dtype=self.model.head.dtype, device=self.device)
            sum_gradients(self.world, others, anywhere)
            there = bool(anywhere.item())
            for parameter in others if not there else ():
                parameter.grad = None
            for rows, parameter in held.items():
                assert rows.data_ptr() == here(parameter).data_ptr(), "torch has moved the rows"
                rows.grad = here(parameter.grad) if there and parameter.grad is not None else None
                parameter.grad = None

    def _clip_part(self, part: TrainedModule, limit: float) -> float:
        return self._clip_in_parts(part, limit)

    def _in_parts(self, parameter: nn.Parameter) -> bool:
        return parameter in self._held

    # -- state ---------------------------------------------------------------------------------------------------------

    def _trained(self, model: Model | nn.Module) -> dict[str, nn.Parameter]:
        return {name: self._rows(parameter) for name, parameter in super()._trained(model).items()}

    def _rows(self, parameter: nn.Parameter) -> nn.Parameter:
        if not isinstance(parameter, DTensor):
            return parameter
        rows = nn.Parameter(here(parameter))
        self._held[rows] = parameter
        return rows

    def move(self, of: str, rate: float) -> None:
        self._let_go()  # other code may have called the model meanwhile
        super().move(of, rate)

    def save(self, folder: Path | None) -> None:
        """Save the state, see `LocalLearner`. Every process has to call it, the first with a folder."""
        self._let_go()
        super().save(folder)

    def _as_stored(self, parameter: nn.Parameter, moment: Tensor) -> Tensor:
        if parameter not in self._held or moment.shape != parameter.shape:
            return moment
        like = cast(DTensor, self._held[parameter])
        stored = DTensor.from_local(
            moment, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        setattr(stored, GATHER, partial(gathered, stored, self.world))
        return stored


class _GradientProbe(torch.autograd.Function):
    """Identity that calls a function when the backward pass reaches the tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, say: Callable[[], None]) -> Tensor:
        ctx.say = say
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.say()
        return grads[0], None


class _Anchored(torch.autograd.Function):
    """Identity of the loss that also propagates zero gradients into further tensors."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(*others)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0], *(torch.zeros_like(other) for other in ctx.saved_tensors)


if TYPE_CHECKING:
    _proof: Callable[..., Learner] = FSDPLearner
    _whole = LocalLearner, whole
