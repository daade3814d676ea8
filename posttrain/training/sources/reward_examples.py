"""Source for reward models: preference examples, scored at the end of a response, at the ends of steps, or at every
token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from posttrain.algorithms.reward_model_table import RewardModelAlgorithm
from posttrain.core.batch import Batch
from posttrain.core.protocols import Source
from posttrain.core.rollouts import PreferenceExample
from posttrain.training.sources.example_recording import ExampleRecording
from posttrain.training.sources.example_source import ExampleSource
from posttrain.training.sources.packing import Read, collate, split_microbatches
from posttrain.training.sources.preferences import ComparisonTargets, PreferenceExamples


@dataclass(frozen=True)
class RewardExamples(ExampleSource[PreferenceExample]):
    """Source of preference examples for reward models."""

    items: PreferenceExamples
    algorithm: RewardModelAlgorithm
    rows: int
    tokens_per_microbatch: int
    seed: int
    device: torch.device
    read: Read = "last"
    recording: ExampleRecording | None = None

    def update(self, places: Sequence[int], items: Sequence[PreferenceExample]) -> list[Batch]:
        return [batch for _, batch in self.batches(items, self.recording)]

    def batches(
        self, items: Sequence[PreferenceExample], recording: ExampleRecording | None = None
    ) -> list[tuple[list[int], Batch]]:
        """Return (places among these preference examples, micro-batch), with comparisons weighted over all of them.

        `recording`: records some of them.
        """
        by_size = sorted(range(len(items)), key=lambda i: max(map(len, items[i].responses)))
        ordered, link = [items[i] for i in by_size], self.algorithm.link
        told = ComparisonTargets.by(link, self.algorithm.denominator, ordered, link.reads_labels, self.read)
        responses = [item.responses for item in ordered]
        nothing = torch.zeros(len(items))
        sink = recording.sink(by_size) if recording is not None else None
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
