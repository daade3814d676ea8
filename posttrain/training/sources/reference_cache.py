"""Cache of the reference's log-probabilities of given responses, computed once and stored on disk.

The name of an entry is a fingerprint of tokens, weights and arithmetic, so another data set, tokenizer or model never
reads it; several runs on the same rows share it. Once it is computed, no second model is in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from posttrain.core.batch import Outputs, Packed
from posttrain.core.progress import doing
from posttrain.core.rollouts import PreferenceExample
from posttrain.core.transcripts import Transcript
from posttrain.data.arrow_store import Arrays, digest, keep_arrays
from posttrain.training.sources.example_stream import ExampleStream
from posttrain.training.sources.packing import pack, prompt_length, split_microbatches

if TYPE_CHECKING:
    from collections.abc import Callable

    Evaluate = Callable[[Sequence[Packed]], list[Outputs]]

AT_ONCE = 256  # preference examples whose transcripts are sorted by length together


class Reference:
    """Log-probabilities of preference examples' responses, and of mismatched ones: responses of other examples to
    their prompts.

    n    scored tokens of a preference example
    """

    def __init__(self, places: Sequence[int], arrays: Arrays) -> None:
        self._row = {int(place): row for row, place in enumerate(places)}
        self._arrays = arrays

    def prepare(self, places: Sequence[int]) -> None:
        """Do nothing: everything is already computed."""

    def of(self, place: int) -> Tensor:
        """Return the concatenated log-probabilities of a preference example's responses, float32 [n]."""
        return self._piece("own", place)

    def of_mismatched(self, place: int) -> Tensor:
        """Return the concatenated log-probabilities of its mismatched transcripts, float32."""
        return self._piece("mismatched", place)

    def _piece(self, name: str, place: int) -> Tensor:
        row, ends = self._row[place], self._arrays[f"{name}_ends"]
        first = int(ends[row - 1]) if row else 0
        return torch.from_numpy(self._arrays[name][first : int(ends[row])])


class MovingReferenceLogps:
    """Log-probabilities under a reference that moves: computed for the preference examples of each update."""

    def __init__(
        self,
        items: ExampleStream[PreferenceExample],
        evaluate: Evaluate,
        tokens_per_microbatch: int,
        device: torch.device,
        drift: bool,
    ) -> None:
        self._of = {"own": _own, **({"mismatched": mismatched} if drift else {})}
        self._items, self._evaluate = items, evaluate
        self._tokens, self._device = tokens_per_microbatch, device
        self._known: dict[tuple[str, int], Tensor] = {}

    def prepare(self, places: Sequence[int]) -> None:
        """Compute the log-probabilities of the preference examples at these places, and drop all others."""
        self._known = {}
        for name, of in self._of.items():
            found = _all(self._items, places, of, self._evaluate, self._tokens, self._device)
            self._known |= {(name, place): torch.from_numpy(x) for place, x in zip(places, found, strict=True)}

    def of(self, place: int) -> Tensor:
        """See `Reference.of`."""
        return self._known["own", place]

    def of_mismatched(self, place: int) -> Tensor:
        """See `Reference.of_mismatched`."""
        return self._known["mismatched", place]


def reference_logps(
    items: ExampleStream[PreferenceExample],
    places: Sequence[int],
    weights: str,
    evaluate: Evaluate,
    tokens_per_microbatch: int,
    device: torch.device,
    drift: bool,
) -> Reference:
    """Return a model's log-probabilities of the preference examples at these places, from the cache or computed now.

    `weights`: a fingerprint of the model and its arithmetic; `evaluate`: computes its outputs; `drift`: include
    mismatched ones.
    """

    def find() -> Arrays:
        found = {"own": _all(items, places, _own, evaluate, tokens_per_microbatch, device)}
        if drift:
            found["mismatched"] = _all(items, places, mismatched, evaluate, tokens_per_microbatch, device)
        plain: Arrays = {}
        for name, pieces in found.items():
            plain[name] = np.concatenate(pieces)
            plain[f"{name}_ends"] = np.cumsum([len(piece) for piece in pieces])
        return plain

    tokens = [_of_tokens(items, places, of) for of in (_own, *([mismatched] if drift else []))]
    name = digest("reference", *tokens, weights, drift)
    return Reference(places, keep_arrays(name, find))


def mismatched(items: ExampleStream[PreferenceExample], place: int) -> list[Transcript]:
    """Return the prompt of a preference example with the responses of the next example with another prompt; [] without
    one.
    """
    item = items[place]
    assert item is not None
    own = item.responses[0]
    prompt = own.tokens[: prompt_length(own)]
    for step in range(1, len(items)):
        other = items[(place + step) % len(items)]
        if other is None or other.responses[0].tokens[: prompt_length(other.responses[0])] == prompt:
            continue
        return [_joined(prompt, other.responses[k % len(other.responses)], items) for k in range(len(item.responses))]
    return []


def _joined(prompt: list[int], response: Transcript, items: ExampleStream[PreferenceExample]) -> Transcript:
    found = Transcript()
    found.observe(prompt)
    found.imitate(response.tokens[prompt_length(response) :][: max(1, items.too_long.context - len(prompt))])
    return found


def _own(items: ExampleStream[PreferenceExample], place: int) -> Sequence[Transcript]:
    item = items[place]
    assert item is not None
    return item.responses


def _all(
    items: ExampleStream[PreferenceExample],
    places: Sequence[int],
    of: Callable[[ExampleStream[PreferenceExample], int], Sequence[Transcript]],
    evaluate: Evaluate,
    tokens_per_microbatch: int,
    device: torch.device,
) -> list[Any]:
    """Return the concatenated log-probabilities of the transcripts of each place."""
    found: list[Any] = []
    for first in range(0, len(places), AT_ONCE):
        some = [of(items, place) for place in places[first : first + AT_ONCE]]
        of_each: list[Any] = [np.zeros(0, dtype=np.float32)] * len(some)
        by_size = sorted((i for i in range(len(some)) if some[i]), key=lambda i: max(map(len, some[i])))
        ordered = [some[i] for i in by_size]
        finished = first + len(some) - len(ordered)
        for index in split_microbatches(ordered, tokens_per_microbatch):
            doing("computing reference log-probabilities of the rows", finished, len(places))
            finished += len(index)
            packed = pack([ordered[k] for k in index], range(len(index)), device)
            (outputs,) = evaluate([packed])
            counts = torch.bincount(packed.rollout, minlength=len(index)).tolist()
            for k, piece in zip(index, outputs.logp.float().cpu().split(counts), strict=True):
                of_each[by_size[k]] = piece.numpy()
        found += of_each
    return found


def _of_tokens(
    items: ExampleStream[PreferenceExample],
    places: Sequence[int],
    of: Callable[[ExampleStream[PreferenceExample], int], Sequence[Transcript]],
) -> str:
    found = hashlib.blake2b(digest_size=16)
    for place in places:
        for transcript in of(items, place):
            found.update(
                np.array([len(transcript), prompt_length(transcript), *transcript.tokens], dtype=np.int64).data
            )
    return found.hexdigest()
