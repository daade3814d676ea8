"""A pool of engines samples what one engine samples, whatever becomes of its parts."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from conftest import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from inference_servers import leaves_no_process, ragged, sampled, until
from pools import SECONDS, Put, Score, World, pool_of
from processes import descendants

import posttrain
from posttrain.core.protocols import Engine
from posttrain.core.types import Completion, Sampling, Turn, UserError
from posttrain.engines.engine_options import EngineOptions
from posttrain.engines.local.engine_weights import named_weights, own_copy
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.engines.pool.engine_pool import EnginePool
from posttrain.engines.pool.pool_member import MemberState, PoolMember
from posttrain.engines.pool.pool_protocol import Gone, Wire, decode_completion
from posttrain.engines.pool.ray_engines import INWARD, RayWeights
from posttrain.engines.pool.replicas import open_pool
from posttrain.engines.servers.server_setup import server_layout
from posttrain.engines.vllm.gpu_transfer import GPUTransfer
from posttrain.engines.weight_probe import LIMIT, WeightProbe
from posttrain.engines.weight_sync import (
    Received,
    SharedMemory,
    Stored,
    WeightLayout,
    checksum_of,
    checksum_of_names,
    offered,
)
from posttrain.models.native.decoder import Decoder
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.record.rollout_reading import read_rollouts

# -- what may happen in any order --------------------------------------------------------------------------------------


class Interleaved:
    """A run that asks, cancels and loads, while engines do what they do."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        calm = World(self.rng, 0)  # it is a mistake of the user's if they do not even start
        self.world, self.transport = calm, Put(calm)
        self.pool = pool_of(calm, self.rng.randrange(1, 4), self.transport)
        self.open: dict[int, int] = {}  # id -> how often it was asked for and not answered
        self.answers = Counter[int]()
        self.next, self.version = 0, 0
        self.load()  # or are never ready
        calm.mishaps = self.rng.randrange(12)

    def load(self) -> None:
        self.version += 1
        self.pool.load(self.version, self.version)
        assert any(m.state is MemberState.READY for m in self.pool.members)

    def submit(self) -> None:
        for _ in range(self.rng.randrange(1, 9)):
            self.pool.submit(self.next, [self.rng.randrange(3)], Sampling(max_tokens=self.rng.randrange(1, 9)))
            self.open[self.next] = 1
            self.next += 1

    def cancel(self) -> None:
        if self.open:
            id = self.rng.choice(list(self.open))
            self.pool.cancel(id)
            del self.open[id]

    def poll(self) -> None:
        for done in self.pool.poll():
            assert done.id in self.open, "answered twice, or nobody asked"
            del self.open[done.id]
            assert list(done.tokens) == [self.version] and done.version == self.version

    def rest(self) -> None:
        if not self.open and not self.pool._finished and not self.pool._queue and not self.pool._submitted:
            told = [m.link for m in self.pool.members if m.state is MemberState.READY]
            self.pool.rest()
            assert all(link.asleep or link.ended for link in told), "an update begins while one frees its memory"

    def finish(self) -> None:
        polls = 0
        while self.open:
            self.poll()
            polls += 1
            assert polls < 3000, (self.open, self.world.happened, [m.state for m in self.pool.members])


HAPPENED = Counter[str]()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_happens_each_request_is_answered_once_by_the_loaded_weights(seed: int) -> None:
    run = Interleaved(seed)
    for _ in range(run.rng.randrange(1, 4)):
        run.load()
        for _ in range(run.rng.randrange(12)):
            run.rng.choice((run.submit, run.submit, run.poll, run.poll, run.cancel, run.rest))()
        run.finish()
    known = Counter(run.world.happened)
    assert run.pool.counts()["duplicate_answers"] <= known["answers twice"] + known["babbles"]
    run.pool.close()
    assert all(engine.ended for engine in run.world.engines), "an engine is left behind"
    HAPPENED.update(run.world.happened)


def test_all_that_can_go_wrong_did() -> None:
    for seed in range(60):
        run = Interleaved(seed)
        run.world.mishaps = 12
        run.load()
        run.submit()
        run.finish()
        HAPPENED.update(run.world.happened)
    assert HAPPENED.keys() == {
        "dies", "stops", "babbles", "binds nothing", "wrong checksum", "another version", "answers twice",
        "weights do not arrive",
    }  # fmt: skip


