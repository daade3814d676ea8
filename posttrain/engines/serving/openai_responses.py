"""OpenAI's Responses API: requests, responses and streams (types of openai 3.54).

Instructions and messages of the roles "system" and "developer" become system messages, since the templates of open
models have no other role for them; those at the beginning are merged. Consecutive items of the assistant are one reply:
its reasoning, its text, its calls. Effort and verbosity are hints without effect.
"""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.core.messages import short
from posttrain.engines.serving.openai_completions import write_error
from posttrain.engines.serving.policy_responses import PolicyResponse
from posttrain.engines.serving.request_fields import (
    Neutral,
    RequestFields,
    assistant_message,
    function_tool,
    read_sampling,
    tool_call,
)
from posttrain.engines.serving.requests import PolicyRequest
from posttrain.engines.serving.stored_conversations import StoredConversations
from posttrain.engines.serving.wire_format import GrowingField, Step, WireFormat

PATH = "/v1/responses"
KNOWN = ("model", "input", "instructions", "tools", "tool_choice", "max_output_tokens", "previous_response_id", "store",
         "stream", "stream_options", "include", "temperature", "top_p", "top_logprobs", "reasoning", "text", "metadata",
         "parallel_tool_calls", "seed", "top_k", "return_token_ids")  # fmt: skip
"""Fields that are read; the last three are not OpenAI's."""
IGNORED = frozenset(
    (
        "user", "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
        "max_tool_calls", "access_programs", "background_options", "client_metadata",
    )
)  # fmt: skip
NEUTRAL: Neutral = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "image": ({},),
    "moderation": (),
    "prompt": (),
    "truncation": ("disabled",),
}
READ = ("message", "reasoning", "function_call", "function_call_output")
"""Types of items that are read."""
TEXT_PARTS = ("input_text", "output_text", "text")
ROLES = ("user", "assistant", "system", "developer")
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"


def read_response(body: Mapping[str, Any], stored: StoredConversations) -> PolicyRequest:
    """Read a request to POST /v1/responses. `stored`: the conversations that it may continue."""
    fields = RequestFields(body)
    fields.refuse_unknown(KNOWN, IGNORED, NEUTRAL)
    fields.refuse_unsupported(NEUTRAL)
    _check_hints(fields)
    previous, instructions = fields.text("previous_response_id"), fields.text("instructions")
    earlier = stored.find(previous) if previous is not None else ()
    messages = [*earlier, *read_input(fields)]
    prompt = with_instructions(instructions, messages)
    if prompt[-1]["role"] == "assistant":
        raise fields.wrong("input", "one that ends with a message to the policy, or the result of a call")
    most, include = fields.whole("max_output_tokens", 1), _read_include(fields)
    tools, shown = read_tools(fields)
    shown_tools = tools if shown else ()
    asked = read_sampling(fields, (prompt,), most, logprobs=LOGPROBS in include, tools=shown_tools, prompt="input")
    keeps = fields.body.get("store") is None or fields.flag("store")
    parallel = fields.body.get("parallel_tool_calls") is None or fields.flag("parallel_tool_calls")
    echo = {
        "instructions": instructions,
        "max_output_tokens": most,
        "metadata": dict(metadata.body) if (metadata := fields.object("metadata")) else {},
        "parallel_tool_calls": parallel,
        "previous_response_id": previous,
        "store": keeps,
        "temperature": asked.temperature,
        "tool_choice": "auto" if shown else "none",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in tools],
        "top_p": asked.top_p,
    }
    id = f"resp_{secrets.token_hex(24)}"
    return replace(asked, id=id, echo=echo, include=include, stored=tuple(messages) if keeps else None)


def _check_hints(fields: RequestFields) -> None:
    """Check fields that have no effect, or only values without effect."""
    fields.object("reasoning")
    if fields.whole("top_logprobs", 0):
        raise fields.wrong("top_logprobs", "0: only the log-probability of the sampled token is given")
    text = fields.object("text")
    form = text.object("format") if text is not None else None
    if form is not None and form.body.get("type") != "text":
        raise form.wrong("type", '"text": a schema cannot be forced')


def _read_include(fields: RequestFields) -> tuple[str, ...]:
    given = fields.body.get("include") or []
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise fields.wrong("include", "a list of strings")
    return tuple(given)


