"""Search-R1's table at small scale: a policy that learns when to search and what to ask, beside what does without that."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import reader
from experiments.behaviours import BEHAVIOURS, behaviour, means, said
from experiments.experiment import (
    Comparison,
    Experiment,
    Finding,
    Numbers,
    Say,
    Settings,
    over_seeds,
)
from experiments.figure import Panel
from experiments.harness import Arena, Curve, band, checkpoint_of, late, learn, mean_of, smooth, steps_to
from experiments.ppo_vs_grpo import fall, unrest
from experiments.reader import HOPS
from experiments.search import direct, imitation, retrieved, searching
from experiments.world import drawn_question, path_of
from posttrain.core.rollouts import Rollout
from posttrain.core.types import Env, Task
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.runs.run_reading import rollout_steps

START, DIRECT, RAG = "start, searching", "direct answer", "always retrieve"
NO_SEARCH, REJECTION = "RL without search", "rejection sampling + SFT"
PPO, GRPO = "Search-R1, PPO", "Search-R1, GRPO"
ARMS = (START, DIRECT, RAG, NO_SEARCH, REJECTION, PPO, GRPO)
TRAINED = (NO_SEARCH, PPO, GRPO)
COLLAPSED = 0.5
METRICS = ("accuracy", "length", "entropy", "grad_norm")


@dataclass(frozen=True)
class Quiz:
    """Questions to practise and questions held out, each of a world of its own; the checkpoint that starts."""

    practice: list[Task]
    held_out: list[Task]
    start: str
    gate: Numbers


def prepare(seed: int, settings: Settings, folder: Path, say: Say, start: str = "") -> Quiz:
    """The inputs of a seed. Raises UserError if the reader does not read well enough. `start`: a checkpoint made before.

    Each question has a world of its own, so no fact is in any weights, and none can get there: what is learned can only be
    how to search and to read.
    """
    read = reader.reader(settings, folder.parent, say)
    gate = reader.gate(read, seed)
    say(
        f"  seed {seed}: reader with gold passages, " + ", ".join(f"{hops} {value:.3f}" for hops, value in gate.items())
    )
    start = start or reader.starting_policy(read, folder / "start", seed, settings)
    draw = random.Random(f"questions {seed}")
    tasks = [
        reader.fresh("question", seed, number).task(drawn_question(1 + number % 2, draw))
        for number in range(settings["questions"] + settings["held_out"])
    ]
    return Quiz(tasks[: settings["questions"]], tasks[settings["questions"] :], start, gate)


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    quiz = prepare(seed, settings, folder, say)
    arms: Numbers = {}

    def note(arm: str, checkpoint: str, env: Env, **more: Any) -> None:
        arms[arm] = {**examined(checkpoint, quiz, env, seed, settings), **more}
        say(f"  seed {seed}, {arm}: held-out exact match {arms[arm]['all']:.3f}")

    note(START, quiz.start, searching)
    note(DIRECT, quiz.start, direct)
    note(RAG, quiz.start, retrieved)
    note(REJECTION, imitated(quiz, searching, folder, seed, settings), searching)
    for arm, algorithm, env in ((NO_SEARCH, "grpo", direct), (PPO, "ppo", searching), (GRPO, "grpo", searching)):
        out = folder / arm.replace(",", "").replace(" ", "-")
        run = learn(Arena(quiz.practice, env, quiz.start), out, seed, **options(algorithm, settings))
        note(arm, checkpoint_of(run), env, curves=curves(run.path, run.metrics, quiz))
    return {"gate": quiz.gate, "arms": arms}


def options(algorithm: str, settings: Settings) -> dict[str, Any]:
    """The arms differ in where advantages come from, and in nothing else. Lambda 1 is the paper's."""
    chosen = {name: settings[name] for name in ("steps", "prompts", "group", "lr", "minibatches")}
    own = {"critic_lr": settings["critic_lr"], "gae_lambda": 1.0} if algorithm == "ppo" else {}
    return {
        **chosen, **own, "algorithm": algorithm, "aggregate": "token-mean", "kl": 0.0, "betas": (0.9, 0.95), "warmup": 10,
        "max_tokens": reader.LONGEST,
    }  # fmt: skip


