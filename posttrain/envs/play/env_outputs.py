"""Checks the values that environments yield and return, and decides which are turns and rewards.

They are user data, checked in this one place: an unreadable value becomes `Invalid` with a reason that names the
expected value, never a silent 0.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from posttrain.core.messages import safe, short
from posttrain.core.pictures import PictureError, has_parts, parts
from posttrain.core.tool_calls import CALLS, read_calls
from posttrain.core.types import (
    ROLES,
    TEMPERATURES,
    Ask,
    Graded,
    Invalid,
    InvalidKind,
    Sides,
    SpanReward,
    Turn,
    UserError,
    is_temperature,
    value_type,
)

MOST_REWARD = 1e6
"""Maximum absolute value of a valid reward: gradients of larger ones are noise, or not finite."""
LONGEST_TEXT = 1 << 20
"""Maximum number of characters of a turn, over all its messages: more would take minutes to tokenise. Also that of a request
to a service, as JSON.
"""
DEEPEST = 32  # levels of lists and dicts in a request to a service
MOST_INTEGER = 1 << 63  # JSON readers disagree beyond it
MOST_TOKEN = 1 << 31  # token ids are below it
MOST_PARTS = 256  # most parts of a reward
MOST_SPANS = 4096  # most span rewards of an episode
LONGEST_NAME = 200  # characters of a part's name
MOST_STOPS, LONGEST_STOP = 64, 1000  # stop strings of a turn, and characters of one
MOST_SIDES = 64  # most sides of an episode
LONGEST_REASON = 1000  # most characters kept of a reason

FINITE = f"expected a finite number of at most {MOST_REWARD:g}"
EXPECTED = f"{FINITE}, a dict of them, Graded, Sides, or Invalid(reason)"


class UnreadableOutput(Exception):
    """A value that is no turn or reward; the message describes it."""


@value_type
class Done:
    """The end of an episode: its reward, the reward's named parts, and further rewards of spans of its replies."""

    reward: float | Invalid
    rewards: dict[str, float] = field(default_factory=dict)
    spans: tuple[SpanReward, ...] = ()
    sides: dict[str, Done] = field(default_factory=dict)  # the result of each side, if the policy played several
    notes: dict[str, Any] = field(default_factory=dict)  # the environment's notes: see `call_recording.note`
    group: tuple[Done, ...] = ()  # the result of each member, if a reward scored a whole group

    def of(self, side: str) -> Done:
        """Return the result of a side."""
        if not self.sides:
            return self
        missing = f"returned Sides for {', '.join(map(repr, self.sides))}, without the side {side!r} that was asked"
        return self.sides.get(side) or Done(unreadable(missing))


@value_type
class AwaitsGroup:
    """An episode has ended, and its reward comes when all of its group have: see `group_rewards.group_reward`."""


Event = Turn | Ask | AwaitsGroup | Done
"""An event of an environment: a turn to show to the policy, a request to a service, its last turn's end, or the end."""


def read_verdict(value: Any) -> Done:
    """Read the result of a reward.

    Example: {"correct": 1, "format": 0.5} -> Done(1.5, {"correct": 1.0, "format": 0.5}). A part called "reward" is the
    reward, and is not listed again among the parts.
    """
    if isinstance(value, Invalid):
        reason: Any = value.reason
        return Done(Invalid(cleaned(reason if isinstance(reason, str) else short(reason)), InvalidKind(value.kind)))
    try:
        if isinstance(value, Sides):
            return _read_sides(value.verdicts)
        if not isinstance(value, Graded):
            return _read_reward(value)
        return replace(_read_reward(value.reward), spans=_read_spans(value.spans))
    except UnreadableOutput as fault:
        return Done(unreadable(str(fault)))


def _read_sides(given: Any) -> Done:
    if not isinstance(given, Mapping) or not 0 < len(given) <= MOST_SIDES:
        raise UnreadableOutput(f"returned Sides of {short(given)}; expected a dict of 1 to {MOST_SIDES} verdicts")
    sides: dict[str, Done] = {}
    for side, verdict in given.items():
        if problem := problem_of_side(side):
            raise UnreadableOutput(f"returned Sides with {problem}")
        if isinstance(verdict, Sides):
            raise UnreadableOutput("returned Sides within Sides")
        sides[side] = read_verdict(verdict)
    return Done(0.0, sides=sides)


def problem_of_side(side: Any) -> str | None:
    """Return the fault in the name of a side, or None if it is valid."""
    if type(side) is str and not side:
        return None
    if isinstance(side, str) and len(side) <= LONGEST_NAME and side == cleaned(side):
        return None
    return f"the side {short(side)}; expected a name of one line"


