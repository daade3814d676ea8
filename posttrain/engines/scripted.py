"""An engine that returns written replies, which end as sampled replies do.

A demonstration of an episode thus gets the tokens, stops and masks that the same episode of a policy would have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from posttrain.core.protocols import Engine
from posttrain.core.transcripts import Media
from posttrain.core.types import Completion, Sampling, UserError
from posttrain.engines.request import Request, complete
from posttrain.models.tokenizer.tokenizer import Tokenizer


class ScriptedEngine:
    """Engine of written replies; implements `posttrain.core.protocols.Engine`. `replies`: of one episode, in order.

    A reply ends behind its first stop string, at the maximum of tokens, or else with `eos_ids[0]`.
    """

    batch_invariant = True

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int], replies: Iterable[str]) -> None:
        self.tokenizer, self.eos_ids = tokenizer, eos_ids
        self._replies = deque(replies)
        self._count = 0
        self._done: list[Completion] = []

    @property
    def backend(self) -> str:
        return "written replies"

    @property
    def left(self) -> int:
        """Number of replies that have not been requested yet."""
        return len(self._replies)

    def load(self, weights: Any, version: int) -> None:
        pass

    def submit(self, id: int, prompt: Sequence[int], sampling: Sampling, keep: bool = False) -> None:
        """Answer with the next reply. Raises UserError if there are no more."""
        if not self._replies:
            raise UserError(f"the environment asks for reply {self._count + 1}, but the row has {self._count}")
        text = self._replies.popleft()
        self._count += 1
        ends = [text.find(stop) + len(stop) for stop in sampling.stop if stop in text]
        if ends and text[min(ends) :].strip():
            raise UserError(f"reply {self._count} has text after the stop string {text[: min(ends)][-20:]!r}")
        tokens = self.tokenizer.encode(text[: min(ends)] if ends else text)
        tokens = tokens if ends else [*tokens, self.eos_ids[0]]
        stopped = bool(ends) and len(tokens) <= sampling.max_tokens
        tokens = tokens[: sampling.max_tokens]
        self._done.append(
            complete(
                Request(id, tuple(prompt), sampling),
                tokens,
                [0.0] * len(tokens),
                stopped=stopped,
                eos_ids=self.eos_ids,
                tokenizer=self.tokenizer,
                version=0,
            )
        )

    def submit_with_media(
        self, id: int, prompt: Sequence[int], media: Sequence[Media], sampling: Sampling, keep: bool = False
    ) -> None:
        """Answer with the next reply, for any pictures. See `posttrain.core.protocols.VisionEngine`."""
        self.submit(id, prompt, sampling, keep)

    def forget(self, id: int) -> None:
        pass

    def copy(self, id: int, to: int, tokens: int) -> None:
        pass

    def cancel(self, id: int) -> None:
        self._done = [done for done in self._done if done.id != id]

    def poll(self) -> list[Completion]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        self._done.clear()


if TYPE_CHECKING:
    _proof: Callable[..., Engine] = ScriptedEngine
