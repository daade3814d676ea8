"""The common start of all verbs: device, rows, environment, and checks before a run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from posttrain.algorithms.all_algorithms import find
from posttrain.config.inference import Evaluation, Label, Sample
from posttrain.config.row_options import Data
from posttrain.config.training import RL, Training
from posttrain.core.progress import doing
from posttrain.core.protocols import Model
from posttrain.core.types import Ask, Invalid, InvalidKind, Reply, Task, Turn, UserError
from posttrain.data.levels import Levels, makes_levels
from posttrain.data.mixed_tasks import AnyTasks, MixedTasks
from posttrain.data.rows import load_rows
from posttrain.data.tasks import Stream, Tasks, hold_out, to_tasks
from posttrain.data.tasks_from_rows import Conversion, Convert
from posttrain.envs.play.env_outputs import AwaitsGroup, Done
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.load_env import is_generator_env, load_converter, load_env, task_set
from posttrain.envs.play.mixed_pool import MixedPool
from posttrain.envs.play.service_client import Services
from posttrain.envs.preview import Seen, Viewer
from posttrain.envs.trial_report import FORMS, missing_column
from posttrain.learners.local_learner import Optimization
from posttrain.learners.repeated_bits import repeat_bits
from posttrain.models.free_memory import gpu_memory
from posttrain.models.gpu_placement import GPUPlacement, gpus_of_roles
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.kernels import build
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.terminal.notices import tell, warn
from posttrain.system.user_code import load_named
from posttrain.training.held_out_check import overlap
from posttrain.training.row_warnings import warn_near_names, warn_unknown_tokens_in_episodes
from posttrain.training.sources.length_filter import MAX_LENGTH, Prompts, TooLong

TRIAL_TURNS = 8  # turns of a rehearsed episode; an environment may wait for a word that no sample reply contains
LARGE_MODEL = 50_000_000  # parameters from which micro-batches on a CPU are smaller
GPU_TOKENS = 8192  # tokens of a micro-batch on a GPU if the size of its activations is unknown
ACTIVATION_SHARE = 0.2  # share of a GPU's memory for the activations of a micro-batch
SECOND_DERIVATIVES = (
    24  # times as much as activations: what a trust region keeps for each token, estimated at 0.5B and 1.5B
)
MOST_BEYOND = 1.05  # tokenizer's size / vocabulary: some checkpoints lack tokens that no text uses
SAMPLE_REPLIES = ("42", "<think>\n6 x 7 = 42\n</think>\n\\boxed{42}", *(form % 42 for form in FORMS.values()))


def prepare(config: Training | Evaluation | Sample) -> torch.device:
    """Set the threads and the seed of the global generator (nothing should draw from it), and return the device."""
    use_threads(config.threads)
    build.use(config.compiled)
    torch.manual_seed(config.seed if isinstance(config.seed, int) else config.seed[0])
    roles = gpus_of_roles(getattr(config, "role_devices", {}))
    device = choose_device(config.device, getattr(config, "learner_devices", ()), roles)
    if device.type == "cuda":
        repeat_bits(config.deterministic)
    if device.type == "cpu" and config.precision == "bfloat16" and not build.multiplies_bfloat16():
        warn(
            "this processor has no bfloat16 products (avx512_bf16, amx_bf16), so --precision bfloat16 is slower than "
            "float32: leave it out"
        )
    return device


def use_threads(count: int | None) -> None:
    """Set the number of threads; None: torch's choice. Raises UserError for more than can be useful."""
    if count:
        cores = os.cpu_count() or 1
        if count > max(64, 4 * cores):
            raise UserError(f"--threads {count} is too many: this machine has {cores} processors")
        torch.set_num_threads(count)


