"""Where the time of an update and of decoding goes on the card, by kind of operation and by kernel."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from findings import Findings, Setting
from sampling import bench_of, wanted_of
from tables import number
from torch.profiler import ProfilerActivity, profile

from posttrain.training.step_profiler import KINDS, OTHER, TOP, by_kind, kernels, kind_of

IDLE = "idle: wall minus busy"


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
    found_kernels = kernels(profiler, setting.cuda)
    spent_by_kind = by_kind(found_kernels)
    busy = sum(spent_by_kind.values())
    spent_on = (number(1000 * s) for s in spent_by_kind.values())
    shares.add(name, number(1000 * wall), *spent_on, number(1000 * (wall - busy)))
    shares.notes.append(f"{name}: {number(1000 * bare)} ms without the profiler.")
    found.figures[f"{name}: busy, share of wall without the profiler"] = busy / bare
    table = found.table(f"The {TOP} kernels of {name}", "kernel", "kind", "ms", "share of busy, %", "launches")
    for kernel, spent, count in found_kernels[:TOP]:
        shown = re.sub(r"\s+", " ", kernel).replace("|", "/")[:110]
        table.add(f"`{shown}`", kind_of(kernel), number(1000 * spent), number(100 * spent / busy), count)


def _seconds(setting: Setting, action: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    action()
    setting.wait()
    return time.perf_counter() - begin
