"""The natural gradient step of a trust region: conjugate gradient, then a backtracking line search.

It uses vectors and functions of vectors, no models (TRPO, arXiv 1502.05477, appendix C).

    P    parameters, as one flat vector
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.core.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SearchResult:
    """Result of a line search."""

    step: Tensor  # [P], to be added to the parameters; 0 if no step was accepted
    gain: float  # increase of the objective
    kl: float
    halvings: int  # number of halvings of the full step; -1: no step was accepted


def conjugate_gradient(product: Callable[[Tensor], Tensor], b: Tensor, iterations: int, damping: float) -> Tensor:
    """Solve (F + damping) x = b for x [P], where `product` returns F v. Stop early if the residual is negligible."""
    x = torch.zeros_like(b)
    residual, direction = b.clone(), b.clone()
    square = residual.dot(residual)
    start = square.item()
    for _ in range(iterations):
        if square.item() <= 1e-10 * start:
            break
        moved = product(direction) + damping * direction
        share = square / direction.dot(moved)
        x = x + share * direction
        residual = residual - share * moved
        del moved  # the next product needs the memory
        new = residual.dot(residual)
        direction = residual + (new / square) * direction
        square = new
    return x


def search(
    gradient: Tensor,
    product: Callable[[Tensor], Tensor],
    measure: Callable[[Tensor], tuple[float, float]],
    *,
    delta: float,
    iterations: int,
    damping: float,
    halvings: int,
) -> SearchResult:
    """Find the step from the current parameters.

    `gradient` [P]: of the objective to maximise; `product`: Fisher-vector product; `measure(step)`: returns (gain of
    the objective, KL) at parameters + step.
    """
    if not bool(gradient.any()):
        return _no_step(gradient)
    direction = conjugate_gradient(product, gradient, iterations, damping)
    curvature = direction.dot(product(direction) + damping * direction).item()
    if curvature <= 0:
        return _no_step(gradient)
    full = direction * (2 * delta / curvature) ** 0.5
    for halved in range(halvings + 1):
        step = full * 0.5**halved
        gain, kl = measure(step)
        if gain > 0 and kl <= delta:
            return SearchResult(step, gain, kl, halved)
    return _no_step(gradient)


def _no_step(gradient: Tensor) -> SearchResult:
    return SearchResult(torch.zeros_like(gradient), 0.0, 0.0, -1)
