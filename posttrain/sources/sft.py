"""The source of supervised fine-tuning: demonstrations become transcripts, transcripts become micro-batches.

N    scored tokens of a micro-batch: the tokens to imitate
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.batch import Batch, Outputs, Stats, Step
from posttrain.data.tasks import order
from posttrain.models.tokenizer import Tokenizer
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
    task: Task, tokenizer: Tokenizer, eos_ids: Sequence[int], context: int, mask_prompt: bool = True
) -> Transcript:
    """The transcript of a demonstration: `prompt` and `response`, or chat `messages` whose assistant turns are imitated.

    Prompt and response are tokenised apart, as they are when the response is sampled. A response ends with the
    end-of-sequence token, which is part of what is imitated. Raises UserError if nothing is left to imitate or if the
    row is longer than the context: rows are never cut silently.
    """
    transcript = Transcript()
    if "messages" in task:
        before = ""
        for i, message in enumerate(task["messages"]):
            if message["role"] != "assistant":
                continue
            shown = tokenizer.render(task["messages"][:i], generation=True)
            whole = tokenizer.render(task["messages"][: i + 1], generation=False)
            if not (shown.startswith(before) and whole.startswith(shown)):
                raise UserError(
                    f"row {task['id']!r}: this chat template rewrites earlier messages, so the reply's tokens are not known"
                )
            transcript.observe(tokenizer.encode(shown[len(before) :], start=not before))
            reply = tokenizer.encode(whole[len(shown) :])
            ends = [i for i, token in enumerate(reply) if token in eos_ids]
            end = ends[-1] + 1 if ends else len(reply)  # what the template puts after the end of a turn is not sampled
            transcript.imitate(reply[:end] if ends else [*reply, eos_ids[0]])
            transcript.observe(reply[end:])
            before = whole
    else:
        transcript.observe(tokenizer.encode(task["prompt"], start=True))
        transcript.imitate([*tokenizer.encode(task["response"]), eos_ids[0]])
    if not mask_prompt:
        whole_text, transcript = transcript, Transcript()
        transcript.observe(whole_text.tokens[:1])
        transcript.imitate(whole_text.tokens[1:])
    if not transcript.n_scored or transcript.spans[0].learned:
        raise UserError(f"row {task['id']!r} has nothing to learn: no reply after a prompt of at least one token")
    if len(transcript) > context:
        raise UserError(
            f"row {task['id']!r} has {len(transcript)} tokens, the model's context holds {context}: "
            "shorten it, leave it out, or give the model a longer context"
        )
    return transcript


@dataclass(frozen=True)
class Demonstrations:
    """See `posttrain.types.Source`: `rows` demonstrations a step, in a new order each epoch, the last step of it short."""

    transcripts: Sequence[Transcript]
    rows: int
    tokens_per_microbatch: int
    seed: int
    device: torch.device

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.transcripts) // self.rows)

    def produce(self, number: int) -> Step:
        epoch, part = divmod(number - 1, self.steps_per_epoch)
        permutation = order(len(self.transcripts), epoch, self.seed)
        chosen = permutation[part * self.rows : (part + 1) * self.rows]
        stats = Stats()
        stats.add("epoch", epoch + (part + 1) / self.steps_per_epoch)
        rows = [self.transcripts[i] for i in chosen]
        return Step(number, [lambda: self.batches(rows)], stats, sum(t.n_scored for t in rows))

    def batches(self, transcripts: Sequence[Transcript]) -> list[Batch]:
        """Micro-batches of these rows, every scored token weighing 1 / (scored tokens of all of them)."""
        rows = [[t] for t in sorted(transcripts, key=len)]
        share = torch.full((len(rows),), 1 / sum(t.n_scored for t in transcripts))
        return [
            collate([rows[i] for i in index], index, weight=share, device=self.device)
            for index in split_microbatches(rows, self.tokens_per_microbatch)
        ]

    def learned(self, step: Step, stats: Stats) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass
