"""Decides whether decoding steps run as compiled code, and lays weights, cache and requests as that code reads them.

`decode.c` holds the step itself.

    B    running requests
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from posttrain.engines.cache import Cache, Prefix
from posttrain.engines.running import RunningBatch
from posttrain.kernels import build
from posttrain.models.decoder import Decoder, DecoderConfig, Layer

UNIT = 32  # rows of scratch and entries in a row of it are a multiple of this, which every processor's vectors divide
BLOCK, QUERIES = 64, 4  # as in decode.c, or more
KINDS = ("products", "attention", "norms", "draws")  # of the work in a step, as in decode.c
PACKED_HEAD = 1 << 22
"""Entries of an output head up to which a copy is kept: memory is not to grow with the vocabulary."""


def library() -> ctypes.CDLL | None:
    """The compiled step, if there is one."""
    loaded = build.library("decode.c")
    if loaded is not None:
        loaded.decode.argtypes = (ctypes.POINTER(_Model), ctypes.POINTER(_Step))
        loaded.decode.restype = None
        assert loaded.step_size() == ctypes.sizeof(_Step) and loaded.model_size() == ctypes.sizeof(_Model)
    return loaded


# -- as decode.c declares them -----------------------------------------------------------------------------------------

_pointer, _long = ctypes.c_void_p, ctypes.c_int64


class _Product(ctypes.Structure):
    _fields_ = [("weight", _pointer), ("bias", _pointer), ("inputs", _long), ("panels", _long)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("attention_norm", "mlp_norm", "qk_norm")),
        *((name, _Product) for name in ("qkv", "o", "gate_up", "down")),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *((n, _long) for n in ("layers", "hidden", "heads", "kv_heads", "size", "intermediate", "vocab", "narrow")),
        ("eps", ctypes.c_float),
        *((name, _pointer) for name in ("layer", "embedding", "norm")),
        ("head", _Product),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, _long) for name in ("rows", "threads", "draws")),
        *((name, _pointer) for name in ("order", "prompt", "prompted", "token", "length", "count", "budget", "seed")),
        *((name, _pointer) for name in ("temperature", "ended", "tokens", "logp")),
        ("sampled_stride", _long),
        ("eos", _pointer),
        ("eos_count", _long),
        *((name, _pointer) for name in ("cos", "sin", "own_keys", "own_values", "shared_keys", "shared_values")),
        *((name, _long) for name in ("own_slots", "own_tokens", "shared_prompts", "shared_tokens")),
        *((name, _pointer) for name in ("x", "wide")),
        ("inputs", _pointer * 2),
        *((name, _pointer) for name in ("logits", "own")),
        *((name, _long) for name in ("own_size", "x_stride", "wide_stride")),
        ("inputs_stride", _long * 2),
        ("logits_stride", _long),
        ("taken", _pointer),
        ("spent", _pointer),
    ]


# -- weights -----------------------------------------------------------------------------------------------------------


def supported(model: Decoder, dtype: torch.dtype) -> bool:
    """Whether this model, with products of `dtype`, can be decoded by compiled code here. May compile it."""
    if model.head.device.type != "cpu" or any(p.dtype != torch.float32 for p in model.parameters()):
        return False
    loaded = library()
    if loaded is None:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(loaded.narrow()))


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _filled(x: Tensor, rows: int, columns: int) -> Tensor:
    """x [n, k] with zeros up to [rows, columns]."""
    return functional.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]))


def panels(weight: Tensor, dtype: torch.dtype, lanes: int) -> Tensor:
    """A weight [outputs, K] as products of `dtype` read it: panels of two vectors of outputs, in bfloat16 of input pairs."""
    width = 2 * lanes
    outputs = _up(weight.shape[0], width)
    if dtype == torch.float32:
        wide = _filled(weight, outputs, weight.shape[1])
        return wide.view(outputs // width, width, -1).transpose(1, 2).contiguous()
    narrow = _filled(weight.to(dtype), outputs, _up(weight.shape[1], UNIT))
    return narrow.view(outputs // width, width, -1, 2).transpose(1, 2).contiguous()


def paired(gate_up: Tensor, lanes: int) -> Tensor:
    """Rows (gate, up) [2 n, ...] as a vector of gate, the same of up, and so on; missing ones are zeros."""
    gate, up = gate_up.chunk(2)
    missing = (0,) * (2 * (gate.dim() - 1)) + (0, -len(gate) % lanes)
    both = torch.stack([functional.pad(x, missing).unflatten(0, (-1, lanes)) for x in (gate, up)], 1)
    return both.flatten(0, 2)


class CompiledStep:
    """Decoding steps of one model. Holds copies of its weights between `pack` and `forget`."""

    def __init__(self, model: Decoder, dtype: torch.dtype, eos: Tensor) -> None:
        loaded = library()
        assert loaded is not None and supported(model, dtype)
        self._library, self._decoder, self._dtype, self._eos = loaded, model, dtype, eos
        self._lanes: int = loaded.lanes()
        self._model: _Model | None = None
        self._held: list[Any] = []  # what the structures point to
        self._room: dict[str, Tensor] = {}  # scratch
        self._rotary: tuple[Tensor, Tensor] | None = None
        self._parameters: list[Tensor] = []
        self._versions: list[int] = []  # of the parameters that were packed
        self.spent: Tensor | None = None  # float64 [KINDS]: to these, seconds of decoding are added

    def forget(self) -> None:
        """Give back copies and scratch: the weights may have changed, or nothing runs."""
        self._model, self._held, self._room, self._rotary = None, [], {}, None

    def __call__(self, cache: PackedCache, rows: RunningBatch, count: int) -> Tensor | None:
        """One token for the first `count` requests. Where it cannot draw them, hidden states float32 [B, hidden] instead."""
        model, config = self._packed(), self._decoder.config
        draws = self._draws and not (rows.any_top_p or rows.any_top_k)
        step = _Step(rows=count, threads=torch.get_num_threads(), draws=draws)
        self._give_requests(step, rows)
        self._give_cache(step, cache)
        self._give_room(step, cache)
        if self.spent is not None:
            step.spent = self.spent.data_ptr()
        self._library.decode(model, step)
        if draws:
            return None
        return self._room["logits"][: count * step.logits_stride].view(count, -1)[:, : config.hidden].clone()

    def _give_requests(self, step: _Step, rows: RunningBatch) -> None:
        for name in ("token", "length", "count", "budget", "seed", "temperature", "ended", "tokens", "logp"):
            setattr(step, name, getattr(rows, name).data_ptr())
        step.sampled_stride = rows.tokens.shape[1]
        step.eos, step.eos_count = self._eos.data_ptr(), len(self._eos)

    def _give_cache(self, step: _Step, cache: PackedCache) -> None:
        order, prompt, prompted = cache.requests()
        step.order, step.prompt, step.prompted = order.data_ptr(), prompt.data_ptr(), prompted.data_ptr()
        step.own_keys, step.own_values = cache.own[0].data_ptr(), cache.own[1].data_ptr()
        step.shared_keys, step.shared_values = cache.shared[0].data_ptr(), cache.shared[1].data_ptr()
        step.own_slots, step.own_tokens = cache.own.shape[2], cache.own.shape[4]
        step.shared_prompts, step.shared_tokens = cache.shared.shape[2], cache.shared.shape[4]
        if self._rotary is None or len(self._rotary[0]) < cache.positions:
            cos, sin = self._decoder.rotary(torch.arange(_up(cache.positions, 256)), torch.float32)
            self._rotary = cos.contiguous(), sin.contiguous()
        step.cos, step.sin = self._rotary[0].data_ptr(), self._rotary[1].data_ptr()

    def _give_room(self, step: _Step, cache: PackedCache) -> None:
        config, lines = self._decoder.config, _up(step.rows, UNIT)
        step.x_stride = step.inputs_stride[0] = _up(config.hidden, UNIT)
        step.wide_stride = max(step.x_stride, _up((config.heads + 2 * config.kv_heads) * config.head_size, UNIT))
        step.inputs_stride[1] = _up(max(config.heads * config.head_size, config.intermediate), UNIT)
        step.logits_stride = _up(config.vocab, BLOCK) if step.draws else step.x_stride
        attention = (2 * config.heads // config.kv_heads + 1) * cache.config.head_size
        attention += QUERIES * (step.own_tokens + step.shared_tokens)
        step.own_size = _up(max(attention, step.draws * (step.logits_stride + step.logits_stride // BLOCK)), UNIT)
        step.x = self._space("x", lines * step.x_stride)
        step.wide = self._space("wide", lines * step.wide_stride)
        for i in (0, 1):
            step.inputs[i] = self._space(f"inputs {i}", lines * step.inputs_stride[i], self._dtype)
        step.logits = self._space("logits", lines * step.logits_stride)
        step.own = self._space("own", step.threads * step.own_size)
        step.taken = self._space("taken", self._library.phases(config.layers), torch.int32)

    def _space(self, name: str, size: int, dtype: torch.dtype = torch.float32) -> int:
        """Where so many numbers have room. Zeros at first: what pads a row is read, and must be a number."""
        held = self._room.get(name)
        if held is None or held.numel() < size:
            held = self._room[name] = torch.zeros(size, dtype=dtype)
        return held.data_ptr()

    @property
    def _draws(self) -> bool:
        return self._decoder.head.numel() <= PACKED_HEAD

    def _packed(self) -> _Model:
        if self._model is None or self._versions != [p._version for p in self._parameters]:
            self._parameters = list(self._decoder.parameters())
            self._versions = [p._version for p in self._parameters]
            self._model = self._pack()
        return self._model

    @torch.no_grad()
    def _pack(self) -> _Model:
        config, self._held = self._decoder.config, []

        def numbers(x: Tensor | None) -> int | None:
            """A bias or a norm, with zeros up to whole vectors."""
            if x is None:
                return None
            self._held.append(functional.pad(x.detach(), (0, -x.shape[-1] % UNIT)).contiguous())
            return self._held[-1].data_ptr()

        def product(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> _Product:
            packed = panels(weight.detach(), dtype, self._lanes)
            self._held.append(packed)
            inputs = weight.shape[1] if dtype == torch.float32 else _up(weight.shape[1], UNIT)
            return _Product(packed.data_ptr(), numbers(bias), inputs, packed.shape[0])

        layers = (_Layer * config.layers)()
        for to, layer in zip(layers, self._decoder.layers, strict=True):
            assert isinstance(layer, Layer)
            to.attention_norm, to.mlp_norm = numbers(layer.attention_norm.weight), numbers(layer.mlp_norm.weight)
            if layer.qk_norm is not None:
                self._held.append(layer.qk_norm.detach().contiguous())
                to.qk_norm = self._held[-1].data_ptr()
            for name in ("qkv", "o", "down"):
                linear = getattr(layer, name)
                setattr(to, name, product(linear.weight, linear.bias, self._dtype))
            bias = layer.gate_up.bias
            to.gate_up = product(
                paired(layer.gate_up.weight, self._lanes),
                bias if bias is None else paired(bias, self._lanes),
                self._dtype,
            )
        model = _Model(
            config.layers, config.hidden, config.heads, config.kv_heads, config.head_size, config.intermediate,
            config.vocab, int(self._dtype == torch.bfloat16), config.norm_eps,
        )  # fmt: skip
        model.layer = ctypes.cast(layers, _pointer)
        model.embedding = self._decoder.embed.weight.data_ptr()
        model.norm = numbers(self._decoder.norm.weight)
        if self._draws:
            model.head = product(self._decoder.head, None, torch.float32)
        self._held.append(layers)
        return model


# -- the cache ---------------------------------------------------------------------------------------------------------


class PackedCache(Cache):
    """Keys lie in blocks of a vector of tokens [tokens / lanes, size, lanes], where a plain cache has [tokens, size]."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        loaded = library()
        assert loaded is not None
        super().__init__(replace(config, head_size=_up(config.head_size, loaded.lanes())), dtype, device)
        self.unit = loaded.lanes()
        self._requests: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def positions(self) -> int:
        """More than any request has."""
        return min(self.config.context, self.own.shape[4] + self.shared.shape[4])

    def requests(self) -> tuple[Tensor, Tensor, Tensor]:
        """Requests with those of a prompt side by side, the prompt of each, and the prompts' lengths; all int32."""
        if self._requests is None:
            prompt = torch.tensor([self.row[prompt] for prompt in self.prompt], dtype=torch.int32)
            lengths = torch.tensor([len(prompt) for prompt in self.row], dtype=torch.int32)
            self._requests = prompt.argsort(stable=True).to(torch.int32), prompt, lengths
        return self._requests

    def _reseated(self) -> None:
        super()._reseated()
        self._requests = None

    def _write(self, row: int, prefix: Prefix) -> None:
        tokens, size = prefix.k.shape[2:]
        keys = functional.pad(prefix.k, (0, self.config.head_size - size, 0, -tokens % self.unit))
        whole = keys.unflatten(2, (-1, self.unit)).transpose(-1, -2)  # [layers, kv_heads, blocks, size, unit]
        self.shared[0, :, row, :, : keys.shape[2]] = whole.reshape(keys.shape)
        self.shared[1, :, row, :, :tokens, :size] = prefix.v
