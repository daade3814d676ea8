"""The natural gradient step of a policy within a trust region (TRPO, arXiv 1502.05477), after the gradients are known.

P    parameters, as one flat vector
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from posttrain.core.batch import Batch, Packed, Stats
from posttrain.core.protocols import Model, World
from posttrain.core.trust_region import TrustRegion
from posttrain.learners.natural_gradient import search
from posttrain.models.adapters.lora import frozen_copy
from posttrain.models.losses.likelihood import Hidden, Temperature, exact_kl


def fisher_product(kl: Callable[[], Tensor], parameters: Sequence[nn.Parameter], vector: Tensor, total: Tensor) -> None:
    """Add to `total` [P] the product of a vector [P] with the second derivatives of a KL."""
    with sdpa_kernel(SDPBackend.MATH):  # other kernels have no second derivative
        first = torch.autograd.grad(kl(), parameters, create_graph=True)
        along = torch.cat([g.flatten() for g in first]).dot(vector)
        total += torch.cat([g.flatten() for g in torch.autograd.grad(along, parameters)])


@dataclass(frozen=True)
class NaturalStep:
    """The step of one update. Gradients of the loss are summed over the world and stored in the parameters."""

    model: Model
    parameters: Sequence[nn.Parameter]
    batches: Sequence[Batch]  # this process's micro-batches of the update
    world: World
    states: Callable[[Model, Packed], Tensor]  # hidden states at the scored tokens
    temperature: Callable[[Packed], Temperature]  # of the logits at the scored tokens
    loss: Callable[[], float]  # of the model as it is, summed over the world

    def take(self, region: TrustRegion, stats: Stats) -> None:
        """Move the parameters by the accepted step of the line search, if there is one."""
        parameters, world = self.parameters, self.world
        # gradient of the objective to maximise; None while a critic warms up
        gradient = -torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in parameters])
        for parameter in parameters:
            parameter.grad = None
        start = nn.utils.parameters_to_vector(parameters).detach().clone()
        before, device = frozen_copy(self.model), gradient.device
        own_tokens = float(sum(batch.target.numel() for batch in self.batches))
        tokens = world.sum(torch.tensor(own_tokens, device=device)).item()

        def mean_kl(batch: Batch) -> Tensor:
            return self._kl(before, batch) / tokens

        def product(vector: Tensor) -> Tensor:
            total = torch.zeros_like(vector)
            for batch in self.batches:
                fisher_product(partial(mean_kl, batch), parameters, vector, total)
            return world.sum(total)

        def measure(step: Tensor) -> tuple[float, float]:
            self._fill(start + step)
            with torch.no_grad():
                own = sum(self._kl(before, batch).item() for batch in self.batches)
                distance = world.sum(torch.tensor(own, dtype=torch.float64, device=device)).item() / tokens
            return unmoved - self.loss(), distance

        unmoved = self.loss() if tokens else 0.0
        found = search(
            gradient, product, measure,
            delta=region.delta, iterations=region.iterations, damping=region.damping, halvings=region.halvings,
        )  # fmt: skip
        self._fill(start + found.step)
        stats.add("trust_region/kl", found.kl)
        stats.add("trust_region/gain", found.gain)
        stats.add("trust_region/no_step", found.halvings < 0)

    def _kl(self, before: Model, batch: Batch) -> Tensor:
        """Return the exact KL(before || now), summed over the batch's tokens."""
        with torch.no_grad():
            old = Hidden(self.states(before, batch), before.head)
        now = Hidden(self.states(self.model, batch), self.model.head)
        return exact_kl(old, now, self.temperature(batch)).sum()

    def _fill(self, flat: Tensor) -> None:
        """Write a flat vector [P] into the parameters, in place, since the engine decodes with the same tensors."""
        with torch.no_grad():
            for parameter, piece in zip(self.parameters, flat.split([p.numel() for p in self.parameters]), strict=True):
                parameter.copy_(piece.view_as(parameter))
