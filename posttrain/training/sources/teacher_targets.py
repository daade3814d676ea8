"""The teacher of each rollout, the context that it reads, and its log-probabilities of the sampled tokens.

n_i    scored tokens of rollout i
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from posttrain.core.batch import Stats
from posttrain.core.conversation import Conversation, TextEncoder, encoder_of
from posttrain.core.protocols import Learner
from posttrain.core.rollouts import Rollout
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Task, Turn, UserError
from posttrain.training.sources.model_outputs import by_rollout, evaluate_rollouts, pack_microbatches
from posttrain.training.sources.packing import Taught, needed_length

UNREADABLE = "longer than its teacher's context"
ALWAYS_1 = "gives log-probabilities at temperature 1: give --teacher-temperature 1"
"""Reason for a refused remote teacher."""
TEACHER, NAMED = "teacher", "teacher:{}"
"""Names in the learner: the teacher of all tasks, and a teacher that tasks choose by its name."""


class TopTokens(NamedTuple):
    """The k likeliest tokens of a teacher at each scored token, and the scored token itself."""

    ids: Tensor  # int64 [n, k + 1], different in each row; -1 at the end where the scored token is among the k
    logp: Tensor  # float32 [n, k + 1], of `ids` under the teacher
    sampled: Tensor  # float32 [n], of the scored tokens


class RemoteTeacherClient(Protocol):
    """Client of a remote teacher, which returns only log-probabilities."""

    def logp(self, transcripts: Sequence[Transcript]) -> list[Tensor]:
        """Return one log-probability for each scored token of each transcript, float32."""
        ...

    def top(self, transcripts: Sequence[Transcript], count: int) -> list[TopTokens]:
        """Return the `count` likeliest tokens at each scored token of each transcript."""
        ...


@dataclass(frozen=True)
class Teachers:
    """The teachers of a run. A task may choose a teacher ("teacher"), and another prompt for it ("teacher_prompt")."""

    tokenizer: TextEncoder
    contexts: Mapping[str, int]  # name in the learner -> context length in tokens
    remote: Mapping[str, RemoteTeacherClient] = field(default_factory=dict)  # name -> remote teacher
    choose: bool = False  # whether tasks choose their teachers

    def name(self, task: Task) -> str:
        """Return the name of this task's teacher in the learner or in `remote`. Raises UserError if there is none."""
        chosen = task.get("teacher") if self.choose else None
        known = [*self.contexts, *self.remote]
        name = TEACHER if chosen is None else NAMED.format(chosen)
        if name not in known:
            named = ", ".join(n.partition(":")[2] for n in known if n != TEACHER)
            said = (
                f"chooses the teacher {chosen!r}"
                if chosen is not None
                else 'has no "teacher", and there is no --teacher'
            )
            raise UserError(f"task {task.get('id')!r} {said}: --teachers names {named}")
        return name

    def prompt(self, task: Task) -> list[int] | None:
        """Return the tokens that the teacher reads in place of a task's prompt; None: the prompt itself.

        Raises UserError if "teacher_prompt" is neither text nor a list of messages.
        """
        told: Any = task.get("teacher_prompt")
        if told is None:
            return None
        if isinstance(told, str):
            turn = Turn(text=told)
        elif isinstance(told, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in told):
            turn = Turn(messages=told)
        else:
            raise UserError(f'task {task.get("id")!r}: "teacher_prompt" must be text or a list of messages')
        return Conversation(encoder_of(self.tokenizer, task)).show(turn, None)

    def taught(self, rollouts: Sequence[Rollout]) -> list[Taught]:
        """Return each rollout as its teacher reads it."""
        return [self._taught(rollout) for rollout in rollouts]

    def _taught(self, rollout: Rollout) -> Taught:
        first, *others = rollout.transcripts
        prompt = self.prompt(rollout.task)
        read = first if prompt is None else first.with_prompt(prompt)
        return Taught(self.name(rollout.task), [read, *others])

    def readable(self, rollouts: Sequence[Rollout], stats: Stats) -> tuple[list[Rollout], list[Rollout]]:
        """Return the rollouts that fit their teachers' contexts, and the others, which are counted."""
        kept, others = list[Rollout](), list[Rollout]()
        for rollout, taught in zip(rollouts, self.taught(rollouts), strict=True):
            context = self.contexts.get(taught.by)
            scored = (t for t in taught.transcripts if t.n_scored)
            fits = context is None or all(needed_length(t) <= context for t in scored)
            (kept if fits else others).append(rollout)
        stats.add("teacher/too_long", len(others), len(rollouts))
        return kept, others

    def logp(self, learner: Learner, rollouts: Sequence[Rollout], tokens_per_microbatch: int) -> list[Tensor]:
        """Return log-probabilities of the scored tokens under each rollout's teacher, [n_i] each."""
        taught = self.taught(rollouts)
        found: list[Tensor] = [torch.zeros(0)] * len(rollouts)
        for name in dict.fromkeys(t.by for t in taught):
            own = [i for i, t in enumerate(taught) if t.by == name]
            read = [taught[i].transcripts for i in own]
            if name in self.remote:
                said = iter(self.remote[name].logp([t for transcripts in read for t in transcripts]))
                values = [torch.cat([next(said) for _ in transcripts]).to(learner.device) for transcripts in read]
            else:
                packed = pack_microbatches(read, tokens_per_microbatch, learner.device)
                outputs = learner.evaluate(packed, of=name)
                pairs = [(p.rollout, o.logp) for p, o in zip(packed, outputs, strict=True)]
                values = by_rollout(pairs, len(own))
            for place, value in zip(own, values, strict=True):
                found[place] = value
        return found

    def top(self, rollouts: Sequence[Rollout], count: int, device: torch.device) -> list[TopTokens]:
        """Return the `count` likeliest tokens of each rollout's teacher, which is a remote one."""
        taught = self.taught(rollouts)
        found: dict[int, TopTokens] = {}
        for name in dict.fromkeys(t.by for t in taught):
            own = [i for i, t in enumerate(taught) if t.by == name]
            said = iter(self.remote[name].top([t for i in own for t in taught[i].transcripts], count))
            for i in own:
                parts = [next(said) for _ in taught[i].transcripts]
                found[i] = TopTokens(*(torch.cat(column).to(device) for column in zip(*parts, strict=True)))
        return [found[i] for i in range(len(taught))]

    def measure(self, learner: Learner, rollouts: Sequence[Rollout], tokens: int, stats: Stats) -> None:
        """Add "eval/divergence": KL(policy || teacher) of these tokens, for any divergence that the algorithm
        minimises.

        It is exact if the learner holds all teachers; with a remote one, it is log p - log q of the sampled tokens.
        """
        some = [r for r in self.readable(rollouts, Stats())[0] if r.n_scored]
        if not some:
            return
        if self.remote:
            own, theirs = evaluate_rollouts(learner, some, tokens)["logp"], self.logp(learner, some, tokens)
            apart = torch.cat(own) - torch.cat(theirs)
        else:
            want = frozenset({"reverse_kl"})
            apart = torch.cat(
                evaluate_rollouts(learner, some, tokens, want=want, taught=self.taught(some))["reverse_kl"]
            )
        stats.add("eval/divergence", apart.double().sum().item(), len(apart))
