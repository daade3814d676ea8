"""Quantized frozen weights below trainable adapters (QLoRA, arXiv 2305.14314).

nf4    four bits, the quantiles of a normal distribution, one scale for 64 numbers: bitsandbytes' kernels, on every
device
int8   eight bits, one scale a row, symmetric

A weight is unpacked for each product, and released after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from posttrain.core.extras import install
from posttrain.core.types import UserError
from posttrain.models.native.linear import Linear, LinearOfRows

Quantization = Literal["nf4", "int8"]
KINDS: tuple[str, ...] = get_args(Quantization)
BLOCK = 64  # numbers that share a scale in NF4
PACKED_BYTES = {"nf4": 0.5 + 4 / BLOCK, "int8": 1.0}
"""Bytes of a packed number with its share of the scale; the one float32 of an int8 row is not counted."""


class QuantizedLinear(Linear):
    """Linear layer with a packed weight: [..., inputs] -> [..., outputs]."""

    def __init__(self, linear: Linear, kind: str) -> None:
        nn.Module.__init__(self)
        weight = linear.weight.detach()
        self.kind, self.shape, self.dtype = kind, weight.shape, weight.dtype
        self.of_rows = isinstance(linear, LinearOfRows)
        self.bias, self.adapter = linear.bias, linear.adapter
        if weight.is_meta:
            packed, scale = _shapes(weight.shape, kind)
        else:
            require(kind)
            packed, scale = _nf4(weight) if kind == "nf4" else _int8(weight)
        self.register_buffer("packed", packed)
        self.register_buffer("scale", scale)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight [outputs, inputs], unpacked at each access."""
        packed: Any = self.packed
        scale: Any = self.scale
        if self.kind == "nf4":
            return _from_nf4(packed, scale, self.shape).to(self.dtype)
        return (packed.to(self.dtype) * scale.to(self.dtype)).detach()

    @property
    def working_bytes(self) -> int:
        """Bytes of a number while the weight is unpacked."""
        return self.dtype.itemsize * (1 if self.kind == "nf4" else 2)

    @property
    def parameter(self) -> None:
        return None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, -2)).unflatten(0, x.shape[:-1]) if x.ndim != 2 else super().forward(x)

    def restored(self) -> Linear:
        """Return a plain layer with the unpacked weight and the adapter merged."""
        with torch.device("meta"):
            plain = nn.Linear(self.shape[1], self.shape[0], bias=False)
        plain.weight = nn.Parameter(self.merged())
        plain.bias = self.bias  # type: ignore[assignment]
        if self.of_rows:
            return LinearOfRows(plain)
        made = Linear.__new__(Linear)
        nn.Module.__init__(made)
        made.weight, made.bias, made.adapter = plain.weight, self.bias, None
        return made


def pack(model: nn.Module, name: str, weight: Tensor, kind: str) -> None:
    """Put a packed copy of `weight` in the place of the weight of the linear layer called `name`."""
    linear = model.get_submodule(name)
    assert isinstance(linear, Linear)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    model.set_submodule(name, QuantizedLinear(linear, kind))


def packed_layers(modules: Iterable[Any]) -> list[QuantizedLinear]:
    """Return the layers with packed weights in these modules; of those that share a weight, one."""
    found = (layer for module in modules if module is not None for layer in module.modules())
    return list({id(x.packed): x for x in found if isinstance(x, QuantizedLinear)}.values())


def require(kind: str) -> None:
    """Raise UserError if the library for this kind of quantization is not installed."""
    if kind == "nf4":
        try:
            import bitsandbytes  # noqa: F401
        except ImportError as error:
            raise UserError(f"--quantize nf4 needs bitsandbytes: {install('qlora')}, or int8") from error


def _shapes(shape: torch.Size, kind: str) -> tuple[Tensor, Tensor]:
    """Return packed numbers and scales that have shapes alone, for a weight that has no numbers."""
    with torch.device("meta"):
        if kind == "int8":
            return torch.empty(shape, dtype=torch.int8), torch.empty(shape[0], 1)
        numbers = shape.numel()
        return torch.empty(-(-numbers // 2), 1, dtype=torch.uint8), torch.empty(-(-numbers // BLOCK))


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
    return (weight.float() / scale).round_().to(torch.int8), scale


def _nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(weight.float().contiguous(), quant_type="nf4", blocksize=BLOCK)
    return packed, state.absmax


def _from_nf4(packed: Tensor, scale: Tensor, shape: torch.Size) -> Tensor:
    from bitsandbytes.functional import QuantState, dequantize_4bit, get_4bit_type

    code = get_4bit_type("nf4", device=packed.device, blocksize=BLOCK)
    state = QuantState(absmax=scale, shape=shape, code=code, blocksize=BLOCK, quant_type="nf4", dtype=torch.float32)
    unpacked: Tensor = dequantize_4bit(packed, state)
    return unpacked
