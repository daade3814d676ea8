"""posttrain: reinforcement-learning post-training for language models. The front door.

In use:

    import posttrain

    def reward(task, reply):
        return float(reply.strip() == task["answer"])

    run = posttrain.rl("train.jsonl", env=reward, model="runs/sft", algorithm="grpo", steps=200)
    print(run.metrics[-1]["reward"], run.checkpoint)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import fields
from inspect import Parameter, Signature
from os import PathLike
from textwrap import fill
from typing import Any

from posttrain.config.verbs import OPTION_OF, VERBS, Verb, load
from posttrain.core.types import (
    Ask,
    Completion,
    Graded,
    Invalid,
    Reply,
    Sampling,
    Sides,
    SpanReward,
    StopRun,
    Task,
    ToolCall,
    Turn,
    UserError,
)

__version__ = "0.1.0"
LATER = {
    "Rollout": "posttrain.core.rollouts",
    "Tracker": "posttrain.runs.tracking.tracker",
    "Tools": "posttrain.envs.play.tools",
    "group_reward": "posttrain.envs.play.group_rewards",
    "note": "posttrain.envs.play.call_recording",
    "recorded": "posttrain.envs.play.call_recording",
    "trl_reward": "posttrain.envs.play.trl_rewards",
    "verl_reward": "posttrain.envs.play.verl_rewards",
}
"""Names that are imported when they are used: rewards that need none of them start sooner."""


def __getattr__(name: str) -> Any:
    if name in LATER:
        return load(f"{LATER[name]}:{name}")
    for verb, declared in VERBS.items():
        if declared.function and name == (declared.python or verb.replace("-", "_")):
            return _function(verb, declared, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _function(name: str, verb: Verb, called: str) -> Callable[..., Any]:
    """The Python function of a verb: `rl(tasks, env, model, steps=200)`. Rows, rewards and environments may be objects."""

    def function(*args: Any, **options: Any) -> Any:
        if len(args) > len(verb.given):
            raise TypeError(f"{called}() takes {', '.join(verb.given)} by position, and everything else by name")
        if twice := options.keys() & set(verb.given[: len(args)]):
            raise TypeError(f"{called}() got two values for {', '.join(twice)}")
        given = {**dict(zip(verb.given, args, strict=False)), **options}
        given = {name: value for name, value in given.items() if value is not None}
        if given.get("mixture"):
            given.setdefault(verb.given[0], "")  # its parts name the rows
        if verb.given[0] not in given and not verb.without_rows:
            raise _without_rows(verb.given[0], called, given)
        hooks = _hooks(given) if verb.learns else ()
        config, rows, env = _read(verb, {OPTION_OF.get(k, k) if k in verb.given else k: v for k, v in given.items()})
        if verb.learns:
            from posttrain.training.training_run import run_training

            return run_training(config, rows, env, hooks)
        return load(verb.function)(config, rows, env)

    first, *others = (Parameter(n, Parameter.POSITIONAL_OR_KEYWORD, default=None) for n in verb.given)
    options = Parameter("options", Parameter.VAR_KEYWORD)
    own = Signature([first if verb.without_rows else first.replace(default=Parameter.empty), *others, options])
    function.__signature__ = own  # type: ignore[attr-defined]
    function.__name__ = function.__qualname__ = called
    function.__doc__ = "\n\n".join(
        fill(text, 100)
        for text in (
            f"{verb.help} {verb.reads}",
            f"`{verb.given[0]}`: a path, rows in memory, a generator, or a function that makes rows without end. Options "
            f"are those of `posttrain {name} --help-all`.",
            "Raises UserError for a mistake of the caller's.",
        )
    )
    return function


def _without_rows(rows: str, called: str, given: Mapping[str, Any]) -> Exception:
    """Return the error for a call without rows: another trainer's name of them, or none at all."""
    from posttrain.core.option_aliases import direct

    if named := next((name for name in given if direct(name) == "tasks"), None):
        return UserError(f"unknown option {named!r}; here it is {rows}")
    return TypeError(f"{called}() needs {rows}")


def _read(verb: Verb, given: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """The configuration of these options, with names for the objects among them; the rows and the environment as objects."""
    from posttrain.config.resolve import filled

    named, rows = _named(given["tasks"]) if "tasks" in given else ("", None)
    options, env = {**given, **({"tasks": named} if "tasks" in given else {})}, None
    for option in {"env", "with_"} & {OPTION_OF.get(name, name) for name in verb.given} & given.keys():
        if not isinstance(given[option], str):
            env = given[option]
            name = getattr(env, "__qualname__", repr(env))
            options[option] = f"{getattr(env, '__module__', '')}:{name}" if option == "with_" else name
    for field in fields(verb.options):
        if field.name in {"model", "teacher", "against"} & given.keys():
            value, several = given[field.name], isinstance(field.default, tuple)
            values = value if several and isinstance(value, list | tuple) else [value]
            if not all(isinstance(one, str | PathLike) for one in values):
                raise UserError(f"{field.name} is {value!r:.60}; it must be a path{' or several' * several}")
            options[field.name] = tuple(map(str, values)) if several else str(value)
    return filled(verb.options, options), rows, env


def _hooks(given: dict[str, Any]) -> list[Any]:
    """Take the hooks that are objects out of the options; names stay in them."""
    value = given.get("hook", ())
    every = list(value) if isinstance(value, list | tuple) else [value]
    given |= {"hook": tuple(hook for hook in every if isinstance(hook, str))} if every else {}
    return [hook for hook in every if not isinstance(hook, str)]


def _named(rows: Any) -> tuple[str, Any]:
    """A name for the record, and the rows, or what makes them, if the name is not enough to find them."""
    if isinstance(rows, str | PathLike):
        return str(rows), None
    if callable(rows):
        return f"rows made by {getattr(rows, '__qualname__', repr(rows))}", rows
    if isinstance(rows, Sized):
        return f"{len(rows)} rows in memory", rows
    if isinstance(rows, Iterator):
        listed = list(rows)
        return f"{len(listed)} rows in memory", listed
    if not isinstance(rows, Iterable):
        raise UserError(f"the rows are {rows!r:.60}; give a path, rows in memory, or a function that makes them")
    return f"rows of {type(rows).__name__}", rows.__iter__  # without a length, and it can begin again


FUNCTIONS = [verb.python or name.replace("-", "_") for name, verb in VERBS.items() if verb.function]
__all__ = [
    "Ask",
    "Completion",
    "Graded",
    "Invalid",
    "Reply",
    "Sampling",
    "Sides",
    "SpanReward",
    "StopRun",
    "Task",
    "ToolCall",
    "Turn",
    "UserError",
    *LATER,
    *FUNCTIONS,
]
