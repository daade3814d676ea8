"""A policy on the bench: the pieces of a run put together without the run, to measure what a run does not record.

A run of some seconds spends most of them on its folder: checkpoints, record, curves. `trained` has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from experiments.harness import Arena
from posttrain.algorithms.all_algorithms import find
from posttrain.algorithms.preference import PreferenceAlgorithm
from posttrain.config.resolve import filled
from posttrain.config.training import RL
from posttrain.core.batch import Packed
from posttrain.core.component import Need
from posttrain.core.protocols import Learner, Model, Objective, Source
from posttrain.core.rollouts import Rollout
from posttrain.core.types import Sampling, Task
from posttrain.data.preference_examples import to_compared, to_judged
from posttrain.data.tasks import to_tasks
from posttrain.engines.local.embedded import embedded
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.load_env import is_generator_env, load_env
from posttrain.envs.play.player import Player
from posttrain.learners.forward_pass import REFERENCE
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.critic import Critic, ValueModel, new_critic
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs import fingerprint
from posttrain.training.adjust import adjust
from posttrain.training.loop import FinishedStep, train
from posttrain.training.setup import end_tokens
from posttrain.training.sources.collector import Collector, Size
from posttrain.training.sources.length_filter import TooLong
from posttrain.training.sources.packing import pack
from posttrain.training.sources.preferences import Comparisons, PreferenceExamples
from posttrain.training.sources.reference_cache import MovingReferenceLogps, reference_logps
from posttrain.training.sources.rl_source import RLSource
from posttrain.training.sources.task_order import Uniform

TOKENS = 8192  # fed at once
BETAS = (0.9, 0.95)


@contextmanager
def bench(
    arena: Arena,
    seed: int,
    settings: Mapping[str, Any],
    critic: Path | None = None,
    player: Callable[..., Player] = Player,
    optimization: Optimization | None = None,
    **options: Any,
) -> Iterator[RLSource]:
    """The arena's policy with everything that produces steps of it. `options`: those of `posttrain.rl`.

    `critic`: the checkpoint of a run that has one; an algorithm that learns one has a new one without it. `player`: the
    player that samples its episodes; `optimization`: None, a constant rate.
    """
    folder = Path(arena.start)
    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    sizes = {name: settings[name] for name in ("prompts", "group", "max_tokens")}
    single_turn = not is_generator_env(load_env(arena.env))
    row = adjust(find(options.pop("algorithm")), filled(RL, {"model": arena.start, **sizes, **options}), single_turn)
    value: Critic | None = None
    if critic is not None or (row.critic is not None and optimization is not None):
        value = new_critic(ValueModel, critic or folder, model, seed)
    others = {REFERENCE: frozen(folder)} if Need.REFERENCE in row.needs else {}
    sampling = Sampling(max_tokens=settings["max_tokens"])
    optimized = optimization or Optimization(lr=settings.get("lr", 1e-5), betas=BETAS)
    with EnvPool(arena.env, 0) as pool:
        tasks = to_tasks(arena.tasks)
        collector = Collector(
            tasks,
            player(pool, embedded(model, tokenizer), tokenizer, sampling, model.config.context),
            Size(settings["prompts"], settings["group"], TOKENS),
            seed,
            1.0,
            needs=row.needs,
            plan=row.branching.plan(model.config.vocab) if row.branching else None,
            order=Uniform(len(tasks), seed),
        )
        yield RLSource(collector, LocalLearner(model, optimized, others=others, critic=value), row)


def frozen(folder: Path | str) -> Model:
    """The model of a checkpoint, which is not trained."""
    model: Model = load_model(Path(folder)).requires_grad_(False)
    return model


def trained(
    source: Source,
    learner: LocalLearner,
    objective: Objective,
    steps: int,
    measure: Callable[[Model], dict[str, float]],
    points: int,
) -> dict[str, list[float]]:
    """Train, and measure the policy at the start and after each of `points` equal parts of the steps."""
    every = max(1, steps // points)
    found: dict[str, list[float]] = {name: [value] for name, value in measure(learner.weights()).items()}

    def watch(finished: FinishedStep) -> bool:
        if finished.step.number % every == 0:
            for name, value in measure(learner.weights()).items():
                found[name].append(value)
        return False

    train(learner, source, objective, [watch], first=1, steps=steps)
    return found


def examples(rows: Sequence[Task], start: str, labels: bool) -> PreferenceExamples:
    """Preference examples of rows of pairs, as labelled single responses where `labels` is set."""
    model, tokenizer = load_model(Path(start)), Tokenizer.load(Path(start))
    tasks = to_tasks(rows, convert=to_judged if labels else to_compared)
    refusing = TooLong("refuse", model.config.context, print)
    return PreferenceExamples(tasks, tokenizer, end_tokens(model, tokenizer), model.config.vocab, refusing)


def comparisons(
    items: PreferenceExamples, start: str, algorithm: PreferenceAlgorithm, seed: int, rows: int, how: Optimization
) -> tuple[Comparisons, LocalLearner]:
    """A preference algorithm with everything that produces steps of it, `rows` examples each, and its learner."""
    moves = algorithm.moving is not None
    learner = LocalLearner(load_model(Path(start)), how, others={REFERENCE: frozen(start)} if moves else {})
    source = Comparisons(items, algorithm, learner, rows, TOKENS, seed)
    drift = Need.DRIFT in algorithm.needs
    if moves:
        asked = partial(learner.evaluate, of=REFERENCE)
        source.reference = MovingReferenceLogps(items, asked, TOKENS, learner.device, drift)
    elif Need.REFERENCE in algorithm.needs:
        known = fingerprint.of_path(Path(start))
        assert known is not None, "the start of an experiment is a checkpoint on the disk"
        weights = str(known["digest"])
        every = range(len(items))
        source.reference = reference_logps(items, every, weights, learner.evaluate, TOKENS, learner.device, drift)
    return source, learner


def one_batch(rollouts: Sequence[Rollout]) -> Packed:
    """All of them as one micro-batch; their scored tokens are in order."""
    return pack([r.transcripts for r in rollouts], range(len(rollouts)))


def by_rollout(values: Tensor, rollouts: Sequence[Rollout]) -> list[Tensor]:
    """[N] of `one_batch` -> [n_i] for each rollout."""
    return list(values.split([r.n_scored for r in rollouts]))


def log_probabilities(learner: Learner, rollouts: Sequence[Rollout]) -> list[Tensor]:
    """The policy's, now: [n_i] for each rollout."""
    [outputs] = learner.evaluate([one_batch(rollouts)])
    return by_rollout(outputs.logp, rollouts)
