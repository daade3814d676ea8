"""Requests to engines: checks of a request, and the end of its reply, the same for every engine.

An engine only samples tokens. This module checks prompts, finds stop strings, and determines why a reply ended and its
text, with the run's own tokenizer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from posttrain.core.protocols import Model
from posttrain.core.transcripts import Media
from posttrain.core.types import Completion, Sampling, StopReason, UserError, value_type
from posttrain.models.tokenizer.tokenizer import Tokenizer


@value_type
class Request:
    """A request for one reply."""

    id: int
    prompt: tuple[int, ...]
    sampling: Sampling
    own: tuple[int, ...] = ()  # given tokens behind the prompt, if the request continues an earlier one
    keep: bool = False  # whether another request may continue this one
    media: tuple[Media, ...] = ()  # pictures in the prompt

    def check(self, context: int, vocab: int) -> Request:
        """Return the request. Raises UserError if the prompt leaves no room for a reply, or has a token outside the
        vocabulary.
        """
        if not self.prompt:
            raise UserError("empty prompt: give the task a prompt, or the tokenizer a BOS token")
        if self.given >= context:
            raise UserError(
                f"a prompt of {self.given} tokens leaves no room in the model's context of {context}: shorten the prompt, "
                "or leave such rows out"
            )
        if (largest := max(max(self.prompt), max(self.own, default=0), 0)) >= vocab:
            raise UserError(
                f"the tokenizer gives token {largest}, the model's vocabulary has {vocab}: use the model's own tokenizer, "
                "or remove special tokens that the model lacks from the prompt"
            )
        return self

    def budget(self, context: int) -> int:
        """Return the maximum of tokens that may be sampled."""
        return min(self.sampling.max_tokens, context - self.given)

    @property
    def given(self) -> int:
        """Number of tokens before the first sampled one."""
        return len(self.prompt) + len(self.own)

    @property
    def begun(self) -> tuple[int, ...]:
        """The given tokens with which the reply begins."""
        count = self.sampling.begun
        return (*self.prompt, *self.own)[-count:] if count else ()


def end_ids(model: Model, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that end a reply: the model's, or else the tokenizer's."""
    return tuple(model.eos_ids or ((tokenizer.eos_id,) if tokenizer.eos_id is not None else ()))


def stop_window(stop: Iterable[str]) -> int:
    """Return the number of last tokens to search for a stop string: a token has at least one byte of text, so a string
    that ends at the last token is within them.
    """
    return max(len(s.encode()) for s in stop) + 4


def reached_stop(tokenizer: Tokenizer, tail: Sequence[int], stop: Iterable[str]) -> bool:
    """Return whether the last `stop_window` tokens of a reply, including those of an earlier request, contain a stop
    string.
    """
    text = tokenizer.decode(tail)
    return any(s in text for s in stop)


def tokens_to_stop(
    tokenizer: Tokenizer, before: Sequence[int], tokens: Sequence[int], stop: Collection[str]
) -> int | None:
    """Return the number of these tokens, which continue a reply, up to the first one that completes a stop string; None
    if none does. `before`: the reply's earlier tokens.
    """
    window, reply = stop_window(stop), [*before, *tokens]
    for end in range(len(before) + 1, len(reply) + 1):
        if reached_stop(tokenizer, reply[max(0, end - window) : end], stop):
            return end - len(before)
    return None


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
    """Build the completion of a request that ended. `stopped`: whether the last token completed a stop string."""
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
        # The whole text may lack a stop string that the tail had, if it is part of an invalid byte sequence there.
        text = text[: min((text.find(s) + len(s) for s in sampling.stop if s in text), default=len(text))]
    return Completion(request.id, tokens, logp, text, stop, version)
