"""Parses the tool calls of a reply, which is untrusted text.

A call that cannot be parsed is returned with a `problem`. Parsing takes time in proportion to the length of the text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

from posttrain.core.messages import short
from posttrain.core.tool_calls import CALLS, read_calls
from posttrain.core.types import ToolCall, UserError
from posttrain.models.tokenizer.tool_parts import (
    DECODER,
    DEEPEST,
    WORD,
    bounded,
    call_of,
    find_mark,
    json_at,
    skip_mark,
    whole_json,
)

Kind = Literal["object", "named", "keyed", "braced", "python", "harmony"]

MOST_CALLS = 128  # maximum per reply
LONGEST_CODE = 20_000  # maximum of characters of calls in Python syntax, since parsing them takes memory


@dataclass(frozen=True)
class ToolFormat:
    """Format of tool calls: the literal texts around their parts, stripped of white space."""

    kind: Kind
    opening: str = ""  # before a call
    closing: str = ""  # behind it
    gap: str = ""  # named, keyed: between name and arguments
    key_opening: str = ""  # keyed: before a key, between it and its value, behind the value
    key_closing: str = ""
    value_closing: str = ""
    names: tuple[str, str] = ("name", "arguments")  # object: the keys of name and arguments
    quote: str = '"'  # braced: the mark around texts
    numbered: bool = False  # whether the call's id names the tool, as in functions.find:0
    as_text: bool = False  # whether the template expects arguments as the text of a JSON object
    content: str | None = None  # content that the template expects in a message with nothing but calls

    def message(self, calls: Sequence[ToolCall]) -> dict[str, Any]:
        """Return the assistant's message with these calls, as the template expects it."""
        if self.numbered:
            calls = [replace(call, id=f"functions.{call.name}:{number}") for number, call in enumerate(calls)]
        return calling(calls, self.as_text, self.content)

    def read(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[ToolCall]:
        """Parse the calls of a reply, in order; [] if it makes none.

        `tools`: schemas of the tools, which give the types of arguments that are written as text.
        """
        begin = text.rfind("</think>") + len("</think>") if "</think>" in text else 0
        found = list(islice(_READERS[self.kind](self, text, begin), MOST_CALLS))
        if self.kind == "keyed":
            known = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
            found = [_typed(call, known.get(call.name, {})) for call in found]
        return list(map(bounded, found))

    def start(self, text: str) -> int:
        """Return the number of characters of a reply before its first call, without trailing white space."""
        begin = text.rfind("</think>") + len("</think>") if "</think>" in text else 0
        if self.kind == "harmony":
            place = text.rfind("<|channel|>", begin, max(begin, text.find("to=functions.", begin)))
        else:
            place = text.find(self.opening, begin) if self.opening else begin
        return len(text[: max(begin, place)].rstrip())

    def end_of_call(self, text: str, mark: str) -> int:
        """Return the end, behind the closing mark, of the call that has `mark` in one of its arguments; -1 if there is
        none.
        """
        place = text.find(mark)
        if self.kind == "python":
            end = text.find("]" if "]" in text[place:] else ")", place) + 1
            behind = re.compile(r"\s*<[^<>]*>" if self.opening else "").match(text, end)
            return behind.end() if behind else end
        for opening in [self.opening] if self.opening else ["to=functions.", "[", "{"]:
            start = place
            while (start := text.rfind(opening, 0, start)) >= 0:
                for call in islice(_READERS[self.kind](self, text, start), MOST_CALLS):
                    if mark in call.arguments.values():
                        return call.end
        return -1


def calling(calls: Sequence[ToolCall], as_text: bool, content: str | None) -> dict[str, Any]:
    """Return a message with these calls and nothing else."""
    listed = []
    for call in calls:
        arguments: Any = json.dumps(call.arguments, ensure_ascii=False) if as_text else dict(call.arguments)
        listed.append({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}})
    return {"role": "assistant", "content": content, "tool_calls": listed}


