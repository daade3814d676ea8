"""Opens a pool of vLLM servers: processes that the run starts, and servers that run already."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from posttrain.core.protocols import Model
from posttrain.core.seeds import seed_of
from posttrain.core.types import UserError
from posttrain.engines.local.prefix_cache import KEPT_BYTES
from posttrain.engines.model_manifest import HEAD, backbone_of
from posttrain.engines.pool.engine_pool import EnginePool
from posttrain.engines.pool.pool_member import EnginePlace
from posttrain.engines.pool.replicas import ALIVE_SECONDS, Many, placement_of, probe_of
from posttrain.engines.vllm.adapter_sync import AdapterFiles, base_of, rank_for
from posttrain.engines.vllm.gpu_transfer import CardToCard
from posttrain.engines.vllm.server_client import ServedRun
from posttrain.engines.vllm.server_places import GivenServer, OwnServer
from posttrain.engines.vllm.server_setup import ServerSetup, cache_bytes, end_ids, prepare, require_vllm, vllm_layout
from posttrain.engines.weight_sync import Fetched, SharedMemory, Transport, WeightLayout, checksum_of_names
from posttrain.models.gpu_placement import GPUPlacement
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.models.weight_files import write_weights
from posttrain.system.temp_folders import TempFolder


class CheckpointFiles(Fetched):
    """Transport to servers that somebody else has started: a folder for each version, which vLLM itself reads, on a disk
    that both sides see under one path. Its contents are verified by the weight probe alone.
    """

    def __init__(self, folder: Path, rank: int, weight_layout: WeightLayout) -> None:
        self.folder, self.rank, self.weight_layout = folder.absolute(), rank, weight_layout

    def put(self, weights: Any, version: int) -> None:
        """Write a checkpoint. Raises UserError if it cannot be written."""
        decoder, dtype = backbone_of(weights), self.weight_layout.dtype
        stored = [own for own in self.weight_layout.stored if own.name != HEAD or not decoder.tied]
        shapes = {own.name: own.shape for own in stored}
        tensors = ((name, tensor) for name, tensor in decoder.stored_tensors() if name in shapes)  # gathers: once alone
        folder = self.folder / f"weights-{self.rank}-{version}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_weights(shapes, tensors, folder, dtype)
        except OSError as error:
            raise UserError(f"the weights for the servers cannot be written to {folder}: {error}") from error
        self._forget(but=str(folder))
        names, kinds = list(shapes), [str(dtype)] * len(shapes)
        checksum = checksum_of_names(names, kinds, [shapes[name] for name in names])
        self.offer = {"version": version, "checksum": checksum, "folder": str(folder)}

    def close(self) -> None:
        self._forget()

    def _forget(self, but: str = "") -> None:
        if self.offer is not None and self.offer["folder"] != but:
            shutil.rmtree(self.offer["folder"], ignore_errors=True)
        self.offer = None


def open_servers(
    model: Model,
    tokenizer: Tokenizer,
    slots: int,
    precision: str,
    many: Many,
    *,
    cache_gib: float | None,
    seconds: float,
    start_seconds: float = 1800.0,
    seeds: bool = False,
    seed: int = 0,
    sleeps: bool = False,
) -> EnginePool:
    """Open a pool of servers; without `many.replicas` and `many.urls`, of one. Before the first weight sync it cannot
    sample.

    `cache_gib`: limit of a server's cache in GiB; None: what vLLM finds free on GPUs that it has to itself, 4 elsewhere.
    `start_seconds`: timeout of a server's start, in which it may compile. `seeds`: sample each request with its own
    seed. `seed`: from it follow those of the servers, for other requests. `sleeps`: free the memory of GPUs that a
    learner uses too during updates.
    Raises UserError if vLLM is not installed, or a server does not start.
    """
    replicas = many.replicas or int(not many.urls)
    alone, cuda = many.weight_sync == "adapter", on_gpu(model)
    if many.weight_sync in ("nccl", "ipc") and not cuda:
        raise UserError(f"--weight-sync {many.weight_sync} requires GPUs: give --device cuda, or leave it out")
    rank = rank_for(model) if alone else 0
    if replicas:
        require_vllm()
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    with ExitStack() as opened:
        own = Path(opened.enter_context(TempFolder("vllm")))
        read = own / "model"  # by vLLM
        prepare(str(read), base_of(model) if alone else model, tokenizer)
        layout = vllm_layout(base_of(model) if alone else model, dtype)
        run = ServedRun(
            tokenizer, end_ids(model, tokenizer), model.config.context, slots, min(ALIVE_SECONDS, seconds / 8), seeds,
            layout.described,
        )  # fmt: skip
        ours, theirs = _transports(many, layout, own, seconds)
        if replicas:
            opened.callback(ours.close)
        threads = max(1, torch.get_num_threads() // max(1, replicas))
        limit = KEPT_BYTES / 2**30 if cache_gib is None else cache_gib
        cache = cache_bytes(model, slots, dtype, limit, many.gpus)
        transfer = many.weight_sync if many.weight_sync in ("nccl", "ipc") else None
        setup = ServerSetup(str(read), dtype, model.config.context, slots, cache, threads, seed, rank, transfer)
        placement = placement_of(many, model.head.device) if cuda else None
        places: list[EnginePlace] = [GivenServer(url, run, theirs) for url in many.urls]
        for number in range(replicas):
            gpus = () if placement is None else placement.engine_gpus(number, many.gpus)
            if placement is not None:
                check_transfer(transfer, gpus, placement)
            rests = sleeps and placement is not None and placement.shares(gpus)
            whole = cache_gib is None and placement is not None and placement.alone(gpus, max(many.most, replicas))
            own_seed = seed_of(seed, "vLLM", many.rank, number)
            seeded = replace(setup, seed=own_seed, cache_bytes=None if whole else cache)
            places.append(OwnServer(str(number), own, seeded, run, ours, gpus, rests))
        sizes, closed = (model.config.context, model.config.vocab), opened.pop_all().close
        return EnginePool(
            places, probe_of(model, precision), *sizes, seconds=seconds, start_seconds=start_seconds,
            restarts=many.restarts, closed=closed,
        )  # fmt: skip


def on_gpu(model: Model) -> bool:
    return model.head.device.type == "cuda"


def check_transfer(transfer: str | None, gpus: Sequence[int], placement: GPUPlacement) -> None:
    """Raise UserError if vLLM cannot send weights in this way to a server on these GPUs."""
    if transfer == "nccl" and placement.shares(gpus):
        raise UserError(
            "--weight-sync nccl sends weights to other GPUs than the learner's: name some with --engine-devices, or give "
            "--weight-sync ipc"
        )
    here = placement.learner()
    if transfer == "ipc" and tuple(gpus) != (here,):
        raise UserError(
            f"--weight-sync ipc sends weights within one GPU, the learner's: give --engine-devices {here} and servers "
            "of one GPU, or --weight-sync nccl"
        )


def _transports(many: Many, layout: WeightLayout, folder: Path, seconds: float) -> tuple[Transport, Transport]:
    """Return the transports of weights to our own servers, and to those that others have started."""
    shared = (many.folder or folder / "weights").absolute()
    if many.weight_sync in ("nccl", "ipc"):
        direct = CardToCard(many.weight_sync, layout, seconds)
        return direct, direct
    memory = SharedMemory(layout)
    if many.weight_sync == "adapter":
        return AdapterFiles(folder, many.rank, memory), AdapterFiles(shared, many.rank, None)
    return memory, CheckpointFiles(shared, many.rank, layout)


if TYPE_CHECKING:
    _proof: Callable[..., Transport] = CheckpointFiles
