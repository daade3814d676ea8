"""Reads and writes adapter_config.json in PEFT's format: the kind of adapters in a folder, and their base model.

It does not import torch. Settings beyond plain LoRA would change the result, and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.core.types import UserError
from posttrain.models.checkpoint_location import checkpoint_folder
from posttrain.models.json_files import Fields, read_json, shown, write_json
from posttrain.system.hub import HubName, hub_name

ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
NOTE = "posttrain_adapter.json"  # fields that PEFT lacks: the base's fingerprint, the shape of a reward model
PREFIX = "base_model.model."  # PEFT writes it before the name of a tensor in the base
RANK_MOST = 2**20
LANGUAGE_MODEL, CLASSIFIER = "CAUSAL_LM", "SEQ_CLS"
SCORES = ("classifier", "score")  # PEFT's `modules_to_save` of sequence classification
BEYOND = (
    "rank_pattern", "alpha_pattern", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out",
    "layer_replication", "trainable_token_indices", "target_parameters", "alora_invocation_tokens", "arrow_config",
    "kasa_config", "monteclora_config", "velora_config",
)  # fmt: skip
"""Fields whose settings compute something else than W + scale * B A, or that with the lengths of its rows (DoRA)."""


class AdapterConfig(NamedTuple):
    """The fields of adapter_config.json that are used."""

    rank: int
    alpha: float
    rslora: bool
    base: str  # the base model: a folder, or a model of the hub: org/name, org/name@revision
    task: str | None
    saved: tuple[str, ...]  # modules that are stored whole beside the adapters
    dora: bool = False


def is_adapter(folder: str | Path) -> bool:
    """Return whether a folder holds adapters instead of a model."""
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read adapter_config.json. Raises UserError if it is damaged, or describes more than plain LoRA."""
    file = folder / ADAPTER_CONFIG
    fields = Fields(file, read_json(file))
    kind = fields.text("peft_type")
    if kind != "LORA":
        raise UserError(f"{file}: peft_type is {shown(kind)}; only LORA is read here")
    odd = [name for name in BEYOND if fields.get(name)]
    start = fields.get("init_lora_weights", True)
    if isinstance(start, str) and start != "gaussian":
        odd.append("init_lora_weights")  # such as pissa, which changes the base
    if fields.get("bias", "none") != "none":
        odd.append("bias")
    if odd:
        raise UserError(
            f"{file}: {odd[0]} is {shown(fields[odd[0]])}, which plain LoRA does not have: merge it with PEFT "
            "(merge_and_unload) and give the whole checkpoint"
        )
    saved = fields.get("modules_to_save") or []
    if not isinstance(saved, list) or any(name not in SCORES for name in saved):
        raise UserError(
            f"{file}: modules_to_save is {shown(saved)}; only a score head can be stored beside adapters: merge it with "
            "PEFT (merge_and_unload) and give the whole checkpoint"
        )
    alpha = fields.number("lora_alpha", 0.0, 1e9, 8.0)
    rank = fields.whole("r", 1, RANK_MOST)
    base, revision = fields.text("base_model_name_or_path", ""), fields.text("revision", None)
    if revision and hub_name(base) == HubName(base) and not Path(base).exists():
        base = f"{base}@{revision}"
    return AdapterConfig(
        rank,
        alpha,
        fields.flag("use_rslora"),
        base,
        fields.text("task_type", None),
        tuple(saved),
        fields.flag("use_dora"),
    )


def write_adapter_config(folder: Path, config: AdapterConfig, targets: Sequence[str]) -> None:
    """Write adapter_config.json. `targets`: names of the adapted matrices, or their suffixes."""
    named = None if Path(config.base).exists() else hub_name(config.base)
    base, revision = (config.base, None) if named is None else named
    told: Mapping[str, Any] = {
        "peft_type": "LORA",
        "task_type": config.task,
        "base_model_name_or_path": base,
        "revision": revision,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "target_modules": list(targets),
        "modules_to_save": list(config.saved) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    write_json(folder / ADAPTER_CONFIG, told)


def base_of(folder: Path) -> Path:
    """Return the folder of the base model of a folder of adapters. Raises UserError if it is missing."""
    base = read_adapter_config(folder).base
    where = f"{folder / ADAPTER_CONFIG}: base_model_name_or_path"
    if not base:
        raise UserError(f"{where} is empty: write the folder or name of the adapter's base model into it")
    try:
        found = checkpoint_folder(base)
    except UserError as error:
        if Path(base).expanduser().is_file():
            raise UserError(f"{where}: {error}") from None
        raise UserError(
            f"{where} is {shown(base)}, which does not exist: restore the model, or write its new folder"
        ) from None
    if is_adapter(found):
        raise UserError(f"{where} is {shown(base)}, which is an adapter itself: merge it first with posttrain merge")
    return found


def described_in(folder: str | Path) -> Path:
    """Return the folder whose config.json describes the model of a checkpoint folder: itself, or an adapter's base."""
    folder = checkpoint_folder(folder)
    return base_of(folder) if is_adapter(folder) else folder
