"""Writes adapters in PEFT's format: adapter_model.safetensors and adapter_config.json, without the base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from posttrain.models.adapters.adapter_config import (
    ADAPTER,
    CLASSIFIER,
    LANGUAGE_MODEL,
    NOTE,
    PREFIX,
    SCORES,
    AdapterConfig,
    write_adapter_config,
)
from posttrain.models.backbone import Backbone
from posttrain.models.json_files import write_json
from posttrain.models.native.linear import Adapter
from posttrain.models.row_shards import whole
from posttrain.models.tensor_files import write_tensors


def adapters(decoder: Backbone) -> Iterator[Adapter]:
    return (module for module in decoder.modules() if isinstance(module, Adapter))


def save_adapter(
    decoder: Backbone, folder: Path, also: Mapping[str, Tensor] | None = None, note: Mapping[str, Any] | None = None
) -> None:
    """Write the adapters of a decoder. `also`: heads of a reward model, by name; `note`: further fields, which PEFT's
    format lacks.
    """
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


def _targets(decoder: Backbone) -> list[str]:
    """Return PEFT's `target_modules`: suffixes of the adapted matrices' names, or full names if layers differ."""
    names = [name for adapter in adapters(decoder) for name in adapter.names]
    ends = {name.rpartition(".")[2] for name in names}
    every = [stored for stored in decoder.matrices() if stored.rpartition(".")[2] in ends]
    return sorted(ends if sorted(every) == sorted(names) else names)


def stored_adapters(decoder: Backbone) -> dict[str, Tensor]:
    """Return the tensors of a decoder's adapters by their names in PEFT's file; they are views, or
    gathered from the processes that have parts of them, which then all have to call this.
    """
    found = {}
    for adapter in adapters(decoder):
        a, b = whole(adapter.a), whole(adapter.b)
        for name, place in zip(adapter.names, adapter.stored_places, strict=True):
            found[f"{PREFIX}{name}.lora_A.weight"] = a[place.inner]
            found[f"{PREFIX}{name}.lora_B.weight"] = b[place.rows]
            if adapter.magnitude is not None:
                found[f"{PREFIX}{name}.lora_magnitude_vector"] = adapter.magnitude.detach()[place.rows]
    return found
