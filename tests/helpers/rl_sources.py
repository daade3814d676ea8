"""A source of reinforcement learning on tiny models, its steps, and what a step is learned from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from conftest import tiny
from update_cases import collector_of, critic_on

from posttrain.algorithms.all_algorithms import find
from posttrain.algorithms.policy import Algorithm, PolicyObjective
from posttrain.config.resolve import filled
from posttrain.config.training import RL, Distill
from posttrain.core.component import Need
from posttrain.core.rollouts import Outcome, Rollout
from posttrain.core.types import Sampling, Task
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.envs.demonstration import demonstrate
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.player import Player
from posttrain.learners.forward_pass import REFERENCE, Teaching
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.critic import Critic
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.adjust import adjust
from posttrain.training.loop import train
from posttrain.training.sources.collector import Size
from posttrain.training.sources.credit_assignment import Credited
from posttrain.training.sources.rl_source import RLSource
from posttrain.training.sources.teacher_targets import TEACHER, Teachers

TASKS = [{"id": str(i), "prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(6)]


def digits(task: Task, reply: str) -> float:
    return sum(c.isdigit() for c in reply) / 8


def source(
    tokenizer: Tokenizer,
    row: Algorithm,
    env: Callable[..., Any] = digits,
    seed: int = 0,
    budget: int = 64,
    size: tuple[int, int] = (3, 4),
    **optimization: Any,
) -> RLSource:
    model = tiny(tokenizer)
    named = {REFERENCE: Need.REFERENCE in row.needs, TEACHER: row.teacher is not None}
    others = {name: tiny(tokenizer, seed=1) for name, there in named.items() if there}
    critic: Critic | None = None
    if row.critic is not None:
        critic = critic_on(row, tiny(tokenizer, seed=2))
    texts = [
        [demonstrate({"id": t["id"], "prompt": t["prompt"], "response": t["answer"]}, tokenizer, [0])] for t in TASKS
    ]
    player = Player(EnvPool(env, 0), LocalEngine(model, tokenizer, slots=7), tokenizer, Sampling(max_tokens=8), 64)
    learner = LocalLearner(
        model,
        Optimization(
            **{"lr": 1e-3, "trust_region": row.trust_region, "critic_lr": 1e-2, "critic_follow": 0.1, **optimization}
        ),
        others=others,
        teaching=Teaching(1.0, row.teacher.beta) if row.teacher else Teaching(),
        critic=critic,
    )
    return RLSource(
        collector_of(
            TASKS, player, row, Size(*size, tokens_per_microbatch=budget), seed, 1.0, vocab=model.config.vocab
        ),
        learner,
        row,
        texts=texts,
        teachers=Teachers(tokenizer, {TEACHER: 64}) if row.teacher else None,
    )


ROW_KINDS = {
    "reinforce",
    "rloo",
    "grpo",
    "dapo",
    "gspo",
    "pass-at-k",
    "trpo",
    "arpo",
    "ppo",
    "ppo-ptx",
    "sac",
    "distill-k1",
}
"""Rows of which each has something in its way through a step that the others have not."""


def one_of_a_kind(names: Iterable[str], but: str = "") -> list[Any]:
    """As cases of a test; what only repeats another kind of row is long, and so is `but`, which takes long there."""
    return [name if name in ROW_KINDS - {but} else pytest.param(name, marks=pytest.mark.long) for name in names]


def row(name: str, **how: Any) -> Algorithm:
    given = {"ptx": "text.jsonl"} if find(name).pretraining else {}
    small = {"critic_warmup": 0} if find(name).critic else {}
    kind = Distill if find(name).teacher else RL
    return adjust(find(name), filled(kind, {"max_tokens": 8, "group": 4, "prompts": 3, **given, **small, **how}))


def accounted(experience: RLSource) -> list[Outcome]:
    """Return the outcomes of the rollouts of the step that is about to be learned from."""
    assert experience._ledger is not None
    return experience._ledger.outcomes()


def weights(learner: LocalLearner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in learner.model.parameters()]).clone()


def learned_from(build: Any) -> Sequence[Rollout]:
    """The rollouts of one update."""
    _, _, credited, *_ = build.args
    assert isinstance(credited, Credited)
    return credited.rollouts


def run(experience: RLSource, steps: int = 2, first: int = 1) -> tuple[torch.Tensor, list[dict[str, float]]]:
    seen: list[dict[str, float]] = []
    objective = PolicyObjective(experience.algorithm)
    train(experience.learner, experience, objective, [lambda t: seen.append(t.stats.means())], first=first, steps=steps)
    return weights(experience.learner), seen
