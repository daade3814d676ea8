"""The source of reward models: items whose responses are read at their last token, at the end of steps, or throughout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from posttrain.algorithms.reward_model_table import Scoring
from posttrain.core.batch import Batch, Stats, TrainingStep
from posttrain.core.protocols import Source
from posttrain.core.types import PreferenceExample
from posttrain.training.sources.example_recording import ExampleRecording
from posttrain.training.sources.example_stream import Memoryless, progress, visited
from posttrain.training.sources.packing import Read, collate, split_microbatches
from posttrain.training.sources.preferences import ComparisonTargets, PreferenceExamples


@dataclass(frozen=True)
class RewardExamples(Memoryless):
    """See `posttrain.core.protocols.Source`: `rows` items a step, one optimizer update each."""

    items: PreferenceExamples
    row: Scoring
    rows: int
    tokens_per_microbatch: int
    seed: int
    device: torch.device
    read: Read = "last"
    showing: ExampleRecording | None = None  # None: none of the rows is recorded

    def produce(self, number: int) -> TrainingStep:
        self.items.too_long.take()
        found = visited(self.items, self.rows, self.seed, number)
        items, stats = [item for _, item in found], Stats()
        progress(self.items, self.rows, number, stats)
        shown = self.showing.choose(self.items, self.rows, number, found) if self.showing else []
        tokens = sum(item.n_scored for item in items)
        return TrainingStep(
            number, [lambda: [b for _, b in self.batches(items, self.showing)]], stats, tokens, outcomes=shown
        )

    def learned(self, step: TrainingStep, stats: Stats) -> None:
        if self.showing is not None:
            self.showing.settle(step)

    def batches(
        self, items: Sequence[PreferenceExample], showing: ExampleRecording | None = None
    ) -> list[tuple[list[int], Batch]]:
        """(places among these items, micro-batch): their comparisons weighed over all of them.

        `showing`: who records some of them.
        """
        by_size = sorted(range(len(items)), key=lambda i: max(map(len, items[i].responses)))
        ordered = [items[i] for i in by_size]
        told = ComparisonTargets.by(self.row.link, self.row.denominator, ordered, self.read)
        responses = [item.responses for item in ordered]
        nothing = torch.zeros(len(items))
        sink = showing.sink(by_size) if showing is not None else None
        return [
            (
                [by_size[i] for i in index],
                collate(
                    [responses[i] for i in index],
                    index,
                    weight=nothing,
                    preferences=told.of(index, self.device),
                    device=self.device,
                    read=self.read,
                    sink=sink,
                ),
            )
            for index in split_microbatches(responses, self.tokens_per_microbatch, self.read)
        ]


if TYPE_CHECKING:
    _proof: Callable[..., Source] = RewardExamples
