"""How the layers of a model of transformers mix tokens, when all tokens of a layout are in one row.

Attention gets ours, as an implementation that transformers knows by name. Linear attention has no such names: the modules
call functions of their Python module, in whose place are ours. Outside of `mixing` these do what they did before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, wraps
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn import functional

from posttrain.core.batch import Layout
from posttrain.models.hf.recurrence import Recurrence
from posttrain.models.native.attention import AttentionVariant, SegmentAttention

NAME = "posttrain"  # name of our attention in transformers
ARGUMENTS = frozenset(
    (
        "dropout",
        "sliding_window",
        "softcap",
        "s_aux",
        "sinks",
        "position_ids",
        "is_causal",
        "use_cache",
        "output_attentions",
    )
)
"""Arguments of a layer to its attention that ours reads, or that change nothing here. Others may change what short texts
do not show, such as which keys are selected.
"""
CONVOLUTION, RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"


class NotFlatError(Exception):
    """Raised when a layer mixes tokens in a way that is unknown over a layout."""


class Mixing(Protocol):
    """The operations that replace those of the layers."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, how: AttentionVariant, mask: Tensor | None) -> Tensor:
        """Attend: q [T, heads, size], k and v [T, kv_heads, size] -> [T, heads, size]."""

    def convolution(self, function: Callable[..., Tensor], *given: Any, **named: Any) -> Tensor:
        """See `Recurrence.convolve`."""

    def rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normed: bool) -> Tensor:
        """See `Recurrence.attend`."""


class LayoutMixing:
    """Mixing over one layout."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.segments = layout, SegmentAttention(layout)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, how: AttentionVariant, mask: Tensor | None) -> Tensor:
        return self.segments(0, q, k, v, how)

    def convolution(self, function: Callable[..., Tensor], *given: Any, **named: Any) -> Tensor:
        return self._recurrence.convolve(function, *given, **named)

    def rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normed: bool) -> Tensor:
        return self._recurrence.attend(q, k, v, g, beta, normed)

    @cached_property
    def _recurrence(self) -> Recurrence:
        return Recurrence(self.layout)


_current: ContextVar[Mixing | None] = ContextVar("how layers mix tokens", default=None)


@contextmanager
def mixing(how: Mixing | None) -> Iterator[None]:
    """Context in which layers mix tokens so, in this thread."""
    token = _current.set(how)
    try:
        yield
    finally:
        _current.reset(token)


def current_mixing() -> Mixing | None:
    return _current.get()


def layout_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers' `AttentionInterface`: query [1, heads, T, size] -> [1, T, heads, size of
    values].
    """
    if unknown := sorted(name for name, value in more.items() if value is not None and name not in ARGUMENTS):
        raise NotFlatError(f"{type(module).__name__} gives its attention {unknown[0]}")
    sinks = more.get("s_aux") if more.get("s_aux") is not None else more.get("sinks")
    how = AttentionVariant(more.get("sliding_window"), more.get("softcap"), sinks)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    size, width = q.shape[-1], v.shape[-1]
    if scaling is not None and abs(factor := scaling * size**0.5) != 1.0:
        q = q * factor
    if width < size:  # latent attention: kernels require equal sizes, and zeros do not change the result
        v = functional.pad(v, (0, size - width))
    if width > size:
        raise NotFlatError(f"{type(module).__name__} has values wider than its keys")
    found = _current.get()
    assert found is not None, "the attention of posttrain is called within `mixing`"
    return found.attention(q, k, v, how, attention_mask)[None, ..., :width], None


def follow_layouts(inner: nn.Module) -> None:
    """Put ours in the place of the functions of linear attention in the Python modules of this model's layers."""
    for name in {type(module).__module__ for module in inner.modules()}:
        own = vars(sys.modules[name])
        for function, ours in ((CONVOLUTION, _convolution), (RULE, _rule)):
            if callable(given := own.get(function)) and not hasattr(given, "follows_layouts"):
                own[function] = ours(given)


def _convolution(given: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(given)
    def convolve(*args: Any, **named: Any) -> Tensor:
        how = _current.get()
        return given(*args, **named) if how is None else how.convolution(given, *args, **named)

    convolve.follows_layouts = True  # type: ignore[attr-defined]
    return convolve


def _rule(given: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(given)
    def attend(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **named: Any) -> Any:
        how = _current.get()
        if how is None:
            return given(query, key, value, g=g, beta=beta, **named)
        if named.get("initial_state") is not None or named.get("output_final_state"):
            raise NotFlatError("linear attention continues a cache")
        return how.rule(query, key, value, g, beta, bool(named.get("use_qk_l2norm_in_kernel"))), None

    attend.follows_layouts = True  # type: ignore[attr-defined]
    return attend
