"""Reads requests of clients, strictly: they may come from anybody.

Three forms are read: OpenAI's chat and completions, and vLLM's token ids (`vllm serve --tokens-only`). Decided here: a
field that would change the reply and is not supported is refused, and so is an unknown field, which may be another one
misspelt. Fields that change nothing (`IGNORED`) are ignored: programs send many that they do not need.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from posttrain.core.messages import near, short
from posttrain.core.types import ROLES

MOST_CHOICES = 128  # replies to one request
MOST_STOPS, LONGEST_STOP = 64, 1000  # stop strings of a request, and characters of one
MOST_STOP_IDS = 1024
MOST_TOP_K = 10**9  # beyond every vocabulary, and within an engine's integers
LONGEST_ID = 200  # characters that are quoted
COMPLETION_TOKENS = 16  # of a completion whose request has no max_tokens, as in OpenAI's API
SEEDS = 1 << 63
HOTTEST = 100.0  # temperature
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
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
    "chat_template_kwargs": ({},),
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
"""Features that a policy does not support, and the values that do not ask for them (null never does)."""
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
"""Fields of OpenAI's and vLLM's APIs that change no reply of a policy, or none visibly."""
SAMPLED = ("n", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "logprobs",
           "include_stop_str_in_output")  # fmt: skip
OF_REQUESTS = ("model", "request_id", "return_token_ids", "stream", "stream_options")
CHAT = (*OF_REQUESTS, *SAMPLED, "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice")
COMPLETION = (*OF_REQUESTS, *SAMPLED, "prompt")
GENERATE = (*OF_REQUESTS, "token_ids", "sampling_params", "output_mode")
"""Fields that are read of each form."""

Prompt = tuple[int, ...] | str | list[dict[str, Any]]
"""A prompt: token ids, text, or chat messages."""


class RequestRefused(Exception):
    """A request that is refused. `code`, `parameter`: as in OpenAI's errors; `status`: of HTTP."""

    def __init__(self, message: str, status: int = 400, code: str | None = None, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.parameter = status, code, parameter


@dataclass(frozen=True)
class PolicyRequest:
    """A parsed request."""

    prompts: tuple[Prompt, ...]
    model: str | None = None
    id: str | None = None  # the client's id of it
    count: int = 1  # replies to each prompt
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None  # None: as many as fit
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    shows_stop: bool = False  # whether the text of a reply includes the stop string
    seed: int | None = None
    logprobs: bool = False
    token_ids: bool = False  # whether the response also has prompt and replies as token ids
    stream: bool = False
    stream_usage: bool = False
    tools: tuple[dict[str, Any], ...] = ()


def read_body(content: bytes) -> dict[str, Any]:
    """Parse the JSON object of a body."""
    try:
        found = json.loads(content.decode(), parse_constant=_refuse_constant)
        if b"\\u" in content:  # the only source of half a surrogate pair, which no tokenizer accepts
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestRefused("the body holds half a surrogate pair, which is not a character") from None
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise RequestRefused(f"the body is {short(found)}; expected a JSON object")
    return found


def read_chat(body: Mapping[str, Any]) -> PolicyRequest:
    """Read a request to POST /v1/chat/completions."""
    fields = _Fields(body)
    fields.refuse_unknown(CHAT)
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise fields.wrong("messages", 'a list of {"role": ..., "content": ...}')
    messages = [_read_message(fields, place, message) for place, message in enumerate(given)]
    most = fields.whole("max_completion_tokens", 1) or fields.whole("max_tokens", 1)
    if fields.whole("top_logprobs", 0):
        raise fields.wrong("top_logprobs", "0: only the log-probability of the sampled token is given")
    tools = _read_tools(fields)
    return _sampled(fields, (messages,), most, logprobs=fields.flag("logprobs"), tools=tools)


def read_completion(body: Mapping[str, Any]) -> PolicyRequest:
    """Read a request to POST /v1/completions. A prompt is text or token ids; a list of them is as many prompts."""
    fields = _Fields(body)
    fields.refuse_unknown(COMPLETION)
    given = body.get("prompt")
    several = isinstance(given, list) and given and not isinstance(given[0], int)
    prompts = tuple(_read_prompt(fields, one) for one in (given if several else [given]))  # type: ignore[union-attr]
    logprobs = fields.whole("logprobs", 0)
    if logprobs is not None and logprobs > 1:
        raise fields.wrong("logprobs", "0 or 1: only the log-probability of the sampled token is given")
    most = fields.whole("max_tokens", 1) or COMPLETION_TOKENS
    return _sampled(fields, prompts, most, logprobs=logprobs is not None)


def read_generate(body: Mapping[str, Any]) -> PolicyRequest:
    """Read a request to POST /inference/v1/generate."""
    request = _Fields(body)
    request.refuse_unknown(GENERATE)
    prompt = _read_ids(request, "token_ids", body.get("token_ids"))
    params = body.get("sampling_params")
    if not isinstance(params, dict):
        raise request.wrong("sampling_params", "an object, such as {}")
    if request.text("output_mode") not in (None, "tokens"):
        raise request.wrong("output_mode", '"tokens"')
    fields = _Fields(params, "sampling_params.")
    fields.refuse_unknown(SAMPLED)
    logprobs = fields.whole("logprobs", 0)
    if logprobs is not None and logprobs > 1:
        raise fields.wrong("logprobs", "0 or 1: only the log-probability of the sampled token is given")
    return _sampled(fields, (prompt,), fields.whole("max_tokens", 1), logprobs=logprobs is not None, request=request)


def _sampled(
    fields: _Fields,
    prompts: tuple[Prompt, ...],
    max_tokens: int | None,
    *,
    logprobs: bool,
    tools: tuple[dict[str, Any], ...] = (),
    request: _Fields | None = None,
) -> PolicyRequest:
    """Read the fields that all forms have. `request`: of the form that has sampling in an object of its own."""
    request = request or fields
    for part in (fields,) if request is fields else (fields, request):
        part.refuse_what_cannot_be_done()
    top_k = fields.whole("top_k", -1, MOST_TOP_K)
    count = fields.whole("n", 1, MOST_CHOICES) or 1
    if count * len(prompts) > MOST_CHOICES:
        raise RequestRefused(
            f"the request asks for {count * len(prompts)} replies; {MOST_CHOICES} are the most", 400, None, "n"
        )
    if (top_p := fields.real("top_p", 1.0)) == 0:
        raise fields.wrong("top_p", "a number above 0, at most 1")
    options = request.body.get("stream_options")
    return PolicyRequest(
        prompts,
        request.text("model"),
        (request.text("request_id") or "")[:LONGEST_ID] or None,
        count,
        fields.real("temperature", HOTTEST),
        top_p,
        max(0, top_k or 0),
        max_tokens,
        _read_stop(fields),
        _read_ids(fields, "stop_token_ids", fields.body.get("stop_token_ids") or [], MOST_STOP_IDS, empty=True),
        fields.flag("include_stop_str_in_output"),
        fields.whole("seed", 0, SEEDS - 1),
        logprobs,
        request.flag("return_token_ids"),
        request.flag("stream"),
        isinstance(options, dict) and _Fields(options, "stream_options.").flag("include_usage"),
        tools,
    )


class _Fields:
    """Fields of an object. Null counts as absent."""

    def __init__(self, body: Mapping[str, Any], path: str = "") -> None:
        self.body, self.path = body, path

    def wrong(self, name: str, expected: str) -> RequestRefused:
        found = f"is {short(self.body[name])}" if self.body.get(name) is not None else "is missing"
        return RequestRefused(f"{self.path}{name} {found}; expected {expected}", parameter=f"{self.path}{name}")

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
        if type(value) not in (int, float) or not 0 <= value <= most:  # NaN is neither
            raise self.wrong(name, f"a number from 0 to {most:g}")
        return float(value)

    def refuse_unknown(self, known: Sequence[str]) -> None:
        """Refuse fields that are not in `known`."""
        for name in self.body:
            if name not in known and name not in IGNORED and name not in NEUTRAL:
                there = [*known, *NEUTRAL, *IGNORED]
                close = near(str(name), there) or f"; there are {', '.join(known)}"
                raise RequestRefused(
                    f"{self.path}{name:.60} is not a field of this request{close}", parameter=f"{self.path}{name:.60}"
                )

    def refuse_what_cannot_be_done(self) -> None:
        for name, neutral in NEUTRAL.items():
            if (value := self.body.get(name)) is not None and value not in neutral:
                raise RequestRefused(
                    f"{self.path}{name} is not supported: leave it out", parameter=f"{self.path}{name}"
                )


def _read_message(fields: _Fields, place: int, message: Any) -> dict[str, Any]:
    """Read a message with its content as text."""
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
        read["tool_calls"] = [_read_call(call, wrong) for call in calls]
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            read[name] = message[name]
    return read


def _read_call(call: Any, wrong: Callable[[str], RequestRefused]) -> dict[str, Any]:
    """Read a tool call; its arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong(f'has the tool call {short(call)}; expected {{"id", "type": "function", "function": ...}}')
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise wrong("has a tool call whose arguments are not JSON") from None
    if not isinstance(arguments, dict):
        raise wrong(f"has a tool call whose arguments are {short(arguments)}; expected an object")
    id = call.get("id") if isinstance(call.get("id"), str) else ""
    return {"id": id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _read_part(part: Any, wrong: Callable[[str], RequestRefused]) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else part
    raise wrong(f"has a part of the type {short(kind)}: this policy reads text only")


def _read_tools(fields: _Fields) -> tuple[dict[str, Any], ...]:
    """Read the schemas of tools."""
    given, choice = fields.body.get("tools") or [], fields.body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise fields.wrong("tool_choice", '"auto" or "none": a tool call cannot be forced')
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
    return tuple(found) if choice != "none" else ()


def _read_prompt(fields: _Fields, prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        return _read_ids(fields, "prompt", prompt)
    raise fields.wrong("prompt", "a string, a list of token ids, or a list of these")


def _read_ids(fields: _Fields, name: str, value: Any, most: int | None = None, empty: bool = False) -> tuple[int, ...]:
    if not isinstance(value, list) or (not value and not empty) or not all(type(id) is int and id >= 0 for id in value):
        raise fields.wrong(name, "a list of token ids")
    if most is not None and len(value) > most:
        raise fields.wrong(name, f"at most {most} token ids")
    return tuple(value)


def _read_stop(fields: _Fields) -> tuple[str, ...]:
    given = fields.body.get("stop")
    stops: Sequence[Any] = [given] if isinstance(given, str) else given or []
    if not isinstance(stops, list) or not all(isinstance(s, str) and 0 < len(s) <= LONGEST_STOP for s in stops):
        raise fields.wrong("stop", f"strings of 1 to {LONGEST_STOP} characters")
    if len(stops) > MOST_STOPS:
        raise fields.wrong("stop", f"at most {MOST_STOPS} strings")
    return tuple(stops)


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number")
