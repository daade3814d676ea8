"""Where the engines of a pool come from: processes of this machine, or engines that listen elsewhere."""

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
from posttrain.engines.model_manifest import announced
from posttrain.engines.pool.engine_pool import EnginePool
from posttrain.engines.pool.nccl_transfer import CardToCard
from posttrain.engines.pool.places import Listening, LocalProcess
from posttrain.engines.pool.pool_member import EnginePlace
from posttrain.engines.pool.pool_protocol import read_token
from posttrain.engines.vllm.vllm_engine import (
    cache_bytes,
    dtype_of,
    laid_for_vllm,
    prepare,
    require_vllm,
)
from posttrain.engines.weight_probe import LIMIT, LIMIT_BFLOAT16, WeightProbe
from posttrain.engines.weight_sync import Files, Laid, SharedMemory, Transport
from posttrain.models.json_files import write_json
from posttrain.models.native.kernels import build
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.system.temp_folders import TempFolder

ALIVE_SECONDS = 1.0  # between two signs of life of an engine that works, at most

Kind = Literal["local", "vllm"]


@dataclass(frozen=True)
class Many:
    """Engines of a pool, as the options of a run name them. None: one engine, in the place that its kind has."""

    replicas: int = 0  # processes to start
    addresses: Sequence[str] = ()  # engines that listen
    token: str | None = None  # the file that holds what these want to know
    restarts: int = 5
    folder: Path | None = None  # of weights for engines elsewhere, on a disk that all see
    launch: Literal["local", "ray"] = "local"  # who starts processes, and where
    cpus: float = 1.0  # of a cluster, for each of them
    weight_sync: Literal["copied", "adapter", "nccl", "ipc"] = "copied"  # how weights reach processes of this machine
    rank: int = 0  # of the process whose engines these are

    def __bool__(self) -> bool:
        return bool(self.replicas or self.addresses)

    def of(self, world: World) -> Many:
        """The share of one of the processes of a run. Raises UserError where it has none."""
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
                f"each of {world.size} processes samples with engines of its own: give as many at least (--replicas, "
                "--engines)"
            )
        first = (world.rank - self.replicas) % world.size  # addresses are dealt on where the replicas end
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
    """What an engine has to know, but for what the pool says when it comes; files for it are written into a folder."""
    if kind == "vllm":
        require_vllm()
        eos = prepare(str(folder), model, tokenizer)
    else:
        tokenizer.save(folder)
        write_json(folder / "config.json", announced(model).described())
        eos = model.eos_ids
    cache = cache_bytes(model, slots, dtype_of(precision), cache_gib)
    return {
        "engine": kind, "folder": str(folder), "context": model.config.context, "eos_ids": list(eos), "slots": slots,
        "precision": precision, "cache_gib": cache_gib, "cache_bytes": cache, "threads": threads,
        "compiled": build.used(), "device": str(model.head.device), "backed": announced(model).how_it_runs(),
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
    """Nothing is sampled, and no weights are written to a disk, before some are loaded.

    Raises UserError where one of the engines does not start.
    """
    if many.weight_sync != "copied" and (kind != "vllm" or model.head.device.type != "cuda"):
        raise UserError(f"--weight-sync {many.weight_sync} requires vLLM on GPUs: --engine vllm --device cuda")
    token = read_token(many.token) if many.addresses else b""
    with ExitStack() as opened:
        own = Path(opened.enter_context(TempFolder("engines")))
        alive = min(ALIVE_SECONDS, seconds / 4)
        dtype = dtype_of(precision) if kind == "vllm" else model.head.dtype
        laid = laid_for_vllm(model, dtype) if kind == "vllm" else Laid(model, dtype, named_weights)
        files = Files(many.folder or own / "weights", many.rank, laid)
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
                memory = SharedMemory(laid)
                opened.callback(memory.close)
                transport: Transport = memory
                if many.weight_sync in ("nccl", "ipc"):
                    transport = CardToCard(many.weight_sync, laid, seconds)
                    setup["transfer"] = many.weight_sync
                setups = [_on_device({**setup, "alive": alive}, number) for number in range(many.replicas)]
                places += [LocalProcess(str(number), setup, memory, transport) for number, setup in enumerate(setups)]
        canary = WeightProbe(model, LIMIT_BFLOAT16 if precision == "bfloat16" else LIMIT)
        sizes = model.config.context, model.config.vocab
        return EnginePool(
            places, canary, *sizes, seconds=seconds, restarts=many.restarts, closed=opened.pop_all().close
        )
    raise AssertionError("nothing above is left without a pool")


def _on_device(setup: dict[str, Any], number: int) -> dict[str, Any]:
    """Each replica has a CUDA device of its own, as far as there are enough."""
    if setup["device"].startswith("cuda"):
        return {**setup, "device": f"cuda:{number % torch.cuda.device_count()}"}
    return setup


if TYPE_CHECKING:
    _proof: tuple[Callable[..., EnginePlace], ...] = (LocalProcess, Listening)
