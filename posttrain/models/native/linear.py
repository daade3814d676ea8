"""Linear layers: products with weights, low-rank adapters, and their gradients.

T    tokens
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from posttrain.models.peers import Peers, summed
from posttrain.models.row_shards import marked, part_of, whole

ROUND = 64
"""Rows of products in bfloat16 on a processor are filled up to a multiple of this: oneDNN compiles each number of rows that
it has not seen, which takes longer than the product, and keeps what it compiled.
"""


def give_memory(module: nn.Module, device: str | torch.device, but: Collection[int] = ()) -> None:
    """Move a module from "meta" to memory of this device, uninitialised. `but`: ids of parameters that stay on "meta".

    `Module.to_empty` would import sympy (half a second) for the strides of new tensors, which only sharded ones need.
    """

    def empty(x: Tensor) -> Tensor:
        if id(x) in but:
            return x
        return (
            torch.empty_like(x, device=device)
            if hasattr(x, "full_tensor")
            else torch.empty(x.shape, dtype=x.dtype, device=device)
        )

    parts = {name: part_of(parameter) for name, parameter in module.named_parameters()}
    module._apply(empty)
    for name, parameter in module.named_parameters():  # which are new ones
        marked(parameter, parts[name])


class Linear(nn.Module):
    """Layer x W^T + b, uninitialised. Creating torch's own layer on "meta" would import torch's compiler (a second)."""

    shifts = True  # whether outputs include the bias: of processes whose outputs are summed, those of one do

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.adapter: Adapter | None = None  # with one, the weight is frozen

    @property
    def shift(self) -> Tensor | None:
        return self.bias if self.shifts else None

    @property
    def parameter(self) -> Tensor | None:
        """Return the weight if it is a parameter, else None."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """Compute [T, inputs] -> [T, outputs]."""
        if (narrow := _settings().narrow_product) is not None:
            out = narrow(x.to(product_type(x)), self.weight)
            return out if self.bias is None else out + self.bias.to(out.dtype)
        if written_out(self) and torch.is_grad_enabled():
            accumulated: Tensor = _Product.apply(x, self, *learned(self))
            return accumulated
        if self.adapter is None:
            return product(x, self.weight, self.shift)
        if not torch.is_grad_enabled():
            return multiplied(x.to(product_type(x)), self)
        if self.adapter.magnitude is None:
            return product(x, self.weight, self.shift) + self.adapter(x)
        out = self.adapter.scaled(product(x, self.weight, None) + self.adapter(x), self.weight)
        return out if self.shift is None else out + self.shift.to(out.dtype)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Return the weight [outputs, inputs] with the adapter merged; without an adapter, the weight itself.

        A sharded weight is gathered for the merge.
        """
        return self.weight.detach() if self.adapter is None else self.adapter.merged(whole(self.weight))


