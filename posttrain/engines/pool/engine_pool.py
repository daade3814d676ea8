"""An engine pool that tolerates crashes, hangs and wrong weights, without an effect on training.

STARTING -> STALE -> READY -> DEAD, and from DEAD again to STARTING until the maximum of restarts is reached

An engine reports its properties (STALE), loads the offered weights, returns their version and checksum, and passes a
weight probe (READY). Only then does it get requests. If it dies, times out or sends an invalid message, its open
requests go to the other engines, with the same seeds. So if engines are `batch_invariant`, rollouts depend neither on
the engine that sampled them nor on lost engines.

The pool never waits for a single engine. Outgoing messages are buffered, incoming messages are read as they arrive, and
timeouts count only while the pool listens, so that a long update times out no engine. Each submission has a unique
number, the ticket: an answer without an open ticket is dropped and counted. A group's requests go to one engine, which
prefills their prompt once, unless other engines would be idle.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from posttrain.core.protocols import Engine, VisionEngine
from posttrain.core.transcripts import Media
from posttrain.core.types import Completion, Sampling, UserError
from posttrain.engines.local.prefix_cache import CachedPrefixes, PrefixCache
from posttrain.engines.pool.pool_member import EnginePlace, MemberState, PoolMember
from posttrain.engines.pool.pool_protocol import Gone, Wire, decode_completion, wait
from posttrain.engines.request import Request
from posttrain.engines.weight_probe import WeightProbe
from posttrain.engines.weight_sync import Receiver, Transport
from posttrain.models.free_memory import release_cached_memory

POLL_SECONDS = 0.005  # maximal wait of a poll
FIRST_RESTARTS = 1
"""Most restarts in a row of an engine while none has ever been ready: a further start would fail as well."""
LOOK_SECONDS = 1.0  # maximum of silence counted between two reads: in a longer time the pool itself was busy
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before the second restart in a row, doubled for each further one


class EnginePool:
    """Pool of engines; implements `posttrain.core.protocols.Engine`. Close it: it has processes or connections."""

    def __init__(
        self,
        places: Sequence[EnginePlace],
        probe: WeightProbe,
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
        """Start the engines. Return when all have started, without weights yet. Raises UserError if one does not start.

        `seconds`: timeout for an answer of an engine; `start_seconds`: timeout of its start. `restarts`: maximum of
        restarts in a row per engine, once one was ready. `closed`: called by `close`.
        """
        self.probe, self.context, self.vocab, self.version, self._before = probe, context, vocab, 0, -1
        self.seconds, self.start_seconds, self.restarts = seconds, start_seconds, restarts
        self._closed, self._listen, self._clock, self._last_look = closed, listen, clock, clock()
        self.say: Callable[[str], None] = lambda text: print(f"posttrain: {text}", file=sys.stderr)
        self._tickets = count()
        self._queue: dict[int, Request] = {}  # by id, in the order of submission
        self._submitted: dict[int, tuple[PoolMember, int]] = {}  # by id: the engine that has it, and the ticket
        # by id: the engine that caches the prefix for the episode's next request
        self._prefix_owner: dict[int, PoolMember] = {}
        # without keys and values; an engine that takes over an episode needs its first prompt to compute the same bits
        self._kept = PrefixCache(0)
        self._finished: list[Completion] = []
        self._weights_offered = self._started = self._resting = False
        self._proven = False  # whether an engine was ever ready
        self._counted = {"restarts": 0, "resubmitted": 0, "duplicate_answers": 0}
        self._deviation, self._last = 0.0, "none"
        self.members: list[PoolMember] = []
        try:
            for place in places:
                self.members.append(PoolMember(place, place.open()))
            self._until(lambda: all(m.state is not MemberState.STARTING for m in self.members))
        except BaseException:
            self.close()
            raise
        self._started = True

    @property
    def batch_invariant(self) -> bool:
        return all(m.properties["batch_invariant"] for m in self.members if m.properties)

    @property
    def backend(self) -> str:
        kinds = dict.fromkeys(m.properties["backend"] for m in self.members if m.properties)
        return f"{len(self.members)} engine{'s' * (len(self.members) > 1)} ({', '.join(kinds)})"

    def counts(self) -> dict[str, float]:
        """Return counters since the beginning; `probe_gap`: the maximal difference to the learner in the last weight
        sync, in nats; and `memory`, if engines report it: the most that one took of its GPU before it, in GB.
        """
        ready = sum(m.state is MemberState.READY for m in self.members)
        most = max((m.memory for m in self.members), default=0)
        return {"ready": ready, "probe_gap": self._deviation, **self._counted, **({"memory": most} if most else {})}

    # -- the protocol of an engine -------------------------------------------------------------------------------------

    def submit(self, id: int, prompt: Sequence[int], sampling: Sampling, keep: bool = False) -> None:
        """Queue one request. Raises UserError if the prompt leaves no room for a reply."""
        self.submit_with_media(id, prompt, (), sampling, keep)

    def submit_with_media(
        self, id: int, prompt: Sequence[int], media: Sequence[Media], sampling: Sampling, keep: bool = False
    ) -> None:
        """See `posttrain.core.protocols.VisionEngine`."""
        properties = [m.properties for m in self.members if m.properties]
        lowest = max((p["min_temperature"] for p in properties), default=0.0)
        if 0 < sampling.temperature < lowest:
            raise UserError(
                f"an engine samples at temperature 0, or at {lowest} and above, not at {sampling.temperature}"
            )
        cut = sampling.top_p != 1 or sampling.top_k > 0
        if cut and not all(p["truncated_logp"] for p in properties):
            raise UserError(
                "SGLang returns log-probabilities from before top-p and top-k: leave these at 1 and 0, or use another engine"
            )
        tokens = tuple(prompt)
        kept = self._kept.continued(id, tokens)
        first = len(tokens if kept is None else kept.prompt)
        request = Request(id, tokens[:first], sampling, tokens[first:], keep, tuple(media))
        request.check(self.context, self.vocab)
        assert self._weights_offered, "there are no weights yet"
        assert id not in self._queue and id not in self._submitted, "this request is not answered yet"
        self._queue[id], self._resting = request, False

    def forget(self, id: int) -> None:
        self._kept.take(id)
        if (owner := self._prefix_owner.pop(id, None)) is not None:
            self._send(owner, "forget", id)

    def copy(self, id: int, to: int, tokens: int) -> None:
        self._kept.copy(id, to, tokens)
        if (owner := self._prefix_owner.get(id)) is not None and self._send(owner, "copy", id, to, tokens):
            self._prefix_owner[to] = owner

    def cancel(self, id: int) -> None:
        self._queue.pop(id, None)
        self._finished = [done for done in self._finished if done.id != id]
        if (target := self._submitted.pop(id, None)) is not None:
            member, ticket = target
            member.tokens -= _cost(member.requests.pop(ticket))
            member.cancelled.add(ticket)
            self._send(member, "cancel", id)

    def poll(self) -> list[Completion]:
        """Return the requests that have finished, after a short wait. Raises UserError if an engine refuses one, and (exit
        code 1) if no engine is left.
        """
        self._exchange(POLL_SECONDS if self._queue or self._submitted else 0.0)
        done, self._finished = self._finished, []
        return done

    def load(self, weights: Any, version: int) -> None:
        """Sync weights to all live engines. Return when each has them or is lost, and at least one is ready."""
        assert not self._queue and not self._submitted, "weights change between batches of rollouts, not within one"
        self._weights_offered = self._resting = False
        # until no engine reads the previous weights
        self._until(lambda: not any(m.offered or m.probe for m in self.members))
        self.probe.look(weights)
        self._deviation, self._before, self.version = 0.0, self.version, version
        for member in self.members:
            member.failures *= not member.useful
            member.useful = False
            if member.state is MemberState.READY:
                member.state = MemberState.STALE
        self._prefix_owner.clear()
        self._kept.clear()
        for transport in self._transports():
            transport.put(weights, version)
            self._sync(transport)  # in all training processes, also if here no engine waits
        self._weights_offered = True
        self._until(
            lambda: (
                any(m.state is MemberState.READY for m in self.members)
                and not any(m.state is MemberState.STALE for m in self.members)
            )
        )
        for transport in self._transports():
            transport.done()

    def rest(self) -> None:
        """Free the memory of engines that share a GPU with the learner, until the next weights or the next request.

        Return when each has freed it or is lost: an update needs that memory, and a server fails if the GPU's free memory
        shrinks meanwhile.
        """
        assert not self._queue and not self._submitted, "engines rest between batches of rollouts, not within one"
        self._resting = True
        for member in self.members:
            if member.place.sleeps and member.state is MemberState.READY:
                self._send(member, "sleep")
                member.state, member.sleep_requested = MemberState.STALE, True
        self._until(lambda: not any(m.sleep_requested for m in self.members))

    def close(self) -> None:
        """Stop all engines and drop their requests. May be called twice."""
        for member in self.members:
            self._end(member)
        for transport in self._transports():
            transport.close()
        self._closed()

    def _transports(self) -> Iterable[Transport]:
        return dict.fromkeys(m.place.transport for m in self.members)

    # -- one round of messages -----------------------------------------------------------------------------------------

    def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._exchange(POLL_SECONDS)

    def _exchange(self, seconds: float) -> None:
        """Restart, sync and submit as needed, and handle incoming messages, waiting up to `seconds` for them."""
        self._start_again()
        self._offer()
        self._submit_waiting()
        lives = [m for m in self.members if m.state is not MemberState.DEAD]
        self._listen([m.link.wire for m in lives], seconds)
        now = self._clock()
        passed, self._last_look = min(now - self._last_look, LOOK_SECONDS), now
        for member in lives:
            try:
                self._receive(member, passed)
            except Gone as error:
                self._lose(member, str(error))
        if all(map(self._is_lost_for_good, self.members)):
            why = f"(--engine-restarts {self.restarts})" if self._proven else "and none was ever ready"
            times = "once" if self._budget == 0 else f"{self._budget + 1} times in a row"
            gone = UserError(f"no engine is left, as each failed {times} {why}; the last failure: {self._last}")
            gone.code = 1 if self._proven else gone.code
            raise gone

    @property
    def _budget(self) -> int:
        """Most restarts in a row of an engine."""
        return self.restarts if self._proven else min(self.restarts, FIRST_RESTARTS)

    def _is_lost_for_good(self, member: PoolMember) -> bool:
        """Return whether an engine cannot recover: it has no restarts left, or needs weights that are gone."""
        lacks = self._weights_offered and member.place.transport.offer is None and not member.awaited
        lacks = lacks and not self._resting  # the next weights follow
        spent = member.state is MemberState.DEAD and member.failures > self._budget
        return spent or (member.state is MemberState.STALE and lacks)

    def _start_again(self) -> None:
        now = self._clock()
        for member in () if self._resting else self.members:  # while they rest, the learner has the memory
            if member.state is MemberState.DEAD and member.failures <= self._budget and now >= member.restart_at:
                release_cached_memory()  # an engine on the learner's GPU needs room to start
                member.state, member.link = MemberState.STARTING, member.place.open()
                self._counted["restarts"] += 1

    def _offer(self) -> None:
        """Offer the weights to the engines that have started since the weight sync."""
        if self._weights_offered and not self._resting:
            for transport in self._transports():
                if transport.offer is not None and self._waiting(transport):
                    self._sync(transport)

    def _waiting(self, transport: Transport) -> dict[str, PoolMember]:
        """Return the engines that wait for weights of this transport, by name."""
        members = (m for m in self.members if m.place.transport is transport)
        return {m.place.name: m for m in members if m.state is MemberState.STALE and not m.awaited}

    def _sync(self, transport: Transport) -> None:
        """Send the offered weights to the engines that wait for them, and ask these to load them."""
        waiting, offer = self._waiting(transport), transport.offer
        if any(member.place.sleeps for member in waiting.values()):
            release_cached_memory()
        for member in waiting.values():
            member.offered = offer
        lost = transport.send(
            [Receiver(m.place.name, m.held is None, partial(self._call, m)) for m in waiting.values()]
        )
        for name, member in waiting.items():
            if name in lost:
                self._lose(member, lost[name])
            else:
                self._send(member, "load", offer)

    def _submit_waiting(self) -> None:
        """Submit the waiting requests to the least loaded engines; a group's requests go to one, up to its
        fair share.
        """
        ready = [m for m in self.members if m.state is MemberState.READY]
        if not ready or not self._queue:
            return
        fair = (sum(m.tokens for m in ready) + sum(map(_cost, self._queue.values()))) / len(ready)
        groups: dict[tuple[int, ...], list[Request]] = {}
        for request in self._queue.values():
            groups.setdefault(request.prompt, []).append(request)
        for group in groups.values():
            chosen: PoolMember | None = None
            for request in group:
                owner = self._prefix_owner.get(request.id)
                if owner is None and (chosen is None or chosen.tokens >= fair or not chosen.room):
                    free = [m for m in ready if m.state is MemberState.READY and m.room]
                    chosen = min(free, key=lambda m: m.tokens, default=None)
                target = owner or chosen
                if target is not None and target.state is MemberState.READY:
                    self._ask(target, request)

    def _ask(self, member: PoolMember, request: Request) -> None:
        ticket = next(self._tickets)
        del self._queue[request.id]
        member.requests[ticket], self._submitted[request.id] = request, (member, ticket)
        member.tokens += _cost(request)
        how, media = asdict(request.sampling), [[m.start, m.length, m.digest] for m in request.media]
        given = list(request.prompt), list(request.own), how, request.keep, *([media] if media else [])
        self._send(member, "submit", ticket, request.id, *given)

    def _send(self, member: PoolMember, *message: Any) -> bool:
        """Send a message. Return whether the engine is still alive."""
        if member.state is MemberState.DEAD:
            return False
        member.link.wire.send(*message)
        return True

    def _call(self, member: PoolMember, method: str, info: Any) -> Any:
        """Call a method of an engine, and return its answer. Raises Gone."""
        wire, end = member.link.wire, self._clock() + self.seconds
        wire.send("transfer", method, info)
        while not (messages := [message for message in wire.receive() if message[0] != "alive"]):
            if self._clock() > end:
                raise Gone(f"it sent nothing for {self.seconds:g} s in {method}")
            self._listen([wire], POLL_SECONDS)
        if [message[0] for message in messages] != ["transferred"]:
            raise Gone(f"it failed in {method}: {messages[0][-1]!s:.400}")
        return messages[0][1]

    def _receive(self, member: PoolMember, passed: float) -> None:
        """Handle the messages that have arrived from an engine. `passed`: seconds since the last call. Raises Gone."""
        if member.state is MemberState.DEAD:
            return
        member.link.look()
        messages = member.link.wire.receive()
        member.link.wire.flush()
        for what, *more in messages:
            try:
                self._handle(member, what, more)
            except UserError:
                raise
            except (TypeError, ValueError, KeyError) as error:
                raise Gone(f"it sent a message that cannot be read ({what[:20]!r})") from error
        member.silent = 0.0 if messages or not member.awaited else member.silent + passed
        limit = self.start_seconds if member.state is MemberState.STARTING else self.seconds
        if member.silent > limit:
            raise Gone(f"it sent nothing for {limit:g} s")

    def _handle(self, member: PoolMember, what: str, more: list[Any]) -> None:
        """Handle one message. Raises Gone, or ValueError and similar errors if it is malformed."""
        if what == "started" and member.state is MemberState.STARTING:
            (properties,) = more
            kinds = {"backend": str, "batch_invariant": bool, "min_temperature": float, "truncated_logp": bool, "slots": int,
                     "context": int}  # fmt: skip
            if any(type(properties[name]) is not kind for name, kind in kinds.items()):
                raise ValueError(properties)
            if properties["context"] < self.context:
                raise Gone(f"its context is {properties['context']} tokens, the run's is {self.context}")
            member.properties, member.state, member.held = properties, MemberState.STALE, None
        elif what == "loaded":
            self._handle_loaded(member, *more)
        elif what == "slept" and member.sleep_requested:
            member.sleep_requested = False
        elif what == "memory":
            member.memory = float(more[0]) / 1e9
        elif what == "done":
            self._handle_done(member, *more)
        elif what == "refused":
            ticket, reason = more
            if ticket in member.requests or ticket in member.probe:
                raise UserError(f"{reason:.400}")
        elif what == "failed":
            raise Gone(f"it failed: {more[0]:.400}")
        elif what != "alive":
            raise ValueError(what)

    def _handle_loaded(self, member: PoolMember, version: int, checksum: int) -> None:
        """Check the weights that an engine has loaded, and send it the weight probe."""
        if member.offered is None:
            raise ValueError("it was not asked to load weights")
        if (version, checksum) != (self.version, member.offered["checksum"]):
            raise Gone(
                f"it loaded version {version} with checksum {checksum:08x}, not {self.version} with "
                f"{member.offered['checksum']:08x}"
            )
        member.offered, member.probed = None, {}
        for place, (prompt, sampling) in enumerate(self.probe.requests()):
            ticket = next(self._tickets)
            member.probe[ticket] = place
            self._send(member, "submit", ticket, -1 - place, prompt, [], asdict(sampling), False)

    def _handle_done(self, member: PoolMember, ticket: int, content: Any) -> None:
        if ticket in member.probe:
            place = member.probe.pop(ticket)
            member.probed[place] = decode_completion(place, content, self.vocab, 1)
            if not member.probe:
                self._judge(member)
        elif ticket in member.requests:
            request = member.requests[ticket]
            done = decode_completion(request.id, content, self.vocab, request.budget(self.context))
            if done.version != self.version:
                raise Gone(f"it sampled with weights of version {done.version}, not {self.version}")
            del member.requests[ticket], self._submitted[request.id]
            member.tokens -= _cost(request)
            member.useful = True
            if request.keep:
                self._prefix_owner[request.id] = member
                self._kept.put(request.id, CachedPrefixes(request.prompt, (*request.own, *done.tokens)))
            self._finished.append(done)
        elif ticket in member.cancelled:
            member.cancelled.discard(ticket)
        else:
            self._counted["duplicate_answers"] += 1

    def _judge(self, member: PoolMember) -> None:
        """Mark an engine as ready if the weight probe has passed, else raise Gone."""
        far, problem = self.probe.deviation(member.probed, member.held == self._before)
        if problem is not None:
            raise Gone(f"it {problem}, after it loaded version {self.version}")
        self._deviation = max(self._deviation, far)
        member.held, member.state, self._proven = self.version, MemberState.READY, True

    def _lose(self, member: PoolMember, why: str) -> None:
        """Mark an engine as dead and schedule its restart."""
        if member.state is MemberState.DEAD:
            return
        self._counted["resubmitted"] += len(member.requests)
        self._drop(member)
        how = member.link.end(kept=True)
        self._last = f"{why}{how}"
        message = f"the engine {member.place.name} is lost: {self._last}"
        if not self._started:
            raise UserError(message)
        member.failures += 1
        pause = 0.0 if member.failures == 1 else min(FIRST_PAUSE * 2 ** min(member.failures - 2, 9), LONGEST_PAUSE)
        member.restart_at = self._clock() + pause
        last = member.failures > self._budget
        never = "it is not restarted" + " before another engine is ready" * (self._budget < self.restarts)
        self.say(f"{message}; {never if last else f'it restarts in {pause:g} s'}")

    def _end(self, member: PoolMember) -> None:
        """End an engine, and remove its log; one that was lost has ended already."""
        if member.state is not MemberState.DEAD:
            self._drop(member)
            member.link.end(kept=False)

    def _drop(self, member: PoolMember) -> None:
        """Mark an engine as dead, and requeue its open requests before all others, with the same seeds; its cached
        prefixes are lost.
        """
        member.state = MemberState.DEAD
        again = {request.id: request for request in member.requests.values()}
        for id in again:
            del self._submitted[id]
        self._queue = {**again, **self._queue}
        self._prefix_owner = {id: owner for id, owner in self._prefix_owner.items() if owner is not member}
        for had in (member.requests, member.cancelled, member.probe, member.probed):
            had.clear()
        member.tokens, member.offered, member.sleep_requested, member.silent = 0, None, False, 0.0


def _cost(request: Request) -> int:
    """Return the maximum of tokens that an engine processes for a request."""
    return request.given + request.sampling.max_tokens


if TYPE_CHECKING:
    _proof: Callable[..., Engine] = EnginePool
    _seeing: Callable[..., VisionEngine] = EnginePool
