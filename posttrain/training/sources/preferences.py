"""Source of comparisons: rows become preference examples, then micro-batches, weighted over the optimizer batch.

N    scored tokens of a micro-batch    R    responses in it    S    preference examples of the optimizer batch
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.algorithms.comparison_weights import Denominator
from posttrain.algorithms.links import PreferenceLink
from posttrain.algorithms.preference import PreferenceAlgorithm
from posttrain.algorithms.responses import Responses
from posttrain.core.batch import Batch, Matched, Preferences, Stats, TrainingStep
from posttrain.core.component import Need
from posttrain.core.conversation import encoder_of
from posttrain.core.protocols import Learner, Source
from posttrain.core.rollouts import Comparison, PreferenceExample
from posttrain.core.token_probe import TokenSink
from posttrain.core.transcripts import Transcript
from posttrain.core.types import StopReason, Task, UserError
from posttrain.envs.demonstration import demonstrate, demonstrate_steps, last_alone
from posttrain.learners.forward_pass import REFERENCE
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.sources.example_recording import ExampleRecording
from posttrain.training.sources.example_source import ExampleSource
from posttrain.training.sources.example_stream import ExampleStream
from posttrain.training.sources.length_filter import Placed, TooLong
from posttrain.training.sources.packing import Read, collate, readings, split_microbatches
from posttrain.training.sources.reference_cache import MovingReferenceLogps, Reference, mismatched
from posttrain.training.sources.score_transport import transported


class PreferenceExamples(ExampleStream[PreferenceExample]):
    """Preference examples of the tasks of `data.preference_examples`."""

    noun = "longest of prompt and response"

    def __init__(
        self,
        tasks: Placed,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int],
        vocab: int,
        too_long: TooLong,
        check_task: Callable[[Task], None] = lambda task: None,
    ) -> None:
        """`check_task` raises UserError for a task without the required comparisons or labels."""
        self.check_task = check_task
        super().__init__(tasks, tokenizer, eos_ids, vocab, too_long)

    def make(self, task: Task, length: int | None) -> PreferenceExample:
        self.check_task(task)
        pairs = zip(task["responses"], task["cut"], strict=True)
        responses = [self._response(task, said, cut, length) for said, cut in pairs]
        comparisons = [Comparison(int(b), int(w), share, margin) for b, w, share, margin in task["comparisons"]]
        return PreferenceExample(responses, comparisons, [tuple(labels) for labels in task["labels"]])

    def transcripts(self, made: PreferenceExample) -> Sequence[Transcript]:
        return made.responses

    def _response(self, task: Task, said: str | list[str], cut: bool, length: int | None) -> Transcript:
        """Return the transcript of prompt and response, tokenised separately; each given step is a scored span."""
        if isinstance(said, list):
            if length is not None:
                raise UserError("a solution that is cut has lost its steps")
            return demonstrate_steps(task, said, self.tokenizer)
        asked: Task
        if "messages" in task:
            asked = {"messages": [*task["messages"], {"role": "assistant", "content": said}]}
        else:
            asked = {"prompt": task["prompt"], "response": said}
        if cut:
            asked["response_stop"] = str(StopReason.LENGTH)
        whole = demonstrate(asked, encoder_of(self.tokenizer, task), self.eos_ids, "last", length)
        return last_alone(whole, self.eos_ids if cut else ())


@dataclass(frozen=True)
class ComparisonTargets:
    """Comparisons and labels of some preference examples' responses, the input of a link."""

    of_labels: bool  # whether the loss reads labels, and not comparisons
    read: Read
    items: Sequence[PreferenceExample]
    weights: list[list[float]]  # of each preference example: weights of its comparisons, or of its labels, in order
    labels: list[list[tuple[int, float]]]  # of each preference example: (place of the score in it, label)

    def of(self, index: Sequence[int], device: torch.device, matched: Matched | None = None) -> Preferences:
        """Return the targets of a micro-batch of these preference examples. `matched`: as in `Preferences`."""
        sizes = [sum(scores(t, self.read) for t in self.items[i].responses) for i in index]
        placed = list(zip(accumulate(sizes, initial=0), index, strict=False))  # (scores before it, preference example)
        compared = [(before, c) for before, i in placed for c in self.items[i].comparisons]
        labelled = [(before + place, value) for before, i in placed for place, value in self.labels[i]]
        weights = [weight for i in index for weight in self.weights[i]]

        def whole(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        def real(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)

        return Preferences(
            whole([before + c.better for before, c in compared]),
            whole([before + c.worse for before, c in compared]),
            real([c.margin for _, c in compared]),
            real([0.0] * len(compared) if self.of_labels else weights),
            whole([place for place, _ in labelled]),
            real([value for _, value in labelled]),
            real(weights if self.of_labels else [0.0] * len(labelled)),
            matched,
        )

    @staticmethod
    def by(
        link: PreferenceLink,
        denominator: Denominator,
        items: Sequence[PreferenceExample],
        of_labels: bool,
        read: Read = "next",
    ) -> ComparisonTargets:
        """Return the targets weighted over all these preference examples, which make up an optimizer batch."""
        labels = [_labels(item, read) for item in items]
        if of_labels:
            return ComparisonTargets(True, read, items, denominator([[1.0] * len(own) for own in labels]), labels)
        units = [link.units(item.comparisons) for item in items]
        shares, sizes = [], []
        for item, numbers in zip(items, units, strict=True):
            sums: dict[int, list[float]] = {}
            for number, comparison in zip(numbers, item.comparisons, strict=True):
                sums.setdefault(number, []).append(comparison.share)
            shares.append([sum(own) / len(own) for own in sums.values()])
            sizes.append({number: (place, len(own)) for place, (number, own) in enumerate(sums.items())})
        weights = denominator(shares)
        spread = [
            [weights[i][size[number][0]] / size[number][1] for number in units[i]] for i, size in enumerate(sizes)
        ]
        return ComparisonTargets(False, read, items, spread, labels)


def scores(transcript: Transcript, read: Read) -> int:
    """Return the number of scores of a response."""
    return readings(transcript, read) if read == "last" else 1


def _labels(item: PreferenceExample, read: Read) -> list[tuple[int, float]]:
    """Return (place of a score, label): the row's labels, else 1 for responses that won more than they lost, 0 for the
    opposite.
    """
    if item.labels:
        found, before = [], 0
        for transcript, own in zip(item.responses, item.labels, strict=True):
            found += [(before + place, value) for place, value in enumerate(own)]
            before += scores(transcript, read)
        return found
    won = [0.0] * len(item.responses)
    for comparison in item.comparisons:
        won[comparison.better] += comparison.share
        won[comparison.worse] -= comparison.share
    return [(place, float(net > 0)) for place, net in enumerate(won) if net]


@dataclass
class Comparisons(ExampleSource[PreferenceExample]):
    """Source of preference examples.

    `reference`: the reference's log-probabilities of all preference examples, if the algorithm needs them. The state is
    the running mean of implicit rewards, if a link subtracts it.
    """

    items: PreferenceExamples
    algorithm: PreferenceAlgorithm
    learner: Learner
    rows: int
    tokens_per_microbatch: int
    seed: int
    reference: Reference | MovingReferenceLogps | None = None
    rewards: tuple[float, float] = (0.0, 0.0)  # sum and number of implicit rewards so far
    recording: ExampleRecording | None = None
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        self.device = self.learner.device

    def batches(
        self,
        places: Sequence[int],
        items: Sequence[PreferenceExample],
        coefficients: Mapping[str, float],
        recording: ExampleRecording | None = None,
    ) -> list[Batch]:
        """Return micro-batches of these preference examples, with comparisons weighted over all of them.

        `places`: their places among the rows; `recording`: records some of them.
        """
        if recording is not None and self.reference is not None:
            recording.note("reference", {i: self.reference.of(place) for i, place in enumerate(places)})
        by_size = sorted(range(len(items)), key=lambda i: max(map(len, items[i].responses)))
        items, places = [items[i] for i in by_size], [places[i] for i in by_size]
        told, responses = (
            ComparisonTargets.by(self.algorithm.link, self.algorithm.denominator, items, self.algorithm.reads_labels),
            [item.responses for item in items],
        )
        fields = {} if self.reference is None else {"ref_logp": [self.reference.of(place) for place in places]}
        if self.algorithm.imitation is not None:
            fields["imitate"] = self._imitated(told)
        sink = recording.sink(by_size) if recording is not None else None

        def built(index: Sequence[int], matched: Matched | None, sink: TokenSink | None) -> Batch:
            return collate(
                [responses[i] for i in index],
                index,
                weight=torch.zeros(len(items)),
                fields=fields,
                preferences=told.of(index, self.device, matched),
                coefficients=coefficients,
                device=self.device,
                sink=sink,
            )

        parts = split_microbatches(responses, self.tokens_per_microbatch)
        matches: Sequence[Matched | None] = [None] * len(parts)
        if self.algorithm.transport is not None:  # the same micro-batches as below, so the same bits
            matches = transported(self.algorithm, self.learner, [built(index, None, None) for index in parts])
        return [built(index, matched, sink) for index, matched in zip(parts, matches, strict=True)]

    def update(self, places: Sequence[int], items: Sequence[PreferenceExample]) -> list[Batch]:
        coefficients = {}
        if self.reference is not None:
            self.reference.prepare(places)
        if Need.DRIFT in self.algorithm.needs:
            coefficients["drift"] = self._drift(places)
        if Need.SHIFT in self.algorithm.needs:
            total, count = self.rewards
            coefficients["shift"] = total / count if count else 0.0
        return self.batches(places, items, coefficients, self.recording)

    def _drift(self, places: Sequence[int]) -> float:
        """Return the mean score of mismatched prompts and responses over the optimizer batch, at least 0."""
        others = [mismatched(self.items, place) for place in places]
        count = sum(map(len, others))
        fields = {}
        if self.reference is not None:
            fields["ref_logp"] = [self.reference.of_mismatched(place) for place in places]
        total = []
        for index in split_microbatches(others, self.tokens_per_microbatch):
            weight = torch.zeros(len(others))
            batch = collate([others[i] for i in index], index, weight=weight, fields=fields, device=self.device)
            (outputs,) = self.learner.evaluate([batch])
            responses = Responses.of(batch)
            everyone = torch.arange(len(responses.length), device=self.device)
            total += self.algorithm.score(outputs, batch, responses, everyone, None).tolist()
        return max(0.0, math.fsum(total) / count) if count else 0.0

    def _imitated(self, told: ComparisonTargets) -> list[Tensor]:
        """Return the weight of each token in the likelihood term, [n] for each preference example."""
        assert self.algorithm.imitation is not None
        good = [
            [
                _won(item, place) if item.comparisons else dict(told.labels[i]).get(place, 0.0) > 0.5
                for place in range(len(item.responses))
            ]
            for i, item in enumerate(told.items)
        ]
        lengths = [
            t.n_scored for i, item in enumerate(told.items) for t, g in zip(item.responses, good[i], strict=True) if g
        ]
        shares = iter(self.algorithm.imitation.shares(lengths)) if lengths else iter(())
        return [
            torch.cat(
                [
                    torch.full((t.n_scored,), next(shares) if g else 0.0, dtype=torch.float64)
                    for t, g in zip(item.responses, good[i], strict=True)
                ]
            )
            for i, item in enumerate(told.items)
        ]

    def learned(self, step: TrainingStep, stats: Stats) -> None:
        super().learned(step, stats)
        moving = self.algorithm.moving
        if moving is not None and step.number % moving.every == 0:
            self.learner.move(REFERENCE, moving.rate)
        if Need.SHIFT in self.algorithm.needs:
            for side in ("chosen", "rejected"):
                total, count = stats.get(f"implicit_reward/{side}", (0.0, 0.0))
                self.rewards = (self.rewards[0] + total, self.rewards[1] + count)

    def state(self) -> dict[str, Any]:
        return {"rewards": list(self.rewards)}

    def restore(self, state: dict[str, Any]) -> None:
        total, count = state["rewards"]
        self.rewards = (float(total), float(count))


def _won(item: PreferenceExample, place: int) -> bool:
    """Return whether a response is better than another one and worse than none."""
    return any(c.better == place for c in item.comparisons) and not any(c.worse == place for c in item.comparisons)


if TYPE_CHECKING:
    _proof: Callable[..., Source] = Comparisons
