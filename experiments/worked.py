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
OF_SET = "eval/mixture/{}/accuracy"  # of several sets of held-out tasks
COURSE = ("accuracy", "entropy", "kl", "length", "truncated", "grad_norm", "updates", "groups/no_signal")
SIZES: Mapping[str, Any] = {
    "numbers": 4, "largest": 6, "tasks": 1100, "unseen": 100, "demonstrators": 4, "long_lines": 0.3, "slips": 0.12,
    "imitation_epochs": 6.0, "imitation_lr": 6e-3, "steps": 50, "prompts": 16, "group": 8, "lr": 5e-4, "max_tokens": 20,
}  # fmt: skip
"""Settings of every experiment in this arena."""

LEFT_TO_RIGHT = {name: value for name, value in SIZES.items() if name != "long_lines"}
"""Settings with demonstrators that add from left to right, which a small model learns to follow; in any order it writes
numbers that the task does not have."""


def arena_of(folder: Path, seed: int, settings: Mapping[str, Any]) -> Arena:
    """Tasks to practise on, and a start that imitated demonstrators of them. Seeds change the tasks and the start."""
    tasks = tasks_of(settings["tasks"], seed, settings)
    return Arena(tasks, ENV, start_of(demonstrations(tasks, seed, settings), folder, seed, settings))


def demonstrations(tasks: Sequence[Task], seed: int, settings: Mapping[str, Any]) -> list[Task]:
    """Return the demonstrations: each demonstrator solves each task once.

    They add in any order, or from left to right where `long_lines` is not among the settings.
    """
    draw = random.Random(f"demonstrators {seed}")

    def response(numbers: Sequence[int]) -> str:
        if "long_lines" in settings:
            return worked_sums.working(draw, numbers, settings["long_lines"], settings["slips"])
        return in_order(draw, numbers, settings["slips"])

    return [
        {"prompt": t["prompt"], "response": response(t["numbers"])}
        for t in tasks
        for _ in range(settings["demonstrators"])
    ]


def in_order(draw: random.Random, numbers: Sequence[int], slips: float) -> str:
    """A working from left to right; each result is wrong by one with probability `slips`."""
    total, lines = numbers[0], []
    for number in numbers[1:]:
        result = total + number + (draw.choice((-1, 1)) if draw.random() < slips else 0)
        lines.append(f"{total}+{number}={result}")
        total = result
    return "\n".join(lines)


def start_of(shown: Sequence[Task], folder: Path, seed: int, settings: Mapping[str, Any], **options: Any) -> str:
    """The checkpoint that all arms of a seed start from. `options`: those of `posttrain sft`."""
    learned = {"epochs": settings["imitation_epochs"], "lr": settings["imitation_lr"], "rows": 64, "warmup": 50}
    return imitation(shown, folder / "imitation", seed, **{"hidden": 64, "layers": 2, **learned, **options})


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
    arena: Arena,
    folder: Path,
    arm: str,
    seed: int,
    settings: Mapping[str, Any],
    say: Say,
    *,
    sets: Mapping[str, Sequence[Task]] | None = None,
    hooks: Sequence[Any] = (),
    **options: Any,
) -> tuple[Run, Numbers]:
    """One run, and what it leaves: the curves of `COURSE`, held-out accuracies by step, and processor seconds a step.

    `sets`: held-out tasks by name, in place of `unseen`; the accuracies of each are then under "sets". `options`: those of
    `posttrain rl`; they come before the settings.
    """
    clock = Clock()
    if sets is None:
        held_out = [write(folder / "unseen.jsonl", unseen(seed, settings))]
    else:
        held_out = [f"{name}={write(folder / f'unseen-{name}.jsonl', tasks)}" for name, tasks in sets.items()]
    chosen = {name: settings[name] for name in ("steps", "prompts", "group", "lr", "max_tokens")}
    common = {"betas": (0.9, 0.95), "warmup": 10, "schedule": "linear", "slots": 512, "eval_tasks": tuple(held_out)}
    run = learn(arena, folder / arm.replace(" ", "-"), seed, hooks=[clock, *hooks], **{**common, **chosen, **options})
    lines = run.metrics
    curves: dict[str, Curve] = {name: [line.get(name) for line in lines if line["step"] > 0] for name in COURSE}
    evaluated = evaluations(lines, HELD_OUT)
    before, after = evaluated[0][1], evaluated[-1][1]
    say(f"  seed {seed}, {arm}: held-out accuracy {before:.3f} -> {after:.3f}, {clock.each:.2f} s a step")
    found = {"curves": curves, "evaluated": evaluated, "held_out": [before, after], "seconds": clock.each}
    if sets is not None:
        found["sets"] = {name: evaluations(lines, OF_SET.format(name)) for name in sets}
    return run, found


def write(path: Path, tasks: Sequence[Task]) -> str:
    """Write the tasks to a file, one per line. Returns its name."""
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
    return str(path)


def evaluations(lines: Sequence[Mapping[str, Any]], metric: str) -> list[list[float]]:
    """[step, value] of a metric, wherever it was measured."""
    return [[line["step"], line[metric]] for line in lines if line.get(metric) is not None]


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
    checkpoint: str, seed: int, settings: Mapping[str, Any], *, temperature: float = 1.0, samples: int = 8
) -> dict[str, float]:
    """Accuracy, pass@samples, entropy and format rate of a checkpoint on unseen tasks.

    Entropy, nats per token: estimated from what was sampled; 0 for greedy replies. Format rate: share of the replies
    that are workings, right or wrong.
    """
    config = Evaluation(
        tasks="generated", env=ENV, model=checkpoint, samples=samples, k=tuple({1, samples}), seed=seed,
        temperature=temperature, max_tokens=settings["max_tokens"], env_workers=0, threads=1,
    )  # fmt: skip
    found = evaluate(config, unseen(seed, settings))
    return {
        "accuracy": found.figures["accuracy"]["mean"],
        f"pass@{samples}": found.figures[f"pass@{samples}"]["mean"],
        "entropy": entropy(found.rollouts),
        "format": float(np.mean([is_working(r.task["numbers"], r.text) for r in found.rollouts])),
    }


def is_working(numbers: Sequence[int], reply: str) -> bool:
    """Whether every line adds numbers that are left, rightly or not, until a single one is left."""
    lines = worked_sums.checked(numbers, reply)
    return all(line.joined for line in lines) and sum(line.joined for line in lines) == len(numbers) - 1


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
