"""The source of supervised fine-tuning: demonstrations become transcripts, transcripts become micro-batches.

N    scored tokens of a micro-batch: the tokens to imitate
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from posttrain.core.batch import Batch, Outputs, Stats, TrainingStep
from posttrain.core.pictures import digests
from posttrain.core.protocols import Objective, Source
from posttrain.core.types import Media, Task, ToolCall, Transcript, UserError
from posttrain.data.preference_examples import CUT
from posttrain.data.tasks_from_rows import is_script
from posttrain.envs.play.env_outputs import read_schema
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.sources.demonstrations import Enact, cut, stored
from posttrain.training.sources.example_recording import ExampleRecording
from posttrain.training.sources.example_stream import ExampleStream, Memoryless, progress, steps_per_epoch, visited
from posttrain.training.sources.length_filter import Placed, TooLong
from posttrain.training.sources.packing import collate, split_microbatches


class LikelihoodObjective:
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
        last = max(place for place, piece in enumerate(pieces) if piece.imitated)
        pieces = [*pieces[:last], _Piece(pieces[last].tokens[:-1], True)]
    if not mask_prompt:
        pieces = list(_all_imitated(pieces))
    transcript = Transcript()
    for piece in pieces:
        before = len(transcript)
        kept = piece.tokens if length is None else piece.tokens[: length - before]
        if piece.imitated:
            transcript.imitate(kept)
        else:
            whole = [m for m in piece.media if m.start + m.length <= len(kept)]
            transcript.observe(kept, media=[replace(m, start=m.start + before) for m in whole])
    if not transcript.n_scored or transcript.spans[0].learned:
        raise UserError("nothing to learn: no reply after a prompt of at least one token")
    return transcript


class _Piece(NamedTuple):
    """A run of tokens."""

    tokens: list[int]
    imitated: bool
    media: Sequence[Media] = ()  # in it, counted from its first token


def _shown(tokenizer: Tokenizer, text: str, messages: Sequence[Mapping[str, Any]], start: bool = False) -> _Piece:
    """What a template made of messages."""
    if not (pictures := digests(messages)):
        return _Piece(tokenizer.encode(text, start=start), False)
    tokens, media = tokenizer.encode_seen(text, pictures, start)
    return _Piece(tokens, False, media)


def _all_imitated(pieces: Sequence[_Piece]) -> Iterator[_Piece]:
    """Every token but the first and those that stand for pictures."""
    first = True
    for piece in pieces:
        done = int(first)
        if done:
            yield _Piece(piece.tokens[:1], False, [m for m in piece.media if m.start == 0 and m.length == 1])
        for m in piece.media:
            if m.start >= done:
                yield _Piece(piece.tokens[done : m.start], True)
                yield _Piece(piece.tokens[m.start : m.start + m.length], False, [replace(m, start=0)])
                done = m.start + m.length
        yield _Piece(piece.tokens[done:], True)
        first = first and not piece.tokens


def _pieces(task: Task, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> Iterator[_Piece]:
    """Runs of tokens in order, and whether they are imitated."""
    if "messages" not in task:
        yield _Piece(tokenizer.encode(task.get("prompt", ""), start=True), False)
        yield _Piece([*tokenizer.encode(task["response"]), eos_ids[0]], True)
        return
    said = -1  # place of the assistant's last message
    reply: list[int] = []
    tools = None if task.get("tools") is None else [read_schema(tool) for tool in task["tools"]]
    for i, message in enumerate(task["messages"]):
        if message["role"] != "assistant":
            continue
        shown = tokenizer.render(task["messages"][:i], True, tools)
        whole = tokenizer.render(task["messages"][: i + 1], False, tools)
        if not whole.startswith(shown):
            raise UserError("this chat template rewrites what opens a reply, so the reply's tokens are not known")
        if said < 0:
            yield _shown(tokenizer, shown, task["messages"][:i], start=True)
        else:  # as a policy would see it: behind what it said stands what it said, however the template shows it later
            before, new = task["messages"][:said], task["messages"][said + 1 : i]
            calls = _calls(task["messages"][said])
            after, _, media = _shown(tokenizer, tokenizer.render_after(before, new, calls, tools).text, new)
            ended = next((n for n in range(min(len(after), len(reply)), 0, -1) if reply[-n:] == after[:n]), 0)
            yield _Piece(after[ended:], False, [replace(m, start=m.start - ended) for m in media])
        reply = tokenizer.encode(whole[len(shown) :])
        ends = [place for place, token in enumerate(reply) if token in eos_ids]
        content = "" if message.get("tool_calls") else str(message["content"]).strip()
        closing = whole[len(shown) :].rpartition(content)[2] if content else ""
        behind = sum(token in eos_ids for token in tokenizer.encode(closing))  # several: a policy ends with the first
        end = ends[-max(behind, 1)] + 1 if ends else len(reply)  # what the template puts after it is not sampled
        said, reply = i, reply[:end]
        yield _Piece(reply if ends else [*reply, eos_ids[0]], True)


def _calls(message: Mapping[str, Any]) -> list[ToolCall]:
    """The calls of a message in OpenAI's form. Raises UserError."""
    found: list[ToolCall] = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UserError('a tool call is not {"type": "function", "function": {"name": ..., "arguments": ...}}')
        found.append(ToolCall(function["name"], {}, id=str(call.get("id") or f"call{len(found):05d}")))
    return found


