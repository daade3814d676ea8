"""The small arenas of the experiments that train: sums, models of 0.1 M parameters, runs of some seconds.

Keeps of a run what its experiment needs: some metrics of each step, and figures of whole rollouts, such as the length of
the wrong ones. The runs themselves stay in the seed's folder, to be looked into.
"""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from experiments.experiment import Estimate, Numbers, Say, over_seeds
from experiments.figure import Panel, Series
from posttrain.config.resolve import filled
from posttrain.config.training import RL, SFT
from posttrain.core.intervals import student_interval
from posttrain.core.rollouts import Rollout
from posttrain.core.types import Reply, Task
from posttrain.envs.builtin import arithmetic
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.runs.run_reading import rollout_steps
from posttrain.training.trainer import Run
from posttrain.training.training_run import run_training

Curve = list[float | None]
"""A metric of steps 1, 2, ...; None where it was not measured."""

METRICS = ("accuracy", "entropy", "length", "truncated", "ratio/clipped_high", "grad_norm", "sampler/kl", "sampler/ess",
           "routing/moved")  # fmt: skip
HELD_OUT = "eval/accuracy"
LATE = 0.2  # share of the steps, the last ones, whose mean is called "at the end"
MODEL: dict[str, Any] = {"hidden": 64, "layers": 2, "heads": 4, "tokenizer": "characters"}
QUIET: dict[str, Any] = {"overwrite": True, "threads": 1, "quiet": True, "save_every": 1_000_000, "keep": 1}
FILLER = "."
STRIDE = 3


Noted = Callable[[Sequence[Rollout]], float | None]
"""Computes a figure from the rollouts of a step; None if they have none."""


@dataclass(frozen=True)
class Arena:
    """Tasks to practise on, what scores the replies, and the checkpoint to start from."""

    tasks: Sequence[Task]
    env: str | Callable[..., Any]
    start: str
    unseen: Sequence[Task] = ()  # on which held-out accuracy is measured; (): on some of the tasks, not practised then
    noted: Mapping[str, Noted] = field(default_factory=dict)  # curves of its own


def sums(folder: Path, seed: int, settings: Mapping[str, Any]) -> Arena:
    """Sums of four digits, such as 3+5+2+7=17, and a model that imitation leaves right about half of the time."""
    tasks = arithmetic.tasks(4000, seed, digits=1, operands=4)
    started = imitate(tasks[:2000], folder, seed, context=32, epochs=settings["imitation_epochs"])
    return Arena(tasks, "arithmetic", started)


def counting(folder: Path, seed: int, settings: Mapping[str, Any]) -> Arena:
    """Replies of all lengths in which every token is a decision: 52=581470, each digit 3 more than the one before it.

    The first digit of the prompt is its difficulty: in demonstrations that share of tenths, times `slips`, of the
    digits is drawn at random. They have `shortest` to `longest` digits. The reward is the share of right digits, so
    that length neither helps nor harms.
    """
    rng = random.Random(seed)
    tasks = []
    for number in range(settings["tasks"]):
        hard, first = rng.randrange(10), rng.randrange(10)
        digits = [first]
        for _ in range(rng.randint(settings["shortest"], settings["longest"])):
            slip = rng.random() < settings["slips"] * hard / 10
            digits.append(rng.randrange(10) if slip else (digits[-1] + STRIDE) % 10)
        response = "".join(map(str, digits[1:]))
        tasks.append({"id": str(number), "prompt": f"{hard}{first}=", "response": response})
    context = settings["max_tokens"] + 8
    return Arena(
        tasks, share_of_strides, imitate(tasks, folder, seed, context=context, epochs=settings["imitation_epochs"])
    )


def share_of_strides(task: Task, reply: Reply) -> float:
    """Share of the reply's digits that are 3 more than the one before, modulo 10; an empty reply is worth nothing."""
    digits = [int(c) for c in task["prompt"][1] + reply if c.isdigit()]
    right = [(a + STRIDE) % 10 == b for a, b in pairwise(digits)]
    return sum(right) / len(right) if right else 0.0