def choose_device(name: str, learner_devices: tuple[int, ...] = (), role_devices: tuple[int, ...] = ()) -> torch.device:
    """Return the device of that name; "auto": a CUDA device if there is one. Raises UserError if it cannot be used.

    It becomes the current CUDA device of this thread. Each of several processes of a machine takes a CUDA device of its
    own, as far as there are enough. `role_devices`: GPUs that models beside the policy take.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() or learner_devices else "cpu"
    if learner_devices and name != "cuda":
        raise UserError(f"--learner-devices names GPUs, and --device {name} is not a GPU: leave one of them out")
    if name == "cuda" and ("LOCAL_RANK" in os.environ or learner_devices or role_devices):
        placement = GPUPlacement.here(learner_devices, (), role_devices)
        if placement.gpus:
            name = f"cuda:{placement.learner()}"
    device = named_device(name)
    if device.type == "cuda":  # else libraries and captured graphs work on GPU 0, and hold some of its memory
        torch.cuda.set_device(device)
    return device


def named_device(name: str) -> torch.device:
    """Return the device of that name, with its index. Raises UserError if it cannot be used."""
    try:
        probe = torch.zeros(1, device=name)
        probe.item()  # fails for "meta"
        return probe.device
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        if torch.version.cuda is None and name.startswith("cuda"):
            why = "this installation of torch is for processors alone: leave --device out, or install torch with CUDA"
        raise UserError(f"--device {name} cannot be used: {why}") from error


def microbatch_tokens(config: Training, model: Model) -> int:
    """Return the tokens of a micro-batch. On a CPU larger ones would exceed its caches: more memory, and slower.

    For a large model it is fewer: products are as fast with 768 rows, with less memory for activations. Models of
    transformers keep three times as much for each token, and are as fast with half as many. On a GPU as many as keep their
    activations within a share of its memory, as few tokens do not occupy it.
    """
    if config.tokens_per_microbatch is not None:
        return config.tokens_per_microbatch
    device = model.head.device
    if device.type == "cpu":
        if parameters(model) < LARGE_MODEL:
            return 1024
        return 768 if isinstance(model.config, DecoderConfig) else 384
    shape = model.config
    if device.type != "cuda" or not isinstance(shape, DecoderConfig):
        return GPU_TOKENS
    return tokens_of_activations(shape, gpu_memory(device) * activation_share(config))


def activation_share(config: Training) -> float:
    """Return the share of a GPU's memory for the activations of a micro-batch."""
    region = isinstance(config, RL) and find(config.algorithm).trust_region is not None
    return ACTIVATION_SHARE / (SECOND_DERIVATIVES if region else 1)


