"""Assignment of a machine's GPUs to learners, to models beside the policy, and to engines.

Each learner process gets its own GPU if there are enough. Models with a role of their own (a reference, a critic ...) are
on their learner's GPU unless the user names another, which no learner or engine takes then unless it has to. Engines in
separate processes take the remaining GPUs in turn; if none remains, they share the learners' GPUs, and the first engine of
each learner shares that learner's GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from posttrain.core.types import UserError


@dataclass(frozen=True)
class GPUPlacement:
    """Placement on the GPUs of one machine, numbered within CUDA_VISIBLE_DEVICES."""

    gpus: int  # of this machine
    learners: int = 1  # learner processes on this machine
    place: int = 0  # index of this process among the learners
    learner_devices: tuple[int, ...] = ()  # GPUs of the learners; empty: the first ones
    engine_devices: tuple[int, ...] = ()  # GPUs of the engines; empty: those that no learner and no role uses
    role_devices: tuple[int, ...] = ()  # GPUs of models beside the policy, see `gpus_of_roles`

    @classmethod
    def here(
        cls,
        learner_devices: tuple[int, ...] = (),
        engine_devices: tuple[int, ...] = (),
        role_devices: tuple[int, ...] = (),
    ) -> GPUPlacement:
        """Return the placement for this process. Raises UserError for GPUs that are not there, or named twice."""
        gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        named = {"--learner-devices": learner_devices, "--engine-devices": engine_devices}
        for name, devices in {**named, "--role-devices": tuple(dict.fromkeys(role_devices))}.items():
            if odd := [d for d in devices if not 0 <= d < gpus]:
                there = f"it has {gpus}, from 0 to {gpus - 1}" if gpus else "it has none"
                raise UserError(f"{name} {odd[0]} is not a GPU of this machine: {there}")
            if len(set(devices)) < len(devices):
                raise UserError(f"{name} names a GPU twice: {' '.join(map(str, devices))}")
        return cls(gpus, local, int(os.environ.get("LOCAL_RANK", "0")), learner_devices, engine_devices, role_devices)

    def learner(self, place: int | None = None) -> int:
        """Return the GPU of the learner at this index; None: of this process."""
        others = [gpu for gpu in range(self.gpus) if gpu not in self.role_devices]
        choice = self.learner_devices or others or range(self.gpus)
        return choice[(self.place if place is None else place) % len(choice)]

    def engine(self, number: int) -> int:
        """Return the GPU of one of this process's engines, by its number 0, 1, ..."""
        return self.engine_gpus(number, 1)[0]

    def engine_gpus(self, number: int, count: int) -> tuple[int, ...]:
        """Return the GPUs of one of this process's engines, which needs `count` of them. Raises UserError if there are
        fewer.
        """
        learning = self._learning()
        free = [gpu for gpu in range(self.gpus) if gpu not in (*learning, *self.role_devices)]
        # shared GPUs in the order of the learners, so that the first engine of each learner is on that learner's GPU
        choice = self.engine_devices or free or list(dict.fromkeys([*learning, *range(self.gpus)]))
        if count > len(choice):
            raise UserError(
                f"--engine-tensor-parallel {count}: engines have {len(choice)} GPU{'s' * (len(choice) > 1)} here: name more "
                "with --engine-devices, or lower it"
            )
        first = (self.place + number * self.learners) * count
        return tuple(choice[(first + place) % len(choice)] for place in range(count))

    def shares(self, gpus: Sequence[int]) -> bool:
        """Return whether a learner uses one of these GPUs."""
        return not set(gpus).isdisjoint(self._learning())

    def at(self, place: int) -> GPUPlacement:
        """Return the placement for the learner at this index."""
        return replace(self, place=place)

    def alone(self, gpus: Sequence[int], engines: int) -> bool:
        """Return whether one engine has these GPUs to itself. `engines`: number of engines of each learner."""
        if self.shares(gpus) or not set(gpus).isdisjoint(self.role_devices):
            return False
        return self.engines_on(gpus, engines) == 1

    def engines_on(self, gpus: Sequence[int], engines: int) -> int:
        """Return the number of engines with one of these GPUs. `engines`: of each learner, with as many GPUs each."""
        learners = [self.at(place) for place in range(self.learners)]
        seats = [one.engine_gpus(number, len(gpus)) for one in learners for number in range(engines)]
        return sum(not set(gpus).isdisjoint(seat) for seat in seats)

    def _learning(self) -> list[int]:
        return [self.learner(place) for place in range(self.learners)]


def gpus_of_roles(role_devices: Mapping[str, str]) -> tuple[int, ...]:
    """Return the GPUs that `--role-devices` names, some perhaps more than once."""
    named = (one.strip() for value in role_devices.values() for one in value.split(","))
    return tuple(int(one) for one in named if one.isdecimal())


def working_on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which kernels that are not torch's own run on this device, if it is a GPU: Triton starts them on
    the current one.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def on_this_gpu(begin: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """Return the beginning of a new thread: it takes over the current GPU of this one, then calls `begin`. Threads start
    on GPU 0.
    """
    if not torch.cuda.is_initialized():
        return begin
    gpu = torch.cuda.current_device()

    def begun() -> None:
        torch.cuda.set_device(gpu)
        begin()

    return begun


def visible_name(gpu: int) -> str:
    """Return the entry of this process's CUDA_VISIBLE_DEVICES for a GPU, to be set in another process; if the variable
    is not set, the GPU's number.
    """
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[gpu].strip() if gpu < len(names) else str(gpu)
