"""Learner of several processes with tensor parallelism: each has a part of every matrix, its gradients and its moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from posttrain.core.batch import Outputs, Packed
from posttrain.core.protocols import Learner, Model
from posttrain.learners.data_parallel import DataParallelLearner
from posttrain.learners.gradient_sums import sum_gradients
from posttrain.learners.local_learner import Optimization
from posttrain.learners.process_group import Processes
from posttrain.learners.process_mesh import ProcessMesh
from posttrain.models.backbone import decoders_in
from posttrain.models.native.tensor_parallel import divide
from posttrain.models.row_shards import is_sharded


class TensorParallelLearner(DataParallelLearner):
    """Tensor-parallel learner; implements `posttrain.core.protocols.Learner`, with the results of one process.

    The other processes of a group make the same calls, so what they have whole (norms, heads of critics) stays equal
    bit for bit.
    """

    _divides = True

    def __init__(
        self,
        model: Model,
        optimization: Optimization,
        *,
        mesh: ProcessMesh,
        others: Mapping[str, Model] | None = None,
        critic: Any = None,
        **options: Any,
    ) -> None:
        """Divide the decoders of all models that are not divided yet."""
        assert mesh.tensor is not None and optimization.trust_region is None
        self.tensor: Processes = mesh.tensor
        self._divided: set[nn.Module] = set()
        for held in (model, critic, *(others or {}).values()):
            self._divide(held)
        learned = self._decoders_of(model, critic)
        inner = [p for decoder in learned for p in decoder.layers.parameters()]
        self._partial = {p for p in inner if p.requires_grad and not is_sharded(p)}
        """Weights that each process has whole, and of whose gradients it computes a part."""
        super().__init__(model, optimization, mesh=mesh, others=others, critic=critic, **options)

    def _divide(self, held: Any) -> None:
        if held is None or held in self._divided:
            return
        for decoder in decoders_in(held):
            divide(cast(Any, decoder), self.tensor)
        self._divided.add(held)

    def evaluate(
        self, batches: Sequence[Packed], of: str = "policy", want: frozenset[str] = frozenset()
    ) -> list[Outputs]:
        self._divide(self.others.get(of))  # it may have been opened after this learner
        return super().evaluate(batches, of, want)

    def _share_gradients(self) -> None:
        super()._share_gradients()
        for part in self.parts:
            partial = [p for p in part.parameters.values() if p in self._partial]
            if partial and any(p.grad is not None for p in part.parameters.values()):
                sum_gradients(self.tensor, partial)

    @property
    def _holders(self) -> Processes:
        return self.tensor


if TYPE_CHECKING:
    _proof: Callable[..., Learner] = TensorParallelLearner
