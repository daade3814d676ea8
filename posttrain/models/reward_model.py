"""Reward models: a decoder with a head of one number in place of the output head.

Reward models are written so that other programs compute the same scores: as a folder that transformers opens as a
sequence classification model (one label, no bias in the head, a padding token that never ends a reply). Models for
which transformers has no class, with scores averaged over tokens or a head of two layers, get a model_type that
transformers refuses, since it would otherwise initialise a random head.

T    tokens of a micro-batch    N    hidden states that are scored    D    hidden size
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from posttrain.core.batch import Layout
from posttrain.core.protocols import Model
from posttrain.core.protocols import ModelShape as Sizes
from posttrain.core.types import UserError
from posttrain.models.adapters.adapter_config import NOTE, is_adapter
from posttrain.models.adapters.adapter_folder import checked_base, packed_kind, read_adapter, read_note
from posttrain.models.backbone import Backbone
from posttrain.models.checkpoint_folder import BACKBONE, OURS, load_headless, of_backbone
from posttrain.models.checkpoint_location import checkpoint_folder
from posttrain.models.json_files import Fields, is_whole, read_json, shown
from posttrain.models.native.head import Head
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.models.tokenizer.tokenizer_files import VOCAB_MOST
from posttrain.models.weight_files import INNER, SCORE

Pooling = Literal["last", "mean"]
Form = Literal["linear", "mlp"]
OFFSET = "posttrain_score_offset"


@dataclass(frozen=True)
class ScoreShape:
    """How a score is computed: the pooling of hidden states, and the head."""

    pooling: Pooling = "last"  # the score at the last token, or the mean of those at every token of the response
    head: Form = "linear"


class RewardModel(nn.Module):
    """A reward model. Implements `posttrain.core.protocols.Model` with a head of one row, [1, D], whose outputs are
    scores, float32 [N].
    """

    def __init__(self, backbone: Backbone, shape: ScoreShape, seed: int, pad: int | None = None) -> None:
        """Create a new head on a backbone, drawn from N(0, 1 / (D + 1)) (Stiennon et al., arXiv 2009.01325, appendix
        B.1).

        `pad`: id of the padding token, written for other programs; None: not yet known.
        """
        super().__init__()
        self.backbone, self.shape, self.pad = backbone, shape, pad
        self.offset = 0.0  # services add it, so that the mean score of the training data is 0; never added here
        self.measured: Callable[[], float] | None = None  # computes the offset of the current weights, for `save`
        size = backbone.config.hidden
        generator = torch.Generator().manual_seed(seed)
        self.score = nn.Parameter(torch.randn((1, size), generator=generator) / (size + 1) ** 0.5)
        inner = torch.randn((size, size), generator=generator) / size**0.5 if shape.head == "mlp" else None
        self.inner = None if inner is None else nn.Parameter(inner)
        self.to(backbone.head.device)

    @property
    def config(self) -> Sizes:
        return self.backbone.config

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.backbone.eos_ids

    @eos_ids.setter
    def eos_ids(self, ids: tuple[int, ...]) -> None:
        self.backbone.eos_ids = ids

    @property
    def decoder(self) -> None:
        """Always None: the model cannot sample, although it is built on a decoder."""

    @property
    def head(self) -> Head:
        return Head(self.score)

    def hidden(self, layout: Layout, at: Tensor) -> Tensor:
        """Compute the inputs of the head, [N, D]."""
        return self.transformed(self.backbone.hidden(layout, at))

    def transformed(self, hidden: Tensor) -> Tensor:
        """Apply the head's first layer to the backbone's hidden states."""
        return hidden if self.inner is None else torch.tanh(nn.functional.linear(hidden, self.inner))

    @property
    def classifier(self) -> str | None:
        """Name of the class of transformers for such a model; None if there is none."""
        return self.backbone.classifier() if self.shape == ScoreShape() else None

    def measure(self) -> None:
        """Compute the offset of the current weights."""
        if self.measured is not None:
            self.offset = self.measured()

    def save(self, folder: Path) -> None:
        """Write config.json and weights for `load_reward_model`, and for transformers if it has a class for them.

        For an adapted model, write adapters and head in PEFT's format for sequence classification.
        """
        self.measure()
        also = {SCORE: self.score.detach()}
        if self.inner is not None:
            also[INNER] = self.inner.detach()
        if self.backbone.lora is not None:
            return self.backbone.lora.save(self.backbone, folder, also=also, note=self._metadata())
        ends, classifier = self.eos_ids, self.classifier
        told: dict[str, Any] = {
            "architectures": [classifier],
            "num_labels": 1,
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
            "vocab_size": self.config.vocab,
            "eos_token_id": list(ends) if len(ends) != 1 else ends[0],
            "pad_token_id": self.pad,
            OFFSET: self.offset,
        }
        if classifier is None:
            told |= {"architectures": ["PosttrainRewardModel"], "model_type": OURS, BACKBONE: self.backbone.family}
            told |= {"posttrain_pooling": self.shape.pooling, "posttrain_head": self.shape.head}
        self.backbone.save_headless(folder, also, told)

    def _metadata(self) -> dict[str, Any]:
        """Return the further fields that a folder of adapters stores beside adapters and head."""
        return {
            "posttrain_pooling": self.shape.pooling,
            "posttrain_head": self.shape.head,
            "vocab_size": self.config.vocab,
            "eos_token_id": list(self.eos_ids),
            "pad_token_id": self.pad,
            OFFSET: self.offset,
        }


if TYPE_CHECKING:
    _proof: Callable[..., Model] = RewardModel


def new_reward_model(
    folder: str | Path,
    shape: ScoreShape,
    seed: int,
    device: str | torch.device = "cpu",
    matrices: torch.dtype | None = None,
    packed: str = "",
) -> RewardModel:
    """Create a reward model with the backbone of a checkpoint; if that has a head of the same shape, load it too.

    `matrices`, `packed`: see `posttrain.models.checkpoint_folder.load_model`.
    """
    model, found = _read(folder, shape, seed, device, matrices, packed)
    if SCORE in found and (INNER in found) == (shape.head == "mlp"):
        _fill_head(model, found, folder)
    return model


def load_reward_model(
    folder: str | Path, device: str | torch.device = "cpu", matrices: torch.dtype | None = None
) -> RewardModel:
    """Load the reward model of a folder. Raises UserError if it holds another kind of model, or a damaged one.

    `matrices`: see `posttrain.models.checkpoint_folder.load_model`.
    """
    folder = checkpoint_folder(folder)
    source = read_note(folder) if is_adapter(folder) else read_json(folder / "config.json")
    shape = ScoreShape(source.get("posttrain_pooling", "last"), source.get("posttrain_head", "linear"))
    if shape.pooling not in ("last", "mean") or shape.head not in ("linear", "mlp"):
        raise UserError(
            f"{folder}: {NOTE if is_adapter(folder) else 'config.json'} describes an unknown form of reward model: "
            f"{shown(shape.pooling)}, {shown(shape.head)}"
        )
    model, found = _read(folder, shape, 0, device, matrices)
    if SCORE not in found:
        raise UserError(
            f"{folder} is not a reward model: it has no {SCORE}; train one with posttrain reward-model, or give a "
            "sequence-classification checkpoint with one label"
        )
    _fill_head(model, found, folder)
    offset = source.get(OFFSET, 0.0)
    if isinstance(offset, bool) or not isinstance(offset, int | float) or not math.isfinite(offset):
        raise UserError(f"{folder}: {OFFSET} in config.json is {shown(offset)}; it must be a finite number")
    model.offset = float(offset)
    return model


def _read(
    folder: str | Path,
    shape: ScoreShape,
    seed: int,
    device: str | torch.device,
    matrices: torch.dtype | None,
    packed: str = "",
) -> tuple[RewardModel, dict[str, Tensor]]:
    folder = checkpoint_folder(folder)
    if is_adapter(folder):
        return _read_adapted(folder, shape, seed, device, matrices)
    backbone, found = load_headless(folder, device, matrices, packed)
    if "score.bias" in found:
        raise UserError(f"{folder}: its head has a bias, which is not supported here or by transformers")
    source = of_backbone(read_json(folder / "config.json"))
    pad = source.get("pad_token_id")
    return RewardModel(backbone, shape, seed, pad if isinstance(pad, int) else None), found


def _read_adapted(
    folder: Path, shape: ScoreShape, seed: int, device: str | torch.device, matrices: torch.dtype | None
) -> tuple[RewardModel, dict[str, Tensor]]:
    """Load the base of a folder of adapters, the adapters, and the head: the folder's, or else the base's."""
    model, found = _read(checked_base(folder), shape, seed, device, matrices, packed_kind(folder))
    fields = Fields(folder / NOTE, read_note(folder))
    vocab = model.config.vocab
    _grow(model.backbone, fields.whole("vocab_size", vocab, VOCAB_MOST, vocab))
    own = read_adapter(model.backbone, folder, (SCORE, INNER))
    ends = fields.get("eos_token_id")
    if isinstance(ends, list) and all(is_whole(end, 0, model.config.vocab - 1) for end in ends):
        model.eos_ids = tuple(ends)
    model.pad = fields.whole("pad_token_id", 0, model.config.vocab - 1, model.pad)
    return model, own if SCORE in own else found


def _fill_head(model: RewardModel, found: dict[str, Tensor], folder: str | Path) -> None:
    """Fill the head with the tensors found. Raises UserError if one is missing or of another shape."""
    own = {SCORE: model.score, **({INNER: model.inner} if model.inner is not None else {})}
    for name, parameter in own.items():
        stored = found.get(name)
        if stored is None or stored.shape != parameter.shape:
            what = "is not there" if stored is None else f"has shape {list(stored.shape)}"
            raise UserError(
                f"{folder}: {name} {what}; a reward model has one label and a head of shape {list(parameter.shape)}"
            )
        with torch.no_grad():
            cast(Tensor, parameter).copy_(stored)


def settle(model: RewardModel, tokenizer: Tokenizer, ends: tuple[int, ...]) -> Tokenizer:
    """Set the tokens that end a reply (`ends`) and the padding token, which is never one of them, in the model and in
    the returned tokenizer.

    If a padding token is added, the embedding is extended by zeros, which are never read.
    """
    tokenizer = tokenizer.padding(ends)
    assert tokenizer.pad_id is not None
    model.eos_ids, model.pad = ends, tokenizer.pad_id
    _grow(model.backbone, tokenizer.pad_id + 1)
    return tokenizer


def _grow(backbone: Backbone, vocab: int) -> None:
    if vocab > backbone.config.vocab:
        backbone.grow(vocab)
