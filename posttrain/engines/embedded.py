"""The engine that shares a process and its weights with the learner: the fast one where the model has one."""

from __future__ import annotations

from posttrain.engines.kept import KEPT_BYTES
from posttrain.engines.local import LocalEngine
from posttrain.engines.uncached import UncachedEngine
from posttrain.models.decoder import Decoder
from posttrain.models.tokenizer import Tokenizer
from posttrain.protocols import Engine, Model


def embedded(
    model: Model,
    tokenizer: Tokenizer,
    slots: int = 256,
    precision: str = "float32",
    kept_gib: float | None = None,
    rests: bool = True,
) -> Engine:
    """`slots`: how many requests run at once. `kept_gib`: of keys and values that are kept between turns. `rests`: whether
    memory is given back when nothing runs."""
    if isinstance(model, Decoder):
        kept = KEPT_BYTES if kept_gib is None else int(kept_gib * 2**30)
        return LocalEngine(model, tokenizer, slots, precision, kept, rests)
    return UncachedEngine(model, tokenizer, slots, precision)
