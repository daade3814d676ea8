"""Python interface of the compiled code: declares all structures and functions of the three libraries.

Structures are declared twice, here and in C. Each library describes its structures (`abi.h`); when it is loaded, name,
offset, size and kind of every field are compared.

T    tokens    B    running requests    K    inputs of a product
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, dataclass_transform

import torch
from torch import Tensor

from posttrain.models.native.kernels import build

Int64 = int
Float32 = float
Pointer = int | None
"""Address of a tensor that the caller keeps alive."""

_KINDS: dict[str, type[Any]] = {"Int64": ctypes.c_int64, "Float32": ctypes.c_float, "Pointer": ctypes.c_void_p}


@dataclass_transform(kw_only_default=True)
def _structure(declared: type[Any]) -> type[Any]:
    """Make a C structure with the annotated fields, whose constructor requires all of them."""
    fields = [(name, _KINDS[kind]) for name, kind in declared.__annotations__.items()]

    def init(self: ctypes.Structure, **values: Any) -> None:
        assert values.keys() == declared.__annotations__.keys(), values.keys() ^ declared.__annotations__.keys()
        ctypes.Structure.__init__(self, **values)

    made = type(declared.__name__, (ctypes.Structure,), {"_fields_": fields, "__init__": init})
    made.__doc__ = declared.__doc__
    _KINDS[declared.__name__] = made
    return made


@_structure
class Attention:
    """Structure of attention.c."""

    trees: Int64
    heads: Int64
    kv_heads: Int64
    head_size: Int64
    threads: Int64
    scale: Float32
    root: Pointer
    start: Pointer
    length: Pointer
    before: Pointer
    parent: Pointer
    q: Pointer
    k: Pointer
    v: Pointer
    q_stride: Int64
    k_stride: Int64
    v_stride: Int64
    out: Pointer
    logsumexp: Pointer
    grad_out: Pointer
    grad_q: Pointer
    grad_k: Pointer
    grad_v: Pointer
    scratch: Pointer
    scratch_size: Int64
    columns: Int64


@_structure
class CLinear:
    """Packed weights, of packed_gemm.h."""

    weight: Pointer
    bias: Pointer
    inputs: Int64
    panels: Int64


@_structure
class CLayer:
    """Structure of decode.c."""

    attention_norm: Pointer
    mlp_norm: Pointer
    qk_norm: Pointer
    qkv: CLinear
    o: CLinear
    gate_up: CLinear
    down: CLinear


@_structure
class CModel:
    """Structure of decode.c."""

    layers: Int64
    hidden: Int64
    heads: Int64
    kv_heads: Int64
    head_size: Int64
    vocab: Int64
    dtype: Int64
    eps: Float32
    layer: Pointer
    embedding: Pointer
    norm: Pointer
    head: CLinear


@_structure
class CStep:
    """Structure of decode.c."""

    rows: Int64
    threads: Int64
    order: Pointer
    group: Pointer
    groups: Int64
    slot: Pointer
    draws: Int64
    prompt_length: Pointer
    pages: Pointer
    pages_stride: Int64
    token: Pointer
    length: Pointer
    count: Pointer
    budget: Pointer
    seed: Pointer
    temperature: Pointer
    filtered: Pointer
    ended: Pointer
    tokens: Pointer
    logp: Pointer
    sampled_stride: Int64
    eos: Pointer
    eos_count: Int64
    cos: Pointer
    sin: Pointer
    x: Pointer
    normed: Pointer
    qkv: Pointer
    attended: Pointer
    inner: Pointer
    last: Pointer
    logits: Pointer
    hidden_stride: Int64
    qkv_stride: Int64
    attended_stride: Int64
    inner_stride: Int64
    logits_stride: Int64
    scratch: Pointer
    scratch_size: Int64
    counters: Pointer
    seconds: Pointer


class _Field(ctypes.Structure):
    """Structure of abi.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("offset", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("kind", ctypes.c_int64),
    )


_LETTERS = {ctypes.c_int64: "i", ctypes.c_float: "f", ctypes.c_void_p: "p"}  # other types are structures: "s"