def imitated(quiz: Quiz, env: Env, folder: Path, seed: int, settings: Settings) -> str:
    """Rejection sampling: of so many replies of the start to each question, imitate the right ones, if there are any."""
    rollouts = reader.play(quiz.start, quiz.practice, env, seed, settings["candidates"])
    rows = [row for rollout in rollouts if rollout.reward == 1.0 for row in replies(rollout)]
    if not rows:
        return quiz.start
    return reader.imitate(quiz.start, rows, folder / "rejection", seed, settings["epochs"], settings["imitation_lr"])


def replies(rollout: Rollout) -> list[dict[str, Any]]:
    """A row for each reply of an episode."""
    rows, before = [], ""
    for turn in rollout.turns:
        if turn.kind == "sampled":
            rows.append(imitation(before, turn.text))
        before += turn.text
    return rows


def examined(checkpoint: str, quiz: Quiz, env: Env, seed: int, settings: Settings) -> Numbers:
    """Exact match on the held-out questions, sampled at temperature 1, and what was done to answer them."""
    rollouts = reader.play(checkpoint, quiz.held_out, env, seed, settings["samples"])
    found = {"all": reader.mean_reward(rollouts)}
    for hops, name in HOPS.items():
        found[name] = reader.mean_reward([r for r in rollouts if len(r.task["relations"]) == hops])
    done = [behaviour(path_of(r.task), [(str(t.kind), t.text) for t in r.turns]) for r in rollouts]
    return {**found, "length": sum(r.n_sampled for r in rollouts) / len(rollouts), **means(done)}


def curves(run: Path, metrics: Sequence[Mapping[str, Any]], quiz: Quiz) -> dict[str, Curve]:
    """Of each step: metrics, and what its rollouts did."""
    tasks = {task["id"]: task for task in quiz.practice}
    found: dict[str, Curve] = {name: [line.get(name) for line in metrics if line["step"] > 0] for name in METRICS}
    steps = []
    for step in rollout_steps(run):
        rows = read_rollouts(run, step, ("group", "turns"))
        paths = [path_of(tasks[row["group"].rpartition("#")[0]]) for row in rows]
        steps.append(means(behaviour(path, said(row)) for path, row in zip(paths, rows, strict=True)))
    return {**found, **{name: [step[name] for step in steps] for name in (*BEHAVIOURS, "valid share")}}


# -- conclusions -------------------------------------------------------------------------------------------------------

SHOWN = {"all": "exact match", "one hop": "one hop", "two hops": "two hops", "valid": "valid searches",
         "valid share": "share of searches that are valid", "useful": "useful searches", "refined": "refined queries",
         "decomposed": "decomposed", "verified": "verified", "invented": "own information tags",
         "length": "tokens"}  # fmt: skip


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    seeds = [n["arms"] for n in numbers.values()]
    rows = [[arm, *(str(over_seeds([s[arm][name] for s in seeds])) for name in SHOWN),
             " ".join(f"{s[arm]['all']:.3f}" for s in seeds)] for arm in ARMS]  # fmt: skip

    def beyond(arm: str, other: str, what: str = "all") -> Comparison:
        gap = over_seeds([s[arm][what] - s[other][what] for s in seeds])
        return Comparison(f"{SHOWN[what]}: {arm} minus {other}", gap, at_least=0.0)

    comparisons = [
        *(beyond(GRPO, other) for other in (RAG, NO_SEARCH, REJECTION)),
        *(beyond(PPO, other) for other in (RAG, NO_SEARCH, REJECTION)),
        *(beyond(arm, START, "valid") for arm in (GRPO, PPO)),
        _of_course("accuracy in the first quarter", _early, seeds),
        _of_course("fall from the peak", fall, seeds),
    ]  # fmt: skip
    return Finding(
        ("arm", *SHOWN.values(), "exact match of each seed"),
        rows,
        comparisons,
        _panels(seeds),
        _notes(numbers, settings),
    )


def _of_course(what: str, figure: Callable[[Numbers], float], seeds: Sequence[Numbers]) -> Comparison:
    gap = over_seeds([figure(s[GRPO]) - figure(s[PPO]) for s in seeds])
    return Comparison(f"{what}: GRPO minus PPO", gap, at_least=0.0)


