"""Useful arithmetic of a model, and the peak that this machine's matrix products reach.

Counted is what the result needs, whatever a library computes: each prompt once per group, no padding, the output head
at scored tokens only, of attention the half that a causal mask leaves. A multiplication with its addition is 2 FLOP.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BACKWARD = 3  # an update is a forward pass and twice as much backwards; recomputation is not useful


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder, as in its config.json."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int

    @staticmethod
    def read(folder: str | Path) -> Shape:
        config = json.loads((Path(folder) / "config.json").read_text())
        heads = config["num_attention_heads"]
        return Shape(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config["num_key_value_heads"],
            head_size=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
            vocabulary=config["vocab_size"],
        )

    @property
    def trunk(self) -> int:
        """Matrix parameters that every token goes through."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def products(self) -> list[tuple[int, int]]:
        """(in, out) of its matrices."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_size
        return [(self.hidden, qkv), (self.hidden, 2 * self.intermediate), (self.hidden, self.vocabulary)]


def forward(shape: Shape, groups: list[tuple[int, list[int]]]) -> float:
    """FLOP of one pass over groups of (prompt length, tokens of each reply), the same for sampling and for learning.

    The last token of a reply predicts nothing and is not fed; the first is predicted by the prompt.
    """
    fed = scored = seen = 0
    for prompt, replies in groups:
        fed += prompt + sum(n - 1 for n in replies)
        scored += sum(replies)
        seen += prompt * (prompt + 1) // 2 + sum((n - 1) * prompt + n * (n - 1) // 2 for n in replies)
    attention = 4 * shape.layers * shape.heads * shape.head_size * seen
    return 2.0 * shape.trunk * fed + 2.0 * shape.vocabulary * shape.hidden * scored + attention


def product_peak(
    shapes: list[tuple[int, int, int]], dtype: Any = None, device: str = "cpu", seconds: float = 0.15
) -> float:
    """FLOP/s of the fastest matrix product [m, k] x [k, n] among shapes (m, k, n), each repeated for so many seconds."""
    import time

    import torch

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    best = 0.0
    for m, k, n in shapes:
        a, b = (torch.randn(*size, device=device).to(dtype or torch.float32) for size in ((m, k), (k, n)))
        out = a @ b
        wait()
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds:
            start = time.perf_counter()
            for _ in range(1 if device == "cpu" else 20):
                torch.mm(a, b, out=out)
            wait()
            taken = (time.perf_counter() - start) / (1 if device == "cpu" else 20)
            best = max(best, 2.0 * m * k * n / taken)
    return best


def peak_shapes(shape: Shape) -> list[tuple[int, int, int]]:
    """What the peak is looked for among: squares, and the model's own matrices with many rows."""
    return [(512,) * 3, (1024,) * 3, (2048,) * 3, *((2048, k, n) for k, n in shape.products)]