def test_a_group_stays_together_up_to_a_fair_share() -> None:
    world = World(random.Random(0), 0)
    pool = pool_of(world, 2, Put(world))
    pool.load(1, 1)
    for engine in world.engines:
        engine.stopped = True
    for id, prompt in enumerate([1, 2, 3, 4] * 2):
        pool.submit(id, [prompt] * 3, Sampling(max_tokens=5))
    pool.poll()
    prompts = [[request.prompt for request in m.requests.values()] for m in pool.members]
    assert [m.tokens for m in pool.members] == [32, 32]
    assert [len(set(own)) for own in prompts] == [2, 2], "each group's prompt is computed by one of them"
    for member in pool.members:
        member.properties["slots"] = 100
    for id in range(8, 16):
        pool.submit(id, [9], Sampling(max_tokens=1))
    pool.poll()
    assert [m.tokens for m in pool.members] == [40, 40], "and nobody idles for it"
    for engine in world.engines:
        engine.stopped = False
    done: list[Completion] = []
    while len(done) < 16:
        done += pool.poll()
    assert not any(m.tokens or m.requests for m in pool.members)


def test_all_engines_gone_and_the_budget_spent_ends_it_with_exit_code_1() -> None:
    world = World(random.Random(1), 0)
    pool = pool_of(world, 2, Put(world), restarts=2)
    pool.load(1, 1)
    pool.submit(0, [1], Sampling())
    with pytest.raises(
        UserError, match=r"each failed 3 times in a row \(--engine-restarts 2\); the last failure"
    ) as caught:
        while True:
            for engine in world.engines:
                engine.closed = True
            pool.poll()
    assert caught.value.code == 1 and len(world.engines) == 6
    born = [engine.born for engine in world.engines]
    assert born[4] - born[2] >= 1 and born[5] - born[3] >= 1, "there is a pause before a second start in a row"


def test_a_cancelled_request_is_not_answered_wherever_it_is() -> None:
    world = World(random.Random(3), 0)
    pool = pool_of(world, 1, Put(world))
    pool.load(1, 1)
    pool.submit(0, [1], Sampling())
    pool.cancel(0)  # nobody has it yet
    engine = world.engines[0]
    engine.stopped = True
    pool.submit(1, [1], Sampling())
    pool.poll()
    pool.cancel(1)  # the engine has it
    assert [message[0] for message in engine.inbox] == ["submit", "cancel"] and pool.members[0].tokens == 0
    pool.submit(2, [1], Sampling())
    pool.poll()
    pool._finished, ticket = [], next(iter(pool.members[0].requests))
    pool._handle(pool.members[0], "done", [ticket, [[1], [-1.0], "", "eos", 1]])
    pool.cancel(2)  # it is answered, and nobody has seen that
    assert pool.poll() == []


def test_an_engine_that_was_of_use_has_its_whole_budget_again() -> None:
    world = World(random.Random(2), 0)
    pool = pool_of(world, 1, Put(world), restarts=1)
    for version in range(5):
        pool.load(version, version)
        pool.submit(0, [1], Sampling())
        while not pool.poll():
            pass
        world.engines[-1].closed = True
    assert len(world.engines) == 5


def test_what_is_lost_is_asked_first_and_goes_on_elsewhere() -> None:
    world = World(random.Random(4), 0)
    pool = pool_of(world, 2, Put(world), restarts=0)
    pool.load(1, 1)
    for id in range(12):
        pool.submit(id, [id], Sampling(max_tokens=3), keep=True)
    for engine in world.engines:
        engine.stopped = True
    pool.poll()
    owed = [request.id for request in pool.members[0].requests.values()]
    later = list(pool._queue)
    assert len(owed) == 4 and len(later) == 4, "each has one more than its slots"
    world.engines[0].closed = True
    pool.poll()
    assert list(pool._queue) == [*owed, *later]
    world.engines[1].stopped = False
    answered: list[Completion] = []
    while len(answered) < 12:
        answered += pool.poll()
    assert set(pool._prefix_owner.values()) == {pool.members[1]}
    pool.load(2, 2)
    assert not pool._prefix_owner, "what was kept was computed with other weights"


def test_what_an_engine_keeps_is_gone_with_it_and_nobody_waits_for_it() -> None:
    world = World(random.Random(5), 0)
    pool = pool_of(world, 2, Put(world), restarts=0)
    pool.load(1, 1)
    pool.submit(0, [1], Sampling(max_tokens=3), keep=True)
    while not pool.poll():
        pass
    home = pool._prefix_owner[0]
    world.engines[pool.members.index(home)].closed = True
    pool.submit(0, [1, 2], Sampling(max_tokens=3), keep=True)
    polls = 0
    while not pool.poll():
        polls += 1
        assert polls < 100, "it waits for an engine that is gone"


def test_another_engine_is_told_where_the_first_prompt_of_an_episode_ended() -> None:
    world = World(random.Random(5), 0)
    pool = pool_of(world, 2, Put(world), restarts=0)
    pool.load(1, 1)
    for id in range(2):
        pool.submit(id, [7, id], Sampling(max_tokens=3), keep=True)
    found = 0
    while found < 2:
        found += len(pool.poll())
    pool.copy(0, 2, 3)
    world.engines[pool.members.index(pool._prefix_owner[0])].closed = True
    for engine in world.engines:
        engine.stopped = True
    for id, prompt in enumerate(([7, 0, 1, 8], [7, 1, 9], [7, 0, 1, 6])):  # replies are [1], of version 1
        pool.submit(id, prompt, Sampling(max_tokens=3), keep=True)
    pool.poll()
    pool.poll()
    asked = {message[2]: (message[3], message[4]) for e in world.engines for message in e.inbox if not e.closed}
    assert asked == {0: ([7, 0], [1, 8]), 1: ([7, 1, 9], []), 2: ([7, 0], [1, 6])}


