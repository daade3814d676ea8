"""What engines in other processes are told of a model: its config.json, its tensors by name, how much they have to keep."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from posttrain.core.protocols import Model
from posttrain.core.types import UserError
from posttrain.models.checkpoint_folder import checkpoint_tensors
from posttrain.models.hf.backed import Backed
from posttrain.models.native.decoder import Decoder
from posttrain.models.native.decoder_config import written_config
from posttrain.models.row_shards import whole

HEAD = "lm_head.weight"


@dataclass(frozen=True)
class ModelManifest:
    """A model of either kind, as programs that read checkpoints know it."""

    model: Decoder | Backed

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        if isinstance(self.model, Decoder):
            return dict(self.model.source) or written_config(self.model.config)
        found: dict[str, Any] = json.loads(self.model.inner.config.to_json_string())
        return found

    @property
    def tied(self) -> bool:
        if isinstance(self.model, Decoder):
            return self.model.config.tied
        return self.model.tied

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Under the names of a checkpoint."""
        if isinstance(self.model, Decoder):
            return checkpoint_tensors(self.model)
        from posttrain.models.hf.transformers_folder import stored_tensors

        return stored_tensors(self.model)

    def with_head(self) -> Iterator[tuple[str, Tensor]]:
        """The same, with the output head even where it is the embedding."""
        for name, tensor in self.tensors():
            if name != HEAD or not self.tied:
                yield name, tensor
        if self.tied:
            yield HEAD, whole(self.model.head.weight)

    @property
    def embedding(self) -> str:
        """The name of the embedding's weight."""
        if isinstance(self.model, Decoder):
            return "model.embed_tokens.weight"
        from posttrain.models.hf.transformers_folder import stored_name

        return stored_name(self.model, self.model.inner.get_input_embeddings().weight)

    @property
    def kept(self) -> int:
        """How many numbers are kept of each token, at most: keys and values of all layers."""
        if isinstance(self.model, Decoder):
            config = self.model.config
            return 2 * config.layers * config.kv_heads * config.head_size
        text = self.model.inner.config.get_text_config()
        own = getattr(text, "per_layer_config", None)  # where layers differ, nothing is said of all (Gemma 4)
        return sum(map(_kept_of, own or [text] * text.num_hidden_layers))


def _kept_of(layer: Any) -> int:
    """Numbers that the layer of a configuration of transformers keeps of each token."""
    heads = getattr(layer, "num_attention_heads", 1)
    size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return int(2 * (getattr(layer, "num_key_value_heads", None) or heads) * size)


def announced(model: Model) -> ModelManifest:
    """Raises UserError for a kind of model that only this process knows."""
    if not isinstance(model, Decoder | Backed):
        raise UserError(f"engines in other processes cannot take over the weights of a {type(model).__name__}")
    return ModelManifest(model)
