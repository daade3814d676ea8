"""Rewards that score all replies of a group in one call: `def reward(tasks, replies) -> list`.

Such a reward is recognised by the names of its first two parameters, tasks and replies. It is called once for each
group, when the group's last reply has ended, with the replies in the order of the group's members. So the result
depends on the replies alone, not on the order in which they were sampled. An exception, a timeout or a list of another
length makes the rewards of the whole group invalid.

Episodes of several turns are scored in the same way by the `group_reward` of their environment, which reads what each
of them returned.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from posttrain.core.messages import short
from posttrain.core.types import AsyncEnv, Env, Invalid, Reply, Sides, Task, UserError, value_type
from posttrain.envs.play.env_outputs import MOST_REWARD, Done, read_number, read_verdict, unreadable
from posttrain.system.user_code import is_of_kind, unwrapped

PARAMETERS = ("tasks", "replies")
NOT_SCORED = "no reward function scored it: each of them returned None"

GroupReward = Callable[[Sequence[Task], Sequence[Reply]], Any]
"""(tasks [n], replies [n]) -> a list of n verdicts, or an awaitable of one. All tasks of a group are the same row."""
Part = tuple[float, GroupReward]
"""The weight of a summand, and its function, which returns a number, None or Invalid for each reply."""


@value_type
class GroupVerdicts:
    """The verdicts of a group as the reward returned them."""

    values: Any  # should be a list of `count` verdicts
    count: int


def is_group_reward(function: Callable[..., Any]) -> bool:
    """Return whether a function scores all replies of a group in one call."""
    try:
        named = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    return named[:2] == PARAMETERS


_Environment = TypeVar("_Environment", bound=Callable[..., Any])


def group_reward(reward: Callable[[Sequence[Task], Sequence[Any]], Any]) -> Callable[[_Environment], _Environment]:
    """Return a decorator of environments, whose episodes this function then scores together, once for each group:

        def fewest(tasks, results):
            return [float(moves == min(results)) for moves in results]

        @posttrain.group_reward(fewest)
        def game(task):
            ...
            return moves

    The value that an episode returns is its result, which stays in the worker. The function gets those of all episodes of a
    group, in the order of its members, when the last one has ended, and returns a list of their rewards. An episode that
    raises or returns `Invalid` is not among them. An async environment yields its result last, which cannot be a text,
    and the function may be a coroutine function.
    """

    def mark(environment: _Environment) -> _Environment:
        name = getattr(environment, "__qualname__", repr(environment))
        if not is_of_kind(environment, lambda f: inspect.isgeneratorfunction(f) or inspect.isasyncgenfunction(f)):
            raise UserError(f"{name} yields no turns: write its group reward as def reward(tasks, replies)")
        waits = is_of_kind(environment, inspect.isasyncgenfunction)
        if not callable(reward) or (is_of_kind(reward, inspect.iscoroutinefunction) and not waits):
            what = "async def, and the environment is not: write both so" if callable(reward) else "no function"
            raise UserError(f"the group_reward of {name} is {what}; it is called with (tasks, results)")
        environment.group_reward = reward  # type: ignore[attr-defined]
        return environment

    return mark


def group_reward_of(environment: Callable[..., Any]) -> GroupReward | None:
    """Return the function that scores an environment's episodes group by group; None: each returns its own reward."""
    found = getattr(environment, "group_reward", None)
    return getattr(unwrapped(environment), "group_reward", None) if found is None else found


def scores_groups(function: Callable[..., Any]) -> bool:
    """Return whether a reward, or an environment's, scores all episodes of a group in one call."""
    return is_group_reward(function) or group_reward_of(function) is not None


def lift_group(reward: GroupReward) -> Env:
    """Return the environment of a group: it shows nothing, and its task is {"tasks": ..., "replies": ...}."""

    def env(group: Task) -> Generator[Any, Any, Any]:
        count = len(group["replies"])  # the reward may change the list
        return GroupVerdicts(reward(group["tasks"], group["replies"]), count)
        yield

    return env


def lift_async_group(reward: Callable[..., Any]) -> AsyncEnv:
    """Return the environment of a group for a reward that may be async."""

    async def env(group: Task) -> AsyncGenerator[Any, Any]:
        count = len(group["replies"])
        verdicts = reward(group["tasks"], group["replies"])
        yield GroupVerdicts(await verdicts if inspect.isawaitable(verdicts) else verdicts, count)

    return env


