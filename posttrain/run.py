"""Puts the pieces of a run together: configuration -> data, model, engine, learner, source -> the loop -> a run directory.

`sft`, `rl` and `evaluate` here take a configuration; the front door in `posttrain/__init__.py` and the command line are
thin layers over them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from posttrain import checkpoint as checkpoints
from posttrain.algorithms.policy import adjust, find, policy_objective
from posttrain.config import RL, SFT, AnyTraining, Data, Evaluation, Training, as_dict, continued, validate
from posttrain.data.rows import load_rows
from posttrain.data.tasks import hold_out, to_tasks
from posttrain.display import Display
from posttrain.engines.local import LocalEngine
from posttrain.envs.host import Host
from posttrain.envs.load import load_converter, load_env
from posttrain.envs.play import Episode, play, seed_of
from posttrain.estimate import paired_interval, summary
from posttrain.experience import Experience, Size
from posttrain.learners.local import LocalLearner, Optimization
from posttrain.models.decoder import Decoder, DecoderConfig, new_decoder
from posttrain.models.folder import load_model, save_model
from posttrain.models.tokenizer import Tokenizer
from posttrain.record import Record, curves, read_metrics, read_run
from posttrain.supervised import Demonstrations, demonstrate, likelihood_objective
from posttrain.train import Trained, interruptible, train
from posttrain.types import Invalid, Rollout, Sampling, Source, Stats, Task, UserError

RUN_FILES = ("run.json", "metrics.jsonl", "timing.jsonl", "rollouts", "tensorboard", "checkpoints", "curves.png")
"""What --overwrite deletes: what a run makes, and nothing else that may stand in the folder."""


@dataclass
class Run:
    """A finished (or interrupted) run."""

    path: Path
    checkpoint: Path | None  # the newest one: a Hugging Face folder
    interrupted: bool = False

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict per step, as in metrics.jsonl."""
        return read_metrics(self.path)

    @property
    def final(self) -> dict[str, Any]:
        """The final figures, as in run.json."""
        final: dict[str, Any] = read_run(self.path).get("final", {})
        return final


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
    validate(replace(config, tasks=config.tasks or "rows in memory" * (tasks is not None)))
    device = prepare(config)
    data = load_tasks(config, tasks, need=("prompt", "response"))
    train_tasks, held_out = hold_out(data, config.held_out, config.seed) if config.held_out else (data, [])
    record, resumed = open_run(config)
    model, tokenizer = _start(config, train_tasks, resumed, device)
    context, eos = model.config.context, end_tokens(model, tokenizer)
    source = Demonstrations(
        [demonstrate(t, tokenizer, eos, context, config.mask_prompt) for t in train_tasks],
        config.rows,
        config.tokens_per_microbatch,
        config.seed,
        device,
    )
    unseen = [demonstrate(t, tokenizer, eos, context, config.mask_prompt) for t in held_out]
    steps = max(1, round(source.steps_per_epoch * config.epochs))
    learner = LocalLearner(
        model, optimization(config, steps), precision=config.precision, measure_entropy=False
    )

    def measure(stats: Stats) -> None:
        outputs = learner.evaluate(source.batches(unseen)) if unseen else []
        for o in outputs:
            stats.add("eval/loss", -o.logp.sum().item(), o.logp.numel())

    tokens = sum(t.n_sampled for t in source.transcripts)
    lines = [
        f"model {parameters(model):,} parameters, context {context}, vocabulary {model.config.vocab}",
        f"{len(train_tasks)} rows ({tokens:,} tokens to learn), {len(held_out)} held out",
        f"{steps} steps of {config.rows} rows, micro-batches of {config.tokens_per_microbatch} tokens",
        "minimise  - sum_t lp_t / (tokens of the step)",
    ]
    loop = _Loop(config, record, learner, source, tokenizer, measure, lines, steps)
    return loop.run(likelihood_objective, resumed, "sft")


