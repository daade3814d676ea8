"""The message for a GPU or a machine whose memory is full: what takes it, and which options take less."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from posttrain.config.training import RL, Training
from posttrain.core.types import UserError
from posttrain.models.free_memory import ALLOCATOR, in_gib

HOST = "DefaultCPUAllocator"  # in torch's words for a tensor that does not fit into the memory of the machine
FRAGMENTS = 1.0  # GiB that torch keeps in pieces too small for a tensor, from which on larger pieces may help


@contextmanager
def full_memory_in_words(config: Training) -> Iterator[None]:
    """Context in which full memory is a UserError with exit code 1: a restarted run may get further."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and HOST not in str(error):
            raise
        full = UserError(_message(config, str(error)))
        full.code = 1
        raise full from error


def _message(config: Training, told: str) -> str:
    if HOST in told or not told:
        size = re.search(r"allocate (\d+) bytes", told)
        more = f": there is no room for {in_gib(int(size[1]))} more" if size else ""
        return f"the machine's memory is full{more}; try {', '.join(_ways(config, told))}"
    found = re.search(r"Tried to allocate ([\d.]+ \wiB)\. (GPU \d+) has a total capacity of ([\d.]+ \wiB)", told)
    own = re.search(r"([\d.]+ \wiB) is allocated by PyTorch", told)
    others = [f"{size} of another process" for size in re.findall(r"Process \d+ has ([\d.]+ \wiB) memory in use", told)]
    parts = [*([f"{own[1]} of tensors"] if own else []), *others]
    full = f"{found[2]} has {found[3]} and no room for {found[1]} more" if found else told.partition("\n")[0][:200]
    held = f" ({', '.join(parts)})" if parts else ""
    return f"the GPU's memory is full: {full}{held}; try {', '.join(_ways(config, told))}"


def _ways(config: Training, told: str) -> Iterator[str]:
    """Yield options that take less memory, and are not used yet."""
    own = config.tokens_per_microbatch
    yield "--tokens-per-microbatch " + ("2048 or less" if own is None else f"{max(1, own // 2)}")
    if config.recompute != "layers":
        yield "--recompute layers"
    if not (config.in_parts or config.context_parallel > 1) and (
        missing := {"optimizer", "activations"} - {*config.offload}
    ):
        yield f"--offload {' '.join(sorted(missing))}"
    if isinstance(config, RL):
        if config.engine == "local" and not config.replicas:
            yield "fewer --slots"
        yield "less --engine-cache"
    unused = re.search(r"([\d.]+) GiB is reserved by PyTorch but unallocated", told)
    set_already = any("expandable_segments:True" in os.environ.get(name, "") for name in ALLOCATOR)
    shared = getattr(config, "weight_sync", "") == "ipc"  # most systems forbid to share such memory
    if unused and float(unused[1]) >= FRAGMENTS and not set_already and not shared:
        yield f"PYTORCH_ALLOC_CONF=expandable_segments:True in the environment, as {unused[1]} GiB are in pieces"