def read_group(given: GroupVerdicts) -> Done:
    """Read the verdicts of a group: a `Done` with one result for each member, or one invalid result for all."""
    values = listed(given.values)
    if isinstance(given.values, Invalid):
        return read_verdict(given.values)
    if values is None:
        return Done(unreadable(f"returned {short(given.values)}; {_expected(given.count)}"))
    if len(values) != given.count:
        return Done(unreadable(f"returned {len(values)} rewards; {_expected(given.count)}"))
    return Done(0.0, group=tuple(map(_member, values)))


def _member(value: Any) -> Done:
    if isinstance(value, Sides):
        return Done(unreadable("returned Sides for a reply of a group; expected its own verdict"))
    return read_verdict(value)


def _expected(count: int) -> str:
    return f"a reward of (tasks, replies) returns a list of one reward for each of the {count} replies"


def listed(values: Any) -> list[Any] | None:
    """Return a list, tuple, or one-dimensional array or tensor as a list; None for other values."""
    if hasattr(values, "tolist") and len(getattr(values, "shape", ())) == 1:
        values = values.tolist()
    return list(values) if isinstance(values, list | tuple) else None


def each(function: Callable[[Task, Reply], Any]) -> GroupReward:
    """Return a reward of single replies as a reward of groups."""
    return lambda tasks, replies: [function(task, reply) for task, reply in zip(tasks, replies, strict=True)]


def group_sum(parts: Mapping[str, Part]) -> GroupReward:
    """Return the weighted sum of rewards of groups, with each part, without its weight, as a named part.

    A part that is None does not count in the sum of that reply, as in TRL (`nansum`); a reply whose parts are all None
    is invalid. If any part is invalid, the sum is, with the part's name before its reason. A single part with weight 1
    is not listed besides the sum. The result is a coroutine function if one of the parts is.
    """

    def read(given: Any, count: int) -> list[float | Invalid | None]:
        values = listed(given)
        if values is None or len(values) != count:
            what = short(given) if values is None else f"{len(values)} rewards"
            return [unreadable(f"returned {what} for {count} replies; expected a list with one for each")] * count
        return [_number(value) for value in values]

    def add(found: Mapping[str, Any], count: int) -> list[Any]:
        columns = {name: read(given, count) for name, given in found.items()}
        return [_total({n: column[i] for n, column in columns.items()}, parts) for i in range(count)]

    if not any(inspect.iscoroutinefunction(function) for _, function in parts.values()):

        def reward(tasks: Sequence[Task], replies: Sequence[Reply]) -> list[Any]:
            count = len(replies)  # a part may change its lists
            return add({name: function([*tasks], [*replies]) for name, (_, function) in parts.items()}, count)

    else:

        async def reward(tasks: Sequence[Task], replies: Sequence[Reply]) -> list[Any]:  # type: ignore[misc]
            count, given = len(replies), lambda: ([*tasks], [*replies])
            waiting = {n: f(*given()) for n, (_, f) in parts.items() if inspect.iscoroutinefunction(f)}
            done = dict(zip(waiting, await asyncio.gather(*waiting.values()), strict=True))
            found = {n: done[n] if n in done else f(*given()) for n, (_, f) in parts.items()}
            return add(found, count)

    return cast(GroupReward, reward)


def refusing(reward: Callable[..., Any], parts: Iterable[Callable[..., Any]]) -> Callable[..., Any]:
    """Return the reward with `problem_of_row`, a function of a row: why a part cannot score the row, or None."""
    found = [part.problem_of_row for part in parts if hasattr(part, "problem_of_row")]
    if not found:
        return reward
    whole = functools.partial(reward)  # an object that can have attributes
    whole.problem_of_row = lambda task: next(filter(None, (refuses(task) for refuses in found)), None)  # type: ignore[attr-defined]
    return whole


def _number(value: Any) -> float | Invalid | None:
    if value is None or isinstance(value, Invalid):
        return value
    number = read_number(value, "returned")
    wrong = f"returned {short(value)} for a reply; expected a finite number of at most {MOST_REWARD:g}, or None"
    return unreadable(wrong) if isinstance(number, Invalid) else number


def _total(found: Mapping[str, float | Invalid | None], parts: Mapping[str, Part]) -> Any:
    for name, value in found.items():
        if isinstance(value, Invalid):
            return Invalid(f"{name}: {value.reason}", value.kind)
    counted = {name: value for name, value in found.items() if value is not None}
    if not counted:
        return Invalid(NOT_SCORED)
    total = math.fsum(parts[name][0] * cast(float, value) for name, value in counted.items())
    alone = len(parts) == 1 and next(iter(parts.values()))[0] == 1.0
    return total if alone else {"reward": total, **counted}
