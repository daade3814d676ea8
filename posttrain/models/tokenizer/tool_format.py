"""Infers the format of a model's tool calls from the checkpoint's own chat template.

A template shows the format that the model was trained to write. It is made to render one call, and two calls, with
known names, arguments and ids; the text around these words is the format. Six kinds cover the public families:

object     {"name": N, "arguments": A} as JSON, alone, between marks, or in a list       Qwen, Hermes, Llama, Mistral
named      the name, then the arguments as JSON                                          DeepSeek, newer Mistral
keyed      the name, then each argument between marks                                    Qwen3-Coder, Qwen3.5, GLM
braced     name{key:value}, texts between marks of their own                             Gemma
python     name(key=value)                                                               Llama 4, LFM2
harmony    channels: the name in a header, the arguments as JSON in its message          gpt-oss
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from posttrain.core.types import ToolCall, UserError
from posttrain.models.tokenizer.tool_parser import ToolFormat, calling
from posttrain.models.tokenizer.tool_parts import DECODER

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]

NAME, OTHER, KEY, VALUE, SECOND, COUNT = "xyzzy_tool", "plugh_tool", "axe_key", "wizard", "grue_key", "417"
IDS = ("k3y0a1b2c", "m4z1d2e3f")  # nine letters and digits, as Mistral's templates require


def format_of(render: Render) -> ToolFormat | None:
    """Return the format of a template's calls; None if it shows none or is unknown. `render` may raise UserError."""
    user = {"role": "user", "content": "hello"}
    try:
        plain = render([user, {"role": "assistant", "content": "\u2063"}])
    except UserError:
        return None
    arguments = {KEY: VALUE, SECOND: int(COUNT)}
    calls = [ToolCall(NAME, arguments, id=IDS[0]), ToolCall(OTHER, arguments, id=IDS[1])]
    named = [replace(call, id=f"functions.{call.name}:{number}") for number, call in enumerate(calls)]
    for asked, as_text, content in product((calls, named), (False, True), (None, "")):
        try:
            one = render([user, calling(asked[:1], as_text, content)])
        except UserError:
            continue
        if NAME not in one or KEY not in one or VALUE not in one:
            continue
        try:
            two = render([user, calling(asked, as_text, content)])
        except UserError:  # one call a turn
            two = ""
        start = len(_shared_start(one, plain))  # start of the reply
        if content is None and "None" in one[start:]:  # a null content as Jinja writes it
            continue
        try:
            found = _seen(one[start:], two[len(_shared_start(two, plain)) :])
        except (ValueError, IndexError):  # unknown order of the parts
            return None
        return None if found is None else ToolFormat(**found, as_text=as_text, content=content)
    return None


def _seen(one: str, two: str) -> dict[str, Any] | None:
    """Return the fields of ToolFormat, found in the renderings of one call and of two calls; None: unknown format."""
    name = one.index(NAME)
    if (again := one.rfind(NAME, name + 1, one.find(KEY))) > 0 and not one[:again].endswith("functions."):
        name = again  # a header addressed to the tool, then its name between marks
    before, behind = one[:name], one[name + len(NAME) :]
    if before.endswith("to=functions.") and "<|channel|>" in behind:
        return {"kind": "harmony"}
    key = behind.find(KEY)
    if key < 0:
        return None
    rest, twice = behind[key + len(KEY) :], _between(two)
    if behind[0] == "{" and rest[:1] == ":" and behind[:key] == "{":
        end = behind.index("}")
        quote = rest[1 : rest.index(VALUE)]
        return {"kind": "braced", "quote": quote, **_marks(before, behind[end + 1 :], twice, "}")}
    if behind[0] == "(" and rest[:1] == "=":
        return {"kind": "python", "opening": before.rstrip("[ \n").strip()}
    if re.search(rf'"{KEY}"\s*:', behind):
        return _seen_json(before, behind, twice)
    return _seen_keyed(before, behind, twice)


