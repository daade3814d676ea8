"""Options that only a GPU can prove: does a run with each end its steps, with which memory, seconds and gradients?"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from findings import Findings, Setting
from shapes import model_folder
from stepping import laps_of
from steps import Work, grpo, sft
from tables import Figure, Table, number

ROUNDS = 2  # measured steps of each
SPARE = 20  # seconds without which a further run is not begun
PLAIN = "as it is"
COLUMNS = (
    "", "s a step", "s, update", "most memory, GB", "estimated, GB", "kept by torch, GB", "pinned memory of the host, GB",
    "first gradient norm, relative difference",
)  # fmt: skip


@dataclass(frozen=True)
class Tried:
    """Options of a run, and why they cannot be tried here; "": they can."""

    options: Mapping[str, Any]
    lacks: str = ""


def options(setting: Setting, found: Findings) -> None:
    away, slim, eight = (_lacks(setting, name) for name in ("", "bitsandbytes", "torchao"))
    rows = Work(8, 1, 200) if setting.tiny else Work(64, 1, 512)
    _each(
        setting, found, f"SFT 1.5B, {rows.prompts} rows of {rows.tokens} tokens", "1.5b", rows,
        {
            "--offload optimizer activations": Tried({"offload": ("optimizer", "activations")}, away),
            "--weights bfloat16": Tried({"weights": "bfloat16"}),
            "--weights bfloat16 --optimizer adamw8bit": Tried({"weights": "bfloat16", "optimizer": "adamw8bit"}, slim),
            "--float8": Tried({"float8": True}, eight),
        },
    )  # fmt: skip
    # a reference on the processor computes a few thousand tokens only
    few, many = (Work(2, 2, 8), Work(4, 4, 8)) if setting.tiny else (Work(4, 4, 64), Work(16, 8, 256))
    _each(
        setting, found, f"GRPO 0.5B with a reference, {few}", "0.5b", few,
        {
            "--offload reference": Tried({"offload": ("reference",)}, away),
            "--role-devices reference=cpu": Tried({"role_devices": {"reference": "cpu"}}),
        },
        settings={"kl": 0.01},
    )  # fmt: skip
    _each(
        setting, found, f"GRPO 0.5B, {many}", "0.5b", many,
        {"--async-steps 1": Tried({"async_steps": 1}), "--recompute layers": Tried({"recompute": "layers"})},
    )  # fmt: skip


def _lacks(setting: Setting, library: str) -> str:
    """Return why options that need a card, and this library, cannot be tried; "": they can."""
    if not setting.cuda:
        return "it needs a card"
    return f"{library} is not installed" if library and not importlib.util.find_spec(library) else ""


def _each(
    setting: Setting, found: Findings, title: str, model: str, work: Work, tried: Mapping[str, Tried], **more: Any
) -> None:
    """Compare runs with an option with the same run without it."""
    table = found.table(title, *COLUMNS)
    table.notes.append(
        f"Medians of {ROUNDS} steps after a discarded first one. Both runs start from the same weights, seeds and data. "
        "Kept by torch: memory of the card at the end of the run, with what fragments waste."
    )
    plain: float | None = None
    for name, one in {PLAIN: Tried({}), **tried}.items():
        if one.lacks or (name != PLAIN and setting.left() < SPARE):
            table.notes.append(f"{name} was not tried: {one.lacks or 'the time of this part is over'}.")
            continue
        with found.trying(f"{title}, {name}"):
            norm = _run(setting, found, table, title, name, model, work, {**more, **one.options}, plain)
            plain = norm if name == PLAIN else plain


def _run(
    setting: Setting, found: Findings, table: Table, title: str, name: str, model: str, work: Work,
    options: dict[str, Any], plain: float | None,
) -> float:  # fmt: skip
    """Make a run, add its row, and return the norm of its first gradient."""
    config = (sft if work.group == 1 else grpo)(setting, model_folder(model, setting), work, **options)
    _forget_pinned(setting)
    laps, memory = laps_of(setting, config, rounds=ROUNDS)
    norm = _first_norm(Path(config.out))
    apart = float("nan") if plain is None else abs(norm - plain) / plain
    table.add(
        name,
        *(Figure.of([lap[phase] for lap in laps]) for phase in ("step", "update")),
        *map(number, (memory.most, memory.estimated, _kept(setting), _pinned(setting))),
        "" if plain is None else f"{apart:.1e}",
    )
    found.figures[f"{title}, {name}: s a step"] = median(lap["step"] for lap in laps)
    found.figures[f"{title}, {name}: GB"] = memory.most
    found.figures[f"{title}, {name}: gradient norm, relative difference"] = apart
    return norm


def _first_norm(run: Path) -> float:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return float(next(row["grad_norm"] for row in rows if row["step"] == 1))


def _kept(setting: Setting) -> float:
    return torch.cuda.memory_reserved() / 1e9 if setting.cuda else float("nan")


def _pinned(setting: Setting) -> float:
    """Return the most memory of the host that torch has pinned since `_forget_pinned`, as torch rounds its blocks."""
    return torch.cuda.host_memory_stats()["allocated_bytes.peak"] / 1e9 if setting.cuda else float("nan")


def _forget_pinned(setting: Setting) -> None:
    if setting.cuda:
        torch.cuda.reset_peak_host_memory_stats()
