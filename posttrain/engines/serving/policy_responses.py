"""Responses of a policy, in the forms that clients read: OpenAI's chat and completions, and vLLM's token ids."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.core.types import Completion, StopReason, ToolCall
from posttrain.engines.serving.requests import PolicyRequest, RequestRefused

Form = Callable[[str, PolicyRequest, Sequence["PolicyResponse"]], dict[str, Any]]
"""Builds a response from the model's name, the request, and the replies to each of its prompts."""


@dataclass(frozen=True)
class PolicyResponse:
    """A reply to a prompt."""

    completion: Completion
    read: int  # tokens of its prompt
    prompt: Sequence[int] | None = None  # its token ids; None where they are not known
    stopped_by: str | int | None = None  # the stop string, or the id of the token, that ended it
    ending: str = ""  # the same as text
    decode: Callable[[Sequence[int]], str] | None = None  # None where no tokenizer is at hand
    calls: Sequence[ToolCall] = ()  # tool calls, those that are valid
    before_calls: int | None = None  # characters before the first of them

    def text(self, asked: PolicyRequest) -> str:
        """Return the text for clients: without the stop string, unless they ask for it."""
        text = self.completion.text
        return text if asked.shows_stop else text.removesuffix(self.ending)

    def message(self, asked: PolicyRequest) -> dict[str, Any]:
        """Return the message of a chat response."""
        if not self.calls:
            return {"role": "assistant", "content": self.text(asked), "refusal": None}
        listed = []
        for index, call in enumerate(self.calls):
            function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
            number = {"index": index} if asked.stream else {}
            listed.append({**number, "id": call.id, "type": "function", "function": function})
        content = self.completion.text[: self.before_calls or 0] or None
        return {"role": "assistant", "content": content, "refusal": None, "tool_calls": listed}

    @property
    def finish_reason(self) -> str:
        if self.completion.stop not in (StopReason.EOS, StopReason.STOP):
            return "length"
        return "tool_calls" if self.calls else "stop"

    def token(self, id: int) -> str:
        return f"token_id:{id}" if self.decode is None else self.decode([id])


def chat(name: str, asked: PolicyRequest, replies: Sequence[PolicyResponse]) -> dict[str, Any]:
    choices = []
    for index, one in enumerate(replies):
        logprobs = {"content": [_openai_logprob(one, *pair) for pair in _pairs(one)], "refusal": None}
        message = one.message(asked)
        choices.append(
            {
                "index": index,
                "message": message,
                "logprobs": logprobs if asked.logprobs else None,
                **_ending(asked, one),
            }
        )
    return _answer("chat.completion", "chatcmpl-", name, asked, replies, choices)


def completions(name: str, asked: PolicyRequest, replies: Sequence[PolicyResponse]) -> dict[str, Any]:
    choices = []
    for index, one in enumerate(replies):
        logprobs = _completion_logprobs(one) if asked.logprobs else None
        choices.append({"index": index, "text": one.text(asked), "logprobs": logprobs, **_ending(asked, one)})
    return _answer("text_completion", "cmpl-", name, asked, replies, choices)


def generate(name: str, asked: PolicyRequest, replies: Sequence[PolicyResponse]) -> dict[str, Any]:
    """Build a response in vLLM's form. A log-probability names its token twice, since versions of clients differ in
    what they read.
    """
    choices = []
    for index, one in enumerate(replies):
        content = [
            {"token_id": id, "token": f"token_id:{id}", "logprob": logp, "top_logprobs": []} for id, logp in _pairs(one)
        ]
        logprobs = {"content": content} if asked.logprobs else None
        choices.append({"index": index, "logprobs": logprobs, **_ending(asked, one), "token_ids": _ids(one)})
    answer = _answer("", "", name, asked, replies, choices)
    answer.pop("object")
    return {"request_id": answer.pop("id"), "output_mode": "tokens", **answer}


def _answer(
    kind: str,
    prefix: str,
    name: str,
    asked: PolicyRequest,
    replies: Sequence[PolicyResponse],
    choices: list[dict[str, Any]],
) -> dict[str, Any]:
    sampled = sum(len(one.completion.tokens) for one in replies)
    read = sum(one.read for one in replies[:: asked.count])  # a prompt is counted once
    return {
        "id": asked.id or prefix + secrets.token_hex(16),
        "object": kind,
        "created": int(time.time()),
        "model": name,
        "choices": choices,
        "usage": {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled},
        **({"prompt_token_ids": _prompt_ids(replies[0])} if asked.token_ids else {}),
    }


def _ending(asked: PolicyRequest, one: PolicyResponse) -> dict[str, Any]:
    """Return the fields with which all choices end."""
    completion = one.completion
    span = {"version": str(completion.version), "start": 0, "end": len(completion.tokens)}
    return {
        "finish_reason": one.finish_reason,
        "stop_reason": one.stopped_by,
        "weight_versions": [span],
        **({"token_ids": _ids(one)} if asked.token_ids else {}),
    }


def _ids(one: PolicyResponse) -> list[int]:
    return [int(id) for id in one.completion.tokens]


def _prompt_ids(one: PolicyResponse) -> list[int] | None:
    return None if one.prompt is None else list(one.prompt)


def _pairs(one: PolicyResponse) -> Iterator[tuple[int, float]]:
    return zip(map(int, one.completion.tokens), map(float, one.completion.logp), strict=True)


def _openai_logprob(one: PolicyResponse, id: int, logp: float) -> dict[str, Any]:
    token = one.token(id)
    return {"token": token, "logprob": logp, "bytes": list(token.encode("utf-8", "replace")), "top_logprobs": []}


def _completion_logprobs(one: PolicyResponse) -> dict[str, Any]:
    tokens, places, place = [], [], 0
    for id, _ in _pairs(one):
        tokens.append(one.token(id))
        places.append(place)
        place += len(tokens[-1])
    logp = [float(x) for x in one.completion.logp]
    return {"tokens": tokens, "token_logprobs": logp, "top_logprobs": None, "text_offset": places}


# -- streams -----------------------------------------------------------------------------------------------------------


def events(form: Form, name: str, asked: PolicyRequest, replies: Sequence[PolicyResponse]) -> Iterator[bytes]:
    """Yield the response as a stream of server-sent events: each reply is one piece, since engines return whole
    replies.
    """
    whole = form(name, asked, replies)
    usage = whole.pop("usage")
    choices = whole.pop("choices")
    if form is chat:
        whole["object"] = "chat.completion.chunk"
    for choice in choices:
        if form is chat:
            choice["delta"] = choice.pop("message")
        yield event({**whole, "choices": [choice], "usage": None})
    if asked.stream_usage:
        yield event({**whole, "choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


def refusal(refused: RequestRefused) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    kinds = {429: "rate_limit_error", 401: "authentication_error"}
    kind = kinds.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
    return {"error": {"message": str(refused), "type": kind, "param": refused.parameter, "code": refused.code}}
