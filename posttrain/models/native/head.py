"""Output head: hidden states to logits.

N    hidden states    D    their width    V    vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from posttrain.models.native.linear import narrowed_rows, wide_product
from posttrain.models.peers import Peers, copied, joined


def narrow_type(hidden: Tensor) -> torch.dtype | None:
    """Return the type of the factors of a head's products: on a GPU under autocast, autocast's; None: float32 at least.

    Sums and logits are float32 in any case. With float32 factors the head would take longer than all other products.
    """
    if hidden.is_cuda and torch.is_autocast_enabled("cuda") and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype("cuda")
    return None


@dataclass(frozen=True)
class SharedVocabulary:
    """The processes that divide an output head by rows: each has those of some token ids."""

    peers: Peers
    counts: tuple[int, ...]  # rows of each process, by rank

    @property
    def first(self) -> int:
        """Id of this process's first row."""
        return sum(self.counts[: self.peers.rank])

    def over_all(self, at: Tensor, total: Tensor, mean: Tensor, top: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (logit at the target, logsumexp, mean logit, highest logit) of all ids, given those of each process's
        own, all [N].
        """
        if not at.numel():
            return at, total, mean, top
        own = self.peers.stacked(torch.stack((at, total, mean, top)))
        joint = own[:, 1].logsumexp(0)
        return own[:, 0].sum(0), joint, ((own[:, 1] - joint).exp() * own[:, 2]).sum(0), own[:, 3].amax(0)


@dataclass(frozen=True)
class Head:
    """logits = cap tanh(x / cap) with x = scale (hidden W^T + b); without a cap, logits = x.

    Most models have a weight alone. Granite and Cohere scale, Phi has a bias, Gemma 2 a cap ("soft-capping").
    """

    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    cap: float | None = None
    shared: SharedVocabulary | None = None  # None: this process has all rows

    @property
    def vocab(self) -> int:
        return self.rows if self.shared is None else sum(self.shared.counts)

    @property
    def rows(self) -> int:
        """Rows in this process."""
        return self.weight.shape[0]

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def detach(self) -> Head:
        return replace(self, weight=self.weight.detach(), bias=None if self.bias is None else self.bias.detach())

    def first(self, rows: int) -> Head:
        """Return the head for the first `rows` ids; for all ids, this head itself, since its weight is a parameter."""
        if rows == self.vocab:
            return self
        return replace(self, weight=self.weight[:rows], bias=None if self.bias is None else self.bias[:rows])

    def logits(self, hidden: Tensor, block: slice | None = None, narrow: torch.dtype | None = None) -> Tensor:
        """Compute logits [N, V] of hidden [N, D], or the columns of a block of this process's rows; float32 at least,
        also under autocast.

        Rounding logits to bfloat16 would change log-probabilities by more than the width of GSPO's clip (3e-4).
        `narrow`: the result of `narrow_type`, which a backward pass cannot call itself, as autocast has ended.
        """
        if block is None and self.shared is not None:
            hidden = copied(hidden, self.shared.peers)
            own = self.logits(hidden, slice(0, self.rows), narrow)
            return joined(own, list(self.shared.counts), self.shared.peers)
        narrow = narrow or narrow_type(hidden)
        weight = self.weight if block is None else self.weight[block]
        bias = self.bias if self.bias is None or block is None else self.bias[block]
        with torch.autocast(hidden.device.type, enabled=False):
            wide = torch.promote_types(hidden.dtype, torch.float32)
            if narrow is None:
                x = functional.linear(hidden.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
            else:
                x = self._narrow_logits(hidden, weight, block, narrow)
                x = x if bias is None else x + bias
            if self.scale != 1.0:
                x = x * self.scale
            return x if self.cap is None else (x / self.cap).tanh() * self.cap

    def _narrow_logits(self, hidden: Tensor, weight: Tensor, block: slice | None, narrow: torch.dtype) -> Tensor:
        if torch.is_grad_enabled():
            found: Tensor = _NarrowProduct.apply(hidden, weight, narrow)
            return found
        rows = slice(None) if block is None else block
        return wide_product(hidden.to(narrow), narrowed_rows(self.weight, rows, narrow).t())


class _NarrowProduct(torch.autograd.Function):
    """x W^T in float32, with x [N, D] and W [V, D] rounded to a narrow type. Differentiable twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, narrow: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.narrow = narrow
        return wide_product(x.to(narrow), weight.to(narrow).t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, weight), (grad,) = ctx.saved_tensors, grads
        to_x = _NarrowProduct.apply(grad, weight.t(), ctx.narrow)
        to_weight = _NarrowProduct.apply(grad.t(), x.t(), ctx.narrow)
        return to_x.to(x.dtype), to_weight.to(weight.dtype), None
