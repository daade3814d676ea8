"""Anthropic's Messages API: requests, responses, streams and errors (version 2023-06-01, types of anthropic 2.14).

The thoughts of a reply are a separate thinking block, since clients return such blocks with the conversation. Blocks of
a message are joined by newlines; blocks of the policy's own replies are joined as they were sampled, so that the
replies are recognised. Effort and thinking budgets are hints without effect.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posttrain.core.messages import short
from posttrain.core.types import StopReason
from posttrain.engines.serving.policy_responses import PolicyResponse
from posttrain.engines.serving.request_fields import (
    Neutral,
    RequestFields,
    assistant_message,
    function_tool,
    read_sampling,
    tool_call,
)
from posttrain.engines.serving.requests import PolicyRequest, RequestRefused
from posttrain.engines.serving.wire_format import GrowingField, Step, WireFormat, alone

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"
JOINT = "\n"  # separator of text blocks in one message
PROMPT = ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config")
MESSAGES = (*PROMPT, "max_tokens", "stop_sequences", "stream", "temperature", "top_k", "top_p",
            "seed", "return_token_ids")  # fmt: skip
"""Fields that are read; the last two are not Anthropic's."""
IGNORED = frozenset(
    ("metadata", "cache_control", "service_tier", "inference_geo", "speed", "diagnostics", "user_profile_id", "workspace_id")
)  # fmt: skip
NEUTRAL: Neutral = {
    "container": (),
    "mcp_servers": ([],),
    "context_management": ({}, {"edits": []}),
    "output_format": (),
}
THINKING = ("enabled", "disabled", "adaptive")
CHOICES = ("auto", "none")
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def read_messages(body: Mapping[str, Any]) -> PolicyRequest:
    """Read a request to POST /v1/messages."""
    fields = RequestFields(body)
    fields.refuse_unknown(MESSAGES, IGNORED, NEUTRAL)
    if (most := fields.whole("max_tokens", 1)) is None:
        raise fields.wrong("max_tokens", "a whole number of at least 1")
    return _read(fields, most)


def read_count(body: Mapping[str, Any]) -> PolicyRequest:
    """Read a request to POST /v1/messages/count_tokens."""
    fields = RequestFields(body)
    fields.refuse_unknown(PROMPT, IGNORED, NEUTRAL)
    return _read(fields, None)


def _read(fields: RequestFields, most: int | None) -> PolicyRequest:
    fields.refuse_unsupported(NEUTRAL)
    thinking, output = fields.object("thinking"), fields.object("output_config")
    if thinking is not None and thinking.text("type") not in THINKING:
        raise thinking.wrong("type", f"one of {', '.join(THINKING)}")
    if output is not None:
        output.refuse_unsupported({"format": ()})
    messages = _read_system(fields) + _read_conversation(fields)
    return read_sampling(fields, (messages,), most, tools=_read_tools(fields), stop="stop_sequences")


def _read_system(fields: RequestFields) -> list[dict[str, Any]]:
    text = _text(_blocks(fields, "system")) if fields.body.get("system") is not None else ""
    return [{"role": "system", "content": text}] if text else []


def _read_conversation(fields: RequestFields) -> list[dict[str, Any]]:
    """Read the messages. Consecutive messages of the user are merged, as in Anthropic's API."""
    given = fields.objects("messages", 'a list of {"role": ..., "content": ...}')
    if not given:
        raise fields.wrong("messages", 'a list of {"role": ..., "content": ...}')
    found: list[dict[str, Any]] = []
    for message in given:
        role = message.text("role")
        if role == "assistant":
            found.append(_read_reply(message))
        elif role == "user":
            _add_user(found, _blocks(message, "content"))
        elif role == "system":
            found.append({"role": "system", "content": _text(_blocks(message, "content"))})
        else:
            raise message.wrong("role", '"user", "assistant" or "system"')
    if found[-1]["role"] == "assistant":
        raise given[-1].refused(
            "is the assistant's: a reply cannot be begun for the policy; end with the user's message"
        )
    return found


def _blocks(message: RequestFields, name: str) -> list[RequestFields]:
    """Read content: text, or a list of blocks."""
    content = message.body.get(name)
    if isinstance(content, str):
        return [RequestFields({"type": "text", "text": content}, f"{message.path}{name}.")]
    if content is None:
        raise message.wrong(name, "a string, or a list of blocks")
    return message.objects(name, "a string, or a list of blocks")


def _text(blocks: Sequence[RequestFields], joint: str = JOINT) -> str:
    texts = []
    for block in blocks:
        if block.body.get("type") != "text":
            raise _unread(block)
        texts.append(block.needed_text("text"))
    return joint.join(texts)


def _unread(block: RequestFields) -> RequestRefused:
    kind = short(block.body.get("type"))
    return block.refused(f"has the type {kind}: this policy reads text, thinking, and the use of the client's tools")


def _add_user(found: list[dict[str, Any]], blocks: Sequence[RequestFields]) -> None:
    """Add a user's message: tool results become separate messages, the other blocks a message of the user."""
    for block in blocks:
        if block.body.get("type") == "tool_result":
            result = _text(_blocks(block, "content")) if block.body.get("content") is not None else ""
            block.flag("is_error")  # only checked: the content describes the error
            found.append({"role": "tool", "content": result, "tool_call_id": block.needed_text("tool_use_id")})
        elif found and found[-1]["role"] == "user":
            found[-1] = {"role": "user", "content": found[-1]["content"] + JOINT + _text([block])}
        else:
            found.append({"role": "user", "content": _text([block])})
    if not blocks:
        found.append({"role": "user", "content": ""})


