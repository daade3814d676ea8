"""What every verb begins with: device, rows, environment, the checks that are better told before a run than within it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from posttrain.config import RL, Data, Evaluation, Training
from posttrain.data.rows import load_rows
from posttrain.data.tasks import to_tasks
from posttrain.envs.chat import Conversation
from posttrain.envs.load import load_converter, load_env, opening
from posttrain.envs.pool import Done, EnvPool
from posttrain.kernels import build
from posttrain.learners.local import Optimization
from posttrain.models.tokenizer import Tokenizer
from posttrain.protocols import Model
from posttrain.types import Invalid, InvalidKind, Reply, Task, UserError

TRIAL_TURNS = 8  # of a sample reply to an environment that may wait for a word which it does not contain
SAMPLE_REPLIES = ("42", "The answer is 42.", "<think>\n6 x 7 = 42\n</think>\n\\boxed{42}")


def _warn(text: str) -> None:
    print(f"posttrain: warning: {text}", file=sys.stderr)


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


def open_pool(config: RL | Evaluation, env: Callable[..., Any] | None) -> EnvPool:
    """What plays the environment of a run: `env`, if it is given as an object."""
    return EnvPool(env or config.env, config.env_workers, config.env_seconds, config.env_memory)


def rehearse(pool: EnvPool, tasks: Sequence[Task], warn: Callable[[str], None] = _warn) -> None:
    """Play up to three tasks with sample replies, so that a broken environment is told before anything heavy starts.

    One that can score none of them is warned of: it may be right in that, of what a model says it may score more. Raises
    UserError if the environment cannot even start: it does not import, or no task's episode shows a first turn.
    """
    pool.ready()
    reasons, begun = [], False
    for task in (tasks[0], tasks[len(tasks) // 2], tasks[-1]):
        for reply in _sample_replies(task):
            shown, event = _rehearsed(pool, task, reply)
            begun = begun or shown
            if event is None or not isinstance(event.reward, Invalid):
                return
            reasons.append(event.reward.reason)
            if not shown or event.reward.kind is InvalidKind.TIMEOUT:
                break  # another reply would change nothing, or take as long again
    if not begun:
        raise UserError(f"the environment shows no first turn: {reasons[0]} (try it with posttrain check)")
    warn(f"the environment could score no sample reply, the first because: {reasons[0]} (see posttrain check)")


def _sample_replies(task: Task) -> list[str]:
    """What a model might say: the task's own answer, where it has one, and some usual forms."""
    own = [str(task[name]) for name in ("response", "answer") if isinstance(task.get(name), str | int | float)]
    return [*filter(str.strip, own), *SAMPLE_REPLIES]


def _rehearsed(pool: EnvPool, task: Task, reply: str) -> tuple[bool, Done | None]:
    """One episode: whether it showed a turn, and its end if that came."""
    pool.start(0, task)
    for turns in range(TRIAL_TURNS + 1):
        [(_, event)] = pool.poll(None)
        if isinstance(event, Done):
            return turns > 0, event
        if turns < TRIAL_TURNS:
            pool.send(0, Reply(reply))
    pool.drop(0)
    return True, None


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


def end_tokens(model: Model, tokenizer: Tokenizer) -> tuple[int, ...]:
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


def parameters(model: Model) -> int:
    return sum(p.numel() for p in model.parameters())
