"""Puts the pieces of a run together: configuration -> data, model, engine, learner, source, and off on its course.

`sft`, `rl` and `evaluate` here take a configuration; the front door in `posttrain/__init__.py` and the command line are
thin layers over them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from posttrain.algorithms.adjust import adjust
from posttrain.algorithms.critic import SoftQ
from posttrain.algorithms.describe import describe
from posttrain.algorithms.policy import Algorithm, policy_objective
from posttrain.algorithms.table import find
from posttrain.config import RL, SFT, Data, Evaluation, Training, validate
from posttrain.data.rows import load_rows
from posttrain.data.tasks import hold_out, to_tasks
from posttrain.engines.local import LocalEngine
from posttrain.engines.vllm import VLLMEngine
from posttrain.envs.chat import Conversation
from posttrain.envs.load import load_converter, load_env, opening
from posttrain.envs.play import Episode, play, seed_of
from posttrain.envs.pool import Done, EnvPool
from posttrain.kernels import build
from posttrain.learners.local import LocalLearner, Optimization
from posttrain.models.critic import ActionValueModel, Critic, ValueModel, new_critic
from posttrain.models.decoder import Decoder, DecoderConfig, new_decoder
from posttrain.models.folder import load_model
from posttrain.models.fused import compiles
from posttrain.models.tokenizer import Tokenizer
from posttrain.runs.checkpoint import resolve
from posttrain.sources.rl import Experience, Size
from posttrain.sources.sft import Demonstrations, Likelihood, demonstrate
from posttrain.training.intervals import paired_interval, summary
from posttrain.training.trainer import Run, Trainer, begin, start_of
from posttrain.types import Invalid, Reply, Rollout, Sampling, Stats, Task, Transcript, UserError

TRIAL_TURNS = 8  # of a canned reply to an environment that may wait for a word which it does not contain


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation found."""

    figures: dict[str, Any]  # of `estimate.summary`: mean, low, high of reward, accuracy, pass@k
    rewards: dict[str, list[float]]  # task id -> valid rewards of its samples
    rollouts: list[Rollout] = field(repr=False)
    invalid: int = 0
    against: dict[str, Any] | None = None  # figures of the second checkpoint
    difference: dict[str, float] | None = None  # mean, low, high of the accuracy of the first minus the second


# -- the three verbs ---------------------------------------------------------------------------------------------------


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

    tokens = sum(t.n_sampled for t in source.transcripts)
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
    algorithm = adjust(find(config.algorithm), config)
    data = load_tasks(config, tasks, env=env)
    train_tasks, held_out = hold_out(data, config.held_out, config.seed) if config.held_out else (data, [])
    if config.eval_tasks:
        held_out = load_tasks(replace(config, tasks=config.eval_tasks, limit=None, split=None), None, env=env)
    held_out = held_out[: config.eval_limit]
    with EnvPool(env or config.env, config.env_workers, config.env_seconds) as pool, ExitStack() as opened:
        rehearse(pool, train_tasks)
        start = start_of(config)
        model, tokenizer = _start(config, train_tasks, resumed or start, device)
        end_tokens(model, tokenizer)  # there must be one, or no reply would end
        if pool.single_turn:
            check_prompts([*train_tasks, *held_out], tokenizer, model.config.context)
        assert start
        reference = load_model(start, device=device).requires_grad_(False) if algorithm.needs_reference else None
        learner = LocalLearner(
            model,
            optimization(config, config.steps * algorithm.epochs * algorithm.minibatches),
            temperature=config.temperature,
            precision=config.precision,
            reference=reference,
            critic=_critic(config, algorithm, start, model),
            critic_lr=config.critic_lr,
            trust_region=algorithm.trust_region,
            follow=algorithm.critic.tau if isinstance(algorithm.critic, SoftQ) else 0.0,
        )
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
            correct=config.correct,
            texts=_texts_to_imitate(config, tokenizer, model) if algorithm.pretraining else (),
        )

        def measure(stats: Stats) -> None:
            engine.load(learner.weights(), learner.version)
            episodes = repeated(held_out, config.eval_samples, config.seed)
            for rollout in play(episodes, pool, engine, tokenizer, sampling, model.config.context):
                stats.add("eval/invalid", isinstance(rollout.reward, Invalid))
                if isinstance(rollout.reward, Invalid):
                    continue
                stats.add("eval/accuracy", rollout.reward >= config.correct - 1e-6)
                stats.add("eval/reward", rollout.reward)
                stats.add("eval/length", rollout.n_sampled)

        rollouts = config.prompts * config.group
        sizes = [
            f"model {parameters(model):,} parameters, context {model.config.context}, vocabulary {model.config.vocab}",
            f"{len(train_tasks)} tasks, {len(held_out)} held out",
            f"{config.steps} steps of {config.prompts} prompts x {config.group} rollouts = {rollouts} rollouts "
            f"of at most {config.max_tokens} tokens; micro-batches of {microbatch_tokens(config, device)} tokens; "
            f"{min(config.slots, rollouts)} sampled at once by {engine.backend}",
        ]
        loop = Trainer(config, start, resumed, learner, source, tokenizer, measure if held_out else None, config.steps)
        return loop.run(policy_objective(algorithm), sizes, describe(algorithm))


