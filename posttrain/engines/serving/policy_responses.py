"""Replies of a policy, as the wire formats write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.core.types import Completion, StopReason, ToolCall
from posttrain.engines.serving.requests import PolicyRequest


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

    def words(self, asked: PolicyRequest) -> str:
        """Return the text for clients that get tool calls in fields of their own: the part before the first call."""
        return self.completion.text[: self.before_calls or 0] if self.calls else self.text(asked)

    @property
    def cut(self) -> bool:
        """Return whether it ended for want of room."""
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
        """Return the fields that say where the tokens come from: the version of the weights, and the tokens on request."""
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
        return f"token_id:{id}" if self.decode is None else self.decode([id])