def _read_reward(value: Any) -> Done:
    if not isinstance(value, Mapping):
        return Done(_number(value, "returned"))
    if not 0 < len(value) <= MOST_PARTS:
        what = "an empty dict" if not len(value) else f"a dict of {len(value)} parts"
        raise UnreadableOutput(f"returned {what}; {EXPECTED}")
    parts: dict[str, float] = {}
    for name, part in value.items():
        number = _number(part, f"part {name!r} is")
        line = cleaned(name)[:LONGEST_NAME]
        if line in parts:
            raise UnreadableOutput(f"returned two parts whose names are {line!r} on one line; {EXPECTED}")
        parts[line] = number
    if "reward" in parts:
        return Done(parts.pop("reward"), parts)
    total = math.fsum(parts.values())  # exact: the order of the parts does not matter
    if abs(total) > MOST_REWARD:
        raise UnreadableOutput(f"the parts add up to {total:g}; {EXPECTED}")
    return Done(total, parts)


def _read_spans(value: Any) -> tuple[SpanReward, ...]:
    expected = "expected SpanReward(end, reward, reply) with whole numbers for the first and the last"
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) > MOST_SPANS:
        raise UnreadableOutput(f"returned Graded with spans {short(value)}; expected a list of at most {MOST_SPANS}")
    spans = []
    for span in value:
        if not isinstance(span, SpanReward):
            raise UnreadableOutput(f"returned Graded with a span {short(span)}; {expected}")
        if not all(isinstance(x, int) and not isinstance(x, bool) for x in (span.end, span.reply)):
            raise UnreadableOutput(f"returned Graded with a span {short(span)}; {expected}")
        reward = _number(span.reward, "returned Graded with a span whose reward is")
        spans.append(SpanReward(int(span.end), reward, int(span.reply)))
    return tuple(spans)


def read_yielded(value: Any) -> Turn | Ask | Invalid:
    """Read a yielded value as a turn or a request to a service, made of plain data."""
    return read_ask(value) if isinstance(value, Ask) else read_turn(value)


def read_ask(value: Ask) -> Ask | Invalid:
    """Return a request to a service, as plain JSON data that shares nothing with the environment's objects."""
    name: Any = value.service
    if not isinstance(name, str) or not name or len(name) > LONGEST_NAME or problem_of_text(name):
        return unreadable(f"yielded an Ask whose service is {short(name)}; expected the name of one, such as 'judge'")
    size = [0]
    try:
        content = plain_data(value.content, size, 0)
    except ValueError as problem:
        return unreadable(f"yielded an Ask {problem}")
    return Ask(str.__str__(name), content)


class TooMuch(ValueError):
    """Data are valid but too long."""


