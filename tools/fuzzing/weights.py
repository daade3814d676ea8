"""model.safetensors written by hand, so that every field of it can be wrong: header length, names, dtypes, shapes,
offsets, numbers."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from random import Random
from typing import Any

SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1}
Header = dict[str, Any]


def read(path: Path) -> tuple[Header, bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write(path: Path, header: Any, data: bytes, length: int | None = None) -> None:
    """`length`: what the file says of its header, if that is to be wrong."""
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def tensors(header: Header) -> list[str]:
    return [name for name in header if name != "__metadata__"]


def relaid(header: Header, data: bytes, changed: dict[str, tuple[str, list[int], bytes]]) -> tuple[Header, bytes]:
    """The file with some tensors replaced by (dtype, shape, bytes), offsets made to fit."""
    new: Header = {"__metadata__": {"format": "pt"}}
    body = b""
    names = [*tensors(header), *(name for name in changed if name not in header)]
    for name in names:
        if name in changed:
            dtype, shape, content = changed[name]
        else:
            entry = header[name]
            dtype, shape, content = entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])]
        new[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(content)]}
        body += content
    return new, body


def damaged(path: Path, random: Random) -> tuple[str, bool | None, tuple[str, ...]]:
    """Damage a file of float32 weights -> (what was done, whether it must be refused, names of which one must be said)."""
    header, data = read(path)
    name = random.choice(tensors(header))
    entry = header[name]
    shape, content = list(entry["shape"]), data[slice(*entry["data_offsets"])]
    count = math.prod(shape)
    how = random.choice(
        ("not finite", "dtype", "shape", "absent", "unknown", "header", "offsets", "metadata", "length", "scaled")
    )
    if how == "not finite":
        number = random.choice([math.nan, math.inf, -math.inf])
        at = 4 * random.randrange(count)
        content = content[:at] + struct.pack("<f", number) + content[at + 4 :]
        write(path, *relaid(header, data, {name: ("F32", shape, content)}))
        return f"{name} holds {number}", True, (name, path.name)
    if how == "dtype":
        dtype = random.choice(list(SIZES))
        content = struct.pack("<d", 0.5) * count if dtype == "F64" else bytes(SIZES[dtype] * count)
        write(path, *relaid(header, data, {name: (dtype, shape, content)}))
        return f"{name} is {dtype}", dtype not in ("F64", "F32", "F16", "BF16"), (name,)
    if how == "shape":
        wrong = [[*shape[::-1], 1], [count + 1], [0], [2, *shape], [1, *shape]]
        shape = random.choice([*wrong, [shape[0] + 1, *shape[1:]], []] if shape else wrong)
        write(path, *relaid(header, data, {name: ("F32", shape, bytes(4 * math.prod(shape)))}))
        return f"{name} has shape {shape}", True, (name,)
    if how == "absent":
        header = {key: value for key, value in header.items() if key != name}
        write(path, *relaid(header, data, {}))
        return f"{name} is absent", True, (name,)
    if how == "unknown":
        extra = random.choice(["model.layers.9.mlp.up_proj.weight", "lm_head.bias", "", "x" * 5000, "ü", "../x"])
        write(path, *relaid(header, data, {extra: ("F32", [2], bytes(8))}))
        return f"unknown tensor {extra[:40]!r}", True, ()
    if how == "header":
        from fuzzing.mutate import mutated

        changed, _, what = mutated(header, random)
        write(path, changed, data)
        return f"header: {what}", None, ()
    if how == "offsets":
        begin, end = entry["data_offsets"]
        entry["data_offsets"] = random.choice(
            [
                [begin, end + 4],
                [end, begin],
                [-4, end],
                [begin, 10**18],
                [begin + 4, end + 4],
                [begin],
                [0, end - begin],
            ]
        )
        same = entry["data_offsets"] == [begin, end]
        write(path, header, data)
        return f"{name} at {entry['data_offsets']}", None if same else True, ()
    if how == "metadata":
        header["__metadata__"] = random.choice([None, 5, "pt", {"format": 5}, {"format": "tf"}, [], {"a": {"b": 1}}])
        write(path, header, data)
        return f"metadata {header['__metadata__']}", None, ()
    if how == "length":
        length = random.choice(
            [0, 1, 2**63, 2**64 - 1, 10**9, len(json.dumps(header)) + 8, len(json.dumps(header)) - 1]
        )
        write(path, header, data, length)
        return f"header length {length}", True, (path.name,)
    factor = random.choice([1e30, 1e38, 1e-38, 0.0])
    numbers = [min(max(x * factor, -3e38), 3e38) for x in struct.unpack(f"<{count}f", content)]
    write(path, *relaid(header, data, {name: ("F32", shape, struct.pack(f"<{count}f", *numbers))}))
    return f"{name} times {factor}", None, ()
