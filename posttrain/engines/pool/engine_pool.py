"""An engine pool that tolerates crashes, hangs and wrong weights: what a run learns does not depend on them.

    STARTING -> STALE -> READY -> DEAD, and from DEAD again to STARTING while the budget lasts

An engine says what it is (STALE), takes over the weights that are offered, gives back their version and checksum, and passes
a canary (READY). Only then is it asked for anything. What it owes when it dies, falls silent or says what is not true is
asked of the others again, with the same seeds. So where engines are `batch_invariant`, nothing that is sampled depends on
which of them answered, nor on whether one was lost.

Decided here: nothing waits for a single engine. Whatever is told them goes into a buffer, whatever they say is read as it
comes, and silence counts only while the pool listens, so that a long update takes nobody's time away. What an engine is
asked has a number of its own, a ticket: an answer without one that is open is dropped and counted. A group's members go to
one engine, which computes their prompt once, unless others would have to wait for it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from posttrain.core.protocols import Engine
from posttrain.core.types import Completion, Sampling, UserError
from posttrain.engines.pool.pool_member import EnginePlace, MemberState, PoolMember
from posttrain.engines.pool.pool_protocol import Gone, Message, Wire, completion_read, wait
from posttrain.engines.request import Request
from posttrain.engines.weight_probe import WeightProbe
from posttrain.engines.weight_sync import Transport

POLL_SECONDS = 0.005  # that a poll waits where nobody has anything to say
LOOK_SECONDS = 1.0  # most seconds of silence between two looks: the pool itself was elsewhere
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a second start in a row, doubled for each further one


class EnginePool:
    """See `posttrain.core.protocols.Engine`. Close it: it holds processes or connections."""

    def __init__(
        self,
        places: Sequence[EnginePlace],
        canary: WeightProbe,
        context: int,
        vocab: int,
        *,
        seconds: float = 120.0,
        start_seconds: float = 600.0,
        restarts: int = 5,
        closed: Callable[[], None] = lambda: None,
        listen: Callable[[Sequence[Wire], float], None] = wait,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Returns when all have started; none has weights then. Raises UserError if one does not start.

        `seconds`: of silence of an engine that has to say something; `start_seconds`: while it starts. `restarts`: how
        often in a row each is started again. `closed`: called at the end.
        """
        self.canary, self.context, self.vocab, self.version, self._before = canary, context, vocab, 0, -1
        self.seconds, self.start_seconds, self.restarts = seconds, start_seconds, restarts
        self._closed, self._listen, self._clock, self._looked = closed, listen, clock, clock()
        self.say: Callable[[str], None] = lambda text: print(f"posttrain: {text}", file=sys.stderr)
        self._tickets = count()
        self._waiting: dict[int, Request] = {}  # by id, in the order in which they are to be asked
        self._asked: dict[int, tuple[PoolMember, int]] = {}  # by id: who has it, and under which ticket
        self._home: dict[int, PoolMember] = {}  # by id: who keeps what the next request of it may go on from
        self._done: list[Completion] = []
        self._offering = self._begun = False
        self._counted = {"restarts": 0, "asked_again": 0, "answered_twice": 0}
        self._deviation, self._last = 0.0, "none"
        self.members: list[PoolMember] = []
        try:
            for place in places:
                self.join(place)
            self._until(lambda: all(m.state is not MemberState.STARTING for m in self.members))
        except BaseException:
            self.close()
            raise
        self._begun = True

    @property
    def batch_invariant(self) -> bool:
        return all(m.hello["batch_invariant"] for m in self.members if m.hello)

    @property
    def backend(self) -> str:
        kinds = dict.fromkeys(m.hello["backend"] for m in self.members if m.hello)
        return f"{len(self.members)} engines ({', '.join(kinds)})"

    def counts(self) -> dict[str, float]:
        """What became of the engines, since the beginning; `canary`: most nats off the learner, of the last weight sync."""
        ready = sum(m.state is MemberState.READY for m in self.members)
        return {"ready": ready, "canary": self._deviation, **self._counted}

    # -- who belongs to it ---------------------------------------------------------------------------------------------

    def join(self, place: EnginePlace) -> None:
        """One more. It is asked for something as soon as it has the weights."""
        self.members.append(PoolMember(place, place.open()))

    def leave(self, name: str) -> None:
        """One less. What it owes is asked of the others."""
        member = next(m for m in self.members if m.place.name == name)
        self._drop(member)
        member.link.end(kept=False)
        self.members.remove(member)

    # -- what an engine does -------------------------------------------------------------------------------------------

    def submit(self, id: int, prompt: Sequence[int], sampling: Sampling, keep: bool = False) -> None:
        """Queue one request. Raises UserError if the prompt leaves no room for a reply."""
        coldest = max((m.hello["coldest"] for m in self.members if m.hello), default=0.0)
        if 0 < sampling.temperature < coldest:
            raise UserError(f"an engine samples at temperature 0 or {coldest} and above, not at {sampling.temperature}")
        request = Request(id, tuple(prompt), sampling, keep=keep).check(self.context, self.vocab)
        assert self._offering, "there are no weights yet"
        assert id not in self._waiting and id not in self._asked, "this request is not answered yet"
        self._waiting[id] = request

    def forget(self, id: int) -> None:
        if (home := self._home.pop(id, None)) is not None:
            self._tell(home, "forget", id)

    def copy(self, id: int, to: int, tokens: int) -> None:
        if (home := self._home.get(id)) is not None and self._tell(home, "copy", id, to, tokens):
            self._home[to] = home

    def cancel(self, id: int) -> None:
        self._waiting.pop(id, None)
        self._done = [done for done in self._done if done.id != id]
        if (asked := self._asked.pop(id, None)) is not None:
            member, ticket = asked
            member.tokens -= _cost(member.owes.pop(ticket))
            member.cancelled.add(ticket)
            self._tell(member, "cancel", id)

    def poll(self) -> list[Completion]:
        """What has been answered; waits a moment for it. Raises UserError (exit code 1) if no engine is left."""
        self._tend(POLL_SECONDS if self._waiting or self._asked else 0.0)
        done, self._done = self._done, []
        return done

    def load(self, weights: Any, version: int) -> None:
        """Hand over weights to all engines that live. Returns when all these have them, or are lost, and one is ready."""
        assert not self._waiting and not self._asked, "weights change between batches of rollouts, not within one"
        self._offering = False
        self._until(lambda: not any(m.loading or m.canary for m in self.members))  # who still reads those before
        self.canary.look(weights)
        self._deviation, self._before, self.version = 0.0, self.version, version
        for member in self.members:
            member.failures *= not member.useful
            member.useful = False
            if member.state is MemberState.READY:
                member.state = MemberState.STALE
        self._home.clear()
        for transport in self._transports():
            transport.put(weights, version)
        self._offering = True
        self._until(
            lambda: (
                any(m.state is MemberState.READY for m in self.members)
                and not any(m.state is MemberState.STALE for m in self.members)
            )
        )
        for transport in self._transports():
            transport.done()

    def close(self) -> None:
        """End all engines; requests in them are lost. May be called twice."""
        for member in self.members:
            member.state = MemberState.DEAD
            member.link.end(kept=False)
        for transport in self._transports():
            transport.close()
        self._closed()

    def _transports(self) -> Iterable[Transport]:
        return dict.fromkeys(m.place.transport for m in self.members)

    # -- the course of things ------------------------------------------------------------------------------------------

    def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._tend(POLL_SECONDS)

    def _tend(self, seconds: float) -> None:
        """Tell engines what is to be told, and take in what they say; waits so long for that."""
        self._start_again()
        self._offer()
        self._hand_out()
        lives = [m for m in self.members if m.state is not MemberState.DEAD]
        self._listen([m.link.wire for m in lives if m.link.wire is not None], seconds)
        now = self._clock()
        passed, self._looked = min(now - self._looked, LOOK_SECONDS), now
        for member in lives:
            try:
                self._hear(member, passed)
            except Gone as error:
                self._lose(member, str(error))
        if all(map(self._hopeless, self.members)):
            gone = UserError(
                f"no engine is left, each was lost {self.restarts + 1} times in a row (--engine-restarts {self.restarts}); "
                f"the last one: {self._last}"
            )
            gone.code = 1
            raise gone

    def _hopeless(self, member: PoolMember) -> bool:
        """Whether nothing can come of it any more: it is dead for good, or needs weights that are gone."""
        lacks = self._offering and member.place.transport.offer is None and not member.awaited
        spent = member.state is MemberState.DEAD and member.failures > self.restarts
        return spent or (member.state is MemberState.STALE and lacks)

    def _start_again(self) -> None:
        now = self._clock()
        for member in self.members:
            if member.state is MemberState.DEAD and member.failures <= self.restarts and now >= member.again:
                member.state, member.link = MemberState.STARTING, member.place.open()
                self._counted["restarts"] += 1

    def _offer(self) -> None:
        """The weights, to those that do not have them."""
        for member in self.members:
            offer = member.place.transport.offer
            if self._offering and offer is not None and member.state is MemberState.STALE and not member.awaited:
                member.loading = True
                try:
                    member.place.transport.send(member.place.name, member.held is None, partial(self._call, member))
                except Gone as error:
                    self._lose(member, str(error))
                self._tell(member, "load", offer)

    def _hand_out(self) -> None:
        """What is to be asked, to those that owe least; a group's members to one, up to its fair share."""
        ready = [m for m in self.members if m.state is MemberState.READY]
        if not ready or not self._waiting:
            return
        fair = (sum(m.tokens for m in ready) + sum(map(_cost, self._waiting.values()))) / len(ready)
        groups: dict[tuple[int, ...], list[Request]] = {}
        for request in self._waiting.values():
            groups.setdefault(request.prompt, []).append(request)
        for group in groups.values():
            chosen: PoolMember | None = None
            for request in group:
                home = self._home.get(request.id)
                if home is None and (chosen is None or chosen.tokens >= fair or not chosen.room):
                    free = [m for m in ready if m.state is MemberState.READY and m.room]
                    chosen = min(free, key=lambda m: m.tokens, default=None)
                asked = home or chosen
                if asked is not None and asked.state is MemberState.READY:
                    self._ask(asked, request)

    def _ask(self, member: PoolMember, request: Request) -> None:
        ticket = next(self._tickets)
        del self._waiting[request.id]
        member.owes[ticket], self._asked[request.id] = request, (member, ticket)
        member.tokens += _cost(request)
        how = asdict(request.sampling)
        self._tell(member, "submit", ticket, request.id, list(request.prompt), how, request.keep)

    def _tell(self, member: PoolMember, *message: Any) -> bool:
        """Returns whether it lives."""
        if member.state is MemberState.DEAD or member.link.wire is None:
            return False
        member.link.wire.tell(*message)
        return True

    def _call(self, member: PoolMember, method: str, info: Any) -> None:
        """Waits for its end. Raises Gone."""
        wire, end = member.link.wire, self._clock() + self.seconds
        assert wire is not None, "it was heard before"
        wire.tell("transfer", method, info)
        while not (messages := [message for message in wire.heard() if message[0] != "alive"]):
            if self._clock() > end:
                raise Gone(f"it said nothing for {self.seconds:g} s in {method}")
            self._listen([wire], POLL_SECONDS)
        if messages != [["transferred"]]:
            raise Gone(f"it failed in {method}: {messages[0][-1]!s:.400}")

    def _hear(self, member: PoolMember, passed: float) -> None:
        """What it has said since. `passed`: seconds since the last look. Raises Gone."""
        if member.state is MemberState.DEAD:
            return
        member.link.look()
        messages: list[Message] = []
        if member.link.wire is not None:
            messages = member.link.wire.heard()
            member.link.wire.flush()
        for what, *more in messages:
            try:
                self._take(member, what, more)
            except (TypeError, ValueError, KeyError) as error:
                raise Gone(f"it said what cannot be read ({what[:20]!r})") from error
        member.silent = 0.0 if messages or not member.awaited else member.silent + passed
        limit = self.start_seconds if member.state is MemberState.STARTING else self.seconds
        if member.silent > limit:
            raise Gone(f"it said nothing for {limit:g} s")

    def _take(self, member: PoolMember, what: str, more: list[Any]) -> None:
        """One message. Raises Gone, or ValueError and the like where it cannot be read."""
        if what == "hello" and member.state is MemberState.STARTING:
            (hello,) = more
            kinds = {"backend": str, "batch_invariant": bool, "coldest": float, "slots": int, "context": int}
            if any(type(hello[name]) is not kind for name, kind in kinds.items()):
                raise ValueError(hello)
            if hello["context"] < self.context:
                raise Gone(f"its context is {hello['context']} tokens, the run's is {self.context}")
            member.hello, member.state, member.held = hello, MemberState.STALE, None
        elif what == "loaded":
            self._take_loaded(member, *more)
        elif what == "done":
            self._take_done(member, *more)
        elif what == "failed":
            raise Gone(f"it failed: {more[0]:.400}")
        elif what != "alive":
            raise ValueError(what)

    def _take_loaded(self, member: PoolMember, version: int, checksum: int) -> None:
        """It has taken over weights: now it is to sing."""
        offer = member.place.transport.offer or {}
        if not member.loading or (version, checksum) != (offer["version"], offer["checksum"]):
            raise Gone(
                f"it took over version {version} with checksum {checksum:08x}, not {offer['version']} with "
                f"{offer['checksum']:08x}"
            )
        member.loading, member.sung = False, {}
        for place, (prompt, sampling) in enumerate(self.canary.requests()):
            ticket = next(self._tickets)
            member.canary[ticket] = place
            self._tell(member, "submit", ticket, -1 - place, prompt, asdict(sampling), False)

    def _take_done(self, member: PoolMember, ticket: int, said: Any) -> None:
        if ticket in member.canary:
            place = member.canary.pop(ticket)
            member.sung[place] = completion_read(place, said, self.vocab, 1)
            if not member.canary:
                self._judge(member)
        elif ticket in member.owes:
            request = member.owes[ticket]
            done = completion_read(request.id, said, self.vocab, request.budget(self.context))
            if done.version != self.version:
                raise Gone(f"it sampled with weights of version {done.version}, not {self.version}")
            del member.owes[ticket], self._asked[request.id]
            member.tokens -= _cost(request)
            member.useful = True
            if request.keep:
                self._home[request.id] = member
            self._done.append(done)
        elif ticket in member.cancelled:
            member.cancelled.discard(ticket)
        else:
            self._counted["answered_twice"] += 1

    def _judge(self, member: PoolMember) -> None:
        """Whether it may be asked, now that the canary has sung."""
        far, problem = self.canary.deviation(member.sung, member.held == self._before)
        if problem is not None:
            raise Gone(f"it {problem}, after it took over version {self.version}")
        self._deviation = max(self._deviation, far)
        member.held, member.state = self.version, MemberState.READY

    def _lose(self, member: PoolMember, why: str) -> None:
        """It is dead, or as good as that."""
        if member.state is MemberState.DEAD:
            return
        self._counted["asked_again"] += len(member.owes)
        self._drop(member)
        how = member.link.end(kept=True)
        self._last = f"{why}{how}"
        told = f"the engine {member.place.name} is lost: {self._last}"
        if not self._begun:
            raise UserError(told)
        member.failures += 1
        pause = 0.0 if member.failures == 1 else min(FIRST_PAUSE * 2 ** min(member.failures - 2, 9), LONGEST_PAUSE)
        member.again = self._clock() + pause
        last = member.failures > self.restarts
        self.say(f"{told}; {'it is not started again' if last else f'it is started again in {pause:g} s'}")

    def _drop(self, member: PoolMember) -> None:
        """What it owes is asked again, before all else, with the same seeds; what it keeps is gone."""
        member.state = MemberState.DEAD
        again = {request.id: request for request in member.owes.values()}
        for id in again:
            del self._asked[id]
        self._waiting = {**again, **self._waiting}
        self._home = {id: home for id, home in self._home.items() if home is not member}
        for had in (member.owes, member.cancelled, member.canary, member.sung):
            had.clear()
        member.tokens, member.loading, member.silent = 0, False, 0.0


def _cost(request: Request) -> int:
    """Tokens that it is at most, for an engine."""
    return len(request.prompt) + request.sampling.max_tokens


if TYPE_CHECKING:
    _proof: Callable[..., Engine] = EnginePool