def evaluate(
    config: Evaluation, tasks: Sequence[Task] | None = None, env: Callable[..., Any] | None = None
) -> Evaluated:
    """Play every task `samples` times. With `against`, two checkpoints play the same tasks with the same seeds."""
    validate(config)
    device = prepare(config)
    data = load_tasks(config, tasks, env=env)
    if config.held_out:
        data = hold_out(data, config.held_out, config.split_seed)[1]
    sampling = Sampling(config.temperature, config.top_p, config.top_k, config.max_tokens, config.stop)
    with EnvPool(env or config.env, config.env_workers, config.env_seconds) as pool:
        rehearse(pool, data)

        def figures(folder: str) -> tuple[dict[str, Any], dict[str, list[float]], list[Rollout]]:
            path = resolve(folder)
            model, tokenizer = load_model(path, device=device), Tokenizer.load(path)
            end_tokens(model, tokenizer)
            engine = LocalEngine(model, tokenizer, config.slots, config.precision)
            episodes = repeated(data, config.samples, config.seed)
            rollouts = play(episodes, pool, engine, tokenizer, sampling, model.config.context)
            rewards: dict[str, list[float]] = {t["id"]: [] for t in data}
            for r in rollouts:
                if not isinstance(r.reward, Invalid):
                    rewards[r.task["id"]].append(r.reward)
            reasons = [r.reward.reason for r in rollouts if isinstance(r.reward, Invalid)]
            if len(reasons) == len(rollouts):
                raise UserError(f"no reward of {folder} is valid: mend --env {config.env}; the first: {reasons[0]}")
            return summary(list(rewards.values()), config.k, config.correct), rewards, rollouts

        own, rewards, rollouts = figures(config.model)
        invalid = sum(isinstance(r.reward, Invalid) for r in rollouts)
        if config.against is None:
            return Evaluated(own, rewards, rollouts, invalid)
        other, other_rewards, _ = figures(config.against)

    def accuracy(values: list[float]) -> float:
        return sum(v >= config.correct - 1e-6 for v in values) / len(values)

    both = [i for i in rewards if rewards[i] and other_rewards[i]]
    a, b = [accuracy(rewards[i]) for i in both], [accuracy(other_rewards[i]) for i in both]
    low, high = paired_interval(a, b)
    difference = {"mean": sum(x - y for x, y in zip(a, b, strict=True)) / len(both), "low": low, "high": high}
    return Evaluated(own, rewards, rollouts, invalid, other, difference)


# -- what they share ---------------------------------------------------------------------------------------------------


def prepare(config: Training | Evaluation) -> torch.device:
    """Threads, seed of the global generator (nothing should draw from it) and the device."""
    if config.threads:
        torch.set_num_threads(config.threads)
    build.use(config.compiled)
    torch.manual_seed(config.seed)
    return choose_device(config.device)


