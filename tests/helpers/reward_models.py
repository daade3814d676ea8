"""Folders of reward models, as transformers writes them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer


def write_reward_model(folder: Path, model: object, tokenizer: Tokenizer, offset: float | None = None) -> Path:
    """A sequence-classification folder: this decoder's weights with a random head."""
    save_model(model, folder, tokenizer)  # type: ignore[arg-type]
    weights = load_file(folder / "model.safetensors")
    hidden = weights["model.norm.weight"].shape[0]
    weights["score.weight"] = torch.randn(1, hidden, generator=torch.Generator().manual_seed(3))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [config["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")]}
    config |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    config |= {} if offset is None else {"posttrain_score_offset": offset}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
