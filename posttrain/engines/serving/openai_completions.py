"""OpenAI's Chat Completions and Completions APIs, and vLLM's API for token ids (`vllm serve --tokens-only`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from posttrain.core.messages import short
from posttrain.core.types import ROLES
from posttrain.engines.serving.policy_responses import PolicyResponse
from posttrain.engines.serving.request_fields import Neutral, RequestFields, read_sampling, tool_call
from posttrain.engines.serving.requests import PolicyRequest, Prompt, RequestRefused
from posttrain.engines.serving.wire_format import GrowingField, Step, WireFormat, alone

COMPLETION_TOKENS = 16  # default of max_tokens of a completion, as in OpenAI's API
NEUTRAL: Neutral = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "ignore_eos": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "functions": ([],),
    "audio": (),
    "features": (),
    "content_parts": ([],),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "chat_template": (),
    "function_call": ("none", "auto"),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "truncate_prompt_tokens": (),
    "add_special_tokens": (True,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "thinking_token_budget": (),
    "repetition_detection": (),
}
"""Features that a policy does not support, and their values that are accepted, as they do not request the feature (null
always is)."""
IGNORED = frozenset(
    (
        # of OpenAI's
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "modalities", "prediction", "parallel_tool_calls",
        # of vLLM's
        "cache_salt", "priority", "kv_transfer_params", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
        "output_kind", "return_tokens_as_token_ids", "flat_logprobs", "extra_args", "skip_reading_prefix_cache",
        "output_text_buffer_length", "data_parallel_rank", "routed_experts_prompt_start",
    )
)  # fmt: skip
"""Fields of OpenAI's and vLLM's APIs that do not change a policy's replies, or not visibly."""
SAMPLED = ("n", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "logprobs",
           "include_stop_str_in_output")  # fmt: skip
OF_REQUESTS = ("model", "request_id", "return_token_ids", "stream", "stream_options")
CHAT = (
    *OF_REQUESTS,
    *SAMPLED,
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
)
COMPLETION = (*OF_REQUESTS, *SAMPLED, "prompt")
GENERATE = (*OF_REQUESTS, "token_ids", "sampling_params", "output_mode")
"""Fields that are read, for each form."""


def _refuse(fields: RequestFields, known: tuple[str, ...]) -> None:
    fields.refuse_unknown(known, IGNORED, NEUTRAL)
    fields.refuse_unsupported(NEUTRAL)


def read_chat(body: Mapping[str, Any]) -> PolicyRequest:
    """Read a request to POST /v1/chat/completions."""
    fields = RequestFields(body)
    _refuse(fields, CHAT)
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise fields.wrong("messages", 'a list of {"role": ..., "content": ...}')
    messages = [_read_message(place, message) for place, message in enumerate(given)]
    most = fields.whole("max_completion_tokens", 1) or fields.whole("max_tokens", 1)
    if fields.whole("top_logprobs", 0):
        raise fields.wrong("top_logprobs", "0: only the log-probability of the sampled token is given")
    tools = _read_tools(fields)
    read = read_sampling(fields, (messages,), most, logprobs=fields.flag("logprobs"), tools=tools)
    variables = fields.object("chat_template_kwargs")
    return read if variables is None else replace(read, chat_template_kwargs=dict(variables.body))


def read_completion(body: Mapping[str, Any]) -> PolicyRequest:
    """Read a request to POST /v1/completions. A prompt is text or token ids; several prompts may come in a list."""
    fields = RequestFields(body)
    _refuse(fields, COMPLETION)
    given = body.get("prompt")
    several = isinstance(given, list) and given and not isinstance(given[0], int)
    prompts = tuple(_read_prompt(fields, one) for one in (given if several else [given]))  # type: ignore[union-attr]
    logprobs, most = _read_logprobs(fields), fields.whole("max_tokens", 1) or COMPLETION_TOKENS
    return read_sampling(fields, prompts, most, logprobs=logprobs, prompt="prompt")


def read_generate(body: Mapping[str, Any]) -> PolicyRequest:
    """Read a request to POST /inference/v1/generate."""
    request = RequestFields(body)
    _refuse(request, GENERATE)
    prompt = request.ids("token_ids")
    params = body.get("sampling_params")
    if not isinstance(params, dict):
        raise request.wrong("sampling_params", "an object, such as {}")
    if request.text("output_mode") not in (None, "tokens"):
        raise request.wrong("output_mode", '"tokens"')
    fields = RequestFields(params, "sampling_params.")
    _refuse(fields, SAMPLED)
    logprobs, most = _read_logprobs(fields), fields.whole("max_tokens", 1)
    return read_sampling(fields, (prompt,), most, logprobs=logprobs, request=request, prompt="token_ids")


