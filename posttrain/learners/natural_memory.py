"""Memory of a natural step, whose Fisher-vector products keep every operation of a pass and of its backward pass.

The products are computed with tensors that have shapes and no numbers, and the bytes that they have at once are counted.

P    parameters that learn, as one flat vector
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from posttrain.core.batch import Layout
from posttrain.learners.natural_step import fisher_product
from posttrain.models.hf.pass_memory import ByteCount, give_no_memory
from posttrain.models.losses import likelihood
from posttrain.models.losses.likelihood import GPU_LOGITS, Hidden, exact_kl
from posttrain.models.native.decoder import Decoder
from posttrain.models.native.kernels import build

VECTORS = 5
"""Vectors [P] that are held beside a product: the gradient, the parameters before the step, and three of the conjugate
gradient (x, residual, direction).
"""
FEW = 2, 4  # layers that run: each further one takes as much as those between


_known: WeakKeyDictionary[Decoder, dict[tuple[int, int], float]] = WeakKeyDictionary()


def product_bytes(model: Decoder, rows: int, length: int) -> float:
    """Return the most bytes that a Fisher-vector product over rows of `length` tokens has at once, beside weights and
    `VECTORS`, with its sum over micro-batches. The result is kept while the model is there.
    """
    known = _known.setdefault(model, {})
    if (rows, length) not in known:
        known[rows, length] = _product_bytes(model, rows, length)
    return known[rows, length]


def _product_bytes(model: Decoder, rows: int, length: int) -> float:
    layers, (few, more) = len(model.layers), FEW
    if layers <= more:
        return float(_counted(model, layers, rows, length))
    most = _counted(model, more, rows, length)
    return most + (layers - more) * (most - _counted(model, few, rows, length)) / (more - few)


def _counted(model: Decoder, layers: int, rows: int, length: int) -> int:
    """Return the bytes of `product_bytes` for the first layers of a model."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    short = _without_numbers(model, layers)
    with FakeTensorMode(allow_non_fake_inputs=True), _as_on_a_gpu():
        give_no_memory(short)
        learned = [p for p in short.parameters() if p.requires_grad]
        vector = torch.empty(sum(p.numel() for p in learned))
        places, total = torch.arange(length).repeat(rows), rows * length
        starts = tuple(range(0, total, length))
        layout, at = Layout(places, places, starts, (length,) * rows, (-1,) * rows), torch.arange(total)

        def kl() -> Tensor:
            with torch.no_grad():
                old = Hidden(short.hidden(layout, at), short.head)
            return exact_kl(old, Hidden(short.hidden(layout, at), short.head)).sum()

        with ByteCount(short) as count:
            fisher_product(kl, learned, vector, torch.zeros_like(vector))  # the sum is counted too
    return count.most


def _without_numbers(model: Decoder, layers: int) -> Decoder:
    """Return a copy of the first layers of a model on the "meta" device."""
    shapes: dict[int, Tensor] = {id(x): torch.empty_like(x, device="meta") for x in model.buffers()}
    for p in model.parameters():
        shapes[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
    short = copy.deepcopy(model, shapes)
    del short.layers[layers:]
    short._frequency = {}
    return short


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Context without the processor's compiled code, which reads numbers, and with as many logits at once as on a GPU."""
    compiled, limit = build.used(), likelihood.CHUNK_LOGITS
    build.use(False)
    likelihood.CHUNK_LOGITS = GPU_LOGITS
    try:
        yield
    finally:
        build.use(compiled)
        likelihood.CHUNK_LOGITS = limit