def test_silence_counts_only_while_something_is_owed_and_the_pool_listens() -> None:
    world = World(random.Random(6), 0)
    pool = pool_of(world, 2, Put(world))
    pool.load(1, 1)
    pool.submit(0, [1], Sampling(max_tokens=3))
    pool.poll()
    idle, works = sorted(pool.members, key=lambda m: len(m.requests))
    engine = world.engines[pool.members.index(works)]
    engine.stopped = True
    world.now += 1000  # an update took that long
    pool.poll()
    assert works.state is MemberState.READY, "nobody has listened"
    for _ in range(40):
        engine.outbox.append(["alive"])
        pool.poll()
    assert works.state is MemberState.READY and works.requests, "it says that it lives"
    assert idle.state is MemberState.READY and idle.silent == 0, "it has nothing to say"
    while works.state is MemberState.READY:
        pool.poll()
    assert pool.counts()["resubmitted"] == 1


def test_an_engine_that_does_not_fall_asleep_in_time_is_lost_and_starts_again_after_the_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = list[float]()
    monkeypatch.setattr("posttrain.engines.pool.engine_pool.release_cached_memory", lambda: released.append(world.now))
    world = World(random.Random(0), 0)
    pool = pool_of(world, 2, Put(world))
    pool.load(0, 0)
    assert len(released) == 1, "before they load"
    world.engines[0].stopped = True
    begun = world.now
    pool.rest()
    assert world.now - begun > SECONDS and world.engines[0].ended and world.engines[1].asleep
    assert [m.state for m in pool.members] == [MemberState.DEAD, MemberState.STALE]
    pool.poll()
    assert len(world.engines) == 2 and len(released) == 1, "the learner has the memory now"
    pool.load(1, 1)
    assert len(world.engines) == 3 and not world.engines[1].asleep
    assert len(released) == 4, "before one loads, before the other one starts again, and before that loads"


def test_engines_without_an_offer_may_rest() -> None:
    world = World(random.Random(0), 0)
    transport = Put(world)
    pool = pool_of(world, 1, transport, restarts=0)
    pool.load(0, 0)
    transport.offer = None  # as after a transfer from GPU to GPU
    pool.rest()
    pool.poll()
    pool.load(1, 1)
    assert pool.members[0].state is MemberState.READY


def test_an_engine_that_the_weights_did_not_reach_is_lost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world, told = World(random.Random(0), 0), list[str]()
    transport = Put(world)
    pool = pool_of(world, 2, transport)
    pool.say = told.append
    send = transport.send
    monkeypatch.setattr(transport, "send", lambda to: {r.name: "no way" for r in to if r.name == "1" and r.first})
    pool.load(1, 1)
    assert told[0] == "the engine 1 is lost: no way; it restarts in 0 s" and world.engines[1].ended
    assert not world.engines[1].inbox and pool.members[0].state is MemberState.READY
    assert told[-1].endswith("it is not restarted before another engine is ready") and len(told) < 4
    monkeypatch.setattr(transport, "send", send)
    until(pool, lambda: pool.members[1].state is MemberState.READY)


@pytest.mark.parametrize(("restarts", "starts"), [(0, 1), (1, 2), (9, 2)])
def test_engines_that_were_never_ready_end_the_run_when_one_fails_again(restarts: int, starts: int) -> None:
    """As a mistake of the user's, which no launcher should repeat: each start would end in the same way."""
    world = World(random.Random(0), 0)
    pool = pool_of(world, 1, Put(world), restarts)
    pool.members[0].link.act = lambda: setattr(pool.members[0].link, "closed", True)  # type: ignore[attr-defined]
    opened = pool.members[0].place.open

    def dying() -> Any:
        engine: Any = opened()
        read = engine.read
        engine.read = lambda what, *more: setattr(engine, "closed", True) if what == "load" else read(what, *more)
        return engine

    pool.members[0].place.open = dying  # type: ignore[method-assign]
    with pytest.raises(UserError, match="it is gone") as told:
        pool.load(1, 1)
    assert told.value.code == 2 and len(world.engines) == starts


