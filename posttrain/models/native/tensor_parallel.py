"""Tensor parallelism of a decoder: each of several processes has some heads, some inner units of the MLP and some ids of
the vocabulary (Megatron-LM, arXiv 1909.08053, section 3).

Query, key, value, gate and up are divided by rows, output and down by columns, embedding and output head by ids. Norms,
and the factors of adapters on the other side of a divided one, are whole in each process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from posttrain.core.types import UserError
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.head import SharedVocabulary
from posttrain.models.native.linear import Adapter, AdapterPlace, Linear
from posttrain.models.peers import Peers
from posttrain.models.row_shards import MEETING, WeightPart, marked, part_of

if TYPE_CHECKING:
    from posttrain.models.native.decoder import Decoder

COLUMNS = ("o", "down")
"""Linear layers whose outputs are sums over the processes."""


def refuse_undivided(config: DecoderConfig, size: int) -> None:
    """Raise UserError if `size` processes cannot have whole key-value heads each."""
    if config.kv_heads % size:
        raise UserError(
            f"--tensor-parallel {size} divides key-value heads, and this model has {config.kv_heads}: give a divisor of "
            f"{config.kv_heads}, or leave it out"
        )


def divide(decoder: Decoder, peers: Peers) -> None:
    """Keep this process's part of each weight and adapter of a decoder. Parts of an earlier call stay as they are.

    Weights on "meta" are never allocated whole. Raises UserError if the decoder's shape does not allow it.
    """
    config = decoder.config
    refuse_undivided(config, peers.size)
    width, kv_width = config.heads * config.head_size, config.kv_heads * config.head_size
    sections = {
        "qkv": (width, kv_width, kv_width),
        "o": (width,),
        "gate_up": (config.intermediate, config.intermediate),
        "down": (config.intermediate,),
    }
    for layer in decoder.layers:
        for name, sizes in sections.items():
            _divide_linear(getattr(layer, name), sizes, name in COLUMNS, peers)
        if layer.peers is None:
            layer.peers = peers
            layer.heads, layer.kv_heads = layer.heads // peers.size, layer.kv_heads // peers.size
    cut(decoder.embed, "weight", (config.vocab,), 0, peers)
    if decoder.output is not None:
        cut(decoder, "output", (config.vocab,), 0, peers)
    part = part_of(decoder.embed.weight)
    assert part is not None
    decoder.embed.peers, decoder.embed.first = peers, part.own[0].start
    decoder.shared = SharedVocabulary(peers, tuple(own[0].stop - own[0].start for own in part.slices))
    setattr(decoder, MEETING, peers.meeting)


def _divide_linear(linear: Linear, sizes: Sequence[int], by_columns: bool, peers: Peers) -> None:
    """Divide a linear layer and its adapter. `sizes`: of the stored matrices, along the divided dimension."""
    if by_columns:
        cut(linear, "weight", sizes, 1, peers)
        linear.shifts = peers.rank == 0
    else:
        cut(linear, "weight", sizes, 0, peers)
        if linear.bias is not None:
            cut(linear, "bias", sizes, 0, peers)
    adapter = linear.adapter
    if adapter is None or part_of(adapter.a) is not None or part_of(adapter.b) is not None:
        return
    if adapter.magnitude is not None:
        raise UserError(
            "--dora scales by the norms of whole rows, which --tensor-parallel divides: leave out one of them"
        )
    if by_columns:
        cut(adapter, "a", sizes, 1, peers)
    else:
        _divide_outputs(adapter, sizes, peers)


def _divide_outputs(adapter: Adapter, sizes: Sequence[int], peers: Peers) -> None:
    """Divide the outputs of an adapter, which are those of the matrices of `sizes` that are adapted."""
    adapted = {place.outputs.start: place for place in adapter.places}
    rows, places = [], []
    begin = outputs = own_rows = 0
    for size in sizes:
        own = _share(size, peers.size, peers.rank)
        length = own.stop - own.start
        if (place := adapted.get(begin)) is not None:
            rows.append(size)
            places.append(
                AdapterPlace(slice(outputs, outputs + length), slice(own_rows, own_rows + length), place.inner)
            )
            own_rows += length
        begin, outputs = begin + size, outputs + length
    cut(adapter, "b", rows, 0, peers)
    adapter.places, adapter.outputs = tuple(places), outputs


def cut(owner: nn.Module, name: str, sizes: Sequence[int], dim: int, peers: Peers) -> None:
    """Replace a parameter by this process's part: its share of each section along `dim`, which have these sizes."""
    whole = cast(Tensor, getattr(owner, name))
    if part_of(whole) is not None:
        return
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    assert starts[-1] + sizes[-1] == whole.shape[dim], f"{name} has the shape {list(whole.shape)}"

    def of(rank: int) -> tuple[slice, ...]:
        shares = (_share(size, peers.size, rank) for size in sizes)
        return tuple(slice(s + own.start, s + own.stop) for s, own in zip(starts, shares, strict=True))

    part = WeightPart(whole.shape, dim, tuple(of(rank) for rank in range(peers.size)), peers)
    kept = [whole.detach().narrow(dim, own.start, own.stop - own.start) for own in part.own]
    own = nn.Parameter(torch.cat(kept, dim).contiguous().clone(), whole.requires_grad)
    setattr(owner, name, marked(own, part))


def _share(size: int, count: int, rank: int) -> slice:
    return slice(size * rank // count, size * (rank + 1) // count)
