"""posttrain: reinforcement-learning post-training for language models. The front door.

In use:

    import posttrain

    def reward(task, reply):
        return float(reply.strip() == task["answer"])

    run = posttrain.rl("train.jsonl", env=reward, model="runs/sft", algorithm="grpo", steps=200)
    print(run.metrics[-1]["reward"], run.checkpoint)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

from posttrain.core.types import (
    Ask,
    Completion,
    Graded,
    Invalid,
    Reply,
    Rollout,
    Sampling,
    Sides,
    SpanReward,
    Task,
    ToolCall,
    Turn,
    UserError,
)

if TYPE_CHECKING:
    from posttrain.envs.play.call_recording import note, recorded
    from posttrain.envs.tools import Tools
    from posttrain.training.trainer import Run
    from posttrain.training.verbs.evaluate import Evaluated
    from posttrain.training.verbs.label import LabelSummary
    from posttrain.training.verbs.sample import Written
    from posttrain.typed import (
        DistillOptions,
        EvaluationOptions,
        LabelOptions,
        PreferOptions,
        RewardModellingOptions,
        RLOptions,
        SampleOptions,
        SFTOptions,
    )

__version__ = "0.1.0"
__all__ = [
    "Ask",
    "Completion",
    "Graded",
    "Invalid",
    "Reply",
    "Rollout",
    "Sampling",
    "Sides",
    "SpanReward",
    "Task",
    "ToolCall",
    "Tools",
    "Turn",
    "UserError",
    "distill",
    "evaluate",
    "label",
    "note",
    "prefer",
    "recorded",
    "reward_model",
    "rl",
    "sample",
    "sft",
]

LATER = {
    "Tools": "posttrain.envs.tools",
    "note": "posttrain.envs.play.call_recording",
    "recorded": "posttrain.envs.play.call_recording",
}
"""What is imported when it is asked for: rewards that need none of it start sooner."""


def __getattr__(name: str) -> Any:
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(LATER[name]), name)


Rows = str | PathLike[str] | Iterable[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]]
"""A file, folder or dataset by its name; rows in memory; a generator; a function that makes rows without end."""


def sft(tasks: Rows, **options: Unpack[SFTOptions]) -> Run:
    """Supervised fine-tuning. `tasks`: a path, or rows with "prompt" and "response" (or chat "messages"), in memory, from
    a generator, or from a function that makes them without end (then `steps` says how long).

    The options are those of `posttrain sft --help`. Raises UserError for a mistake of the caller's.
    """
    from posttrain.config.training import SFT
    from posttrain.training.verbs import sft

    named, rows = _named(tasks)
    return sft.sft(_fill(SFT, {**options, "tasks": named}), rows)


def prefer(tasks: Rows, model: str | PathLike[str] = "", **options: Unpack[PreferOptions]) -> Run:
    """Learn from preferences, without sampling. `tasks`: rows with "prompt", "chosen" and "rejected", or with "responses"
    and what was said of them, or with a "response" and its "label" (all forms: `posttrain.data.preference_examples`).

    The options are those of `posttrain prefer --help`, such as algorithm="dpo", beta=0.1, rows=32. Raises UserError for a
    mistake of the caller's.
    """
    from posttrain.config.training import Prefer
    from posttrain.training.verbs import prefer

    named, rows = _named(tasks)
    return prefer.prefer(_fill(Prefer, {**options, "tasks": named, "model": str(model)}), rows)


def reward_model(tasks: Rows, model: str | PathLike[str] = "", **options: Unpack[RewardModellingOptions]) -> Run:
    """Train a reward model. `tasks`: rows as `prefer` takes them, or with a "response" and its "score", or with "steps".

    The options are those of `posttrain reward-model --help`, such as algorithm="k-wise", epochs=1. Raises UserError for a
    mistake of the caller's.
    """
    from posttrain.config.training import RewardModelling
    from posttrain.training.verbs import reward_model_training

    named, rows = _named(tasks)
    return reward_model_training.reward_model(
        _fill(RewardModelling, {**options, "tasks": named, "model": str(model)}), rows
    )


def rl(
    tasks: Rows, env: str | Callable[..., Any] = "", model: str | PathLike[str] = "", **options: Unpack[RLOptions]
) -> Run:
    """Reinforcement learning. `env`: a reward function (task, reply) -> float, an environment, or the name of one.

    The options are those of `posttrain rl --help`, such as algorithm="grpo", steps=200, group=8, clip_high=0.28; any
    setting of a part by its place: settings={"surrogate.high": 0.28}. Raises UserError for a mistake of the caller's.
    """
    from posttrain.config.training import RL
    from posttrain.training.verbs import rl

    named, rows = _named(tasks)
    name, function = (env, None) if isinstance(env, str) else (getattr(env, "__qualname__", repr(env)), env)
    return rl.rl(_fill(RL, {**options, "tasks": named, "env": name, "model": str(model)}), rows, function)


def distill(
    tasks: Rows,
    model: str | PathLike[str],
    teacher: str | PathLike[str] | None = None,
    env: str | Callable[..., Any] = "",
    **options: Unpack[DistillOptions],
) -> Run:
    """On-policy distillation: `model` samples, and `teacher`, of any size with the same tokenizer, says what each token is
    worth. With `env` replies are scored too.

    The options are those of `posttrain distill --help`, such as algorithm="distill-jsd", teacher_temperature=0.7, steps=200,
    teachers={"maths": "runs/maths"}. Raises UserError for a mistake of the caller's.
    """
    from posttrain.config.training import Distill
    from posttrain.training.verbs import rl

    named, rows = _named(tasks)
    name, function = (env, None) if isinstance(env, str) else (getattr(env, "__qualname__", repr(env)), env)
    given = {**options, "tasks": named, "env": name, "model": str(model)}
    if teacher is not None:
        given["teacher"] = str(teacher)
    return rl.rl(_fill(Distill, given), rows, function)


def evaluate(
    tasks: Rows,
    env: str | Callable[..., Any] = "",
    model: str | PathLike[str] = "",
    **options: Unpack[EvaluationOptions],
) -> Evaluated:
    """Play every task some times: mean reward, accuracy and pass@k with 95% intervals.

    The options are those of `posttrain eval --help`, such as samples=8, k=(1, 4, 8), against="runs/sft".
    """
    from posttrain.config.inference import Evaluation
    from posttrain.training.verbs import evaluate

    named, rows = _named(tasks)
    name, function = (env, None) if isinstance(env, str) else (getattr(env, "__qualname__", repr(env)), env)
    return evaluate.evaluate(
        _fill(Evaluation, {**options, "tasks": named, "env": name, "model": str(model)}), rows, function
    )


def sample(
    tasks: Rows,
    model: str | PathLike[str] | Sequence[str] = "",
    env: str | Callable[..., Any] = "",
    **options: Unpack[SampleOptions],
) -> Written:
    """Sample replies to every prompt and write them as items, with scores where `env` or a reward model gives them.

    The options are those of `posttrain sample --help`, such as samples=8, temperature=(0.7, 1.0), out="items.jsonl". Raises
    UserError for a mistake of the caller's.
    """
    from posttrain.config.inference import Sample
    from posttrain.training.verbs import sample

    named, rows = _named(tasks)
    models = (str(model),) if isinstance(model, str | PathLike) else tuple(map(str, model))
    name, function = (env, None) if isinstance(env, str) else (getattr(env, "__qualname__", repr(env)), env)
    given = {**options, "tasks": named, "env": name, "model": tuple(filter(None, models))}
    return sample.sample(_fill(Sample, given), rows, function)


def label(items: Rows, by: str | Callable[..., Any] = "", **options: Unpack[LabelOptions]) -> LabelSummary:
    """Label the responses of items. `by`: "reward-model=FOLDER", "judge=RECIPE.toml", or a reward (task, reply) -> float.

    The options are those of `posttrain label --help`, such as out="labelled.jsonl", pairs="pairs.jsonl", margin=0.5. Raises
    UserError for a mistake of the caller's.
    """
    from posttrain.config.inference import Label
    from posttrain.training.verbs import label

    named, rows = _named(items)
    name, function = (by, None) if isinstance(by, str) else (getattr(by, "__qualname__", repr(by)), by)
    return label.label(_fill(Label, {**options, "tasks": named, "with_": name}), rows, function)


def _named(tasks: Rows) -> tuple[str, Any]:
    """A name for the record, and the rows, or what makes them, if the name is not enough to find them."""
    if isinstance(tasks, str | PathLike):
        return str(tasks), None
    if callable(tasks):
        return f"rows made by {getattr(tasks, '__qualname__', repr(tasks))}", tasks
    if isinstance(tasks, Sized):
        return f"{len(tasks)} rows in memory", tasks
    if isinstance(tasks, Iterator):
        rows = list(tasks)
        return f"{len(rows)} rows in memory", rows
    return f"rows of {type(tasks).__name__}", tasks.__iter__  # without a length, and it can begin again


def _fill(kind: Any, options: Mapping[str, Any]) -> Any:
    """The configuration of these options. Raises UserError, with a suggestion, for one that does not exist or fit."""
    from posttrain.config.resolve import filled

    return filled(kind, options)