def test_an_engine_has_its_whole_budget_once_one_was_ready() -> None:
    world, said = World(random.Random(0), 0), list[str]()
    pool = pool_of(world, 2, Put(world), restarts=3)
    pool.say = said.append
    world.engines[1].closed = True  # before it was ready, as it will be each time
    opened = pool.members[1].place.open

    def dead() -> Any:
        engine: Any = opened()
        engine.closed = True
        return engine

    pool.load(1, 1)
    assert pool.members[0].state is MemberState.READY
    pool.members[1].link.closed = True  # type: ignore[attr-defined]
    pool.members[1].place.open = dead  # type: ignore[method-assign]
    until(pool, lambda: bool(said) and said[-1].endswith("it is not restarted"))
    world.engines[0].closed = True
    pool.members[0].place.open = dead  # type: ignore[method-assign]
    with pytest.raises(UserError, match="no engine is left, as each failed 4 times in a row") as told:
        until(pool, lambda: False)
    assert told.value.code == 1


def test_the_weight_probe_is_told_who_had_the_version_before(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []

    def deviation(self: Score, found: Any, had_previous: bool = False) -> tuple[float, str | None]:
        told.append(had_previous)
        return 0.0, None

    monkeypatch.setattr(Score, "deviation", deviation)
    world = World(random.Random(7), 0)
    pool = pool_of(world, 1, Put(world))
    for version in (3, 4, 6):
        pool.load(version, version)
    world.engines[0].closed = True
    pool.poll()
    pool.load(7, 7)
    assert told == [False, True, True, False], "one that has just started never had it"


def test_an_engine_that_was_of_use_once_is_not_started_for_ever() -> None:
    world = World(random.Random(8), 0)
    pool = pool_of(world, 1, Put(world), restarts=1)
    pool.load(1, 1)
    pool.submit(0, [1], Sampling())
    while not pool.poll():
        pass
    world.engines[-1].closed = True
    pool.load(2, 2)
    world.engines[-1].closed = True  # it has not answered since
    with pytest.raises(UserError, match="failed 2 times in a row"):
        pool.load(3, 3)


# -- the probe --------------------------------------------------------------------------------------------------------


def sung(probe: WeightProbe, engine: Engine) -> dict[int, Completion]:
    for place, (prompt, sampling) in enumerate(probe.requests()):
        engine.submit(place, prompt, sampling)
    found: dict[int, Completion] = {}
    while len(found) < len(probe.requests()):
        found |= {done.id: done for done in engine.poll()}
    return found


def test_the_weight_probe_hears_weights_that_were_handed_over_and_reached_nothing(tokenizer: Tokenizer) -> None:
    learner = tiny(tokenizer)
    engine, probe = LocalEngine(learner, tokenizer), WeightProbe(learner, LIMIT)
    assert len(probe.requests()) == 32
    probe.look(learner)
    far, problem = probe.deviation(sung(probe, engine))
    assert far < 1e-5 and problem is None
    other = LocalEngine(tiny(tokenizer, seed=1), tokenizer)
    far, problem = probe.deviation(sung(probe, other))
    assert far > LIMIT and problem is not None and "off the learner's" in problem
    moved = own_copy(learner)  # by one small update, far below the limit
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.mul_(1 + 2e-4)
    probe.look(moved)
    far, problem = probe.deviation(sung(probe, engine), had_previous=True)
    assert 1e-4 < far < LIMIT and problem is not None and "still samples with the old weights" in problem
    assert probe.deviation(sung(probe, LocalEngine(moved, tokenizer)), had_previous=True)[1] is None  # type: ignore[arg-type]
    probe.look(moved)
    assert probe.deviation(sung(probe, LocalEngine(moved, tokenizer)), had_previous=True)[1] is None  # type: ignore[arg-type]
    with torch.no_grad():
        next(moved.parameters()).fill_(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        probe.look(moved)


# -- weight sync and wire ------------------------------------------------------------------------------------------------


def test_weights_arrive_to_the_bit(tokenizer: Tokenizer) -> None:
    first, second = tiny(tokenizer), tiny(tokenizer, seed=1)
    laid = WeightLayout(first, torch.float32, named_weights)
    memory = SharedMemory(laid)
    for version, model in enumerate((first, second)):
        memory.put(model, version)
        offer = json.loads(json.dumps(memory.offer))
        received = dict(Received(json.loads(json.dumps(laid.described)), offered(offer)).named_parameters())
        assert received.keys() == dict(model.named_parameters()).keys() and offer["version"] == version
        assert all(torch.equal(received[name], own) for name, own in model.named_parameters())
    memory.close()
    found = offer["checksum"]
    assert found == checksum_of(second.named_parameters())
    assert found != checksum_of(first.named_parameters())
    one, *others = ((name, tensor.detach().clone()) for name, tensor in second.named_parameters())
    one[1].view(-1)[0] += 1
    assert checksum_of([one, *others]) != found, "all of it counts"


@pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097, 3 * 4096 + 5])
def test_a_checksum_notices_each_changed_number_and_blocks_that_changed_places(count: int) -> None:
    content = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(torch.bfloat16)
    found = checksum_of([("w", content)])
    place = Stored("w", (count,), 64)
    memory = torch.zeros(64 + 2 * count, dtype=torch.uint8)
    place.tensor_in(memory, torch.bfloat16).copy_(content)
    assert place.checksum(memory, torch.bfloat16, 0) == found and checksum_of([("v", content)]) != found
    shifted = torch.cat([content[:1], content])[1:]  # begins at no multiple of eight bytes
    assert checksum_of([("w", shifted)]) == found
    for at in {*range(0, count, 511), *range(max(0, count - 9), count)}:
        bits = content.clone().view(torch.int16)
        bits[at] ^= 1
        assert checksum_of([("w", bits.view(torch.bfloat16))]) != found, at
    if count > 2 * 4096:
        assert checksum_of([("w", torch.cat([content[4096:8192], content[:4096], content[8192:]]))]) != found