def _read_logprobs(fields: RequestFields) -> bool:
    """Return whether a request asks for log-probabilities, by a number of tokens at each place."""
    logprobs = fields.whole("logprobs", 0)
    if logprobs is not None and logprobs > 1:
        raise fields.wrong("logprobs", "0 or 1: only the log-probability of the sampled token is given")
    return logprobs is not None


def _read_message(place: int, message: Any) -> dict[str, Any]:
    """Read a message, and convert its content to text."""
    where = f"messages[{place}]"

    def wrong(what: str) -> RequestRefused:
        return RequestRefused(f"{where} {what}", parameter=where)

    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise wrong('has no "role"')
    if message["role"] not in ROLES:
        raise wrong(f"has the role {short(message['role'])}; it is one of {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_read_part(part, wrong) for part in content)
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or message.get("function_call"):
        raise wrong("has tool_calls that are not a list")
    if content is None and message["role"] == "assistant":
        content = None if calls else ""
    elif not isinstance(content, str):
        raise wrong(f"has the content {short(content)}; expected a string, or a list of parts of text")
    read: dict[str, Any] = {"role": message["role"], "content": content}
    if calls:
        read["tool_calls"] = [_read_call(where, call, wrong) for call in calls]
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            read[name] = message[name]
    return read


def _read_call(where: str, call: Any, wrong: Callable[[str], RequestRefused]) -> dict[str, Any]:
    """Read a tool call, and parse its arguments to an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong(f'has the tool call {short(call)}; expected {{"id", "type": "function", "function": ...}}')
    arguments = RequestFields(function, f"{where}.tool_calls.").arguments("arguments")
    return tool_call(call["id"] if isinstance(call.get("id"), str) else "", function["name"], arguments)


def _read_part(part: Any, wrong: Callable[[str], RequestRefused]) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else part
    raise wrong(f"has a part of the type {short(kind)}: this policy reads text only")


def _read_tools(fields: RequestFields) -> tuple[dict[str, Any], ...]:
    """Read the schemas of tools."""
    given, shown = fields.body.get("tools") or [], fields.shows_tools()
    if not isinstance(given, list):
        raise fields.wrong("tools", "a list")
    found = []
    for tool in given:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestRefused(
                f'{short(tool)} is no {{"type": "function", "function": {{"name": ...}}}}', parameter="tools"
            )
        if not isinstance(function.get("parameters") or {}, dict):
            raise RequestRefused(f"the parameters of {function['name']:.100} are not a JSON schema", parameter="tools")
        found.append({"type": "function", "function": function})
    return tuple(found) if shown else ()


def _read_prompt(fields: RequestFields, prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        return RequestFields({"prompt": prompt}).ids("prompt")
    raise fields.wrong("prompt", "a string, a list of token ids, or a list of these")


# -- responses ----------------------------------------------------------------------------------------------------------


def write_chat(name: str, asked: PolicyRequest, replies: Sequence[PolicyResponse]) -> dict[str, Any]:
    choices = []
    for one in replies:
        logprobs = {"content": [one.logprob(*pair) for pair in one.pairs], "refusal": None}
        message = _message(one, asked)
        choices.append(
            {
                "index": one.index,
                "message": message,
                "logprobs": logprobs if asked.logprobs else None,
                **_ending(asked, one),
            }
        )
    return _answer("chat.completion", "chatcmpl-", name, asked, replies, choices)


def write_completions(name: str, asked: PolicyRequest, replies: Sequence[PolicyResponse]) -> dict[str, Any]:
    choices = []
    for one in replies:
        logprobs = _completion_logprobs(one) if asked.logprobs else None
        choices.append({"index": one.index, "text": one.text(asked), "logprobs": logprobs, **_ending(asked, one)})
    return _answer("text_completion", "cmpl-", name, asked, replies, choices)


def write_generate(name: str, asked: PolicyRequest, replies: Sequence[PolicyResponse]) -> dict[str, Any]:
    """Build a response in vLLM's format. Each log-probability has its token in two fields, since versions of clients
    read different ones.
    """
    choices = []
    for one in replies:
        content = [
            {"token_id": id, "token": f"token_id:{id}", "logprob": logp, "top_logprobs": []} for id, logp in one.pairs
        ]
        logprobs = {"content": content} if asked.logprobs else None
        choices.append({"index": one.index, "logprobs": logprobs, **_ending(asked, one), "token_ids": one.token_ids})
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
        "id": asked.id or prefix + asked.key,
        "object": kind,
        "created": asked.arrived,
        "model": name,
        "choices": choices,
        "usage": {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled},
        **({"prompt_token_ids": replies[0].prompt_ids} if asked.token_ids else {}),
    }


def _message(one: PolicyResponse, asked: PolicyRequest) -> dict[str, Any]:
    """Return the message of a chat response."""
    if not one.calls:
        return {"role": "assistant", "content": one.text(asked), "refusal": None}
    listed = []
    for index, call in enumerate(one.calls):
        function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
        number = {"index": index} if asked.stream else {}
        listed.append({**number, "id": call.id, "type": "function", "function": function})
    return {"role": "assistant", "content": one.words(asked) or None, "refusal": None, "tool_calls": listed}


def _ending(asked: PolicyRequest, one: PolicyResponse) -> dict[str, Any]:
    """Return the last fields of a choice, which all formats share."""
    reason = "length" if one.cut else "tool_calls" if one.calls else "stop"
    return {"finish_reason": reason, "stop_reason": one.stopped_by, **one.origin(asked)}


def _completion_logprobs(one: PolicyResponse) -> dict[str, Any]:
    tokens, places, place = [], [], 0
    for id, _ in one.pairs:
        tokens.append(one.token(id))
        places.append(place)
        place += len(tokens[-1])
    logp = [float(x) for x in one.completion.logp]
    return {"tokens": tokens, "token_logprobs": logp, "top_logprobs": None, "text_offset": places}


def _chat_events(name: str, asked: PolicyRequest, replies: Sequence[PolicyResponse]) -> Iterator[Step]:
    """Yield for each choice its role, its text, and the rest."""
    whole = write_chat(name, asked, replies)
    whole["object"] = "chat.completion.chunk"
    chunks = []
    for choice in whole["choices"]:
        message, logprobs = choice.pop("message"), choice.pop("logprobs")
        begun = {"index": choice["index"], "logprobs": None, "finish_reason": None}
        chunks.append({**begun, "delta": {"role": message.pop("role")}})
        text = message.pop("content")
        if text is not None or logprobs:
            chunks.append({**begun, "delta": {"content": text}, "logprobs": logprobs})
        chunks.append({**choice, "delta": message, "logprobs": None})
    return _events({**whole, "choices": chunks}, asked)


def _completion_events(name: str, asked: PolicyRequest, replies: Sequence[PolicyResponse]) -> Iterator[Step]:
    whole = write_completions(name, asked, replies)
    chunks = []
    for choice in whole["choices"]:
        chunks.append({**{key: choice[key] for key in ("index", "text", "logprobs")}, "finish_reason": None})
        chunks.append({**choice, "text": "", "logprobs": None})
    return _events({**whole, "choices": chunks}, asked)


def _generate_events(name: str, asked: PolicyRequest, replies: Sequence[PolicyResponse]) -> Iterator[Step]:
    return _events(write_generate(name, asked, replies), asked)


def _events(whole: dict[str, Any], asked: PolicyRequest) -> Iterator[Step]:
    usage = whole.pop("usage")
    choices = whole.pop("choices")
    seen: set[int] = set()
    for choice in choices:
        beside = {k: v for k, v in whole.items() if choice["index"] not in seen or k != "prompt_token_ids"}
        seen.add(choice["index"])
        yield None, {**beside, "choices": [choice], "usage": None}
    if asked.stream_usage:
        whole.pop("prompt_token_ids", None)
        yield None, {**whole, "choices": [], "usage": usage}


def _chat_text(content: dict[str, Any]) -> GrowingField | None:
    texts = (choice for choice in content["choices"] if choice["delta"].get("content"))
    return next((GrowingField(choice["delta"], "content", choice["logprobs"] or {}) for choice in texts), None)


def _completion_text(content: dict[str, Any]) -> GrowingField | None:
    return next((GrowingField(choice, "text", choice["logprobs"] or {}) for choice in content["choices"]), None)


def write_error(refused: RequestRefused) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    kinds = {429: "rate_limit_error", 401: "authentication_error"}
    kind = kinds.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
    return {"error": {"message": str(refused), "type": kind, "param": refused.parameter, "code": refused.code}}


_DONE = b"data: [DONE]\n\n"
GENERATE_FORMAT = WireFormat(
    "/inference/v1/generate", alone(read_generate), write_generate, _generate_events, write_error, ending=_DONE
)
CHAT_FORMAT = WireFormat(
    "/v1/chat/completions", alone(read_chat), write_chat, _chat_events, write_error, _chat_text, ending=_DONE
)
COMPLETIONS_FORMAT = WireFormat(
    "/v1/completions",
    alone(read_completion),
    write_completions,
    _completion_events,
    write_error,
    _completion_text,
    ending=_DONE,
)
