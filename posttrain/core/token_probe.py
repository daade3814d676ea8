"""A probe that copies an update's numbers of single tokens, for the record.

A micro-batch may carry a tap, to which the learner then copies log-probabilities, entropies, and the weight of each
token. The update itself is computed as without it, so no bit of a run changes.

    N    scored tokens of a micro-batch    S    rollouts of the optimizer batch    n_i    scored tokens of rollout i
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from posttrain.core.batch import Batch, Outputs


WHOLE = {"reverse_kl": 1.0, "forward_kl": 1.0, "jensen_shannon": 1.0, "expected_q": -1.0}
"""Fields of `Outputs` that are made of whole distributions -> their sign in the loss of an algorithm."""
SCORE = "score"  # a reward model's, one for each reading, which takes the place of the tokens' numbers
SHARE = "share"  # the weight of these, where log-probabilities have none

Found: TypeAlias = "dict[int, dict[str, NDArray[np.float32]]]"
"""Place in [S] -> column -> [n_i]."""


@dataclass
class TokenSink:
    """The numbers of the requested tokens from one update."""

    asked: frozenset[int] = frozenset()  # rollouts, by their places in [S]
    entropy: bool = True  # whether entropies are asked for too, though the loss may not read any
    skipped: bool = False  # whether the update moved nothing
    found: Found = field(default_factory=dict)
    _passed: list[tuple[TokenProbe, dict[str, Tensor]]] = field(default_factory=list)

    def tap(self, index: Sequence[int], sizes: Sequence[int]) -> TokenProbe:
        """Return the tap for a micro-batch of these rollouts, with the number of scored tokens, or other readings, of
        each."""
        spans, row = [], 0
        for place, size in zip(index, sizes, strict=True):
            if place in self.asked:
                spans.append((place, row, row + size))
            row += size
        return TokenProbe(self, tuple(spans))

    def take(self, tap: TokenProbe, columns: Mapping[str, Tensor]) -> None:
        """Take columns of a micro-batch, [N] each. They stay on their device until `settle`."""
        self._passed.append((tap, {name: values.detach() for name, values in columns.items()}))

    def settle(self) -> Found:
        """Return the numbers, on the CPU: one copy a column, however many rollouts and micro-batches there are."""
        import torch

        names = dict.fromkeys(name for _, columns in self._passed for name in columns)
        for name in names:
            taps = [tap for tap, columns in self._passed if name in columns]
            parts = [
                columns[name][first:last].float()
                for tap, columns in self._passed
                if name in columns
                for first, last in tap.runs
            ]
            if not parts:
                continue
            whole, begin = torch.cat(parts).cpu().numpy(), 0
            for place, first, last in (span for tap in taps for span in tap.spans):
                end = begin + last - first
                self.found.setdefault(place, {})[name] = whole[begin:end]
                begin = end
        self._passed.clear()
        for columns in self.found.values():
            share = columns.pop(SHARE, None)
            if share is not None:
                columns.setdefault("weight", share)
        return self.found

    def hear(self, found: Found) -> None:
        """Take over what another process has found: each micro-batch is computed by one."""
        self.found |= found


def sink_of(batches: Iterable[Batch]) -> TokenSink | None:
    """Return the sink of an update of these micro-batches, if it has one."""
    return next((batch.tap.sink for batch in batches if batch.tap is not None), None)


@dataclass(frozen=True)
class TokenProbe:
    """The requested tokens of one micro-batch."""

    sink: TokenSink
    spans: tuple[tuple[int, int, int], ...]  # (place in [S], first row, the one behind the last), counted in readings

    @property
    def entropy(self) -> bool:
        return bool(self.spans) and self.sink.entropy

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The same rows, neighbours together."""
        found: list[tuple[int, int]] = []
        for _, first, last in self.spans:
            if found and found[-1][1] == first:
                first = found.pop()[0]
            found.append((first, last))
        return found

    def watch(self, outputs: Outputs) -> None:
        """Record the outputs of the update's forward pass. The weight of a token is known when its gradient passes by.

        weight = -d loss / d log p: the factor of the gradient of the token's log-probability, to go up. Nothing of the
        algorithm has to be known for it: clips, corrections and penalties are in it. Where the loss reads no
        log-probability, but a divergence or an expected value of all tokens, it is the factor of the gradient of that.
        """
        if not self.spans:
            return
        if outputs.score is not None:
            self.sink.take(self, {SCORE: outputs.score})
        if not outputs.logp.numel():
            return
        seen = {"learner": outputs.logp, "entropy": outputs.entropy, "teacher": outputs.teacher}
        self.sink.take(self, {name: values for name, values in seen.items() if values is not None})
        self._hear(outputs.logp, "weight", -1.0)
        for name, sign in WHOLE.items():
            self._hear(getattr(outputs, name), SHARE, sign)

    def _hear(self, values: Tensor | None, column: str, sign: float) -> None:
        """Leave `sign` times the gradient of these values, once it is known."""

        def note(gradient: Tensor | None) -> None:
            if gradient is not None:  # else the loss reads something else of the same logits
                self.sink.take(self, {column: sign * gradient})

        if values is not None and values.requires_grad:
            values.register_hook(note)
