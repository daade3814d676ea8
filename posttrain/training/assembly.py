"""Puts the pieces of a run together: configuration -> data, model, engine, learner, source, and off to the trainer.

`sft` and `rl` here take a configuration; the front door in `posttrain/__init__.py` and the command line are thin layers
over them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from posttrain.algorithms.describe import describe
from posttrain.algorithms.policy import Algorithm, policy_objective
from posttrain.algorithms.table import find
from posttrain.batch import Stats
from posttrain.config import RL, SFT, validate
from posttrain.data.rows import load_rows
from posttrain.data.tasks import hold_out, to_tasks
from posttrain.engines.local import LocalEngine
from posttrain.engines.vllm import VLLMEngine
from posttrain.envs.load import is_generator_env, load_env, success_of
from posttrain.envs.play import play
from posttrain.kernels import build
from posttrain.learners.local import LocalLearner
from posttrain.models.critic import ActionValueModel, Critic, ValueModel, new_critic
from posttrain.models.decoder import Decoder, DecoderConfig, new_decoder
from posttrain.models.folder import described, load_model
from posttrain.models.fused import compiles
from posttrain.models.tokenizer import Tokenizer
from posttrain.part import Need
from posttrain.protocols import Engine
from posttrain.runs.checkpoint import resolve
from posttrain.seeds import seed_of
from posttrain.sources.collecting import Size
from posttrain.sources.rl import Experience
from posttrain.sources.sft import Demonstrations, Likelihood, demonstrate
from posttrain.training.adjust import adjust
from posttrain.training.evaluation import measured, repeated
from posttrain.training.setup import (
    check_prompts,
    end_tokens,
    load_tasks,
    microbatch_tokens,
    open_pool,
    optimization,
    parameters,
    prepare,
    rehearse,
)
from posttrain.training.trainer import Run, Trainer, begin, start_of
from posttrain.types import Sampling, Task, Transcript, UserError


def sft(config: SFT, tasks: Sequence[Task] | None = None) -> Run:
    """Imitate demonstrations. `tasks`: rows in memory, instead of `config.tasks`."""
    config, resumed = begin(config)
    validate(config)
    device = prepare(config)
    data = load_tasks(config, tasks, need=("prompt", "response"))
    train_tasks, held_out = hold_out(data, config.held_out, config.seed) if config.held_out else (data, [])
    start = start_of(config)
    model, tokenizer = _start(config, train_tasks, resumed or start, device)
    context, eos = model.config.context, end_tokens(model, tokenizer)
    source = Demonstrations(
        [demonstrate(t, tokenizer, eos, context, config.mask_prompt) for t in train_tasks],
        config.rows,
        microbatch_tokens(config, device),
        config.seed,
        device,
    )
    widest = max(max(t.tokens) for t in source.transcripts)
    if widest >= model.config.vocab:
        raise UserError(
            f"the tokenizer gives token {widest}, the model's vocabulary has {model.config.vocab}: no match"
        )
    unseen = [demonstrate(t, tokenizer, eos, context, config.mask_prompt) for t in held_out]
    steps = max(1, round(source.steps_per_epoch * config.epochs))
    learner = LocalLearner(model, optimization(config, steps), precision=config.precision)

    def measure(stats: Stats) -> None:
        for o in learner.evaluate(source.batches(unseen)):
            stats.add("eval/loss", -o.logp.sum().item(), o.logp.numel())

    tokens = sum(t.n_scored for t in source.transcripts)
    sizes = [
        f"model {parameters(model):,} parameters, context {context}, vocabulary {model.config.vocab}",
        f"{len(train_tasks)} rows ({tokens:,} tokens to learn), {len(held_out)} held out",
        f"{steps} steps of {config.rows} rows, micro-batches of {microbatch_tokens(config, device)} tokens"
        + (f", between products {build.backend(compiles())}" if device.type == "cpu" else ""),
    ]
    lines = ["minimise  - sum_t lp_t / (tokens of the step)"]
    loop = Trainer(config, start, resumed, learner, source, tokenizer, measure if unseen else None, steps)
    return loop.run(Likelihood(), sizes, lines)


def rl(config: RL, tasks: Sequence[Task] | None = None, env: Callable[..., Any] | None = None) -> Run:
    """Learn from rewards. `tasks` and `env` may be given as objects; `config` then holds a name for each, for the record."""
    config, resumed = begin(config)
    validate(config)
    device = prepare(config)
    algorithm = adjust(find(config.algorithm), config, not is_generator_env(load_env(env or config.env)))
    success = success_of(env or config.env, config.success)
    if success is None and Need.SUCCESS in algorithm.needs:
        raise UserError(
            f"{config.algorithm} needs to know which replies are right: give the reward of a right one with --success"
        )
    train_tasks, held_out = _tasks(config, tasks, env)
    with ExitStack() as opened:
        pool = opened.enter_context(open_pool(config, env))
        rehearse(pool, train_tasks)
        start = start_of(config)
        assert start
        model, tokenizer = _start(config, train_tasks, resumed or start, device)
        end_tokens(model, tokenizer)  # there must be one, or no reply would end
        if pool.single_turn:
            check_prompts([*train_tasks, *held_out], tokenizer, model.config.context)
        learner = _learner(config, algorithm, model, start)
        engine = opened.enter_context(closing(_engine(config, model, tokenizer)))
        sampling = Sampling(config.temperature, max_tokens=config.max_tokens, stop=config.stop)
        source = Experience(
            tasks=train_tasks,
            pool=pool,
            engine=engine,
            learner=learner,
            tokenizer=tokenizer,
            algorithm=algorithm,
            sampling=sampling,
            size=Size(config.prompts, config.group, microbatch_tokens(config, device)),
            seed=config.seed,
            success=success,
            episode_tokens=config.episode_tokens,
            max_turns=config.max_turns,
            texts=_texts_to_imitate(config, tokenizer, model) if algorithm.pretraining else (),
        )

        def measure(stats: Stats) -> None:
            engine.load(learner.weights(), learner.version)
            episodes = repeated(held_out, config.eval_samples, config.seed)
            rollouts = play(
                episodes,
                pool,
                engine,
                tokenizer,
                sampling,
                model.config.context,
                episode_tokens=config.episode_tokens,
                turns=config.max_turns,
            )
            measured(rollouts, success, stats)

        sizes = _sizes(config, model, len(train_tasks), len(held_out), engine)
        loop = Trainer(config, start, resumed, learner, source, tokenizer, measure if held_out else None, config.steps)
        return loop.run(policy_objective(algorithm), sizes, describe(algorithm))


# -- pieces ------------------------------------------------------------------------------------------------------------


def _tasks(config: RL, tasks: Sequence[Task] | None, env: Callable[..., Any] | None) -> tuple[list[Task], list[Task]]:
    """Tasks to train on, and those to evaluate on."""
    data = load_tasks(config, tasks, env=env)
    train_tasks, held_out = hold_out(data, config.held_out, config.seed) if config.held_out else (data, [])
    if config.eval_tasks:
        held_out = load_tasks(replace(config, tasks=config.eval_tasks, limit=None, split=None), None, env=env)
    return train_tasks, held_out[: config.eval_limit]


def _learner(config: RL, algorithm: Algorithm, model: Decoder, start: Path) -> LocalLearner:
    """The learner with what the row needs beside the policy."""
    reference = None
    if Need.REFERENCE in algorithm.needs:
        reference = load_model(start, device=model.head.device).requires_grad_(False)
    return LocalLearner(
        model,
        optimization(config, config.steps * algorithm.epochs * algorithm.minibatches),
        temperature=config.temperature,
        precision=config.precision,
        reference=reference,
        critic=_critic(config, algorithm, start, model),
        critic_lr=config.critic_lr,
        trust_region=algorithm.trust_region,
        follow=algorithm.critic.follow if algorithm.critic else 0.0,
    )


def _sizes(config: RL, model: Decoder, tasks: int, held_out: int, engine: Engine) -> list[str]:
    """What runs, in words."""
    rollouts = config.prompts * config.group
    return [
        f"model {parameters(model):,} parameters, context {model.config.context}, vocabulary {model.config.vocab}",
        f"{tasks} tasks, {held_out} held out",
        f"{config.steps} steps of {config.prompts} prompts x {config.group} rollouts = {rollouts} rollouts "
        f"of at most {config.max_tokens} tokens; micro-batches of {microbatch_tokens(config, model.head.device)} tokens; "
        f"{min(config.slots, rollouts)} sampled at once by {engine.backend}",
    ]


def _start(
    config: SFT | RL, tasks: Sequence[Task], folder: Path | None, device: torch.device
) -> tuple[Decoder, Tokenizer]:
    """Model and tokenizer of a checkpoint folder, or new ones."""
    if folder:
        return load_model(folder, device=device), Tokenizer.load(folder)
    assert isinstance(config, SFT)
    texts = [text for t in tasks for text in _texts(t)]
    if config.tokenizer in ("bpe", "characters"):
        tokenizer = Tokenizer.train(texts, config.vocab, config.tokenizer)  # type: ignore[arg-type]
    else:
        tokenizer = Tokenizer.load(config.tokenizer)
    if config.hidden % config.heads:
        raise UserError(f"--hidden {config.hidden} must be a multiple of --heads {config.heads}")
    model = new_decoder(
        DecoderConfig(
            vocab=tokenizer.vocab_size,
            hidden=config.hidden,
            layers=config.layers,
            heads=config.heads,
            kv_heads=config.kv_heads or config.heads,
            head_size=config.hidden // config.heads,
            intermediate=config.intermediate or -(-config.hidden * 8 // (3 * 32)) * 32,
            context=config.context,
            tied=True,
        ),
        config.seed,
    )
    if tokenizer.eos_id is None:
        raise UserError(
            f"the tokenizer in {config.tokenizer} has no end-of-sequence token: set eos_token in its config"
        )
    model.eos_ids = (tokenizer.eos_id,)
    model.source = described(model, tokenizer)
    return model.to(device), tokenizer


def _engine(config: RL, model: Decoder, tokenizer: Tokenizer) -> LocalEngine | VLLMEngine:
    """What samples the rollouts."""
    if config.engine == "local":
        return LocalEngine(model, tokenizer, config.slots, config.precision)
    limit = config.engine_seconds
    return VLLMEngine(
        model,
        tokenizer,
        config.slots,
        config.precision,
        cache_gib=config.engine_cache,
        load_seconds=limit,
        step_seconds=limit,
    )


def _critic(config: RL, algorithm: Algorithm, start: Path, model: Decoder) -> Critic | None:
    """The critic that the row needs, from its own checkpoint or from the start of the policy."""
    if algorithm.critic is None:
        return None
    kind = ActionValueModel if Need.ACTION_VALUE in algorithm.needs else ValueModel
    folder = None if config.critic == "shared" else resolve(config.critic_model) if config.critic_model else start
    return new_critic(kind, folder, model, seed_of(config.seed, "critic"))


def _texts_to_imitate(config: RL, tokenizer: Tokenizer, model: Decoder) -> list[Transcript]:
    """Pretraining text: rows with `text`, all of which is learned, or with prompt and response."""
    assert config.ptx is not None
    rows = [{"prompt": "", "response": r["text"]} if "text" in r else r for r in load_rows(config.ptx)]
    eos, context = end_tokens(model, tokenizer), model.config.context
    return [demonstrate(t, tokenizer, eos, context, mask_prompt=False) for t in to_tasks(rows, need=("response",))]


def _texts(task: Task) -> list[str]:
    if "messages" in task:
        return [m["content"] for m in task["messages"]]
    return [task["prompt"], task.get("response", "")]
