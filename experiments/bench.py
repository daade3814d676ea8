"""A policy on the bench: the pieces of a run put together without the run, to measure what a run does not record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from experiments.harness import Arena
from posttrain.algorithms.all_algorithms import find
from posttrain.config.resolve import filled
from posttrain.config.training import RL
from posttrain.core.batch import Packed
from posttrain.core.protocols import Learner
from posttrain.core.types import Rollout, Sampling
from posttrain.data.tasks import to_tasks
from posttrain.engines.local.embedded import embedded
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.load_env import is_generator_env, load_env
from posttrain.envs.play.player import Player
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.critic import Critic, ValueModel, new_critic
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.adjust import adjust
from posttrain.training.sources.collector import Size
from posttrain.training.sources.packing import pack
from posttrain.training.sources.rl_source import RLSource

TOKENS = 8192  # fed at once


@contextmanager
def bench(
    arena: Arena,
    seed: int,
    settings: Mapping[str, Any],
    critic: Path | None = None,
    player: type[Player] = Player,
    **options: Any,
) -> Iterator[RLSource]:
    """The arena's policy with everything that produces steps of it. `options`: those of `posttrain.rl`.

    `critic`: the checkpoint of a run that has one; `player`: who plays its episodes.
    """
    folder = Path(arena.start)
    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    sizes = {name: settings[name] for name in ("prompts", "group", "max_tokens")}
    single_turn = not is_generator_env(load_env(arena.env))
    row = adjust(find(options.pop("algorithm")), filled(RL, {"model": arena.start, **sizes, **options}), single_turn)
    value: Critic | None = new_critic(ValueModel, critic, model, seed) if critic else None
    sampling = Sampling(max_tokens=settings["max_tokens"])
    with EnvPool(arena.env, 0) as pool:
        yield RLSource(
            tasks=to_tasks(arena.tasks),
            player=player(pool, embedded(model, tokenizer), tokenizer, sampling, model.config.context),
            learner=LocalLearner(model, Optimization(lr=settings.get("lr", 1e-5), betas=(0.9, 0.95)), critic=value),
            algorithm=row,
            size=Size(settings["prompts"], settings["group"], TOKENS),
            seed=seed,
            success=1.0,
        )


def one_batch(rollouts: Sequence[Rollout]) -> Packed:
    """All of them as one micro-batch; their scored tokens lie in order."""
    return pack([r.transcripts for r in rollouts], range(len(rollouts)))


def by_rollout(values: Tensor, rollouts: Sequence[Rollout]) -> list[Tensor]:
    """[N] of `one_batch` -> [n_i] for each rollout."""
    return list(values.split([r.n_scored for r in rollouts]))


def log_probabilities(learner: Learner, rollouts: Sequence[Rollout]) -> list[Tensor]:
    """The policy's, now: [n_i] for each rollout."""
    [outputs] = learner.evaluate([one_batch(rollouts)])
    return by_rollout(outputs.logp, rollouts)