def test_weights_that_do_not_fit_into_the_object_store_end_the_run_in_one_line(tokenizer: Tokenizer) -> None:
    class RayError(Exception):
        pass

    def put(weights: Any) -> None:
        raise RayError("the object store is full\nhelp")

    model, ray = tiny(tokenizer), ModuleType("ray")
    ray.put, ray.exceptions = put, SimpleNamespace(RayError=RayError)  # type: ignore[attr-defined]
    transport = RayWeights(ray, WeightLayout(model, torch.float32, named_weights))
    with pytest.raises(UserError, match="cannot be put into Ray's object store: the object store is full help"):
        transport.put(model, 0)


def ends() -> tuple[Wire, socket.socket]:
    ours, theirs = socket.socketpair()
    return Wire(ours), theirs


def test_what_was_said_before_the_end_is_heard() -> None:
    ours, theirs = ends()
    Wire(theirs).send("failed", "why")
    theirs.close()
    assert ours.receive() == [["failed", "why"]]
    with pytest.raises(Gone, match="closed"):
        ours.receive()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"\xff\xff\xff\xff", "announced a message of 4294967295 bytes"),
        (b"\0\0\0\x03{{{", "invalid JSON"),
        (b'\0\0\0\x07["a",1', "closed"),  # and then no more
        (b"\0\0\0\x02[]", "not a message"),
        (b"\0\0\0\x02{}", "not a message"),
        (b'\0\0\0\x09["a",NaN]', "invalid JSON"),
    ],
)
def test_what_comes_is_read_with_suspicion(said: bytes, why: str) -> None:
    wire, peer = ends()
    peer.sendall(said)
    peer.close()
    with pytest.raises(Gone, match=why):
        while True:
            wire.receive()
    wire.close()


@pytest.mark.parametrize(
    "said",
    [
        [[1], [-1.0], "", "eos"],
        [[50], [-1.0], "", "eos", 0],
        [[True], [-1.0], "", "eos", 0],
        [[1, 2, 3], [-1.0] * 3, "", "eos", 0],
        [[1], [-1.0, -1.0], "", "eos", 0],
        [[1], [1.0], "", "eos", 0],
        [[1], ["x"], "", "eos", 0],
        [[1], [-1.0], 3, "eos", 0],
        [[1], [-1.0], "", "sleep", 0],
        [[], [], "", "eos", 0],
        None,
    ],
)
def test_a_reply_that_is_none_is_not_taken_for_one(said: Any) -> None:
    assert decode_completion(7, [[1], [-1.0], "", "eos", 0], 50, 2).id == 7
    with pytest.raises(Gone, match="an invalid completion"):
        decode_completion(7, said, 50, 2)


def test_several_processes_share_the_engines_out() -> None:
    class Of:
        size = 3

        def __init__(self, rank: int) -> None:
            self.rank = rank

    dealt = [EngineOptions(replicas=4, urls="abcd").of(Of(rank)) for rank in range(3)]  # type: ignore[arg-type]
    assert [each.replicas for each in dealt] == [2, 1, 1]
    assert [list(each.urls) for each in dealt] == [["a", "d"], ["b"], ["c"]]
    with pytest.raises(UserError, match="each of 3 processes"):
        EngineOptions(replicas=2).of(Of(0))  # type: ignore[arg-type]
    assert EngineOptions().of(Of(1)).replicas == 0  # type: ignore[arg-type]


