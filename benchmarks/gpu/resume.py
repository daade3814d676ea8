"""A run on the card that is interrupted after two of its four steps and resumed, beside one that is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden
import torch
from equality import random_model
from findings import Findings, Setting
from posttrain_side import leave
from safetensors.torch import load_file
from shapes import SIGNAL
from stepping import known, stepping
from verbs import LEAST

from posttrain.config.training import RL
from posttrain.training.training_run import run_training

STEPS, STOPPED = 4, 2


def resume(setting: Setting, found: Findings) -> None:
    place = setting.run_folder("resume")
    place.mkdir(parents=True, exist_ok=True)
    golden.write_data(place)
    whole = _options(setting, place, random_model(place))
    parted = replace(whole, out=str(place / "parted"))
    run_training(whole)
    with stepping(lambda trained: leave(trained.step.number == STOPPED)), suppress(SystemExit):
        run_training(parted)
    run_training(replace(parted, overwrite=False, resume=True))
    one, other = (_metrics(Path(run.out)) for run in (whole, parted))
    table = found.table(
        f"GRPO, {STEPS} steps, interrupted after {STOPPED} and resumed, compared with the uninterrupted run",
        "step",
        "largest relative difference of metrics",
        "of",
        notes=("With --deterministic; without it CUDA may add in another order each time.",),
    )
    assert one.keys() == other.keys(), "the runs have different metrics"
    for step in range(1, STEPS + 1):
        own = {name: value for (at, name), value in one.items() if at == step}
        differences = {
            name: abs(value - other[step, name]) / max(abs(value), abs(other[step, name]), LEAST)
            for name, value in own.items()
        }
        name = max(differences, key=lambda n: (differences[n], n))
        table.add(step, f"{differences[name]:.1e}", name if differences[name] else "all equal, bit for bit")
        found.figures[f"resume, step {step}: relative difference"] = differences[name]
    weights = [torch.cat([t.flatten().float() for t in _weights(Path(run.out))]) for run in (whole, parted)]
    table.notes.append(f"Weights after the last step differ by at most {(weights[0] - weights[1]).abs().max():.1e}.")


def _options(setting: Setting, place: Path, model: Path) -> RL:
    return RL(
        tasks=str(place / "sums.jsonl"),
        env=SIGNAL,
        model=str(model),
        out=str(place / "whole"),
        overwrite=True,
        quiet=True,
        device=setting.device,
        algorithm="grpo",
        prompts=8,
        group=8,
        max_tokens=12,
        lr=1e-4,
        steps=STEPS,
        save_every=1,
        env_workers=1,
        **known(deterministic=True),
    )


def _metrics(run: Path) -> dict[tuple[int, str], float]:
    rows: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {(row["step"], name): value for row in rows for name, value in row.items() if isinstance(value, int | float)}


def _weights(run: Path) -> Iterator[torch.Tensor]:
    """Those of the newest checkpoint, in the order of their names."""
    newest = max((run / "checkpoints").iterdir(), key=lambda folder: (len(folder.name), folder.name))
    for file in sorted(newest.glob("*.safetensors")):
        tensors = load_file(file)
        yield from (tensors[name] for name in sorted(tensors))
