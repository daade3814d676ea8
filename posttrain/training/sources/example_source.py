"""Common parts of the sources of given rows: the rows of a step, and their record."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Generic

from posttrain.core.batch import Batch, Stats, TrainingStep
from posttrain.training.sources.example_recording import ExampleRecording
from posttrain.training.sources.example_stream import ExampleStream, X, examples_of_step, progress


class ExampleSource(Generic[X]):
    """Source of `rows` examples a step, one optimizer update each: see `posttrain.core.protocols.Source` and
    `examples_of_step`. It has no state: a step depends on its number alone.
    """

    items: ExampleStream[X]
    rows: int
    seed: int
    recording: ExampleRecording | None  # None: no row is recorded

    @abstractmethod
    def update(self, places: Sequence[int], items: Sequence[X]) -> list[Batch]:
        """Return the micro-batches of a step's examples, which are at these places."""

    def produce(self, number: int) -> TrainingStep:
        self.items.too_long.take()
        found, stats = examples_of_step(self.items, self.rows, self.seed, number), Stats()
        progress(self.items, self.rows, number, stats)
        places, items = [place for place, _ in found], [item for _, item in found]
        shown = self.recording.choose(self.items, self.rows, number, found) if self.recording else []
        tokens = sum(t.n_scored for item in items for t in self.items.transcripts(item))
        return TrainingStep(number, [lambda: self.update(places, items)], stats, tokens, outcomes=shown)

    def learned(self, step: TrainingStep, stats: Stats) -> None:
        if self.recording is not None:
            self.recording.settle(step)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass
