"""Models of transformers used for their hidden states only, below critics and reward models.

Their output head is replaced so that it takes no memory. A reward model on one of them is stored in the format of
transformers if that has a class with the same result, else in one that transformers refuses.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from posttrain.models.hf.backed_writer import stored_tensors, write_generation
from posttrain.models.json_files import write_json
from posttrain.models.weight_files import SCORE, write_weights

if TYPE_CHECKING:
    from posttrain.models.hf.backed import Backed

OURS = "posttrain_"  # prefix of our entries in a config.json


def names_of_head(inner: Any) -> set[str]:
    """Return the names of the output head's tensors in the model."""
    head = inner.get_output_embeddings()
    return {f"{name}.{key}" for name, m in inner.named_modules() if m is head for key, _ in m.named_parameters()}


def let_head_go(model: Backed) -> None:
    """Tie the output head, which is never used, to the embedding, so that it takes no memory of its own."""
    head, embedding = model.inner.get_output_embeddings(), model.inner.get_input_embeddings()
    if head.weight.shape[1] == embedding.weight.shape[1]:
        head.weight = embedding.weight
    else:  # the embedding is narrower than the hidden states
        head.weight.requires_grad_(False)
    if getattr(head, "bias", None) is not None:
        head.bias = None


def grow(model: Backed, vocab: int) -> None:
    """Extend the embeddings of a headless model by more tokens: zeros, which are never read."""
    embedding = cast(nn.Embedding, model.inner.get_input_embeddings())
    old = embedding.weight
    rows = old.new_zeros((vocab - len(old), old.shape[1]))
    embedding.weight = nn.Parameter(torch.cat((old.detach(), rows)), old.requires_grad)
    embedding.num_embeddings = vocab
    model.inner.config.get_text_config().vocab_size = vocab
    model.config = replace(model.config, vocab=vocab)
    let_head_go(model)


def classifier_of(model: Backed) -> str | None:
    """Return the name of transformers' class with the same decoder and a linear head of one number; None: there is
    none.

    The class is instantiated on "meta" to check that it has this model's tensors and that head, and no others.
    """
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    if model.vision is not None:
        return None
    config = copy.deepcopy(model.inner.config)
    config.num_labels = 1
    kind: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if kind is None:
        return None
    with torch.device("meta"):
        other = kind(config)
    same = {name: tensor.shape for name, tensor in other.named_parameters()}
    own = {name: tensor.shape for name, tensor in _weights_of(model).items()}
    if type(other.base_model) is not type(model.inner.base_model) or same.pop(SCORE, None) != (1, model.config.hidden):
        return None
    return kind.__name__ if same == own else None


def _weights_of(model: Backed) -> dict[str, Tensor]:
    """Return the parameters of transformers' model, without an output head."""
    left = names_of_head(model.inner)
    return {
        name.removeprefix("inner."): parameter
        for name, parameter in model.named_parameters()
        if name.removeprefix("inner.") not in left
    }


def save_headless(model: Backed, folder: Path, also: Mapping[str, Tensor], told: Mapping[str, Any]) -> None:
    """Write config.json, generation_config.json and weights without an output head.

    `also`: further tensors; `told`: further entries of config.json, or other values of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    left, dtype = names_of_head(model.inner), model.head.dtype
    tensors = {**{name: t for name, t in stored_tensors(model) if name not in left}, **also}
    write_weights({name: tuple(t.shape) for name, t in tensors.items()}, tensors.items(), folder, dtype)
    source = {k: v for k, v in json.loads(model.inner.config.to_json_string()).items() if not k.startswith(OURS)}
    write_json(folder / "config.json", {**source, "dtype": str(dtype).removeprefix("torch."), **told})
    write_generation(model, folder)
