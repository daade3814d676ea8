"""Opens a pool of inference servers: processes that the run starts, and servers that run already."""

from __future__ import annotations

import os
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
from posttrain.engines.engine_options import EngineOptions
from posttrain.engines.local.prefix_cache import KEPT_BYTES
from posttrain.engines.model_manifest import HEAD, backbone_of
from posttrain.engines.pool.engine_pool import EnginePool
from posttrain.engines.pool.pool_member import EnginePlace
from posttrain.engines.pool.replicas import ALIVE_SECONDS, placement_of, probe_of
from posttrain.engines.request import end_ids
from posttrain.engines.servers.adapter_sync import AdapterFiles, adapted_names, base_of, rank_for
from posttrain.engines.servers.routed_layers import RoutedLayers
from posttrain.engines.servers.server_client import ServedRun
from posttrain.engines.servers.server_places import GivenServer, OwnServer
from posttrain.engines.servers.server_setup import (
    ServerSetup,
    cache_bytes,
    prepare,
    require,
    server_layout,
    token_bytes,
)
from posttrain.engines.weight_sync import (
    Fetched,
    SharedMemory,
    Transport,
    WeightLayout,
    checksum_of_names,
    shared_writer,
)
from posttrain.models.free_memory import ALLOCATOR, gpu_memory
from posttrain.models.gpu_placement import GPUPlacement
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.models.weight_files import write_weights
from posttrain.system.temp_folders import TempFolder

# of a GPU; a learner's micro-batches have as much for their activations, which are not there while it samples
RESTING_SHARE = 0.2
START_SECONDS = 1800.0  # timeout of a server's start, in which it may compile


class CheckpointFiles(Fetched):
    """Transport to servers that read checkpoints themselves: a folder for each version, on a disk that both sides see under
    one path. Its contents are verified by the weight probe alone.
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
    kind: type[ServerSetup], model: Model, tokenizer: Tokenizer, options: EngineOptions, sleeps: bool = False
) -> EnginePool:
    """Open a pool of servers; without replicas and URLs in the options, of one. Before the first weight sync it cannot
    sample.

    Without a limit of its cache a server takes what it finds free on GPUs that it has to itself, a fifth of a GPU where it
    sleeps during updates, and 4 GiB elsewhere.
    `sleeps`: free the memory of GPUs that a learner uses too during updates.
    Raises UserError if the program is not installed, or a server does not start.
    """
    replicas = options.replicas or int(not options.urls)
    adapter, cuda = options.weight_sync == "adapter", on_gpu(model)
    if options.transfer and not cuda:
        raise UserError(f"--weight-sync {options.transfer} requires GPUs: give --device cuda, or leave it out")
    rank = rank_for(model, kind) if adapter else 0
    if replicas:
        require(kind)
    dtype = torch.bfloat16 if options.precision == "bfloat16" else torch.float32
    sent = base_of(model) if adapter else model
    with ExitStack() as opened:
        own = Path(opened.enter_context(TempFolder(kind.package)))
        read, eos_ids = own / "model", end_ids(model, tokenizer)  # the servers read it
        prepare(kind, read, sent, tokenizer, eos_ids)
        layout = server_layout(sent, dtype)
        run = ServedRun(
            tokenizer, eos_ids, model.config.context, options.slots,
            min(ALIVE_SECONDS, options.seconds / 8), options.seeds, layout.described, routed := RoutedLayers.of(model),
        )  # fmt: skip
        ours, theirs = _transports(kind, options, layout, own)
        if replicas:
            opened.callback(ours.close)
        threads = max(1, torch.get_num_threads() // max(1, replicas))
        limit = KEPT_BYTES / 2**30 if options.cache_gib is None else options.cache_gib
        cache = cache_bytes(model, options.slots, dtype, limit, options.gpus)
        setup = kind(
            str(read), dtype, model.config.context, options.slots, cache, threads, options.seed, rank, options.transfer,
            options.seeds, token_bytes(model, dtype, options.gpus), adapted_names(model) if adapter else (),
            routed is not None, backbone_of(model).sees,
        )  # fmt: skip
        placement = placement_of(options, model.head.device) if cuda else None
        places: list[EnginePlace] = [GivenServer(url, kind.client, run, theirs) for url in options.urls]
        for number in range(replicas):
            gpus = () if placement is None else placement.engine_gpus(number, options.gpus)
            own_seed, rests = seed_of(options.seed, kind.client.program, options.rank, number), False
            own_setup = replace(setup, seed=own_seed)
            if placement is not None:
                check_transfer(options.transfer, gpus, placement)
                rests = sleeps and placement.shares(gpus)
                if options.cache_gib is None:
                    share = placement, gpus, max(options.most, replicas)
                    own_setup = replace(own_setup, cache_bytes=_cache_of(model, options, dtype, *share, rests, cache))
            places.append(OwnServer(str(number), own, own_setup, run, ours, gpus, rests))
        sizes, closed = (model.config.context, model.config.vocab), opened.pop_all().close
        return EnginePool(
            places, probe_of(model, options.precision), *sizes, seconds=options.seconds, start_seconds=START_SECONDS,
            restarts=options.restarts, closed=closed,
        )  # fmt: skip


def _cache_of(
    model: Model, options: EngineOptions, dtype: torch.dtype, placement: GPUPlacement, gpus: Sequence[int], engines: int,
    rests: bool, otherwise: int,
) -> int | None:  # fmt: skip
    """Return the bytes of the cache of one of the `engines` servers of a run, without a limit in the options."""
    if placement.alone(gpus, engines):
        return None
    if not rests:
        return otherwise
    most = resting_gib(model.head.device) / placement.engines_on(gpus, engines)
    return cache_bytes(model, options.slots, dtype, most, options.gpus)


def resting_gib(device: torch.device) -> float:
    """Return the limit of the caches, in GiB, of servers that free them for the updates of a learner's GPU."""
    return max(KEPT_BYTES, RESTING_SHARE * gpu_memory(device)) / 2**30


