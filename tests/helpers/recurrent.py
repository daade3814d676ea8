"""A second kind of model, as a user would add one: nothing of the library knows it. See test_second_model.py."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from posttrain.core.batch import Layout
from posttrain.models.checkpoint_folder import LOADERS
from posttrain.models.native.head import Head


@dataclass(frozen=True)
class Sizes:
    vocab: int
    hidden: int
    context: int


class Recurrent(nn.Module):
    """A GRU: a segment goes on from the state at the end of its prefix."""

    decoder = None

    def __init__(self, config: Sizes, eos_ids: tuple[int, ...]) -> None:
        super().__init__()
        self.config, self.eos_ids = config, eos_ids
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.cell = nn.GRU(config.hidden, config.hidden)

    @property
    def head(self) -> Head:
        return Head(self.embedding.weight)

    def hidden(self, layout: Layout, at: Tensor) -> Tensor:
        states: list[Tensor] = []
        for start, length, prefix in zip(layout.start, layout.length, layout.prefix, strict=True):
            tokens, before = layout.tokens[start : start + length], states[prefix][-1:] if prefix >= 0 else None
            states.append(self.cell(self.embedding(tokens), before)[0])
        return torch.cat(states)[at]

    def save(self, folder: Path) -> None:
        save_file(self.state_dict(), folder / "model.safetensors")
        about = {"model_type": "recurrent", **asdict(self.config), "eos_ids": self.eos_ids}
        (folder / "config.json").write_text(json.dumps(about))


def load(folder: Path, source: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Recurrent:
    model = Recurrent(Sizes(*(source[name] for name in ("vocab", "hidden", "context"))), tuple(source["eos_ids"]))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.to(device, dtype)


LOADERS["recurrent"] = load
