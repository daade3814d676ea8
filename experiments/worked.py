"""The arena of worked sums: replies of several lines, checked at their end, and what a run on them leaves.

Four digits are added line by line (`6 4 5 2:`, then `6+4=10`, `10+5=15`, `15+2=17`). The start imitates demonstrators who
add in any order, two or three numbers to a line, and err by one in some lines. The budget cuts off long replies.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.experiment import Numbers, Say, over_seeds
from experiments.figure import Series
from experiments.harness import HELD_OUT, QUIET, Arena, Curve, checkpoint_of, learn
from posttrain.config.inference import Evaluation
from posttrain.config.resolve import filled
from posttrain.config.training import SFT
from posttrain.core.types import Rollout, Task
from posttrain.envs.builtin import worked_sums
from posttrain.training.trainer import Run
from posttrain.training.training_run import run_training
from posttrain.training.verbs.evaluate import evaluate

ENV = "worked-sums"
COURSE = ("accuracy", "entropy", "kl", "length", "truncated", "grad_norm", "updates", "groups/no_signal")
SIZES: Mapping[str, Any] = {
    "numbers": 4, "largest": 6, "tasks": 1100, "unseen": 100, "demonstrators": 4, "long_lines": 0.3, "slips": 0.12,
    "imitation_epochs": 6.0, "imitation_lr": 6e-3, "steps": 50, "prompts": 16, "group": 8, "lr": 5e-4, "max_tokens": 20,
}  # fmt: skip
"""Settings of every experiment in this arena."""


def arena_of(folder: Path, seed: int, settings: Mapping[str, Any]) -> Arena:
    """Tasks to practise on, and a start that imitated demonstrators of them. Seeds change the tasks and the start."""
    tasks = tasks_of(settings["tasks"], seed, settings)
    draw = random.Random(f"demonstrators {seed}")
    shown = [
        {
            "prompt": t["prompt"],
            "response": worked_sums.working(draw, t["numbers"], settings["long_lines"], settings["slips"]),
        }
        for t in tasks
        for _ in range(settings["demonstrators"])
    ]
    learned = {"epochs": settings["imitation_epochs"], "lr": settings["imitation_lr"], "rows": 64, "warmup": 50}
    return Arena(tasks, ENV, imitation(shown, folder / "imitation", seed, hidden=64, layers=2, **learned))


def imitation(shown: Sequence[Task], out: Path, seed: int, **options: Any) -> str:
    """A model that imitates demonstrations, trained from scratch; returns its checkpoint."""
    usual = {"schedule": "linear", "heads": 4, "context": 40, "tokenizer": "characters", **QUIET}
    config = filled(SFT, {"tasks": "generated", "out": str(out), "seed": seed, **usual, **options})
    return checkpoint_of(run_training(config, shown))


def unseen(seed: int, settings: Mapping[str, Any]) -> list[Task]:
    """Tasks of which neither the start nor practice has seen any."""
    return tasks_of(settings["unseen"], seed, settings, held_out=True)


def tasks_of(count: int, seed: int, settings: Mapping[str, Any], held_out: bool = False) -> list[Task]:
    """So many tasks of the size that the settings name."""
    sizes = {"numbers": settings["numbers"], "largest": settings["largest"]}
    return worked_sums.tasks(count, seed, held_out=held_out, **sizes)


def practise(
    arena: Arena, folder: Path, arm: str, seed: int, settings: Mapping[str, Any], say: Say, **options: Any
) -> tuple[Run, Numbers]:
    """One run, and what it leaves: the curves of `COURSE`, held-out accuracies by step, and processor seconds a step.

    `options`: those of `posttrain rl`; they come before the settings.
    """
    held_out, clock = folder / "unseen.jsonl", Clock()
    held_out.write_text("".join(json.dumps(task) + "\n" for task in unseen(seed, settings)), encoding="utf-8")
    chosen = {name: settings[name] for name in ("steps", "prompts", "group", "lr", "max_tokens")}
    common = {"betas": (0.9, 0.95), "warmup": 10, "schedule": "linear", "slots": 512, "eval_tasks": (str(held_out),)}
    run = learn(arena, folder / arm.replace(" ", "-"), seed, hooks=[clock], **{**common, **chosen, **options})
    lines = run.metrics
    curves: dict[str, Curve] = {name: [line.get(name) for line in lines if line["step"] > 0] for name in COURSE}
    evaluated = [[line["step"], line[HELD_OUT]] for line in lines if line.get(HELD_OUT) is not None]
    before, after = evaluated[0][1], evaluated[-1][1]
    say(f"  seed {seed}, {arm}: held-out accuracy {before:.3f} -> {after:.3f}, {clock.each:.2f} s a step")
    return run, {"curves": curves, "evaluated": evaluated, "held_out": [before, after], "seconds": clock.each}


class Clock:
    """A hook that notes this process's time after each step, as a busy machine changes seconds on the wall."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def on_step(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Rollout]) -> None:
        self._times.append(time.process_time())

    @property
    def each(self) -> float:
        """Median processor seconds from one step to the next; not a number of a single step."""
        return float(np.median(np.diff(self._times))) if self._times[1:] else float("nan")


def examined(
    run: Run, seed: int, settings: Mapping[str, Any], *, temperature: float = 1.0, samples: int = 8
) -> dict[str, float]:
    """Accuracy, pass@samples and entropy of the run's last checkpoint on unseen tasks.

    Entropy, nats per token: estimated from what was sampled; 0 for greedy replies.
    """
    config = Evaluation(
        tasks="generated", env=ENV, model=checkpoint_of(run), samples=samples, k=tuple({1, samples}), seed=seed,
        temperature=temperature, max_tokens=settings["max_tokens"], env_workers=0, threads=1,
    )  # fmt: skip
    found = evaluate(config, unseen(seed, settings))
    return {
        "accuracy": found.figures["accuracy"]["mean"],
        f"pass@{samples}": found.figures[f"pass@{samples}"]["mean"],
        "entropy": entropy(found.rollouts),
    }


def through(numbers: Mapping[int, Numbers], arm: str) -> Series:
    """Mean held-out accuracy over the steps of an arm, with a 95% band."""
    steps = [step for step, _ in next(iter(numbers.values()))[arm]["evaluated"]]
    each = [
        over_seeds(list(values))
        for values in zip(*([a for _, a in n[arm]["evaluated"]] for n in numbers.values()), strict=True)
    ]
    if len(numbers) < 2:
        return Series(arm, steps, [e.mean for e in each])
    return Series(arm, steps, [e.mean for e in each], [e.low for e in each], [e.high for e in each])


def entropy(rollouts: Iterable[Rollout]) -> float:
    """Mean negative log-probability of the sampled tokens."""
    logps = [logp for rollout in rollouts for transcript in rollout.transcripts for logp in transcript.logp]
    return 0.0 - float(np.mean(logps))  # never -0