def rl(config: RL, tasks: Sequence[Task] | None = None, env: Callable[..., Any] | None = None) -> Run:
    """Learn from rewards. `tasks` and `env` may be given as objects, instead of by name in `config`."""
    validate(
        replace(
            config,
            tasks=config.tasks or "rows in memory" * (tasks is not None),
            env=config.env or "function" * (env is not None),
        )
    )
    device = prepare(config)
    algorithm = adjust(
        find(config.algorithm),
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        kl=config.kl,
        epochs=config.epochs,
        minibatches=config.minibatches,
        max_tokens=config.max_tokens,
        group=config.group,
    )
    data = load_tasks(config, tasks, env=env)
    train_tasks, held_out = hold_out(data, config.held_out, config.seed) if config.held_out else (data, [])
    if config.eval_tasks:
        held_out = load_tasks(replace(config, tasks=config.eval_tasks, limit=None, split=None), None, env=env)
    held_out = held_out[: config.eval_limit]
    with Host(env or config.env, config.env_workers, config.env_seconds) as host:
        record, resumed = open_run(config)
        model, tokenizer = _start(config, train_tasks, resumed, device)
        reference = None
        if algorithm.kl:
            assert config.model
            reference = load_model(resolve(config.model), device=device).requires_grad_(False)
        learner = LocalLearner(
            model,
            optimization(config, config.steps * algorithm.epochs * algorithm.minibatches),
            temperature=config.temperature,
            precision=config.precision,
            reference=reference,
        )
        engine = LocalEngine(model, tokenizer, config.slots, config.precision)
        sampling = Sampling(config.temperature, max_tokens=config.max_tokens, stop=config.stop)
        source = Experience(
            tasks=train_tasks,
            host=host,
            engine=engine,
            learner=learner,
            tokenizer=tokenizer,
            algorithm=algorithm,
            sampling=sampling,
            size=Size(config.prompts, config.group, config.tokens_per_microbatch),
            seed=config.seed,
            correct=config.correct,
        )

        def measure(stats: Stats) -> None:
            engine.load(learner.weights(), learner.version)
            episodes = repeated(held_out, config.eval_samples, config.seed)
            for rollout in play(episodes, host, engine, tokenizer, sampling, model.config.context):
                if isinstance(rollout.reward, Invalid):
                    continue
                stats.add("eval/accuracy", rollout.reward >= config.correct - 1e-6)
                stats.add("eval/reward", rollout.reward)
                stats.add("eval/length", rollout.n_sampled)

        rollouts = config.prompts * config.group
        lines = [
            f"model {parameters(model):,} parameters, context {model.config.context}, vocabulary {model.config.vocab}",
            f"{len(train_tasks)} tasks, {len(held_out)} held out",
            f"{config.steps} steps of {config.prompts} prompts x {config.group} rollouts = {rollouts} rollouts "
            f"of at most {config.max_tokens} tokens; micro-batches of {config.tokens_per_microbatch} tokens; "
            f"{min(config.slots, rollouts)} sampled at once",
            *algorithm.describe(),
        ]
        loop = _Loop(config, record, learner, source, tokenizer, measure if held_out else None, lines, config.steps)
        return loop.run(policy_objective(algorithm), resumed, "rl")


def evaluate(config: Evaluation, tasks: Sequence[Task] | None = None, env: Callable[..., Any] | None = None) -> Evaluated:
    """Play every task `samples` times. With `against`, two checkpoints play the same tasks with the same seeds."""
    validate(
        replace(
            config,
            tasks=config.tasks or "rows in memory" * (tasks is not None),
            env=config.env or "function" * (env is not None),
        )
    )
    device = prepare(config)
    data = load_tasks(config, tasks, env=env)
    if config.held_out:
        data = hold_out(data, config.held_out, config.split_seed)[1]
    sampling = Sampling(config.temperature, config.top_p, config.top_k, config.max_tokens, config.stop)
    with Host(env or config.env, config.env_workers, config.env_seconds) as host:

        def figures(folder: str) -> tuple[dict[str, Any], dict[str, list[float]], list[Rollout]]:
            path = resolve(folder)
            model, tokenizer = load_model(path, device=device), Tokenizer.load(path)
            engine = LocalEngine(model, tokenizer, config.slots, config.precision)
            episodes = repeated(data, config.samples, config.seed)
            rollouts = play(episodes, host, engine, tokenizer, sampling, model.config.context)
            rewards: dict[str, list[float]] = {t["id"]: [] for t in data}
            for r in rollouts:
                if not isinstance(r.reward, Invalid):
                    rewards[r.task["id"]].append(r.reward)
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


class _Loop:
    """A run from its first or resumed step to its end: record, evaluate, save, show."""

    def __init__(
        self,
        config: SFT | RL,
        record: Record,
        learner: LocalLearner,
        source: Source,
        tokenizer: Tokenizer,
        measure: Callable[[Stats], None] | None,
        lines: list[str],
        steps: int,
    ) -> None:
        self.config, self.record, self.learner, self.source, self.tokenizer = config, record, learner, source, tokenizer
        self.measure, self.lines, self.steps = measure, lines, steps
        self.display = Display(quiet=config.quiet)
        self.saved: Path | None = None

    def run(self, objective: Any, resumed: Path | None, verb: str) -> Run:
        first = 1
        if resumed:
            self.saved = resumed
            self.learner.load(resumed / "training")
            self.source.restore(checkpoints.load_state(resumed / "training")["source"])
            first = checkpoints.step_of(resumed) + 1
            self.display.note(f"resuming {self.record.folder} after step {first - 1}")
        self.display.start(f"{verb} {self.record.folder}", self.steps, self.lines)
        final: dict[str, Any] = {}
        try:
            with interruptible(self.display.note) as interrupted:
                if first == 1 and self.measure:
                    stats = Stats()
                    self.measure(stats)
                    self.record.metrics(0, stats.means())
                hooks = [self._after]
                done = first - 1
                if first <= self.steps:
                    done = train(
                        self.learner, self.source, objective, hooks, first=first, steps=self.steps, interrupted=interrupted
                    )
                stopped = interrupted() and done < self.steps
            final = {k: v for k, v in (read_metrics(self.record.folder) or [{}])[-1].items()}
        finally:
            self.display.close()
            self.record.close(final)
        curves(self.record.folder)
        return Run(self.record.folder, self.saved, stopped)

    def _after(self, trained: Trained) -> None:
        number, config = trained.step.number, self.config
        stats = trained.stats
        due = config.eval_every and number % config.eval_every == 0
        if self.measure and (due or number == self.steps):
            self.measure(stats)
        metrics = stats.means()
        self.record.metrics(number, metrics)
        tokens = stats["length"][0] if "length" in stats else stats["nll"][1]
        seconds = trained.seconds
        timing = {f"seconds/{name}": value for name, value in seconds.items()}
        timing["tokens_per_second"] = tokens / max(1e-9, sum(seconds.values()))
        self.record.timing(number, timing)
        if trained.step.rollouts:
            self.record.rollouts(number, trained.step.rollouts)
        self.display.step(number, metrics, timing)
        if trained.last or number % config.save_every == 0:
            self.record.flush()
            self.saved = checkpoints.save(self.record.folder, number, self._write, config.keep)

    def _write(self, folder: Path) -> None:
        save_model(self.learner.model, folder, self.tokenizer)
        state = folder / "training"
        state.mkdir()
        self.learner.save(state)
        checkpoints.save_state(state, {"source": self.source.state()})


