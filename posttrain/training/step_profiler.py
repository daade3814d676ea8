"""Profiles some steps of a run with torch's profiler: a trace of each phase, and a table of time by kind of work."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

TABLE = "profile.md"
KINDS = {
    "attention": r"flash|fmha|sdpa|attention|softmax_warp|_compiled|_joined",
    "matrix products": r"gemm|gemv|cutlass|cublas|nvjet|splitK|mm_|aten::(mm|addmm|bmm)\b",
    "optimizer": r"adam|multi_tensor|foreach",
    "head and likelihood": r"logsumexp|cumsum|scan|sort|searchsorted|argmax|reduce|nll|likelihood|softmax",
    "elementwise, norms": r"triton_|norm|silu|swiglu|rope",
    "copies, gather, scatter": r"memcpy|memset|copy|cat|index|gather|scatter|embedding|fill",
    "other elementwise": r"elementwise|vectorized|mul|add|sub|div|exp|_kernel",
}
"""Kind of work -> pattern of the names of its kernels (on a CPU: of operations); the first match counts."""
OTHER = "other"
TOP = 15  # kernels listed for a phase


class StepProfiler:
    """Profiler of the phases of some steps.

    It writes to `folder` after each phase, and reports the place by `say` after the last.
    """

    def __init__(self, folder: Path, steps: range, learner: Any, say: Callable[[str], None]) -> None:
        """Profile on the learner's device, if it has one."""
        self._folder, self._steps, self._say = folder, steps, say
        self._page: list[str] = []
        self._gpu = getattr(getattr(learner, "device", None), "type", "cpu") == "cuda"

    def phase(self, number: int, name: str) -> AbstractContextManager[None]:
        """Return a context manager that profiles a phase of a step, if the step is one of those requested."""
        return self._profiled(number, name) if number in self._steps else nullcontext()

    @contextmanager
    def _profiled(self, number: int, name: str) -> Iterator[None]:
        from torch.profiler import ProfilerActivity, profile

        self._folder.mkdir(exist_ok=True)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._gpu else [])]
        with profile(activities=activities) as profiler:
            begin = time.perf_counter()
            yield
            if self._gpu:
                torch.cuda.synchronize()
            wall = time.perf_counter() - begin
        profiler.export_chrome_trace(str(self._folder / f"step-{number}-{name}.json.gz"))
        self._page += table(f"step {number}, {name}", wall, kernels(profiler, self._gpu), self._gpu)
        (self._folder / TABLE).write_text("\n".join(self._page), encoding="utf-8")
        if number == self._steps[-1] and name == "update":
            self._say(f"profile: {self._folder / TABLE}; traces for ui.perfetto.dev beside it")


def kernels(profiler: Any, gpu: bool) -> list[tuple[str, float, int]]:
    """Return (name, seconds, launches) of a GPU's kernels, the longest first; on a CPU, of operations."""
    found = []
    for event in profiler.key_averages():
        # rows of operations, and of annotations such as an optimizer's step, include the time of their kernels again
        marked = getattr(event, "is_user_annotation", False) or event.key.startswith("Optimizer.")
        if gpu and (marked or event.device_type.name != "CUDA"):
            continue
        spent = event.self_device_time_total if gpu else event.self_cpu_time_total
        if spent:
            found.append((event.key, spent / 1e6, event.count))
    return sorted(found, key=lambda row: -row[1])


def kind_of(kernel: str) -> str:
    """Return the kind of work of a kernel, by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE)), OTHER)


def by_kind(found: list[tuple[str, float, int]]) -> dict[str, float]:
    """Return the seconds of each kind of work."""
    seconds = dict.fromkeys([*KINDS, OTHER], 0.0)
    for kernel, spent, _ in found:
        seconds[kind_of(kernel)] += spent
    return seconds


def table(title: str, wall: float, found: list[tuple[str, float, int]], gpu: bool) -> list[str]:
    """Return a phase's part of the page, in Markdown: time by kind of work, and the longest kernels."""
    busy = sum(spent for _, spent, _ in found) or 1e-12
    what = "the GPU's kernels" if gpu else "torch's operations (without compiled decoding)"
    lines = [f"## {title}", "", f"{1e3 * wall:.0f} ms, of which {what} took {1e3 * busy:.0f}.", ""]
    lines += ["| kind of work | ms | % |", "|---|---|---|"]
    ordered = sorted(by_kind(found).items(), key=lambda row: -row[1])
    lines += [f"| {kind} | {1e3 * spent:.1f} | {100 * spent / busy:.0f} |" for kind, spent in ordered if spent]
    lines += ["", "| kernel | kind of work | ms | % | launches |", "|---|---|---|---|---|"]
    for kernel, spent, count in found[:TOP]:
        shown = re.sub(r"\s+", " ", kernel).replace("|", "/").replace("`", "'")[:100]
        lines.append(f"| `{shown}` | {kind_of(kernel)} | {1e3 * spent:.1f} | {100 * spent / busy:.0f} | {count} |")
    return [*lines, ""]
