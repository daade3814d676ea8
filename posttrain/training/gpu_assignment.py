"""The start line that names the GPUs that learn, that sample, and that hold other models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from posttrain.config.training import RL, Training
from posttrain.core.protocols import World
from posttrain.engines.engine_options import EngineOptions
from posttrain.engines.pool.replicas import placement_of
from posttrain.models.gpu_placement import gpus_of_roles


def engine_options(config: RL, folder: Any = None) -> EngineOptions:
    """Return the options of the engines of all processes. `folder`: for checkpoints of weights."""
    return EngineOptions(
        config.slots, config.precision, config.replicas, config.engine_cache, config.engine_timeout,
        config.engine_restarts, folder, config.launch, config.replica_cpus, config.weight_sync,
        devices=config.engine_devices, urls=config.engine_url, gpus=config.engine_tensor_parallel,
        seeds=config.engine_seeds, seed=config.seed,
        learner_devices=config.learner_devices, role_devices=gpus_of_roles(config.role_devices),
    )  # fmt: skip


def gpu_assignment(config: Training, world: World, device: torch.device) -> list[str]:
    """Return the line for this machine; [] on a CPU, or where one GPU does everything."""
    if device.type != "cuda":
        return []
    roles = gpus_of_roles(config.role_devices)
    placement = placement_of(EngineOptions(learner_devices=config.learner_devices, role_devices=roles), device)
    gpus_of = {"learn": {placement.learner(place) for place in range(placement.learners)}}
    if isinstance(config, RL):
        gpus_of["sample"] = set(_sampling(config, world, device)) if _apart(config) else gpus_of["learn"]
    gpus_of |= {role: set(gpus_of_roles({role: named})) for role, named in config.role_devices.items()}
    if len(set().union(*gpus_of.values())) < 2:
        return []
    return [f"GPUs: {', '.join(_said(what, gpus) for what, gpus in gpus_of.items() if gpus)}"]


def _apart(config: RL) -> bool:
    """Return whether engines are in processes of their own."""
    return config.engine != "local" or bool(config.replicas)


def _sampling(config: RL, world: World, device: torch.device) -> Iterator[int]:
    """Yield the GPUs of the engines that the processes of this machine start here."""
    options = engine_options(config)
    if options.launch == "ray":
        return
    placement = placement_of(options, device)
    for place in range(placement.learners):
        count = len(range(place, options.replicas, world.size)) if options.pooled else 1
        for number in range(count):
            yield from placement.at(place).engine_gpus(number, options.gpus)


def _said(what: str, gpus: Iterable[int]) -> str:
    numbers = sorted(gpus)
    verb = what + "s" * (len(numbers) == 1) if what in ("learn", "sample") else what
    return f"{_ranges(numbers)} {verb}"


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers as the options take them, with neighbours as a range: "0 2-4"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
