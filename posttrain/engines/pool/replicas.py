"""Opens an engine pool of child processes, Ray actors, or engines that listen at addresses."""

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
from posttrain.engines.pool.nccl_transfer import CardToCard
from posttrain.engines.pool.places import Listening, LocalProcess
from posttrain.engines.pool.pool_member import EnginePlace
from posttrain.engines.pool.pool_protocol import read_token
from posttrain.engines.vllm.vllm_engine import (
    cache_bytes,
    dtype_of,
    prepare,
    require_vllm,
    vllm_layout,
)
from posttrain.engines.weight_probe import LIMIT, LIMIT_BFLOAT16, WeightProbe
from posttrain.engines.weight_sync import Files, SharedMemory, Transport, WeightLayout
from posttrain.models.gpu_placement import GPUPlacement
from posttrain.models.json_files import write_json
from posttrain.models.native.kernels import build
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.system.temp_folders import TempFolder

ALIVE_SECONDS = 1.0  # maximal time between two heartbeats of a working engine

Kind = Literal["local", "vllm"]


@dataclass(frozen=True)
class Many:
    """Engines of a pool, as given by a run's options. Without replicas and addresses there is one engine, no pool."""

    replicas: int = 0  # processes to start
    addresses: Sequence[str] = ()  # addresses of engines that listen
    token: str | None = None  # file with the token of these engines
    restarts: int = 5
    folder: Path | None = None  # folder for weights on a disk that all engines share
    launch: Literal["local", "ray"] = "local"  # what starts the processes: local or ray
    cpus: float = 1.0  # processors of the cluster per engine
    weight_sync: Literal["copied", "adapter", "nccl", "ipc"] = (
        "copied"  # transport of the weight sync to processes of this machine
    )
    rank: int = 0  # rank of the process to which the engines belong
    devices: tuple[int, ...] = ()  # GPUs of the processes
    learner_devices: tuple[int, ...] = ()  # GPUs of the learners
    role_devices: tuple[int, ...] = ()  # GPUs of models beside the policy

    def __bool__(self) -> bool:
        return bool(self.replicas or self.addresses)

    def of(self, world: World) -> Many:
        """Return the engines of this process of a run. Raises UserError if it would have none."""
        if self.weight_sync == "adapter":
            if self or world.size > 1:
                raise UserError(
                    "--weight-sync adapter requires one training process with one vLLM: leave out --replicas and --engines"
                )
        elif self.weight_sync != "copied" and (world.size > 1 or not self.replicas or self.launch != "local"):
            raise UserError(
                f"--weight-sync {self.weight_sync} requires one training process, with --replicas on its machine"
            )
        if self and self.replicas + len(self.addresses) < world.size:
            raise UserError(
                f"each of {world.size} processes needs an engine of its own: give at least {world.size} (--replicas, "
                "--engines)"
            )
        first = (world.rank - self.replicas) % world.size  # address 0 goes to the process behind the last replica's
        own = len(range(world.rank, self.replicas, world.size)), self.addresses[first :: world.size]
        return replace(self, replicas=own[0], addresses=own[1], rank=world.rank)


def setup_of(
    kind: Kind,
    model: Model,
    tokenizer: Tokenizer,
    folder: Path,
    slots: int,
    precision: str,
    cache_gib: float,
    threads: int,
) -> dict[str, Any]:
    """Return the setup of an engine, without the entries that the pool adds when it connects, and write its files into
    `folder`.
    """
    if kind == "vllm":
        require_vllm()
        eos = prepare(str(folder), model, tokenizer)
    else:
        tokenizer.save(folder)
        write_json(folder / "config.json", backbone_of(model).described())
        eos = model.eos_ids
    cache = cache_bytes(model, slots, dtype_of(precision), cache_gib)
    return {
        "engine": kind, "folder": str(folder), "context": model.config.context, "eos_ids": list(eos), "slots": slots,
        "precision": precision, "cache_gib": cache_gib, "cache_bytes": cache, "threads": threads,
        "compiled": build.used(), "device": str(model.head.device), "backed": backbone_of(model).how_it_runs(),
    }  # fmt: skip


def open_pool(
    kind: Kind,
    model: Model,
    tokenizer: Tokenizer,
    slots: int,
    precision: str,
    many: Many,
    *,
    cache_gib: float,
    seconds: float,
) -> EnginePool:
    """Open the pool. Before the first weight sync it cannot sample, and no weights are on disk.

    Raises UserError if an engine does not start.
    """
    if many.weight_sync != "copied" and (kind != "vllm" or model.head.device.type != "cuda"):
        raise UserError(f"--weight-sync {many.weight_sync} requires vLLM on GPUs: give --engine vllm --device cuda")
    token = read_token(many.token) if many.addresses else b""
    with ExitStack() as opened:
        own = Path(opened.enter_context(TempFolder("engines")))
        alive = min(ALIVE_SECONDS, seconds / 4)
        dtype = dtype_of(precision) if kind == "vllm" else backbone_of(model).dtype
        weight_layout = vllm_layout(model, dtype) if kind == "vllm" else WeightLayout(model, dtype, named_weights)
        files = Files(many.folder or own / "weights", many.rank, weight_layout)
        places: list[EnginePlace] = [Listening(address, token, files, alive) for address in many.addresses]
        if many.replicas:
            ray = many.launch == "ray"
            threads = many.cpus if ray else torch.get_num_threads() / many.replicas
            setup = setup_of(kind, model, tokenizer, own, slots, precision, cache_gib, max(1, int(threads)))
            if ray:
                from posttrain.engines.pool.ray_engines import RayPlaces

                cluster = opened.enter_context(closing(RayPlaces(setup, files, many.cpus, alive)))
                places += cluster.places(range(many.replicas))
            else:
                memory = SharedMemory(weight_layout)
                opened.callback(memory.close)
                transport: Transport = memory
                if many.weight_sync in ("nccl", "ipc"):
                    transport = CardToCard(many.weight_sync, weight_layout, seconds)
                    setup["transfer"] = many.weight_sync
                placement = GPUPlacement.here(many.learner_devices, many.devices, many.role_devices)
                setups = [_on_device({**setup, "alive": alive}, number, placement) for number in range(many.replicas)]
                places += [LocalProcess(str(number), setup, memory, transport) for number, setup in enumerate(setups)]
        probe = WeightProbe(model, LIMIT_BFLOAT16 if precision == "bfloat16" else LIMIT)
        sizes = model.config.context, model.config.vocab
        return EnginePool(places, probe, *sizes, seconds=seconds, restarts=many.restarts, closed=opened.pop_all().close)
    raise AssertionError("nothing above is left without a pool")


def _on_device(setup: dict[str, Any], number: int, placement: GPUPlacement) -> dict[str, Any]:
    """Assign a GPU to a replica."""
    return {**setup, "device": f"cuda:{placement.engine(number)}"} if setup["device"].startswith("cuda") else setup


if TYPE_CHECKING:
    _proof: tuple[Callable[..., EnginePlace], ...] = (LocalProcess, Listening)
