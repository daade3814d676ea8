"""The request to a policy that all wire formats are parsed to, and its refusal."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from posttrain.core.messages import short

SEEDS = 1 << 63

Prompt = tuple[int, ...] | str | list[dict[str, Any]]
"""A prompt: token ids, text, or chat messages."""


class RequestRefused(Exception):
    """Raised for a refused request. `code`, `parameter`: as in OpenAI's errors; `status`: the HTTP status."""

    def __init__(self, message: str, status: int = 400, code: str | None = None, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.parameter = status, code, parameter


_own = partial(field, compare=False, repr=False)


@dataclass(frozen=True)
class PolicyRequest:
    """A parsed request."""

    prompts: tuple[Prompt, ...]
    model: str | None = None
    id: str | None = None  # the client's id of the request
    count: int = 1  # number of replies to each prompt
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
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template
    echo: Mapping[str, Any] = field(default_factory=dict)  # fields that the response repeats
    include: tuple[str, ...] = ()  # optional parts of the response, as OpenAI's Responses names them
    stored: tuple[dict[str, Any], ...] | None = None  # messages to store with the reply; None: store nothing
    # not what is asked, so neither compared nor shown: equal requests get equal replies
    watch: Callable[[int, Any], None] | None = _own(default=None)
    """Called with the number of a reply to the prompt and the reply: in progress, if the policy shows that, or ended."""
    prompt_field: str = _own(default="messages")  # the name of the request's field with the prompt
    key: str = _own(default_factory=lambda: secrets.token_hex(16))  # for ids that the server gives
    arrived: int = _own(default_factory=lambda: int(time.time()))


def read_body(content: bytes) -> dict[str, Any]:
    """Parse the JSON object in a request's body."""
    try:
        found = json.loads(content.decode(), parse_constant=refuse_constant)
        if b"\\u" in content:  # only an escape can give a lone surrogate, which no tokenizer accepts
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestRefused("the body holds half a surrogate pair, which is not a character") from None
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise RequestRefused(f"the body is {short(found)}; expected a JSON object")
    return found


def refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number")
