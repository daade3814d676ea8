"""Checking, correcting and length over training, with a tool whose errors a policy cannot unlearn.

An episode is a number that a tool reads off, rightly or wrongly. After each reading the policy writes what it concludes, and
either ends the episode or has the tool read again, at a cost:

    7=7?3=7?3=3.        readings 7, 3, 3; conclusions 7, 7, 3; two checks; the first conclusion was corrected

All episodes begin alike but for the reading, so there is nothing to learn but when to check and what to conclude.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from experiments.experiment import Comparison, Estimate, Experiment, Finding, Numbers, Say, Settings, over_seeds
from experiments.figure import Panel, Series
from experiments.harness import Arena, Curve, band, checkpoint_of, learn
from experiments.search import imitation
from experiments.worked import start_of
from posttrain.config.inference import Evaluation
from posttrain.core.rollouts import Rollout
from posttrain.core.types import OUTCOME, Task, Turn
from posttrain.training.verbs.evaluate import evaluate

PAYS, NEVER, REPEATS = "errs", "never errs", "repeats its error"
ARMS = (PAYS, NEVER, REPEATS)
CHECK, END = "?", "."
VALUES = 10
READINGS = 6  # of an episode at most
_REPLY = re.compile(rf"=(\d)([{CHECK}{END}])", re.ASCII)


# -- the tool ----------------------------------------------------------------------------------------------------------


def tasks_of(arm: str, count: int, seed: int, settings: Settings, held_out: bool = False) -> list[Task]:
    """Values with what the tool reads: each reading is wrong with probability `error`, by any other digit alike.

    Arms have the same values. A tool that repeats its error reads the first reading again and again.
    """
    draw = random.Random(f"readings {seed} {held_out}")
    tasks = []
    for number in range(count):
        value = draw.randrange(VALUES)
        read = [
            (value + (draw.random() < settings["error"]) * draw.randrange(1, VALUES)) % VALUES for _ in range(READINGS)
        ]
        shown = {PAYS: read, NEVER: [value] * READINGS, REPEATS: read[:1] * READINGS}[arm]
        tasks.append(
            {"id": str(number), "prompt": str(shown[0]), "value": value, "readings": shown, "cost": settings["cost"]}
        )
    return tasks


def tool(task: Task) -> Generator[Turn, str, dict[str, float]]:
    """An episode. Its reward is 1 for the right value at the end, less `cost` for each check."""
    checks, value = 0, None
    for place, reading in enumerate(task["readings"]):
        reply = _REPLY.fullmatch((yield Turn(text=str(reading), tool=place > 0, stop=(CHECK, END))))
        if reply is None:
            break
        if reply[2] == END:
            value = int(reply[1])
            break
        checks += 1
    return {OUTCOME: float(value == task["value"]), "checks": -task["cost"] * checks}


@cache
def best(error: float, cost: float, values: int = VALUES, readings: int = READINGS) -> tuple[float, float, float]:
    """Return reward, accuracy and checks of the best policy: what Bayes' rule and backward induction give.

    A state is how often each value was read. A value read k times in n has a probability proportional to
    (1 - error)^k (error / (values - 1))^(n - k).
    """
    other = error / (values - 1)

    @cache
    def onward(seen: tuple[int, ...]) -> tuple[float, float, float]:
        n = sum(seen)
        counts = [*seen, *[0] * (values - len(seen))]
        weights = [(1 - error) ** k * other ** (n - k) for k in counts]
        chances = [weight / sum(weights) for weight in weights]
        ended = (max(chances), max(chances), 0.0)
        if n == readings:
            return ended
        reward, accuracy, checks = -cost, 0.0, 1.0
        for place, (k, chance) in enumerate(zip(counts, chances, strict=True)):
            if next_one := chance * (1 - error) + (1 - chance) * other:
                after = [*counts[:place], k + 1, *counts[place + 1 :]]
                found = onward(tuple(sorted(filter(None, after), reverse=True)))
                reward, accuracy = reward + next_one * found[0], accuracy + next_one * found[1]
                checks += next_one * found[2]
        return max(ended, (reward, accuracy, checks))

    return onward((1,))


def optimum(arm: str, settings: Settings) -> tuple[float, float, float]:
    """Reward, accuracy and checks of the best policy of an arm. Checks of a tool that repeats its error find none."""
    first = (1 - settings["error"],) * 2
    return {PAYS: best(settings["error"], settings["cost"]), NEVER: (1.0, 1.0, 0.0), REPEATS: (*first, 0.0)}[arm]


# -- behaviours --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Episode:
    """Actions of the policy in an episode, read off the texts."""

    readings: Sequence[str]
    conclusions: Sequence[str]  # one for each reading; "" where the reply is none
    checked: Sequence[bool]  # whether the policy had the tool read again after each conclusion


def episode_of(turns: Sequence[tuple[str, str]]) -> Episode:
    """`turns`: origin and text of each, readings and replies in turn."""
    replies = [_REPLY.fullmatch(text) for kind, text in turns if kind == "sampled"]
    readings = [text for kind, text in turns if kind != "sampled"]
    return Episode(readings, [r[1] if r else "" for r in replies], [bool(r and r[2] == CHECK) for r in replies])


def figures_of(rollouts: Sequence[Rollout]) -> dict[str, float | None]:
    """The counts of so many episodes; None where none could show it."""
    episodes = [episode_of([(str(turn.kind), turn.text) for turn in r.turns]) for r in rollouts]
    right = [r.rewards[OUTCOME] == 1 for r in rollouts]
    wrong_at_first = [e.conclusions[0] != str(r.task["value"]) for e, r in zip(episodes, rollouts, strict=True)]
    again: dict[bool, list[bool]] = {True: [], False: []}
    for e in episodes:
        for place in range(1, min(len(e.conclusions), READINGS - 1)):
            again[max(Counter(e.readings[: place + 1]).values()) > 1].append(e.checked[place])
    return {
        "checks": _mean([e.checked[0] for e in episodes]),
        "number": _mean([sum(e.checked) for e in episodes]),
        "corrects": _mean([now for now, wrong in zip(right, wrong_at_first, strict=True) if wrong]),
        "differs": _mean([e.conclusions[-1] != e.conclusions[0] for e in episodes]),
        "unsettled": _mean(again[False]),
        "settled": _mean(again[True]),
        "tokens": _mean([r.n_sampled for r in rollouts]),
        "accuracy": _mean(right),
        "reward": _mean([sum(r.rewards.values()) for r in rollouts]),
    }


FIGURES = {"checks": "share of episodes that check", "number": "checks an episode",
           "corrects": "ends right after a wrong first conclusion", "differs": "last conclusion differs from the first",
           "unsettled": "checks on while no value was read twice", "settled": "checks on after one was",
           "tokens": "tokens sampled", "accuracy": "accuracy", "reward": "reward"}  # fmt: skip
COURSE = ("checks", "corrects", "tokens", "accuracy")


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


class Counts:
    """A hook that counts the rollouts of each step."""

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {name: [] for name in COURSE}

    def on_step(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Rollout]) -> None:
        found = figures_of(list(rollouts))  # a hook gets a copy of a rollout whenever it asks for it
        for name, curve in self.curves.items():
            curve.append(found[name])


# -- the base ----------------------------------------------------------------------------------------------------------


def demonstrations(seed: int, settings: Settings) -> list[Task]:
    """Replies of demonstrators to a tool that errs. Most end at once; a share of `careful` checks, after each reading with a
    probability that depends on whether a value was read twice, and some of these stay with their first conclusion.
    """
    draw = random.Random(f"demonstrators {seed}")
    rows = list[Task]()
    for task in tasks_of(PAYS, settings["demonstrations"], seed, settings):
        careful, firm = draw.random() < settings["careful"], draw.random() < settings["firm"]
        text, seen = "", list[int]()
        for reading in task["readings"]:
            text, seen = f"{text}{reading}", [*seen, reading]
            value, times = Counter(seen).most_common(1)[0]
            on = settings["settled"] if times > 1 else settings["unsettled"]
            checks = careful and len(seen) < READINGS and (len(seen) == 1 or draw.random() < on)
            reply = f"={seen[0] if firm else value}{CHECK if checks else END}"
            rows.append({"id": str(len(rows)), **imitation(text, reply)})  # equal rows without an id would be merged
            text += reply
            if not checks:
                break
    return rows


def examined(checkpoint: str, arm: str, seed: int, settings: Settings) -> dict[str, float | None]:
    """The counts of a checkpoint in unseen episodes of an arm, sampled at temperature 1."""
    config = Evaluation(
        tasks="generated", env=tool.__qualname__, model=checkpoint, samples=1, k=(1,), seed=seed, success=1.0,
        max_tokens=settings["max_tokens"], env_workers=0, threads=1,
    )  # fmt: skip
    return figures_of(evaluate(config, tasks_of(arm, settings["unseen"], seed, settings, held_out=True), tool).rollouts)


# -- the experiment ----------------------------------------------------------------------------------------------------


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    shown = demonstrations(seed, settings)
    start = start_of(shown, folder, seed, settings)
    chosen = {name: settings[name] for name in ("steps", "prompts", "group", "lr", "minibatches", "max_tokens")}
    common = {"algorithm": "dr-grpo", "kl": 0.0, "betas": (0.9, 0.95), "warmup": 10}
    common |= {"max_episode_tokens": READINGS * settings["max_tokens"], **chosen}
    found = {}
    for arm in ARMS:
        tasks = tasks_of(arm, settings["tasks"], seed, settings)
        counts = Counts()
        run = learn(Arena(tasks, tool, start), folder / arm.replace(" ", "-"), seed, hooks=[counts], **common)
        before, after = (examined(model, arm, seed, settings) for model in (start, checkpoint_of(run)))
        found[arm] = {"before": before, "after": after, "curves": counts.curves}
        say(
            f"  seed {seed}, {arm}: "
            + ", ".join(f"{name} {_told(before[name])} -> {_told(after[name])}" for name in FIGURES)
        )
    return found


def _told(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def gain(numbers: Mapping[int, Numbers], arm: str, figure: str) -> Estimate:
    """How much a count has changed by training, seed by seed."""
    ends = [[n[arm][when][figure] for when in ("before", "after")] for n in numbers.values()]
    return over_seeds([float("nan") if None in pair else pair[1] - pair[0] for pair in ends])


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    def cell(arm: str, when: str, figure: str) -> str:
        values = [n[arm][when][figure] for n in numbers.values()]
        return "-" if None in values else str(over_seeds(values))

    rows = []
    for arm in ARMS:
        rows += [
            [arm, told, *(cell(arm, when, f) for f in FIGURES)] for told, when in (("base", "before"), ("RL", "after"))
        ]
        reward, accuracy, checks = optimum(arm, settings)
        known = {"checks": f"{float(checks > 0):g}", "number": f"{checks:.3g}", "accuracy": f"{accuracy:.3g}",
                 "reward": f"{reward:.3g}"}  # fmt: skip
        rows.append([arm, "best possible", *(known.get(f, "") for f in FIGURES)])
    halfway = (1 - settings["error"] + optimum(PAYS, settings)[0]) / 2
    comparisons = [
        *(Comparison(f"{PAYS}: {FIGURES[f]}, RL minus base", gain(numbers, PAYS, f), at_least=0.0)
          for f in ("checks", "corrects", "tokens", "accuracy")),
        *(Comparison(f"{arm}: {FIGURES[f]}, RL minus base", gain(numbers, arm, f), at_most=0.0)
          for arm in (NEVER, REPEATS) for f in ("checks", "tokens")),
        Comparison(f"{PAYS}: reward of RL", over_seeds([n[PAYS]["after"]["reward"] for n in numbers.values()]), halfway),
    ]  # fmt: skip
    panels = [_panel(numbers, name, settings) for name in COURSE]
    return Finding(("tool", "policy", *FIGURES.values()), rows, comparisons, panels, _notes(settings))


def _panel(numbers: Mapping[int, Numbers], name: str, settings: Settings) -> Panel:
    """The course of a count in the rollouts, and of the accuracy also what is best."""

    def curves(arm: str) -> list[Curve]:
        return [n[arm]["curves"][name] for n in numbers.values()]

    shown = [arm for arm in ARMS if any(v is not None for curve in curves(arm) for v in curve)]
    lines = [band(arm, curves(arm)) for arm in shown]
    if name == "accuracy":
        steps = [1, settings["steps"]]
        lines += [Series("", steps, [optimum(arm, settings)[1]] * 2, dashed=True) for arm in (PAYS, REPEATS)]
    return Panel(FIGURES[name].capitalize(), "step", lines)


def _notes(settings: Settings) -> list[str]:
    return [
        f"Base: the start, after imitation of {settings['demonstrations']} episodes of demonstrators, of whom a share of "
        f"{settings['careful']:g} checks. Counts are those of {settings['unseen']} unseen episodes at temperature 1. "
        f"{PAYS}: each reading is wrong with probability {settings['error']:g}. {NEVER}: all readings are right. {REPEATS}: "
        "the first reading is wrong as often, and each check gives it again. A check costs "
        f"{settings['cost']:g}, a right end earns 1, and there are {READINGS} readings at most.",
        "A first conclusion that is wrong can end right only by checks. Checks on while no value was read twice, and after "
        "one was: of the conclusions from two readings on at which the tool could be asked again, the share that asks; "
        "the best policy has 1 and nearly 0.",
    ]  # fmt: skip


EXPERIMENT = Experiment(
    "emergence",
    "Where checking pays, reinforcement learning makes a policy whose base seldom checks check more, correct more of its "
    "wrong first conclusions, write more and be right more often, so that it earns most of what checks can bring; where "
    "checks cost and tell nothing, the same base unlearns them and writes less.",
    "DeepSeek-R1-Zero, arXiv 2501.12948, section 2.2.4; counts of behaviours beside the base's: Gandhi et al., arXiv "
    "2503.01307; Liu et al., arXiv 2503.20783, section 2",
    {"error": 0.3, "cost": 0.03, "careful": 0.2, "firm": 0.2, "unsettled": 0.9, "settled": 0.2, "demonstrations": 10000,
     "imitation_epochs": 6.0, "imitation_lr": 5e-3, "context": 32, "tasks": 4000, "unseen": 1000, "steps": 160,
     "prompts": 32, "group": 8, "lr": 5e-4, "minibatches": 2, "max_tokens": 4},
    measure,
    conclude,
    seeds=(0, 1, 2, 3, 4),
)  # fmt: skip
