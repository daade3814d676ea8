"""Learner of several processes that make the same forward and backward passes, since each has a part of a pass's weights.

So each process makes as many passes as the process with most micro-batches, and each backward pass goes through every
trained decoder, even if the loss does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from posttrain.core.batch import Batch, Outputs, Packed, Stats
from posttrain.core.protocols import Objective
from posttrain.learners.data_parallel import DataParallelLearner
from posttrain.learners.process_group import Processes
from posttrain.learners.router_losses import Routing
from posttrain.models.backbone import Backbone

P = TypeVar("P", bound=Packed)


class LockstepLearner(DataParallelLearner):
    """Base of learners whose passes contain collectives of all processes. A subclass calls `_step_together`."""

    world: Processes
    _divides = True

    def _step_together(self, decoders: Sequence[Backbone]) -> None:
        """Prepare the passes. `decoders`: those whose weights are divided, of all models."""
        self._learning = [d for d in decoders if any(p.requires_grad for p in d.parameters())]
        self._idle: list[Batch] = []  # micro-batches computed only because other processes have more
        self._passes: list[Tensor] = []  # hidden states of the trained decoders for the current micro-batch
        self._reached: set[Backbone] = set()  # trained decoders that a gradient has reached in this update
        for decoder in self._learning:
            cast(nn.Module, decoder).register_forward_hook(self._record_hidden)

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
            self._before_backward()
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
        """Context for the passes of a call; it begins when all processes have reached it."""
        with self.world.meeting():
            yield

    def _before_backward(self) -> None:
        """Do what has to precede each backward pass."""

    def _record_hidden(self, decoder: nn.Module, arguments: Any, hidden: Tensor) -> Tensor | None:
        """Record the hidden states of a decoder, and, in the backward pass, that a gradient reaches them."""
        if not hidden.requires_grad:
            return None
        self._passes.append(hidden)
        heard: Tensor = _GradientProbe.apply(hidden, partial(self._reached.add, cast(Backbone, decoder)))
        return heard

    def _has_gradients(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return whether a gradient has reached any of these parameters in this update.

        One that is there may be the zeros of a pass that no loss reaches.
        """
        owners = {id(p): d for d in self._learning for p in cast(nn.Module, d).parameters()}
        return any(owners[id(p)] in self._reached if id(p) in owners else p.grad is not None for p in parameters)


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
