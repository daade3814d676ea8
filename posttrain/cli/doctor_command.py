"""`posttrain doctor`: versions, devices, compiler, extras, disk and hub of this machine, and the features that work
with them.

Versions come from package metadata. torch is imported only if the system has a GPU, to describe it.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from posttrain import __version__
from posttrain.core.extras import COMPILERS, EXTRAS, install, installed

LEAST_DISK = 1.0  # GiB: with less, no checkpoint fits
LITTLE_DISK = 10.0
SECONDS = 1.5  # for reaching the hub
NEEDED = ("torch", "numpy", "pyarrow", "safetensors", "tokenizers", "jinja2", "cyclopts", "rich")
SHOWN = ("torch", "transformers", "tokenizers", "datasets", "numpy", "pyarrow", "vllm", "sglang")
TORCH = ((2, 11), (2, 16))  # lowest version, and first unsupported one: as in pyproject.toml


class Finding(NamedTuple):
    """A line of the report. `bad`: whether it prevents posttrain from running."""

    name: str
    text: str
    bad: bool = False


def doctor() -> int:
    """Show what this machine has, and what works here; exit code 2 if posttrain cannot run."""
    from posttrain.runs.terminal.output import Output, columns, wrapped

    width = columns(Output(sys.stdout)) or 80
    found = list(findings())
    for name, text, bad in found:
        print(wrapped(f"{name:<12} {'problem: ' if bad else ''}{text}", min(width, 80), 13))
    return 2 if any(finding.bad for finding in found) else 0


def findings() -> Iterator[Finding]:
    """Yield the lines of the report."""
    yield from _versions()
    gpus = _gpus()
    yield Finding("devices", _devices(gpus))
    compiler = _compiler()
    yield Finding("compiler", compiler or "none: plain PyTorch operations, which are slower (apt-get install gcc)")
    yield _threads()
    yield _disk()
    yield Finding("hub", _hub())
    there = [extra for extra, (library, _) in EXTRAS.items() if installed(library)]
    yield Finding("extras", f"{', '.join(there) or 'none'}; not installed:")
    for extra, (library, purpose) in EXTRAS.items():
        if not installed(library):
            yield Finding("", f"{install(extra)}  {purpose}")
    yield from _works(bool(gpus), bool(compiler))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
    except Exception:  # incomplete metadata
        return None


def _versions() -> Iterator[Finding]:
    yield Finding("posttrain", f"{__version__}, in {Path(__file__).parents[1]}")
    old = sys.version_info < (3, 11)
    needs = "; at least 3.11 is needed" if old else ""
    yield Finding("python", f"{platform.python_version()}, {platform.system()} {platform.machine()}{needs}", old)
    for name in SHOWN:
        if (version := _version(name)) is not None:
            fits = name != "torch" or torch_fits(version)
            bounds = "at least {}.{} and below {}.{}".format(*TORCH[0], *TORCH[1])
            yield Finding(name, version if fits else f"{version}; {bounds} is needed", not fits)
    for name in NEEDED:
        if _version(name) is None:
            yield Finding(name, f"not installed: pip install {name}", True)


def torch_fits(version: str) -> bool:
    """Return whether the package supports a version of torch."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and TORCH[0] <= (int(found[1]), int(found[2])) < TORCH[1]


def _gpus() -> list[str]:
    """Return the names of the GPUs that torch sees. torch is imported only if the system has any."""
    shown = Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()
    if not shown or _version("torch") is None:
        return []
    try:
        import torch

        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    except Exception:  # an unsuitable driver
        return []


def _devices(gpus: list[str]) -> str:
    if gpus:
        return f"{len(gpus)} GPU{'s'[: len(gpus) != 1]}: {', '.join(dict.fromkeys(gpus))}"
    if Path("/dev/nvidiactl").exists():
        return "cpu; an NVIDIA GPU is here, and this torch does not see it: install a build with CUDA"
    return "cpu, no GPU"


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def _threads() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS")
    return Finding("threads", f"{cores} cores" + (f", OMP_NUM_THREADS={limit[:20]}" if limit else ""))


def _disk() -> Finding:
    place = Path.cwd()
    free = shutil.disk_usage(place).free / 2**30
    if not os.access(place, os.W_OK):
        return Finding(
            "disk", f"{free:.1f} GiB free, and {place} cannot be written: give runs an --out elsewhere", True
        )
    few = ": little for checkpoints; a model's take three times its size" if free < LITTLE_DISK else ""
    return Finding("disk", f"{free:.1f} GiB free in this folder{few}", free < LEAST_DISK)


def _hub() -> str:
    from posttrain.system.hub import reached

    offline = next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if _set(name)), None)
    if offline:
        return f"offline ({offline} is set): only models and datasets that were downloaded before"
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if reached(address, SECONDS):
        return f"{address[:60]} can be reached"
    return f"{address[:60]} cannot be reached: only models and datasets that were downloaded before"


def _set(name: str) -> bool:
    return os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")


def _works(gpu: bool, compiler: bool) -> Iterator[Finding]:
    """Yield the features that work here, and those that do not."""
    ways = ["training and sampling on the GPU" if gpu else "training and sampling on the CPU"]
    ways.append("compiled inner loops" if compiler or gpu else "no compiled inner loops")
    ways.append("any model of transformers" if installed("transformers") else "native models alone (Llama, Qwen ...)")
    ways += [f"--engine {server}" for server in ("vllm", "sglang") if installed(server)]
    yield Finding("works", "; ".join(ways))
    yield Finding("try it", "posttrain demo")