def with_instructions(instructions: str | None, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the prompt, with instructions and the system messages at its beginning merged."""
    texts, rest = [instructions] if instructions else [], list(messages)
    while rest and rest[0]["role"] == "system":
        texts.append(rest.pop(0)["content"])
    return [*([{"role": "system", "content": "\n\n".join(texts)}] if texts else []), *rest]


@dataclass
class _Reply:
    """Consecutive items of the assistant."""

    thoughts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        return assistant_message("".join(self.thoughts), "".join(self.texts), self.calls)


def read_input(fields: RequestFields) -> list[dict[str, Any]]:
    """Read the input as messages."""
    given = fields.body.get("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    items = fields.objects("input", "a string, or a list of items")
    if not items:
        raise fields.wrong("input", "a string, or a list of items")
    found: list[dict[str, Any]] = []
    reply: _Reply | None = None
    for item in items:
        kind = item.text("type") or "message"
        if kind not in READ:
            raise item.refused(f"has the type {short(kind)}: hosted tools and their items are not supported")
        own = kind in ("reasoning", "function_call") or item.body.get("role") == "assistant"
        begins = kind == "reasoning" or (kind == "message" and own)
        if reply is not None and (not own or (begins and (reply.texts or reply.calls))):
            found.append(reply.message())
            reply = None
        if not own:
            found.append(_read_message(item) if kind == "message" else _read_output(item))
            continue
        reply = reply or _Reply()
        _add_to(reply, kind, item)
    return [*found, reply.message()] if reply is not None else found


def _add_to(reply: _Reply, kind: str, item: RequestFields) -> None:
    if kind == "message":
        reply.texts.append(_text(item, "content"))
    elif kind == "reasoning":
        reply.thoughts.append(_read_thoughts(item))
    else:
        arguments = item.arguments("arguments")
        reply.calls.append(tool_call(item.needed_text("call_id"), item.needed_text("name"), arguments))


def _read_message(item: RequestFields) -> dict[str, Any]:
    role = item.text("role")
    if role not in ROLES:
        raise item.wrong("role", f"one of {', '.join(ROLES)}")
    return {"role": "user" if role == "user" else "system", "content": _text(item, "content")}


def _read_output(item: RequestFields) -> dict[str, Any]:
    """Read the result of a call."""
    return {"role": "tool", "content": _text(item, "output"), "tool_call_id": item.needed_text("call_id")}


def _text(item: RequestFields, name: str) -> str:
    """Read content: text, or a list of parts of text."""
    content = item.body.get(name)
    if isinstance(content, str):
        return content
    if content is None:
        raise item.wrong(name, "a string, or a list of parts")
    texts = []
    for part in item.objects(name, "a string, or a list of parts"):
        kind = part.body.get("type")
        if kind != "refusal" and kind not in TEXT_PARTS:
            raise part.refused(f"has the type {short(kind)}: this policy reads text only")
        texts.append(part.needed_text("refusal" if kind == "refusal" else "text"))
    return "".join(texts)


def _read_thoughts(item: RequestFields) -> str:
    """Read reasoning from its content, or else from its encrypted content: clients may return either."""
    item.objects("summary")
    if item.body.get("content") is not None:
        return "".join(part.needed_text("text") for part in item.objects("content"))
    try:
        return base64.b64decode(item.text("encrypted_content") or "", validate=True).decode()
    except ValueError:
        raise item.wrong("encrypted_content", "one that this server has written") from None


def read_tools(fields: RequestFields) -> tuple[tuple[dict[str, Any], ...], bool]:
    """Return the tools, and whether the policy sees them (tool_choice is not "none")."""
    tools, shown = [], fields.shows_tools()
    for tool in fields.objects("tools"):
        if tool.body.get("type") != "function":
            raise tool.refused(f"has the type {short(tool.body.get('type'))}: only functions are supported")
        tools.append(function_tool(tool, "parameters"))
    return tuple(tools), shown


# -- responses ---------------------------------------------------------------------------------------------------------


def write_response(name: str, asked: PolicyRequest, replies: Sequence[PolicyResponse]) -> dict[str, Any]:
    [reply] = replies
    sampled, now = len(reply.completion.tokens), int(time.time())
    return {
        "id": asked.id,
        "object": "response",
        "created_at": asked.arrived,
        "status": "incomplete" if reply.cut else "completed",
        "completed_at": None if reply.cut else now,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if reply.cut else None,
        "model": name,
        "output": _output(asked, reply),
        "reasoning": {"effort": None, "summary": None},
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        **asked.echo,
        "usage": {
            "input_tokens": reply.read,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.read + sampled,
        },
        **reply.origin(asked),
        **({"prompt_token_ids": reply.prompt_ids} if asked.token_ids else {}),
    }


def _output(asked: PolicyRequest, reply: PolicyResponse) -> list[dict[str, Any]]:
    """Return the items of a reply."""
    thoughts, text = reply.divided(asked)
    own = str(asked.id).removeprefix("resp_")
    status = "incomplete" if reply.cut else "completed"
    items: list[dict[str, Any]] = []
    if thoughts:
        hidden = base64.b64encode(thoughts.encode("utf-8", "replace")).decode() if ENCRYPTED in asked.include else None
        content = [{"type": "reasoning_text", "text": thoughts}]
        items.append({"id": f"rs_{own}", "type": "reasoning", "summary": [], "content": content, "status": status,
                      "encrypted_content": hidden})  # fmt: skip
    if text or not reply.calls:
        logprobs = [reply.logprob(*pair) for pair in reply.pairs] if asked.logprobs else []
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        items.append({"id": f"msg_{own}", "type": "message", "role": "assistant", "content": [part], "status": status})
    for place, call in enumerate(reply.calls):
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        items.append({"id": f"fc_{own}{place}", "type": "function_call", "call_id": call.id, "name": call.name,
                      "arguments": arguments, "status": status})  # fmt: skip
    return items


def stored_messages(asked: PolicyRequest, reply: PolicyResponse) -> list[dict[str, Any]]:
    """Return the conversation with the reply, equal to the one of a client that returns the reply's items."""
    thoughts, text = reply.divided(asked)
    calls = [tool_call(call.id, call.name, call.arguments) for call in reply.calls]
    return [*(asked.stored or ()), assistant_message(thoughts, text, calls)]


# -- streams -----------------------------------------------------------------------------------------------------------


def response_events(name: str, asked: PolicyRequest, replies: Sequence[PolicyResponse]) -> Iterator[Step]:
    whole = write_response(name, asked, replies)
    bare = {key: value for key, value in whole.items() if key not in _LATE}
    began = {
        **bare,
        "status": "in_progress",
        "completed_at": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }
    steps: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": began}),
        ("response.in_progress", {"response": began}),
    ]
    for index, item in enumerate(whole["output"]):
        steps += _item_events(index, item)
    steps.append((f"response.{whole['status']}", {"response": whole}))
    for number, (kind, content) in enumerate(steps):
        yield kind, {"type": kind, "sequence_number": number, **content}


