"""Loads a user's reward or environment by name: "my.py:reward", "package.module:name", or a built-in one's short name.

Options of an environment are its keyword-only parameters, and are written after its name:
"search-qa,topk=5,searches=2". So they go wherever the name goes: into recipes, records and workers.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from posttrain.core.messages import near, near_or_all, short
from posttrain.core.types import VERIFIER_PREFIX as PREFIX
from posttrain.core.types import AsyncEnv, Env, Invalid, Reply, Reward, Task, Turn, UserError, Verdict
from posttrain.envs.play.env_options import read_options, split_options
from posttrain.envs.play.env_outputs import read_number
from posttrain.envs.play.group_rewards import PARAMETERS, is_group_reward
from posttrain.envs.play.reward_terms import about_verifier, full_marks, sum_of, target_of
from posttrain.envs.reward_sums import PREFIXES, TRL, VERL, is_sum, terms_of
from posttrain.system.user_code import (
    PRIVATE,
    describe_error,
    import_target,
    importable,
    is_of_kind,
    named_in,
    split_name,
)

BUILTIN = {
    "arithmetic": "posttrain.envs.builtin.arithmetic:reward",
    "gsm8k": "posttrain.envs.builtin.gsm8k:reward",
    "word-problems": "posttrain.envs.builtin.word_problems:reward",
    "math": "posttrain.envs.builtin.math_problems:reward",
    "verdict": "posttrain.envs.builtin.judge_verdict:reward",
    "calculator": "posttrain.envs.builtin.calculator:calculator",
    "worked-sums": "posttrain.envs.builtin.worked_sums:reward",
    "countdown": "posttrain.envs.builtin.countdown:reward",
    "refusal": "posttrain.envs.builtin.refusal_pairs:reward",
    "guess": "posttrain.envs.builtin.guess:guess",
    "functions": "posttrain.envs.builtin.functions:functions",
    "nim": "posttrain.envs.builtin.nim:nim",
    "shapes": "posttrain.envs.builtin.shapes:shapes",
    "adventure": "posttrain.envs.builtin.adventure:adventure",
    "reasoning-gym": "posttrain.envs.bridges.reasoning:reward",
    "gymnasium": "posttrain.envs.bridges.gym:play",
    "textarena": "posttrain.envs.bridges.arena:play",
    "openenv": "posttrain.envs.bridges.openenv:play",
    "nemo-gym": "posttrain.envs.bridges.nemo_gym:play",
    "python": "posttrain.envs.builtin.interpreter:python",
    "code": "posttrain.envs.builtin.code:reward",
    "code-all": "posttrain.envs.builtin.code:all_or_nothing",
    "code-choice": "posttrain.envs.builtin.code_choice:code_choice",
    "reward-model": "posttrain.envs.builtin.service_reward:reward_model",
    "judge": "posttrain.envs.builtin.service_reward:judge",
    "unscored": "posttrain.envs.builtin.unscored:reward",
    "search-qa": "posttrain.envs.builtin.search_qa:search_qa",
}

TASK_SETS = {"harbor": "posttrain.envs.bridges.harbor:play"}
"""Name of a form of task sets -> its environment: "harbor:FOLDER" names a set, which makes the rows too. The module has
`task_rows(folder)`, `step_seconds(folder)`, `about(folder)` and `with_oracle(task)`.
"""


def load_env(spec: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the reward or generator function that `spec` names, as its author wrote it; a function is returned
    unchanged.

    Options after its name are bound to it. Raises UserError, with the fix, if it cannot be found, imported or called,
    or has no such options.
    """
    if not isinstance(spec, str):
        _refuse_verifier(spec)
        return _checked(spec, getattr(spec, "__qualname__", repr(spec)))
    if is_sum(spec):
        return sum_of(terms_of(spec), spec, load_env)
    bare, options = split_options(spec)
    if found_set := task_set(spec):
        options = {"folder": found_set.folder, **options}
    target, name = _split(bare)
    if f"{target}.".startswith("posttrain.verify."):
        raise UserError(f"--env {bare}: name a verifier without its module: --env {_renamed(name)}")
    module = import_target(target)
    function = _checked(named_in(module, name, target, _functions(module)), bare)
    return _bound(function, bare, options, module) if options else function


