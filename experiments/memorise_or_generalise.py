"""SFT, DPO and GRPO on one kind of sums: what they gain on it and on other kinds, and what they forget.

A start does five kinds of tasks on the same digits, four of them badly: sums of four numbers, which alone are trained
afterwards; sums of five; sums modulo 10, marked by the prompt's last letter; sums whose prompt has commas; and writing the
numbers backwards, which it does well. Each is checked by the last number of the reply. The second half trains the sums
modulo 10 after the sums, and asks what is left of these.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.bench import frozen, log_probabilities
from experiments.experiment import (
    Comparison,
    Estimate,
    Experiment,
    Finding,
    Numbers,
    Say,
    Settings,
    differences,
    over_seeds,
)
from experiments.figure import Panel, Series
from experiments.harness import QUIET, checkpoint_of, whole, write
from experiments.worked import imitation
from posttrain.config.inference import Evaluation
from posttrain.config.resolve import filled
from posttrain.config.training import RL, SFT, Prefer, Training
from posttrain.core.rollouts import Rollout
from posttrain.core.types import Task
from posttrain.envs.builtin import worked_sums
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.runs.checkpoint import listed
from posttrain.runs.run_reading import read_timing
from posttrain.training.trainer import Run
from posttrain.training.training_run import run_training
from posttrain.training.verbs.evaluate import evaluate

ENV = f"{__name__}:answered"
SAME, LONGER, RULE, FORM, OLD = "same", "longer", "rule", "form", "old"
KINDS = (SAME, LONGER, RULE, FORM, OLD)
BEYOND = (LONGER, RULE, FORM)
"""Kinds of tasks that differ from those of training."""
MODULUS = 10  # of `RULE`
SFT_ARM, OWN_ARM, DPO_ARM, GRPO_ARM = ARMS = ("sft", "sft, own replies", "dpo", "grpo")
PLAIN, KL, REPLAY, PTX = AFTER = ("plain", "KL", "replay", "ptx")
"""Arms of the second half, each GRPO on sums modulo 10 after the arm `GRPO_ARM`."""
UPDATES = 4  # updates of a step of GRPO
FINER = 2  # times as many checkpoints of SFT, which soon passes the accuracy at which it is compared


# -- tasks -------------------------------------------------------------------------------------------------------------


def tasks_of(kind: str, count: int, seed: int, settings: Settings, held_out: bool = False) -> list[Task]:
    """So many tasks of a kind. Numbers that are held out are so in every kind."""
    sizes = {"numbers": settings["numbers"] + (kind == LONGER), "largest": settings["largest"]}
    drawn = worked_sums.tasks(count, seed, held_out=held_out, **sizes)
    return [{**asked(kind, task["numbers"]), "right": task["response"]} for task in drawn]


def asked(kind: str, numbers: Sequence[int]) -> Task:
    """The task of a kind with these numbers."""
    prompt = ("," if kind == FORM else " ").join(map(str, numbers)) + {RULE: "%", OLD: "<"}.get(kind, ":")
    total = sum(numbers)
    answer = "".join(map(str, reversed(numbers))) if kind == OLD else str(total % MODULUS if kind == RULE else total)
    return {"id": prompt, "kind": kind, "prompt": prompt, "numbers": list(numbers), "answer": answer}


def answered(task: Task, reply: str) -> float:
    """Whether the reply ends in the answer."""
    last = re.search(r"(\d+)\s*\Z", reply, re.ASCII)
    return float(last is not None and last[1] == task["answer"])


def demonstrated(task: Task, draw: random.Random, settings: Settings) -> Task:
    """A demonstration as the start imitates them: in any order, with slips."""
    how = settings["long_lines"], settings["slips"], MODULUS if task["kind"] == RULE else 0
    response = task["answer"] if task["kind"] == OLD else worked_sums.working(draw, task["numbers"], *how)
    return {"prompt": task["prompt"], "response": response}


def imitated(seed: int, settings: Settings) -> list[Task]:
    """Demonstrations of every kind, most of them of the one that is trained later."""
    draw = random.Random(f"demonstrators {seed}")
    shown = [
        task for task in tasks_of(SAME, settings["tasks"], seed, settings) for _ in range(settings["demonstrators"])
    ]
    shown += tasks_of(OLD, settings["tasks"], seed, settings)
    shown += [task for kind in BEYOND for task in tasks_of(kind, settings["seldom"], seed, settings)]
    return [demonstrated(task, draw, settings) for task in shown]


# -- training ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Begun:
    """The start, tasks and settings that the arms of a seed share."""

    seed: int
    settings: Settings
    folder: Path
    start: str
    unseen: list[Task]  # held-out tasks of all kinds
    before: list[Rollout]  # the start's replies to them

    def trained(
        self, verb: type[Training], name: str, shown: Any, steps: int, /, finer: int = 1, **options: Any
    ) -> Run:
        """A run from the start on, which leaves a checkpoint after each of the settings' `points` parts, times `finer`."""
        points = self.settings["points"] * finer
        every = max(1, steps // points)
        usual = {
            "tasks": "generated", "model": self.start, "out": str(self.folder / name.replace(", ", "-").replace(" ", "-")),
            "seed": self.seed, "steps": steps, "lr": self.settings["lr"], "betas": (0.9, 0.95), "warmup": 10,
            "schedule": "linear", "forget": str(self.folder / "old.jsonl"), "health": "off",
            **QUIET, "save_every": every, "eval_every": every, "keep": points + 1,
        }  # fmt: skip
        return whole(run_training(filled(verb, {**usual, **options}), shown))

    def practised(self, name: str, tasks: Any, steps: int, /, **options: Any) -> Run:
        """A run of GRPO."""
        sizes = {size: self.settings[size] for size in ("prompts", "group", "max_tokens")}
        how = {"algorithm": "grpo", "aggregate": "token-mean", "kl": 0.0, "minibatches": UPDATES, "slots": 512}
        scored = {"env": ENV, "env_workers": 0, "success": 1.0}
        return self.trained(RL, name, tasks, steps, **{**scored, **sizes, **how, **options})


def begun(seed: int, settings: Settings, folder: Path) -> Begun:
    """The start of a seed, and its replies to held-out tasks."""
    learned = {"epochs": settings["imitation_epochs"], "lr": settings["imitation_lr"], "rows": 64, "warmup": 50}
    start = imitation(imitated(seed, settings), folder / "imitation", seed, hidden=64, layers=2, context=64, **learned)
    unseen = [task for kind in KINDS for task in tasks_of(kind, settings["unseen"], seed, settings, held_out=True)]
    old = [{"prompt": task["prompt"], "response": task["answer"]} for task in unseen if task["kind"] == OLD]
    write(folder / "old.jsonl", old)
    return Begun(seed, settings, folder, start, unseen, replies(start, unseen, seed, settings, settings["samples"]))


def replies(model: str, tasks: Sequence[Task], seed: int, settings: Settings, samples: int) -> list[Rollout]:
    """So many replies of a model to each task, at temperature 1."""
    config = Evaluation(
        tasks="generated", env=ENV, model=model, samples=samples, k=(1,), success=1.0, seed=seed, slots=512,
        max_tokens=settings["max_tokens"], env_workers=0, threads=1,
    )  # fmt: skip
    return evaluate(config, list(tasks)).rollouts


def right_and_wrong(rollouts: Sequence[Rollout]) -> dict[str, tuple[list[str], list[str]]]:
    """Prompt -> the different replies that are right, and those that are wrong; none is empty."""
    found: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for rollout in rollouts:
        side = found[rollout.task["prompt"]][rollout.reward != 1.0]
        if rollout.text.strip() and rollout.text not in side:
            side.append(rollout.text)
    return found


def first_half(begun: Begun) -> dict[str, Run]:
    """A run of each of `ARMS`, on the same tasks and with as many updates of as many responses."""
    settings, steps = begun.settings, begun.settings["steps"]
    tasks = tasks_of(SAME, settings["practice"], begun.seed, settings)
    own = right_and_wrong(replies(begun.start, tasks, begun.seed + 1, settings, settings["group"]))
    shown = [{"prompt": task["prompt"], "response": task["right"]} for task in tasks]
    kept = [{"prompt": prompt, "response": reply} for prompt, (right, _) in own.items() for reply in right]
    pairs = [
        {"prompt": prompt, "chosen": better, "rejected": worse}
        for prompt, sides in own.items()
        for better, worse in zip(*sides, strict=False)
    ]
    updates, rows = steps * UPDATES, settings["prompts"] * settings["group"] // UPDATES
    dpo = {"rows": rows // 2, "lr": settings["dpo_lr"], "algorithm": "dpo", "beta": settings["beta"]}
    return {
        SFT_ARM: begun.trained(SFT, SFT_ARM, shown, updates, finer=FINER, rows=rows),
        OWN_ARM: begun.trained(SFT, OWN_ARM, kept, updates, rows=rows),
        DPO_ARM: begun.trained(Prefer, DPO_ARM, pairs, updates, **dpo),
        GRPO_ARM: begun.practised(GRPO_ARM, tasks, steps),
    }


def second_half(begun: Begun, model: str) -> dict[str, Run]:
    """A run of each of `AFTER`, on sums modulo 10, of a model that was trained on sums."""
    settings, folder = begun.settings, begun.folder
    old, new = (tasks_of(kind, settings["practice"], begun.seed, settings) for kind in (SAME, RULE))
    own = right_and_wrong(replies(model, old, begun.seed + 2, settings, 2))
    kept = [{"prompt": prompt, "response": right[0]} for prompt, (right, _) in own.items() if right]
    share = settings["replayed"]
    files = {SAME: write(folder / "sums.jsonl", old), RULE: write(folder / "modulo.jsonl", new)}
    weights = {SAME: share, RULE: 1 - share}
    mixture = {kind: {"tasks": file, "env": ENV, "weight": weights[kind]} for kind, file in files.items()}
    ptx = {"ptx": write(folder / "own.jsonl", kept), "ptx_coefficient": settings["ptx"]}
    arms: dict[str, dict[str, Any]] = {
        PLAIN: {}, KL: {"kl": settings["kl"]}, REPLAY: {"tasks": "", "env": "", "mixture": mixture}, PTX: ptx,
    }  # fmt: skip
    return {
        arm: begun.practised(
            f"then {arm}", None if arm == REPLAY else new, settings["then_steps"], model=model, **options
        )
        for arm, options in arms.items()
    }


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    shared = begun(seed, settings, folder)
    found: Numbers = {}
    runs = first_half(shared)
    for arm, run in runs.items():
        tokens = sum(line["update/tokens"] for line in read_timing(run.path))
        found[arm] = {"course": course(shared, run), "tokens": tokens}
        say(f"  seed {seed}, {arm}: {told(found[arm]['course'][0])} -> {told(found[arm]['course'][-1])}")
    for arm, run in second_half(shared, checkpoint_of(runs[GRPO_ARM])).items():
        found[f"then {arm}"] = examined(shared, checkpoint_of(run))
        say(f"  seed {seed}, then {arm}: {told(found[f'then {arm}'])}")
    return found


def course(begun: Begun, run: Run) -> list[Numbers]:
    """The figures of the start and of every checkpoint of a run, and its loss on the texts of `--forget`."""
    lost = {line["step"]: line["forget/loss"] for line in run.metrics if line.get("forget/loss") is not None}
    models = [begun.start, *map(str, listed(run.path))]
    return [
        {**examined(begun, model), "step": step, "forget": loss}
        for model, (step, loss) in zip(models, sorted(lost.items()), strict=True)
    ]


def examined(begun: Begun, model: str) -> Numbers:
    """Accuracy of a model on held-out tasks of each kind, and the KL between it and the start on those of `SAME`.

    In nats per token: "kl" is KL(start || model), at the start's replies, and "kl_back" KL(model || start).
    """
    own = begun.before
    if model != begun.start:
        own = replies(model, begun.unseen, begun.seed, begun.settings, begun.settings["samples"])
    right = {kind: float(np.mean([r.reward for r in own if r.task["kind"] == kind])) for kind in KINDS}
    return {**right, "kl": apart(begun.before, model), "kl_back": apart(own, begun.start)}


def apart(rollouts: Sequence[Rollout], model: str) -> float:
    """KL(who sampled || model) on tasks of `SAME`, nats per token: estimated from what was sampled."""
    chosen = [rollout for rollout in rollouts if rollout.task["kind"] == SAME]
    sampled = [logp for rollout in chosen for transcript in rollout.transcripts for logp in transcript.logp]
    found = log_probabilities(LocalLearner(frozen(model), Optimization()), chosen)
    return float(np.mean(sampled)) - float(np.mean([logp for own in found for logp in own.tolist()]))


def told(point: Numbers) -> str:
    """A line on a model's figures."""
    return ", ".join(f"{name} {point[name]:.3f}" for name in (*KINDS, "kl", "kl_back", "forget") if name in point)


# -- conclusions -------------------------------------------------------------------------------------------------------


def beyond(arm: Numbers) -> float:
    """Change of the mean accuracy out of the distribution."""
    begin, *_, end = arm["course"]
    return float(np.mean([end[kind] - begin[kind] for kind in BEYOND]))


def level(seed: Numbers) -> float:
    """The accuracy on the trained kind that SFT and GRPO both reach: the lower one of their best."""
    return float(min(max(point[SAME] for point in seed[arm]["course"]) for arm in (SFT_ARM, GRPO_ARM)))


def at_level(arm: Numbers, accuracy: float, name: str) -> float:
    """A figure where the accuracy on the trained kind first reaches a level, between the checkpoints around it."""
    before, *later = arm["course"]
    if before[SAME] >= accuracy:
        return float(before[name])
    for point in later:
        if point[SAME] >= accuracy:
            share = (accuracy - before[SAME]) / (point[SAME] - before[SAME])
            return float(before[name] + share * (point[name] - before[name]))
        before = point
    return float("nan")


def levelled(numbers: Mapping[int, Numbers], name: str) -> Estimate:
    """A figure of GRPO minus that of SFT at equal accuracy on the trained kind."""
    return over_seeds(
        [at_level(n[GRPO_ARM], level(n), name) - at_level(n[SFT_ARM], level(n), name) for n in numbers.values()]
    )


def claims(numbers: Mapping[int, Numbers]) -> list[Comparison]:
    """The figures and the ranges in which the papers have them."""

    def change(arm: str) -> Estimate:
        return over_seeds([beyond(n[arm]) for n in numbers.values()])

    kept = {arm: differences(numbers, f"then {arm}", f"then {PLAIN}", lambda n: n[SAME]) for arm in AFTER[1:]}
    return [
        Comparison("accuracy out of distribution, grpo: change", change(GRPO_ARM), at_least=0.0),
        Comparison("accuracy out of distribution, sft: change", change(SFT_ARM), at_most=0.0),
        Comparison("that change, grpo minus sft", differences(numbers, GRPO_ARM, SFT_ARM, beyond), at_least=0.0),
        Comparison("accuracy on the old task at equal accuracy on the new one, grpo minus sft", levelled(numbers, OLD),
                   at_least=0.0),
        Comparison("KL(start || model) at equal accuracy, grpo minus sft", levelled(numbers, "kl"), at_most=0.0),
        *(Comparison(f"accuracy on the first task after the second, {arm} minus {PLAIN}", found, at_least=0.0)
          for arm, found in kept.items()),
    ]  # fmt: skip


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    columns = (*KINDS, "kl", "kl_back", "forget")

    def row(name: str, tokens: str, points: Sequence[Numbers]) -> list[str]:
        cells = [str(over_seeds([p[c] for p in points])) if c in points[0] else "-" for c in columns]
        return [name, tokens, *cells]

    every = list(numbers.values())
    rows = [row("start", "-", [n[GRPO_ARM]["course"][0] for n in every])]
    for arm in ARMS:
        tokens = f"{np.mean([n[arm]['tokens'] for n in every]):,.0f}"
        rows.append(row(arm, tokens, [n[arm]["course"][-1] for n in every]))
    rows += [row(f"grpo, then modulo: {arm}", "-", [n[f"then {arm}"] for n in every]) for arm in AFTER]
    both = over_seeds([level(n) for n in numbers.values()])
    matched = " ".join(f"{level(n):.3f}" for n in numbers.values())
    steps, responses = settings["steps"], settings["prompts"] * settings["group"]
    return Finding(
        ("model", "tokens of the updates", "same: sums of four", "longer: of five", "rule: modulo 10", "form: commas",
         "old: backwards", "KL(start, model)", "KL(model, start)", "loss of the old task"),
        rows,
        claims(numbers),
        panels(numbers),
        [f"Accuracy at temperature 1: {settings['samples']} replies to each of {settings['unseen']} held-out tasks a kind. "
         "KL: nats per token, on held-out sums of four. Loss: nats per token of right replies of the old task.",
         f"Every arm of the first half makes {steps * UPDATES} updates of {responses // UPDATES} responses: "
         f"demonstrations of one order without slips (sft), right replies of the start (sft, own replies), pairs of its "
         f"right and wrong replies (dpo), or {steps * responses} rollouts in all (grpo). The equal accuracy, {both}, is the "
         f"lower one of the best of sft and grpo; of each seed: {matched}.",
         f"The second half trains the last model of grpo on sums modulo 10 with {settings['then_steps'] * responses} "
         f"rollouts; of those of replay a share of {settings['replayed']:g} is of the first task.",
         "Published: on other rules RL gained 3.5 and 11.0 points of accuracy and SFT lost 8.1 and 79.5 (SFT Memorizes, RL "
         "Generalizes, cards and navigation in text); at equal accuracy on the new task RL forgets less, and KL(start || "
         "model) on it foretells how much (RL's Razor)."],
    )  # fmt: skip


def panels(numbers: Mapping[int, Numbers]) -> list[Panel]:
    """Courses, what is forgotten for what is learned and for how far the model moved, and the second half."""

    def through(arm: str, figure: Callable[[Numbers], float]) -> list[float]:
        return np.mean([[figure(point) for point in n[arm]["course"]] for n in numbers.values()], axis=0).tolist()

    def series(x: Callable[[Numbers], float], y: Callable[[Numbers], float]) -> list[Series]:
        return [Series(arm, through(arm, x), through(arm, y)) for arm in ARMS]

    def end(arm: str, kind: str) -> float:
        return float(np.mean([n[f"then {arm}"][kind] for n in numbers.values()]))

    def over_training(figure: Callable[[Numbers], float]) -> list[Series]:
        lines = {arm: through(arm, figure) for arm in ARMS}
        return [Series(arm, np.linspace(0, 1, len(line)).tolist(), line) for arm, line in lines.items()]

    return [
        Panel("Accuracy on the trained kind", "share of the training", over_training(lambda p: p[SAME])),
        Panel("Accuracy out of distribution", "share of the training",
              over_training(lambda p: np.mean([p[kind] for kind in BEYOND]))),
        Panel("Accuracy on the old task", "accuracy on the trained kind", series(lambda p: p[SAME], lambda p: p[OLD])),
        Panel("Accuracy on the old task", "KL(start || model), nats per token",
              series(lambda p: p["kl"], lambda p: p[OLD])),
        Panel("Accuracy after a second task", "", [
            Series(name, range(len(AFTER)), [end(arm, kind) for arm in AFTER])
            for name, kind in (("first task: sums", SAME), ("second task: modulo 10", RULE))
        ], names=AFTER),
    ]  # fmt: skip


EXPERIMENT = Experiment(
    "memorise-or-generalise",
    "GRPO gains on kinds of tasks that it was not trained on where SFT loses; at equal accuracy on the trained kind it "
    "forgets less of an old task and stays nearer to the start; a KL to the model before, replay or ptx keep more of a "
    "first task through a second.",
    "SFT Memorizes, RL Generalizes, arXiv 2501.17161; RL's Razor, arXiv 2509.04259; InstructGPT, arXiv 2203.02155, section "
    "3.5",
    {
        "numbers": 4, "largest": 6, "tasks": 1000, "demonstrators": 3, "seldom": 600, "long_lines": 0.3, "slips": 0.12,
        "imitation_epochs": 6.0, "imitation_lr": 6e-3, "practice": 600, "unseen": 100, "samples": 4, "points": 5,
        "steps": 100, "prompts": 16, "group": 8, "lr": 5e-4, "max_tokens": 36, "dpo_lr": 1e-4, "beta": 0.1,
        "then_steps": 60, "kl": 0.05, "replayed": 0.25, "ptx": 0.1,
    },
    measure,
    conclude,
    seeds=(0, 1, 2, 3, 4),
)  # fmt: skip