class LinearOfRows(Linear):
    """Linear layer for inputs [..., inputs], which replaces one of torch's layers and shares its tensors."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.weight, self.adapter = cast(nn.Parameter, layer.weight), None
        self.bias = cast(nn.Parameter | None, layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., inputs] -> [..., outputs]."""
        return super().forward(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


class AdapterPlace(NamedTuple):
    """Position of one adapted matrix within a product."""

    outputs: slice  # its outputs of the product
    rows: slice  # its rows of B
    inner: slice  # its rows of A


class Adapter(nn.Module):
    """Low-rank adapter of a product: scale * B A x (LoRA, arXiv 2106.09685, equation 3).

    With a magnitude m each row is scaled to the norm m: m / |W + scale * B A| (W + scale * B A) x, before the bias,
    with the norm of the rows treated as a constant (DoRA, arXiv 2402.09353, equation 5 and section 4.3).

    A product may compute several stored matrices at once (q, k, v), each with its own A and B, or without an adapter.
    All A are stacked, [pieces * rank, inputs], for one product with x; so are all B, [adapted outputs, rank].
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        pieces: Sequence[tuple[str, slice]],
        rank: int,
        scale: float,
        dora: bool = False,
    ) -> None:
        """Create an uninitialised adapter. `pieces`: (name, slice of the outputs) of each adapted matrix."""
        super().__init__()
        self.names = tuple(name for name, _ in pieces)
        self.outputs, self.rank, self.scale = outputs, rank, scale
        places, end = [], 0
        for number, (_, rows) in enumerate(pieces):
            begin, end = end, end + rows.stop - rows.start
            places.append(AdapterPlace(rows, slice(begin, end), slice(number * rank, (number + 1) * rank)))
        self.stored_places = self.places = tuple(places)  # of the whole adapter, and of this process's part
        self.a = nn.Parameter(torch.empty(len(pieces) * rank, inputs))
        self.b = nn.Parameter(torch.empty(end, rank))
        self.magnitude = nn.Parameter(torch.empty(end)) if dora else None  # one for each row of B

    def forward(self, x: Tensor) -> Tensor:
        """Compute [T, inputs] -> [T, outputs] with operations that can be differentiated twice."""
        inner = product(x, self.a, None) * self.scale
        parts, end = [], 0
        for place in self.places:
            parts.append(inner.new_zeros(len(x), place.outputs.start - end))
            parts.append(product(inner[:, place.inner], self.b[place.rows], None))
            end = place.outputs.stop
        parts.append(inner.new_zeros(len(x), self.outputs - end))
        return torch.cat([part for part in parts if part.shape[1]], 1)

    @torch.no_grad()
    def lengths(self, weight: Tensor) -> Tensor:
        """Return |W + scale * B A| of each adapted row, [rows of B], at least float32.

        Computed as |W|^2 + 2 scale W A^T B^T + scale^2 B A A^T B^T, without the matrix W + scale * B A. While gradients
        accumulate, the result is cached.
        """
        known = _settings().narrowed
        if known is not None and self.magnitude in known:
            return known[self.magnitude]
        wide = torch.promote_types(weight.dtype, torch.float32)
        found = []
        with torch.autocast(weight.device.type, enabled=False):
            for place in self.places:
                w, a, b = (
                    x.detach().to(wide) for x in (weight[place.outputs], self.a[place.inner], self.b[place.rows])
                )
                squares = w.square().sum(1)
                squares += 2 * self.scale * (w @ a.t()).mul_(b).sum(1) + self.scale**2 * (b @ (a @ a.t()) * b).sum(1)
                found.append(squares.clamp_min_(0).sqrt_())
        lengths = torch.cat(found)
        if known is not None and self.magnitude is not None:
            known[self.magnitude] = lengths
        return lengths

    def scaled(self, out: Tensor, weight: Tensor) -> Tensor:
        """Scale outputs [T, outputs], before the bias, by magnitude / norm of the row; unchanged without magnitude."""
        if self.magnitude is None:
            return out
        share, parts, end = self.magnitude / self.lengths(weight), [], 0
        for place in self.places:
            parts += [share.new_ones(place.outputs.start - end), share[place.rows]]
            end = place.outputs.stop
        parts.append(share.new_ones(self.outputs - end))
        return (out * torch.cat(parts)).to(out.dtype)  # a factor in bfloat16 would round off small updates

    def shifted(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product with the weight plus the adapter's output, without a gradient; all tensors are of the type
        of products.

        Merging the weights for each micro-batch would save one hundredth of an update's time, but if products are
        narrower than weights, rounding would lose most of what an update adds.
        """
        out, inner, b = product(x, weight, bias), self.inner(x), narrowed(self.b, x.dtype)
        for place in self.places:
            if in_one_block():
                out[:, place.outputs].addmm_(inner[:, place.inner], b[place.rows].t())
            else:
                out[:, place.outputs] += product(inner[:, place.inner].contiguous(), b[place.rows], None)
        return out

    def merged(self, weight: Tensor) -> Tensor:
        """Return a copy of the whole weight with the adapter merged."""
        base, wide = weight, torch.promote_types(weight.dtype, self.a.dtype)
        weight = weight.detach().to(wide, copy=True)
        a, b = whole(self.a), whole(self.b)
        for place in self.stored_places:
            weight[place.outputs].addmm_(b[place.rows], a[place.inner], alpha=self.scale)
        return weight if self.magnitude is None else self.scaled(weight.t(), base).t().contiguous()

    def inner(self, x: Tensor) -> Tensor:
        """Compute scale * A x."""
        return product(x, narrowed(self.a, x.dtype), None).mul_(self.scale)

    def back(self, grad: Tensor, to_x: Tensor | None) -> Tensor:
        """Add the adapter's part to the gradient of x, `to_x`. Return the gradient of A x.

        `grad` [T, outputs]: gradient of the product; all tensors have one type.
        """
        b = narrowed(self.b, grad.dtype)
        to_inner = grad.new_empty(len(grad), len(self.a))
        for place in self.places:
            torch.mm(grad[:, place.outputs], b[place.rows], out=to_inner[:, place.inner])
        to_inner.mul_(self.scale)
        if to_x is not None:
            to_x.addmm_(to_inner, narrowed(self.a, grad.dtype))
        return to_inner

    def collect_magnitude(self, grad: Tensor, x: Tensor, weight: Tensor) -> None:
        """Add to the gradient of the magnitude; the outputs are recomputed. `grad`: gradient of the product."""
        if self.magnitude is None:
            return
        to_magnitude, lengths = collected(self.magnitude), self.lengths(weight)
        assert to_magnitude is not None
        out = self.shifted(x, narrowed(weight, x.dtype), None)
        for place in self.places:
            moved = (grad[:, place.outputs] * out[:, place.outputs]).sum(0, dtype=lengths.dtype)
            to_magnitude[place.rows] += moved / lengths[place.rows]

    def collect(self, to_inner: Tensor, grad: Tensor, x: Tensor) -> None:
        """Add to the gradients of A and B, given the gradients of A x and of the outputs."""
        to_a, to_b = collected(self.a), collected(self.b)
        assert to_a is not None and to_b is not None
        add_product(to_a, to_inner.t(), x)
        inner = self.inner(x)
        for place in self.places:
            add_product(to_b[place.rows], grad[:, place.outputs].t(), inner[:, place.inner])


class Embedding(nn.Module):
    """Embedding layer, uninitialised. With peers each process has the rows of some ids."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, size))
        self.peers: Peers | None = None
        self.first = 0  # id of the first row

    def forward(self, index: Tensor) -> Tensor:
        if self.peers is None:
            return self._rows(index)
        elsewhere = (index < self.first) | (index >= self.first + len(self.weight))
        own = self._rows((index - self.first).masked_fill(elsewhere, 0))
        return summed(own.masked_fill(elsewhere[:, None], 0.0), self.peers)

    def _rows(self, index: Tensor) -> Tensor:
        if collects(self.weight) and torch.is_grad_enabled():
            rows: Tensor = _Rows.apply(self.weight, index)
            return rows
        return functional.embedding(index, self.weight)


def rounds(device: torch.device) -> bool:
    """Return whether products run in bfloat16 on a processor, where few distinct numbers of rows should occur."""
    return device.type == "cpu" and torch.is_autocast_enabled("cpu")


# -- temporary settings ------------------------------------------------------------------------------------------------


@dataclass
class _ProductSettings:
    """Settings of products in this thread."""

    block: int | None = None  # rows per product; None: all
    # while gradients accumulate: weight -> its copy in the type of products; else None
    narrowed: dict[Tensor, Tensor] | None = None
    keeps: bool = True  # whether such copies of narrowed weights are kept
    narrow_product: Callable[[Tensor, Tensor], Tensor] | None = None  # x, W -> x W^T in fewer bits; None: by torch


_shared_settings = _ProductSettings()
_own = threading.local()


def _settings() -> _ProductSettings:
    found: _ProductSettings = getattr(_own, "settings", _shared_settings)
    return found


def compute_apart() -> None:
    """Give this thread its own settings of products.

    By default threads share them: torch computes gradients on a GPU in further threads, which need the settings of the
    thread that started them.
    """
    _own.settings = _ProductSettings()


@contextmanager
def _within(**settings: Any) -> Iterator[None]:
    changed = _settings()
    before = {name: getattr(changed, name) for name in settings}
    vars(changed).update(settings)
    try:
        yield
    finally:
        vars(changed).update(before)


def multiplying(product: Callable[[Tensor, Tensor], Tensor] | None) -> AbstractContextManager[None]:
    """Return a context in which layers without adapters compute x W^T by this function; None: by torch."""
    return _within(narrow_product=product)


# -- rows that do not depend on each other -----------------------------------------------------------------------------


def in_blocks(rows: int) -> AbstractContextManager[None]:
    """Return a context in which products are computed in blocks of `rows` rows, without gradients; inputs must be whole
    blocks.

    Libraries choose the order of summation by the number of rows, so that the last bits of a row would depend on the
    number of other rows. In blocks of one size they do not.
    """
    return _within(block=rows)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute functional.linear, in blocks within `in_blocks`. A weight of a narrower type is widened."""
    block = _settings().block
    if block is None:
        if weight.dtype.itemsize < x.dtype.itemsize and not torch.is_autocast_enabled(x.device.type):
            weight = weight.to(x.dtype)
        return functional.linear(x, weight, bias)
    dtype = product_type(x)
    x, transposed = x.to(dtype), weight.to(dtype).t()
    assert x.shape[0] % block == 0, "whole blocks"
    blocks = x.shape[0] // block
    if _as_in_blocks(blocks, block, weight.shape, dtype, torch.get_num_threads()):
        out = torch.mm(x, transposed)
    else:
        out = torch.cat([torch.mm(rows, transposed) for rows in x.split(block)])
    return out if bias is None else out.add_(bias.to(dtype))


@cache
def _as_in_blocks(blocks: int, rows: int, weight: torch.Size, dtype: torch.dtype, threads: int) -> bool:
    """Return whether one product of several blocks is bit-identical to separate products of the blocks.

    Tested on random numbers, of which some differ if the order of summation differs.
    """
    generator = torch.Generator().manual_seed(0)
    outputs, inputs = weight
    block = torch.randn(rows, inputs, generator=generator).to(dtype)
    transposed = torch.randn(outputs, inputs, generator=generator).to(dtype).t()
    together = torch.mm(block.repeat(blocks, 1), transposed)
    return torch.equal(together, torch.mm(block, transposed).repeat(blocks, 1))


# -- gradients ---------------------------------------------------------------------------------------------------------


def accumulating(keeps: bool = True) -> AbstractContextManager[None]:
    """Return a context in which `backward` adds gradients of weights to `.grad` in place. Weights must not change in it.

    torch would allocate each micro-batch's gradient and then add it, which takes the memory of the embedding and of the
    output head once more. Not for `torch.autograd.grad`, nor for second derivatives. `keeps`: keep narrowed weights for
    the next micro-batch; otherwise they are converted again for each product.
    """
    return _within(narrowed={}, keeps=keeps)


def accumulates() -> bool:
    return _settings().narrowed is not None


def collects(weight: Tensor) -> bool:
    """Return whether a backward pass adds this weight's gradient in place."""
    return accumulates() and weight.is_leaf and weight.requires_grad


def written_out(linear: Linear) -> bool:
    """Return whether this product uses the backward pass of this module, also for a frozen weight with an adapter."""
    own = linear.parameter
    return accumulates() and (own is None or own.is_leaf)


def in_one(linear: Linear) -> bool:
    """Return whether a product can be computed in one operation with what precedes it."""
    return _settings().narrow_product is None and (written_out(linear) or not torch.is_grad_enabled())


def learned(linear: Linear) -> tuple[Tensor | None, ...]:
    """Return the bias and the other trainable tensors, which autograd needs as arguments to require a gradient."""
    adapter = linear.adapter
    return linear.shift, linear.parameter, *(() if adapter is None else (adapter.a, adapter.b, adapter.magnitude))


def computed_with(linear: Linear) -> tuple[Tensor | None, ...]:
    """Return the tensors of a product that need the type of activations: all but the weight, which may be narrower."""
    bias, _, *others = learned(linear)
    return bias, *others


def reads_rounded(module: nn.Module) -> bool:
    """Return whether a module reads its weight in the type of products alone: not with magnitudes, which need the norms
    of its rows.
    """
    if isinstance(module, Linear):
        adapter = module.adapter
        return module.parameter is not None and (adapter is None or adapter.magnitude is None)
    return type(module) is nn.Linear


def matrices_read_rounded(layers: Iterable[nn.Module]) -> dict[int, nn.Parameter]:
    """Return the weights of layers that are read in the type of products alone, by their ids."""
    modules = (module for layer in layers for module in layer.modules() if reads_rounded(module))
    return {id(module.weight): cast(nn.Parameter, module.weight) for module in modules}


def narrow_layers(layers: Iterable[nn.Module], products: torch.dtype | None) -> None:
    """Hold the matrices of layers that no update changes in the type of products, which read the same numbers then; where
    products have a wider type, they widen them. None: do nothing.
    """
    if products is None:
        return
    layers = list(layers)
    for layer in layers:
        for name, module in list(layer.named_modules()):
            if type(module) is nn.Linear:
                layer.set_submodule(name, LinearOfRows(module))
    for weight in matrices_read_rounded(layers).values():
        if weight.dtype.itemsize > products.itemsize:
            weight.data = weight.data.to(products)


def in_one_block() -> bool:
    return _settings().block is None


def product_type(x: Tensor) -> torch.dtype:
    """Return the type of products with x: autocast's under autocast, else that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def narrowed(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a weight in the type of products, cached while gradients accumulate. `dtype`: the type of products, if
    autocast has ended.
    """
    dtype, known = dtype or product_type(weight), _settings().narrowed
    if known is None or not _keeps(weight, dtype):
        return weight.to(dtype)
    if weight not in known:
        known[weight] = weight.to(dtype)
    return known[weight]


def narrowed_rows(weight: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
    """Return some rows of a weight in this type, from the cached copy if there is one."""
    return narrowed(weight, dtype)[rows] if _keeps(weight, dtype) else weight[rows].to(dtype)


def _keeps(weight: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a copy of the whole weight in this type is cached: only a narrower one, and only of parameters."""
    narrower = dtype.itemsize < weight.dtype.itemsize
    return accumulates() and _settings().keeps and narrower and isinstance(weight, nn.Parameter)


def collected(weight: Tensor) -> Tensor | None:
    """Return the tensor to which a backward pass adds the gradient of a weight; None: it returns the gradient."""
    if not collects(weight):
        return None
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)  # wider than a weight gathered in bfloat16
    return weight.grad


def add_product(place: Tensor, one: Tensor, other: Tensor) -> None:
    """Compute place += one @ other, where the factors may be of a narrower or wider type than `place`."""
    if place.dtype == one.dtype:
        place.addmm_(one, other)
    elif one.is_cuda:
        torch.addmm(place, one, other, out_dtype=place.dtype, out=place)
    else:
        place.add_(one @ other)


def wide_product(one: Tensor, other: Tensor) -> Tensor:
    """Return one @ other of matrices, or batches of them, with float32 sums and results even for bfloat16 factors."""
    if one.is_cuda and one.dtype != torch.float32:
        return (torch.mm if one.ndim == 2 else torch.bmm)(one, other, out_dtype=torch.float32)
    return one.float() @ other.float()


def multiplied(x: Tensor, linear: Linear) -> Tensor:
    """Compute a linear layer with its adapter, without a gradient. x is of the type of products."""
    own, bias, adapter = linear.weight, linear.shift, linear.adapter
    weight = narrowed(own)
    shift = None if bias is None else narrowed(bias)
    if adapter is None:
        return product(x, weight, shift)
    if adapter.magnitude is None:
        return adapter.shifted(x, weight, shift)
    out = adapter.scaled(adapter.shifted(x, weight, None), own)
    return out if shift is None else out.add_(shift)


def before_scale(adapter: Adapter | None, grad: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient before scaling by the magnitude, given that of the product; unchanged without a magnitude."""
    return grad if adapter is None else adapter.scaled(grad, weight)


class _Product(torch.autograd.Function):
    """functional.linear, also under autocast; for a frozen weight only the gradient of x is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: Linear, *learned: Tensor | None) -> Tensor:
        ctx.linear, ctx.type = linear, x.dtype
        x = x.to(product_type(x))
        own = linear.parameter
        learns = linear.adapter is not None or (own is not None and own.requires_grad)
        ctx.save_for_backward(x if learns else None)
        return multiplied(x, linear)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight, adapter = ctx.saved_tensors, ctx.linear.weight, ctx.linear.adapter
        inner = before_scale(adapter, grad, weight)
        to_x = inner @ narrowed(weight, grad.dtype) if ctx.needs_input_grad[0] else None
        if (place := collected(weight)) is not None:
            add_product(place, grad.t(), x)
        if adapter is not None:
            adapter.collect(adapter.back(inner, to_x), inner, x)
            adapter.collect_magnitude(grad, x, weight)
        return None if to_x is None else to_x.to(ctx.type), None, *of_learned(ctx, grad)


def of_learned(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients for the tensors of `learned`: the bias's; None for the others, which are added in place."""
    linear = ctx.linear
    bias = linear.shift
    to_bias = grad.sum(0, dtype=bias.dtype) if bias is not None and bias.requires_grad else None
    return to_bias, *(None for _ in learned(linear)[1:])


class _Rows(torch.autograd.Function):
    """functional.embedding with a gradient that is added in place."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.weight = weight
        return functional.embedding(index, weight).to(weight.grad_dtype)  # so that gradients arrive in this type

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        place = collected(ctx.weight)
        assert place is not None
        place.index_add_(0, ctx.saved_tensors[0], grad.to(place.dtype))
        return None, None
