"""Two arenas of worked sums, replies of several lines, and what a run on them leaves.

Digits are added line by line (`6 4 5 2:`, then `6+4=10`, `10+5=15`, `15+2=17`). In the first arena the last number is
checked; the start imitates demonstrators who add in any order, two or three numbers to a line, and err by one in some
lines, and the budget cuts off long replies. In the second one, `checked`, every line is checked; demonstrators add from
left to right, and the budget is enough.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.experiment import Finding, Numbers, Say, over_seeds
from experiments.figure import Series
from experiments.harness import (
    HELD_OUT,
    QUIET,
    Arena,
    Curve,
    Notes,
    checkpoint_of,
    courses,
    curves_of,
    ends,
    learn,
    mean_of,
    name_of,
    write,
)
from posttrain.config.inference import Evaluation
from posttrain.config.resolve import filled
from posttrain.config.training import SFT
from posttrain.core.rollouts import Rollout
from posttrain.core.types import OUTCOME, Task
from posttrain.envs.builtin import worked_sums
from posttrain.training.trainer import Run
from posttrain.training.training_run import run_training
from posttrain.training.verbs.evaluate import evaluate

ENV = "worked-sums"
LINES = "lines"  # the curve of `share_of_lines`
OF_SET = "eval/mixture/{}/accuracy"  # of several sets of held-out tasks
COURSE = ("accuracy", "entropy", "kl", "length", "truncated", "grad_norm", "updates", "groups/no_signal")
SIZES: Mapping[str, Any] = {
    "numbers": 4, "largest": 6, "tasks": 1100, "unseen": 100, "demonstrators": 4, "any_order": True, "long_lines": 0.3,
    "slips": 0.12, "imitation_epochs": 6.0, "imitation_lr": 6e-3, "context": 40, "steps": 50, "prompts": 16, "group": 8,
    "lr": 5e-4, "max_tokens": 20, "eval_samples": 1,
}  # fmt: skip
"""Settings of every experiment in the arena whose last number is checked."""

LEFT_TO_RIGHT: Mapping[str, Any] = {**SIZES, "any_order": False, "long_lines": 0.0}
"""Settings with demonstrators that add from left to right, which a small model learns to follow; in any order it writes
numbers that the task does not have."""

CHECKED = "checked"
CHECKED_SIZES: Mapping[str, Any] = {
    **LEFT_TO_RIGHT, "numbers": 5, "largest": 6, "tasks": 4400, "demonstrators": 1, "long_lines": 0.2,
    "imitation_epochs": 10.0, "imitation_lr": 4e-3, "lr": 2e-4, "context": 56, "max_tokens": 36, "eval_samples": 4,
}  # fmt: skip
"""Settings of every experiment in the arena whose every line is checked."""


def arena_of(folder: Path, seed: int, settings: Mapping[str, Any]) -> Arena:
    """Tasks to practise on, and a start that imitated demonstrators of them. Seeds change the tasks and the start."""
    tasks = tasks_of(settings["tasks"], seed, settings)
    start = start_of(demonstrations(tasks, seed, settings), folder, seed, settings)
    return Arena(tasks, ENV, start, unseen(seed, settings), {LINES: share_of_lines})


def opened(
    usual: Callable[[Path, int, Mapping[str, Any]], Arena], folder: Path, seed: int, settings: Mapping[str, Any]
) -> Arena:
    """The arena whose every line is checked where the settings name it, else the usual one.

    The start of a seed is kept beside the experiments' folders, as all of them have the same.
    """
    if settings.get("arena") == CHECKED:
        return replace(arena_of(folder.parents[1] / f"{CHECKED}-starts" / str(seed), seed, settings), env=every_line)
    return usual(folder, seed, settings)


def every_line(task: Task, reply: str) -> float:
    """The reward of `checked`: 1.0 for a working whose every line is right, and so its last number."""
    return float(is_working(task["numbers"], reply, right=True))


def share_of_lines(rollouts: Sequence[Rollout]) -> float | None:
    """Of the replies with the right last number, the share whose every line is right; None without such replies."""
    ended = [r for r in rollouts if worked_sums.reward(r.task, r.text) == {OUTCOME: 1.0}]
    return float(np.mean([every_line(r.task, r.text) for r in ended])) if ended else None


def demonstrations(tasks: Sequence[Task], seed: int, settings: Mapping[str, Any]) -> list[Task]:
    """Return the demonstrations: each demonstrator solves each task once.

    They add in any order, or from left to right.
    """
    draw = random.Random(f"demonstrators {seed}")
    working = worked_sums.working if settings["any_order"] else in_order
    return [
        {"prompt": t["prompt"], "response": working(draw, t["numbers"], settings["long_lines"], settings["slips"])}
        for t in tasks
        for _ in range(settings["demonstrators"])
    ]


def in_order(draw: random.Random, numbers: Sequence[int], long_lines: float, slips: float) -> str:
    """A working from left to right.

    Lines add three numbers with probability `long_lines`, else two; each result is wrong by one with probability `slips`.
    """
    left, lines = list(numbers), []
    while len(left) > 1:
        size = 3 if long_lines and draw.random() < long_lines else 2
        added, left = left[:size], left[size:]
        result = sum(added) + (draw.choice((-1, 1)) if draw.random() < slips else 0)
        lines.append(f"{'+'.join(map(str, added))}={result}")
        left = [result, *left]
    return "\n".join(lines)


def start_of(shown: Sequence[Task], folder: Path, seed: int, settings: Mapping[str, Any], **options: Any) -> str:
    """The checkpoint that all arms of a seed start from. `options`: those of `posttrain sft`."""
    learned = {
        "epochs": settings["imitation_epochs"], "lr": settings["imitation_lr"], "rows": 64, "warmup": 50,
        "context": settings["context"],
    }  # fmt: skip
    return imitation(shown, folder / "imitation", seed, **{"hidden": 64, "layers": 2, **learned, **options})


def imitation(shown: Sequence[Task], out: Path, seed: int, **options: Any) -> str:
    """A model that imitates demonstrations, trained from scratch; returns its checkpoint, which may be from before."""
    usual = {"schedule": "linear", "heads": 4, "tokenizer": "characters", **QUIET}
    asked = [hashlib.sha256(json.dumps(list(shown)).encode()).hexdigest(), seed, options]
    kept = out.with_suffix(".json")
    if kept.exists() and (found := json.loads(kept.read_text(encoding="utf-8")))["asked"] == asked:
        return str(found["checkpoint"])
    config = filled(SFT, {"tasks": "generated", "out": str(out), "seed": seed, **usual, **options})
    checkpoint = checkpoint_of(run_training(config, shown))
    kept.write_text(json.dumps({"asked": asked, "checkpoint": checkpoint}), encoding="utf-8")
    return checkpoint


def unseen(seed: int, settings: Mapping[str, Any]) -> list[Task]:
    """Held-out tasks, of which neither the start nor practice has seen any."""
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
    **options: Any,
) -> tuple[Run, Numbers]:
    """One run, and what it leaves: the curves of `COURSE`, held-out accuracies by step, and processor seconds a step.

    `sets`: held-out tasks by name, in place of the arena's; the accuracies of each are then under "sets". `options`: those
    of `posttrain rl`; they come before the settings.
    """
    clock, notes = Clock(), Notes(arena)
    if sets is None:
        held_out = [write(folder / "unseen.jsonl", arena.unseen)]
    else:
        held_out = [f"{name}={write(folder / f'unseen-{name}.jsonl', tasks)}" for name, tasks in sets.items()]
    chosen = {name: settings[name] for name in ("steps", "prompts", "group", "lr", "max_tokens", "eval_samples")}
    common = {"betas": (0.9, 0.95), "warmup": 10, "schedule": "linear", "slots": 512, "eval_tasks": tuple(held_out)}
    run = learn(arena, folder / arm.replace(" ", "-"), seed, hooks=[clock, notes], **{**common, **chosen, **options})
    lines = run.metrics
    curves: dict[str, Curve] = {name: [line.get(name) for line in lines if line["step"] > 0] for name in COURSE}
    curves |= notes.curves
    evaluated = evaluations(lines, HELD_OUT)
    before, after = evaluated[0][1], evaluated[-1][1]
    say(f"  seed {seed}, {arm}: held-out accuracy {before:.3f} -> {after:.3f}, {clock.each:.2f} s a step")
    found = {"curves": curves, "evaluated": evaluated, "held_out": [before, after], "seconds": clock.each}
    if sets is not None:
        found["sets"] = {name: evaluations(lines, OF_SET.format(name)) for name in sets}
    return run, found


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
    checkpoint: str,
    seed: int,
    settings: Mapping[str, Any],
    *,
    env: str | Callable[..., Any] = ENV,
    temperature: float = 1.0,
    samples: int = 8,
) -> dict[str, float]:
    """Accuracy, pass@samples, entropy and format rate of a checkpoint on unseen tasks.

    Entropy, nats per token: estimated from what was sampled; 0 for greedy replies. Format rate: share of the replies
    that are workings, right or wrong.
    """
    config = Evaluation(
        tasks="generated", env=name_of(env), model=checkpoint, samples=samples, k=tuple({1, samples}), seed=seed,
        temperature=temperature, max_tokens=settings["max_tokens"], success=1.0, env_workers=0, threads=1,
    )  # fmt: skip
    found = evaluate(config, unseen(seed, settings), None if isinstance(env, str) else env)
    return {
        "accuracy": found.figures["accuracy"]["mean"],
        f"pass@{samples}": found.figures[f"pass@{samples}"]["mean"],
        "entropy": entropy(found.rollouts),
        "format": float(np.mean([is_working(r.task["numbers"], r.text) for r in found.rollouts])),
    }


def is_working(numbers: Sequence[int], reply: str, right: bool = False) -> bool:
    """Whether every line adds numbers that are left until a single one is left, rightly or not, or all `right`."""
    lines = worked_sums.checked(numbers, reply)
    added = all(line.joined and (line.right or not right) for line in lines)
    return added and sum(line.joined for line in lines) == len(numbers) - 1


def with_lines(finding: Finding, numbers: Mapping[int, Numbers], drawn: Sequence[str] = ()) -> Finding:
    """The finding with the share of right lines: two columns, whose rows are the arms, a panel and a note.

    As it is where the arena does not note it. `drawn`: the arms of the panel, if not all.
    """
    arms = list(next(iter(numbers.values())))
    if not all(LINES in numbers[seed][arm]["curves"] for seed in numbers for arm in arms):
        return finding
    before = [over_seeds([mean_of(curve, 0, 0) for curve in curves_of(numbers, arm, LINES)]) for arm in arms]
    after = [ends(numbers, arm, LINES) for arm in arms]
    return replace(
        finding,
        columns=[*finding.columns, "right lines of right ends, first step", "at the end"],
        rows=[[*row, str(a), str(b)] for row, a, b in zip(finding.rows, before, after, strict=True)],
        panels=[*finding.panels, *courses(numbers, drawn or arms, {LINES: "Right lines, share of right ends"})],
        notes=[
            "Right lines of right ends: of the rollouts with the right last number, the share whose every line is right, in "
            "the first step, which is the start's, and in the last fifth of the steps.",
            *finding.notes,
        ],
    )


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
