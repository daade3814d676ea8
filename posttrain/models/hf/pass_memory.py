"""Memory of a pass of a model of transformers, counted with tensors that have shapes and no numbers.

The model's own code runs, with torch's FakeTensorMode, so no formula for each architecture is needed. Layers of one kind
keep the same bytes. So only the first layers run, up to one of each kind, and the others are counted like those.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from posttrain.core.batch import Layout
from posttrain.core.messages import one_line
from posttrain.core.types import UserError
from posttrain.models.hf.backed import Backed
from posttrain.models.hf.recurrence import Recurrence
from posttrain.models.hf.token_mixing import mixing
from posttrain.models.native.attention import AttentionVariant
from posttrain.models.native.linear import Linear, accumulating

CASTS = (torch.ops.aten._to_copy.default,)


@lru_cache(maxsize=64)
def pass_bytes(
    model: Backed, rows: int, length: int, narrow: bool, recompute: bool, offloaded: bool = False, graded: bool = True
) -> float:
    """Return the most bytes that a pass over rows of `length` tokens has at once, beside weights, their gradients and
    their copies in the type of products: of the forward and the backward pass, or if not `graded` of an evaluation.

    `model`: on the "meta" device. `offloaded`: activations of most layers are on the host. Raises UserError if the model's
    code does more than shapes allow.
    """
    try:
        with without_numbers(model) as (short, represented):
            most, kept = _counted(short, (rows, length), narrow, recompute, graded)
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        raise UserError(
            f"the activations of {type(model.inner).__name__} cannot be counted from its config.json: {one_line(error):.200}"
        ) from error
    return most + sum((number - 1) * size for number, size in zip(represented, kept, strict=True)) * (not offloaded)


def copied_weights(model: Backed) -> list[Tensor]:
    """Return the weights of which a model that learns has copies in the type of products: those of linear layers."""
    if not any(p.requires_grad for p in model.parameters()):
        return []
    return [module.weight for module in model.modules() if isinstance(module, nn.Linear | Linear)]


@contextmanager
def without_numbers(model: Backed) -> Iterator[tuple[Backed, list[int]]]:
    """Context of tensors without numbers. Yields a copy of the model with its first layers, and how many layers of the
    model each of those represents.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    short, kinds = copy.deepcopy(model), _kinds(model)
    last = max((kinds.index(kind) + 1 for kind in kinds), default=0)
    for module in short.inner.modules():
        if isinstance(module, nn.ModuleList) and list(module) == short.layers:
            short.inner.config.get_text_config().num_hidden_layers = last
            del module[last:]
            break
    first, count = kinds[:last], Counter(kinds)
    several = Counter(first)
    with FakeTensorMode(allow_non_fake_inputs=True), _Grouped(), _not_packed():
        give_no_memory(short)
        # the last one of a kind represents all that are left out
        yield (
            short,
            [1 + (count[kind] - several[kind]) * (kind not in first[place + 1 :]) for place, kind in enumerate(first)],
        )


def give_no_memory(model: nn.Module) -> None:
    """Move a model from "meta" to a processor without numbers."""
    known: dict[int, Any] = {}  # weights may be tied

    def here(x: Tensor) -> Any:
        own = torch.empty(x.shape, dtype=x.dtype, device="cpu")
        return known.setdefault(id(x), nn.Parameter(own, x.requires_grad) if isinstance(x, nn.Parameter) else own)

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: here(x) for name, x in held.items() if x is not None})


@contextmanager
def _not_packed() -> Iterator[None]:
    """Context in which transformers takes a row for one text. It would read the positions, which have no numbers."""
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    before = getattr(masking_utils, name, None)
    setattr(masking_utils, name, lambda positions: None)
    try:
        yield
    finally:
        setattr(masking_utils, name, before)


