"""Rollouts that branch where a tool's answer raises the entropy, against whole rollouts: equal numbers of sampled tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import reader
from experiments.bench import bench
from experiments.experiment import Comparison, Experiment, Finding, Numbers, Say, Settings, over_seeds
from experiments.figure import Panel, Series
from experiments.harness import Arena, late
from experiments.search import searching
from experiments.search_r1 import COMMON, Quiz, examined, prepare
from posttrain.algorithms.policy import PolicyObjective
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.checkpoint import resolve
from posttrain.training.loop import FinishedStep, train

GRPO, ARPO = "GRPO", "ARPO"
ARMS = {GRPO: "grpo", ARPO: "arpo"}
"""The settings of each arm, the only difference between them."""

METRICS = ("accuracy", "length", "branches", "branches/shared")
LONGEST_RUN = 10_000  # steps, which no budget of tokens reaches


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    made = str(resolve(f"{settings['starts']}/seed-{seed}/start")) if settings["starts"] else ""
    quiz = prepare(seed, settings, folder, say, made)
    start = examined(quiz.start, quiz, searching, seed, settings)
    found: Numbers = {"gate": quiz.gate, "start": start, "arms": {}}
    for arm in ARMS:
        found["arms"][arm] = trained(quiz, arm, folder / arm, seed, settings)
        course = " ".join(f"{point['all']:.3f}" for point in found["arms"][arm]["course"])
        say(f"  seed {seed}, {arm}: held-out exact match {start['all']:.3f} -> {course}")
    return found


def trained(quiz: Quiz, arm: str, folder: Path, seed: int, settings: Settings) -> Numbers:
    """Learn until so many tokens are sampled, and be examined on the way: what came of it, and metrics of each step."""
    curves: dict[str, list[float | None]] = {name: [] for name in METRICS}
    course: list[Numbers] = []
    options: dict[str, Any] = {"algorithm": ARMS[arm], "aggregate": "token-mean", "kl": 0.0, "minibatches": 1}
    if arm == ARPO:
        named = {"branch_first": "first", "branch_tokens": "entropy_tokens", "branch_threshold": "threshold"}
        options |= {option: settings[name] for option, name in named.items()}
    sizes = {**settings, "max_tokens": reader.LONGEST}
    sampled = number = 0

    def note(done: FinishedStep) -> bool:
        nonlocal sampled
        sampled += done.step.tokens
        for name, value in done.stats.means().items():
            if name in METRICS:
                curves[name].append(value)
        return sampled >= goal

    with bench(Arena(quiz.practice, searching, quiz.start), seed, sizes, **options) as source:
        for part in range(1, settings["parts"] + 1):
            goal = settings["tokens"] * part / settings["parts"]
            if sampled < goal:
                objective = PolicyObjective(source.algorithm)
                number = train(source.learner, source, objective, [note], first=number + 1, steps=LONGEST_RUN)
            source.learner.weights().save(folder)
            Tokenizer.load(quiz.start).save(folder)
            found = examined(str(folder), quiz, searching, seed, settings)
            course.append({**found, "sampled": sampled, "steps": number})
    return {"course": course, "curves": curves}


# -- conclusions -------------------------------------------------------------------------------------------------------

SHOWN = {"all": "exact match", "one hop": "one hop", "two hops": "two hops", "valid": "valid searches"}


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    seeds = list(numbers.values())
    arms = {arm: [n["arms"][arm] for n in seeds] for arm in ARMS}
    return Finding(
        (
            "arm",
            "tokens sampled",
            "steps",
            *SHOWN.values(),
            "branches per group",
            "share of shared tokens",
            "each seed",
        ),
        [row for arm, own in arms.items() for row in _rows(arm, own)],
        [_beyond(place, arms, settings) for place in range(settings["parts"])],
        _panels(arms),
        _notes(seeds),
    )


def _beyond(place: int, arms: Mapping[str, Sequence[Numbers]], settings: Settings) -> Comparison:
    pairs = zip(arms[ARPO], arms[GRPO], strict=True)
    gap = over_seeds([one["course"][place]["all"] - other["course"][place]["all"] for one, other in pairs])
    tokens = settings["tokens"] * (place + 1) // settings["parts"]
    return Comparison(f"exact match after {tokens:,} tokens: ARPO minus GRPO", gap, at_least=0.0)


def _rows(arm: str, own: Sequence[Numbers]) -> list[list[str]]:
    rows = []
    for place in range(len(own[0]["course"])):
        points = [seed["course"][place] for seed in own]
        shared = [_share(seed, name) for seed in own for name in ("branches", "branches/shared")]
        rows.append([
            arm,
            *(f"{over_seeds([p[name] for p in points]).mean:.0f}" for name in ("sampled", "steps")),
            *(str(over_seeds([p[name] for p in points])) for name in SHOWN),
            f"{over_seeds(shared[0::2]).mean:.2f}",
            f"{over_seeds(shared[1::2]).mean:.2f}",
            " ".join(f"{p['all']:.3f}" for p in points),
        ])  # fmt: skip
    return rows


def _share(seed: Numbers, name: str) -> float:
    """The mean of a metric over the run; 0 where there is none."""
    values = [value for value in seed["curves"][name] if value is not None]
    return sum(values) / len(values) if values else 0.0


def _panels(arms: Mapping[str, Sequence[Numbers]]) -> list[Panel]:
    def line(arm: str, name: str) -> Series:
        points = list(zip(*(seed["course"] for seed in arms[arm]), strict=True))
        sampled = [round(over_seeds([p["sampled"] for p in at]).mean) for at in points]
        over = [over_seeds([p[name] for p in at]) for at in points]
        if len(arms[arm]) < 2:
            return Series(arm, sampled, [e.mean for e in over])
        return Series(arm, sampled, [e.mean for e in over], [e.low for e in over], [e.high for e in over])

    return [
        Panel(f"{what}, held out", "tokens sampled", [line(arm, name) for arm in ARMS]) for name, what in SHOWN.items()
    ]


def _notes(seeds: Sequence[Numbers]) -> list[str]:
    start = over_seeds([n["start"]["all"] for n in seeds])
    ends = (f"{arm} {over_seeds([late(n['arms'][arm]['curves']['accuracy']) for n in seeds])}" for arm in ARMS)
    return [
        f"The start: exact match {start}.",
        f"Rollouts that were right in the last fifth of the steps: {', '.join(ends)}.",
        "Tokens that a branch shares are sampled once, and counted once. Branches and shares are means over the run.",
    ]


EXPERIMENT = Experiment(
    "arpo",
    "Of equally many sampled tokens a policy learns more where rollouts branch behind answers of tools that raise its "
    "entropy than where all of them begin with the prompt.",
    "ARPO, arXiv 2507.19849, sections 3 and 4",
    {
        **{name: value for name, value in COMMON.items() if name not in ("steps", "minibatches", "critic_lr")},
        "starts": "", "tokens": 100_000, "parts": 2, "first": 0.5, "entropy_tokens": 20, "threshold": 0.5,
    },
    measure,
    conclude,
)  # fmt: skip
