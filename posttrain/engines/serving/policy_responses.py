"""A reply of a policy, from which the wire formats build responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.core.thoughts import CLOSES, OPENS, split_thoughts
from posttrain.core.types import Completion, StopReason, ToolCall
from posttrain.engines.serving.requests import PolicyRequest


@dataclass(frozen=True)
class PolicyResponse:
    """A reply to a prompt."""

    completion: Completion
    read: int  # number of tokens in the prompt
    prompt: Sequence[int] | None = None  # token ids of the prompt; None if unknown
    stopped_by: str | int | None = None  # the stop string, or the id of the token, that ended it
    ending: str = ""  # `stopped_by` as text
    decode: Callable[[int], str] | None = None  # returns the text of an id; None without a tokenizer
    calls: Sequence[ToolCall] = ()  # valid tool calls
    before_calls: int | None = None  # number of characters before the first call
    begins_thinking: bool | None = None  # of a reply that is shown in progress: whether it begins within thoughts
    index: int = 0  # its number among the replies to a request

    def text(self, asked: PolicyRequest) -> str:
        """Return the text for clients: without the stop string, unless the request asks for it."""
        text = self.completion.text
        return text if asked.shows_stop else text.removesuffix(self.ending)

    def words(self, asked: PolicyRequest) -> str:
        """Return the text before the first tool call, for formats with separate fields for calls."""
        return self.completion.text[: self.before_calls or 0] if self.calls else self.text(asked)

    def divided(self, asked: PolicyRequest) -> tuple[str, str]:
        """Return (thoughts, text) of `words`. Text that a client has seen as such does not become thoughts."""
        words = self.words(asked)
        if self.begins_thinking is None:
            return split_thoughts(words)
        if not self.begins_thinking and not words.lstrip().startswith(OPENS):
            return "", words
        before, closed, text = words.partition(CLOSES)
        return split_thoughts(before + closed)[0], text.lstrip()

    @property
    def cut(self) -> bool:
        """Return whether the reply reached its maximum of tokens."""
        return self.completion.stop not in (StopReason.EOS, StopReason.STOP)

    def logprob(self, id: int, logp: float) -> dict[str, Any]:
        """Return the log-probability of a sampled token in OpenAI's form."""
        token = self.token(id)
        return {"token": token, "logprob": logp, "bytes": list(token.encode("utf-8", "replace")), "top_logprobs": []}

    @property
    def pairs(self) -> Iterator[tuple[int, float]]:
        """Return the sampled tokens with their log-probabilities."""
        return zip(map(int, self.completion.tokens), map(float, self.completion.logp), strict=True)

    def origin(self, asked: PolicyRequest) -> dict[str, Any]:
        """Return the version of the weights, and, if requested, the token ids, as fields of a response."""
        version = str(self.completion.version)
        return {
            "weight_versions": [{"version": version, "start": 0, "end": len(self.completion.tokens)}],
            **({"token_ids": self.token_ids} if asked.token_ids else {}),
        }

    @property
    def token_ids(self) -> list[int]:
        return [int(id) for id in self.completion.tokens]

    @property
    def prompt_ids(self) -> list[int] | None:
        return None if self.prompt is None else list(self.prompt)

    def token(self, id: int) -> str:
        return f"token_id:{id}" if self.decode is None else self.decode(id)
