"""Whole steps with `--engine vllm`: weights copied, sent within the card, and adapters alone; where vLLM is installed."""

from __future__ import annotations

import importlib.util
from statistics import median
from typing import Any

from findings import Findings, Setting
from shapes import model_folder
from stepping import laps_of
from steps import Work, grpo
from tables import Figure, number

SPARE = 60  # seconds without which a further server is not started: it compiles


def vllm_runs(setting: Setting, found: Findings) -> None:
    work = Work(4, 4, 8) if setting.tiny else Work(16, 16, 512)
    table = found.table(
        f"GRPO 0.5B, {work}, with --engine vllm on the learner's card", "", "s a step", "s, sampling", "s, weight sync",
        "s, update", "tokens/s", "most memory of the learner, GB",
    )  # fmt: skip
    if not setting.cuda or not importlib.util.find_spec("vllm"):
        table.notes.append("vLLM is not installed here, so no step with --engine vllm was measured.")
        return
    ways: dict[str, dict[str, Any]] = {
        "--weight-sync copied": {},
        "--weight-sync ipc": {"weight_sync": "ipc", "engine_devices": (0,)},
        "--weight-sync adapter --lora 16": {"weight_sync": "adapter", "lora": 16},
        "--weight-sync copied --async-steps 1": {"async_steps": 1},
    }
    for name, options in ways.items():
        if setting.left() < SPARE:
            table.notes.append(f"{name} was not tried: the time of this part is over.")
            continue
        with found.trying(name):
            config = grpo(setting, model_folder("0.5b", setting), work, engine="vllm", **options)
            laps, memory = laps_of(setting, config, rounds=2)
            columns = [
                Figure.of([lap.get(phase, 0.0) for lap in laps]) for phase in ("step", "rollout", "load", "update")
            ]
            speed = Figure.of([lap["tokens"] / lap["step"] for lap in laps])
            table.add(name, *columns, speed, number(memory.most))
            found.figures[f"vLLM, {name}: s a step"] = median(lap["step"] for lap in laps)
