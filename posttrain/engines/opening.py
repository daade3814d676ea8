"""Which engine samples, by its name in the options."""

from __future__ import annotations

from typing import Literal

from posttrain.engines.embedded import embedded
from posttrain.engines.vllm import VLLMEngine
from posttrain.models.decoder import Decoder
from posttrain.models.tokenizer import Tokenizer
from posttrain.protocols import Engine, Model
from posttrain.types import UserError


def open_engine(
    kind: Literal["local", "vllm"],
    model: Model,
    tokenizer: Tokenizer,
    slots: int,
    precision: str,
    *,
    cache_gib: float,
    seconds: float,
    poll_steps: int | None = None,
) -> Engine:
    """`seconds`: limit of a hand-over of weights and of a decoding step to vLLM; `poll_steps`: as `VLLMEngine` has it."""
    if kind == "local":
        return embedded(model, tokenizer, slots, precision, cache_gib)
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
        poll_steps=poll_steps,
    )