class TaskSet(NamedTuple):
    """A set of tasks that is named as an environment."""

    form: str  # a key of `TASK_SETS`
    folder: str

    @property
    def module(self) -> ModuleType:
        return import_target(TASK_SETS[self.form].partition(":")[0])


def task_set(spec: Any) -> TaskSet | None:
    """Return the task set that an environment's name, with or without options, names; None for anything else."""
    if not isinstance(spec, str) or spec.partition(":")[0].partition(",")[0] not in TASK_SETS:
        return None
    form, _, folder = split_options(spec)[0].partition(":")
    if not folder:
        raise UserError(f"--env {spec} names no set of tasks: give its folder, {form}:FOLDER")
    return TaskSet(form, folder)


def step_limit(env: str | Callable[..., Any], seconds: float) -> float:
    """Return the limit of one call of an environment: `seconds`, or more where a task set sets limits of its own."""
    found = task_set(env)
    return seconds if found is None else max(seconds, float(found.module.step_seconds(found.folder)))


def _refuse_verifier(function: Callable[..., Any]) -> None:
    """Raise UserError for the function of a verifier, which takes no task."""
    if inspect.isfunction(function) and f"{function.__module__}.".startswith("posttrain.verify."):
        raise UserError(
            f"{function.__name__} is a verifier, not a reward: give its name, env={_renamed(function.__name__)!r}, or a "
            "function of task and reply that calls it"
        )


def _renamed(name: str) -> str:
    """Return the command line's name of a verifier, given its function's name."""
    from posttrain.verify.named_verifiers import VERIFIERS, find_verifier

    called = next((v.name for v in VERIFIERS.values() if v.function.__name__ == name), name)
    return PREFIX + find_verifier(called).name


def _bound(
    function: Callable[..., Any], name: str, options: Mapping[str, str | None], module: ModuleType
) -> Callable[..., Any]:
    """Return the environment with these options, converted to the types of its parameters.

    Raises UserError for unknown options, and for options that the module's `check_options`, a function of all options,
    refuses.
    """
    own = {n: p for n, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}
    return functools.partial(function, **read_options(function, name, options, own, module))


def load_converter(spec: str | Callable[..., Any]) -> Callable[[Task], Task] | None:
    """Return the `row_to_task` of the environment's module, which converts rows of a public data set; None without
    one.
    """
    found = getattr(_home(spec), "row_to_task", None)
    if found is not None and not callable(found):
        raise UserError(f"row_to_task in the environment's module is {short(found)}; it must be a function of a row")
    return found


def success_of(spec: str | Callable[..., Any], given: float | None) -> float | None:
    """Return the reward from which on a reply succeeds: as given, or `SUCCESS` of the environment's module, or 1 for a
    function for verl that reports which replies are right; None: none of these.
    """
    if given is not None:
        return given
    terms = terms_of(spec) if isinstance(spec, str) and is_sum(spec) else []
    alone = len(terms) == 1 and terms[0].weight is None and not terms[0].spec.startswith(PREFIX)
    if terms and not alone:
        return full_marks(terms, _of_term)
    stated = _stated(spec)
    function = load_env(spec) if isinstance(spec, str) and spec.startswith(VERL) else spec
    return 1.0 if stated is None and getattr(function, "says_right", False) is True else stated


def _of_term(term: str) -> float | None:
    """Return the success threshold of a summand that is no verifier; None if the summand lists several functions."""
    return None if term.startswith(PREFIXES) and "," in term else _stated(term)


