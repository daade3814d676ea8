"""Reads and strictly checks the fields of untrusted requests, for all wire formats.

Unsupported fields that would change the reply are refused, and so are unknown fields, which may be misspelt. Fields
without effect are ignored: clients send many of them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from posttrain.core.messages import near, short
from posttrain.core.thoughts import with_thoughts
from posttrain.engines.serving.requests import SEEDS, PolicyRequest, Prompt, RequestRefused, refuse_constant

MOST_CHOICES = 128  # maximum of replies to one request
MOST_STOPS, LONGEST_STOP = 64, 1000  # maximum of stop strings in a request, and of characters in one
MOST_STOP_IDS = 1024
MOST_TOP_K = 10**9  # larger than every vocabulary, and within the range of an engine's integers
LONGEST_ID = 200  # maximum of characters quoted from an id
HOTTEST = 100.0  # maximal temperature

Neutral = Mapping[str, tuple[Any, ...]]
"""Features that a policy does not support, and their values that are accepted, as they do not request the feature (null
always is)."""


class RequestFields:
    """Fields of a JSON object. Null counts as absent."""

    def __init__(self, body: Mapping[str, Any], path: str = "") -> None:
        """Wrap an object. `path`: its path in the request, such as "tools[0]."; "" for the request itself."""
        self.body, self.path = body, path

    def wrong(self, name: str, expected: str) -> RequestRefused:
        found = f"is {short(self.body[name])}" if self.body.get(name) is not None else "is missing"
        return RequestRefused(f"{self.path}{name} {found}; expected {expected}", parameter=f"{self.path}{name}")

    def refused(self, problem: str) -> RequestRefused:
        """Return the refusal of the whole object."""
        where = self.path.removesuffix(".")
        return RequestRefused(f"{where} {problem}", parameter=where)

    def flag(self, name: str) -> bool:
        value = self.body.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self.wrong(name, "true or false")

    def text(self, name: str) -> str | None:
        value = self.body.get(name)
        if value is None or isinstance(value, str):
            return value
        raise self.wrong(name, "a string")

    def needed_text(self, name: str) -> str:
        if (value := self.text(name)) is None:
            raise self.wrong(name, "a string")
        return value

    def object(self, name: str) -> RequestFields | None:
        """Read a nested object; None if it is absent."""
        value = self.body.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return RequestFields(value, f"{self.path}{name}.")

    def objects(self, name: str, expected: str = "a list of objects") -> list[RequestFields]:
        """Read a list of objects; an empty one if it is absent."""
        value = self.body.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.wrong(name, expected)
        for place, one in enumerate(value):
            if not isinstance(one, dict):
                where = f"{self.path}{name}[{place}]"
                raise RequestRefused(f"{where} is {short(one)}; expected an object", parameter=where)
        return [RequestFields(one, f"{self.path}{name}[{place}].") for place, one in enumerate(value)]

    def whole(self, name: str, least: int, most: int | None = None) -> int | None:
        value = self.body.get(name)
        if value is None:
            return None
        if type(value) is not int or value < least or (most is not None and value > most):
            raise self.wrong(name, f"a whole number of at least {least}" + (f", at most {most}" if most else ""))
        return value

    def real(self, name: str, most: float) -> float:
        """Read a number from 0 on; 1 if it is absent."""
        value = self.body.get(name)
        if value is None:
            return 1.0
        if type(value) not in (int, float) or not 0 <= value <= most:  # false for NaN too
            raise self.wrong(name, f"a number from 0 to {most:g}")
        return float(value)

    def ids(self, name: str, most: int | None = None, empty: bool = False) -> tuple[int, ...]:
        """Read token ids."""
        value = self.body.get(name)
        if not isinstance(value, list) or (not value and not empty):
            raise self.wrong(name, "a list of token ids")
        if not all(type(id) is int and id >= 0 for id in value):
            raise self.wrong(name, "a list of token ids")
        if most is not None and len(value) > most:
            raise self.wrong(name, f"at most {most} token ids")
        return tuple(value)

    def stops(self, name: str) -> tuple[str, ...]:
        """Read stop strings: one, or a list of them."""
        given = self.body.get(name)
        stops: Sequence[Any] = [given] if isinstance(given, str) else [] if given is None else given
        if not isinstance(stops, list) or not all(isinstance(s, str) and 0 < len(s) <= LONGEST_STOP for s in stops):
            raise self.wrong(name, f"strings of 1 to {LONGEST_STOP} characters")
        if len(stops) > MOST_STOPS:
            raise self.wrong(name, f"at most {MOST_STOPS} strings")
        return tuple(stops)

    def arguments(self, name: str) -> dict[str, Any]:
        """Read the arguments of a tool call: an object, or its JSON text."""
        found = self.body.get(name)
        if isinstance(found, str):
            try:
                found = json.loads(found or "{}", parse_constant=refuse_constant)
                json.dumps(found, ensure_ascii=False).encode()  # fails for a lone surrogate
            except (ValueError, RecursionError):
                raise self.wrong(name, "a JSON object") from None
        if found is None:
            return {}
        if not isinstance(found, dict):
            raise self.wrong(name, "a JSON object")
        return found

    def shows_tools(self) -> bool:
        """Return whether the policy sees the tools of a request of OpenAI's: its tool_choice is not "none"."""
        choice = self.body.get("tool_choice")
        if choice not in (None, "auto", "none"):
            raise self.wrong("tool_choice", '"auto" or "none": a tool call cannot be forced')
        return choice != "none"

    def refuse_unknown(self, known: Collection[str], ignored: Collection[str], neutral: Neutral) -> None:
        """Refuse fields that are in none of these collections."""
        for name in self.body:
            if name not in known and name not in ignored and name not in neutral:
                close = near(str(name), [*known, *neutral, *ignored]) or f"; there are {', '.join(known)}"
                raise RequestRefused(
                    f"{self.path}{name:.60} is not a field of this request{close}", parameter=f"{self.path}{name:.60}"
                )

    def refuse_unsupported(self, neutral: Neutral) -> None:
        """Refuse fields that request an unsupported feature: those of `neutral` with another value."""
        for name, values in neutral.items():
            if (value := self.body.get(name)) is not None and value not in values:
                raise RequestRefused(
                    f"{self.path}{name} is not supported: leave it out", parameter=f"{self.path}{name}"
                )