def _read_reply(message: RequestFields) -> dict[str, Any]:
    """Read a message of the assistant."""
    thoughts, texts, calls = [], [], []
    for block in _blocks(message, "content"):
        kind = block.body.get("type")
        if kind == "thinking":
            thoughts.append(block.needed_text("thinking"))
        elif kind == "tool_use":
            if isinstance(block.body.get("input"), str):
                raise block.wrong("input", "an object")
            calls.append(tool_call(block.needed_text("id"), block.needed_text("name"), block.arguments("input")))
        else:
            texts.append(_text([block]))
    return assistant_message("".join(thoughts), "".join(texts), calls)


def _read_tools(fields: RequestFields) -> tuple[dict[str, Any], ...]:
    choice = fields.object("tool_choice")
    if choice is not None and choice.body.get("type") not in CHOICES:
        raise choice.wrong("type", '"auto" or "none": a tool call cannot be forced')
    tools = []
    for tool in fields.objects("tools"):
        if tool.body.get("type") not in (None, "custom"):
            raise tool.refused(
                f"has the type {short(tool.body['type'])}: only tools of the client with an input_schema are supported"
            )
        if tool.body.get("input_schema") is None:
            raise tool.wrong("input_schema", "a JSON schema")
        tools.append(function_tool(tool, "input_schema"))
    return tuple(tools) if choice is None or choice.body["type"] != "none" else ()


# -- responses ---------------------------------------------------------------------------------------------------------


def write_message(name: str, asked: PolicyRequest, replies: Sequence[PolicyResponse]) -> dict[str, Any]:
    [reply] = replies
    return {
        "id": asked.id or f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": name,
        "content": _content(asked, reply),
        **_ending(reply),
        "usage": {**_read_usage(reply), "output_tokens": len(reply.completion.tokens)},
        **_origin(asked, reply),
    }


def _content(asked: PolicyRequest, reply: PolicyResponse) -> list[dict[str, Any]]:
    thoughts, text = reply.divided(asked)
    blocks: list[dict[str, Any]] = []
    if thoughts:
        blocks.append({"type": "thinking", "thinking": thoughts, "signature": _signature(thoughts)})
    if text:
        blocks.append({"type": "text", "text": text})
    for call in reply.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)})
    return blocks


def _signature(thoughts: str) -> str:
    """Return a signature of a thinking block, since clients drop blocks without one."""
    return hashlib.blake2b(thoughts.encode("utf-8", "replace"), digest_size=24).hexdigest()


def _ending(reply: PolicyResponse) -> dict[str, Any]:
    """Return the fields with the reason why the reply ended."""
    sequence = reply.stopped_by if isinstance(reply.stopped_by, str) else None
    if reply.completion.stop is StopReason.CONTEXT:
        reason = "model_context_window_exceeded"
    elif reply.cut:
        reason = "max_tokens"
    elif reply.calls:
        reason = "tool_use"
    else:
        reason = "end_turn" if sequence is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": sequence if reason == "stop_sequence" else None}


def _read_usage(reply: PolicyResponse) -> dict[str, int]:
    return {"input_tokens": reply.read, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _origin(asked: PolicyRequest, reply: PolicyResponse) -> dict[str, Any]:
    return {**reply.origin(asked), **({"prompt_token_ids": reply.prompt_ids} if asked.token_ids else {})}


def message_events(name: str, asked: PolicyRequest, replies: Sequence[PolicyResponse]) -> Iterator[Step]:
    whole = write_message(name, asked, replies)
    content, usage = whole.pop("content"), whole.pop("usage")
    ending = {key: whole.pop(key) for key in ("stop_reason", "stop_sequence")}
    origin = {key: whole.pop(key) for key in _origin(asked, replies[0])}
    message = {
        **whole,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": 0},
    }
    yield _event("message_start", message=message)
    yield _event("ping")
    for index, block in enumerate(content):
        begin, deltas = _pieces(block)
        yield _event("content_block_start", index=index, content_block=begin)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta=ending, usage=usage, **origin)
    yield _event("message_stop")


def _pieces(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return (the block at the start of its stream, the deltas that are added to it)."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        signed = {"type": "signature_delta", "signature": block["signature"]}
        thought = {"type": "thinking_delta", "thinking": block["thinking"]}
        return {**block, "thinking": "", "signature": ""}, [thought, signed]
    text = json.dumps(block["input"], ensure_ascii=False)
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]


def _event(kind: str, **content: Any) -> Step:
    return kind, {"type": kind, **content}


def _text_of(content: dict[str, Any]) -> GrowingField | None:
    delta = content.get("delta", {})
    return next((GrowingField(delta, key, {}) for key in ("text", "thinking") if key in delta), None)


def write_error(refused: RequestRefused) -> dict[str, Any]:
    """Return an error in Anthropic's format. Clients detect a conversation that is too long by the wording."""
    kind = ERRORS.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
    begin = "prompt is too long: " if refused.code == "context_length_exceeded" else ""
    return {"type": "error", "error": {"type": kind, "message": f"{begin}{refused}"}}


MESSAGES_FORMAT = WireFormat(
    PATH, alone(read_messages), write_message, message_events, write_error, _text_of, splits_thoughts=True
)
