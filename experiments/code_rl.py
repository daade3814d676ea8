"""Programs learned by running them: what the reward counts, and an advantage for diverse candidates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import coder, functions
from experiments.experiment import Comparison, Experiment, Finding, Numbers, Say, Settings, over_seeds
from experiments.figure import Panel, Series
from experiments.harness import Arena, Curve, band, checkpoint_of, learn
from posttrain.core.types import Env, Task, UserError

START, SHARE, ALL, PASS = "start", "GRPO, share of tests", "GRPO, all or nothing", "pass@k advantage"
WRITERS = (START, SHARE, ALL, PASS)
GATE = (0.02, 0.8)
"""The start's pass@1 has to lie between: below, no group has a right program; above, there is nothing to learn."""

METRICS = ("reward", "reward/right", "reward/share", "reward/example", "entropy", "length", "grad_norm")


@dataclass(frozen=True)
class School:
    """The inputs of a seed."""

    practice: list[Task]
    held_out: list[Task]
    start: str


def prepare(seed: int, settings: Settings, start: str) -> School:
    """Functions to practise and functions held out, of compositions that the start has not been shown."""
    practice = functions.tasks("practised", settings["tasks"], seed, settings["vague"])
    return School(practice, functions.tasks("held out", settings["held_out"], seed, settings["vague"]), start)


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    start = coder.starting_policy(settings, folder.parent)
    school = prepare(seed, settings, start)
    arms: Numbers = {START: coder.examined(start, school.held_out, seed, settings)}
    gate(arms[START]["pass@1"])
    say(f"  seed {seed}, start: held-out pass@1 {arms[START]['pass@1']:.3f}, pass@8 {arms[START]['pass@8']:.3f}")
    for arm, reward, algorithm in (
        (SHARE, coder.share, "grpo"), (ALL, coder.every, "grpo"), (PASS, coder.every, "pass-at-k"),
    ):  # fmt: skip
        checkpoint, curves = trained(school, reward, algorithm, folder / named(arm), seed, settings)
        arms[arm] = {**coder.examined(checkpoint, school.held_out, seed, settings), "curves": curves}
        say(f"  seed {seed}, {arm}: held-out pass@1 {arms[arm]['pass@1']:.3f}, pass@8 {arms[arm]['pass@8']:.3f}")
    return {"arms": arms}


def gate(found: float) -> None:
    """Raises UserError where the start is too bad, or too good, to learn from its own programs."""
    low, high = GATE
    if not low <= found <= high:
        raise UserError(
            f"the start's held-out pass@1 is {found:.3f}, and must lie from {low:g} to {high:g}: change "
            "--settings.demonstrations or --settings.slips"
        )


def named(arm: str) -> str:
    """An arm as a folder."""
    return arm.replace(",", "").replace(" ", "-").replace("@", "-at-")


def trained(
    school: School, reward: coder.Scored, algorithm: str, out: Path, seed: int, settings: Settings
) -> tuple[str, dict[str, Curve]]:
    """The checkpoint and the curves of a run. The arms differ in reward and advantage, and in nothing else."""
    chosen = {name: settings[name] for name in ("steps", "prompts", "group", "lr")}
    own = {"advantage_k": settings["k"]} if algorithm == "pass-at-k" else {}
    return practised(school, reward, out, seed, {**chosen, **own, "algorithm": algorithm}, METRICS)


def practised(
    school: School,
    env: Env | coder.Scored | str,
    out: Path,
    seed: int,
    options: Mapping[str, Any],
    metrics: Sequence[str],
) -> tuple[str, dict[str, Curve]]:
    """The checkpoint and these metrics of a run of reinforcement learning."""
    always: dict[str, Any] = {
        "aggregate": "token-mean",
        "kl": 0.0,
        "minibatches": 1,
        "betas": (0.9, 0.95),
        "warmup": 10,
    }
    run = learn(Arena(school.practice, env, school.start), out, seed, **always, max_tokens=coder.LONGEST, **options)
    return checkpoint_of(run), {m: [line.get(m) for line in run.metrics if line["step"] > 0] for m in metrics}


# -- conclusions -------------------------------------------------------------------------------------------------------

