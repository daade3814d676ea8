"""The speed of GPUs by their data sheets."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DENSE_BF16 = (
    (r"H100 .*HBM3", 989e12),  # SXM; those for PCIe and NVL have other names, and are slower
    (r"H200", 989e12),
    (r"B200", 2250e12),
    (r"A100[- ].*", 312e12),
    (r"L40S", 362e12),
    (r"GeForce RTX 4090", 165e12),
)
"""Name of a card without "NVIDIA " -> FLOP/s of its products in bfloat16 with sums in float32, without sparsity."""


def dense_peak(device: torch.device) -> float | None:
    """Return the FLOP/s of a card's products in bfloat16, by its data sheet; None for unknown cards, parts of a card
    (MIG), and processors.
    """
    if device.type != "cuda":
        return None
    from torch.cuda import get_device_name

    name = get_device_name(device).removeprefix("NVIDIA ")
    known = (peak for pattern, peak in DENSE_BF16 if "MIG" not in name and re.fullmatch(pattern, name))
    return next(known, None)