def _stated(spec: str | Callable[..., Any]) -> float | None:
    """Return `SUCCESS` of the environment's module, or None."""
    found = getattr(_home(spec), "SUCCESS", None)
    if found is None:
        return None
    number = read_number(found, "SUCCESS is")
    if isinstance(number, Invalid):
        raise UserError(
            f"SUCCESS in the environment's module is {short(found)}; it must be a finite number, such as 1.0"
        )
    return number


def about(spec: str | Callable[..., Any]) -> list[str]:
    """Return lines that describe the environment's inputs, from `about` of its module, which may refuse an input."""
    if isinstance(spec, str) and is_sum(spec):
        return [about_verifier(term.spec) for term in terms_of(spec) if term.spec.startswith(PREFIX)]
    if found_set := task_set(spec):
        return list(found_set.module.about(found_set.folder))
    found = getattr(_home(spec), "about", None)
    return list(found()) if callable(found) else []


def _home(spec: str | Callable[..., Any]) -> ModuleType | None:
    """Return the module of an environment."""
    if isinstance(spec, str) and is_sum(spec):
        other = next((term.spec for term in terms_of(spec) if not term.spec.startswith(PREFIX)), None)
        if other is not None and is_sum(other):
            return import_target(target_of(other))
        return _home(other) if other is not None else None
    if isinstance(spec, str):
        return import_target(_split(spec)[0])
    return sys.modules.get(getattr(spec, "__module__", None) or "")


def is_generator_env(function: Callable[..., Any]) -> bool:
    """Return True for an environment (a generator function, or an object whose call is one), False for a reward."""
    return is_of_kind(function, inspect.isgeneratorfunction) or is_of_kind(function, inspect.isasyncgenfunction)


def is_async(function: Callable[..., Any]) -> bool:
    """Return True for an environment or a reward written with `async def`, many of which run side by side."""
    return is_of_kind(function, inspect.isasyncgenfunction) or is_of_kind(function, inspect.iscoroutinefunction)


def opening(task: Task) -> Turn:
    """Return the only turn of a plain reward: the task's messages, or else its prompt."""
    stop = task.get("stop") or ()  # null: none
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if task.get("messages") is not None:
        return Turn(messages=task["messages"], stop=stop)
    if not isinstance(task.get("prompt"), str):
        raise UserError(
            f'task {task.get("id")!r} needs "prompt", a string, or "messages"; it has {", ".join(map(str, task))}'
        )
    return Turn(text=task["prompt"], stop=stop)


def lift(reward: Reward) -> Env:
    """Return the environment of one turn for a plain reward."""

    def env(task: Task) -> Generator[Turn | str, Reply, Verdict]:
        reply = yield opening(task)
        return reward(task, reply)

    return env


def lift_async(reward: Callable[[Task, Reply], Awaitable[Verdict]]) -> AsyncEnv:
    """Return the environment of one turn for an async reward."""

    async def env(task: Task) -> AsyncGenerator[Any, Any]:
        reply = yield opening(task)
        yield await reward(task, reply)

    return env


def pack_env(env: str | Callable[..., Any]) -> str | bytes:
    """Return `env` in a form that another process can load: its name if it has one, else the pickled function.

    Lambdas, closures, and functions of `__main__` or a notebook are pickled by value.
    """
    if isinstance(env, str):
        return env
    module = sys.modules.get(getattr(env, "__module__", None) or "")
    name = getattr(env, "__qualname__", "")
    named = module is not None and name.isidentifier() and getattr(module, name, None) is env
    if module is not None and module.__name__.startswith(PRIVATE) and named:
        return f"{module.__file__}:{name}"
    by_name = module is not None and module.__name__ != "__main__" and importable(module.__name__)
    if module is not None and by_name and named:
        return f"{module.__name__}:{name}"
    import cloudpickle

    by_value = module is not None and module.__name__ != "__main__" and not by_name
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        packed: bytes = cloudpickle.dumps(env)
        return packed
    except Exception as error:  # the objects that it refers to may raise anything
        reason = describe_error(error, None)
        raise UserError(
            f"{name} cannot be sent to a worker: {reason}; move it to a file, or use --env-workers 0"
        ) from error
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def unpack_env(packed: str | bytes) -> Callable[..., Any]:
    """Load the result of `pack_env`. Raises UserError as `load_env` does."""
    return load_env(packed if isinstance(packed, str) else pickle.loads(packed))


