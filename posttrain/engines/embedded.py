"""The engine that shares a process with the learner, and its weights or a copy of them: the fast one where there is one."""

from __future__ import annotations

from posttrain.engines.backed_engine import BackedEngine
from posttrain.engines.kept import KEPT_BYTES
from posttrain.engines.local import LocalEngine
from posttrain.engines.uncached import UncachedEngine
from posttrain.engines.weights import own_copy
from posttrain.models.backed import Backed
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
    own: bool = False,
) -> Engine:
    """`slots`: how many requests run at once. `kept_gib`: of keys and values that are kept between turns. `rests`: whether
    memory is given back when nothing runs. `own`: it samples with a copy of the weights that are loaded last."""
    model = own_copy(model) if own else model
    if isinstance(model, Decoder):
        kept = KEPT_BYTES if kept_gib is None else int(kept_gib * 2**30)
        return LocalEngine(model, tokenizer, slots, precision, kept, rests, own)
    if isinstance(model, Backed):
        return BackedEngine(model, tokenizer, slots, precision, own)
    return UncachedEngine(model, tokenizer, slots, precision, own)
