"""Assembles a run of `rl` or `distill`: configuration -> data, model, engine, learner, source, trainer.

`rl` takes a configuration, also one of `distill`; the functions in `posttrain/__init__.py` and the command line are
thin layers over it. `sft`, `prefer` and `reward_model` have modules of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.algorithms.all_algorithms import find
from posttrain.algorithms.credit import StepRewards, Unrewarded
from posttrain.algorithms.describe import describe
from posttrain.algorithms.policy import Algorithm, PolicyObjective, Pretraining
from posttrain.config.mixture_options import parts_of
from posttrain.config.service_options import options_of_services
from posttrain.config.training import RL, Distill
from posttrain.core.batch import Stats
from posttrain.core.component import Need
from posttrain.core.messages import several
from posttrain.core.protocols import Engine, Model, World
from posttrain.core.rollouts import Outcome, Rollout
from posttrain.core.seeds import seed_of
from posttrain.core.transcripts import Mask
from posttrain.core.types import Task, UserError
from posttrain.data.mixed_tasks import MixedTasks, part_of
from posttrain.data.tasks import Stream, Tasks
from posttrain.engines.open_engine import open_engine
from posttrain.engines.pool.engine_pool import EnginePool
from posttrain.envs.builtin import unscored
from posttrain.envs.play.group_rewards import scores_groups
from posttrain.envs.play.load_env import is_generator_env, load_env, success_of
from posttrain.envs.play.player import Player
from posttrain.learners.forward_pass import REFERENCE, Teaching
from posttrain.learners.local_learner import LocalLearner
from posttrain.models.adapters.lora import is_adapted
from posttrain.models.critic import Critic, ValueModel, critic_kind, new_critic
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.checkpoint import resolve
from posttrain.runs.run_files import WEIGHT_SYNC
from posttrain.runs.run_folder import RunFolder
from posttrain.training.adjust import adjust
from posttrain.training.gpu_assignment import engine_options
from posttrain.training.mixtures import mixed_tasks, separate_tasks
from posttrain.training.open_learner import new_learner, policy, reference, replay_experts
from posttrain.training.open_teachers import OpenTeachers, load_teachers
from posttrain.training.playground import open_playground
from posttrain.training.role_devices import CRITIC, role_device
from posttrain.training.rollout_figures import repeated
from posttrain.training.row_warnings import warn_unread
from posttrain.training.setup import (
    amount,
    end_tokens,
    fitting,
    held_out_number,
    microbatch_tokens,
    optimization,
    parameters,
    rate_note,
    reply_length_note,
    size_of,
    split_tasks,
    watch_lengths,
)
from posttrain.training.sources.collector import Collector, Size
from posttrain.training.sources.first_steps import FirstSteps
from posttrain.training.sources.length_filter import Prompts, TooLong
from posttrain.training.sources.mixture import part_metrics
from posttrain.training.sources.rl_source import RLSource
from posttrain.training.sources.sft_source import Transcripts
from posttrain.training.sources.token_recording import TokenRecording
from posttrain.training.task_orders import order_lines, task_order
from posttrain.training.text_loss import read_texts
from posttrain.training.training_run import RunContext, RunParts
from posttrain.training.verbs.evaluate import measured
from posttrain.training.weight_types import trained_type

EXAMPLES = 100  # tasks that are checked before teachers are loaded


def rl(context: RunContext[RL]) -> RunParts:
    """Train by reinforcement learning from rewards, or by on-policy distillation."""
    config, run, device, opened = context.config, context.run, context.device, context.resources
    rewarded = bool(context.env or config.env or config.mixture)
    env = context.env if rewarded else unscored.reward
    algorithm = _algorithm(config, env)
    success = _success(config, algorithm, env)
    train_tasks, held_out = _tasks(config, context.rows, env)
    order = task_order(config, train_tasks, success)
    assert run.start
    folder, resumed = run.checkpoint or run.start, run.checkpoint is not None
    ground = opened.enter_context(
        open_playground(config, env, train_tasks, device, run.path, resumed, [folder], run.world)
    )
    [known] = ground.models
    model, tokenizer, run.chat = policy(config, folder, device, run.world), known.tokenizer, known.chat
    train_tasks, held_out = run.chat.of(train_tasks), run.chat.of(held_out) if held_out else None
    replay_experts(config, model)
    end_tokens(model, tokenizer)  # raises if there is none, as no reply would end
    warn_unread(tokenizer, train_tasks)
    too_long = watch_lengths(config, model.config.context)
    if ground.pool.single_turn:
        Prompts(train_tasks, tokenizer, too_long).check()
    evaluated = fitting(held_out, ground.pool, tokenizer, too_long)
    opened_teachers = _teachers(context, algorithm, tokenizer, train_tasks, model)
    learner = _learner(config, algorithm, model, run.start, opened_teachers, run.world)
    engine = opened.enter_context(closing(_engine(run, model, tokenizer)))
    collector = Collector(
        train_tasks,
        ground.player(engine, tokenizer, model.config.context),
        Size(config.prompts, config.group, microbatch_tokens(config, model)),
        config.seed,
        success,
        too_long,
        needs=algorithm.needs,
        rewarded=rewarded,
        plan=algorithm.branching.plan(model.config.vocab) if algorithm.branching else None,
        tokens=config.tokens_per_step,
        order=order,
    )
    source = _source(run, collector, learner, algorithm, tokenizer, opened_teachers)
    opened.push(partial(_leave, source, run.world))
    in_parts = isinstance(held_out, MixedTasks)
    held_out_tasks = held_out_number(config, Counter(map(part_of, evaluated)) if in_parts else len(evaluated))
    tasks = f"{amount(train_tasks)}, {held_out_tasks}"
    sizes = _sizes(config, algorithm, model, tasks, engine, run.world.size)
    sizes += [*order_lines(config, order), *known.lines, *ground.lines]
    sizes += source.recording.describe(algorithm.wants, Need.REFERENCE in algorithm.needs)
    sizes += opened_teachers.lines if opened_teachers else []
    return RunParts(
        source,
        PolicyObjective(algorithm),
        learner,
        tokenizer,
        config.steps,
        sizes,
        describe(algorithm),
        _measure(config, source, engine, evaluated, in_parts, opened_teachers) if evaluated else None,
        notifiers=(too_long, *filter(None, [source.watch]), *([engine] if isinstance(engine, EnginePool) else [])),
    )


# -- pieces ------------------------------------------------------------------------------------------------------------


def _source(
    run: RunFolder[RL],
    collector: Collector,
    learner: LocalLearner,
    algorithm: Algorithm,
    tokenizer: Tokenizer,
    opened_teachers: OpenTeachers | None,
) -> RLSource:
    """Return the source of the run's steps."""
    config, too_long = run.config, collector.too_long
    assert too_long is not None
    return RLSource(
        collector,
        learner,
        algorithm,
        texts=_texts_to_imitate(run, algorithm.pretraining, tokenizer, learner.model, too_long),
        teachers=opened_teachers.teachers if opened_teachers else None,
        async_steps=config.async_steps,
        last=config.steps,
        recording=TokenRecording(config.record, config.record_after, config.seed),
        watch=FirstSteps(config.step_delimiter, options_of_services(config), too_long.say),
    )


