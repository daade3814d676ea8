"""Weights of which each process of a run holds some rows. The only file that knows how to see them whole, or where they lie.

Such a tensor is torch's DTensor. It is known here by what it can do, since only runs that have some pay for its import.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

GATHER = "gathered"
"""The attribute of a parameter by which it is gathered from all processes. Each of them has to ask for the same ones."""

MEETING = "meeting"
"""The attribute of a sharded model: a context in which all processes may ask it, and where one that is lost is told."""


def asked_by_all(model: Any) -> AbstractContextManager[None]:
    """Within it a model may be asked outside of its learner. Where it lies in several processes, each has to do that."""
    meeting: Callable[[], AbstractContextManager[None]] | None = getattr(model, MEETING, None)
    return nullcontext() if meeting is None else meeting()


def whole(parameter: Tensor) -> Tensor:
    """All of a parameter, without a gradient. Where it lies in several processes, each of them has to call this."""
    gather: Callable[[], Tensor] | None = getattr(parameter, GATHER, None)
    return parameter.detach() if gather is None else gather()


def is_sharded(x: Tensor) -> bool:
    return hasattr(x, "full_tensor")


def here(x: Tensor) -> tuple[int, Tensor]:
    """The first of a tensor's rows that lies in this process, and those that do: in place, without a gradient."""
    if not is_sharded(x):
        return 0, x.detach()
    own: Tensor = x.to_local().detach()  # type: ignore[attr-defined]
    share = -(-x.shape[0] // x.device_mesh.size())  # type: ignore[attr-defined]
    first = min(share * x.device_mesh.get_local_rank(), x.shape[0])  # type: ignore[attr-defined]
    assert len(own) == min(share, x.shape[0] - first), "rows are dealt as by torch.chunk"
    return first, own
