"""An engine that says what it is told: what tests of whole episodes share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from posttrain.core.protocols import Engine
from posttrain.core.types import Completion, Sampling, StopReason
from posttrain.models.tokenizer.tokenizer import Tokenizer


class Scripted:
    """An engine that says what it is told, turn by turn, up to the stop string."""

    batch_invariant = True
    backend = "a script"

    def __init__(self, tokenizer: Tokenizer, replies: Sequence[str]) -> None:
        self.tokenizer, self.replies, self.done = tokenizer, list(replies), list[Completion]()

    def submit(self, id: int, prompt: Sequence[int], sampling: Sampling, keep: bool = False) -> None:
        text = self.replies.pop(0)
        ends = [text.index(stop) + len(stop) for stop in sampling.stop if stop in text]
        text, stop = (text[: min(ends)], StopReason.STOP) if ends else (text, StopReason.EOS)
        tokens = self.tokenizer.encode(text)
        self.done.append(Completion(id, tokens, [-0.5] * len(tokens), text, stop, 0))

    def poll(self) -> list[Completion]:
        done, self.done = self.done, []
        return done

    def forget(self, id: int) -> None: ...
    def copy(self, id: int, to: int, tokens: int) -> None: ...
    def load(self, weights: Any, version: int) -> None: ...
    def close(self) -> None: ...


_engine: type[Engine] = Scripted