def read_sampling(
    fields: RequestFields,
    prompts: tuple[Prompt, ...],
    max_tokens: int | None,
    *,
    logprobs: bool = False,
    tools: tuple[dict[str, Any], ...] = (),
    request: RequestFields | None = None,
    stop: str = "stop",
    prompt: str = "messages",
) -> PolicyRequest:
    """Read the fields that all formats have. `request`: the whole request, if the format has sampling in a nested
    object; `stop`, `prompt`: the names of the fields with stop strings and with the prompt.
    """
    request = request or fields
    top_k = fields.whole("top_k", -1, MOST_TOP_K)
    count = fields.whole("n", 1, MOST_CHOICES) or 1
    if count * len(prompts) > MOST_CHOICES:
        raise RequestRefused(
            f"the request asks for {count * len(prompts)} replies; the maximum is {MOST_CHOICES}", 400, None, "n"
        )
    if (top_p := fields.real("top_p", 1.0)) == 0:
        raise fields.wrong("top_p", "a number above 0, at most 1")
    options = request.body.get("stream_options")
    ends = fields.body.get("stop_token_ids") is not None
    return PolicyRequest(
        prompts,
        request.text("model"),
        (request.text("request_id") or "")[:LONGEST_ID] or None,
        count,
        fields.real("temperature", HOTTEST),
        top_p,
        max(0, top_k or 0),
        max_tokens,
        fields.stops(stop),
        fields.ids("stop_token_ids", MOST_STOP_IDS, empty=True) if ends else (),
        fields.flag("include_stop_str_in_output"),
        fields.whole("seed", 0, SEEDS - 1),
        logprobs,
        request.flag("return_token_ids"),
        request.flag("stream"),
        isinstance(options, dict) and RequestFields(options, "stream_options.").flag("include_usage"),
        tools,
        prompt_field=prompt,
    )


def function_tool(fields: RequestFields, schema: str) -> dict[str, Any]:
    """Read a tool from an object with name, description and JSON schema. `schema`: the name of the schema's field."""
    name = fields.needed_text("name")
    if not name:
        raise fields.wrong("name", "a name")
    description, parameters = fields.text("description"), fields.object(schema)
    function = {"name": name, **({"description": description} if description is not None else {})}
    return {"type": "function", "function": {**function, "parameters": dict(parameters.body) if parameters else {}}}


def tool_call(id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call in the format of messages."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def assistant_message(thoughts: str, text: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Build the assistant's message from thoughts, text and tool calls."""
    content = with_thoughts(thoughts, text)
    if not calls:
        return {"role": "assistant", "content": content}
    return {"role": "assistant", "content": content or None, "tool_calls": list(calls)}
