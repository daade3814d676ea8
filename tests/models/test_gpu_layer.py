"""The operations between the products of an update on a GPU are those of the compiled code for processors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts import normal
from torch import Tensor

from posttrain.models.native import fused
from posttrain.models.native.decoder import Decoder
from posttrain.models.native.kernels import binder, gpu_layer
from posttrain.models.native.kernels.gpu_layer import GPULayer
from posttrain.models.native.linear import accumulating

BACKWARD = ("rms_norm_backward", "swiglu_backward", "rope_backward")
OPERATIONS = ("rms_norm", "rms_norm again", "swiglu", "rope", *BACKWARD)
ROWS, SIZE, HEADS, ROTATED = 7, 32, 5, 4


def done(library: Any, operation: str, dtype: torch.dtype, rows: int = ROWS, device: str = "cpu") -> list[Tensor]:
    """Everything that an operation fills."""

    def given(*shape: int, seed: int, as_type: torch.dtype = torch.float32) -> Tensor:
        return normal(*shape, seed=seed).to(device, as_type)

    name, _, again = operation.partition(" ")
    x, weight = given(rows, SIZE, seed=1), given(SIZE, seed=2)
    rate = (x.square().mean(-1) + 1e-5).rsqrt()
    grad, pair = given(rows, SIZE, seed=3, as_type=dtype), given(rows, 2 * SIZE, seed=4, as_type=dtype)
    heads = given(rows, HEADS * SIZE, seed=5, as_type=dtype)
    cos, sin = (given(rows, 1, SIZE, seed=seed) for seed in (6, 7))
    like, wide, both = torch.empty_like(grad), torch.empty_like(x), torch.empty_like(pair)
    if name == "rms_norm":
        rate = rate if again else torch.zeros_like(rate)
        library.rms_norm(x, weight, 0.0 if again else 1e-5, like, rate, known=bool(again))
        return [like, rate]
    if name == "rms_norm_backward":
        sums = torch.zeros(torch.get_num_threads(), SIZE, device=device)
        library.rms_norm_backward(grad, x, weight, rate, wide, sums)
        return [wide, sums.sum(0)]
    if name == "swiglu":
        library.swiglu(pair, like)
        return [like]
    if name == "swiglu_backward":
        library.swiglu_backward(grad, pair, like, both)
        return [like, both]
    out = torch.empty_like(heads)
    getattr(library, name)(heads, cos, sin, ROTATED, out)
    return [out]


def close(found: list[Tensor], wanted: list[Tensor]) -> bool:
    errors = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
    return all(
        bool((a.cpu().float() - b.cpu().float()).norm() <= errors[a.dtype] * b.float().norm().cpu())
        for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.skipif(binder.layer() is None, reason="needs a C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_fills_what_compiled_code_fills(operation: str, dtype: torch.dtype) -> None:
    assert close(done(GPULayer(), operation, dtype), done(binder.layer(), operation, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_compiled_for_a_gpu_fills_what_it_does_uncompiled(
    operation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [done(GPULayer(), operation, dtype, rows) for rows in (70, 130)]
    monkeypatch.setattr(gpu_layer, "LEAST_NUMBERS", 1)
    assert gpu_layer._can_compile()
    for rows, right in zip((70, 130), wanted, strict=True):
        assert close(done(GPULayer(), operation, dtype, rows, "cuda"), right)


def test_an_update_with_the_operations_of_a_gpu_is_that_with_compiled_code(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q + (k + v).repeat_interleave(2, 1)

    def updated() -> list[Tensor]:
        tokens, position = torch.arange(3, 15), torch.arange(12)
        with accumulating():
            (model(tokens, position, attend) * normal(12, model.config.hidden).float()).sum().backward()
        gradients = [p.grad for p in model.parameters()]
        model.zero_grad()
        return [g for g in gradients if g is not None]

    wanted = updated()
    monkeypatch.setattr(fused.binder, "layer", lambda: GPULayer())
    found = updated()
    assert len(found) == len(wanted) > 5 and close(found, wanted)
