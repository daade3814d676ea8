"""A request to an engine, its checks, and how its reply ends: the same for every engine.

An engine samples tokens; whether a prompt is valid, whether a stop string has been reached, why a reply ended and what
its text is are decided here, with the run's own tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from posttrain.core.types import Completion, Media, Sampling, StopReason, UserError, value_type
from posttrain.models.tokenizer.tokenizer import Tokenizer


@value_type
class Request:
    """A request for one reply."""

    id: int
    prompt: tuple[int, ...]
    sampling: Sampling
    own: tuple[int, ...] = ()  # tokens that follow the prompt and are given too, where an earlier request is continued
    keep: bool = False  # whether another request may continue this one
    media: tuple[Media, ...] = ()  # pictures in the prompt

    def check(self, context: int, vocab: int) -> Request:
        """Return the request. Raises UserError if the prompt leaves no room for a reply, or holds a token the model
        lacks.
        """
        if not self.prompt:
            raise UserError("empty prompt: give the task a prompt, or the tokenizer a BOS token")
        if self.given >= context:
            raise UserError(
                f"a prompt of {self.given} tokens leaves no room in the model's context of {context}: "
                "shorten it, or leave such rows out"
            )
        if (largest := max(max(self.prompt), max(self.own, default=0), 0)) >= vocab:
            raise UserError(
                f"the tokenizer gives token {largest}, the model's vocabulary has {vocab}: "
                "they do not belong together, or the prompt holds a special token that the model lacks"
            )
        return self

    def budget(self, context: int) -> int:
        """Return the most tokens that may be sampled."""
        return min(self.sampling.max_tokens, context - self.given)

    @property
    def given(self) -> int:
        """Number of tokens before the first that is sampled."""
        return len(self.prompt) + len(self.own)

    @property
    def begun(self) -> tuple[int, ...]:
        """The given tokens with which the reply begins."""
        count = self.sampling.begun
        return (*self.prompt, *self.own)[-count:] if count else ()


def stop_window(stop: Iterable[str]) -> int:
    """Return how many last tokens to search: each is at least one byte of text, so a stop string that ends here is in
    them.
    """
    return max(len(s.encode()) for s in stop) + 4


def reached_stop(tokenizer: Tokenizer, tail: Sequence[int], stop: Iterable[str]) -> bool:
    """Return whether the last `stop_window` tokens of a reply hold a stop string, tokens of an earlier request
    included.
    """
    text = tokenizer.decode(tail)
    return any(s in text for s in stop)


def complete(
    request: Request,
    tokens: Sequence[int],
    logp: Sequence[float],
    *,
    stopped: bool,
    eos_ids: Sequence[int],
    tokenizer: Tokenizer,
    version: int,
) -> Completion:
    """Build the completion of a request that ended. `stopped`: whether its text reached a stop string with the last
    token.
    """
    sampling = request.sampling
    if stopped:
        stop = StopReason.STOP
    elif tokens[-1] in eos_ids:
        stop = StopReason.EOS
    else:
        stop = StopReason.LENGTH if len(tokens) >= sampling.max_tokens else StopReason.CONTEXT
    whole = [*request.begun, *tokens]
    text = tokenizer.decode(whole[:-1] if stop is StopReason.EOS else whole)
    if stopped:
        # The whole text may lack a stop string that the tail showed: bytes that do not form a character swallow it.
        text = text[: min((text.find(s) + len(s) for s in sampling.stop if s in text), default=len(text))]
    return Completion(request.id, tokens, logp, text, stop, version)
