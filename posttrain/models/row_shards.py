"""Access to sharded weights, of which each process of a run holds some rows. Only this module gathers them or computes
which rows are local.

A sharded tensor is a DTensor of torch. It is recognised by its methods, so that only sharded runs import that class.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

GATHER = "gathered"
"""The attribute of a parameter that gathers it from all processes. All processes must call it in the same order."""

MEETING = "meeting"
"""The attribute of a sharded model: a context for calls by all processes, which reports a lost process."""


def asked_by_all(model: Any) -> AbstractContextManager[None]:
    """Return a context for calls of a model outside its learner. If the model is sharded, all processes have to enter
    it.
    """
    meeting: Callable[[], AbstractContextManager[None]] | None = getattr(model, MEETING, None)
    return nullcontext() if meeting is None else meeting()


def whole(parameter: Tensor) -> Tensor:
    """Return the whole parameter, without a gradient. If it is sharded, all processes have to call this."""
    gather: Callable[[], Tensor] | None = getattr(parameter, GATHER, None)
    return parameter.detach() if gather is None else gather()


def is_sharded(x: Tensor) -> bool:
    return hasattr(x, "full_tensor")


def here(x: Tensor) -> tuple[int, Tensor]:
    """Return (index of this process's first row, this process's rows of a tensor: a view without a gradient)."""
    if not is_sharded(x):
        return 0, x.detach()
    own: Tensor = x.to_local().detach()  # type: ignore[attr-defined]
    share = -(-x.shape[0] // x.device_mesh.size())  # type: ignore[attr-defined]
    first = min(share * x.device_mesh.get_local_rank(), x.shape[0])  # type: ignore[attr-defined]
    assert len(own) == min(share, x.shape[0] - first), "rows are dealt as by torch.chunk"
    return first, own