def _seen_json(before: str, behind: str, twice: str) -> dict[str, Any]:
    start = behind.index("{", 0, behind.index(KEY))
    _, length = DECODER.raw_decode(behind[start:])
    for brace in reversed([place for place, letter in enumerate(before) if letter == "{"]):
        try:
            call, end = DECODER.raw_decode(before[brace:] + NAME + behind)
        except ValueError:
            continue
        if isinstance(call, dict) and NAME in call.values():
            name = next(key for key, value in call.items() if value == NAME)
            given = next((key for key, value in call.items() if isinstance(value, dict)), "arguments")
            tail = behind[end - (len(before) - brace) - len(NAME) :]
            return {"kind": "object", "names": (name, given), **_seen_object(before[:brace], tail, twice)}
    # the name is outside of the JSON object
    gap = behind[:start].replace(IDS[0], "\0")
    numbered = gap.startswith(":0")
    gap = gap.removeprefix(":0")
    return {
        "kind": "named",
        "gap": gap.strip(),
        "numbered": numbered,
        **_marks(before, behind[start + length :], twice, "}"),
    }


def _seen_object(before: str, behind: str, twice: str) -> dict[str, str]:
    if before.rstrip().endswith("["):  # a list of calls, with one mark before all of them
        return {"opening": before.rstrip()[:-1].strip()}
    if not twice:
        return {"opening": before.strip()}
    return _marks(before, behind, twice[: twice.rfind("{", 0, twice.rfind(OTHER))] + OTHER, "}")


def _seen_keyed(before: str, behind: str, twice: str) -> dict[str, Any] | None:
    keys = [(behind.find(word), word) for word in (KEY, SECOND)]
    if any(place < 0 for place, _ in keys):
        return None
    (first, a), (second, b) = sorted(keys)
    values = {KEY: VALUE, SECOND: COUNT}
    value = behind.index(values[a], first)
    other = behind.index(values[b], second)
    between = behind[value + len(values[a]) : second]
    key_opening = _from_mark(_shared_end(behind[:first], between))
    value_closing = _to_mark(_shared_start(between, behind[other + len(values[b]) :]))
    tail = behind[other + len(values[b]) + len(value_closing) :]
    return {
        "kind": "keyed",
        "gap": behind[: first - len(key_opening)].strip(),
        "key_opening": key_opening.strip(),
        "key_closing": behind[first + len(a) : value].strip(),
        "value_closing": value_closing.strip(),
        **_marks(before, tail, twice, values[b], len(value_closing)),
    }


def _marks(before: str, behind: str, twice: str, last: str, beyond: int = 0) -> dict[str, str]:
    """Return the marks before and behind a call, which both of two calls have. `last`: the last text of a call's
    arguments, followed by `beyond` further characters.
    """
    if not twice:
        return {"opening": before.strip(), "closing": ""}
    text = twice[: twice.rfind(OTHER)]
    opening = _from_mark(_shared_end(before, text))
    after = text[text.rfind(last) + len(last) + beyond :] if last in text else ""
    return {"opening": opening.strip(), "closing": _to_mark(_shared_start(behind, after)).strip()}


def _between(two: str) -> str:
    """Return the text from the name of the first call to the name of the second."""
    if NAME not in two or OTHER not in two:
        return ""
    end = two.rindex(OTHER) + len(OTHER)
    return two[two.rindex(NAME, 0, end) : end]


def _from_mark(text: str) -> str:
    """Return the text from the start of the first mark, <...> or [...], on; the whole text if there is none."""
    return text[match.start() :] if (match := re.search(r"[<\[]", text)) else text


def _to_mark(text: str) -> str:
    """Return the text up to the end of the last mark; the whole text if there is none."""
    return text[: max(text.rfind(">"), text.rfind("]")) + 1] if re.search(r"[<\[]", text) else text


def _shared_start(a: str, b: str) -> str:
    length = next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]


def _shared_end(a: str, b: str) -> str:
    return _shared_start(a[::-1], b[::-1])[::-1]
