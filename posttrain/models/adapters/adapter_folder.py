"""Loads folders of adapters in PEFT's format: adapter_model.safetensors and adapter_config.json, without the base.

A further file holds fields that PEFT's format lacks. One is a fingerprint of the base: adapters are refused on other
weights than those they were trained on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from posttrain.core import user_files
from posttrain.core.types import UserError
from posttrain.models.adapters.adapter_config import (
    ADAPTER,
    NOTE,
    PREFIX,
    base_of,
    read_adapter_config,
)
from posttrain.models.adapters.adapter_writer import stored_adapters
from posttrain.models.adapters.lora import TARGETS, LoRA, attach
from posttrain.models.backbone import Backbone
from posttrain.models.gguf.gguf_tensors import GgufTensors
from posttrain.models.json_files import Fields, read_json
from posttrain.models.native.quantized import KINDS
from posttrain.models.tensor_files import open_tensors
from posttrain.models.weight_files import check_dtype, check_finite, weight_files

SAMPLE = 4096  # bytes at the beginning, in the middle and at the end of each tensor


def checked_base(folder: Path) -> Path:
    """Return the folder of the base. Raises UserError if the adapters were trained on other weights."""
    base, noted = base_of(folder), read_note(folder).get("base")
    if isinstance(noted, str) and noted and fingerprint(base) != noted:
        raise UserError(
            f"{folder} was trained on other weights than those in {base}: restore these, or write their folder as "
            "base_model_name_or_path in its adapter_config.json"
        )
    return base


def read_note(folder: Path) -> dict[str, Any]:
    return read_json(folder / NOTE, optional=True)


def packed_kind(folder: Path) -> str:
    """Return the quantization of the base of a folder of adapters; "" if there is none, or one that `read_adapter`
    refuses.
    """
    found = read_note(folder).get("quantize")
    return found if found in KINDS else ""


def read_adapter(decoder: Backbone, folder: Path, heads: Iterable[str] = ()) -> dict[str, Tensor]:
    """Load adapters of a folder into a decoder. Return the tensors of `heads` that the folder holds, by name."""
    config, file = read_adapter_config(folder), folder / ADAPTER
    with open_tensors(file) as stored:
        there = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
        beside = {f"{PREFIX}{name}": name for name in heads if f"{PREFIX}{name}" in there}
        names = {name.rpartition(".lora_")[0].removeprefix(PREFIX) for name in there if name not in beside}
        fields = Fields(folder / NOTE, read_note(folder))
        digest, packed = fields.text("base", ""), fields.text("quantize", "")
        if packed and packed not in KINDS:
            raise fields.refuse("quantize", " or ".join(KINDS))
        lora = LoRA(config.rank, config.alpha, config.rslora, base_named(config.base), digest, packed, config.dora)
        attach(decoder, lora, names.__contains__)
        places = stored_adapters(decoder)
        odd = [name for name in there if name not in places and name not in beside]
        lacking = [name for name in places if name not in there]
        if odd or not places:
            raise UserError(
                f"{file} holds {odd[0] if odd else 'no adapter'}; adapters of {', '.join(TARGETS)} are read, of layers "
                "that the base has"
            )
        if lacking:
            raise UserError(f"{file} lacks {lacking[0]}: copy it again")
        for name, place in places.items():
            if there[name] != tuple(place.shape):
                raise UserError(f"{file}: {name} has shape {list(there[name])}, here it must be {list(place.shape)}")
            check_dtype(file, name, stored.get_slice(name).get_dtype())
            place.copy_(stored.get_tensor(name))
            check_finite(file, name, place)
        found = {name: stored.get_tensor(own) for own, name in beside.items()}
    for name, tensor in found.items():
        check_finite(file, name, tensor)
    return found


def base_named(folder: str | Path) -> str:
    """Return the name of a base for adapter_config.json: the absolute path of a folder or file, since adapters may be
    opened from another working directory.
    """
    return str(Path(folder).absolute()) if Path(folder).exists() else str(folder)


def fingerprint(folder: Path) -> str:
    """Return a hash of name, type, shape and some numbers of each tensor of a checkpoint. It does not depend on the
    division into files.
    """
    found: list[tuple[str, Any, Sequence[int], str]] = []
    for file in weight_files(folder):
        tensors = open_tensors(file)  # raises a UserError with the reason
        if isinstance(tensors, GgufTensors):
            for name in tensors.keys():  # noqa: SIM118
                kept = tensors.stored(name)
                digest = hashlib.sha256(b"".join(tensors.sample(name, SAMPLE)))
                found.append((name, kept.kind, kept.shape, digest.hexdigest()))
            continue
        with user_files.opened(file) as content:
            size = int.from_bytes(content.read(8), "little")
            header = json.loads(content.read(size))
            header.pop("__metadata__", None)
            for name, told in header.items():
                begin, end = told["data_offsets"]
                digest = hashlib.sha256()
                for place in (begin, (begin + end - SAMPLE) // 2, end - SAMPLE):
                    content.seek(8 + size + max(begin, place))
                    digest.update(content.read(min(SAMPLE, end - begin)))
                found.append((name, told["dtype"], told["shape"], digest.hexdigest()))
    return hashlib.sha256(json.dumps(sorted(found)).encode()).hexdigest()