def _leave(source: RLSource, world: World, kind: Any, error: BaseException | None, trace: Any) -> None:
    """Stop sampling when the run ends."""
    if error is not None:  # asynchronous rollouts may wait for other processes
        world.fail(error)
    source.queue.close()


def _measure(
    config: RL,
    source: RLSource,
    engine: Engine,
    tasks: Sequence[Task],
    in_parts: bool,
    opened_teachers: OpenTeachers | None,
) -> Callable[[Stats], list[Outcome]]:
    """Return the function that evaluates on these held-out tasks. `in_parts`: each of their parts has its own figures."""
    learner, collector = source.learner, source.queue.collector

    def evaluated(player: Player) -> list[Rollout]:
        engine.load(learner.weights(), learner.version)
        return player.without_exploration().play(repeated(tasks, config.eval_samples, config.seed))

    def measure(stats: Stats) -> list[Outcome]:
        rollouts = source.queue.run_between_steps(evaluated)
        measured(rollouts, collector.success, stats, collector.rewarded)
        if in_parts:
            stats.merge(part_metrics(rollouts, collector.success, "eval/"))
        if opened_teachers is not None:
            opened_teachers.teachers.measure(learner, rollouts, source.size.tokens_per_microbatch, stats)
        return [Outcome(rollout) for rollout in rollouts]

    return measure


