"""Opens the rollout engine that the options name."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from posttrain.core.protocols import Engine, Model
from posttrain.core.types import UserError
from posttrain.engines.engine_options import EngineOptions
from posttrain.engines.local.embedded import embedded
from posttrain.engines.model_manifest import backbone_of
from posttrain.engines.pool.replicas import open_pool
from posttrain.models.tokenizer.tokenizer import Tokenizer


def open_engine(
    kind: Literal["local", "vllm", "sglang"],
    model: Model,
    tokenizer: Tokenizer,
    options: EngineOptions,
    *,
    serving: bool = False,
    own: bool = False,
    asynchronous: bool = False,
) -> Engine:
    """Open an engine, or a pool of several.

    `serving`: requests come at any time, and memory is used for sampling alone. `own`: sample with the weights that were
    loaded last, even if the model changes. `asynchronous`: it samples during updates too, so it cannot free its memory
    for them.
    """
    if kind == "local" and not options.pooled:
        cache = options.cache_gib
        return embedded(model, tokenizer, options.slots, options.precision, cache, rests=not serving, own=own)
    if kind != "vllm" and (decoder := backbone_of(model)).sees:
        option = "--replicas" if kind == "local" else "--engine sglang"
        raise UserError(
            f"{option} supports text-only models, and {decoder.family} reads pictures: use --engine vllm, or leave out "
            f"{option}"
        )
    if kind == "local":
        return open_pool(model, tokenizer, options)
    from posttrain.engines.servers.server_pool import open_servers
    from posttrain.engines.sglang.sglang_setup import SGLangSetup
    from posttrain.engines.vllm.vllm_setup import VLLMSetup

    options = replace(options, seeds=options.seeds or serving)
    server = VLLMSetup if kind == "vllm" else SGLangSetup
    return open_servers(server, model, tokenizer, options, sleeps=not (serving or asynchronous))
