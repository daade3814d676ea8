"""A pool whose engines, clock and mishaps are drawn by a seeded script: no process, no waiting."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.core.types import Completion, Sampling, StopReason
from posttrain.engines.pool.engine_pool import EnginePool
from posttrain.engines.pool.pool_protocol import Gone, encode_completion
from posttrain.engines.weight_sync import Receiver

SECONDS = 5.0  # of silence
RESTARTS = 10**9


class World:
    """Everything outside of the pool. `mishaps`: how many may still happen; else whoever is asked answers in the end."""

    def __init__(self, rng: random.Random, mishaps: int) -> None:
        self.rng, self.mishaps, self.now = rng, mishaps, 0.0
        self.engines: list[Fake] = []
        self.gpus = 1  # of each engine
        self.happened: list[str] = []
        self._turn = threading.Lock()

    def listen(self, wires: Sequence[Any], seconds: float) -> None:
        """Let engines work while the pool waits, perhaps in several threads."""
        with self._turn:
            self.now += self.rng.choice((0.01, 0.5, 2.0))
            for engine in list(self.engines):
                for _ in range(self.rng.randrange(4)):
                    if not engine.closed and not engine.stopped:
                        engine.act()

    def mishap(self, kind: str, chance: float) -> bool:
        if self.mishaps <= 0 or self.rng.random() > chance:
            return False
        self.mishaps -= 1
        self.happened.append(kind)
        return True


class Fake:
    """An engine, and the pool's way to it. Its reply to a request is one token: the version it really samples with."""

    pending = False

    def __init__(self, world: World) -> None:
        self.world, self.inbox, self.outbox = world, list[Any](), list[Any]()
        self.closed = self.ended = self.stopped = self.lied = self.asleep = False
        self.born = world.now
        self.version = self.claimed = -1
        self.begun = False
        self.called: list[tuple[str, Any]] = []  # of vLLM's weight transfer
        self.requests: dict[int, tuple[int, list[int]]] = {}

    # what the pool sees
    @property
    def wire(self) -> Fake:
        return self

    def look(self) -> None:
        pass

    def end(self, kept: bool) -> str:
        self.ended = self.closed = True
        return ""

    def send(self, *message: Any) -> None:
        assert not self.ended, "the pool speaks to one that it has given up"
        self.inbox.append(message)

    def flush(self) -> None:
        pass

    def receive(self) -> list[Any]:
        found, self.outbox = self.outbox, []
        if self.closed and not found:
            raise Gone("it is gone")
        return found

    # what it does
    def act(self) -> None:
        world = self.world
        if world.mishap("dies", 0.02):
            self.closed = True
        elif world.mishap("stops", 0.02):
            self.stopped = True
        elif world.mishap("babbles", 0.01):
            self.outbox.append(
                world.rng.choice((["done"], ["what"], ["done", 0, [[], [], "", "eos", 0]], ["loaded", 1, 2]))
            )
        elif not self.begun:
            self.begun = True
            about = {"backend": "fake", "batch_invariant": True, "min_temperature": 0.0, "truncated_logp": True, "slots": 3,
                     "context": 64}  # fmt: skip
            self.outbox.append(["started", about])
        elif self.inbox:
            self.read(*self.inbox.pop(0))
        elif self.requests:
            self.answer(world.rng.choice(list(self.requests)))

    def read(self, what: str, *more: Any) -> None:
        if what == "load":
            offer = more[0]
            self.claimed, self.asleep = offer["version"], False
            if not self.world.mishap("binds nothing", 0.05):
                self.version = offer["version"]
            wrong = self.lied = self.world.mishap("wrong checksum", 0.05)
            self.outbox.append(["loaded", offer["version"], offer["checksum"] + wrong])
        elif what == "submit":
            ticket, id, prompt, own, *_ = more
            assert not self.lied, "asked although its checksum was wrong"
            assert not self.asleep, "asked while it has no weights"
            assert id not in {known for known, _ in self.requests.values()}, "asked twice at the same time"
            self.requests[ticket] = id, [*prompt, *own]
        elif what == "sleep":
            assert not self.requests, "asked to sleep while it works"
            self.asleep, self.version = True, -1
            self.outbox.append(["slept"])
        elif what == "transfer":
            self.called.append((more[0], more[1]))
            self.outbox.append(["transferred", self.world.gpus if more[0] == "get_world_size" else None])
        elif what == "cancel":
            self.requests = {t: r for t, r in self.requests.items() if r[0] != more[0]}

    def answer(self, ticket: int) -> None:
        id, _ = self.requests.pop(ticket)
        version = self.claimed + self.world.mishap("another version", 0.01)
        token = max(0, self.version) % 50
        said = ["done", ticket, encode_completion(Completion(id, [token], [-1.0], "", StopReason.EOS, version))]
        self.outbox += [said] * (2 if self.world.mishap("answers twice", 0.05) else 1)


class Put:
    """See `weight_sync.Transport`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.offer: dict[str, Any] | None = None

    def put(self, weights: Any, version: int) -> None:
        for engine in self.world.engines:
            reads = any(what == "load" for what, *_ in engine.inbox) and not engine.closed
            assert not reads, "it still reads the weights that are written over"
        self.offer = {"version": version, "checksum": 7 * version}

    def send(self, to: Sequence[Receiver]) -> dict[str, str]:
        return {receiver.name: "no way" for receiver in to if self.world.mishap("weights do not arrive", 0.02)}

    def done(self) -> None:
        pass

    def close(self) -> None:
        pass


class Somewhere:
    """See `pool_member.EnginePlace`."""

    sleeps = True

    def __init__(self, name: str, world: World, transport: Any) -> None:
        self.name, self.world, self.transport = name, world, transport

    def open(self) -> Any:
        engine = Fake(self.world)
        self.world.engines.append(engine)
        return engine


class Score:
    """In the place of a weight probe: it knows the version, as that knows the learner's log-probabilities."""

    def __init__(self) -> None:
        self.version = -1

    def look(self, weights: Any) -> None:
        self.version = weights

    def requests(self) -> list[tuple[list[int], Sampling]]:
        return [([1], Sampling(max_tokens=1)), ([1, 2], Sampling(max_tokens=1))]

    def deviation(self, found: Mapping[int, Completion], had_previous: bool = False) -> tuple[float, str | None]:
        right = all(done.tokens == [self.version] for done in found.values())
        return 0.0, None if right else "sings another song"


def pool_of(world: World, count: int, transport: Any, restarts: int = RESTARTS) -> EnginePool:
    places = [Somewhere(str(number), world, transport) for number in range(count)]
    pool = EnginePool(
        places, Score(), 64, 50, seconds=SECONDS, start_seconds=30.0, restarts=restarts,  # type: ignore[arg-type]
        listen=world.listen, clock=lambda: world.now,
    )  # fmt: skip
    pool.say = lambda text: None
    return pool