def _algorithm(config: RL, env: Callable[..., Any] | None) -> Algorithm:
    """Return the algorithm with the settings of the run; for a mixture, with the limits of its longest episodes."""
    parts = list(parts_of(config).values())
    functions = [load_env(env or own.env) for own in parts or (config,)]
    if parts:
        tokens = [own.max_episode_tokens for own in parts]
        config = replace(
            config,
            max_tokens=max(own.max_tokens for own in parts),
            max_turns=max(own.max_turns for own in parts),
            max_episode_tokens=None if None in tokens else max(filter(None, tokens)),
        )
    single_turn = not any(map(is_generator_env, functions))
    return adjust(find(config.algorithm), config, single_turn, any(map(scores_groups, functions)))


def _success(config: RL, algorithm: Algorithm, env: Callable[..., Any] | None) -> float | None:
    """Return the reward from which on a reply succeeds, if options or the environment define it."""
    parts = parts_of(config)
    found = {name: success_of(own.env, config.success) for name, own in parts.items()}
    if len(set(found.values())) > 1:
        told = ", ".join(f"{name} {value:g}" if value is not None else f"{name} none" for name, value in found.items())
        raise UserError(
            f"the parts of the mixture have different rewards for a right reply ({told}): set one with --success"
        )
    success = next(iter(found.values())) if parts else success_of(env or config.env, config.success)
    if success is None and Need.SUCCESS in algorithm.needs:
        raise UserError(
            f"{config.algorithm} needs to know which replies are right: give the reward of a right reply with --success"
        )
    return success


def _tasks(
    config: RL, rows: Any, env: Callable[..., Any] | None
) -> tuple[Tasks | Stream | MixedTasks, Tasks | MixedTasks | None]:
    """Return the tasks to train on, and those to evaluate on."""
    if config.mixture:
        return mixed_tasks(config, rows, env)
    train_tasks, held_out = split_tasks(config, rows, env)
    if separate := separate_tasks(config, train_tasks, env):
        return train_tasks, separate
    return train_tasks, held_out.first(config.eval_limit) if held_out else None


def _teachers(
    context: RunContext[RL],
    algorithm: Algorithm,
    tokenizer: Tokenizer,
    train_tasks: Tasks | Stream | MixedTasks,
    model: Model,
) -> OpenTeachers | None:
    """Open the teachers of a distillation; `rl` has none."""
    config, run = context.config, context.run
    if not isinstance(config, Distill):
        return None
    assert run.start
    examples = train_tasks.examples(EXAMPLES)
    return load_teachers(config, algorithm, tokenizer, examples, context.resources, run.world, model, run.start)


def _learner(
    config: RL, algorithm: Algorithm, model: Model, start: Path, opened_teachers: OpenTeachers | None, world: World
) -> LocalLearner:
    """Open the learner, with the models that the algorithm needs besides the policy."""
    others = dict(opened_teachers.models) if opened_teachers else {}
    if Need.REFERENCE in algorithm.needs:
        others[REFERENCE] = reference(config, model, start, world, moves=algorithm.moving is not None)
    teacher = algorithm.teacher
    how = replace(
        optimization(config, config.steps * algorithm.epochs * algorithm.minibatches),
        trust_region=algorithm.trust_region,
        critic_lr=config.critic_lr,
        critic_follow=algorithm.critic.follow if algorithm.critic else 0.0,
    )
    return new_learner(
        config,
        model,
        how,
        world,
        temperature=config.temperature,
        others=others,
        teaching=Teaching(teacher.temperature, teacher.beta) if teacher else Teaching(),
        critic=_critic(config, algorithm, start, model),
    )


