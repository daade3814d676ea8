"""Opens an engine pool of child processes or Ray actors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from posttrain.core.protocols import Model, World
from posttrain.core.types import UserError
from posttrain.engines.local.engine_weights import named_weights
from posttrain.engines.model_manifest import backbone_of
from posttrain.engines.pool.engine_pool import EnginePool
from posttrain.engines.pool.places import LocalProcess
from posttrain.engines.pool.pool_member import EnginePlace
from posttrain.engines.weight_probe import LIMIT, LIMIT_BFLOAT16, WeightProbe
from posttrain.engines.weight_sync import SharedMemory, WeightLayout
from posttrain.models.gpu_placement import GPUPlacement
from posttrain.models.json_files import write_json
from posttrain.models.native.kernels import build
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.system.temp_folders import TempFolder

ALIVE_SECONDS = 1.0  # maximal time between two heartbeats of a working engine


@dataclass(frozen=True)
class Many:
    """Engines of a pool, as given by a run's options. Without replicas and servers there is one engine, no pool."""

    replicas: int = 0  # processes to start
    restarts: int = 5
    folder: Path | None = None  # folder for checkpoints on a disk that the servers read
    launch: Literal["local", "ray"] = "local"  # what starts the processes: local or ray
    cpus: float = 1.0  # processors of the cluster per engine
    # transport of the weight sync to processes of this machine
    weight_sync: Literal["copied", "adapter", "nccl", "ipc"] = "copied"
    rank: int = 0  # rank of the process to which the engines belong
    devices: tuple[int, ...] = ()  # GPUs of the processes
    urls: Sequence[str] = ()  # vLLM servers that run already
    gpus: int = 1  # of each vLLM server
    learner_devices: tuple[int, ...] = ()  # GPUs of the learners
    role_devices: tuple[int, ...] = ()  # GPUs of models beside the policy
    most: int = 0  # replicas of the process of the run that has most

    def __bool__(self) -> bool:
        return bool(self.replicas or self.urls)

    def of(self, world: World) -> Many:
        """Return the engines of this process of a run. Raises UserError if it would have none."""
        if self.weight_sync in ("nccl", "ipc") and world.size > 1:
            raise UserError(f"--weight-sync {self.weight_sync} requires one training process: leave out --processes")
        if self and self.replicas + len(self.urls) < world.size:
            raise UserError(
                f"each of {world.size} processes needs an engine of its own: give at least {world.size} (--replicas, "
                "--engine-url)"
            )
        replicas = len(range(world.rank, self.replicas, world.size))
        most = -(-self.replicas // world.size)
        return replace(self, replicas=replicas, most=most, urls=self.urls[world.rank :: world.size], rank=world.rank)


def setup_of(
    model: Model, tokenizer: Tokenizer, folder: Path, slots: int, precision: str, cache_gib: float | None, threads: int
) -> dict[str, Any]:
    """Return the setup of an engine, but for its weights and heartbeat, and write its files into `folder`."""
    tokenizer.save(folder)
    write_json(folder / "config.json", backbone_of(model).described())
    return {
        "folder": str(folder), "context": model.config.context, "eos_ids": list(model.eos_ids), "slots": slots,
        "precision": precision, "cache_gib": cache_gib, "threads": threads, "compiled": build.used(),
        "device": str(model.head.device), "backed": backbone_of(model).how_it_runs(),
    }  # fmt: skip


def open_pool(
    model: Model,
    tokenizer: Tokenizer,
    slots: int,
    precision: str,
    many: Many,
    *,
    cache_gib: float | None,
    seconds: float,
) -> EnginePool:
    """Open a pool of embedded engines. Before the first weight sync it cannot sample, and no weights are on disk.

    Raises UserError if an engine does not start.
    """
    if many.weight_sync != "copied":
        raise UserError(f"--weight-sync {many.weight_sync} requires --engine vllm: add it, or leave --weight-sync out")
    with ExitStack() as opened:
        own = Path(opened.enter_context(TempFolder("engines")))
        alive = min(ALIVE_SECONDS, seconds / 4)
        weight_layout = WeightLayout(model, backbone_of(model).dtype, named_weights)
        ray = many.launch == "ray"
        threads = many.cpus if ray else torch.get_num_threads() / many.replicas
        setup = setup_of(model, tokenizer, own, slots, precision, cache_gib, max(1, int(threads)))
        setup |= {"alive": alive, "layout": weight_layout.described}
        places: Sequence[EnginePlace]
        if ray:
            from posttrain.engines.pool.ray_engines import RayPlaces

            places = opened.enter_context(closing(RayPlaces(setup, weight_layout, many.cpus))).places(many.replicas)
        else:
            memory = SharedMemory(weight_layout)
            opened.callback(memory.close)
            placement = placement_of(many, model.head.device)
            setups = [_on_device(setup, number, placement) for number in range(many.replicas)]
            places = [LocalProcess(str(number), setup, memory) for number, setup in enumerate(setups)]
        sizes, closed = (model.config.context, model.config.vocab), opened.pop_all().close
        return EnginePool(
            places, probe_of(model, precision), *sizes, seconds=seconds, restarts=many.restarts, closed=closed
        )
    raise AssertionError("nothing above is left without a pool")


def placement_of(many: Many, device: torch.device) -> GPUPlacement:
    """Return the placement of a run's engines. `device`: that of this process's learner, perhaps by `--device cuda:2`."""
    found = GPUPlacement.here(many.learner_devices, many.devices, many.role_devices)
    if device.index is None or device.index == found.learner():
        return found
    return replace(found, learner_devices=(device.index,))


def probe_of(model: Model, precision: str) -> WeightProbe:
    """Return the weight probe of a pool."""
    return WeightProbe(model, LIMIT_BFLOAT16 if precision == "bfloat16" else LIMIT)


def _on_device(setup: dict[str, Any], number: int, placement: GPUPlacement) -> dict[str, Any]:
    """Assign a GPU to a replica."""
    return {**setup, "device": f"cuda:{placement.engine(number)}"} if setup["device"].startswith("cuda") else setup


if TYPE_CHECKING:
    _proof: Callable[..., EnginePlace] = LocalProcess