def plain_data(value: Any, size: list[int], depth: int) -> Any:
    """Return a copy made of JSON's own types, and add its characters to `size`. Raises ValueError with the fault."""
    if isinstance(value, str):
        value = str.__str__(value)  # a type of the user's may report any length
    size[0] += 2 + (len(value) if isinstance(value, str) else 24 if isinstance(value, int | float) else 2)
    if size[0] > LONGEST_TEXT:
        raise TooMuch(f"whose content has more than {LONGEST_TEXT:,} characters")
    if depth > DEEPEST:
        raise ValueError(f"whose content is nested more than {DEEPEST} levels deep")
    if isinstance(value, str):
        if problem := problem_of_text(value):
            raise ValueError(f"whose content holds {problem}")
        return value
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(number := int.__int__(value)) < MOST_INTEGER:
        return number
    if isinstance(value, float) and math.isfinite(real := float.__float__(value)):
        return real
    if isinstance(value, list | tuple):
        return [plain_data(item, size, depth + 1) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {plain_data(key, size, depth): plain_data(item, size, depth + 1) for key, item in value.items()}
    raise ValueError(
        f"whose content holds {short(value)}; expected JSON data: text, finite numbers, lists, dicts with text for keys"
    )


def read_turn(value: Any) -> Turn | Invalid:
    """Read a yielded value as a turn of plain data, whose text can be tokenised."""
    try:
        return _read_turn(value)
    except UnreadableOutput as fault:
        return unreadable(str(fault))


def _read_turn(value: Any) -> Turn:
    if isinstance(value, str):
        value = Turn(text=value)
    if not isinstance(value, Turn):
        raise UnreadableOutput(f"yielded {short(value)}; expected a Turn or a string")
    if (value.text is None) + (value.messages is None) + (value.tokens is None) != 2:
        raise UnreadableOutput("yielded a Turn that needs one of text, messages and tokens")
    if value.text is not None and not isinstance(value.text, str):
        raise UnreadableOutput(f"yielded a Turn whose text is {short(value.text)}; expected a string")
    messages = _read_messages(value.messages)
    tokens = _read_tokens(value.tokens)
    if value.text is not None:
        _check_texts([value.text])
    tools = _read_tools(value.tools)
    if tools is not None and messages is None:
        raise UnreadableOutput("yielded a Turn with tools and text; tools need messages, as a chat template shows them")
    stop = _read_stop(value.stop)
    most = value.max_tokens
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise UnreadableOutput(f"yielded a Turn whose max_tokens is {short(most)}; expected a positive integer")
    temperature = value.temperature
    if temperature is not None and not is_temperature(temperature):
        raise UnreadableOutput(f"yielded a Turn whose temperature is {short(temperature)}; expected {TEMPERATURES}")
    flags = {name: getattr(value, name) for name in ("tool", "fresh", "learn", "whole")}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise UnreadableOutput(f"yielded a Turn whose {name} is {short(flag)}; expected True or False")
    failed = value.failed
    if failed is not None and (type(failed) is not int or not 0 <= failed <= len(messages or ())):
        raise UnreadableOutput(f"yielded a Turn whose failed is {short(failed)}; expected how many of its messages are")
    reward = _number(value.reward, "yielded a Turn whose reward is")
    if strange := problem_of_side(value.side):
        raise UnreadableOutput(f"yielded a Turn of {strange}")
    text = None if value.text is None else str.__str__(value.text)
    flags["whole"] = flags["whole"] or tokens is not None
    how = stop, reward, None if most is None else int(most)
    temperature = None if temperature is None else float(temperature)
    return Turn(
        text, messages, tokens, *how, **flags, tools=tools, side=value.side, temperature=temperature, failed=failed
    )


def _read_tokens(value: Any) -> list[int] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(type(id) is int for id in value):
        raise UnreadableOutput(f"yielded a Turn whose tokens are {short(value)}; expected a list of token ids")
    if len(value) > LONGEST_TEXT or not all(0 <= id < MOST_TOKEN for id in value):
        raise UnreadableOutput(f"yielded a Turn with {len(value):,} tokens, or with ids that no vocabulary has")
    return list(value)


def _read_messages(given: Any) -> list[dict[str, Any]] | None:
    """Return chat messages as plain JSON data."""
    if given is None:
        return None
    if not (isinstance(given, (list, tuple)) and all(isinstance(m, Mapping) for m in given)):
        raise UnreadableOutput(
            f'yielded a Turn whose messages are {short(given)}; expected a list of {{"role": ..., "content": ...}}'
        )
    size = [0]
    messages = []
    for message in given:
        try:
            content = message.get("content")
            if has_parts(content):
                message = {**message, "content": parts(content)}
            plain = plain_data(message, size, 0)
        except PictureError as problem:
            raise UnreadableOutput(f"yielded a Turn in which {problem}") from None
        except ValueError as problem:
            raise UnreadableOutput(f"yielded a Turn with a message {problem}") from None
        if not isinstance(plain.get("role"), str) or "content" not in plain:
            raise UnreadableOutput('yielded a Turn with a message that lacks "role" or "content"')
        if plain["role"] not in ROLES:
            raise UnreadableOutput(
                f"yielded a Turn with a message whose role is {short(plain['role'])}; it is one of {', '.join(ROLES)}"
            )
        if not isinstance(plain["content"], str | list | None):
            raise UnreadableOutput(
                f"yielded a Turn with a message whose content is {short(plain['content'])}; expected text"
            )
        try:
            called = plain.get("tool_calls") and [plain_data(call, [0], 0) for call in read_calls(plain["tool_calls"])]
            messages.append({**plain, "tool_calls": called} if called else plain)
        except ValueError:
            raise UnreadableOutput(
                f"yielded a Turn with a message whose tool_calls are {short(plain['tool_calls'])}; expected a list of "
                f"{CALLS}"
            ) from None
    return messages


def _read_tools(given: Any) -> list[dict[str, Any]] | None:
    """Return the JSON schemas of tools, which may be given as functions."""
    if given is None:
        return None
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise UnreadableOutput(f"yielded a Turn whose tools are {short(given)}; expected a list of functions")
    found = []
    for tool in given:
        try:
            found.append(read_schema(tool))
        except UserError as problem:
            raise UnreadableOutput(f"yielded a Turn with a tool that cannot be shown: {problem}") from None
    names = [tool["function"]["name"] for tool in found]
    if len(set(names)) < len(names):
        raise UnreadableOutput(f"yielded a Turn with two tools of one name: {', '.join(sorted(names))}")
    return found


def read_schema(tool: Any) -> dict[str, Any]:
    """Return the schema of a tool, given as a function or as the schema itself. Raises UserError."""
    if callable(tool):
        from posttrain.envs.tool_schemas import schema_of

        tool = schema_of(tool)
    if isinstance(tool, Mapping) and "function" not in tool and "name" in tool:
        tool = {"type": "function", "function": tool}
    try:
        plain = plain_data(tool, [0], 0)
    except ValueError as problem:
        raise UserError(f"its schema is {problem}") from None
    function = plain.get("function") if isinstance(plain, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise UserError(f'{short(tool)} is neither a function nor {{"type": "function", "function": {{"name": ...}}}}')
    if not isinstance(function.get("parameters", {}), dict):
        raise UserError(f"the parameters of {function['name']} are {short(function['parameters'])}, not a JSON schema")
    return plain


def _read_stop(value: Any) -> tuple[str, ...]:
    if type(value) is tuple and not value:
        return value
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(stop, str) for stop in value):
        raise UnreadableOutput(f"yielded a Turn whose stop is {short(value)}; expected a tuple of strings")
    if len(value) > MOST_STOPS or not all(0 < len(stop) <= LONGEST_STOP for stop in value):
        most = f"at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters"
        raise UnreadableOutput(f"yielded a Turn whose stop is {short(value)}; expected {most}")
    _check_texts(value)
    return tuple(map(str.__str__, value))


def _check_texts(texts: Sequence[str]) -> None:
    """Raise UnreadableOutput if these texts cannot be tokenised."""
    size = sum(map(len, texts))
    if size > LONGEST_TEXT:
        raise UnreadableOutput(f"yielded {size:,} characters; a turn may have at most {LONGEST_TEXT:,}")
    for text in texts:
        if problem := problem_of_text(text):
            raise UnreadableOutput(f"yielded {problem}")


def problem_of_text(text: str) -> str | None:
    """Describe the part of a text that is no valid character; None if there is none."""
    if text.isascii() or not (found := re.search("[\ud800-\udfff]", text)):
        return None
    return (
        f"half a surrogate pair at character {found.start()}, which is not a character: decode bytes with "
        'errors="replace"'
    )


def read_number(value: Any, said: str, expected: str = EXPECTED) -> float | Invalid:
    """Return a plain float, also for numbers of numpy, torch or decimal.

    `said`: the beginning of the reason if invalid; `expected`: its end.
    """
    try:
        return _number(value, said, expected)
    except UnreadableOutput as fault:
        return unreadable(str(fault))


def _number(value: Any, said: str, expected: str = EXPECTED) -> float:
    if value is None:
        raise UnreadableOutput(f"{said} None (is a return missing?); {expected}")
    if type(value) not in (float, int, bool) and not _is_real(value):
        raise UnreadableOutput(f"{said} {short(value)}; {expected}")
    try:
        number = float(value)
    except Exception:  # integers beyond float, and any error of the user's type
        raise UnreadableOutput(f"{said} {short(value)}; {expected}") from None
    if not abs(number) <= MOST_REWARD:  # also refuses NaN
        raise UnreadableOutput(f"{said} {number:g}; {expected}")
    return number


def _is_real(value: Any) -> bool:
    """Return whether a value that is none of Python's own numbers is one real number."""
    real = hasattr(value, "__float__") and not isinstance(value, str)
    if isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real):
        real = False
    dtype = getattr(value, "dtype", None)  # numpy's and torch's scalars may also be text or complex
    if dtype is not None:
        real = real and tuple(value.shape) == () and re.search(r"(^|\.|\bb)(float|u?int|bool)", str(dtype)) is not None
    return real


def unreadable(reason: str) -> Invalid:
    return Invalid(cleaned(reason), InvalidKind.UNREADABLE)


def cleaned(text: Any) -> str:
    """Return a user's text on one line of bounded length, with control codes made visible."""
    line = safe(" ".join(str(text)[: 2 * LONGEST_REASON].split())).encode("utf-8", "replace").decode()
    return line if len(line) <= LONGEST_REASON else line[:LONGEST_REASON] + "..."
