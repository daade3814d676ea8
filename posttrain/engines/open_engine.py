"""Opens the rollout engine that the options name."""

from __future__ import annotations

from typing import Literal

from posttrain.core.protocols import Engine, Model
from posttrain.core.types import UserError
from posttrain.engines.local.embedded import embedded
from posttrain.engines.model_manifest import backbone_of
from posttrain.engines.pool.replicas import Many, open_pool
from posttrain.models.tokenizer.tokenizer import Tokenizer


def open_engine(
    kind: Literal["local", "vllm"],
    model: Model,
    tokenizer: Tokenizer,
    slots: int,
    precision: str,
    *,
    cache_gib: float | None = None,
    seconds: float = 120.0,
    serving: bool = False,
    own: bool = False,
    asynchronous: bool = False,
    seeds: bool = False,
    seed: int = 0,
    many: Many = Many(),  # noqa: B008  frozen
) -> Engine:
    """Open an engine.

    `cache_gib`: limit of the cache in GiB; None: see `--engine-cache`. `seconds`: timeout of a weight sync and of a
    decoding step, for an engine in another process. `serving`: requests come at any time, and memory is used for
    sampling alone. `own`: sample with the weights that were loaded last, even if the model changes. `asynchronous`: it
    samples during updates too, so it cannot free its memory for them. `seeds`, `seed`: see
    `vllm.server_pool.open_servers`. `many`: open a pool if it names engines.
    """
    if kind == "local" and many.weight_sync == "adapter":
        raise UserError("--weight-sync adapter requires --engine vllm: add it, or leave --weight-sync out")
    if kind == "local" and not many:
        return embedded(model, tokenizer, slots, precision, cache_gib, rests=not serving, own=own)
    if (decoder := backbone_of(model)).sees:
        raise UserError(
            f"engines in other processes run text-only models, and {decoder.family} reads images: leave out "
            "--replicas and --engine"
        )
    if kind == "local":
        return open_pool(model, tokenizer, slots, precision, many, cache_gib=cache_gib, seconds=seconds)
    from posttrain.engines.vllm.server_pool import open_servers

    return open_servers(
        model,
        tokenizer,
        slots,
        precision,
        many,
        cache_gib=cache_gib,
        seconds=seconds,
        seeds=seeds or serving,
        seed=seed,
        sleeps=not (serving or asynchronous),
    )