def _early(arm: Numbers) -> float:
    return mean_of(arm["curves"]["accuracy"], 0.0, 0.25)


def _panels(seeds: Sequence[Numbers]) -> list[Panel]:
    named = {"accuracy": "Exact match of the rollouts", "valid": "Valid searches per question", "length": "Tokens sampled",
             "refined": "Refined queries per question", "decomposed": "Share of questions decomposed",
             "verified": "Share of episodes with a search after all was shown"}  # fmt: skip
    return [
        Panel(title, "step", [band(arm, [s[arm]["curves"][metric] for s in seeds]) for arm in TRAINED])
        for metric, title in named.items()
    ]


def _courses(arm: str, seeds: Sequence[Numbers]) -> str:
    """How each behaviour changes over training: means over the seeds."""
    parts = ((0.0, 0.1), (0.4, 0.6), (0.8, 1.0))

    def course(name: str) -> str:
        means = [over_seeds([mean_of(s[arm]["curves"][name], *part) for s in seeds]).mean for part in parts]
        return f"{SHOWN[name]} {' '.join(f'{mean:.2f}' for mean in means)}"

    return ", ".join(course(name) for name in SHOWN if name in seeds[0][arm]["curves"])


def _steadiness(arm: str, seeds: Sequence[Numbers], target: float) -> str:
    """How fast and how steadily an arm climbed."""
    own = [s[arm] for s in seeds]
    accuracy = [each["curves"]["accuracy"] for each in own]
    reached = " ".join(str(steps_to(curve, target)) for curve in accuracy)
    collapsed = sum(late(curve) < COLLAPSED * float(smooth(curve).max()) for curve in accuracy)
    return (
        f"{arm}: accuracy of the rollouts at the end {over_seeds([late(curve) for curve in accuracy])}, steps to {target:g} "
        f"of each seed {reached}, fall from the peak {over_seeds([fall(each) for each in own])}, unrest "
        f"{over_seeds([unrest(each) for each in own])}, entropy at the end "
        f"{over_seeds([late(each['curves']['entropy']) for each in own])}, collapsed seeds {collapsed} of {len(own)}."
    )


def _notes(numbers: Mapping[int, Numbers], settings: Settings) -> list[str]:
    seeds = [n["arms"] for n in numbers.values()]
    gates = [f"{name} {over_seeds([n['gate'][name] for n in numbers.values()])}" for name in HOPS.values()]
    return [
        f"Reader with gold passages given, before any reinforcement: {', '.join(gates)}.",
        *(_steadiness(arm, seeds, settings["target"]) for arm in (PPO, GRPO)),
        f"A seed has collapsed if its accuracy at the end is below {COLLAPSED:g} of its peak.",
        "Per question, in the rollouts of the first tenth, the middle fifth and the last fifth of the steps:",
        *(f"{arm}: {_courses(arm, seeds)}." for arm in (PPO, GRPO)),
        "Published (Qwen2.5-7B base, mean of seven data sets): direct .181, RAG .304, R1 without search .276, rejection "
        "sampling .348, Search-R1 with PPO .431, with GRPO .350.",
    ]  # fmt: skip


COMMON: dict[str, Any] = {
    "reader": "", "reader_hidden": 128, "reader_layers": 4, "lesson_steps": 1600, "practice_steps": 800,
    "questions": 1600, "held_out": 400, "demonstrations": 10000, "imitation_lr": 1e-3, "precise": 0.35, "searches": 0.6,
    "goes_on": 0.5, "asks_again": 0.4, "samples": 2, "steps": 100, "prompts": 16, "group": 8, "minibatches": 1, "lr": 2e-4,
    "critic_lr": 1e-3,
}  # fmt: skip

EXPERIMENT = Experiment(
    "search-r1",
    "A policy that learns by reward alone when to search and what to ask answers more questions than one that is always "
    "given passages, that reasons without a search engine, or that imitates its own right episodes; GRPO climbs faster "
    "than PPO and is less steady.",
    "Search-R1, arXiv 2503.09516, tables 2 and 3, section 5",
    {**COMMON, "candidates": 5, "epochs": 2.0, "target": 0.6},
    measure,
    conclude,
)
