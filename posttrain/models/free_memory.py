"""Measures free memory, so that allocations that cannot succeed are refused beforehand, and the memory that was used."""

from __future__ import annotations

import math
import re
import resource
from pathlib import Path

import torch

ALLOCATOR = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)  # variables with settings of torch's, the second one older
MEMINFO = Path("/proc/meminfo")
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))  # of a container


def available_memory(device: torch.device) -> float:
    """Return an upper bound of the bytes that can be allocated on a device; infinity where it is unknown.

    It errs upwards: a processor's counts swap and reclaimable caches, a CUDA device's counts all its memory.
    """
    if device.type == "cuda":
        return float(gpu_memory(device))
    if device.type != "cpu" or not MEMINFO.exists():
        return math.inf
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB", MEMINFO.read_text(), re.MULTILINE))
    room = 1024.0 * (int(found.get("MemAvailable", 0)) + int(found.get("SwapFree", 0))) or math.inf
    for limit in LIMITS:
        if limit.exists() and (text := limit.read_text().strip()).isdigit():
            room = min(room, float(text))
    own = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return room if own == resource.RLIM_INFINITY else min(room, float(own))


def free_memory(device: torch.device) -> float:
    """Return the bytes that are free on a device: of a GPU with those that torch holds for later tensors, of a processor as
    `available_memory`.
    """
    if device.type != "cuda":
        return available_memory(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + held)


def gpu_memory(device: torch.device) -> int:
    """Return the whole memory of a GPU in bytes; 0 for a processor."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this process's tensors had on a GPU since the last call; 0 for a processor."""
    if device.type != "cuda":
        return 0
    most = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return most


def release_cached_memory() -> None:
    """Give the driver the GPU memory that torch keeps for later tensors, so that other processes can have it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def in_gib(size: float) -> str:
    """Format bytes for a reader: "17.3 GiB"."""
    return f"{size / 2**30:,.1f} GiB"
