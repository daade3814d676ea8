"""A policy that writes several programs and chooses which to submit: the worth of its choice beside other ways to choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments import coder
from experiments.code_rl import TEACHING, School, bars, practised, prepare
from experiments.experiment import Comparison, Experiment, Finding, Numbers, Say, Settings, over_seeds
from experiments.figure import Panel
from experiments.harness import Curve, band
from posttrain.core.types import Invalid

CHOOSERS = {"outcomes shown": "true", "code alone": "false"}
"""Chooser -> whether it is told which of its programs pass the example."""

CHOSEN = ("chosen", "random", "filtered", "best", "readable")
WAYS = {"random": "a random one", "filtered": "the first that passes the example", "chosen": "the policy's choice",
        "best": "a right one, if there is any"}  # fmt: skip


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    school = prepare(seed, settings, coder.choosing_policy(settings, folder.parent))
    return {kind: chooser(school, kind, folder, seed, settings, say) for kind in settings["choosers"]}


def chooser(school: School, kind: str, folder: Path, seed: int, settings: Settings, say: Say) -> Numbers:
    """The submissions of a policy that chooses among its own programs, before and after it has learned to.

    Its programs are not learned from, so that what changes is the choice; its reward is what that earns over a random one.
    """
    env = f"code-choice,candidates={settings['candidates']},outcomes={CHOOSERS[kind]}"
    taught = f"{env},learn_writing=false,over_random=true"
    options = {name: settings[name] for name in ("steps", "prompts", "group", "lr")} | {"algorithm": "grpo"}
    before = chosen(school.start, school, env, seed, settings)
    metrics = [f"reward/{name}" for name in CHOSEN]
    checkpoint, curves = practised(school, taught, folder / kind.replace(" ", "-"), seed, options, metrics)
    after = chosen(checkpoint, school, env, seed, settings)
    told = ", ".join(f"{words} {after[name]:.3f}" for name, words in WAYS.items())
    say(f"  seed {seed}, {kind}: the choice was {before['chosen']:.3f}; now {told}")
    return {"before": before, "after": after, "curves": curves}


def chosen(checkpoint: str, school: School, env: str, seed: int, settings: Settings) -> Numbers:
    """Means over episodes with held-out tasks: what the choice earns, and what others would have earned."""
    rollouts = coder.play(checkpoint, school.held_out, env, seed, settings["samples"])
    assert not any(isinstance(r.reward, Invalid) for r in rollouts), "the references pass their tests"
    return {name: sum(r.rewards[name] for r in rollouts) / len(rollouts) for name in CHOSEN}


# -- conclusions -------------------------------------------------------------------------------------------------------


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    rows, comparisons = [], []
    for kind in settings["choosers"]:
        for when in ("before", "after"):
            own = [n[kind][when] for n in numbers.values()]
            each = " ".join(f"{o['chosen']:.3f}" for o in own)
            rows.append(
                [f"{kind}, {when}", *(str(over_seeds([o[name] for o in own])) for name in (*WAYS, "readable")), each]
            )
        after = [n[kind]["after"] for n in numbers.values()]
        for other in ("random", "filtered"):
            gap = over_seeds([a["chosen"] - a[other] for a in after])
            comparisons.append(Comparison(f"{kind}: the choice minus {WAYS[other]}", gap, at_least=0.0))
        learned = [_gain(n[kind]["after"]) - _gain(n[kind]["before"]) for n in numbers.values()]
        words = f"{kind}: the choice minus {WAYS['random']}, after minus before"
        comparisons.append(Comparison(words, over_seeds(learned), at_least=0.0))
    return Finding(
        ("chooser", *WAYS.values(), "readable", "the policy's choice, each seed"),
        rows,
        comparisons,
        _panels(numbers, settings["choosers"]),
        ["All seeds begin with the same imitation; tasks, held-out tasks and samples differ."],
    )


def _gain(figures: Mapping[str, float]) -> float:
    return figures["chosen"] - figures["random"]


def _panels(numbers: Mapping[int, Numbers], choosers: Sequence[str]) -> list[Panel]:
    seeds = list(numbers.values())
    ways = [bars(kind, tuple(WAYS), [n[kind]["after"] for n in seeds]) for kind in choosers]
    learned = [band(kind, [_course(n[kind]["curves"]) for n in seeds]) for kind in choosers]
    return [
        Panel("Held-out functions, after", "", ways, ("random", "filtered", "chosen", "any right")),
        Panel("Choice minus random one, rollouts", "step", learned),
    ]


def _course(curves: Mapping[str, Curve]) -> Curve:
    pairs = zip(curves["reward/chosen"], curves["reward/random"], strict=True)
    return [None if a is None or b is None else a - b for a, b in pairs]


EXPERIMENT = Experiment(
    "code-choice",
    "A policy that writes several programs, is shown them and says which it submits learns to choose better than at random, "
    "where it is told which pass the example, and where it sees the code alone.",
    "AlphaCode, arXiv 2203.07814, section 4.5, whose filter it is beside; the environment code-choice",
    {**TEACHING, "choice_demonstrations": 7040, "rehearsed": 2000, "heeds": 0.8, "tasks": 2000, "held_out": 100,
     "samples": 1, "steps": 40, "prompts": 8, "group": 4, "lr": 2e-4, "choosers": list(CHOOSERS)},
    measure,
    conclude,
)  # fmt: skip
