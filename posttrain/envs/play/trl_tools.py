"""Episodes of TRL's agent training: `tools`, functions that the policy calls, and `environment_factory`, a class whose
public methods it calls.

An episode is what `GRPOTrainer._tool_call_loop` plays for one completion (TRL 1.16): results and errors have its texts,
calls that cannot be read end the episode, and answers that no longer fit are taken back. Functions written for TRL then
score the episodes of a group in one call. They read each from its last reply, a `LastReply`.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from posttrain.core.messages import near_or_all, short
from posttrain.core.types import Reply, Task, ToolCall, Turn, UserError
from posttrain.envs.play.env_outputs import plain_data
from posttrain.envs.play.group_rewards import Part, group_sum
from posttrain.envs.play.tools import Tools, answer_text
from posttrain.system.user_code import describe_error, is_of_kind, source_file, takes_any_name

RESERVED = ("reset", "get_reward")
"""Public methods of an environment that are no tools."""
_REASONING = re.compile(r"\s*(?:<think>)?\s*(.*?)\s*</think>\s*(.*)", re.DOTALL)

Messages = list[dict[str, Any]]


class LastReply(Reply):
    """The last reply of an episode, with what functions written for TRL read."""

    prompt: Messages  # with the text of the environment's `reset`
    completion: Messages  # of the assistant and of the tools, in order
    sampled_ids: list[int] | None  # of all replies; None if they were not sampled
    environment: Any  # None without `environment_factory`


class TrlTools(Tools):
    """Tools whose answers have the texts of TRL's: `str(result)`, and {'error': 'reason'}."""

    def checked(self, call: ToolCall) -> Callable[..., Any] | str:
        return self.functions.get(call.name) or f"Tool {call.name} not found."

    def reason(self, error: Exception) -> str:
        return str(error)

    def failure_text(self, problem: str) -> str:
        return answer_text(str({"error": problem}))

    def outcome_of(self, result: Any) -> dict[str, Any]:
        """Return the text, and a list as it is: TRL's rewards read it so."""
        found: dict[str, Any] = {"answer": answer_text(str(result))}
        if isinstance(result, list):
            with suppress(ValueError):  # it is no JSON data
                found["value"] = plain_data(result, [0], 0)
        return found


def trl_episodes(
    parts: Mapping[str, Part],
    tools: Sequence[Callable[..., Any]] = (),
    environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
    max_tool_calling_iterations: int | None = None,
) -> TrlEpisodes | WaitingTrlEpisodes:
    """Return the environment whose episodes use these tools and earn the weighted sum of these rewards.

    The arguments are those of `GRPOTrainer`. The reward of an environment with `get_reward` is added. Raises UserError
    for tools that cannot be shown, an environment without `reset`, and if nothing gives a reward.
    """
    most = max_tool_calling_iterations
    if most is not None and (type(most) is not int or most < 0):
        raise UserError(f"max_tool_calling_iterations is {short(most)}; it is a whole number, or None")
    if not isinstance(tools, list | tuple):
        raise UserError(f"tools is {short(tools)}; it is a list of functions")
    named = isinstance(environment_factory, Mapping)
    if named and not environment_factory:
        raise UserError("environment_factory has no environments: name one, or leave it out")
    factories: dict[Any, Any] = {}
    if environment_factory is not None:
        factories = (
            dict(environment_factory) if isinstance(environment_factory, Mapping) else {None: environment_factory}
        )
    kinds = {name: _kind(factory) for name, factory in factories.items()}
    TrlTools(*tools)  # refuses functions that cannot be shown
    for kind in kinds.values():
        TrlTools(*tools, *_methods(kind).values())
    summands = dict(parts)
    for kind in dict.fromkeys(kinds.values()):
        if hasattr(kind, "get_reward"):
            names = (kind.__name__, *(f"{kind.__name__}-{number}" for number in range(2, len(summands) + 3)))
            summands[next(name for name in names if name not in summands)] = 1.0, _own_reward(kind)
    if not summands:
        raise UserError("nothing gives a reward: name a reward function, or define get_reward in the environment")
    reward = group_sum(summands)
    called = [*tools, *(method for kind in kinds.values() for method in _methods(kind).values()), reward]
    waits = any(is_of_kind(function, inspect.iscoroutinefunction) for function in called)
    refusing = [part.problem_of_row for _, part in parts.values() if hasattr(part, "problem_of_row")]
    episodes = WaitingTrlEpisodes if waits else TrlEpisodes
    return episodes(reward, list(tools), factories, named, sys.maxsize if most is None else most, refusing)