def choose_device(name: str) -> torch.device:
    """The device of that name; "auto": a CUDA device if there is one. Raises UserError if it cannot be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from error


def microbatch_tokens(config: Training, device: torch.device) -> int:
    """On a processor larger micro-batches leave its caches: more memory, and slower rather than faster."""
    return config.tokens_per_microbatch or (1024 if device.type == "cpu" else 8192)


def load_tasks(
    config: Data, tasks: Sequence[Task] | None, env: Callable[..., Any] | None = None, need: Sequence[str] = ("prompt",)
) -> list[Task]:
    """The tasks of a verb, converted by what stands beside the environment if the rows are not tasks yet."""
    spec = env or config.env or None
    if spec is not None:
        load_env(spec)  # its mistakes are told before anything heavy starts
    if tasks is not None:
        return list(to_tasks(tasks, need=need))
    convert = load_converter(spec) if spec is not None else None
    return list(
        to_tasks(
            load_rows(config.tasks, config.split, config.limit),
            fields=config.fields,
            prompt_template=config.prompt_template,
            response_template=config.response_template,
            convert=_demonstrations_only(convert) if convert and "response" in need else convert,
            need=need,
        )
    )


def _demonstrations_only(convert: Callable[[Task], Task | None]) -> Callable[[Task], Task | None]:
    """Leave out rows that make a task but no demonstration of it, such as problems without a worked solution."""

    def converted(row: Task) -> Task | None:
        task = convert(row)
        return task if task and ("response" in task or "messages" in task) else None

    return converted


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
    kind = ActionValueModel if isinstance(algorithm.critic, SoftQ) else ValueModel
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


def rehearse(pool: EnvPool, tasks: Sequence[Task]) -> None:
    """Play up to three tasks with a canned reply, so that a broken environment is told before anything heavy starts.

    Raises UserError if none of them could be scored.
    """
    reasons = []
    for task in (tasks[0], tasks[len(tasks) // 2], tasks[-1]):
        pool.ready()
        pool.start(0, task)
        for turns in range(TRIAL_TURNS + 1):
            [(_, event)] = pool.poll(None)
            if isinstance(event, Done):
                break
            if turns < TRIAL_TURNS:
                pool.send(0, Reply(str(task.get("response", task.get("answer", "")))))
        if not isinstance(event, Done):
            pool.drop(0)
            return
        if not isinstance(event.reward, Invalid):
            return
        reasons.append(event.reward.reason)
    raise UserError(f"the environment could score no sample reply: {reasons[0]} (try it with posttrain check)")


def check_prompts(tasks: Sequence[Task], tokenizer: Tokenizer, context: int) -> None:
    """Raises UserError if a task's prompt leaves no room for a reply: better now than in the middle of the run."""
    for task in tasks:
        length = len(Conversation(tokenizer).show(opening(task), None))
        if not 0 < length < context:
            what = f"has {length} tokens" if length else "is empty"
            raise UserError(
                f"the prompt of task {task['id']!r} {what}; the model's context holds {context} tokens with the reply: "
                "shorten it or leave the row out"
            )


def end_tokens(model: Decoder, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that end a reply. Raises UserError if there is none: nothing would ever stop."""
    if model.eos_ids:
        return model.eos_ids
    if tokenizer.eos_id is None:
        raise UserError(
            "neither generation_config.json nor the tokenizer of the model names an end-of-sequence token: "
            "set eos_token_id in the first"
        )
    return (tokenizer.eos_id,)


def optimization(config: Training, updates: int) -> Optimization:
    return Optimization(
        lr=config.lr,
        schedule=config.schedule,
        warmup=config.warmup,
        updates=updates,
        betas=config.betas,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )


def repeated(tasks: Sequence[Task], samples: int, seed: int) -> list[Episode]:
    """Each task `samples` times, with seeds of evaluation's own: it touches no state of training."""
    return [
        Episode(task, str(task["id"]), seed_of(seed, "evaluation", task["id"], sample))
        for task in tasks
        for sample in range(samples)
    ]


def parameters(model: Decoder) -> int:
    return sum(p.numel() for p in model.parameters())
