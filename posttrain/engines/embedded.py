"""The engine that shares a process and its weights with the learner: the fast one where the model has one."""

from __future__ import annotations

from posttrain.engines.local import LocalEngine
from posttrain.engines.uncached import UncachedEngine
from posttrain.models.decoder import Decoder
from posttrain.models.tokenizer import Tokenizer
from posttrain.protocols import Engine, Model


def embedded(model: Model, tokenizer: Tokenizer, slots: int = 256, precision: str = "float32") -> Engine:
    """`slots`: how many requests run at once."""
    if isinstance(model, Decoder):
        return LocalEngine(model, tokenizer, slots, precision)
    return UncachedEngine(model, tokenizer, slots, precision)