def on_gpu(model: Model) -> bool:
    return model.head.device.type == "cuda"


def check_transfer(transfer: str | None, gpus: Sequence[int], placement: GPUPlacement) -> None:
    """Raise UserError if weights cannot be sent in this way to a server on these GPUs."""
    if transfer == "nccl" and placement.shares(gpus):
        raise UserError(
            "--weight-sync nccl sends weights to other GPUs than the learner's: name some with --engine-devices, or give "
            "--weight-sync ipc"
        )
    pieces = [name for name in ALLOCATOR if "expandable_segments:True" in os.environ.get(name, "")]
    if transfer == "ipc" and pieces:
        raise UserError(
            f"--weight-sync ipc shares the learner's memory with servers, which most systems forbid for the expandable "
            f"segments of {pieces[0]}: unset it, or leave --weight-sync out"
        )
    here = placement.learner()
    if transfer == "ipc" and tuple(gpus) != (here,):
        learning = " ".join(str(placement.learner(place)) for place in range(placement.learners))
        raise UserError(
            f"--weight-sync ipc sends weights within one GPU, the learner's: give --engine-devices {learning} and servers "
            "of one GPU, or --weight-sync nccl"
        )


def _transports(
    kind: type[ServerSetup], options: EngineOptions, layout: WeightLayout, folder: Path
) -> tuple[Transport, Transport]:
    """Return the transports of weights to our own servers, and to those that others have started."""
    shared, rank = (options.folder or folder / "weights").absolute(), options.rank
    if options.transfer is not None:
        direct = kind.gpu_transport(options.transfer, layout, options.seconds)
        return direct, direct
    ours: Transport
    if kind.shares_memory:
        ours = shared_writer(SharedMemory(layout), options.world)
    else:
        ours = CheckpointFiles(folder, rank, layout)
    if options.weight_sync == "adapter":
        return AdapterFiles(folder, rank, ours), AdapterFiles(shared, rank, None)
    return ours, CheckpointFiles(shared, rank, layout)


if TYPE_CHECKING:
    _proof: Callable[..., Transport] = CheckpointFiles
