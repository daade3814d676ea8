"""Sentence encoders loaded by transformers: texts to vectors, with a choice of pooling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posttrain.core.extras import install
from posttrain.core.messages import one_line
from posttrain.core.types import UserError

TOGETHER = 64  # texts of one batch, which have similar lengths


class TransformersEncoder:
    """An encoder of transformers; implements `posttrain.services.retrieval.dense.Encoder`. The last bits of a vector
    may depend on the texts in the same batch.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        pooling: Literal["mean", "first", "last"] = "mean",
        normalised: bool = True,
        query_prefix: str = "",
        passage_prefix: str = "",
        longest: int = 256,
        device: str = "auto",
    ) -> None:
        """Load an encoder.

        `pooling`: the vector is the mean of the hidden states, that of the first token (CLS), or that of the last;
        `normalised`: scale vectors to length 1; `longest`: maximum of tokens, to which a text is cut.

        Raises UserError if transformers is missing, or cannot load the folder.
        """
        self.identity: dict[str, Any] = {
            "folder": str(folder.resolve()), "fingerprint": fingerprint, "pooling": pooling, "normalised": normalised,
            "query_prefix": query_prefix, "passage_prefix": passage_prefix, "longest": longest,
        }  # fmt: skip
        self._pooling, self._normalised, self._longest = pooling, normalised, longest
        self._prefix = {"query": query_prefix, "passage": passage_prefix}
        try:
            import transformers
        except ImportError as error:
            raise UserError(f"--encoder FOLDER needs transformers: {install('transformers')}") from error
        transformers.utils.logging.disable_progress_bar()
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model: Any = transformers.AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
            model = model.get_encoder() if model.config.is_encoder_decoder else model
            self._model: Any = model.to(device).eval().requires_grad_(False)
        except Exception as error:  # a defective folder causes errors of many types
            raise UserError(f"--encoder {folder} cannot be loaded by transformers: {one_line(error)}") from error
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token or self._tokenizer.unk_token
        self._tokenizer.padding_side = "right"
        self._device = torch.device(device)

    @torch.no_grad()
    def encode(self, texts: Sequence[str], kind: Literal["query", "passage"]) -> NDArray[np.float32]:
        shown = [self._prefix[kind] + text for text in texts]
        order = sorted(range(len(shown)), key=lambda place: len(shown[place]))
        vectors: list[Any] = [None] * len(shown)
        for first in range(0, len(order), TOGETHER):
            places = order[first : first + TOGETHER]
            for place, vector in zip(places, self._vectors([shown[place] for place in places]), strict=True):
                vectors[place] = vector
        return np.stack(vectors)

    def _vectors(self, texts: list[str]) -> NDArray[np.float32]:
        read = self._tokenizer(texts, max_length=self._longest, truncation=True, padding=True, return_tensors="pt")
        read = {name: read[name].to(self._device) for name in ("input_ids", "attention_mask")}
        hidden: Tensor = self._model(**read).last_hidden_state
        mask = read["attention_mask"]
        if self._pooling == "first":
            pooled = hidden[:, 0]
        elif self._pooling == "last":
            pooled = hidden[torch.arange(len(texts)), mask.sum(1) - 1]
        else:
            pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        if self._normalised:
            pooled = torch.nn.functional.normalize(pooled, dim=-1)
        return pooled.float().cpu().numpy()