class _Played:
    """Base of both kinds of episodes."""

    waits = False  # whether tools or rewards are coroutine functions

    def __init__(
        self,
        reward: Callable[..., Any],
        tools: list[Callable[..., Any]],
        factories: Mapping[Any, Callable[[], Any]],
        named: bool,
        most: int,
        refusing: Sequence[Callable[[Task], str | None]],
    ) -> None:
        """`named`: whether the column "environment" names the environment of a row; `most`: rounds of calls."""
        self._tools, self._factories, self._named, self._most = tools, factories, named, most
        self.group_reward = self._releasing(reward)
        self._refusing = refusing
        self._free: dict[Any, list[Any]] = {}  # environments by name: each is made once and reset often

    def problem_of_row(self, task: Task) -> str | None:
        """Return why a row cannot be played or scored, or None."""
        if self._factories and self._name(task) not in self._factories:
            return f"environment is {task.get('environment')!r:.60}{near_or_all('', sorted(self._factories))}"
        return next(filter(None, (refuses(task) for refuses in self._refusing)), None)

    def _releasing(self, reward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the reward, which leaves the environments of its episodes to later ones."""

        def release(tasks: Sequence[Task], replies: Sequence[LastReply], verdicts: Any) -> Any:
            for task, reply in zip(tasks, replies, strict=True):
                self._free.setdefault(self._name(task), []).append(reply.environment)
            return verdicts

        async def waiting(tasks: Sequence[Task], results: Sequence[tuple[LastReply]]) -> Any:
            replies = [reply for [reply] in results]
            verdicts = reward(tasks, replies)
            return release(tasks, replies, await verdicts if inspect.isawaitable(verdicts) else verdicts)

        return waiting if self.waits else lambda tasks, replies: release(tasks, replies, reward(tasks, replies))

    def play(self, task: Task) -> Generator[Any, Any, LastReply]:
        """Yield turns and awaitables, and return what the rewards read."""
        environment = self._taken(task)
        prompt = self._opened(task, environment)
        methods = [getattr(environment, method) for method in _methods(type(environment))] if self._factories else []
        tools = TrlTools(*self._tools, *methods, once=environment is None)  # methods change their environment
        replies = [(yield Turn(messages=prompt, tools=tools if tools.functions else None))]
        completion = [_message(replies[0])]
        for _ in range(self._most):
            calls = replies[-1].tool_calls
            if not calls or any(call.problem for call in calls):
                break
            turn = (yield tools.answer_async(replies[-1])) if self.waits else tools.answer(replies[-1])
            reply = yield turn
            if not reply and reply.stop.truncated:  # the answers were not shown
                break
            completion += [_answer(called.call.name, called) for called in tools.calls[-len(calls) :]]
            replies, completion = [*replies, reply], [*completion, _message(reply)]
        return _last(replies, prompt, completion, environment)

    def _name(self, task: Task) -> Any:
        return task.get("environment") if self._named else None

    def _taken(self, task: Task) -> Any:
        """Return an environment that no other episode has; None without a factory."""
        if not self._factories:
            return None
        if problem := self.problem_of_row(task):
            raise ValueError(problem)
        free = self._free.get(self._name(task))
        return free.pop() if free else self._factories[self._name(task)]()

    def _opened(self, task: Task, environment: Any) -> Messages:
        """Return the prompt, with the text of `reset` at the end of its last message."""
        given = task.get("messages") or [{"role": "user", "content": task.get("prompt") or ""}]
        prompt = [dict(message) for message in given]
        if environment is None:
            return prompt
        row = {name: value for name, value in task.items() if name != "messages"} | {"prompt": given}
        if self._named:
            del row["environment"]
        if not takes_any_name(taken := inspect.signature(environment.reset).parameters):
            row = {name: value for name, value in row.items() if name in taken}
        seen = environment.reset(**row)
        if seen is not None:
            content = prompt[-1]["content"]
            if isinstance(seen, list) or isinstance(content, list):
                content, seen = ([{"type": "text", "text": x}] if isinstance(x, str) else x for x in (content, seen))
            prompt[-1]["content"] = content + seen
        return prompt


class TrlEpisodes(_Played):
    """Episodes whose tools and rewards are plain functions."""

    def __call__(self, task: Task) -> Generator[Any, Any, Any]:
        return (yield from self.play(task))


class WaitingTrlEpisodes(_Played):
    """Episodes with coroutine functions among their tools or rewards."""

    waits = True

    async def __call__(self, task: Task) -> AsyncGenerator[Any, Any]:
        playing, said = self.play(task), None
        while True:
            try:
                event = playing.send(said)
            except StopIteration as end:
                yield (end.value,)  # a text would be a turn
                return
            said = (await event) if inspect.isawaitable(event) else (yield event)


def _kind(factory: Callable[[], Any]) -> type:
    """Return the class of the environments that a factory makes. Raises UserError if they have no `reset`."""
    if not callable(factory):
        raise UserError(
            f"environment_factory is {short(factory)}; it is a class, or a function that makes an environment"
        )
    try:
        kind = factory if inspect.isclass(factory) else type(factory())
    except Exception as error:  # the user's code
        raise UserError(f"environment_factory fails: {describe_error(error, source_file(factory))}") from error
    if not callable(getattr(kind, "reset", None)):
        raise UserError(f"{kind.__name__} has no reset, which begins an episode of environment_factory: define it")
    return kind


def _methods(kind: type) -> dict[str, Callable[..., Any]]:
    """Return the tools of an environment: its public methods, bound to its class. Static ones are none, as in TRL."""
    found: dict[str, Callable[..., Any]] = {}
    for name in dir(kind):
        if name.startswith("_") or name in RESERVED:
            continue
        if isinstance(inspect.getattr_static(kind, name), types.FunctionType | classmethod):
            method = getattr(kind, name)
            found[name] = method if inspect.ismethod(method) else types.MethodType(method, kind)
    return found


def _own_reward(kind: Any) -> Callable[..., Any]:
    """Return the reward that environments of a class give themselves; None for those of another one."""
    if is_of_kind(kind.get_reward, inspect.iscoroutinefunction):

        async def part(tasks: Sequence[Task], replies: Sequence[Any]) -> list[Any]:
            return [await r.environment.get_reward() if type(r.environment) is kind else None for r in replies]

    else:

        def part(tasks: Sequence[Task], replies: Sequence[Any]) -> list[Any]:  # type: ignore[misc]
            return [r.environment.get_reward() if type(r.environment) is kind else None for r in replies]

    return part


def _message(reply: Reply) -> dict[str, Any]:
    """Return a reply as TRL's `parse_response` does: reasoning, text and calls apart.

    >>> _message(Reply("<think>\\nhm\\n</think>\\n\\nyes"))
    {'role': 'assistant', 'content': 'yes', 'reasoning_content': 'hm'}
    """
    readable = bool(reply.tool_calls) and not any(call.problem for call in reply.tool_calls)
    text = str(reply)[: reply.before_calls] if readable else str(reply)
    found: dict[str, Any] = {"role": "assistant", "content": text}
    if (parts := _REASONING.fullmatch(text)) is not None:
        found["content"] = parts[2]
        if parts[1]:
            found["reasoning_content"] = parts[1]
    if readable:
        functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in reply.tool_calls]
        found["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return found


def _answer(name: str, called: Any) -> dict[str, Any]:
    return {"role": "tool", "name": name, "content": called.answer if called.value is None else called.value}


def _last(replies: Sequence[Reply], prompt: Messages, completion: Messages, environment: Any) -> LastReply:
    said = replies[-1]
    last = LastReply(str(said), said.stop, said.tool_calls, said.number, said.before_calls, said.sampled, said.read)
    tokens = [None if reply.sampled is None else list(reply.sampled.tokens) for reply in replies]
    last.prompt, last.completion, last.environment = prompt, completion, environment
    last.sampled_ids = None if None in tokens else [token for part in tokens for token in part or ()]
    return last
