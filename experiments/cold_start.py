"""RL from the base model beside RL after SFT, after DPO, and in the four stages of DeepSeek-R1."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.experiment import Comparison, Experiment, Finding, Numbers, Say, Settings, differences, over_seeds
from experiments.figure import Panel
from experiments.harness import QUIET, Arena, checkpoint_of, courses
from experiments.worked import (
    ENV,
    LEFT_TO_RIGHT,
    demonstrations,
    examined,
    is_working,
    practise,
    start_of,
    tasks_of,
    through,
    unseen,
)
from posttrain.config.inference import Evaluation
from posttrain.config.resolve import filled
from posttrain.config.training import SFT, Prefer
from posttrain.core.rollouts import Rollout
from posttrain.core.types import StopReason, Task, UserError
from posttrain.training.training_run import run_training
from posttrain.training.verbs.evaluate import evaluate

BASE, RL, BRIEF, IMITATED, COLD = "base", "RL", "cold start", "SFT", "SFT, RL"
PREFERRED, PAIRED, STAGED = "DPO", "DPO, RL", "four stages"
ARMS = (BASE, RL, BRIEF, IMITATED, COLD, PREFERRED, PAIRED, STAGED)
FIGURES = {"accuracy": "held-out accuracy", "format": "format rate", "pass@8": "pass@8", "entropy": "entropy"}
PRACTISED = (RL, COLD, PAIRED, STAGED)
"""Arms with the same number of rollouts, those of pairs and of rejection sampling included."""


def budget(settings: Settings) -> dict[str, list[int]]:
    """Steps of reinforcement learning of each of `PRACTISED`, stage by stage.

    Rollouts drawn otherwise count as the steps that would have had as many. Raises UserError if none are left.
    """
    steps, drawn, first = settings["steps"], settings["drawn"], settings["first_steps"]
    if min(drawn, first, steps - drawn - first) < 1:
        raise UserError("cold-start: steps must be more than drawn and first-steps together, and these at least 1")
    return {RL: [steps], COLD: [steps], PAIRED: [steps - drawn], STAGED: [first, steps - drawn - first]}


# -- what the stages learn from ----------------------------------------------------------------------------------------


def untaught(tasks: Sequence[Task], seed: int, settings: Settings) -> list[Task]:
    """Demonstrations for the base: workings with many slips, of which a share has its characters in random order."""
    draw = random.Random(f"scribble {seed}")
    rows = demonstrations(tasks, seed, settings)
    return [
        {**row, "response": scribble(draw, row["response"])} if draw.random() < settings["scribble"] else row
        for row in rows
    ]


def scribble(draw: random.Random, text: str) -> str:
    """The same characters in another order."""
    return "".join(draw.sample(text, len(text)))


def good(tasks: Sequence[Task], seed: int, settings: Settings) -> list[Task]:
    """A demonstration without slips or scribble of each of the first few tasks."""
    return demonstrations(tasks[: settings["good"]], seed, {**settings, "slips": 0.0, "demonstrators": 1})


def sampled(model: str, tasks: Sequence[Task], seed: int, settings: Settings) -> list[Rollout]:
    """As many rollouts of the model as `drawn` steps have: of that many times `prompts` tasks, drawn at random."""
    chosen = random.Random(f"drawn {seed}").sample(list(tasks), settings["drawn"] * settings["prompts"])
    config = Evaluation(
        tasks="generated", env=ENV, model=model, samples=settings["group"], k=(1,), seed=seed,
        max_tokens=settings["max_tokens"], env_workers=0, threads=1,
    )  # fmt: skip
    return evaluate(config, chosen).rollouts


def accepted(rollouts: Sequence[Rollout]) -> list[Task]:
    """Demonstrations: the right replies that are workings, each once for a task."""
    kept = {
        (r.task["prompt"], r.text): {"prompt": r.task["prompt"], "response": r.text}
        for r in rollouts
        if ended(r) and r.reward == 1 and is_working(r.task["numbers"], r.text)
    }
    return list(kept.values())


def pairs(rollouts: Sequence[Rollout]) -> list[Task]:
    """Pairs of a right and a wrong reply to the same task, each reply in one pair at most."""
    right: dict[str, list[str]] = {}
    wrong: dict[str, list[str]] = {}
    for rollout in filter(ended, rollouts):
        (right if rollout.reward == 1 else wrong).setdefault(rollout.task["prompt"], []).append(rollout.text)
    return [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        for prompt in right
        for chosen, rejected in zip(right[prompt], wrong.get(prompt, []), strict=False)
    ]


def ended(rollout: Rollout) -> bool:
    """Whether the policy ended the reply itself: imitation of one that was cut off would teach to end there."""
    return rollout.stop is StopReason.EOS


# -- the arms ----------------------------------------------------------------------------------------------------------


def taught(options: SFT | Prefer, rows: Sequence[Task]) -> tuple[str, int]:
    """Train on rows; returns the checkpoint and the number of updates."""
    run = run_training(options, rows)
    return checkpoint_of(run), int(run.metrics[-1]["step"])


@dataclass
class Bench:
    """The tasks, base model and settings that the arms of a seed share, and the results of each arm."""

    seed: int
    settings: Settings
    folder: Path
    say: Say
    tasks: list[Task] = field(init=False)
    base: str = field(init=False)
    found: Numbers = field(init=False)

    def __post_init__(self) -> None:
        self.tasks = tasks_of(self.settings["tasks"], self.seed, self.settings)
        shown = untaught(self.tasks, self.seed, self.settings)
        self.base = start_of(shown, self.folder, self.seed, self.settings)
        self.found = {arm: {"rollouts": 0, "evaluated": [], "curves": {"entropy": []}} for arm in ARMS}

    def learn(self, arm: str, stage: int, start: str) -> str:
        """Reinforcement learning, a stage of the arm's; returns the checkpoint. Steps count from the arm's first rollout."""
        settings, name, found = self.settings, f"{arm.replace(',', '')} {stage + 1}", self.found[arm]
        each, arena = (
            settings["prompts"] * settings["group"],
            Arena(self.tasks, ENV, start, unseen(self.seed, settings)),
        )
        run, part = practise(
            arena, self.folder, name, self.seed, settings, self.say, algorithm="grpo", aggregate="token-mean", kl=0.0,
            minibatches=settings["minibatches"], eval_every=settings["eval_every"], steps=budget(settings)[arm][stage],
        )  # fmt: skip
        earlier = found["rollouts"] // each
        found["evaluated"] += [[earlier + step, accuracy] for step, accuracy in part["evaluated"]]
        found["curves"]["entropy"] += part["curves"]["entropy"]
        found["rollouts"] += each * len(part["curves"]["entropy"])
        return checkpoint_of(run)

    def draw(self, arms: Sequence[str], model: str) -> list[Rollout]:
        """Replies of a model, which count as rollouts of these arms."""
        rollouts = sampled(model, self.tasks, self.seed, self.settings)
        for arm in arms:
            self.found[arm]["rollouts"] += len(rollouts)
        return rollouts

    def imitate(self, name: str, rows: Sequence[Task], **length: Any) -> tuple[str, int]:
        """SFT of the base. `length`: epochs or steps."""
        usual = {"rows": 32, "warmup": 5, "schedule": "linear", "lr": self.settings["sft_lr"], **QUIET}
        return taught(filled(SFT, {**self._options(name), **usual, **length}), rows)

    def prefer(self, name: str, rows: Sequence[Task], **length: Any) -> tuple[str, int]:
        """DPO of the base. `length`: epochs or steps."""
        usual = {"rows": 32, "warmup": 5, "lr": self.settings["dpo_lr"], **QUIET}
        return taught(filled(Prefer, {**self._options(name), **usual, **length}), rows)

    def _options(self, name: str) -> dict[str, Any]:
        return {"tasks": "generated", "model": self.base, "out": str(self.folder / name), "seed": self.seed}


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    bench = Bench(seed, settings, folder, say)
    shown, passes = good(bench.tasks, seed, settings), {"epochs": settings["sft_epochs"]}
    paired = pairs(bench.draw((PREFERRED, PAIRED), bench.base))
    if not paired:
        raise UserError(f"cold-start: no task of seed {seed} has right and wrong replies of the base: raise drawn")
    further = settings["steps"] * settings["minibatches"]  # updates that reinforcement learning makes

    cold, updates = bench.imitate("cold start", shown, **passes)
    preferred, updates_of_pairs = bench.prefer("pairs", paired, epochs=settings["dpo_epochs"])
    ends = {
        BASE: bench.base,
        RL: bench.learn(RL, 0, bench.base),
        IMITATED: bench.imitate("SFT alone", shown, steps=updates + further)[0],
        BRIEF: cold,
        COLD: bench.learn(COLD, 0, cold),
        PREFERRED: bench.prefer("DPO alone", paired, steps=updates_of_pairs + further)[0],
        PAIRED: bench.learn(PAIRED, 0, preferred),
    }
    first = bench.learn(STAGED, 0, cold)
    right = accepted(bench.draw((STAGED,), first))
    say(f"  seed {seed}: {len(paired)} pairs of the base's replies, {len(right)} accepted replies")
    third, _ = bench.imitate("third stage", [*shown, *right], **passes)
    ends[STAGED] = bench.learn(STAGED, 1, third)
    for arm, end in ends.items():
        bench.found[arm]["after"] = examined(end, seed, settings)
    return bench.found


# -- what they show ----------------------------------------------------------------------------------------------------


def accuracy_after(arm: Numbers) -> float:
    """Held-out accuracy at the end."""
    return float(arm["after"]["accuracy"])


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    rows = [
        [
            arm,
            f"{next(iter(numbers.values()))[arm]['rollouts']}",
            " ".join(f"{accuracy_after(n[arm]):.3f}" for n in numbers.values()),
            *(str(over_seeds([n[arm]["after"][name] for n in numbers.values()])) for name in FIGURES),
        ]
        for arm in ARMS
    ]
    near = settings["near"]
    comparisons = [
        Comparison(f"held-out accuracy, {COLD} minus {RL}", differences(numbers, COLD, RL, accuracy_after), at_least=0.0),
        Comparison(f"held-out accuracy, {COLD} minus {IMITATED}",
                   differences(numbers, COLD, IMITATED, accuracy_after), at_least=0.0),
        Comparison(f"held-out accuracy, {STAGED} minus {COLD}",
                   differences(numbers, STAGED, COLD, accuracy_after), at_least=-near),
    ]  # fmt: skip
    panels = [
        Panel("Held-out accuracy", f"rollouts, in steps of {settings['prompts'] * settings['group']}",
              [through(numbers, arm) for arm in PRACTISED]),
        *courses(numbers, PRACTISED, {"entropy": "Entropy, nats per token, over steps of RL"}),
    ]  # fmt: skip
    return Finding(
        ("arm", "rollouts", "accuracy of each seed", *FIGURES.values()),
        rows,
        comparisons,
        panels,
        [f"{BASE}: what imitated workings with slips and scribble. {BRIEF}: the cold start of {COLD}, alone. {IMITATED} and "
         f"{PREFERRED} make as many updates as that start, or DPO, and {settings['steps']} steps of RL together. Rollouts "
         "include those of pairs and of rejection sampling. A reply has the form if each of its lines adds numbers that are "
         "left, rightly or not, until one is left.",
         f"{STAGED}: the cold start, RL, SFT of the base on its demonstrations and on the right replies of that RL, RL.",
         "Published (DeepSeek-R1): RL from the base reaches 71.0 on AIME 2024 (R1-Zero, pass@1), the four stages 79.8."],
    )  # fmt: skip


EXPERIMENT = Experiment(
    "cold-start",
    "At equal rollouts, RL after SFT on few good demonstrations ends with a higher held-out accuracy than RL from the base, "
    "and higher than that SFT alone; the four stages of DeepSeek-R1 end at least as high.",
    "DeepSeek-R1, arXiv 2501.12948, section 2.3",
    {**LEFT_TO_RIGHT, "slips": 0.4, "scribble": 0.5, "max_tokens": 24, "good": 100, "sft_epochs": 12.0, "sft_lr": 1e-3,
     "dpo_epochs": 8.0, "dpo_lr": 1e-4, "steps": 50, "drawn": 8, "first_steps": 15, "minibatches": 4, "eval_every": 10,
     "near": 0.05},
    measure,
    conclude,
    seeds=(0, 1, 2, 3, 4),
)  # fmt: skip
