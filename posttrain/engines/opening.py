"""Which engine samples, by its name in the options."""

from __future__ import annotations

from typing import Literal

from posttrain.engines.embedded import embedded
from posttrain.engines.vllm import VLLMEngine
from posttrain.models.decoder import Decoder
from posttrain.models.tokenizer import Tokenizer
from posttrain.protocols import Engine, Model
from posttrain.types import UserError

POLL_STEPS = 8  # of vLLM's, after which new requests join those that run


def open_engine(
    kind: Literal["local", "vllm"],
    model: Model,
    tokenizer: Tokenizer,
    slots: int,
    precision: str,
    *,
    cache_gib: float,
    seconds: float,
    serving: bool = False,
    own: bool = False,
) -> Engine:
    """`seconds`: limit of a hand-over of weights and of a decoding step to vLLM. `serving`: requests come at any time, and
    nothing but sampling needs the memory. `own`: the weights that are loaded last are sampled with, whatever becomes of
    the model meanwhile."""
    if kind == "local":
        return embedded(model, tokenizer, slots, precision, cache_gib, rests=not serving, own=own)
    if not isinstance(model, Decoder):
        raise UserError(f"--engine {kind} cannot take over the weights of a {type(model).__name__}: leave it out")
    return VLLMEngine(
        model,
        tokenizer,
        slots,
        precision,
        cache_gib=cache_gib,
        load_seconds=seconds,
        step_seconds=seconds,
        poll_steps=POLL_STEPS if serving else None,
    )
