"""A policy served from an engine and its tokenizer."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from posttrain.core.seeds import seed_of
from posttrain.core.thoughts import CLOSES, OPENS
from posttrain.core.types import Completion, Sampling, StopReason, ToolCall
from posttrain.engines.serving.engine_thread import EngineThread
from posttrain.engines.serving.growing_text import GrowingText
from posttrain.engines.serving.policy_responses import PolicyResponse
from posttrain.engines.serving.requests import SEEDS, PolicyRequest, Prompt, RequestRefused
from posttrain.engines.serving.stored_conversations import StoredConversations
from posttrain.engines.serving.task_group import together
from posttrain.models.tokenizer.tokenizer import Tokenizer

THOUGHT_TOKENS = 16  # of the end of a prompt, in which a template begins the thoughts
SLACK = 4  # text of more than context * the longest token * this is not tokenised; some normalisers drop characters


class EnginePolicy:
    """A policy that samples with an engine and its tokenizer. It must be closed."""

    def __init__(
        self,
        desk: EngineThread,
        tokenizer: Tokenizer,
        name: str,
        context: int,
        eos_ids: Sequence[int],
        max_tokens: int | None = None,
    ) -> None:
        """Create the policy. `name`: the model's name for clients; `context`: maximum of tokens in a sequence;
        `max_tokens`: maximum of tokens in a reply.
        """
        self.desk, self.tokenizer, self.name, self.context = desk, tokenizer, name, context
        self.eos_ids, self.max_tokens = frozenset(eos_ids), max_tokens or context
        self.conversations = StoredConversations()
        self._added = tokenizer.added
        self._text = functools.cache(lambda id: tokenizer.decode([id]))  # of a token
        self._most_characters = SLACK * context * max(map(len, tokenizer.vocabulary), default=1)
        self._texts = ThreadPoolExecutor(1, "texts")  # tokenizing long prompts must not delay other requests

    def describe(self) -> dict[str, Any]:
        return {"id": self.name, "root": self.name, "max_model_len": self.context}

    def select(self, body: dict[str, Any]) -> dict[str, Any]:
        return body

    def check(self, model: str | None) -> None:
        if model is not None and model != self.name:
            raise RequestRefused(
                f"there is no model {model!r:.200}; this server has {self.name!r}", 404, "model_not_found", "model"
            )

    async def replies(self, prompt: Prompt, asked: PolicyRequest) -> Sequence[PolicyResponse]:
        tokens, ends = await self._read(prompt, asked)
        room = self.context - len(tokens)
        if room <= 0:
            raise self._too_long(f"{len(tokens)} tokens", asked)
        most = min(self.max_tokens, room)  # a reply that is cut off reports so
        seed = secrets.randbelow(SEEDS) if asked.seed is None else asked.seed
        sampling = Sampling(
            asked.temperature,
            asked.top_p,
            asked.top_k,
            min(most, asked.max_tokens or most),
            (*asked.stop, *ends.values()),
            seed,
        )

        async def reply(number: int) -> PolicyResponse:
            how = replace(sampling, seed=seed_of(seed, number)) if number else sampling
            show, growing = asked.watch, GrowingText(self.tokenizer.decode)
            if show is None:
                return self._said(await self.desk.complete(tokens, how), tokens, asked, ends)

            def watch(sampled: list[int], logp: list[float]) -> None:
                show(number, self._in_progress(sampled, logp, growing.of(sampled), tokens, asked, ends))

            said = self._said(await self.desk.complete(tokens, how, watch), tokens, asked, ends)
            show(number, said)
            return said

        return await together(reply(number) for number in range(asked.count))

    async def count(self, prompt: Prompt, asked: PolicyRequest) -> int:
        tokens, _ = await self._read(prompt, asked, math.inf)
        return len(tokens)

    def _too_long(self, size: str, asked: PolicyRequest) -> RequestRefused:
        return RequestRefused(
            f"This model's maximum context length is {self.context} tokens; the prompt has {size}, which leaves no room "
            "for a reply: shorten it",
            code="context_length_exceeded",
            parameter=asked.prompt_field,
        )

    def _said(
        self, completion: Completion, tokens: Sequence[int], asked: PolicyRequest, ends: dict[int, str]
    ) -> PolicyResponse:
        stopped_by, ending = ended_by(completion, asked.stop, ends)
        calls, before = self._calls(completion, asked) if asked.tools else ((), None)
        return PolicyResponse(completion, len(tokens), tokens, stopped_by, ending, self._text, calls, before)

    def _in_progress(
        self,
        sampled: list[int],
        logp: list[float],
        whole: str,
        tokens: Sequence[int],
        asked: PolicyRequest,
        ends: dict[int, str],
    ) -> PolicyResponse:
        """Return the part of a reply that stays as it is, whatever follows: without a call, or the beginning of a mark.

        `sampled`, `logp`, `whole`: the reply so far; `tokens`: those of its prompt.
        """
        form, text = self.tokenizer.tool_format if asked.tools else None, whole
        marks = [OPENS, CLOSES, *asked.stop, *ends.values()]
        if form is not None:
            marks.append(form.opening)
            text = (
                text[: form.start(text)] if form.opening and form.opening in text else "" if not form.opening else text
            )
        thinks = self.tokenizer.decode(tokens[-THOUGHT_TOKENS:]).rstrip().endswith(OPENS)
        text = settled(text, marks)
        if asked.logprobs:
            count = self._tokens_before(sampled, len(whole) - len(text))
            sampled, logp = sampled[:count], logp[:count]
        completion = Completion(0, sampled, logp, text, StopReason.EOS, 0)
        return PolicyResponse(completion, len(tokens), tokens, decode=self._text, begins_thinking=thinks)

    def _tokens_before(self, sampled: Sequence[int], characters: int) -> int:
        """Return the number of tokens before those with the last `characters` characters."""
        low, high = 0, len(sampled)
        while low < high:
            middle = (low + high + 1) // 2
            if len(self.tokenizer.decode(sampled[middle:])) >= characters:
                low = middle
            else:
                high = middle - 1
        return low

    def _calls(self, completion: Completion, asked: PolicyRequest) -> tuple[Sequence[ToolCall], int | None]:
        """Return the valid tool calls in a reply, and the position in the text of the first call or None.

        Ids of calls are computed from the reply, because a template may show them, and the next reply then depends on
        them.
        """
        form = self.tokenizer.tool_format
        found = form.read(completion.text, asked.tools) if form is not None else []
        calls = [
            replace(call, id=_id_of(completion, place)) for place, call in enumerate(found) if call.problem is None
        ]
        return calls, form.start(completion.text) if form is not None and calls else None

    async def _read(
        self, prompt: Prompt, asked: PolicyRequest, most: float | None = None
    ) -> tuple[Sequence[int], dict[int, str]]:
        """Tokenize a prompt. Return its ids, and the text of each requested stop token, without the model's own EOS.

        `most`: maximum of characters; None: as many as may fit into the context.
        """

        def read() -> tuple[Sequence[int], dict[int, str]]:
            ends = {id: self._end(id) for id in asked.stop_ids if id not in self.eos_ids}
            if isinstance(prompt, tuple):
                return prompt, ends
            text = prompt
            if not isinstance(text, str):
                text = self.tokenizer.with_kwargs(asked.chat_template_kwargs).render(text, True, asked.tools)
            if len(text) > (self._most_characters if most is None else most):
                raise self._too_long(f"{len(text):,} characters", asked)
            return self.tokenizer.encode(text, start=True), ends

        return await asyncio.get_running_loop().run_in_executor(self._texts, read)

    def _end(self, id: int) -> str:
        """Decode a requested stop token, which must be one that is never part of other text."""
        text = self._added.get(id)
        if text is None:
            raise RequestRefused(
                f"stop_token_ids: token {id} is neither an EOS token of the model nor a special token",
                parameter="stop_token_ids",
            )
        return text

    def close(self) -> None:
        self.desk.close()
        self._texts.shutdown(wait=False, cancel_futures=True)


def _id_of(completion: Completion, place: int) -> str:
    """Return an id of nine letters and digits for a tool call, since some templates accept no other ids."""
    content = repr((list(completion.tokens), place)).encode()
    return hashlib.blake2b(content, digest_size=8).hexdigest()[:9]


def settled(text: str, marks: Sequence[str]) -> str:
    """Return a text that is being sampled, without an end that may become another character, a mark, or be stripped.

    >>> settled("Yes. <tool", ["<tool_call>"]), settled("a < b ", ["<tool_call>"])
    ('Yes.', 'a < b')
    """
    text = text.rstrip("\ufffd").rstrip()
    most = max((len(mark) - 1 for mark in marks), default=0)
    for length in range(min(most, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) and len(mark) > length for mark in marks):
            return text[:-length].rstrip()
    return text


def ended_by(completion: Completion, stop: Sequence[str], ends: dict[int, str]) -> tuple[str | int | None, str]:
    """Return (the stop string or the stop token's id that ended a reply, the same as text); (None, "") otherwise."""
    if completion.stop is StopReason.STOP:
        for id, text in ends.items():
            if completion.tokens[-1] == id:
                return id, text
        for text in stop:
            if completion.text.endswith(text):
                return text, text
    return None, ""


if TYPE_CHECKING:
    from posttrain.engines.serving.policy_server import Policy

    _proof: Callable[..., Policy] = EnginePolicy