OTHERS = {
    "completions": ("TRL", f"give it as {TRL}FILE:NAME, or trl_reward(NAME) from Python"),
    "solution_str": ("verl", f"give it as {VERL}FILE:NAME, or verl_reward(NAME) from Python"),
    "solution_strs": ("verl", f"give it as {VERL}FILE:NAME, or verl_reward(NAME) from Python"),
    "queries": (
        "OpenRLHF",
        "write def reward(task, reply), with the row's columns in task, or def reward(tasks, replies) for a group",
    ),
}
"""Parameter of rewards -> (the library that uses it, how to give such a reward here)."""


def _instead(kind: type) -> str:
    """Return a hint on what to name in place of a class."""
    if any("__call__" in vars(base) for base in kind.__mro__[:-1]):
        return f"create an instance, such as it = {kind.__name__}(), and name that"
    return _of_episodes(kind) or "name a function, or an instance that can be called"


def _of_episodes(thing: object, before: str = "") -> str:
    """Return a hint for an environment with `reset` and `step`; "" for anything else."""
    if not (hasattr(thing, "reset") and hasattr(thing, "step")):
        return ""
    return f"{before}an environment is a function that yields turns; run Gymnasium's with --env gymnasium"


def _checked(function: object, label: str) -> Callable[..., Any]:
    if isinstance(function, list | tuple) and all(map(callable, function)):
        raise UserError(
            "env is one function, not a list: give a function that returns the sum of the rewards, or a dictionary of its "
            "parts; for functions of TRL it is posttrain.trl_reward(f, g, weights=[1, 0.5])"
        )
    if not callable(function):
        raise UserError(f"{label} is {short(function)}, not a function{_of_episodes(function, '; ')}")
    if inspect.isclass(function):
        raise UserError(f"{label} is a class: {_instead(function)}")
    kind, given = ("an environment", ("task",)) if is_generator_env(function) else ("a reward", ("task", "reply"))
    if is_group_reward(function):
        if kind == "an environment":
            raise UserError(f"{label} takes (tasks, replies) and yields: return a list from a reward of a group")
        kind, given = "a reward of a group", PARAMETERS
    try:
        signature = inspect.signature(function)
    except ValueError:  # a built-in function may have no signature
        return function
    except TypeError as error:
        raise UserError(f"{label} is {short(function)}, not a function") from error
    if elsewhere := next((told for word, told in OTHERS.items() if word in signature.parameters), None):
        raise UserError(f"{label} takes {signature}, as a reward of {elsewhere[0]} does: {elsewhere[1]}")
    try:
        signature.bind(*given)
    except TypeError as error:
        hint = "; an environment is called with (task) and yields turns" if kind == "a reward" else ""
        raise UserError(f"{label} takes {signature}, but {kind} is called with ({', '.join(given)}){hint}") from error
    return function


def _functions(module: ModuleType) -> list[str]:
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return sorted(name for name in own if callable(getattr(module, name)) and not name.startswith("_"))


def _split(spec: str) -> tuple[str, str]:
    """Split a name as `split_name` does, without its options; the short name of a built-in one is replaced first."""
    spec = TASK_SETS[tasks.form] if (tasks := task_set(spec)) else split_options(spec)[0]
    spec = BUILTIN.get(spec, spec)
    if ":" in spec or spec.endswith(".py"):
        return split_name(spec)
    known = near(spec, BUILTIN) or near_or_all(spec, sorted(BUILTIN), len(BUILTIN))
    raise UserError(f"there is no built-in environment {spec!r}{known}; write your own as my.py:reward")
