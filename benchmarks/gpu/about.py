"""The card, the software, and the card's ceilings as measured here."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from typing import Any

import torch
from findings import DATASHEET, Findings, Setting, ceilings, commit, output_of
from flops import own_shapes, product_peak
from shapes import SHAPES, shape_of
from tables import number

PACKAGES = ("torch", "transformers", "triton", "trl", "vllm", "flash-attn")


def about(setting: Setting, found: Findings) -> None:
    table = found.table("Machine", "", "")
    for name, value in described(setting).items():
        table.add(name, value)
    found.write()
    limits = ceilings(setting)
    found.figures |= limits
    rows = 256 if setting.tiny else 8192
    seconds = 0.02 if setting.tiny else 0.5
    table = found.table("Ceilings", "what", "measured", "over the datasheet's 989 TFLOP/s")
    table.add("product, bfloat16, square of 8,192", _rate(limits["product"]), _share(limits["product"]))
    for name in SHAPES:
        for m, k, n in own_shapes(shape_of(name, setting), rows):
            rate = product_peak([(m, k, n)], torch.bfloat16, setting.device, seconds)
            table.add(f"product, bfloat16, of {name}: [{m:,}, {k:,}] x [{k:,}, {n:,}]", _rate(rate), _share(rate))
            found.write()
    table.add("copy on the device, read and written", f"{number(limits['copy'] / 1e9)} GB/s", "")


def described(setting: Setting) -> dict[str, str]:
    """Machine and software that the figures depend on, by name."""
    found = {"device": "processor", "cores": str(os.cpu_count())}
    if setting.cuda:
        card = torch.cuda.get_device_properties(0)
        found |= {
            "device": card.name,
            "memory": f"{card.total_memory / 1e9:.1f} GB",
            "capability": f"{card.major}.{card.minor}, {card.multi_processor_count} multiprocessors",
            "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "CUDA": str(torch.version.cuda),
        }
    versions = {name: version for name in PACKAGES if (version := _version(name))}
    python: dict[str, Any] = {"Python": platform.python_version()}
    return {**found, **python, **versions, "commit": commit(), "date": time.strftime("%Y-%m-%d %H:%M")}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _rate(rate: float) -> str:
    return f"{number(rate / 1e12)} TFLOP/s"


def _share(rate: float) -> str:
    return f"{100 * rate / DATASHEET:.1f} %"
