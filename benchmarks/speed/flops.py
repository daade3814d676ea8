"""Useful arithmetic of a model, and the peak that this machine's matrix products reach.

Counted is what the result needs, whatever a library computes: each prompt once per group, no padding, the output head
at scored tokens only, of attention the half that a causal mask leaves. A multiplication with its addition is 2 FLOP.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from posttrain.models.json_files import read_json
from posttrain.models.native.decoder_config import read_config
from posttrain.models.native.decoder_flops import forward_flop
from posttrain.models.native.decoder_shape import DecoderConfig


def config_of(folder: str | Path) -> DecoderConfig:
    return read_config(Path(folder), read_json(Path(folder) / "config.json"))


def forward(config: DecoderConfig, groups: list[tuple[int, list[int]]]) -> float:
    """FLOP of one pass over groups of (prompt length, tokens of each reply), the same for sampling and for learning.

    The last token of a reply predicts nothing and is not fed; the first is predicted by the prompt.
    """
    fed = scored = seen = 0
    for prompt, replies in groups:
        fed += prompt + sum(n - 1 for n in replies)
        scored += sum(replies)
        seen += prompt * (prompt + 1) // 2 + sum((n - 1) * prompt + n * (n - 1) // 2 for n in replies)
    return forward_flop(config, fed, scored, seen)


def product_peak(
    shapes: list[tuple[int, int, int]], dtype: Any = None, device: str = "cpu", seconds: float = 0.15
) -> float:
    """FLOP/s of the fastest matrix product [m, k] x [k, n] among shapes (m, k, n), each repeated for so many seconds."""

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


def reading_peak(mib: int = 512, seconds: float = 0.5) -> float:
    """Bytes per second that a product of a float32 matrix of so many MiB and a vector reads at best."""
    rows, columns = mib * 2**20 // (4 * 4096), 4096
    a, x = torch.randn(rows, columns), torch.randn(columns)
    best, begin = 0.0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        torch.mv(a, x)
        best = max(best, 4 * rows * columns / (time.perf_counter() - start))
    return best


def peak_shapes(config: DecoderConfig) -> list[tuple[int, int, int]]:
    """What the peak is looked for among: squares, and the model's own matrices with many rows."""
    return [(512,) * 3, (1024,) * 3, (2048,) * 3, *own_shapes(config, 2048)]


def own_shapes(config: DecoderConfig, rows: int) -> list[tuple[int, int, int]]:
    """The model's widest products, of so many rows: queries, keys and values; gate and up; the output head."""
    qkv = (config.heads + 2 * config.kv_heads) * config.head_size
    return [(rows, config.hidden, n) for n in (qkv, 2 * config.intermediate, config.vocab)]
