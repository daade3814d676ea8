"""Passes requests of environments to services, and answers back to the episodes that wait for them.

Within a run a request has one answer, whichever episode makes it and whenever. Equal requests are sent once. A request
without an answer is sent again in a later step, not in the same one.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.core.messages import near
from posttrain.core.protocols import Service
from posttrain.core.types import Ask, Invalid, InvalidKind, bare
from posttrain.envs.play.answer_journal import AnswerJournal

OPTIONS = {"judge": "--judge RECIPE", "retriever": "--retriever FOLDER", "reward-model": "--reward-model FOLDER"}
"""Kind of service -> its option. A service whose name contains no kind counts as a reward model."""


Asker = int | Callable[[Any], None]
"""An episode's number, or a function that gets the answer."""


@dataclass(frozen=True)
class _Ticket:
    """A request that was sent to a service."""

    question: str
    service: str
    step: int


class Services:
    """The services of a run by name, with `ask` and `poll`. No method blocks."""

    def __init__(self, named: Mapping[str, Service] | None = None) -> None:
        self.named: dict[str, Service] = dict(named or {})
        self.journal: AnswerJournal | None = None
        self.waited = 0.0  # seconds that the player spent in services in this process, or idle
        self.step = 0
        self._answers: dict[str, Any] = {}  # request -> valid answer, of all steps
        self._failed: dict[str, Invalid] = {}  # request -> invalid answer, of this step
        self._noted: set[tuple[int, str]] = set()  # (step, request) of this step's journal entries
        self._tickets: dict[int, _Ticket] = {}
        self._begun = 0  # number of tickets so far
        self._waiting: dict[str, list[Asker]] = {}  # request -> those waiting for its answer
        self._ready: list[tuple[Asker, Any]] = []
        self._counted: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self.named)

    @property
    def pending(self) -> int:
        """Number of requests whose answer `poll` has not returned yet."""
        return len(self._ready) + sum(map(len, self._waiting.values()))

    def begin(self, step: int) -> None:
        """Begin a step: earlier steps are finished, and further requests belong to this one."""
        self.step = step
        self._failed.clear()
        self._noted.clear()
        if self.journal is not None:
            self.journal.begin(step)

    def problem(self, ask: Ask) -> str | None:
        """Return why no service can answer, in words; None if the service exists."""
        if ask.service in self.named:
            return None
        has = f"has {', '.join(self.named)}" if self.named else "has none"
        kind = next((kind for kind in OPTIONS if kind in ask.service), "reward-model")
        way = OPTIONS[kind] if ask.service == kind else OPTIONS[kind].replace(" ", f" {ask.service}=", 1)
        return f"asked the service {ask.service!r}, which this run {has}{near(ask.service, self.named)}: give {way}"

    def ask(self, id: Asker, ask: Ask) -> None:
        """Send the request of an episode, whose answer `poll` returns, or of a function, which `poll` calls with it."""
        if problem := self.problem(ask):
            self._ready.append((id, Invalid(problem, InvalidKind.UNANSWERED)))
            return
        question = digest(self.named[ask.service].identity, ask)
        known, answer = self._recalled(question, ask.service)
        if known:
            self._ready.append((id, answer))
        elif question in self._waiting:
            self._waiting[question].append(id)
        else:
            self._waiting[question] = [id]
            self._begun += 1
            self._tickets[self._begun] = _Ticket(question, ask.service, self.step)
            self.named[ask.service].submit(self._begun, ask.content)

    def poll(self) -> list[tuple[int, Any]]:
        """Return the answers since the last call: (episode, plain JSON data, Invalid or Reasoned)."""
        began, asked = time.perf_counter(), bool(self._tickets)
        for service in self.named.values():
            for number, answer in service.poll():
                ticket = self._tickets.pop(number)
                self._keep(ticket, answer)
                self._ready += [(id, answer) for id in self._waiting.pop(ticket.question)]
        if asked:
            self.waited += time.perf_counter() - began
        ready, self._ready = self._ready, []
        found = []
        for id, answer in ready:
            own = copy.deepcopy(answer)  # an environment may change its answer
            if callable(id):
                id(own)
            else:
                found.append((id, own))
        return found

    def forget(self) -> None:
        """Forget waiting episodes, which were abandoned. Answers that still come are stored."""
        self._ready.clear()
        for ids in self._waiting.values():
            ids.clear()

    def counts(self) -> dict[str, float]:
        """Return the services' counts since the last call, as "judge/requests". They depend on timing."""
        total = {f"{name}/{what}": n for name, s in self.named.items() for what, n in s.counts().items()}
        since = {what: n - self._counted.get(what, 0.0) for what, n in total.items()}
        self._counted = total
        return since

    def close(self) -> None:
        for service in self.named.values():
            service.close()
        if self.journal is not None:
            self.journal.close()

    def __enter__(self) -> Services:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _recalled(self, question: str, service: str) -> tuple[bool, Any]:
        """Return whether this run already has an answer, and the answer."""
        if question in self._failed:
            return True, self._failed[question]
        if self.journal is not None:
            known, answer = self.journal.recall(self.step, question)
        else:
            known, answer = question in self._answers, self._answers.get(question)
        if known:
            self._keep(_Ticket(question, service, self.step), answer)
        return known, answer

    def _keep(self, ticket: _Ticket, answer: Any) -> None:
        if isinstance(bare(answer), Invalid):
            if ticket.step == self.step:
                self._failed[ticket.question] = answer
        elif self.journal is None:
            self._answers[ticket.question] = answer
        place = ticket.step, ticket.question
        if self.journal is not None and place not in self._noted:
            self._noted.add(place)
            self.journal.note(ticket.step, ticket.question, ticket.service, answer)


def digest(identity: str, ask: Ask) -> str:
    """Return the key of a request: a hash of the service, its identity, and the content."""
    asked = json.dumps([ask.service, identity, ask.content], sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(asked.encode(), digest_size=16).hexdigest()


def made_up(ask: Ask) -> Any:
    """Return a made-up answer in the form of a real one, which depends on the request alone."""
    return made_up_passages() if "retriever" in ask.service else int(digest("", ask)[:4], 16) / 0xFFFF


def made_up_passages() -> list[dict[str, Any]]:
    """Return passages in a retriever's form."""
    contents = '"Made up"\nThis passage was made up: nobody has searched for it.'
    return [{"id": "made-up", "contents": contents, "score": 1.0}]
