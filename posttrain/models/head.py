"""Output head: hidden states to logits.

N    hidden states    D    their width    V    vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Head:
    """logits = cap tanh(x / cap) with x = scale (hidden W^T + b); without a cap, logits = x.

    Most models have a weight alone. Granite and Cohere scale, Phi has a bias, Gemma 2 a cap ("soft-capping").
    """

    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    cap: float | None = None

    @property
    def vocab(self) -> int:
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
        """Return the head of the first ids. All of them: this very head, whose weight is known as a parameter."""
        if rows == self.vocab:
            return self
        return replace(self, weight=self.weight[:rows], bias=None if self.bias is None else self.bias[:rows])

    def logits(self, hidden: Tensor, block: slice | None = None) -> Tensor:
        """Compute logits [N, V] of hidden [N, D], or the columns of a block of the vocabulary; float32 at least, also
        under autocast.

        Logits rounded to bfloat16 move log-probabilities by more than GSPO's clip is wide (3e-4).
        """
        weight = self.weight if block is None else self.weight[block]
        bias = self.bias if self.bias is None or block is None else self.bias[block]
        with torch.autocast(hidden.device.type, enabled=False):
            wide = torch.promote_types(hidden.dtype, torch.float32)
            x = functional.linear(hidden.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
            if self.scale != 1.0:
                x = x * self.scale
            return x if self.cap is None else (x / self.cap).tanh() * self.cap
