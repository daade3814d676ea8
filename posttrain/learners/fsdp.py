"""Learner of several processes that shard every weight: the data-parallel learner with torch's FSDP2.

A decoder layer is gathered for its forward and for its backward pass, and its gradients are reduced to the processes
that hold the rows. Weights outside the layers (embedding, last norm, output head) remain gathered from the first pass
of a call to its end, since the head is used outside the model's forward. Modules other than decoders (heads of critics
and reward models) are replicated, and so are teachers if there are several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from posttrain.core.protocols import Learner, Model, World
from posttrain.learners.forward_pass import REFERENCE
from posttrain.learners.gradient_sums import sum_gradients
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.learners.lockstep import LockstepLearner
from posttrain.learners.process_group import Processes
from posttrain.learners.sharded_decoder import forget_order, gathered, open_shards
from posttrain.models.backbone import Backbone, decoders_in
from posttrain.models.native.linear import collected
from posttrain.models.row_shards import GATHER, here, whole


class FSDPLearner(LockstepLearner):
    """FSDP learner; implements `posttrain.core.protocols.Learner`, with the results of `DataParallelLearner`.

    The tensors of `parts`, which are clipped, updated and saved, are views of this process's rows of the parameters.
    """

    _keeps = False  # narrowed weights that are kept would be the whole model

    def __init__(
        self,
        model: Model,
        optimization: Optimization,
        *,
        world: Processes,
        shard_size: int | None = None,
        others: Mapping[str, Model] | None = None,
        critic: Any = None,
        **options: Any,
    ) -> None:
        """Shard the decoders of all models that are not sharded yet. `shard_size`: see `sharded_decoder.shard`."""
        assert optimization.trust_region is None, "a natural step needs whole gradients"
        others = dict(others or {})
        teachers = [name for name in others if name != REFERENCE]
        kept = set(teachers if len(teachers) > 1 else [])  # not sharded: micro-batches use different ones
        self._held: dict[nn.Parameter, nn.Parameter] = {}  # this process's rows -> their parameter
        self._decoders: list[Backbone] = []
        self._shard_size, self._copy = shard_size, world  # the processes that share this one's copy of the weights
        if shard_size is not None:
            firsts = range(0, world.size, shard_size)
            self._copy = world.divided([range(first, first + shard_size) for first in firsts])
        products = torch.bfloat16 if options.get("precision") == "bfloat16" else None
        for held in (model, critic, *(other for name, other in others.items() if name not in kept)):
            self._decoders += [] if held is None else self._sharded(cast(nn.Module, held), world, products)
        self._step_together(self._decoders)
        super().__init__(model, optimization, world=world, others=others, critic=critic, **options)

    def _sharded(self, held: nn.Module, world: Processes, products: torch.dtype | None) -> list[Backbone]:
        decoders = decoders_in(held)
        with world.meeting():
            for decoder in decoders:
                open_shards(decoder, world, products, self._shard_size)
        return decoders

    # -- evaluation and update -----------------------------------------------------------------------------------------

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Context in which the weights outside the layers stay gathered; they are sharded again at its end."""
        try:
            with super()._at_work():
                yield
        finally:
            self._let_go()

    def _before_backward(self) -> None:
        for decoder in self._learning:  # all processes must reduce the same gradients, even if a loss uses no head
            for own in (decoder.head.weight, decoder.head.bias):
                _ = own is None or collected(own)

    def _let_go(self) -> None:
        for decoder in self._decoders:
            cast(FSDPModule, decoder).reshard()
            forget_order(decoder)

    def _share_gradients(self) -> None:
        """Assign this process's rows of the gradients that FSDP2 has summed, and sum gradients of replicated
        parameters.
        """
        self._let_go()
        for part in self.parts:
            held = {rows: self._held[rows] for rows in part.parameters.values() if rows in self._held}
            others = [p for p in part.parameters.values() if p not in self._held]
            moved = self._has_gradients([*held.values(), *others])
            anywhere = torch.tensor([float(moved)], dtype=self.model.head.dtype, device=self.device)
            sum_gradients(self.world, others, anywhere)
            there = bool(anywhere.item())
            for parameter in others if not there else ():
                parameter.grad = None
            for rows, parameter in held.items():
                assert rows.data_ptr() == here(parameter).data_ptr(), "torch has moved the rows"
                rows.grad = here(parameter.grad) if there and parameter.grad is not None else None
                parameter.grad = None

    def _in_parts(self, parameter: nn.Parameter) -> bool:
        return parameter in self._held

    @property
    def _holders(self) -> World:
        return self._copy

    # -- state ---------------------------------------------------------------------------------------------------------

    def _trained(self, model: Model | nn.Module) -> dict[str, nn.Parameter]:
        return {name: self._rows(parameter) for name, parameter in super()._trained(model).items()}

    def _rows(self, parameter: nn.Parameter) -> nn.Parameter:
        if not isinstance(parameter, DTensor):
            return parameter
        rows = nn.Parameter(here(parameter))
        self._held[rows] = parameter
        return rows

    def _weight_of(self, parameter: nn.Parameter) -> Tensor:
        return self._held.get(parameter, parameter)

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


if TYPE_CHECKING:
    _proof: Callable[..., Learner] = FSDPLearner
    _whole = LocalLearner, whole
