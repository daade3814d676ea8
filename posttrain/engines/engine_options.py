"""Options of the engines of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from posttrain.core.protocols import Alone, World
from posttrain.core.types import UserError


@dataclass(frozen=True)
class EngineOptions:
    """Options of the engines of a run, or of one of its processes. Without replicas and servers there is one engine."""

    slots: int = 256  # maximum of concurrent requests of each
    precision: str = "float32"
    replicas: int = 0  # processes to start
    cache_gib: float | None = None  # limit of the KV cache of each in GiB; None: see `--engine-cache`
    seconds: float = 120.0  # timeout of a weight sync and of a decoding step, for engines in other processes
    restarts: int = 5
    folder: Path | None = None  # folder for checkpoints on a disk that the servers read
    launch: Literal["local", "ray"] = "local"  # what starts the processes: local or ray
    cpus: float = 1.0  # processors of the cluster per engine
    # transport of the weight sync to processes of this machine
    weight_sync: Literal["copied", "adapter", "nccl", "ipc"] = "copied"
    world: World = field(default_factory=Alone)  # processes of which each has engines that this run starts
    rank: int = 0  # rank of the process to which the engines belong
    devices: tuple[int, ...] = ()  # GPUs of the processes
    urls: Sequence[str] = ()  # servers that run already
    gpus: int = 1  # of each server
    seeds: bool = False  # whether servers sample each request with a seed of its own
    seed: int = 0  # from it follow those of the servers, for other requests
    learner_devices: tuple[int, ...] = ()  # GPUs of the learners
    role_devices: tuple[int, ...] = ()  # GPUs of models beside the policy
    most: int = 0  # replicas of the process of the run that has most

    @property
    def pooled(self) -> bool:
        """Whether the engines are in other processes, as replicas or servers."""
        return bool(self.replicas or self.urls)

    @property
    def transfer(self) -> Literal["nccl", "ipc"] | None:
        """How vLLM moves weights from GPU to GPU; None: it does not."""
        return self.weight_sync if self.weight_sync in ("nccl", "ipc") else None

    def of(self, world: World) -> EngineOptions:
        """Return the options of this process's share of the engines. Raises UserError if it would have none."""
        if self.pooled and self.replicas + len(self.urls) < world.size:
            raise UserError(
                f"each of {world.size} processes needs an engine of its own: give at least {world.size} (--replicas, "
                "--engine-url)"
            )
        replicas = len(range(world.rank, self.replicas, world.size))
        most = -(-self.replicas // world.size)
        urls, all_have = self.urls[world.rank :: world.size], self.replicas >= world.size
        sharing = world if all_have else self.world
        return replace(self, replicas=replicas, most=most, urls=urls, rank=world.rank, world=sharing)