class Sender:
    """vLLM's trainer side as its documentation has it: over NCCL, `update_weights` runs beside the broadcast."""

    backend = ""
    on: ClassVar[dict[int, str]] = {}  # device on which a thread works, by its number
    made: ClassVar[list[Sender]] = []

    @classmethod
    def trainer_init(cls, info: Any, *, client: Any, source: Any) -> Sender:
        sender = cls()
        sender.client, sender.source, sender.room = client, source, info[-1]
        client.init_weight_transfer_engine({"info": [*info]})
        Sender.made.append(sender)
        return sender

    client: Any
    source: Any
    room: int

    def send_weights(self) -> None:
        meta = self.source.metadata()
        told = {
            "names": [m[0] for m in meta],
            "dtype_names": ["float32"] * len(meta),
            "shapes": [list(m[2]) for m in meta],
        }
        self.client.start_weight_update()
        for piece in self._pieces(told) if self.backend == "ipc" else [told]:
            self.client.update_weights(piece)
        assert not torch.is_grad_enabled() and self.on[threading.get_ident()] == "cpu", "both are a thread's own"
        self.sent = dict(self.source)
        self.client.finish_weight_update()

    def _pieces(self, told: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Tensors in a buffer that is used again, as many as fit; one that does not fit is refused."""
        sizes = [4 * math.prod(shape) for shape in told["shapes"]]
        assert max(sizes) <= self.room, "Increase buffer_size_bytes"
        first = 0
        while first < len(sizes):
            last = first + 1
            while last < len(sizes) and sum(sizes[first : last + 1]) <= self.room:
                last += 1
            part = {name: values[first:last] for name, values in told.items()}
            yield {**part, "tensor_sizes": sizes[first:last], "ipc_handles": {"card": ("handle",)}}
            first = last


def install_trainer(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install stand-ins of the classes of vLLM's trainer side that a backend needs."""
    folder = "vllm.distributed.weight_transfer"
    for name in ("vllm", "vllm.distributed", folder, f"{folder}.base", f"{folder}.{backend}_engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    base, engine, kind = sys.modules[f"{folder}.base"], sys.modules[f"{folder}.{backend}_engine"], backend.upper()
    monkeypatch.setattr(base, "ParamMeta", lambda *what: what, raising=False)
    monkeypatch.setattr(base, "WeightSource", object, raising=False)
    about = {
        "nccl": lambda *what, rank: (*what, rank),
        "ipc": lambda *, rank, packed, packed_buffer_size_bytes: (rank, packed, packed_buffer_size_bytes),
    }
    monkeypatch.setattr(engine, f"{kind}TrainerInitInfo", about[backend], raising=False)
    monkeypatch.setattr("posttrain.engines.vllm.gpu_transfer.PIECE", 1000)
    on: dict[int, str] = {}

    @contextmanager
    def working_on(device: torch.device) -> Iterator[None]:
        on[threading.get_ident()] = device.type
        try:
            yield
        finally:
            del on[threading.get_ident()]

    monkeypatch.setattr("posttrain.engines.vllm.gpu_transfer.working_on", working_on)
    own = type("Own", (Sender,), {"backend": backend, "on": on})
    monkeypatch.setattr(engine, f"{kind}TrainerWeightTransferEngine", own, raising=False)
    Sender.made.clear()


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_weights_from_card_to_card_follow_the_documented_calls(
    backend: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_trainer(backend, monkeypatch)
    first, second = tiny(tokenizer), tiny(tokenizer, seed=1)
    transport = GPUTransfer(backend, server_layout(first, torch.float32), 20.0)
    world = World(random.Random(0), 0)
    world.gpus = 6
    pool = pool_of(world, 2, transport)
    pool.seconds = 60.0  # time leaps here, and no engine is late
    monkeypatch.setattr(pool.probe, "deviation", lambda found, had_previous: (0.0, None))  # the fakes sample nothing
    begun = [*["get_world_size"] * (backend == "nccl"), "init_weight_transfer_engine"]
    largest = 4 * first.config.hidden * max(first.config.vocab, first.config.intermediate)
    pool.load(first, 0)
    pool.load(second, 1)
    for made in world.engines:
        joined = made.called[len(begun) - 1][1]["info"]
        assert joined == [0, True, largest] or joined[-2] == 1 + 6, "the learner, and the processes of the server"
        called = [name for name, _ in made.called]
        pieces = called.count("update_weights") // 2
        assert (pieces > 2) == (backend == "ipc"), "in pieces of a largest matrix"
        whole = ["start_weight_update", *["update_weights"] * pieces, "finish_weight_update"]
        assert called == [*begun, *whole, *whole]
        parts = [info for name, info in made.called if name == "update_weights"][:pieces]
        assert all(("ipc_handles_pickled" in part) == (backend == "ipc") for part in parts)
        told = {name: [x for part in parts for x in part[name]] for name in ("names", "dtype_names", "shapes")}
        assert "lm_head.weight" in told["names"] and told["dtype_names"] == ["float32"] * len(told["names"])
        assert not any("ipc_handles" in part for part in parts)
    assert len(Sender.made) == 2 and all(torch.equal(s.sent["lm_head.weight"], second.head.weight) for s in Sender.made)
    checksum = checksum_of_names(told["names"], told["dtype_names"], told["shapes"])
    transport.put(first, 5)
    assert transport.offer == {"version": 5, "checksum": checksum}
    transport.done()

    world.engines[0].closed = True  # weights are gone when it is back, so it waits for the next ones
    pool.submit(0, [1], Sampling(max_tokens=1))
    while not pool.poll():
        pass
    until(pool, lambda: pool.members[0].state is MemberState.STALE)
    pool.load(first, 2)
    assert [m.state for m in pool.members] == [MemberState.READY, MemberState.READY]
    assert [name for name, _ in world.engines[2].called] == [*begun, *whole]
    world.engines[2].closed = True
    until(pool, lambda: pool.members[0].state is MemberState.STALE)
    pool.restarts = 0  # so that the other one is not started again
    world.engines[1].closed = True
    pool.submit(0, [1], Sampling(max_tokens=1))
    with pytest.raises(UserError, match="no engine is left"):
        until(pool, lambda: False)


# -- real processes ----------------------------------------------------------------------------------------------------


def worker_of(member: PoolMember) -> int:
    """The process that samples."""
    link: Any = member.link
    if hasattr(link, "actor"):
        call = link.actor.__ray_call__.options(concurrency_group=INWARD)
        return int(link.ray.get(call.remote(lambda actor: os.getpid())))
    return descendants(link.process.child.process.pid)[0]


NO_RAY = "Ray is not installed here: pip install posttrain[ray]"
LAUNCHES = ["local", pytest.param("ray", marks=[pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)])]


class Once:
    """The offers of a transport, of which the first one is changed on its way."""

    def __init__(self, transport: Any) -> None:
        self.transport, self.told = transport, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    @property
    def offer(self) -> Any:
        offer = self.transport.offer
        if self.told or offer is None:
            return offer
        self.told = True
        return {**offer, "version": offer["version"] + 1}  # what it gives back is not what was offered


@pytest.mark.parametrize("launch", LAUNCHES)
def test_engines_that_are_killed_stopped_or_wrong_change_no_token(launch: Any, tokenizer: Tokenizer) -> None:
    if launch == "ray":
        pytest.importorskip("ray", reason=NO_RAY)
    names = [f"{number}{' (Ray)' * (launch == 'ray')}" for number in range(2)]
    ended = {"local": r"\(exit code -9, SIGKILL\)", "ray": r"it failed: Ray lost it \(.*\)"}[launch]
    seconds = {"local": 2.0, "ray": 10.0}[launch]
    learner, later = tiny(tokenizer), tiny(tokenizer, seed=1)
    asked = ragged(60)
    local = LocalEngine(learner, tokenizer, slots=8)
    calm = sampled(local, asked)
    said: list[str] = []
    options = EngineOptions(8, replicas=2, cache_gib=0.1, seconds=seconds, launch=launch, cpus=0.5)
    with leaves_no_process(), closing(opened(learner, tokenizer, options)) as pool:
        pool.say = said.append
        first, second = pool.members
        assert pool.batch_invariant == local.batch_invariant and pool.backend == f"2 engines ({local.backend})"
        assert sampled(pool, asked) == calm and not said
        assert 0 <= pool.counts()["probe_gap"] < 1e-5

        os.kill(worker_of(second), signal.SIGKILL)  # while nothing is asked of it
        assert sampled(pool, asked, lambda: os.kill(worker_of(first), signal.SIGSTOP)) == calm
        assert re.fullmatch(rf"the engine {re.escape(names[1])} is lost: .*{ended}; it restarts in 0 s", said[0])
        assert f"the engine {names[0]} is lost: it sent nothing for {seconds:g} s" in said[1]
        assert pool.counts()["resubmitted"] > 0 == pool.counts()["duplicate_answers"]

        until(pool, lambda: all(m.state is MemberState.READY for m in pool.members))
        assert pool.counts()["restarts"] == 2

        second.place.transport = Once(second.place.transport)  # type: ignore[misc]
        kind: Any = type(first.place.transport)
        put, killed = kind.put, list[int]()

        def dies_during_load(self: Any, weights: Any, version: int) -> None:
            put(self, weights, version)
            if not killed:  # the weights are put once for each engine
                killed.append(worker_of(first))
                os.kill(killed[0], signal.SIGKILL)

        del said[:]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, "put", dies_during_load)
            pool.load(later, 1)
        assert any(f"engine {names[0]} is lost" in line for line in said)
        assert any(f"engine {names[1]} is lost: it loaded version 2" in line for line in said)
        other = LocalEngine(later, tokenizer, slots=8)
        other.load(later, 1)
        assert sampled(pool, asked) == sampled(other, asked)


def opened(model: Decoder, tokenizer: Tokenizer, options: EngineOptions) -> EnginePool:
    pool = open_pool(model, tokenizer, options)
    pool.load(model, 0)
    return pool


# -- whole runs --------------------------------------------------------------------------------------------------------

SUMS = [{"id": f"{a}{b}", "prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]


def talk(task: Any) -> Any:
    """Two turns, so that the second goes on from what the engine of the first has kept."""
    first = yield Turn(task["prompt"], max_tokens=5)
    second = yield Turn(f" {task['answer']} ", reward=len(set(first)) / 8)
    return sum(c.isdigit() for c in second) / 8


def run(out: Path, model: Path, env: Any = talk, **how: Any) -> posttrain.Run:
    options: dict[str, Any] = {"steps": 4, "prompts": 4, "group": 4, "max_tokens": 9, "lr": 1e-3, "held_out": 0.2,
                               "eval_every": 2, "env_workers": 0, "slots": 8, "quiet": True, "seed": 3}  # fmt: skip
    return posttrain.rl(SUMS, env, str(model), out=str(out), algorithm="grpo", **{**options, **how})


@pytest.fixture
def start(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    save_model(tiny(tokenizer), tmp_path / "start", tokenizer)
    return tmp_path / "start"


def same_course(one: Path, other: Path, steps: int = 4) -> None:
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    for step in range(1, steps + 1):
        assert read_rollouts(one, step) == read_rollouts(other, step)


def test_a_run_with_replicas_of_which_one_is_killed_is_the_run_without(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "one", start, async_steps=1, correction="truncate")
    poll, killed = EnginePool.poll, list[int]()

    def polled(self: EnginePool) -> list[Completion]:
        done = poll(self)
        if done and self.version == 2 and not killed:
            killed.append(worker_of(self.members[0]))
            os.kill(killed[0], signal.SIGKILL)
        return done

    monkeypatch.setattr(EnginePool, "poll", polled)
    with leaves_no_process():
        run(tmp_path / "two", start, replicas=2, async_steps=1, correction="truncate")
    same_course(tmp_path / "one", tmp_path / "two")
    timing = [json.loads(line) for line in (tmp_path / "two" / "timing.jsonl").read_text().splitlines()]
    evaluated = [posttrain.evaluate(SUMS[:5], talk, str(start), samples=3, env_workers=0, replicas=n) for n in (0, 1)]
    assert evaluated[0].rewards == evaluated[1].rewards
    assert len(killed) == 1 == timing[-1]["engines/restarts"] and all(row["engines/probe_gap"] < 1e-5 for row in timing)


def test_a_request_that_no_engine_can_carry_out_ends_the_run_in_one_line_and_no_engine(
    start: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        leaves_no_process(),
        pytest.raises(UserError, match=r"^a prompt of .* and --engine-cache is .*raise it") as caught,
    ):
        run(tmp_path / "run", start, replicas=2, engine_cache=1e-5)
    assert caught.value.code == 2 and "is lost" not in capfd.readouterr().err


def test_a_run_that_loses_all_its_engines_saves_and_says_how_to_go_on(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = EnginePool.load

    def lost(self: EnginePool, weights: Any, version: int) -> None:
        for member in self.members if version == 2 else ():
            os.kill(worker_of(member), signal.SIGKILL)
        load(self, weights, version)

    monkeypatch.setattr(EnginePool, "load", lost)
    with (
        leaves_no_process(),
        pytest.raises(UserError, match=r"no engine is left.*after step 2 with .* --resume") as caught,
    ):
        run(tmp_path / "run", start, replicas=1, engine_restarts=0, eval_every=0, held_out=0)
    assert caught.value.code == 1
    assert (tmp_path / "run" / "checkpoints" / "step-000002" / "manifest.json").exists()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_that_loses_actors_of_ray_and_is_resumed_is_the_run_without(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason=NO_RAY)
    run(tmp_path / "one", start)
    poll, load, killed = EnginePool.poll, EnginePool.load, list[int]()

    def kill(*members: PoolMember) -> None:
        for member in members:
            killed.append(worker_of(member))
            os.kill(killed[-1], signal.SIGKILL)

    def polled(self: EnginePool) -> list[Completion]:
        done = poll(self)
        if done and self.version == 1 and not killed:
            kill(self.members[0])
        return done

    def lost(self: EnginePool, weights: Any, version: int) -> None:
        if version == 3 and len(killed) == 1:
            self.restarts = 0
            kill(*self.members)
        load(self, weights, version)

    monkeypatch.setattr(EnginePool, "poll", polled)
    monkeypatch.setattr(EnginePool, "load", lost)
    how: dict[str, Any] = {"replicas": 2, "launch": "ray", "replica_cpus": 0.5}
    with leaves_no_process():
        with pytest.raises(UserError, match=r"no engine is left.*after step 3 with .* --resume"):
            run(tmp_path / "two", start, **how)
        run(tmp_path / "two", start, resume=True, **how)
    same_course(tmp_path / "one", tmp_path / "two")
    assert len(killed) == 3 and not (tmp_path / "two" / "weight-sync").exists()
