"""Bit-identical repetition of updates on a GPU, by sums in a fixed order.

Only updates use it: sampling writes each number once, and torch's deterministic operations for that sort first, which
takes longer than a whole decoding step.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_wanted = False


def repeat_bits(wanted: bool) -> None:
    """Set whether updates repeat their bits, as far as torch has deterministic operations.

    torch lists running sums as not deterministic, but those of single rows always have the same order.
    """
    global _wanted
    _wanted = wanted
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # otherwise products may share a workspace
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")


@contextmanager
def repeated_bits() -> Iterator[None]:
    """Context in which torch uses deterministic algorithms, if `repeat_bits` was set and they are not on already."""
    if not _wanted or torch.are_deterministic_algorithms_enabled():
        yield  # the setting is not touched: that would import torch's compiler, which takes a second
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
