"""Reward functions written for verl, unchanged: `compute_score(data_source, solution_str, ground_truth,
extra_info=None)`.

A function returns a number, or a dict with "score"; further numbers in it become parts of the reward, and other values
notes. A number "acc" or "is_correct" reports whether the reply is right: it is the part "outcome" too, with which the
success threshold is compared instead of the score. `ground_truth` is the row's `reward_model["ground_truth"]`, or a column
of that name. The plural form of verl's `BatchRewardManager`, `compute_score(data_sources, solution_strs, ground_truths,
extra_infos)`, gets the replies of a group.
"""

from __future__ import annotations

import ast
import inspect
import json
import linecache
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from posttrain.core.types import OUTCOME, Invalid, InvalidKind, Reply, Task, UserError
from posttrain.envs.play.call_recording import NOTING
from posttrain.envs.play.env_outputs import FINITE, read_number
from posttrain.envs.play.group_rewards import listed
from posttrain.system.user_code import required, source_file, takes_any_name, unwrapped

ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
SEVERAL = tuple(f"{name}s" for name in ONE)
RIGHT = ("acc", "is_correct")
"""Keys of a function's dict, with 1 for a right reply and 0 for others."""
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def own_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters that a user can set: verl's `reward_kwargs`."""
    known = {*ONE, *SEVERAL}
    named = inspect.signature(function).parameters
    return {n: p for n, p in named.items() if n not in known and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def further_options(function: Callable[..., Any], names: Iterable[str]) -> dict[str, inspect.Parameter]:
    """Return parameters of these names that only the function's `**kwargs` takes; {} if it has none."""
    named = inspect.signature(function).parameters
    if not takes_any_name(named):
        return {}
    own = inspect.Parameter.KEYWORD_ONLY
    return {name: inspect.Parameter(name, own) for name in names if name not in named and name not in {*ONE, *SEVERAL}}


def read_value(text: str) -> Any:
    """Return the value of an option without a declared type, as verl's configuration reads it: 0.1, true, or text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def verl_reward(function: Callable[..., Any], label: str = "", **settings: Any) -> Callable[..., Any]:
    """Return a function written for verl as a reward: `posttrain.rl(rows, verl_reward(compute_score))`.

    `label`: its name in messages; `settings`: verl's `reward_kwargs`. Raises UserError if it is no such function.
    """
    label = label or getattr(function, "__name__", type(function).__name__)
    if not callable(function) or inspect.isclass(function):
        raise UserError(
            f"{label} is not a function: verl's is def compute_score(data_source, solution_str, ground_truth)"
        )
    taken = inspect.signature(function).parameters
    needs = required(taken)
    known = SEVERAL if SEVERAL[1] in taken else ONE
    if strange := next((n for n in needs if n not in known and n not in settings), None):
        raise UserError(
            f"{label} needs {strange}, which verl does not pass to compute_score({', '.join(ONE)}): give a setting of your "
            f"own as {label},{strange}=VALUE"
        )
    if known[1] not in taken and not takes_any_name(taken):
        raise UserError(f"{label} takes ({', '.join(taken)}), not verl's solution_str")

    def arguments(task: Task) -> dict[str, Any]:
        return {
            "data_source": task.get("data_source"),
            "ground_truth": _truth(task),
            "extra_info": {} if task.get("extra_info") is None else task["extra_info"],  # as verl's reward managers do
        }

    if known is SEVERAL:

        def of_group(tasks: Sequence[Task], replies: Sequence[Reply]) -> Any:
            rows = [{**arguments(task), "solution_str": str(reply)} for task, reply in zip(tasks, replies, strict=True)]
            given = {f"{name}s": [row[name] for row in rows] for name in ONE}
            scores = listed(found := function(**_taken(taken, given), **settings))
            return found if scores is None else [_scored(score) for score in scores]

        reward: Callable[..., Any] = of_group
    elif inspect.iscoroutinefunction(function):

        async def waiting(task: Task, reply: Reply) -> Any:
            given = {**arguments(task), "solution_str": str(reply)}
            return _noted(await function(**_taken(taken, given), **settings))

        reward = waiting
    else:

        def of_one(task: Task, reply: Reply) -> Any:
            given = {**arguments(task), "solution_str": str(reply)}
            return _noted(function(**_taken(taken, given), **settings))

        reward = of_one
    reward.stands_for = function  # type: ignore[attr-defined]
    reward.says_right = _says_right(function)  # type: ignore[attr-defined]
    reward.problem_of_row = lambda task: _problem_of_row(taken, needs, label, task)  # type: ignore[attr-defined]
    return reward


def _taken(taken: Mapping[str, inspect.Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if takes_any_name(taken) or name in taken}


def _says_right(function: Callable[..., Any]) -> bool:
    """Return whether a function, or one of its file that it names, puts a key of `RIGHT` into a dict.

    Its source is read, as the success threshold must be known before the first reply.
    """
    inner = unwrapped(function)
    try:
        tree = ast.parse("".join(linecache.getlines(source_file(inner) or "")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    defined = {node.name: node for node in tree.body if isinstance(node, DEFINITIONS)}
    waiting, seen = [getattr(inner, "__qualname__", type(inner).__qualname__).partition(".")[0]], set[str]()
    while waiting:
        if (name := waiting.pop()) in seen or name not in defined:
            continue
        seen.add(name)
        for node in ast.walk(defined[name]):
            if any(isinstance(key, ast.Constant) and key.value in RIGHT for key in _keys_written(node)):
                return True
            if isinstance(node, ast.Name):
                waiting.append(node.id)
    return False


def _keys_written(node: ast.AST) -> Iterable[ast.expr | None]:
    """Return the keys of {"key": value}, dict(key=value) and found["key"] = value."""
    if isinstance(node, ast.Dict):
        return node.keys
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        return [ast.Constant(keyword.arg) for keyword in node.keywords]
    return [node.slice] if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) else []


def _truth(task: Task) -> Any:
    if "ground_truth" in task:
        return task["ground_truth"]
    model = task.get("reward_model")
    return model.get("ground_truth") if isinstance(model, Mapping) else None


def _scored(value: Any) -> Any:
    """Return the result of a verl function as a verdict."""
    if not isinstance(value, Mapping):
        return value
    if "score" not in value:
        has = ", ".join(map(str, value)) or "nothing"
        return Invalid(f'returned a dict without "score"; it has {has}', InvalidKind.UNREADABLE)
    if isinstance(value["score"], Invalid):
        return value["score"]
    if isinstance(score := read_number(value["score"], 'returned a dict whose "score" is', FINITE), Invalid):
        return score
    numbers = {str(name): part for name, part in value.items() if _is_part(name, part)}
    right = next((numbers[name] for name in RIGHT if name in numbers), None)
    return {"reward": value["score"], **({} if right is None else {OUTCOME: right}), **numbers}


def _noted(value: Any) -> Any:
    """Return the result of a verl function as a verdict; values that are no parts of a reward become notes."""
    for name, part in value.items() if isinstance(value, Mapping) else ():
        if name != "score" and not _is_part(name, part) and (journal := NOTING.get()) is not None:
            journal.note_or_text(str(name), part)
    return _scored(value)


def _is_part(name: Any, value: Any) -> bool:
    return name not in ("score", "reward") and not isinstance(read_number(value, ""), Invalid)


def _problem_of_row(taken: Mapping[str, inspect.Parameter], needs: Sequence[str], label: str, task: Task) -> str | None:
    """Return why a function cannot score this row, in words, or None."""
    one = [name.removesuffix("s") if name in SEVERAL else name for name in needs]
    has = ", ".join(name for name in task if name not in ("id", "messages", "prompt")) or "no further column"
    if "ground_truth" in one and _truth(task) is None:
        return (
            f"{label} reads reward_model.ground_truth, and the row has {has}: name its column with --fields.ground_truth "
            "COLUMN"
        )
    if "data_source" in one and task.get("data_source") is None:
        return f"{label} reads data_source, and the row has {has}: name its column with --fields.data_source COLUMN"
    return None
