"""Opens an engine pool of child processes or Ray actors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from posttrain.core.protocols import Model
from posttrain.engines.engine_options import EngineOptions
from posttrain.engines.local.engine_weights import named_weights
from posttrain.engines.model_manifest import backbone_of
from posttrain.engines.pool.engine_pool import EnginePool
from posttrain.engines.pool.places import LocalProcess
from posttrain.engines.pool.pool_member import EnginePlace
from posttrain.engines.weight_probe import LIMIT, LIMIT_BFLOAT16, WeightProbe
from posttrain.engines.weight_sync import SharedMemory, WeightLayout, shared_writer
from posttrain.models.gpu_placement import GPUPlacement
from posttrain.models.json_files import write_json
from posttrain.models.native.kernels import build
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.system.temp_folders import TempFolder

ALIVE_SECONDS = 1.0  # maximal time between two heartbeats of a working engine


def setup_of(model: Model, tokenizer: Tokenizer, folder: Path, options: EngineOptions, threads: int) -> dict[str, Any]:
    """Return the setup of an engine, but for its weights and heartbeat, and write its files into `folder`."""
    tokenizer.save(folder)
    write_json(folder / "config.json", backbone_of(model).described())
    return {
        "folder": str(folder), "context": model.config.context, "eos_ids": list(model.eos_ids),
        "slots": options.slots, "precision": options.precision, "cache_gib": options.cache_gib, "threads": threads,
        "compiled": build.used(), "device": str(model.head.device), "backed": backbone_of(model).how_it_runs(),
        "sharers": 1,
    }  # fmt: skip


def open_pool(model: Model, tokenizer: Tokenizer, options: EngineOptions) -> EnginePool:
    """Open a pool of embedded engines. Before the first weight sync it cannot sample, and no weights are on disk.

    Raises UserError if an engine does not start.
    """
    with ExitStack() as opened:
        own = Path(opened.enter_context(TempFolder("engines")))
        alive = min(ALIVE_SECONDS, options.seconds / 4)
        weight_layout = WeightLayout(model, backbone_of(model).dtype, named_weights)
        ray = options.launch == "ray"
        threads = options.cpus if ray else torch.get_num_threads() / options.replicas
        setup = setup_of(model, tokenizer, own, options, max(1, int(threads)))
        setup |= {"alive": alive, "layout": weight_layout.described}
        places: Sequence[EnginePlace]
        if ray:
            from posttrain.engines.pool.ray_engines import RayPlaces

            cluster = opened.enter_context(closing(RayPlaces(setup, weight_layout, options.cpus)))
            places = cluster.places(options.replicas)
        else:
            memory = shared_writer(SharedMemory(weight_layout), options.world)
            opened.callback(memory.close)
            placement = placement_of(options, model.head.device)
            setups = _on_devices(setup, options.replicas, placement)
            places = [LocalProcess(str(number), setup, memory) for number, setup in enumerate(setups)]
        sizes, closed = (model.config.context, model.config.vocab), opened.pop_all().close
        return EnginePool(
            places, probe_of(model, options.precision), *sizes,
            seconds=options.seconds, restarts=options.restarts, closed=closed,
        )  # fmt: skip
    raise AssertionError("nothing above is left without a pool")


def placement_of(options: EngineOptions, device: torch.device) -> GPUPlacement:
    """Return the placement of a run's engines. `device`: that of this process's learner, perhaps by `--device cuda:2`."""
    found = GPUPlacement.here(options.learner_devices, options.devices, options.role_devices)
    if device.index is None or device.index == found.learner():
        return found
    return replace(found, learner_devices=(device.index,))


def probe_of(model: Model, precision: str) -> WeightProbe:
    """Return the weight probe of a pool."""
    return WeightProbe(model, LIMIT_BFLOAT16 if precision == "bfloat16" else LIMIT)


def _on_devices(setup: dict[str, Any], replicas: int, placement: GPUPlacement) -> list[dict[str, Any]]:
    """Return the setups of replicas, each with its device, and the number of engines that share its memory."""
    if not setup["device"].startswith("cuda"):
        return [{**setup, "sharers": replicas * placement.learners}] * replicas
    devices = [f"cuda:{placement.engine(number)}" for number in range(replicas)]
    return [{**setup, "device": device, "sharers": devices.count(device)} for device in devices]


if TYPE_CHECKING:
    _proof: Callable[..., EnginePlace] = LocalProcess
