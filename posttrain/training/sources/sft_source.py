"""Source of supervised fine-tuning: demonstrations become transcripts, then micro-batches.

N    scored tokens of a micro-batch: the tokens to imitate
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posttrain.algorithms.token_weights import TokenWeight, weighed_likelihood
from posttrain.core.batch import Batch, Outputs, Stats
from posttrain.core.protocols import Objective, Source
from posttrain.core.transcripts import Mask, Transcript
from posttrain.core.types import Task, UserError
from posttrain.data.tasks_from_rows import is_script
from posttrain.envs.demonstration import demonstrate, is_empty, last_alone, learned_of
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.sources.demonstrations import Enact, cut, stored
from posttrain.training.sources.example_recording import ExampleRecording
from posttrain.training.sources.example_source import ExampleSource
from posttrain.training.sources.example_stream import ExampleStream
from posttrain.training.sources.length_filter import Placed, TooLong
from posttrain.training.sources.packing import collate, split_microbatches


@dataclass(frozen=True)
class LikelihoodObjective:
    """Negative log-likelihood of the scored tokens, each with weight 1 / tokens of the optimizer batch.

    `weight`: a further weight of each token, a function of its probability.
    """

    weight: TokenWeight = "equal"

    @property
    def wants(self) -> frozenset[str]:
        return frozenset()

    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        nll = -outputs.logp
        stats.add("nll", nll.detach().sum().item(), nll.numel())
        return -(batch.weight * weighed_likelihood(outputs.logp, self.weight)).sum()


def _answered(task: Task) -> bool:
    return "messages" in task and bool(task["messages"][-1]["role"] == "assistant")


class Transcripts(ExampleStream[Sequence[Transcript]]):
    """Demonstrations as transcripts: one each, or one for each context of an episode."""

    noun = "demonstration"

    def __init__(
        self,
        tasks: Placed,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int],
        vocab: int,
        too_long: TooLong,
        mask: Mask = "assistant",
        enact: Enact | None = None,
        min_reward: float | None = None,
    ) -> None:
        """`enact`: runs the episodes of rows with replies; episodes with a reward below `min_reward` are left out."""
        self.mask, self.enact, self.min_reward = mask, enact, min_reward
        self._noticed = False
        self._judged: dict[bool, set[int]] = {True: set(), False: set()}  # whether kept -> hashes of the rows
        super().__init__(tasks, tokenizer, eos_ids, vocab, too_long)

    def make(self, task: Task, length: int | None) -> Sequence[Transcript] | None:
        played: Sequence[tuple[list[Transcript], float | None]]
        if "transcripts" in task and task.get("replayed"):
            return None  # also recorded in the step that sampled it
        if "transcripts" in task:
            played = [stored(task, self.tokenizer)]
        elif not is_script(task) or (self.enact is None and ("response" in task or _answered(task))):
            if self.min_reward is not None:
                raise UserError(
                    "--min-reward needs recorded rollouts or rows with replies, and this row is neither: leave it out"
                )
            return [demonstrate(task, self.tokenizer, self.eos_ids, self.mask, length)]
        elif self.enact is None:
            raise UserError("the row has replies: give the environment in which they run with --env my.py:environment")
        else:
            played = self.enact(task)
        least = self.min_reward
        if least is None:
            kept = [own for own, _ in played]
        else:
            kept = [own for own, reward in played if reward is not None and reward >= least]
            self._judged[bool(kept)].add(hash(str(task.get("id", task))))
        if not kept:
            return None
        transcripts = [transcript for own in kept for transcript in own]
        return cut([last_alone(t) for t in transcripts] if self.mask == "last" else transcripts, length)

    def notice(self, place: int, task: Task) -> None:
        """Report once that a reply of a row is empty, so that its end is all that is learned."""
        if self._noticed or "messages" not in task or "transcripts" in task or is_script(task):
            return
        learned = learned_of(task["messages"], self.mask)
        empty = [number for number, own in enumerate(learned, 1) if own and is_empty(task["messages"][number - 1])]
        if empty:
            self._noticed = True
            self.too_long.say(
                f"{self.tasks.where(place)}: column messages: message {empty[0]} is an empty reply, which trains the model "
                'to end its reply at once: leave it out, or give it "train": false; further rows are not listed'
            )

    @property
    def kept(self) -> str:
        """Number of read episodes that have the required reward, in words; "" if no reward is required."""
        if self.min_reward is None:
            return ""
        kept, left = (len(self._judged[way]) for way in (True, False))
        return f"--min-reward {self.min_reward:g}: {kept:,} of {kept + left:,} episodes kept"

    def transcripts(self, made: Sequence[Transcript]) -> Sequence[Transcript]:
        return made


@dataclass(frozen=True)
class Demonstrations(ExampleSource[Sequence[Transcript]]):
    """Source of demonstrations."""

    items: Transcripts
    rows: int
    tokens_per_microbatch: int
    seed: int
    device: torch.device
    recording: ExampleRecording | None = None

    def update(self, places: Sequence[int], items: Sequence[Sequence[Transcript]]) -> list[Batch]:
        return self.batches(items, self.recording)

    def batches(
        self, demonstrations: Sequence[Sequence[Transcript]], recording: ExampleRecording | None = None
    ) -> list[Batch]:
        """Return micro-batches of these rows; every scored token has weight 1 / (scored tokens of all rows).

        `recording`: records some of them.
        """
        order = sorted(range(len(demonstrations)), key=lambda i: sum(map(len, demonstrations[i])))
        rows = [demonstrations[i] for i in order]
        share = torch.full((len(rows),), 1 / sum(t.n_scored for row in rows for t in row))
        sink = recording.sink(order) if recording is not None else None
        return [
            collate([rows[i] for i in index], index, weight=share, device=self.device, sink=sink)
            for index in split_microbatches(rows, self.tokens_per_microbatch)
        ]


if TYPE_CHECKING:
    _proof: Callable[..., Source] = Demonstrations
    _objective: Callable[..., Objective] = LikelihoodObjective
