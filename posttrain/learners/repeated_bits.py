"""Whether an update on a GPU adds up its sums in the same order each time.

Only updates ask for it: sampling writes each number once, and torch's ways of doing that in a fixed order sort first, which
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
    """Set whether updates repeat their bits, where torch knows a way.

    torch lists running sums among those without one. Those of single rows have one order anyway.
    """
    global _wanted
    _wanted = wanted
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else products may share their workspace
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")


@contextmanager
def repeated_bits() -> Iterator[None]:
    """Let torch choose algorithms that repeat their bits, if that was wanted and is not so anyway."""
    if not _wanted or torch.are_deterministic_algorithms_enabled():
        yield  # the setting is not touched: that would import torch's compiler, which takes a second
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