def imitate(
    demonstrations: Sequence[Task], folder: Path, seed: int, *, context: int, epochs: float, **model: Any
) -> str:
    """A small model, trained from scratch; returns its checkpoint. `model`: other sizes than those of `MODEL`."""
    config = SFT(
        tasks="generated", out=str(folder / "imitation"), seed=seed, context=context, epochs=epochs, rows=32, lr=3e-3,
        warmup=20, **{**MODEL, **model}, **QUIET,
    )  # fmt: skip
    return checkpoint_of(run_training(config, demonstrations))


class Notes:
    """A hook that follows the curves of an arena's own."""

    def __init__(self, arena: Arena) -> None:
        self._noted = arena.noted
        self.curves: dict[str, Curve] = {name: [] for name in arena.noted}

    def on_step(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Rollout]) -> None:
        for name, noted in self._noted.items():
            self.curves[name].append(noted(rollouts))


def write(path: Path, tasks: Sequence[Task]) -> str:
    """Write the tasks to a file, one per line. Returns its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
    return str(path)


def learn(arena: Arena, out: Path, seed: int, *, hooks: Sequence[Any] = (), **options: Any) -> Run:
    """A run of reinforcement learning in this process. `options`: the fields of `posttrain.config.RL`."""
    always = {
        "tasks": "generated",
        "env": name_of(arena.env),
        "model": arena.start,
        "env_workers": 0,
        "health": "off",
        "success": 1.0,
    }
    config = filled(RL, {**always, "out": str(out), "seed": seed, **QUIET, **options})
    return whole(run_training(config, arena.tasks, None if isinstance(arena.env, str) else arena.env, hooks))


def name_of(env: str | Callable[..., Any]) -> str:
    """The name of what scores the replies, for the record."""
    return env if isinstance(env, str) else env.__qualname__


def whole(run: Run) -> Run:
    """The run, if it was not interrupted: Ctrl-C ends the experiment with it, as half a run is no figure."""
    if run.interrupted:
        raise KeyboardInterrupt
    return run


def checkpoint_of(run: Run) -> str:
    """The folder of the model that a run ended with."""
    assert whole(run).checkpoint is not None
    return str(run.checkpoint)


def practise(
    arena: Arena, folder: Path, arm: str, seed: int, settings: Mapping[str, Any], say: Say, **options: Any
) -> Numbers:
    """One run, for its course: {"curves": metric -> Curve, "held_out": accuracy, before and after}.

    `settings` needs steps, prompts, group, lr, minibatches and max_tokens; `options` are those of `posttrain rl`.
    """
    chosen = {name: settings[name] for name in ("steps", "prompts", "group", "lr", "minibatches", "max_tokens")}
    if arena.unseen:
        chosen |= {"eval_tasks": (write(folder / "unseen.jsonl", arena.unseen),)}
    else:
        chosen |= {"held_out": 0.05}
    common = {"betas": (0.9, 0.95), "warmup": 10, "eval_samples": settings.get("eval_samples", 4), "kl": 0.0}
    notes, begin = Notes(arena), time.perf_counter()
    run = learn(arena, folder / arm.replace(" ", "-"), seed, hooks=[notes], **{**chosen, **common, **options})
    metrics = run.metrics
    curves: dict[str, Curve] = {m: [line.get(m) for line in metrics if line["step"] > 0] for m in METRICS}
    curves |= from_rollouts(run.path) | notes.curves
    evaluated = [line[HELD_OUT] for line in metrics if line.get(HELD_OUT) is not None]
    seconds = time.perf_counter() - begin
    say(f"  seed {seed}, {arm}: held-out accuracy {evaluated[0]:.3f} -> {evaluated[-1]:.3f}, {seconds:.0f} s")
    return {"curves": curves, "held_out": [evaluated[0], evaluated[-1]]}


def from_rollouts(run: Path) -> dict[str, Curve]:
    """Figures of each step that need whole rollouts.

    Mean length of right and of wrong replies, share of groups with a right one, groups whose replies are not all right
    or all wrong, rollouts sampled.
    """
    curves: dict[str, Curve] = {n: [] for n in ("length/right", "length/wrong", "any_right", "informative", "rollouts")}
    for step in rollout_steps(run):
        groups: dict[str, list[bool]] = defaultdict(list)
        lengths: dict[bool, list[int]] = {True: [], False: []}
        for rollout in read_rollouts(run, step, ("group", "reward", "sampled")):
            right = bool(rollout["reward"] and rollout["reward"] >= 1 - 1e-6)
            groups[rollout["group"]].append(right)
            lengths[right].append(rollout["sampled"])
        curves["length/right"].append(float(np.mean(lengths[True])) if lengths[True] else None)
        curves["length/wrong"].append(float(np.mean(lengths[False])) if lengths[False] else None)
        curves["any_right"].append(float(np.mean([any(g) for g in groups.values()])))
        curves["informative"].append(float(sum(any(g) and not all(g) for g in groups.values())))
        curves["rollouts"].append(float(sum(map(len, groups.values()))))
    return curves


# -- reading curves ----------------------------------------------------------------------------------------------------


def mean_of(curve: Curve, first: float, last: float) -> float:
    """Mean over the steps from share `first` to share `last` of the run."""
    part = curve[int(first * len(curve)) : max(int(first * len(curve)) + 1, round(last * len(curve)))]
    values = [v for v in part if v is not None]
    return float(np.mean(values)) if values else float("nan")


def late(curve: Curve) -> float:
    """Mean over the last fifth of the steps."""
    return mean_of(curve, 1 - LATE, 1)


def smooth(curve: Curve) -> np.ndarray:
    """Running mean over a twentieth of the run, centred; gaps are filled by their neighbours."""
    values = np.array([np.nan if v is None else v for v in curve], dtype=float)
    known = np.flatnonzero(~np.isnan(values))
    if not len(known):
        return values
    values = np.interp(np.arange(len(values)), known, values[known])
    window = np.ones(min(len(values), 2 * (len(values) // 40) + 1))
    return np.convolve(values, window, "same") / np.convolve(np.ones_like(values), window, "same")


def steps_to(curve: Curve, target: float) -> int | None:
    """The first step at which the smoothed curve reaches the target; None: it never does."""
    reached = np.flatnonzero(smooth(curve) >= target)
    return int(reached[0]) + 1 if len(reached) else None


def band(label: str, curves: Sequence[Curve]) -> Series:
    """Mean over seeds of the smoothed curves, with a 95% band where there are several."""
    lines = np.stack([smooth(c) for c in curves])
    steps = list(range(1, lines.shape[1] + 1))
    if len(curves) < 2:
        return Series(label, steps, lines[0].tolist())
    low, high = zip(*(student_interval(column) for column in lines.T), strict=True)
    return Series(label, steps, lines.mean(0).tolist(), low, high)


def curves_of(numbers: Mapping[int, Numbers], arm: str, metric: str) -> list[Curve]:
    """The curve of each seed."""
    return [n[arm]["curves"][metric] for n in numbers.values()]


def courses(numbers: Mapping[int, Numbers], arms: Iterable[str], titles: Mapping[str, str]) -> list[Panel]:
    """A panel for each metric, by its title, with a line for each arm."""
    return [
        Panel(title, "step", [band(arm, curves_of(numbers, arm, metric)) for arm in arms])
        for metric, title in titles.items()
    ]


def ends(numbers: Mapping[int, Numbers], arm: str, metric: str) -> Estimate:
    """The metric at the end of the run."""
    return over_seeds([late(c) for c in curves_of(numbers, arm, metric)])


def held_out(numbers: Mapping[int, Numbers], arm: str) -> Estimate:
    """Accuracy on held-out tasks after training."""
    return over_seeds([n[arm]["held_out"][1] for n in numbers.values()])