def prepare(config: Training | Evaluation) -> torch.device:
    """Threads, seed of the global generator (nothing should draw from it) and the device."""
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    if config.device != "auto":
        try:
            return torch.empty(0, device=config.device).device
        except (RuntimeError, AssertionError) as error:
            raise UserError(f"--device {config.device} cannot be used: {str(error).splitlines()[0]}") from error
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


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


def begin(config: AnyTraining) -> tuple[AnyTraining, Path | None]:
    """The options as the run has them, and the checkpoint to go on from. Nothing is written or deleted yet.

    Raises UserError if --out holds a run and none is expected there, or the other way round.
    """
    folder, holds_run = Path(config.out), (Path(config.out) / "run.json").exists()
    if config.resume and config.overwrite:
        raise UserError("--resume continues the run in --out and --overwrite deletes it: give one of them")
    if not config.resume:
        if holds_run and not config.overwrite:
            raise UserError(f"{folder} already holds a run: --resume continues it, --overwrite deletes it, or choose another --out")
        return config, None
    if not holds_run:
        raise UserError(f"{folder} holds no run to resume: leave out --resume to begin one there, or give the --out of one")
    run, verb = read_run(folder), type(config).__name__.lower()
    if run["verb"] != verb:
        raise UserError(f"{folder} is a run of posttrain {run['verb']}: resume it with that verb")
    newest = checkpoints.newest(folder, print)
    if newest is None:
        print(f"{folder} has no checkpoint yet: starting over")
    return continued(config, run["config"]), newest


def open_run(config: SFT | RL, resumed: Path | None, extra: dict[str, Any]) -> Record:
    """The run directory, ready to be written: new, or with what was recorded since the checkpoint taken out."""
    folder = Path(config.out)
    with writing(folder):
        if config.resume:
            return Record.resume(folder, checkpoints.step_of(resumed) if resumed else -1)
        if config.overwrite:
            for inside in (config.model, config.tasks):
                if inside and Path(inside).resolve().is_relative_to(folder.resolve()):
                    raise UserError(f"--overwrite would delete {inside}, which this run needs: choose another --out")
            for name in RUN_FILES:
                shutil.rmtree(folder / name, ignore_errors=True)
                (folder / name).unlink(missing_ok=True)
        return Record.create(folder, as_dict(config), type(config).__name__.lower(), extra)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Within it, a disk that is full or not writable is a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error


def resolve(model: str) -> Path:
    """The checkpoint folder that a name means: a run directory stands for its newest undamaged checkpoint."""
    path = Path(model)
    if (path / "run.json").exists():
        newest = checkpoints.newest(path, print)
        if newest is None:
            raise UserError(f"{path} is a run without a checkpoint: let it train for --save-every steps first")
        return newest
    return path


def _start(config: SFT | RL, tasks: Sequence[Task], resumed: Path | None, device: torch.device) -> tuple[Decoder, Tokenizer]:
    """Model and tokenizer at the beginning of this run, or of its continuation."""
    if resumed or config.model:
        folder = resumed or resolve(config.model or "")
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
        raise UserError(f"the tokenizer in {config.tokenizer} has no end-of-sequence token: set eos_token in its config")
    model.eos_ids = (tokenizer.eos_id,)
    return model.to(device), tokenizer


def _texts(task: Task) -> list[str]:
    if "messages" in task:
        return [m["content"] for m in task["messages"]]
    return [task["prompt"], task.get("response", "")]


def end_tokens(model: Decoder, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that end a reply. Raises UserError if there is none: nothing would ever stop."""
    if model.eos_ids:
        return model.eos_ids
    if tokenizer.eos_id is None:
        raise UserError(
            "neither the model's generation_config.json nor its tokenizer names an end-of-sequence token: set eos_token_id"
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