SHOWN = {
    **{f"pass@{k}": f"pass@{k}" for k in coder.PASSES},
    "filtered@8": "first of 8 that passes the example",
    "clustered@8": "largest cluster of those of 8",
    "share": "share of tests",
    "told": "pass@1, all told",
    "open": "pass@1, a number left open",
    "only example": "passes the example alone",
    "different": "different programs",
    "constant": "constant programs",
}


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    seeds = [n["arms"] for n in numbers.values()]
    rows = [[arm, *(str(over_seeds([s[arm].get(name, math.nan) for s in seeds])) for name in SHOWN),
             " ".join(f"{s[arm]['pass@1']:.3f}" for s in seeds), " ".join(f"{s[arm]['pass@8']:.3f}" for s in seeds)]
            for arm in WRITERS]  # fmt: skip

    def beyond(arm: str, other: str, name: str) -> Comparison:
        gap = over_seeds([s[arm][name] - s[other][name] for s in seeds])
        return Comparison(f"{SHOWN[name]}: {arm} minus {other}", gap, at_least=0.0)

    def submitted(arm: str) -> Comparison:
        gap = over_seeds([s[arm]["clustered@8"] - s[arm]["pass@1"] for s in seeds])
        return Comparison(f"{arm}: {SHOWN['clustered@8']} minus pass@1", gap, at_least=0.0)

    comparisons = [
        *(beyond(arm, START, "pass@1") for arm in (SHARE, ALL, PASS)),
        beyond(ALL, SHARE, "pass@1"),
        beyond(PASS, ALL, "pass@8"),
        beyond(PASS, ALL, "clustered@8"),
        beyond(ALL, PASS, "pass@1"),
        submitted(ALL),
        submitted(PASS),
    ]
    columns = ("arm", *SHOWN.values(), "pass@1 of each seed", "pass@8 of each seed")
    return Finding(columns, rows, comparisons, _panels(numbers), NOTES)


def _panels(numbers: Mapping[int, Numbers]) -> list[Panel]:
    seeds = list(numbers.values())

    def course(metric: str, title: str) -> Panel:
        return Panel(title, "step", [band(a, [n["arms"][a]["curves"][metric] for n in seeds]) for a in WRITERS[1:]])

    held_out = ("pass@1", "pass@4", "pass@8", "filtered@8", "clustered@8")
    series = [bars(arm, held_out, [n["arms"][arm] for n in seeds]) for arm in WRITERS]
    passes = Panel("Held-out functions", "", series, held_out)
    return [
        course("reward/right", "All hidden tests pass, rollouts"),
        course("entropy", "Entropy, nats per token"),
        passes,
    ]


def bars(label: str, names: Sequence[str], seeds: Sequence[Mapping[str, float]]) -> Series:
    """A bar for each of these figures: its mean over the seeds, with an interval where there are several."""
    found = [over_seeds([own[name] for own in seeds]) for name in names]
    ends = ([e.low for e in found], [e.high for e in found]) if len(seeds) > 1 else ((), ())
    return Series(label, range(len(names)), [e.mean for e in found], *ends)


NOTES = (
    "A program is constant if it passes some hidden test and gives the same on five further inputs; it passes the example "
    "alone if it fails a hidden test. pass@k is the unbiased estimate from the samples of each task. All seeds begin with "
    "the same imitation; tasks, held-out tasks and samples differ.",
)

TEACHING: Settings = {
    "hidden": 128, "layers": 3, "demonstrations": 20000, "demonstrated_choices": 800, "imitation_lr": 2e-3, "vague": 0.4,
    "slips": 0.2, "reads": 0.3, "candidates": 4,
}  # fmt: skip
"""The settings that determine the start."""

EXPERIMENT = Experiment(
    "code-rl",
    "A policy learns to write programs from what their tests say. Rewarding all tests or nothing gains more than rewarding "
    "the share that passes; rewarding one right program among any k keeps candidates diverse, so that more is right after "
    "they are filtered by an example.",
    "AlphaCode, arXiv 2203.07814, sections 4.5 and 4.6; Pass@k training, arXiv 2508.10751",
    {**TEACHING, "tasks": 2000, "held_out": 80, "samples": 16, "steps": 50, "prompts": 8, "group": 16, "lr": 3e-4, "k": 4},
    measure,
    conclude,
)  # fmt: skip