def _text_of(content: dict[str, Any]) -> GrowingField | None:
    return GrowingField(content, "delta", content) if "delta" in content else None


_LATE = ("weight_versions", "token_ids", "prompt_token_ids")
"""Fields that a response has once it is sampled."""


def _item_events(index: int, item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of an item of the output."""
    where = {"item_id": item["id"], "output_index": index}
    nothing: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    begun = {**item, "status": "in_progress", **nothing}
    yield "response.output_item.added", {"output_index": index, "item": begun}
    if item["type"] == "function_call":
        yield "response.function_call_arguments.delta", {**where, "delta": item["arguments"]}
        done = {**where, "name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", done
    else:
        [part] = item["content"]
        at = {**where, "content_index": 0}
        kind = f"response.{part['type']}"
        logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        empty = {**part, "text": "", **({"logprobs": []} if logprobs else {})}
        yield "response.content_part.added", {**at, "part": empty}
        yield f"{kind}.delta", {**at, "delta": part["text"], **logprobs}
        yield f"{kind}.done", {**at, "text": part["text"], **logprobs}
        yield "response.content_part.done", {**at, "part": part}
    yield "response.output_item.done", {"output_index": index, "item": item}


RESPONSES_FORMAT = WireFormat(
    PATH, read_response, write_response, response_events, write_error, _text_of, splits_thoughts=True
)
