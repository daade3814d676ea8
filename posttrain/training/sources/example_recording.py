"""Records some given rows, demonstrations or preference examples, with the values of their tokens.

No rollouts are sampled, so the record has a sample of the rows, as many as `TokenRecording` takes groups of a step of
RL.

n_i    scored tokens of a row: of all its transcripts
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from posttrain.core.batch import TrainingStep
from posttrain.core.protocols import Learner
from posttrain.core.rollouts import Outcome, PlayedTurn, PreferenceExample, Rollout
from posttrain.core.token_probe import SCORE, TokenSink
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Task
from posttrain.data.tasks import ENDLESS
from posttrain.envs.play.episode import last_asked
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.sources.example_stream import ExampleStream, X, steps_per_epoch
from posttrain.training.sources.model_outputs import evaluate_rollouts
from posttrain.training.sources.packing import Read, readings
from posttrain.training.sources.token_recording import TokenRecording, on_cpu

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

EVERY = 10
"""Rows are sampled at steps 1, 11, 21 ..., since passes over rows have many short steps."""


@dataclass
class _Row:
    """A recorded row: one rollout with all its transcripts, or one for each response."""

    outcomes: list[Outcome]

    def give(self, name: str, values: NDArray[Any]) -> None:
        """Assign values [n_i] to the tokens of the rollouts."""
        first = 0
        for outcome in self.outcomes:
            last = first + outcome.rollout.n_scored
            outcome.numbers[name] = values[first:last]
            first = last
        assert first == len(values)

    def judge(self, values: NDArray[Any], read: Read) -> None:
        """Set scores [readings], before any offset, as the rewards of responses; scores of steps as step rewards at
        their ends.

        If two responses were compared, the better one also gets the difference of their scores.
        """
        rollouts = [outcome.rollout for outcome in self.outcomes]
        ends = accumulate((readings(rollout.transcripts[0], read) for rollout in rollouts), initial=0)
        own = [values[first:last].astype(float) for first, last in pairwise(ends)]
        assert sum(map(len, own)) == len(values)
        if read == "last" and max(map(len, own)) > 1:
            for rollout, steps in zip(rollouts, own, strict=True):
                lengths = (span.length for span in rollout.transcripts[0].spans if span.learned)
                rollout.steps = list(zip(accumulate(lengths), steps.tolist(), strict=True))
            return
        scores = [float(each.mean()) for each in own]
        for rollout, score in zip(rollouts, scores, strict=True):
            rollout.reward = score
        match (self.outcomes[0].label or {}).get("comparisons"):
            case [[better, worse, *_]]:
                rollouts[better].rewards = {"margin": scores[better] - scores[worse]}


@dataclass
class ExampleRecording:
    """Records some rows of each step, with the values that its update computes for them."""

    recording: TokenRecording
    learner: Learner
    tokens_per_microbatch: int
    read: Read = "next"  # otherwise responses are scored, without log-probabilities
    _rows: dict[int, _Row] = field(default_factory=dict)  # place in the step -> row
    _sink: TokenSink = field(default_factory=TokenSink)
    _places: dict[int, int] = field(default_factory=dict)  # place in [S] -> in the step

    def choose(self, made: ExampleStream[X], rows: int, number: int, found: Sequence[tuple[int, X]]) -> list[Outcome]:
        """Choose the rows of a step to record, and return their outcomes. `found`: (place of the row, example)."""
        self._rows = {}
        if self.recording.level != "full" and number % EVERY != 1:
            return []
        level = TokenRecording("full" if self.recording.level == "full" else "sample", seed=self.recording.seed)
        drawn = level.chosen(number, (str(place) for place, _ in found))
        epoch = (number - 1) // steps_per_epoch(made, rows)
        self._rows = {
            i: _Row(_outcomes(task_of(made, place), epoch, one, made.tokenizer))
            for i, (place, one) in enumerate(found)
            if str(place) in drawn
        }
        return [outcome for row in self._rows.values() for outcome in row.outcomes]

    def sink(self, order: Sequence[int]) -> TokenSink | None:
        """Return the sink for the values of these rows; None if nothing is recorded.

        `order[i]`: place of row i in the step.
        """
        if self.recording.level == "tokens" and self.read == "next":
            return None
        self._places = {i: place for i, place in enumerate(order) if place in self._rows}
        self._sink = TokenSink(frozenset(self._places))
        return self._sink

    def note(self, name: str, values: Mapping[int, Tensor]) -> None:
        """Record a column known before the update. `values`: place in the step -> [n_i]."""
        mine = [place for place in values if place in self._rows] if self.recording.level != "tokens" else []
        for place, own in zip(mine, on_cpu([values[place] for place in mine]), strict=True):
            self._rows[place].give(name, own)

    def settle(self, step: TrainingStep) -> None:
        """Complete the outcomes of a step after its update."""
        for i, columns in self._sink.settle().items():
            row = self._rows[self._places[i]]
            for name, values in columns.items():
                if name == SCORE:
                    row.judge(values, self.read)
                else:
                    row.give(name, values)
        if self.recording.after and self._rows and self._places:
            rows = list(self._rows.values())
            rollouts = [Rollout({}, "", _transcripts(row), 0.0) for row in rows]
            after = evaluate_rollouts(self.learner, rollouts, self.tokens_per_microbatch)["logp"]
            for row, values in zip(rows, on_cpu(after), strict=True):
                row.give("after", values)
        skipped = self._sink.skipped
        self._rows, self._places, self._sink = {}, {}, TokenSink()
        if skipped:
            for outcome in step.outcomes:
                outcome.numbers.pop("weight", None)  # the update was skipped, so the weight moved nothing


def task_of(made: ExampleStream[Any], place: int) -> Task:
    """Return the task at a place. Rows without end are not read twice: their tasks have only the place as id."""
    return made.tasks[place] if len(made) < ENDLESS else {"id": str(place)}


def _transcripts(row: _Row) -> list[Transcript]:
    return [transcript for outcome in row.outcomes for transcript in outcome.rollout.transcripts]


def _outcomes(task: Task, epoch: int, made: Any, tokenizer: Tokenizer) -> list[Outcome]:
    """Return the outcomes of a row: one for a demonstration; for a preference example one per response, with its
    labels.
    """
    group = f"{task['id']}#{epoch}"
    if not isinstance(made, PreferenceExample):
        return [Outcome(_rollout(task, group, list(made), tokenizer))]
    said = [[c.better, c.worse, c.share, c.margin] for c in made.comparisons]
    return [
        Outcome(
            _rollout(task, group, [transcript], tokenizer),
            member=k,
            label={
                "comparisons": [own for own in said if k in own[:2]],
                "labels": list(made.labels[k]) if made.labels else [],
            },
        )
        for k, transcript in enumerate(made.responses)
    ]


def _rollout(task: Task, group: str, transcripts: list[Transcript], tokenizer: Tokenizer) -> Rollout:
    """Return a rollout without a score, for readers of the record."""
    turns = [
        PlayedTurn(
            span.kind,
            tokenizer.decode(transcript.tokens[span.start : span.start + span.length]),
            number,
            span.start,
            span.length,
        )
        for number, transcript in enumerate(transcripts)
        for span in transcript.spans
    ]
    learned = [span.learned for transcript in transcripts for span in transcript.spans]
    text = "".join(turn.text for turn, own in zip(turns, learned, strict=True) if own)
    prompt = "" if learned[0] else turns[0].text
    asked = last_asked(task.get("messages") or ())
    return Rollout(task, group, transcripts, math.nan, turns=turns, text=text, prompt=prompt, asked=asked)