def _answered(task: Task) -> bool:
    return "messages" in task and bool(task["messages"][-1]["role"] == "assistant")


class Transcripts(ExampleStream[Sequence[Transcript]]):
    """Demonstrations as transcripts: one, or those of an episode's contexts."""

    noun = "demonstration"

    def __init__(
        self,
        tasks: Placed,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int],
        vocab: int,
        too_long: TooLong,
        mask_prompt: bool = True,
        enact: Enact | None = None,
        min_reward: float | None = None,
    ) -> None:
        """`enact`: who plays rows that hold the replies of an episode; episodes of less than `min_reward` are left out."""
        self.mask_prompt, self.enact, self.min_reward = mask_prompt, enact, min_reward
        self._judged: dict[bool, set[int]] = {True: set(), False: set()}  # by whether it is kept: rows
        super().__init__(tasks, tokenizer, eos_ids, vocab, too_long)

    def make(self, task: Task, length: int | None) -> Sequence[Transcript] | None:
        played: Sequence[tuple[list[Transcript], float | None]]
        if "transcripts" in task and task.get("replayed"):
            return None  # it stands in the step that played it, too
        if "transcripts" in task:
            played = [stored(task, self.tokenizer)]
        elif not is_script(task) or (self.enact is None and ("response" in task or _answered(task))):
            if self.min_reward is not None:
                raise UserError(
                    "--min-reward is of rollouts that a run kept and of rows with replies: this row is neither"
                )
            return [demonstrate(task, self.tokenizer, self.eos_ids, self.mask_prompt, length)]
        elif self.enact is None:
            raise UserError("the row has replies: name the environment that they answer with --env my.py:environment")
        else:
            played = self.enact(task)
        least = self.min_reward
        if least is None:
            kept = [own for own, _ in played]
        else:
            kept = [own for own, reward in played if reward is not None and reward >= least]
            self._judged[bool(kept)].add(hash(str(task.get("id", task))))
        return cut([transcript for own in kept for transcript in own], length) if kept else None

    @property
    def kept(self) -> str:
        """How many of the episodes that were looked at have the reward that is asked for, in words; "": none is."""
        if self.min_reward is None:
            return ""
        kept, left = (len(self._judged[way]) for way in (True, False))
        return f"--min-reward {self.min_reward:g}: {kept:,} of {kept + left:,} episodes kept"

    def transcripts(self, made: Sequence[Transcript]) -> Sequence[Transcript]:
        return made


@dataclass(frozen=True)
class Demonstrations(Memoryless):
    """See `posttrain.core.protocols.Source`: `rows` demonstrations a step, see `made.visited`."""

    transcripts: Transcripts
    rows: int
    tokens_per_microbatch: int
    seed: int
    device: torch.device
    showing: ExampleRecording | None = None  # None: none of the rows is recorded

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(self.transcripts, self.rows)

    def produce(self, number: int) -> TrainingStep:
        self.transcripts.too_long.take()
        found = visited(self.transcripts, self.rows, self.seed, number)
        rows, stats = [transcripts for _, transcripts in found], Stats()
        progress(self.transcripts, self.rows, number, stats)
        shown = self.showing.choose(self.transcripts, self.rows, number, found) if self.showing else []
        tokens = sum(t.n_scored for row in rows for t in row)
        return TrainingStep(number, [lambda: self.batches(rows, self.showing)], stats, tokens, outcomes=shown)

    def learned(self, step: TrainingStep, stats: Stats) -> None:
        if self.showing is not None:
            self.showing.settle(step)

    def batches(
        self, demonstrations: Sequence[Sequence[Transcript]], showing: ExampleRecording | None = None
    ) -> list[Batch]:
        """Micro-batches of these rows, every scored token weighing 1 / (scored tokens of all of them).

        `showing`: who records some of them.
        """
        order = sorted(range(len(demonstrations)), key=lambda i: sum(map(len, demonstrations[i])))
        rows = [demonstrations[i] for i in order]
        share = torch.full((len(rows),), 1 / sum(t.n_scored for row in rows for t in row))
        sink = showing.sink(order) if showing is not None else None
        return [
            collate([rows[i] for i in index], index, weight=share, device=self.device, sink=sink)
            for index in split_microbatches(rows, self.tokens_per_microbatch)
        ]


if TYPE_CHECKING:
    _proof: Callable[..., Source] = Demonstrations
    _objective: Callable[..., Objective] = LikelihoodObjective
