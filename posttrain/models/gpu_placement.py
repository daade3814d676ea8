"""Decides which GPUs of a machine learn and which sample.

Each process that learns has a GPU of its own, as far as there are enough. Engines in processes of their own take the GPUs
that are left, in turn; where none is left they share those of the learners, each first that of its own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from posttrain.core.types import UserError


@dataclass(frozen=True)
class GPUPlacement:
    """GPUs of one machine, by their numbers among those that CUDA_VISIBLE_DEVICES leaves."""

    gpus: int  # of this machine
    learners: int = 1  # processes of this machine that learn
    place: int = 0  # number of this process among them
    learner_devices: tuple[int, ...] = ()  # GPUs of the learners; empty: the first ones
    engine_devices: tuple[int, ...] = ()  # GPUs of the engines; empty: the others

    @classmethod
    def here(cls, learner_devices: tuple[int, ...] = (), engine_devices: tuple[int, ...] = ()) -> GPUPlacement:
        """Return the placement for this process. Raises UserError for GPUs that are not there, or named twice."""
        gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        for name, devices in (("--learner-devices", learner_devices), ("--engine-devices", engine_devices)):
            if odd := [d for d in devices if not 0 <= d < gpus]:
                there = f"it has {gpus}, from 0 to {gpus - 1}" if gpus else "it has none"
                raise UserError(f"{name} {odd[0]} is no GPU of this machine: {there}")
            if len(set(devices)) < len(devices):
                raise UserError(f"{name} names a GPU twice: {' '.join(map(str, devices))}")
        return cls(gpus, local, int(os.environ.get("LOCAL_RANK", "0")), learner_devices, engine_devices)

    def learner(self, place: int | None = None) -> int:
        """Return the GPU of this process, or of the one in another place."""
        choice = self.learner_devices or range(self.gpus)
        return choice[(self.place if place is None else place) % len(choice)]

    def engine(self, number: int) -> int:
        """Return the GPU of this process's engine of that number: 0, 1, ..."""
        learning = [self.learner(place) for place in range(self.learners)]
        free = [gpu for gpu in range(self.gpus) if gpu not in learning]
        # shared ones in the order of the learners, so that the first engine of each is on its own GPU
        choice = self.engine_devices or free or list(dict.fromkeys([*learning, *range(self.gpus)]))
        return choice[(self.place + number * self.learners) % len(choice)]


def visible_name(gpu: int) -> str:
    """Return the name of a GPU for CUDA_VISIBLE_DEVICES of another process: what that variable calls it here, if set."""
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[gpu].strip() if gpu < len(names) else str(gpu)
