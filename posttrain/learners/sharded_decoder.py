"""Shards of a decoder by torch's FSDP2: which rows a process holds, and in which type a layer is gathered."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from posttrain.learners.process_group import Processes
from posttrain.learners.rounded_weights import is_rounded, widen_gradients
from posttrain.models.adapters.adapter_writer import adapters
from posttrain.models.backbone import Backbone
from posttrain.models.native.linear import reads_rounded
from posttrain.models.row_shards import GATHER, MEETING, is_sharded

MMAP_THRESHOLD = -3  # glibc's M_MMAP_THRESHOLD: the size from which on a block gets its own pages
OWN_PAGES = 2**20  # bytes


def shard(decoder: Backbone, size: int, device: torch.device, each: int | None = None) -> None:
    """Shard each weight of a decoder over the processes. Weights of a decoder on "meta" are never allocated whole.

    `size`: number of processes; `each`: of those, neighbours, that share one copy of the weights; None: all of them.

    Adapters are left whole: they are small, and every process needs all of them for each product. So are the weights that
    compute pictures, before the decoder's pass, and in some processes' micro-batches only.

    Raises UserError for a model of transformers whose layers cannot be sharded.
    """
    decoder.prepare_shards()
    if device.type == "cpu":
        _return_freed_memory()
    each = each or size
    if each == size:
        mesh = init_device_mesh(device.type, (size,))
    else:
        mesh = init_device_mesh(device.type, (size // each, each), mesh_dim_names=("copies", "shards"))
    left = {parameter for adapter in adapters(decoder) for parameter in adapter.parameters()}
    left |= {*decoder.vision_weights()}
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=left)
    fully_shard(cast(nn.Module, decoder), mesh=mesh, reshard_after_forward=False, ignored_params=left)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):  # losses are already divided by the counts of the whole batch
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


@cache
def _return_freed_memory() -> None:
    """Make glibc return freed memory to the system at once, if that is possible.

    Gathered layers are repeatedly allocated and freed. By default glibc keeps their blocks, in fragments that do not
    fit the next allocations, so that processes take more memory than without sharding.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, OWN_PAGES)


def can_gather(decoder: Backbone, world: Processes) -> None:
    """Let `row_shards.whole` gather each sharded weight of a decoder."""
    for parameter in decoder.parameters():
        if is_sharded(parameter):
            setattr(parameter, GATHER, partial(gathered, parameter, world))


def open_shards(decoder: Backbone, world: Processes, products: torch.dtype | None, each: int | None = None) -> None:
    """Prepare a sharded decoder for its passes, and shard it first where it is whole. All processes have to call this.

    `products`: the type of matrix products, if it is narrower than that of the weights; `each`: see `shard`.
    """
    if not isinstance(decoder, FSDPModule):
        shard(decoder, world.size, decoder.head.device, each)
    _initialise(cast(nn.Module, decoder))
    if products is not None:
        _gather_in(decoder, products)
    setattr(decoder, MEETING, partial(_calling, world, decoder.head.device.type, products))
    can_gather(decoder, world)


def _initialise(decoder: nn.Module) -> None:
    """Initialise FSDP's parameters, and let the gradients of weights in bfloat16 be float32.

    torch converts the gradients of a layer that it has summed to the type of the layer's weights, of which it allows
    only one. So it initialises itself as if weights in bfloat16 did not learn: the others are float32.
    """
    rounded = [p for p in decoder.parameters() if p.requires_grad and is_rounded(p)]
    for parameter in rounded:
        parameter.requires_grad_(False)
    state_of(decoder)._lazy_init()
    for parameter in rounded:
        parameter.requires_grad_(True)
    widen_gradients(rounded)
    for module in decoder.modules() if rounded else ():
        if isinstance(module, FSDPModule) and (group := state_of(module)._fsdp_param_group) is not None:
            group.unshard()
            group.wait_for_unshard()
            widen_gradients(held._unsharded_param for held in group.fsdp_params if held.sharded_param.requires_grad)
            module.reshard()


@contextmanager
def _calling(world: Processes, device: str, products: torch.dtype | None) -> Iterator[None]:
    """Context for a pass of all processes outside of the learner, with products in the type of the gathered weights."""
    with ExitStack() as within:
        entered: list[AbstractContextManager[Any]] = [world.meeting()]
        entered += [] if products is None else [torch.autocast(device, products)]
        for context in entered:
            within.enter_context(context)
        yield


def _gather_in(decoder: Backbone, products: torch.dtype) -> None:
    """Gather the matrices of the layers in the type of products, while their rows and gradients keep the wider type.

    Other weights keep it too, since they are read in it: norms, biases, the embedding, the output head, the base of an
    adapter with magnitudes, and packed experts. So a pass computes the same numbers as with whole weights, which a
    product rounds to its own type. FSDP2's `MixedPrecisionPolicy` would round all weights of a layer, and reduce
    gradients after a rounding to the narrow type.
    """
    for layer in decoder.layers:
        matrices = {id(m.weight) for m in layer.modules() if reads_rounded(m)}
        group = state_of(layer)._fsdp_param_group
        narrow = [held for held in group.fsdp_params if id(held.sharded_param) in matrices]
        narrow = [held for held in narrow if held.orig_dtype.itemsize > products.itemsize]
        for held in narrow:
            held.param_dtype = products
        group.unshard()  # not the layer's own method, which would set the types anew
        group.wait_for_unshard()
        for held in narrow:
            held._unsharded_param.grad_dtype = held.orig_dtype
        layer.reshard()


def gathered(parameter: Tensor, world: Processes) -> Tensor:
    """Gather a parameter from all processes."""
    with world.meeting(), torch.no_grad():
        found: Tensor = cast(DTensor, parameter).full_tensor()
    return found


def forget_order(decoder: Backbone) -> None:
    """Reset torch's record of the order of modules, which torch itself resets only after a backward pass."""
    state_of(cast(nn.Module, decoder))._comm_ctx.post_forward_order.clear()
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            state_of(module)._fsdp_param_group._post_forward_indices.clear()


def state_of(module: nn.Module) -> Any:
    """Return FSDP2's state of a sharded module."""
    return fully_shard.state(module)  # type: ignore[attr-defined]
