"""A probe that copies an update's values of single tokens, for the record.

A micro-batch may carry a tap, to which the learner copies log-probabilities, entropies, and the weight of each token.
No bit of the update depends on the tap.

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
"""Fields of `Outputs` that are computed from whole distributions -> their sign in an algorithm's loss."""
SCORE = "score"  # a reward model's score of each reading, in place of values of tokens
SHARE = "share"  # the weight of these fields, where the loss reads no log-probabilities

Found: TypeAlias = "dict[int, dict[str, NDArray[np.float32]]]"
"""Index in [S] -> column -> [n_i]."""


@dataclass
class TokenSink:
    """The values of the requested rollouts' tokens in one update."""

    asked: frozenset[int] = frozenset()  # requested rollouts, as indices in [S]
    entropy: bool = True  # whether entropies are recorded too, even if the loss reads none
    skipped: bool = False  # whether the update changed no weights
    found: Found = field(default_factory=dict)
    _passed: list[tuple[TokenProbe, dict[str, Tensor]]] = field(default_factory=list)

    def tap(self, index: Sequence[int], sizes: Sequence[int]) -> TokenProbe:
        """Return the tap for a micro-batch of the rollouts `index`, each with `sizes` scored tokens (or other
        readings).
        """
        spans, row = [], 0
        for place, size in zip(index, sizes, strict=True):
            if place in self.asked:
                spans.append((place, row, row + size))
            row += size
        return TokenProbe(self, tuple(spans))

    def take(self, tap: TokenProbe, columns: Mapping[str, Tensor]) -> None:
        """Store columns of a micro-batch, [N] each. They stay on their device until `settle`."""
        self._passed.append((tap, {name: values.detach() for name, values in columns.items()}))

    def settle(self) -> Found:
        """Return the values on the CPU, with one copy per column, however many rollouts and micro-batches there are."""
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
        """Add the values that another process found. Each micro-batch is computed by a single process."""
        self.found |= found


def sink_of(batches: Iterable[Batch]) -> TokenSink | None:
    """Return the sink of the update that has these micro-batches; None if it has none."""
    return next((batch.tap.sink for batch in batches if batch.tap is not None), None)


@dataclass(frozen=True)
class TokenProbe:
    """The requested rows of one micro-batch."""

    sink: TokenSink
    spans: tuple[tuple[int, int, int], ...]  # (index in [S], first row, end of rows), counted in readings

    @property
    def entropy(self) -> bool:
        return bool(self.spans) and self.sink.entropy

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The rows of `spans`, neighbours merged."""
        found: list[tuple[int, int]] = []
        for _, first, last in self.spans:
            if found and found[-1][1] == first:
                first = found.pop()[0]
            found.append((first, last))
        return found

    def watch(self, outputs: Outputs) -> None:
        """Record the outputs of the update's forward pass. A token's weight is recorded when its gradient is computed.

        weight = -d loss / d log p: the factor of the gradient of the token's log-probability, for ascent. It includes
        all clips, corrections and penalties, so it is the same code for every algorithm. Where the loss reads no
        log-probability, but a divergence or an expected value over all tokens, the weight is the factor of the gradient
        of that value.
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
        """Record `sign` times the gradient of these values in `column`, once it is computed."""

        def note(gradient: Tensor | None) -> None:
            if gradient is not None:  # otherwise the loss reads another function of the same logits
                self.sink.take(self, {column: sign * gradient})

        if values is not None and values.requires_grad:
            values.register_hook(note)
