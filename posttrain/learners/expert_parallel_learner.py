"""Learner of several processes with expert parallelism: each has some experts of every layer, and its own micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from posttrain.core.protocols import Learner, Model
from posttrain.learners.forward_pass import REFERENCE
from posttrain.learners.gradient_sums import sum_gradients
from posttrain.learners.local_learner import Optimization
from posttrain.learners.lockstep import LockstepLearner
from posttrain.learners.process_group import Processes
from posttrain.learners.process_mesh import ProcessMesh
from posttrain.models.hf.expert_parallel import divide_experts


class ExpertParallelLearner(LockstepLearner):
    """Expert-parallel learner; implements `posttrain.core.protocols.Learner`, with the results of one process.

    An expert's gradient is computed where it lives, from the tokens of all processes that share its layer. So it is
    summed only over other groups of processes, which have the same experts.
    """

    def __init__(
        self,
        model: Model,
        optimization: Optimization,
        *,
        world: Processes,
        mesh: ProcessMesh,
        others: Mapping[str, Model] | None = None,
        critic: Any = None,
        **options: Any,
    ) -> None:
        """Divide the experts of policy, reference and critic that are not divided yet. `mesh`: its `tensor` processes
        divide them, and the `same` ones have the same experts.
        """
        assert mesh.tensor is not None and optimization.trust_region is None
        self.experts, self._same = mesh.tensor, mesh.same
        held = self._decoders_of(model, critic, (others or {}).get(REFERENCE))
        for decoder in self._decoders_of(model) + [d for d in held if d.routers is not None]:
            divide_experts(decoder, self.experts)
        self._step_together([d for d in held if d.routers is not None])
        super().__init__(model, optimization, world=world, others=others, critic=critic, **options)

    def _share_gradients(self) -> None:
        for part in self.parts:
            parameters = list(part.parameters.values())
            experts = [p for p in parameters if self._in_parts(p)]
            moved = float(self._has_gradients(parameters))
            anywhere = torch.tensor([moved], dtype=self.model.head.dtype, device=self.device)
            sum_gradients(self.world, [p for p in parameters if not self._in_parts(p)], anywhere)
            if not anywhere.item():
                for parameter in parameters:
                    parameter.grad = None
            elif self._same.size > 1:
                sum_gradients(self._same, experts)

    @property
    def _holders(self) -> Processes:
        return self.experts


if TYPE_CHECKING:
    _proof: Callable[..., Learner] = ExpertParallelLearner
