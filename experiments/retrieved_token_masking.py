"""A policy that also learns from the passages that it was shown, as if it had written them.

The product never does that. Here a player of its own writes down each passage as a demonstration, so that the loss falls
on its tokens too, with the advantage of their episode: the paper's arm without a mask.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from experiments import reader
from experiments.bench import bench
from experiments.experiment import (
    Comparison,
    Experiment,
    Finding,
    Numbers,
    Say,
    Settings,
    differences,
    over_seeds,
)
from experiments.figure import Panel
from experiments.harness import Arena, Curve, band, curves_of
from experiments.ppo_vs_grpo import fall
from experiments.search import searching
from experiments.search_r1 import COMMON, Quiz, examined, prepare
from posttrain.algorithms.policy import PolicyObjective
from posttrain.core.rollouts import Rollout
from posttrain.core.transcripts import SpanKind, Transcript
from posttrain.core.types import Completion, StopReason
from posttrain.envs.play.branch_plan import BranchPlan
from posttrain.envs.play.episode import Episode
from posttrain.envs.play.player import Player
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.loop import FinishedStep, train

METRICS = ("accuracy", "reward/searches", "length", "entropy", "grad_norm")
SHOWN = {"all": "exact match", "one hop": "one hop", "two hops": "two hops", "valid": "valid searches",
         "useful": "useful searches", "length": "tokens"}  # fmt: skip


class Unmasked(Player):
    """Samples as usual, and returns rollouts in which the text shown after the prompt is scored too."""

    def play(self, episodes: Sequence[Episode], plan: BranchPlan | None = None) -> list[Rollout]:
        assert plan is None, "tokens that were shown are nobody's"
        return [unmasked(rollout) for rollout in super().play(episodes)]


def unmasked(rollout: Rollout) -> Rollout:
    """The rollout with its passages among what is learned."""
    assert not rollout.steps, "step rewards would fall on other tokens"
    return replace(rollout, transcripts=[_unmasked(transcript) for transcript in rollout.transcripts])


def _unmasked(transcript: Transcript) -> Transcript:
    found, sampled = Transcript(), 0
    for span in transcript.spans:
        tokens = transcript.tokens[span.start : span.start + span.length]
        if span.kind is SpanKind.PROMPT:
            found.observe(tokens, span.kind)
        elif span.kind is SpanKind.SAMPLED:
            logp = transcript.logp[sampled : sampled + span.length]
            sampled += span.length
            found.sample(Completion(0, tokens, logp, "", StopReason.STOP, span.version or 0), span.learned)
        else:
            found.imitate(tokens)
    return found


PLAYERS: dict[str, type[Player]] = {"masked": Player, "unmasked": Unmasked}
"""The arms: the only thing in which they differ."""


def measure(seed: int, settings: Settings, folder: Path, say: Say) -> Numbers:
    quiz = prepare(seed, settings, folder, say)
    found: Numbers = {"gate": quiz.gate, "start": examined(quiz.start, quiz, searching, seed, settings)}
    for arm, player in PLAYERS.items():
        curves, checkpoint = trained(quiz, player, folder / arm, seed, settings)
        found[arm] = {**examined(checkpoint, quiz, searching, seed, settings), "curves": curves}
        say(f"  seed {seed}, {arm}: held-out exact match {found['start']['all']:.3f} -> {found[arm]['all']:.3f}")
    return found


def trained(
    quiz: Quiz, player: type[Player], folder: Path, seed: int, settings: Settings
) -> tuple[dict[str, Curve], str]:
    """Reinforcement learning with this player: metrics of each step, and the checkpoint it ended with."""
    arena = Arena(quiz.practice, searching, quiz.start)
    curves: dict[str, Curve] = {name: [] for name in METRICS}

    def note(done: FinishedStep) -> None:
        metrics = done.stats.means()
        for name in METRICS:
            curves[name].append(metrics.get(name))

    options = {"algorithm": settings["algorithm"], "aggregate": "token-mean", "kl": 0.0, "minibatches": 1}
    critic = Path(quiz.start) if settings["algorithm"] == "ppo" else None
    sizes = {**settings, "max_tokens": reader.LONGEST}
    with bench(arena, seed, sizes, critic, player, **options) as source:
        train(source.learner, source, PolicyObjective(source.algorithm), [note], first=1, steps=settings["steps"])
        source.learner.weights().save(folder)
    Tokenizer.load(quiz.start).save(folder)
    return curves, os.fspath(folder)


# -- conclusions -------------------------------------------------------------------------------------------------------


def conclude(numbers: Mapping[int, Numbers], settings: Settings) -> Finding:
    rows = [
        [arm, *(str(over_seeds([n[arm][name] for n in numbers.values()])) for name in SHOWN),
         " ".join(f"{n[arm]['all']:.3f}" for n in numbers.values())]
        for arm in ("start", *PLAYERS)
    ]  # fmt: skip
    comparisons = [
        Comparison("exact match on held-out questions, masked minus unmasked",
                   differences(numbers, "masked", "unmasked", lambda arm: float(arm["all"])), at_least=0.0),
        Comparison("fall from the peak, unmasked minus masked",
                   differences(numbers, "unmasked", "masked", fall), at_least=0.0),
    ]  # fmt: skip
    named = {"accuracy": "Exact match of the rollouts", "reward/searches": "Valid searches per question",
             "entropy": "Entropy of what was sampled, nats per token"}  # fmt: skip
    panels = [
        Panel(title, "step", [band(arm, curves_of(numbers, arm, name)) for arm in PLAYERS])
        for name, title in named.items()
    ]
    notes = ["Published (Qwen2.5-7B base, PPO, mean of seven data sets): .431 masked, .343 unmasked."]
    return Finding(("arm", *SHOWN.values(), "exact match of each seed"), rows, comparisons, panels, notes)


EXPERIMENT = Experiment(
    "retrieved-token-masking",
    "A policy whose loss leaves out the passages that it was shown answers more questions, and trains more steadily.",
    "Search-R1, arXiv 2503.09516, table 4, section 5.4",
    {
        **{name: value for name, value in COMMON.items() if name not in ("minibatches", "critic_lr")},
        "algorithm": "grpo",
    },
    measure,
    conclude,
)
