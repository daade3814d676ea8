"""Folders of adapters in and out, as PEFT has them: adapter_model.safetensors and adapter_config.json, without the base.

Beside them lies a note of ours with what PEFT has no place for. It holds a fingerprint of the base, so that adapters are
never put on other weights than those they were trained on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.core.types import UserError
from posttrain.models.adapters.adapter_config import (
    ADAPTER,
    CLASSIFIER,
    LANGUAGE_MODEL,
    NOTE,
    PREFIX,
    SCORES,
    AdapterConfig,
    base_of,
    read_adapter_config,
    write_adapter_config,
)
from posttrain.models.adapters.lora import TARGETS, Adaptable, LoRA, adapters, attach, merge, stored_matrices
from posttrain.models.adapters.quantized import KINDS
from posttrain.models.checkpoint_folder import INNER, SCORE, check_dtype, check_finite, load_model, weight_files
from posttrain.models.hf.backed import Backed
from posttrain.models.json_files import Fields, read_json, write_json
from posttrain.models.native.decoder import Decoder
from posttrain.models.tensor_files import open_tensors, write_tensors

SAMPLE = 4096  # bytes at the beginning, in the middle and at the end of each tensor


def save_adapter(
    decoder: Adaptable, folder: Path, also: Mapping[str, Tensor] | None = None, note: Mapping[str, Any] | None = None
) -> None:
    """Write the adapters of a decoder. `also`: heads of a reward model, by their names; `note`: what else to remember."""
    folder.mkdir(parents=True, exist_ok=True)
    lora, tensors = decoder.lora, dict[str, Tensor]()
    assert lora is not None
    tensors |= stored_adapters(decoder)
    tensors |= {f"{PREFIX}{name}": tensor for name, tensor in (also or {}).items()}
    described = {name: (tensor.dtype, tensor.shape) for name, tensor in sorted(tensors.items())}
    write_tensors(folder / ADAPTER, described, sorted(tensors.items(), key=lambda item: item[0]))
    task, saved = (CLASSIFIER, SCORES) if also else (LANGUAGE_MODEL, ())
    config = AdapterConfig(lora.rank, lora.alpha, lora.rslora, lora.base, task, saved, lora.dora)
    write_adapter_config(folder, config, _targets(decoder))
    packed = {"quantize": lora.quantize} if lora.quantize else {}
    write_json(folder / NOTE, {"base": lora.digest, **packed, **(note or {})})


def _targets(decoder: Adaptable) -> list[str]:
    """The adapted matrices as PEFT finds them: by the ends of their names, unless layers differ."""
    names = [name for adapter in adapters(decoder) for name in adapter.names]
    ends = {name.rpartition(".")[2] for name in names}
    every = [stored for stored in stored_matrices(decoder) if stored.rpartition(".")[2] in ends]
    return sorted(ends if sorted(every) == sorted(names) else names)


def load_adapted(folder: Path, dtype: torch.dtype, device: str | torch.device) -> Adaptable:
    """The base of a folder of adapters, with these, which alone can learn. Raises UserError if it is another base."""
    if read_adapter_config(folder).task == CLASSIFIER:
        raise UserError(
            f"{folder} adapts a reward model ({SCORE}), and a language model is needed here: give the one that it was "
            "made from, or give this as --reward-model"
        )
    base = checked_base(folder)
    model = load_model(base, dtype, device)
    if not isinstance(model, Decoder | Backed):
        raise UserError(f"{folder} adapts {base}, a {type(model).__name__}, and adapters are for decoders")
    read_adapter(model, folder)
    assert model.lora is not None
    if not model.lora.digest:  # PEFT wrote it
        model.lora = replace(model.lora, digest=fingerprint(base))
    return model


def checked_base(folder: Path) -> Path:
    """The folder of the base, once it is known to be the one that the adapters were trained on."""
    base, noted = base_of(folder), read_note(folder).get("base")
    if isinstance(noted, str) and noted and fingerprint(base) != noted:
        raise UserError(
            f"{folder} was trained on other weights than those in {base}: put these back, or write where they lie as "
            "base_model_name_or_path in its adapter_config.json"
        )
    return base


def read_note(folder: Path) -> dict[str, Any]:
    return read_json(folder / NOTE, optional=True)


def read_adapter(decoder: Adaptable, folder: Path, heads: Iterable[str] = ()) -> dict[str, Tensor]:
    """Give a decoder the adapters of a folder. `heads`: names of what lies beside them; what is there of it is returned."""
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


def stored_adapters(decoder: Adaptable) -> dict[str, Tensor]:
    """Where each stored tensor lies in the adapters of a decoder."""
    found = {}
    for adapter in adapters(decoder):
        for name, place in zip(adapter.names, adapter.places, strict=True):
            found[f"{PREFIX}{name}.lora_A.weight"] = adapter.a.detach()[place.inner]
            found[f"{PREFIX}{name}.lora_B.weight"] = adapter.b.detach()[place.rows]
            if adapter.magnitude is not None:
                found[f"{PREFIX}{name}.lora_magnitude_vector"] = adapter.magnitude.detach()[place.rows]
    return found


def merged_backbone(folder: Path, device: str | torch.device) -> tuple[Adaptable, Tensor | None]:
    """As `folder.load_backbone`, of a folder of adapters: they are put into the weights."""
    from posttrain.models.checkpoint_folder import load_backbone

    model, score = load_backbone(checked_base(folder), device)
    found = read_adapter(model, folder, (SCORE, INNER))
    merge(model)
    if SCORE in found and INNER not in found:
        score = found[SCORE][0].float()
    return model.requires_grad_(True), score


def base_named(folder: str | Path) -> str:
    """How adapters name their base: a folder by its full path, since they may be opened from anywhere."""
    return str(Path(folder).absolute()) if Path(folder).is_dir() else str(folder)


def fingerprint(folder: Path) -> str:
    """Of a checkpoint's weights: name, type, shape and some numbers of each tensor, however they are divided over files."""
    found = []
    for file in weight_files(folder):
        open_tensors(file)  # which says what is wrong with it
        with file.open("rb") as content:
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
