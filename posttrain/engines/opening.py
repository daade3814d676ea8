"""Which engine samples, by its name in the options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from posttrain.engines.embedded import embedded
from posttrain.engines.kept import KEPT_BYTES
from posttrain.engines.replicas import open_pool
from posttrain.engines.vllm import VLLMEngine
from posttrain.engines.vllm_worker import POLL_STEPS
from posttrain.engines.wire import read_token
from posttrain.models.decoder import Decoder
from posttrain.models.tokenizer import Tokenizer
from posttrain.protocols import Engine, Model, World
from posttrain.types import UserError


@dataclass(frozen=True)
class Many:
    """Engines of a pool, as the options of a run name them. None: one engine, in the place that its kind has."""

    replicas: int = 0  # processes of this machine
    addresses: Sequence[str] = ()  # engines that listen
    token: str | None = None  # the file that holds what these want to know
    restarts: int = 5
    folder: Path | None = None  # of weights for engines that listen, on a disk that all see
    rank: int = 0  # of the process whose engines these are

    def of(self, world: World) -> Many:
        """The share of one of the processes of a run. Raises UserError where it has none."""
        if (self.replicas or self.addresses) and self.replicas + len(self.addresses) < world.size:
            raise UserError(
                f"each of {world.size} processes samples with engines of its own: give as many at least (--replicas, "
                "--engines)"
            )
        replicas = len(range(world.rank, self.replicas, world.size))
        first = (world.rank - self.replicas) % world.size  # addresses are dealt on where the replicas end
        mine = self.addresses[first :: world.size]
        return Many(replicas, mine, self.token, self.restarts, self.folder, world.rank)


def open_engine(
    kind: Literal["local", "vllm"],
    model: Model,
    tokenizer: Tokenizer,
    slots: int,
    precision: str,
    *,
    cache_gib: float = KEPT_BYTES / 2**30,
    seconds: float = 120.0,
    serving: bool = False,
    many: Many = Many(),
) -> Engine:
    """`seconds`: limit of silence of an engine in another process, in a hand-over of weights and in a decoding step.

    `serving`: requests come at any time, and nothing but sampling needs the memory. `many`: a pool, if it names engines.
    """
    if kind == "local" and not many.replicas and not many.addresses:
        return embedded(model, tokenizer, slots, precision, cache_gib, rests=not serving)
    if not isinstance(model, Decoder):
        raise UserError(f"engines in other processes cannot take over the weights of a {type(model).__name__}")
    if many.replicas or many.addresses:
        return open_pool(
            kind,
            model,
            tokenizer,
            slots,
            precision,
            cache_gib=cache_gib,
            seconds=seconds,
            restarts=many.restarts,
            replicas=range(many.replicas),
            addresses=many.addresses,
            token=read_token(many.token) if many.addresses else b"",
            folder=many.folder,
            rank=many.rank,
        )
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