def with_calls(messages: Sequence[Mapping[str, Any]], form: ToolFormat | None) -> list[Mapping[str, Any]]:
    """Return messages whose calls of tools are as the template takes them. `form`: of its calls; None: not known.

    Raises UserError for calls that are none.
    """
    found: list[Mapping[str, Any]] = []
    for message in messages:
        if given := message.get("tool_calls"):
            try:
                listed = read_calls(given)
            except ValueError as error:
                raise UserError(f"tool_calls of a message must be a list of {CALLS}: {error}") from None
            message = {**message, "tool_calls": listed}
            if form is not None:
                calls = [
                    ToolCall(c["function"]["name"], c["function"]["arguments"], id=c.get("id") or "") for c in listed
                ]
                made = form.message(calls)
                message = {**message, **made, "content": message.get("content") or made["content"]}
        found.append(message)
    return found


def check_shown(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Raise UserError where a rendered text lacks the name of a tool that its messages call."""
    for call in (call for message in messages for call in message.get("tool_calls") or ()):
        if (name := call.get("function", call)["name"]) not in text:
            raise UserError(
                f"this chat template does not show the call of {name!r}: use one that does (--chat-template chatml), or "
                "write the call into the message's content and leave tool_calls out"
            )


def _read_objects(form: ToolFormat, text: str, begin: int) -> Iterator[ToolCall]:
    place = begin
    if not form.opening:
        stripped = text[place:].lstrip().removeprefix("<|python_tag|>").lstrip()
        place = len(text) - len(stripped)
        if not re.match(r"\[?\s*\{\s*\"", stripped):
            return
    while True:
        if form.opening:
            place = text.find(form.opening, place)
            if place < 0:
                return
            place += len(form.opening)
        start = place
        try:
            value, place = json_at(text, start)
        except ValueError as problem:
            shut = find_mark(text, form.closing, start)
            place = shut + len(form.closing) if shut >= 0 else len(text)
            if form.opening or f'"{form.names[0]}"' in text[start:place]:
                yield ToolCall("", {}, place, f"the call is {problem}")
            if not form.opening:
                return
            continue
        shut = skip_mark(text, form.closing, place)
        unclosed = bool(form.closing) and shut == place
        place = shut
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, dict) or form.names[0] not in item:
                if form.opening:
                    yield ToolCall("", {}, place, f"the call is {short(item)}: it names no tool")
                continue
            if unclosed:
                yield ToolCall("", {}, place, f"the call does not end with {' '.join(form.closing.split())}")
            else:
                yield call_of(item[form.names[0]], item.get(form.names[1], {}), place, item.get("id", ""))
        if not form.opening:
            behind = re.compile(r"[\s;]*(?=\{)").match(text, place)
            if behind is None:
                return
            place = behind.end()


def _read_named(form: ToolFormat, text: str, begin: int) -> Iterator[ToolCall]:
    place = begin
    ahead, _, behind = form.gap.partition("\0")
    while (place := find_mark(text, form.opening, place)) >= 0:
        place = start = place + len(form.opening)
        gap = find_mark(text, ahead or behind, start)
        name = text[start:gap].strip() if gap >= 0 else ""
        name = re.sub(r":\d{1,9}$", "", name) if form.numbered else name
        if behind and gap >= 0 and ahead:
            gap = text.find(behind, gap)
        if gap < 0 or len(name) > 200:
            yield ToolCall("", {}, start, "the call names no tool")
            continue
        try:
            arguments, place = json_at(text, gap + len(behind or ahead))
        except ValueError as problem:
            shut = find_mark(text, form.closing, start)
            place = shut + len(form.closing) if shut >= 0 else len(text)
            yield ToolCall(name if WORD.fullmatch(name) else "", {}, place, f"the arguments are {problem}")
            continue
        place = skip_mark(text, form.closing, place)
        yield call_of(name, arguments, place)


def _read_keyed(form: ToolFormat, text: str, begin: int) -> Iterator[ToolCall]:
    place = begin
    while (place := find_mark(text, form.opening, place)) >= 0:
        start = place + len(form.opening)
        shut = find_mark(text, form.closing, start)
        end = shut + len(form.closing) if shut >= 0 else len(text)
        inside = text[start : shut if shut >= 0 else len(text)]
        place = end
        if shut < 0 and form.closing:
            yield ToolCall("", {}, end, f"the call does not end with {' '.join(form.closing.split())}")
            continue
        named = WORD.match(inside.lstrip())
        if named is None:
            yield ToolCall("", {}, end, "the call names no tool")
            continue
        rest = inside.lstrip()[named.end() :]
        try:
            yield ToolCall(named[0], dict(_pairs(form, rest.lstrip().removeprefix(form.gap))), end)
        except ValueError as problem:
            yield ToolCall(named[0], {}, end, str(problem))


def _pairs(form: ToolFormat, text: str) -> Iterator[tuple[str, str]]:
    """Yield (key, value as text) of the arguments of a keyed call."""
    place = 0
    while text[place:].strip():
        start = skip_mark(text, form.key_opening, place)
        middle = text.find(form.key_closing, start)
        stop = text.find(form.value_closing, middle + len(form.key_closing)) if middle >= 0 else -1
        if start == place or stop < 0:
            marks = " ".join(f"{form.key_opening}name{form.key_closing}".split())
            raise ValueError(f"an argument is not written as {marks}...")
        value = text[middle + len(form.key_closing) : stop]
        yield text[start:middle].strip(), value.removeprefix("\n").removesuffix("\n")
        place = stop + len(form.value_closing)


def _typed(call: ToolCall, schema: Mapping[str, Any]) -> ToolCall:
    """Parse, as JSON, the arguments that the tool's schema does not declare as text."""
    properties = schema.get("properties", {})
    arguments: dict[str, Any] = {}
    for key, value in call.arguments.items():
        kind = properties.get(key, {}).get("type") if isinstance(properties.get(key), Mapping) else None
        arguments[key] = value
        if kind != "string" and not (isinstance(kind, list) and "string" in kind):
            with suppress(ValueError):  # otherwise it remains text, which the tool's schema may refuse
                arguments[key] = whole_json(value)
    return replace(call, arguments=arguments)


def _read_braced(form: ToolFormat, text: str, begin: int) -> Iterator[ToolCall]:
    place = begin
    while (place := find_mark(text, form.opening, place)) >= 0:
        start = place + len(form.opening)
        named = WORD.match(text, start)
        place = start
        if named is None or text[named.end() : named.end() + 1] != "{":
            yield ToolCall("", {}, start, "the call names no tool")
            continue
        try:
            arguments, place = _Braces(text, form.quote).value(named.end(), 0)
        except ValueError as problem:
            place = len(text)
            yield ToolCall(named[0], {}, place, f"the arguments cannot be read: {problem}")
            continue
        place = skip_mark(text, form.closing, place)
        yield ToolCall(named[0], arguments, place)


class _Braces:
    """Parser of Gemma's format: {key:value,other:[1,2]}, text between marks."""

    def __init__(self, text: str, quote: str) -> None:
        self.text, self.quote = text, quote

    def value(self, place: int, depth: int) -> tuple[Any, int]:
        if depth > DEEPEST:
            raise ValueError("they are nested too deeply")
        text = self.text
        if text.startswith(self.quote, place):
            end = text.find(self.quote, place + len(self.quote))
            if end < 0:
                raise ValueError("a text does not end")
            return text[place + len(self.quote) : end], end + len(self.quote)
        if text[place : place + 1] == "{":
            return self._object(place + 1, depth)
        if text[place : place + 1] == "[":
            return self._list(place + 1, depth)
        word = re.compile(r"[^,{}\[\]]*").match(text, place)
        assert word is not None
        try:
            return DECODER.decode(word[0].strip()), word.end()
        except ValueError:
            raise ValueError(f"{short(word[0])} is no value") from None

    def _object(self, place: int, depth: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        while self.text[place : place + 1] != "}":
            colon = self.text.find(":", place)
            if colon < 0:
                raise ValueError("an object does not end")
            key = self.text[place:colon].strip().removeprefix(self.quote).removesuffix(self.quote)
            found[key], place = self.value(colon + 1, depth + 1)
            place = self._next(place, "}")
        return found, place + 1

    def _list(self, place: int, depth: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        while self.text[place : place + 1] != "]":
            item, place = self.value(place, depth + 1)
            found.append(item)
            place = self._next(place, "]")
        return found, place + 1

    def _next(self, place: int, end: str) -> int:
        if self.text[place : place + 1] == ",":
            return place + 1
        if self.text[place : place + 1] != end:
            raise ValueError(f"{end} is missing")
        return place


def _read_python(form: ToolFormat, text: str, begin: int) -> Iterator[ToolCall]:
    start = begin
    if form.opening:
        start = text.find(form.opening, begin) + len(form.opening)
        if start < begin + len(form.opening):
            return
    if form.opening:
        text = text[: _end_of_python(text, start)]
    source = text[start:].strip()
    closed = re.search(r"\s*<[^<>()]*>\s*$", source)
    source = source[: closed.start()] if closed else source
    if not form.opening and not re.match(r"\[\s*\w[\w.]*\(", source):
        return
    end = start + len(text[start:].rstrip())
    if len(source) > LONGEST_CODE:
        yield ToolCall("", {}, end, f"the call has more than {LONGEST_CODE:,} characters")
        return
    try:
        tree = ast.parse(source.replace("\n", " ") if source.startswith("[") else source, mode="exec")
        nodes: list[ast.expr] = []
        for statement in tree.body:
            if not isinstance(statement, ast.Expr):
                raise ValueError("it is not a call")
            nodes += statement.value.elts if isinstance(statement.value, ast.List) else [statement.value]
        for node in nodes:
            if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
                raise ValueError("it is not a call with named arguments")
            values = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
            json.dumps(values, allow_nan=False)
            yield call_of(ast.unparse(node.func), values, end)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as problem:
        yield ToolCall("", {}, end, f"the call cannot be read: {short(str(problem))}")


def _end_of_python(text: str, start: int) -> int:
    """Return the end of the mark that closes the calls, behind which a model may go on; the text's end without one."""
    for shut in re.finditer(r"[\])]\s*<\|[^<>()]*\|>", text[start : start + LONGEST_CODE]):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):  # a mark within an argument
            source = text[start : start + shut.start() + 1].strip()
            ast.parse(source.replace("\n", " ") if source.startswith("[") else source)
            return start + shut.end()
    return len(text)


def _read_harmony(form: ToolFormat, text: str, begin: int) -> Iterator[ToolCall]:
    for header in re.finditer(r"to=functions\.([\w.-]{1,200})", text[begin:]):
        start = text.find("<|message|>", begin + header.end())
        if start < 0:
            yield ToolCall(header[1], {}, len(text), "the call has no arguments")
            return
        start += len("<|message|>")
        try:
            arguments, end = json_at(text, start)
        except ValueError as problem:
            yield ToolCall(header[1], {}, len(text), f"the arguments are {problem}")
            continue
        yield call_of(header[1], arguments, skip_mark(text, "<|call|>", end))


_READERS: dict[Kind, Callable[[ToolFormat, str, int], Iterator[ToolCall]]] = {
    "object": _read_objects,
    "named": _read_named,
    "keyed": _read_keyed,
    "braced": _read_braced,
    "python": _read_python,
    "harmony": _read_harmony,
}

HERMES = ToolFormat("object", "<tool_call>", "</tool_call>")
"""Default format where there is no template, as in `posttrain check`."""
