"""Muon for the matrices of layers, and AdamW for everything else.

Muon replaces the momentum of a matrix by the nearest orthogonal one (https://kellerjordan.github.io/posts/muon). As in
that text and in Moonlight (arXiv 2502.16982), embeddings, output heads, heads of critics and reward models, norms and
biases are AdamW's, with the same learning rate. A weight that stacks several matrices of the checkpoint, such as q, k and
v, is updated one matrix at a time. So are the two factors of a LoRA adapter. Experts in one tensor of three dimensions are
AdamW's, since torch's class takes matrices.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from posttrain.learners.library_optimizer import Optimizer
from posttrain.models.adapters.adapter_writer import adapters
from posttrain.models.backbone import decoders_in

_IN_A_LAYER = re.compile(r"(^|\.)\d+\.")


def is_hidden(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter that is decayed is a matrix of a layer, which has a number in its name."""
    return parameter.ndim == 2 and _IN_A_LAYER.search(name) is not None


def stacked_rows(model: nn.Module) -> Iterator[tuple[Tensor, list[int]]]:
    """Yield (parameter, rows of each of its matrices) for each parameter of a model that stacks several."""
    for decoder in decoders_in(model):
        for _, linear, matrices in decoder.linears():
            if linear.parameter is not None:
                yield linear.parameter, [rows for _, rows in matrices]
        for adapter in adapters(decoder):
            yield adapter.a, [place.inner.stop - place.inner.start for place in adapter.places]
            yield adapter.b, [place.rows.stop - place.rows.start for place in adapter.places]


class Muon:
    """Two optimizers, see above. Implements `posttrain.learners.library_optimizer.Optimizer`.

    `state`: that of AdamW, and for a matrix its momentum, one for each of the matrices that it stacks.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        rows: Mapping[Tensor, Sequence[int]],
        matrices: Callable[[list[dict[str, Any]]], Optimizer],
        others: Callable[[list[dict[str, Any]]], Optimizer],
    ) -> None:
        """Create Muon by `matrices` for the groups with "hidden", and AdamW by `others` for the rest.

        `rows`: of each matrix that a parameter stacks; without an entry it is one matrix.
        """
        hidden = [group for group in groups if group.get("hidden")]
        self._views = {p: _views(p, rows.get(p, ())) for group in hidden for p in group["params"]}
        self._muon = matrices([{**g, "params": [v for p in g["params"] for v in self._views[p]]} for g in hidden])
        self._adamw = others([group for group in groups if not group.get("hidden")])
        self.param_groups = [*self._muon.param_groups, *self._adamw.param_groups]

    @property
    def state(self) -> Mapping[Any, dict[str, Any]]:
        momenta = {
            parameter: {f"{name}.{place}": value for place, one in enumerate(own) for name, value in one.items()}
            for parameter, views in self._views.items()
            if any(own := [self._muon.state.get(view, {}) for view in views])
        }
        return ChainMap(momenta, cast(dict[Any, dict[str, Any]], self._adamw.state))

    def zero_grad(self) -> None:
        self._adamw.zero_grad()
        for parameter in self._views:
            parameter.grad = None

    def step(self) -> None:
        for parameter, views in self._views.items():
            gradients = [None] * len(views) if parameter.grad is None else _pieces(parameter.grad, views)
            for view, gradient in zip(views, gradients, strict=True):
                view.grad = gradient
        self._muon.step()
        self._muon.zero_grad()
        torch.autograd.graph.increment_version([p for p in self._views if p.grad is not None])
        self._adamw.step()

    def restore(self, parameter: nn.Parameter, stored: Mapping[str, Tensor]) -> None:
        if parameter not in self._views:
            return self._adamw.restore(parameter, stored)
        for place, view in enumerate(self._views[parameter]):
            end = f".{place}"
            self._muon.restore(view, {n.removesuffix(end): like for n, like in stored.items() if n.endswith(end)})

    def moment_bytes(self) -> float:
        return self._muon.moment_bytes() + self._adamw.moment_bytes()


def _views(parameter: nn.Parameter, rows: Sequence[int]) -> list[nn.Parameter]:
    """Return the matrices of a parameter: it shares their memory."""
    views = [nn.Parameter(piece) for piece in parameter.detach().split(list(rows) or [len(parameter)])]
    for view in views:
        view.grad_dtype = parameter.grad_dtype
    return views


def _pieces(gradient: Tensor, views: Sequence[Tensor]) -> Sequence[Tensor]:
    return gradient.split([len(view) for view in views])
