"""The source of supervised fine-tuning: demonstrations become transcripts, transcripts become micro-batches.

N    scored tokens of a micro-batch: the tokens to imitate
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posttrain.batch import Batch, Outputs, Stats, Step
from posttrain.data.items import CUT
from posttrain.models.tokenizer import Tokenizer
from posttrain.protocols import Objective, Source
from posttrain.sources.lengths import Placed, TooLong
from posttrain.sources.made import Made, Memoryless, progress, steps_per_epoch, visited
from posttrain.sources.packing import collate, split_microbatches
from posttrain.types import Task, Transcript, UserError


class Likelihood:
    """Negative log-likelihood of the scored tokens, each weighing 1 / tokens of the optimizer batch."""

    wants: frozenset[str] = frozenset()

    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        nll = -outputs.logp
        stats.add("nll", nll.detach().sum().item(), nll.numel())
        return (batch.weight * nll).sum()


def demonstrate(
    task: Task, tokenizer: Tokenizer, eos_ids: Sequence[int], mask_prompt: bool = True, length: int | None = None
) -> Transcript:
    """The transcript of a demonstration: `prompt` and `response`, or chat `messages` whose assistant turns are imitated.

    Prompt and response are tokenised apart, as they are when the response is sampled. A response ends with the
    end-of-sequence token, which is part of what is imitated, unless "response_stop" says that it was cut off. `length`: the
    first so many tokens only. Raises UserError if nothing is left to imitate.
    """
    pieces = list(_pieces(task, tokenizer, eos_ids))
    if task.get("response_stop") in CUT:
        last = max(place for place, (_, imitated) in enumerate(pieces) if imitated)
        pieces = [*pieces[:last], (pieces[last][0][:-1], True)]
    if not mask_prompt:
        tokens = [token for piece, _ in pieces for token in piece]
        pieces = [(tokens[:1], False), (tokens[1:], True)]
    transcript = Transcript()
    for tokens, imitated in pieces:
        kept = tokens if length is None else tokens[: length - len(transcript)]
        (transcript.imitate if imitated else transcript.observe)(kept)
    if not transcript.n_scored or transcript.spans[0].learned:
        raise UserError("nothing to learn: no reply after a prompt of at least one token")
    return transcript


def _pieces(task: Task, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> Iterator[tuple[list[int], bool]]:
    """Runs of tokens in order, and whether they are imitated."""
    if "messages" not in task:
        yield tokenizer.encode(task.get("prompt", ""), start=True), False
        yield [*tokenizer.encode(task["response"]), eos_ids[0]], True
        return
    said = -1  # place of the assistant's last message
    reply: list[int] = []
    for i, message in enumerate(task["messages"]):
        if message["role"] != "assistant":
            continue
        shown = tokenizer.render(task["messages"][:i], generation=True)
        whole = tokenizer.render(task["messages"][: i + 1], generation=False)
        if not whole.startswith(shown):
            raise UserError("this chat template rewrites what opens a reply, so the reply's tokens are not known")
        if said < 0:
            yield tokenizer.encode(shown, start=True), False
        else:  # as a policy would see it: behind what it said stands what it said, however the template shows it later
            before, new = task["messages"][:said], task["messages"][said + 1 : i]
            after = tokenizer.encode(tokenizer.render_after(before, new).text)
            ended = next((n for n in range(min(len(after), len(reply)), 0, -1) if reply[-n:] == after[:n]), 0)
            yield after[ended:], False
        reply = tokenizer.encode(whole[len(shown) :])
        ends = [place for place, token in enumerate(reply) if token in eos_ids]
        content = str(message["content"]).strip()
        closing = whole[len(shown) :].rpartition(content)[2] if content else ""
        behind = sum(token in eos_ids for token in tokenizer.encode(closing))  # several: a policy ends with the first
        end = ends[-max(behind, 1)] + 1 if ends else len(reply)  # what the template puts after it is not sampled
        said, reply = i, reply[:end]
        yield reply if ends else [*reply, eos_ids[0]], True


class Transcripts(Made[Transcript]):
    """Demonstrations as transcripts."""

    noun = "demonstration"

    def __init__(
        self,
        tasks: Placed,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int],
        vocab: int,
        too_long: TooLong,
        mask_prompt: bool = True,
    ) -> None:
        self.mask_prompt = mask_prompt
        super().__init__(tasks, tokenizer, eos_ids, vocab, too_long)

    def make(self, task: Task, length: int | None) -> Transcript:
        return demonstrate(task, self.tokenizer, self.eos_ids, self.mask_prompt, length)

    def transcripts(self, made: Transcript) -> Sequence[Transcript]:
        return [made]


@dataclass(frozen=True)
class Demonstrations(Memoryless):
    """See `posttrain.protocols.Source`: `rows` demonstrations a step, see `made.visited`."""

    transcripts: Transcripts
    rows: int
    tokens_per_microbatch: int
    seed: int
    device: torch.device

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(self.transcripts, self.rows)

    def produce(self, number: int) -> Step:
        self.transcripts.too_long.take()
        rows = [transcript for _, transcript in visited(self.transcripts, self.rows, self.seed, number)]
        stats = Stats()
        progress(self.transcripts, self.rows, number, stats)
        return Step(number, [lambda: self.batches(rows)], stats, sum(t.n_scored for t in rows))

    def batches(self, transcripts: Sequence[Transcript]) -> list[Batch]:
        """Micro-batches of these rows, every scored token weighing 1 / (scored tokens of all of them)."""
        rows = [[t] for t in sorted(transcripts, key=len)]
        share = torch.full((len(rows),), 1 / sum(t.n_scored for t in transcripts))
        return [
            collate([rows[i] for i in index], index, weight=share, device=self.device)
            for index in split_microbatches(rows, self.tokens_per_microbatch)
        ]


if TYPE_CHECKING:
    _proof: Callable[..., Source] = Demonstrations
    _objective: Callable[..., Objective] = Likelihood
