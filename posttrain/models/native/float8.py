"""Products of layers in float8, by torchao: x W^T and the gradient of x in eight bits, the gradient of W in bfloat16.

Each row of x, W and the gradient has a scale of its own (torchao's recipe "rowwise_with_gw_hp"). With one scale for a
whole tensor, torchao's default, the numbers of a token would depend on the other tokens of its micro-batch.

torchao exchanges modules of the class nn.Linear, and the decoder has others, which stack q, k and v. So its autograd
function is called directly. It is no public name, hence the narrow range of versions of the extra `float8`.

T    tokens
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from posttrain.core.extras import install, installed
from posttrain.core.types import UserError

CAPABILITY = (8, 9)
"""Least compute capability of a GPU with products in float8: Ada, Hopper and later."""
MULTIPLE = 16
"""Rows and columns of a matrix have to be a multiple of this: the kernels of GPUs take no others."""

Product = Callable[[Tensor, Tensor], Tensor]


def float8_product(device: torch.device) -> Product:
    """Return the function (x [T, inputs], W [outputs, inputs]) -> x W^T [T, outputs], of x's type, with gradients.

    On a processor eight-bit numbers are multiplied in float32: the rounding of a GPU, without its speed. Raises UserError
    without torchao, or if the GPU has no products in float8.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        raise UserError(
            f"--float8 needs a GPU of compute capability {'.'.join(map(str, CAPABILITY))} (Ada, Hopper or later), and "
            f"{torch.cuda.get_device_name(device)} has less: leave it out"
        )
    if not installed("torchao"):
        raise UserError(f"--float8 needs torchao, which is not installed: {install('float8')}")
    from torchao.float8 import Float8LinearConfig, LinearMMConfig, ScaledMMConfig
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    @cache
    def settings(emulate: bool) -> tuple[LinearMMConfig, Float8LinearConfig]:
        how = replace(Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), emulate=emulate)
        each = (how.gemm_config_output, how.gemm_config_grad_input, how.gemm_config_grad_weight)
        own = (ScaledMMConfig(emulate, one.use_fast_accum, False, how.pad_inner_dim) for one in each)
        return LinearMMConfig(*own), how

    def product(x: Tensor, weight: Tensor) -> Tensor:
        found: Tensor = matmul_with_hp_or_float8_args.apply(x, weight.t(), *settings(not x.is_cuda))
        return found if x.is_cuda else found.clone()  # it is a view, and on a processor rotary embedding is in place

    return product