def check(loaded: ctypes.CDLL, name: str, declared: type[Any]) -> None:
    """Compare a structure with the one that the library has under this name. An assert names the first difference."""
    describe = _function(loaded, f"{name}_fields", ctypes.POINTER(_Field))
    theirs, number = describe(), 0
    for field, kind in declared._fields_:
        descriptor = getattr(declared, field)
        ours = field, descriptor.offset, descriptor.size, _LETTERS.get(kind, "s")
        found = theirs[number]
        assert found.name is not None, f"struct {name} of C has no field {field}"
        c = found.name.decode(), found.offset, found.size, chr(found.kind)
        assert ours == c, f"struct {name}, field {field}: (name, offset, size, kind) is {ours} in Python, {c} in C"
        number += 1
    end = theirs[number]
    assert end.name is None, f"struct {name} of Python has no field {end.name.decode()}"
    assert end.offset == ctypes.sizeof(declared), f"struct {name}: {ctypes.sizeof(declared)} bytes, {end.offset} in C"


def _function(loaded: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    function = getattr(loaded, name)
    function.restype, function.argtypes = result, arguments
    return function


# -- the three libraries -----------------------------------------------------------------------------------------------

_pointer, _int64, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


class AttentionLibrary:
    """Attention of an update, forward and backward."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        check(loaded, "attention", Attention)
        self._run = _function(loaded, "attention", None, _pointer, _int)
        self._scratch = _function(loaded, "attention_scratch", _int64, _int64, _int64, _int)
        self.panel: int = _function(loaded, "attention_panel", _int)()
        """Head sizes and columns are multiples of this."""

    def scratch(self, head_size: int, columns: int, backward: bool) -> int:
        """Return the size of a thread's scratch memory, in float32 numbers."""
        return int(self._scratch(head_size, columns, backward))

    def run(self, arguments: Attention, backward: bool) -> None:
        self._run(ctypes.byref(_any(arguments)), backward)


class LayerLibrary:
    """Operations between the matrix products of an update. All tensors are contiguous and on the processor."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        def typed(name: str, *arguments: Any) -> Callable[..., Any]:
            return _function(loaded, name, None, _int, *arguments, _int)  # the type first, the threads last

        self._rms_norm = typed("rms_norm", _pointer, _pointer, _float, _int64, _int64, _pointer, _pointer, _int)
        self._rms_norm_backward = typed("rms_norm_backward", *(_pointer,) * 4, _int64, _int64, _pointer, _pointer)
        self._swiglu = typed("swiglu_forward", _pointer, _int64, _int64, _pointer)
        self._swiglu_backward = typed("swiglu_backward", _pointer, _pointer, _int64, _int64, _pointer, _pointer)
        rope = (_pointer, _pointer, _pointer, *(_int64,) * 4, _pointer)
        self._rope, self._rope_backward = typed("rope_forward", *rope), typed("rope_backward", *rope)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor, rate: Tensor, known: bool) -> None:
        """Fill out [T, size] = x * rate * weight. rate [T] is computed too, unless it is known. x is float32."""
        wide = _data(x), _data(weight)
        bf16 = out.dtype == torch.bfloat16
        self._rms_norm(bf16, *wide, eps, *x.shape, _data(out, bf16), _data(rate), known, torch.get_num_threads())

    def rms_norm_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, rate: Tensor, grad_x: Tensor, grad_weight: Tensor
    ) -> None:
        """Fill grad_x [T, size] and grad_weight [threads, size], which is zeros at first, and the sum of whose rows is
        the gradient of the weight.
        """
        threads = torch.get_num_threads()
        assert grad_weight.shape == (threads, x.shape[1])
        bf16 = grad.dtype == torch.bfloat16
        wide = _data(x), _data(weight), _data(rate)
        self._rms_norm_backward(bf16, _data(grad, bf16), *wide, *x.shape, _data(grad_x), _data(grad_weight), threads)

    def swiglu(self, x: Tensor, out: Tensor) -> None:
        """Fill out [T, n] = silu(gate) * up of x [T, gate n, up n]; x and out have one type."""
        bf16 = x.dtype == torch.bfloat16
        self._swiglu(bf16, _data(x, bf16), *out.shape, _data(out, bf16), torch.get_num_threads())

    def swiglu_backward(self, grad: Tensor, x: Tensor, out: Tensor, grad_x: Tensor) -> None:
        """Fill out as `swiglu` does, and grad_x, the gradient of x, given grad, the gradient of out."""
        bf16 = x.dtype == torch.bfloat16
        given, made = (_data(grad, bf16), _data(x, bf16)), (_data(out, bf16), _data(grad_x, bf16))
        self._swiglu_backward(bf16, *given, *out.shape, *made, torch.get_num_threads())

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, rotated: int, out: Tensor) -> None:
        """Fill out [T, heads * size]: the first `rotated` heads of x with rotary embedding, the others unchanged.

        cos and sin [T, 1, size] as `Decoder.rotary` returns them. out may be x.
        """
        self._rotate(self._rope, x, cos, sin, rotated, out)

    def rope_backward(self, grad: Tensor, cos: Tensor, sin: Tensor, rotated: int, grad_x: Tensor) -> None:
        """Fill grad_x, the gradient of x, given grad, the gradient of out."""
        self._rotate(self._rope_backward, grad, cos, sin, rotated, grad_x)

    def _rotate(self, run: Callable[..., Any], x: Tensor, cos: Tensor, sin: Tensor, rotated: int, out: Tensor) -> None:
        (rows, width), size = x.shape, cos.shape[-1]
        bf16 = x.dtype == torch.bfloat16
        given = _data(x, bf16), _data(cos), _data(sin)
        run(bf16, *given, rows, rotated, width // size, size, _data(out, bf16), torch.get_num_threads())


class DecodeLibrary:
    """Decoding steps of the embedded engine."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        for name, declared in (("linear", CLinear), ("layer", CLayer), ("model", CModel), ("step", CStep)):
            check(loaded, name, declared)
        self._run = _function(loaded, "decode", None, _pointer, _pointer)
        self._phases = _function(loaded, "decode_phases", _int64, _pointer)
        self._scratch = _function(loaded, "decode_scratch", _int64, _pointer, _int64)
        self.lanes: int = _function(loaded, "decode_lanes", _int)()
        """float32 numbers in a vector."""
        self.page: int = _function(loaded, "decode_page", _int)()
        """Tokens of a page of the KV cache."""
        self.vocab_block: int = _function(loaded, "decode_vocab_block", _int)()
        """The buffer of logits has a multiple of this many rows."""
        self.bf16: bool = bool(_function(loaded, "decode_bf16", _int)())
        """Whether products in bfloat16 are supported."""

    def phases(self, model: CModel) -> int:
        """Return the number of counters that a step of this model needs."""
        return int(self._phases(ctypes.byref(_any(model))))

    def scratch(self, model: CModel, visible: int) -> int:
        """Return the size of a thread's scratch memory, in float32 numbers, for requests that attend to `visible`
        tokens.
        """
        return int(self._scratch(ctypes.byref(_any(model)), visible))

    def run(self, model: CModel, step: CStep) -> None:
        self._run(ctypes.byref(_any(model)), ctypes.byref(_any(step)))


def array_of(layers: list[CLayer]) -> tuple[Any, int]:
    """Concatenate the layers for `CModel.layer`. Return (buffer, its address)."""
    array = (_any(CLayer) * len(layers))(*layers)
    return array, ctypes.addressof(array)


def attention() -> AttentionLibrary | None:
    """Return attention.c; None if there is no compiled code, or it is switched off. So do `layer` and `decode`."""
    loaded = build.library("attention.c")
    return None if loaded is None else _bound(AttentionLibrary, loaded)


def layer() -> LayerLibrary | None:
    """Return layer.c."""
    loaded = build.library("layer.c")
    return None if loaded is None else _bound(LayerLibrary, loaded)


def decode() -> DecodeLibrary | None:
    """Return decode.c."""
    loaded = build.library("decode.c")
    return None if loaded is None else _bound(DecodeLibrary, loaded)


@cache
def _bound(kind: type[Any], loaded: ctypes.CDLL) -> Any:
    return kind(loaded)


def _any(structure: Any) -> Any:
    """Return a structure, typed such that the type checker accepts it as a dataclass."""
    return structure


def _data(x: Tensor, bf16: bool = False) -> int:
    """Return the address of a tensor's data, after a check of type and strides, which C cannot see."""
    assert x.dtype == (torch.bfloat16 if bf16 else torch.float32) and x.is_contiguous() and not x.is_cuda
    return x.data_ptr()
