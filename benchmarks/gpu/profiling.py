"""Where the time of an update and of decoding goes on the card, by kind of operation and by kernel."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from findings import Findings, Setting
from sampling import bench_of, wanted_of
from tables import number
from torch.profiler import ProfilerActivity, profile

KINDS = {
    "attention": r"flash|fmha|sdpa|attention|softmax_warp",
    "matrix products": r"gemm|gemv|cutlass|cublas|nvjet|splitK|mm_|aten::(mm|addmm|bmm)\b",
    "optimizer": r"adam|multi_tensor|foreach",
    "head and likelihood": r"logsumexp|cumsum|scan|sort|searchsorted|argmax|reduce|nll|likelihood|softmax",
    "copies, gather, scatter": r"memcpy|memset|copy|cat|index|gather|scatter|embedding|fill",
    "elementwise, norms": r"triton_|elementwise|vectorized|norm|silu|mul|add|rope|_kernel",
}
"""Kind of work -> what the names of its kernels (on a processor: operations) hold; the first that fits counts."""
OTHER, IDLE = "other", "idle: wall minus busy"
TOP = 15


def profiling(setting: Setting, found: Findings) -> None:
    bench = bench_of(setting, "0.5b")
    requests, length = (8, 8) if setting.tiny else (64, 64)
    wanted = wanted_of(bench, requests, length)
    updated = wanted_of(bench, requests, 8 if setting.tiny else 512)
    _, completions = bench.sampled(updated)
    batches = bench.laid(updated, completions)
    bench.updated(batches)
    phases: dict[str, Callable[[], Any]] = {
        f"update, {requests} replies of {updated[0][1]} tokens": lambda: bench.updated(batches),
        f"sampling, {requests} replies of {length} tokens": lambda: bench.sampled(wanted),
    }
    shares = found.table("0.5B: where the time goes, ms", "", "wall", *KINDS, OTHER, IDLE)
    shares.notes.append(
        "Kernels by name; each phase was run once before. The profiler itself takes time from the host."
    )
    for name, action in phases.items():
        with found.trying(name):
            _phase(setting, found, shares, name, action)


def _phase(setting: Setting, found: Findings, shares: Any, name: str, action: Callable[[], Any]) -> None:
    action()
    setting.wait()
    bare = _seconds(setting, action)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.cuda else [])]
    with profile(activities=activities) as profiler:
        wall = _seconds(setting, action)
    kernels = _kernels(setting, profiler)
    by_kind = dict.fromkeys([*KINDS, OTHER], 0.0)
    for kernel, spent, _ in kernels:
        by_kind[kind_of(kernel)] += spent
    busy = sum(by_kind.values())
    shares.add(name, number(1000 * wall), *(number(1000 * s) for s in by_kind.values()), number(1000 * (wall - busy)))
    shares.notes.append(f"{name}: {number(1000 * bare)} ms without the profiler.")
    found.figures[f"{name}: busy, share of wall without the profiler"] = busy / bare
    table = found.table(f"The {TOP} kernels of {name}", "kernel", "kind", "ms", "share of busy, %", "launches")
    for kernel, spent, count in kernels[:TOP]:
        shown = re.sub(r"\s+", " ", kernel).replace("|", "/")[:110]
        table.add(f"`{shown}`", kind_of(kernel), number(1000 * spent), number(100 * spent / busy), count)


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE)), OTHER)


def _seconds(setting: Setting, action: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    action()
    setting.wait()
    return time.perf_counter() - begin


def _kernels(setting: Setting, profiler: Any) -> Sequence[tuple[str, float, int]]:
    """(name, seconds, launches) of the device's kernels, the longest first; of a processor's operations."""
    found = []
    for event in profiler.key_averages():
        # rows of operations, and of annotations such as an optimizer's step, repeat the time of the kernels in them
        marked = getattr(event, "is_user_annotation", False) or event.key.startswith("Optimizer.")
        if setting.cuda and (marked or event.device_type != torch.autograd.DeviceType.CUDA):
            continue
        spent = event.self_device_time_total if setting.cuda else event.self_cpu_time_total
        if spent:
            found.append((event.key, spent / 1e6, event.count))
    return sorted(found, key=lambda row: -row[1])