def tokens_of_activations(shape: DecoderConfig, room: float) -> int:
    """Return the number of tokens whose activations in bfloat16 fit into `room` bytes: a multiple of 1,024, at most
    32,768.
    """
    return max(1024, min(32_768, int(room / shape.activation_bytes(narrow=True)) // 1024 * 1024))


def load_tasks(
    config: Data | Label,
    rows: Any = None,
    env: Callable[..., Any] | None = None,
    need: Sequence[str] = ("prompt",),
    split_seed: int | None = None,
    convert: Convert | None = None,
    left_out: str = "",
) -> Tasks | Stream:
    """Load the tasks of a verb, from given `rows` or from `config.tasks`.

    Rows of `config.tasks` are converted by `row_to_task` of the environment's module, or by `convert`; given rows only
    by `convert`. An environment that makes its own prompts needs none. `left_out`: the rows that `convert` leaves out,
    in words.
    """
    spec = env or config.env or None
    function = None
    doing("reading rows" if rows is not None else f"reading {config.tasks}")
    if convert is None and spec is not None:
        function = load_env(spec)  # reports errors before anything expensive starts
        need = () if need == ("prompt",) and is_generator_env(function) else need
        convert = load_converter(spec) if rows is None else None
    if rows is None and (found := task_set(config.tasks)):
        rows = found.module.task_rows(found.folder)
    elif rows is None:
        rows = load_named(config.tasks) if re.fullmatch(r".+\.py:\w+", config.tasks) else config.tasks
    options: dict[str, Any] = {
        "fields": config.fields,
        "prompt_template": config.prompt_template,
        "response_template": getattr(config, "response_template", None),
        "teacher_prompt_template": getattr(config, "teacher_prompt_template", None),
        "convert": convert,
        "need": need,
        "left_out": left_out,
        "whole": getattr(config, "mask", None) == "all",
    }
    if callable(rows):
        if makes_levels(rows):
            if not isinstance(config, RL) or config.curriculum != "levels":
                raise UserError(
                    "the row function has the parameters seed and level: add --curriculum levels (posttrain rl), or give "
                    "both parameters a default value"
                )
            if config.limit is not None:
                raise UserError("--curriculum levels makes as many tasks as the run needs: leave out --limit")
            return Levels(rows, Conversion(**options), config.seed)
        if config.limit is None:
            return Stream(rows, Conversion(**options))
        rows = (row for make in [rows] for row in islice(make(), config.limit))  # called only when read
    tasks = to_tasks(load_rows(rows, config.split, config.limit), **options, split_seed=split_seed)
    if (refuses := getattr(function, "problem_of_row", None)) and (problem := refuses(tasks[0])):
        raise UserError(f"{tasks.where(0)}: {problem}")
    return tasks


def split_seed(config: Training) -> int:
    """Return the seed that decides which tasks are held out."""
    return config.seed if config.split_seed is None else config.split_seed


def split_tasks(
    config: Training,
    rows: Any,
    env: Callable[..., Any] | None = None,
    need: Sequence[str] = ("prompt",),
    convert: Convert | None = None,
    left_out: str = "",
) -> tuple[Tasks | Stream, Tasks | None]:
    """Return the tasks to train on, and the held-out tasks."""
    seed = split_seed(config)
    warn_near_names(config.fields)
    if not config.held_out:  # separate rows to evaluate on are compared with these by their draws
        draws = seed if config.eval_tasks else None
        return load_tasks(config, rows, env, need, draws, convert, left_out), None
    if (
        rows is None
        and config.model
        and not config.resume
        and (why := overlap(config.model, config.tasks, config.held_out, seed))
    ):
        warn(why)
    return hold_out(load_tasks(config, rows, env, need, seed, convert, left_out), config.held_out, seed)


def amount(tasks: AnyTasks) -> str:
    """Describe the number of tasks, and the columns that they come from."""
    if isinstance(tasks, MixedTasks):
        return "; ".join(f"{name}: {amount(own)}" for name, own in tasks.parts.items())
    if isinstance(tasks, Stream):
        return f"tasks without end ({tasks.taken()})"
    left_out = f"{tasks.left_out} rows left out {tasks.conversion.left_out}".rstrip()
    said = [tasks.taken(), left_out if tasks.left_out else ""]
    said.append(f"{tasks.merged} repetitions merged" if tasks.merged else "")
    return f"{len(tasks)} tasks ({', '.join(filter(None, said))})"


def held_out_number(config: Training, held_out: int | Mapping[str, int]) -> str:
    """Describe the number of held-out tasks, of each part of a mixture: of few tasks it may be far from the share."""
    parts = held_out if isinstance(held_out, Mapping) else {}
    count = sum(parts.values()) if isinstance(held_out, Mapping) else held_out
    each = f": {', '.join(f'{name} {own}' for name, own in parts.items())}" if parts else ""
    drawn = f" (each prompt with probability {config.held_out:g})" if count and config.held_out else ""
    return f"{count} held out{each}{drawn}"


def rehearse(
    pool: EnvPool | MixedPool,
    tasks: AnyTasks,
    warn: Callable[[str], None] = warn,
    services: Services | None = None,
    viewer: Viewer | None = None,
) -> Turn | None:
    """Run up to three tasks with sample replies, to report a broken environment early; return the first turn shown.

    If no reply can be scored, the user gets a warning, not an error, as the environment may score a model's replies.
    Raises UserError if the environment cannot start: it cannot be imported, no task's episode shows a first turn, or it
    asks a service that is not among `services`; also if its code fails in the same way for every reply. Services are not
    asked: an example of their answers is used. `viewer`:
    the model that will sample; UserError also if its chat template does not show the environment's messages.
    """
    services = services or Services()
    pool.ready()
    failures: list[Invalid] = []
    begun, first = False, None
    for task in tasks.examples():
        for reply in _sample_replies(task):
            seen = viewer.watch(task) if viewer is not None else None
            shown, event, turn = _rehearsed(pool, services, task, reply, seen)
            first = first or turn
            if viewer is not None and seen is not None and not begun and not pool.single_turn:
                warn_unknown_tokens_in_episodes(viewer.tokenizer, seen.texts, warn)
            begun = begun or shown
            if event is None or not isinstance(event.reward, Invalid):
                return first
            failures.append(event.reward)
            if not shown or event.reward.kind is InvalidKind.TIMEOUT:
                break  # another reply would not help, or would take as long
    if not begun:
        raise UserError(
            f"the environment fails before its first prompt: {failures[0].reason}; correct it, or the columns that it reads,"
            " and try it with posttrain check"
        )
    reason = failures[0].reason
    if _always_fails(failures):
        columns = [name for name in next(iter(tasks.examples())) if name != "id"]
        why = "".join(f", as {line.rstrip('?')}" for line in missing_column(reason, columns))
        raise UserError(
            f"the environment fails with every sample reply: {reason}{why}; correct it (posttrain check runs it alone)"
            + ", or let it return 0 for a reply that it cannot read" * (failures[0].kind is InvalidKind.RAISED)
        )
    warn(f"the environment scored no sample reply; the first failed: {reason} (try it with posttrain check)")
    return first


def _always_fails(failures: Sequence[Invalid]) -> bool:
    """Return whether these failures of all sample replies show an error in the environment's code: one exception with
    one message, or outputs that are never a reward.
    """
    return len({(f.kind, f.reason if f.kind is InvalidKind.RAISED else "") for f in failures}) == 1 and (
        failures[0].kind in (InvalidKind.RAISED, InvalidKind.UNREADABLE)
    )


def _sample_replies(task: Task) -> list[str]:
    """Return possible replies of a model: the task's own answer, if it has one, and some usual forms."""
    own = [str(task[name]) for name in ("response", "answer") if isinstance(task.get(name), str | int | float)]
    return [*filter(str.strip, own), *SAMPLE_REPLIES]


def require_chat_template(tokenizer: Tokenizer, tasks: AnyTasks) -> None:
    """Raise UserError, before a model is loaded, if rows are messages and the tokenizer has no chat template."""
    if tokenizer.chat_template is None and (task := next((t for t in tasks.examples() if t.get("messages")), None)):
        tokenizer.render(task["messages"])  # raises with the fix


def _rehearsed(
    pool: EnvPool | MixedPool, services: Services, task: Task, reply: str, seen: Seen | None
) -> tuple[bool, Done | None, Turn | None]:
    """Run one episode; return whether it showed a turn or asked a service, its end if there was one, and its first
    turn.
    """
    pool.start(0, task)
    first: Turn | None = None
    for turns in range(TRIAL_TURNS + 1):
        [(_, event)] = pool.poll(None)
        while isinstance(event, AwaitsGroup):
            [(_, event)] = pool.poll(None)
        if isinstance(event, Done):
            return turns > 0, event, first
        first = first or (event if isinstance(event, Turn) else None)
        if isinstance(event, Ask) and (problem := services.problem(event)):
            raise UserError(f"the environment {problem}")
        if turns < TRIAL_TURNS:
            pool.send(
                0,
                services.named[event.service].example(event.content)
                if isinstance(event, Ask)
                else _reply_to(event, reply, seen),
            )
    pool.drop(0)
    return True, None, first


def _reply_to(turn: Turn, reply: str, seen: Seen | None) -> Reply:
    """Return the reply to a turn. Raises UserError if the turn cannot be shown to the model."""
    if seen is None:
        return Reply(reply)
    seen.show(turn)
    if seen.problem is not None and not turn.whole:  # a whole turn that cannot be shown only makes the episode invalid
        raise UserError(seen.problem)
    said = seen.say(reply)
    return Reply(reply) if said is None else said


def fitting(
    tasks: Tasks | MixedTasks | None, pool: EnvPool | MixedPool, tokenizer: Tokenizer, too_long: TooLong
) -> list[Task]:
    """Return the tasks whose prompts fit, as far as that is known before their episodes run."""
    if tasks is None or not pool.single_turn:
        return list(tasks or ())
    return Prompts(tasks, tokenizer, too_long).fitting()


def end_tokens(model: Model, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that end a reply. Raises UserError if there is none, or if the tokenizer is not the model's."""
    if tokenizer.vocab_size > MOST_BEYOND * model.config.vocab:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, the model's vocabulary {model.config.vocab:,}, which do "
            "not match: copy the model's own tokenizer.json and tokenizer_config.json into its folder"
        )
    if model.eos_ids:
        return model.eos_ids
    if tokenizer.eos_id is None:
        raise UserError(
            "neither generation_config.json nor the tokenizer of the model names an end-of-sequence token: "
            "set eos_token_id in generation_config.json"
        )
    return (tokenizer.eos_id,)


def watch_lengths(config: Training, context: int) -> TooLong:
    """Return the handler of rows longer than --max-length, or else `context` tokens; it prints warnings until a display
    takes over.
    """
    say, longest = (lambda text: None) if config.quiet else tell, getattr(config, "max_length", None)
    if longest is None or longest >= context:
        return TooLong(config.too_long, context, say)
    return TooLong(config.too_long, longest, say, MAX_LENGTH)


def optimization(config: Training, updates: int) -> Optimization:
    return Optimization(
        lr=config.lr,
        schedule=config.schedule,
        warmup=config.warmup,
        updates=updates,
        betas=config.betas,
        weight_decay=config.weight_decay,
        optimizer=config.optimizer,
        options=config.optimizer_options,
        max_grad_norm=config.max_grad_norm,
    )


def parameters(model: Model) -> int:
    return sum(p.numel() for p in model.parameters())


def size_of(model: Model) -> str:
    """Describe the number of parameters of a model, and of the trained ones."""
    count, learning = parameters(model), sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"{count:,} parameters" + (f" of which {learning:,} learn" if learning < count else "")


def rate_note(plan: Optimization, adapted: bool, size: int) -> list[str]:
    """Return a line for the user if models of this size (parameters) hardly learned at such a rate of AdamW; else [].
    Rates are from docs/results/learning-rates.md; those of models under 10 million parameters are the rates of the
    recipes on decoders of 0.1 million, with LoRA that of docs/guides/lora.md.
    """
    lr = plan.lr
    if size >= 500_000_000 or not plan.choice.takes_rates_of_adamw:
        return []
    least, usual = (1e-5, "1e-4 to 1e-3 with --lora") if adapted else (1e-6, "1e-5")
    if size < 10_000_000:
        least, usual = 1e-5, "5e-3 with --lora" if adapted else "1e-3"
    if lr > least:
        return []
    return [f"--lr {lr:g} moves a model of {size / 1e6:.2g} million parameters little: {usual} is usual at this size"]


def reply_length_note(lengths: Mapping[str, int], context: int) -> list[str]:
    """Return lines for the user about options, with their values, that allow replies as no model has them; else []."""
    return [
        f"{option} {most} is more than a reply can have: the model's context is {context} tokens, prompt included"
        for option, most in lengths.items()
        if most >= context
    ]
