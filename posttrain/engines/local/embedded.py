"""Opens the fastest engine for a model in the learner's process, with the learner's weights or a copy."""

from __future__ import annotations

from typing import Any, cast

import torch

from posttrain.core.protocols import Engine, Model
from posttrain.engines.local.backed_engine import BackedEngine
from posttrain.engines.local.engine_weights import own_copy
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.engines.local.prefix_cache import KEPT_BYTES
from posttrain.engines.local.uncached_engine import UncachedEngine
from posttrain.models.tokenizer.tokenizer import Tokenizer


def embedded(
    model: Model,
    tokenizer: Tokenizer,
    slots: int = 256,
    precision: str = "float32",
    cache_gib: float | None = None,
    rests: bool = True,
    own: bool = False,
    filled: bool = False,
) -> Engine:
    """Open the engine in the learner's process.

    `slots`: maximum of concurrent requests. `cache_gib`: limit of the KV cache in GiB, with what is kept between turns;
    None: see `LocalEngine`. `rests`: whether memory is freed when nothing runs. `own`: sample with a copy of the weights
    that were loaded last; `filled`: `model` is already that copy, and used by nothing else.
    """
    products = torch.bfloat16 if precision == "bfloat16" else None
    model, own = own_copy(model, products) if own else model, own or filled
    if model.decoder is None:
        return UncachedEngine(model, tokenizer, slots, precision, own)
    if model.decoder.native:
        limit = None if cache_gib is None else int(cache_gib * 2**30)
        kept = KEPT_BYTES if limit is None else limit
        return LocalEngine(cast(Any, model), tokenizer, slots, precision, kept, rests, own, limit)
    return BackedEngine(cast(Any, model), tokenizer, slots, precision, own)
