"""A second device for tests on a processor: "second", whose tensors torch and posttrain treat as those of a GPU.

Its numbers are in ordinary tensors. An operation that mixes it with the processor raises, as on a GPU, so a test that runs
there shows that everything was moved. Operations are the processor's, so results have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils import _pytree, backend_registration

NAME = "second"
_aten = torch.ops.aten
_CROSSING = {_aten.copy_.default, _aten._to_copy.default}


class _Module(backend_registration._DummyBackendModule):
    """What torch asks of a device: torch.second."""

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class SecondTensor(Tensor):
    """A tensor of the second device. `numbers`: its memory, a tensor of the processor."""

    numbers: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers: Tensor) -> SecondTensor:
        shape, kind = (numbers.shape, numbers.stride(), numbers.storage_offset()), numbers.dtype
        made: SecondTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, *shape, dtype=kind, device=torch.device(NAME, 0)
        )
        return made

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers
        _alive.add(self.numbers)
        if _peaks:
            _peaks[-1] = max(_peaks[-1], bytes_held())

    @classmethod
    def __torch_dispatch__(
        cls, op: Any, kinds: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        known: dict[int, SecondTensor] = {}

        def inner(x: Any) -> Any:
            if isinstance(x, SecondTensor):
                known[id(x.numbers)] = x
                return x.numbers
            if isinstance(x, Tensor) and x.ndim and op not in _CROSSING:
                raise RuntimeError(f"{op}: expected all tensors on one device, found cpu and {NAME}")
            return torch.device("cpu") if isinstance(x, torch.device) else x

        def outer(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return known[id(x)] if id(x) in known else SecondTensor(x)

        given = kwargs or {}
        if op is _aten.histc.default:  # a GPU counts integers, a processor does not
            args = (args[0].to(torch.float32), *args[1:])
        found = op(*_pytree.tree_map(inner, args), **_pytree.tree_map(inner, given))
        if op is _aten.copy_.default:
            return args[0]
        to = given.get("device")
        return found if to is not None and torch.device(to).type == "cpu" else _pytree.tree_map(outer, found)

    # torch itself would read memory, which a wrapper has not
    def tolist(self) -> Any:
        return self.numbers.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.numbers.untyped_storage()


_alive: WeakSet[Tensor] = WeakSet()
_peaks: list[int] = []


def bytes_held() -> int:
    """Return the bytes of the second device's tensors."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in list(_alive)}
    return sum(storages.values())


@contextmanager
def peak() -> Iterator[list[int]]:
    """Context that measures: the only entry of the list is the most bytes that tensors of the device had at once."""
    _peaks.append(bytes_held())
    found = [0]
    try:
        yield found
    finally:
        found[0] = _peaks.pop()


@cache
def second_device() -> torch.device:
    """Return the device; the first call registers it with torch."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    library = torch.library.Library("aten", "IMPL")

    def empty(size: Any, *, dtype: Any = None, device: Any = None, **how: Any) -> Tensor:
        return SecondTensor(torch.empty(size, dtype=dtype, device="cpu"))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **how: Any) -> Tensor:
        return SecondTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))

    def copy_from(own: Tensor, place: SecondTensor, non_blocking: bool = False) -> Tensor:
        place.numbers.copy_(own.numbers if isinstance(own, SecondTensor) else own)
        return place

    library.impl("_copy_from", copy_from, "PrivateUse1")  # of torch.tensor(..., device=...)
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    _kept.append(library)
    _kept.append(_autocast())
    return torch.device(NAME, 0)


def _autocast() -> Any:
    """Under autocast, products are in its type, as on a GPU. Returns what has to be kept."""
    below = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    every = torch.library.Library("_", "IMPL")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    products = torch.library.Library("aten", "IMPL")

    def narrow(op: Any) -> Any:
        def product(*args: Any, **kwargs: Any) -> Any:
            def cast(x: Any) -> Any:
                wide = isinstance(x, Tensor) and x.dtype == torch.float32
                return x.to(torch.get_autocast_dtype(NAME)) if wide else x

            with torch._C._ExcludeDispatchKeyGuard(below):
                return op(*_pytree.tree_map(cast, args), **_pytree.tree_map(cast, kwargs))

        return product

    for name in (
        "linear",
        "matmul",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "scaled_dot_product_attention",
        "conv1d",
        "conv2d",
    ):
        op = getattr(_aten, name)
        overload = "default" if "default" in op.overloads() else op.overloads()[0]
        products.impl(
            name if overload == "default" else f"{name}.{overload}",
            narrow(getattr(op, overload)),
            "AutocastPrivateUse1",
        )
    return every, products


_kept: list[Any] = []
