"""Decoding steps by compiled code, `decode.c`: decides whether it can be used, and packs weights and requests in its
formats.

    B    running requests    K    inputs of a product
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from posttrain.engines.local.paged_cache import PagedCache
from posttrain.engines.local.running_batch import RunningBatch
from posttrain.models.native.decoder import Decoder, Layer
from posttrain.models.native.kernels import binder
from posttrain.models.native.linear import Linear

UNIT = 32
"""Numbers of rows and strides of buffers are multiples of it: it is a multiple of every processor's vectors, panels and
tiles.
"""
KINDS = ("products", "attention", "norms", "sampling")
"""Kinds of work in a step, as in decode.c."""
FEED_ROWS = 256  # maximum of given tokens in a step
SAMPLED = ("count", "budget", "seed", "temperature", "filtered", "ended", "tokens", "logp")
"""Fields of a step that are about sampling alone."""
HEAD_ROWS = 16  # rows per product with the output head that torch computes


def logits_in_blocks(model: Decoder, hidden: Tensor) -> Tensor:
    """Compute logits [n, vocab] of hidden states [n, hidden] in blocks, so that the bits of a row do not depend on the
    number of rows.
    """
    whole = torch.cat((hidden, hidden[:1].expand(-len(hidden) % HEAD_ROWS, -1)))
    return torch.cat([model.logits(rows) for rows in whole.split(HEAD_ROWS)])[: len(hidden)]


# -- weights -----------------------------------------------------------------------------------------------------------


def supported(model: Decoder, dtype: torch.dtype) -> bool:
    """Return whether compiled code can decode this model, with products of `dtype`. May compile the code."""
    types = {p.dtype for p in model.parameters()}  # frozen matrices may be stored in bfloat16
    if model.head.device.type != "cpu" or model.dtype != torch.float32 or types - {torch.float32, torch.bfloat16}:
        return False
    library = binder.decode()
    return library is not None and (dtype == torch.float32 or (dtype == torch.bfloat16 and library.bf16))


def _round_up(count: int, unit: int = UNIT) -> int:
    return -(-count // unit) * unit


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """Pad x [n, k] with zeros to [rows, columns]."""
    return functional.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]))


def panels(weight: Tensor, dtype: torch.dtype, lanes: int) -> Tensor:
    """Pack a weight [outputs, K] for products of `dtype`: in panels of two vectors of outputs; for bfloat16, with pairs
    of inputs together.
    """
    width, weight = 2 * lanes, weight.to(dtype)
    outputs = _round_up(weight.shape[0], width)
    if dtype == torch.float32:
        padded = _padded(weight, outputs, weight.shape[1])
        return padded.view(outputs // width, width, -1).transpose(1, 2).contiguous()
    padded = _padded(weight, outputs, _round_up(weight.shape[1]))
    return padded.view(outputs // width, width, -1, 2).transpose(1, 2).contiguous()


def interleaved(gate_up: Tensor, lanes: int) -> Tensor:
    """Interleave rows (gate, up) [2 n, ...]: a vector of gate, a vector of up, and so on, padded with zeros."""
    gate, up = gate_up.chunk(2)
    missing = (0,) * (2 * (gate.dim() - 1)) + (0, -len(gate) % lanes)
    both = torch.stack([functional.pad(x, missing).unflatten(0, (-1, lanes)) for x in (gate, up)], 1)
    return both.flatten(0, 2)


class PackedModel:
    """Copies of a model's weights in the format of decode.c, for products of `dtype`, with adapters merged."""

    @torch.no_grad()
    def __init__(self, decoder: Decoder, dtype: torch.dtype, lanes: int) -> None:
        config = decoder.config
        self._dtype, self._lanes = dtype, lanes
        self._held: list[Any] = []  # keeps the tensors alive to which the structures point
        layers = [self._layer(cast(Layer, layer)) for layer in decoder.layers]
        array, address = binder.array_of(layers)
        self._held.append(array)
        self.model = binder.CModel(
            layers=config.layers,
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_size=config.head_size,
            vocab=config.vocab,
            dtype=int(dtype == torch.bfloat16),
            eps=config.norm_eps,
            layer=address,
            embedding=self._hold(decoder.embed.weight.detach().float()),
            norm=self._vector(decoder.norm.weight),
            head=self._linear(decoder.head.weight, None, torch.float32),
        )
        self.parameters = list(decoder.parameters())
        self._versions = [p._version for p in self.parameters]

    @property
    def current(self) -> bool:
        """Return whether no weight has been changed in place since packing."""
        return self._versions == [p._version for p in self.parameters]

    def _layer(self, layer: Layer) -> binder.CLayer:
        def linear(part: Linear) -> binder.CLinear:
            return self._linear(part.merged(), part.bias, self._dtype)

        gate_up, bias = layer.gate_up, layer.gate_up.bias
        return binder.CLayer(
            attention_norm=self._vector(layer.attention_norm.weight),
            mlp_norm=self._vector(layer.mlp_norm.weight),
            qk_norm=None if layer.qk_norm is None else self._hold(layer.qk_norm.detach().contiguous()),
            qkv=linear(layer.qkv),
            o=linear(layer.o),
            gate_up=self._linear(
                interleaved(gate_up.merged(), self._lanes),
                None if bias is None else interleaved(bias, self._lanes),
                self._dtype,
            ),
            down=linear(layer.down),
        )

    def _linear(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> binder.CLinear:
        packed = panels(weight.detach(), dtype, self._lanes)
        inputs = weight.shape[1] if dtype == torch.float32 else _round_up(weight.shape[1])
        shift = None if bias is None else self._vector(bias)
        return binder.CLinear(weight=self._hold(packed), bias=shift, inputs=inputs, panels=packed.shape[0])

    def _vector(self, x: Tensor) -> int:
        """Return the address of a bias or norm, padded with zeros to whole panels."""
        return self._hold(functional.pad(x.detach(), (0, -x.shape[-1] % UNIT)).contiguous())

    def _hold(self, x: Tensor) -> int:
        self._held.append(x)
        return x.data_ptr()


# -- the step ----------------------------------------------------------------------------------------------------------


class Given(NamedTuple):
    """Given tokens of a request, which follow its tokens in the cache."""

    slot: int
    place: int  # index of the first one among the request's own tokens
    tokens: tuple[int, ...]


class CompiledStep:
    """Compiled decoding steps of one model. Copies of the weights and buffers are kept until `forget`."""

    def __init__(self, model: Decoder, dtype: torch.dtype, eos: Tensor) -> None:
        library = binder.decode()
        assert library is not None and supported(model, dtype)
        self._library, self._decoder, self._dtype, self._eos = library, model, dtype, eos
        self._packed: PackedModel | None = None
        self._buffers: dict[str, Tensor] = {}
        self._rotary: tuple[Tensor, Tensor] | None = None
        self.seconds: Tensor | None = None  # float64 [KINDS]: decoding adds its times; None: no measurement

    def forget(self) -> None:
        """Free copies and buffers, since the weights may have changed, or nothing is running."""
        self._packed, self._buffers, self._rotary = None, {}, None

    def __call__(self, cache: PagedCache, rows: RunningBatch, count: int) -> tuple[Tensor, slice | Tensor] | None:
        """Decode one token of the first `count` requests. Return logits, float32 [n, V], and slots of the requests for
        which the caller has to sample; None: there are none.
        """
        packed = self._pack()
        step = self._step(
            cache,
            count,
            order=cache.requests()[0].data_ptr(),
            groups=count,
            draws=1,
            sampled_stride=rows.tokens.shape[1],
            **{name: getattr(rows, name).data_ptr() for name in ("token", "length", *SAMPLED)},
        )
        self._library.run(packed.model, step)
        if rows.filtered_slots is None:
            return None
        logits = self._buffers["logits"].view(-1, step.logits_stride)
        return logits[rows.filtered_slots, : self._decoder.config.vocab], rows.filtered_slots

    def feed(self, cache: PagedCache, given: Sequence[Given]) -> None:
        """Write keys and values of given tokens into the cache, bit-identical to decoding the tokens one by one."""
        left = list(given)
        while left:
            taken: list[Given] = []
            room = FEED_ROWS
            while left and room:
                one = left.pop(0)
                taken.append(one._replace(tokens=one.tokens[:room]))
                if len(one.tokens) > room:
                    left.insert(0, one._replace(place=one.place + room, tokens=one.tokens[room:]))
                room -= len(taken[-1].tokens)
            self._feed(cache, taken)

    def _feed(self, cache: PagedCache, given: Sequence[Given]) -> None:
        """Write keys and values of at most `FEED_ROWS` tokens."""
        packed = self._pack()
        by_prompt, lengths, _ = cache.requests()
        place = by_prompt.argsort().tolist()
        given = sorted(given, key=lambda one: place[one.slot])  # requests with the same prompt must be adjacent
        counts = torch.tensor([len(one.tokens) for one in given])
        slots = torch.tensor([one.slot for one in given], dtype=torch.int32)
        starts = torch.tensor([one.place for one in given]) + lengths[slots.long()]
        ends = counts.cumsum(0)
        count = int(ends[-1])
        position = torch.arange(count) - (ends - counts - starts).repeat_interleave(counts)
        slot = slots.repeat_interleave(counts)
        token = torch.tensor([token for one in given for token in one.tokens])
        order = torch.arange(count, dtype=torch.int32)
        group = torch.cat((torch.zeros(1, dtype=torch.int32), ends.to(torch.int32)))
        step = self._step(
            cache,
            count,
            order=order.data_ptr(),
            group=group.data_ptr(),
            groups=len(given),
            slot=slot.data_ptr(),
            token=token.data_ptr(),
            length=position.data_ptr(),
        )
        self._library.run(packed.model, step)

    def _pack(self) -> PackedModel:
        if self._packed is None or not self._packed.current:
            self._packed = PackedModel(self._decoder, self._dtype, self._library.lanes)
        return self._packed

    def _step(self, cache: PagedCache, rows: int, **of_rows: Any) -> binder.CStep:
        """Build the C structure of a step. `of_rows`: fields that describe the rows."""
        assert self._packed is not None
        config, library, model = self._decoder.config, self._library, self._packed.model
        threads = torch.get_num_threads()
        _, prompt_length, pages = cache.requests()
        visible = pages.shape[1] * cache.page
        cos, sin = self._tables(min(config.context, visible))
        lines = _round_up(rows)
        hidden = _round_up(config.hidden)
        qkv = _round_up((config.heads + 2 * config.kv_heads) * config.head_size)
        attended = _round_up(config.heads * config.head_size)
        inner = _round_up(config.intermediate)
        logits = _round_up(config.vocab, library.vocab_block) if of_rows.get("draws") else 0
        scratch = library.scratch(model, visible)
        nothing = dict.fromkeys(("group", "slot", *SAMPLED)) | {"draws": 0, "sampled_stride": 0}
        return binder.CStep(
            **{**nothing, **of_rows},
            rows=rows,
            threads=threads,
            prompt_length=prompt_length.data_ptr(),
            pages=pages.data_ptr(),
            pages_stride=pages.shape[1],
            eos=self._eos.data_ptr(),
            eos_count=len(self._eos),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            x=self._buffer("x", lines * hidden),
            normed=self._buffer("normed", lines * hidden, self._dtype),
            qkv=self._buffer("qkv", lines * qkv),
            attended=self._buffer("attended", lines * attended, self._dtype),
            inner=self._buffer("inner", lines * inner, self._dtype),
            last=self._buffer("last", lines * hidden),
            logits=self._buffer("logits", lines * logits),
            hidden_stride=hidden,
            qkv_stride=qkv,
            attended_stride=attended,
            inner_stride=inner,
            logits_stride=logits,
            scratch=self._buffer("scratch", threads * scratch),
            scratch_size=scratch,
            counters=self._buffer("counters", library.phases(model), torch.int32),
            seconds=None if self.seconds is None else self.seconds.data_ptr(),
        )

    def _tables(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return the tables of the rotary embedding for at least `positions` positions."""
        if self._rotary is None or len(self._rotary[0]) < positions:
            cos, sin = self._decoder.rotary(torch.arange(_round_up(positions, 256)), torch.float32)
            self._rotary = cos.contiguous(), sin.contiguous()
        return self._rotary

    def _buffer(self, name: str, size: int, dtype: torch.dtype = torch.float32) -> int:
        """Return the address of a buffer of at least `size` numbers, initially zeros: the padding of rows is read, and
        remains 0.
        """
        held = self._buffers.get(name)
        if held is None or held.numel() < size:
            held = self._buffers[name] = torch.zeros(size, dtype=dtype)
        return held.data_ptr()
