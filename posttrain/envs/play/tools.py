"""Makes the tool calls of replies, and answers them. It decides the effect of a call that cannot be made.

def assistant(task):
    tools = Tools(search, calculator, malformed="answer", raising="end")
    reply = yield Turn(messages=task["messages"], tools=tools)
    while turn := tools.answer(reply):
        reply = yield turn
    return float(task["answer"] in reply)
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from posttrain.core.messages import near_or_all
from posttrain.core.types import Reply, SpanReward, ToolCall, Turn, UserError
from posttrain.envs.play.call_recording import recorded
from posttrain.envs.play.env_outputs import cleaned, read_schema
from posttrain.envs.tool_schemas import validator_of

Then = Literal["answer", "end", "invalid"]
"""Effect of a failed call on the episode: the model sees the error and the episode continues, it ends and is scored, or it
is invalid.
"""


class ToolFailed(Exception):
    """A call that makes its episode invalid."""


LONGEST_RESULT = 1 << 18  # characters; a longer result would make the turn, and so the episode, invalid


@dataclass(frozen=True)
class Called:
    """A call that was made, or could not be."""

    call: ToolCall
    reply: int  # number of the reply with the call
    answer: str  # text of the answer to the model
    problem: str | None = None  # why there is no result
    value: Any = None  # the result as JSON data, where the class of the tools keeps it

    def earns(self, reward: float) -> SpanReward:
        """Return a reward for the tokens of this call, to put among the spans of a `Graded`."""
        return SpanReward(self.call.end, reward, self.reply)


class Tools:
    """The tools of one episode, created inside the environment. Iteration yields their schemas, as `Turn.tools`
    requires.

    `functions` have type hints and docstrings; with coroutine functions, use `answer_async`. `malformed`: effect of a
    call that cannot be read, names an unknown tool, or has invalid arguments; `raising`: of a call whose tool raises.
    Results are recorded: after the loss of a worker no call is made twice. `once=False` is for tools that only read and
    change the episode's own state: a replay calls them again, as their changes would otherwise be missing.
    """

    def __init__(
        self,
        *functions: Callable[..., Any],
        malformed: Then = "answer",
        raising: Then = "answer",
        once: bool = True,
    ) -> None:
        for then in (malformed, raising):
            if then not in get_args(Then):
                raise UserError(f"the effect of a failed call must be one of {', '.join(get_args(Then))}, not {then!r}")
        self.schemas = [read_schema(function) for function in functions]
        self.functions = {
            schema["function"]["name"]: function for schema, function in zip(self.schemas, functions, strict=True)
        }
        if len(self.functions) < len(functions):
            raise UserError("two tools have one name")
        self._then = {"malformed": malformed, "raising": raising}
        self._once = once
        self.calls: list[Called] = []  # all calls so far, in order
        self.ended: str | None = None  # the problem, if a call ended the episode

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.schemas)

    def answer(self, reply: Reply) -> Turn | None:
        """Make the calls of a reply, and return the turn with their answers; None without calls, or if one ends the
        episode.

        Raises ToolFailed if a failed call makes the episode invalid.
        """
        made = []
        for call in reply.tool_calls:
            function = self.checked(call)
            if isinstance(function, str):
                made.append(self._failed(call, reply, function, "malformed"))
            elif inspect.iscoroutinefunction(function):
                raise UserError(f"{call.name} is a coroutine function: use `await tools.answer_async(reply)`")
            else:
                asked = function, dict(call.arguments)
                outcome = recorded(self._outcome, *asked) if self._once else self._outcome(*asked)
                made.append(self._made(call, reply, outcome))
            if self.ended is not None:
                break
        return self._turn(made)

    async def answer_async(self, reply: Reply) -> Turn | None:
        """Make and answer the calls as `answer` does, for async environments: the calls of a reply run concurrently."""
        checked = [(call, self.checked(call)) for call in reply.tool_calls]
        waiting = [
            recorded(self._outcome_async, function, dict(call.arguments))
            if self._once
            else self._outcome_async(function, dict(call.arguments))
            for call, function in checked
            if not isinstance(function, str)
        ]
        outcomes = iter(await asyncio.gather(*waiting))
        made = []
        for call, function in checked:
            if isinstance(function, str):
                made.append(self._failed(call, reply, function, "malformed"))
            else:
                made.append(self._made(call, reply, next(outcomes)))
        return self._turn(made)

    def checked(self, call: ToolCall) -> Callable[..., Any] | str:
        """Return the function to call, or the reason why it cannot be called."""
        if call.problem is not None:
            return call.problem
        function = self.functions.get(call.name)
        if function is None:
            return f"there is no tool {call.name!r}{near_or_all(call.name, sorted(self.functions))}"
        from jsonschema import Draft202012Validator

        parameters = next(s for s in self.schemas if s["function"]["name"] == call.name)["function"].get(
            "parameters", {}
        )
        error = next(iter(Draft202012Validator(validator_of(parameters)).iter_errors(dict(call.arguments))), None)
        if error is None:
            return function
        where = "".join(f"[{part!r}]" for part in error.path)
        return f"the arguments{where} do not fit: {cleaned(error.message)[:300]}"

    def failure_text(self, problem: str) -> str:
        """Return the answer to a call without a result."""
        return f"Error: {problem}"

    def reason(self, error: Exception) -> str:
        """Return the problem of a call whose tool raised."""
        return cleaned(f"{type(error).__name__}: {error}")

    def outcome_of(self, result: Any) -> dict[str, Any]:
        """Return {"answer": the text that the model sees}: text unchanged, anything else as JSON."""
        return {
            "answer": answer_text(
                result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
            )
        }

    def _outcome(self, function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            return self.outcome_of(function(**arguments))
        except Exception as error:
            return {"raised": self._reason(error)}

    async def _outcome_async(self, function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            result = function(**arguments)
            return self.outcome_of(await result if inspect.isawaitable(result) else result)
        except Exception as error:
            return {"raised": self._reason(error)}

    def _reason(self, error: Exception) -> str:
        try:
            return self.reason(error)
        except Exception:  # raised by the user's __str__
            return type(error).__name__

    def _made(self, call: ToolCall, reply: Reply, outcome: Mapping[str, Any]) -> Called:
        if "raised" in outcome:
            return self._failed(call, reply, outcome["raised"], "raising")
        called = Called(call, reply.number, outcome["answer"], value=outcome.get("value"))
        self.calls.append(called)
        return called

    def _failed(self, call: ToolCall, reply: Reply, problem: str, way: str) -> Called:
        called = Called(call, reply.number, self.failure_text(problem), problem)
        self.calls.append(called)
        if self._then[way] == "invalid":
            raise ToolFailed(f"{call.name or 'a call'}: {problem}")
        if self._then[way] == "end" and self.ended is None:
            self.ended = problem
        return called

    def _turn(self, made: list[Called]) -> Turn | None:
        if not made or self.ended is not None:
            return None
        messages = [
            {"role": "tool", "name": c.call.name or "unknown", "tool_call_id": c.call.id, "content": c.answer}
            for c in made
        ]
        return Turn(messages=messages, failed=sum(c.problem is not None for c in made))


def answer_text(text: str) -> str:
    """Return a result's text in valid characters. Raises ValueError if it is too long."""
    if len(text) > LONGEST_RESULT:
        raise ValueError(f"the result has {len(text):,} characters; a tool may return {LONGEST_RESULT:,}")
    return text.encode("utf-8", "replace").decode()