def _kinds(model: Backed) -> list[Any]:
    """Return the kind of each layer: layers with equal ones keep equally much."""
    layers = model.layers
    types = getattr(model.inner.config.get_text_config(), "layer_types", None) or [""] * len(layers)
    return [
        (kind, tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters()))
        for kind, layer in zip(types, layers, strict=True)
    ]


def _counted(
    model: Backed, size: tuple[int, int], narrow: bool, recompute: bool, graded: bool
) -> tuple[int, list[int]]:
    """Return the most bytes at once, and those that each layer keeps for the backward pass."""
    rows, length = (1, size[0] * size[1]) if model.way == "flat" else size
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)  # of the micro-batches before
    count, before, kept = ByteCount(model), list[int](), list[int]()
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *given: before.append(count.held))
        layer.register_forward_hook(lambda *given: kept.append(count.held - before[-1]))
    more = {"position_ids": torch.arange(length)[None]} if model.way == "flat" else {}
    contexts: list[AbstractContextManager[Any]] = [
        count, mixing(_Kept(length) if model.way == "flat" else None), torch.autocast("cpu", torch.bfloat16, enabled=narrow),
        torch.set_grad_enabled(graded),
    ]  # fmt: skip
    if graded:
        contexts.append(accumulating())
        contexts += [model._computed_twice()] * recompute
    with ExitStack() as entered:
        for context in contexts:
            entered.enter_context(context)
        states = model(input_ids=tokens, **more)
        if graded:
            with torch.autocast("cpu", enabled=False):
                torch.autograd.backward(states, torch.empty_like(states))
    return count.most, kept[: len(model.layers)]  # a recomputed layer calls its hooks again


class ByteCount(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, without copies of weights in another type."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.held = self.most = 0
        self._weights = {p.untyped_storage()._cdata for p in model.parameters()}
        self._known = set(self._weights) | {b.untyped_storage()._cdata for b in model.buffers()}
        self._known |= {p.grad.untyped_storage()._cdata for p in model.parameters() if p.grad is not None}

    def __torch_dispatch__(self, op: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = op(*args, **(kwargs or {}))
        copied = op in CASTS and args[0].untyped_storage()._cdata in self._weights
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and (memory := tensor.untyped_storage())._cdata not in self._known:
                size = 0 if copied else memory.nbytes()
                self._known.add(memory._cdata)
                self.held += size
                weakref.finalize(memory, self._freed, memory._cdata, size)
        self.most = max(self.most, self.held)
        return found

    def _freed(self, which: int, size: int) -> None:
        self._known.discard(which)
        self.held -= size


class _Grouped(TorchDispatchMode):
    """Products with experts stacked in one tensor, of any type: without numbers torch knows those in bfloat16 alone."""

    def __torch_dispatch__(self, op: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is not torch.ops.aten._grouped_mm.default:
            return op(*args, **(kwargs or {}))
        a, b = args[:2]
        offsets = args[2] if len(args) > 2 else (kwargs or {})["offs"]
        groups = offsets.shape[:1] if a.ndim == b.ndim else ()  # of the gradient of the experts
        return a.new_empty((*groups, a.shape[-2], b.shape[-1]))


class _Attention(torch.autograd.Function):
    """Tensors that flash kernels keep: queries, keys, values, outputs, and a normaliser of each query."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:2], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))


class _Kept:
    """Tensors that layers keep when they mix the tokens of one text, without numbers."""

    def __init__(self, length: int) -> None:
        places = torch.arange(length)
        self._recurrence = Recurrence(Layout(places, places, (0,), (length,), (-1,)))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, how: AttentionVariant, mask: Tensor | None) -> Tensor:
        found: Tensor = _Attention.apply(q, k, v)
        return found

    def convolution(self, function: Callable[..., Tensor], *given: Any, **named: Any) -> Tensor:
        return self._recurrence.convolve(function, *given, **named)

    def rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normed: bool) -> Tensor:
        return self._recurrence.attend(q, k, v, g, beta, normed)