def _sizes(config: RL, algorithm: Algorithm, model: Model, tasks: str, engine: Engine, processes: int) -> list[str]:
    """Describe the sizes of the run, with a note on a learning rate that is far from the usual ones."""
    rollouts = config.prompts * config.group
    each = f" in each of {processes} processes" if processes > 1 else ""
    lengths = {f"--mixture.{name}.max-tokens": own.max_tokens for name, own in parts_of(config).items()}
    lengths = lengths or {"--max-tokens": config.max_tokens}
    note: list[str] = []
    if algorithm.trust_region is None:  # otherwise the KL bounds the step, not the learning rate
        note = rate_note(optimization(config, 1), is_adapted(model), parameters(model))
    return [
        f"model {size_of(model)}, context {model.config.context}, vocabulary {model.config.vocab}",
        tasks,
        f"{several(config.steps, 'step')} of {several(config.prompts, 'prompt')} x {several(config.group, 'rollout')} = "
        f"{several(rollouts, 'rollout')} of at most {several(max(lengths.values()), 'token')}; "
        f"micro-batches of {microbatch_tokens(config, model)} tokens; "
        f"{min(config.slots, -(-rollouts // processes))} sampled at once{each} by {engine.backend}",
        *reply_length_note(lengths, model.config.context),
        *note,
        *notes_on_steps(config, algorithm),
    ]


def notes_on_steps(config: RL, algorithm: Algorithm) -> list[str]:
    """Return lines for the user on rewards of steps that the algorithm does not use as steps; else []."""
    advantage = algorithm.advantage
    if not config.rewards_steps or isinstance(advantage, Unrewarded):
        return []
    if config.step_aggregate == "none" and not advantage.by_token:
        return [
            f"{algorithm.name} adds the rewards of steps up, so more steps earn more: --algorithm grpo-process credits "
            "each step, --step-aggregate min counts the worst one"
        ]
    if config.step_aggregate != "none" and isinstance(advantage, StepRewards) and advantage.outcome_apart:
        return [
            f"--outcome-apart has nothing to set apart with --step-aggregate {config.step_aggregate}, which makes one "
            "reward of all steps, unless the environment rewards steps itself: leave one of them out"
        ]
    return []


def _engine(run: RunFolder[RL], model: Model, tokenizer: Tokenizer) -> Engine:
    """Open the engine that samples the rollouts."""
    config = run.config
    options, asynchronous = engine_options(config, run.path / WEIGHT_SYNC).of(run.world), config.async_steps > 0
    own = asynchronous or config.in_parts
    return open_engine(config.engine, model, tokenizer, options, own=own, asynchronous=asynchronous)


def _critic(config: RL, algorithm: Algorithm, start: Path, model: Model) -> Critic | None:
    """Load the critic that the algorithm needs, from its own checkpoint or from the policy's start."""
    if algorithm.critic is None:
        return None
    kind = critic_kind(algorithm.needs)
    folder = None if config.critic == "shared" else resolve(config.critic_model) if config.critic_model else start
    device = model.head.device if folder is None else role_device(config, CRITIC, model.head.device)
    # a target copy moves by steps that bfloat16 would round away
    matrices = trained_type(config) if kind is ValueModel and not algorithm.critic.follow else None
    return new_critic(kind, folder, model, seed_of(config.seed, "critic"), device, matrices)


def _texts_to_imitate(
    run: RunFolder[RL], pretraining: Pretraining | None, tokenizer: Tokenizer, model: Model, too_long: TooLong
) -> Transcripts | tuple[()]:
    """Return the texts of a pretraining term: rows with `text`, which is imitated as a whole, or with prompt and response.

    Without such a term there are none.
    """
    if pretraining is None:
        return ()
    assert run.config.ptx is not None
    tasks = run.chat.of(read_texts("--ptx", run.config.ptx), answered=True)
    eos = end_tokens(model, tokenizer)
    mask: Mask = "assistant" if pretraining.mask_prompt else "all"
    return Transcripts(tasks, tokenizer, eos, model.config.vocab, too_long, mask)
