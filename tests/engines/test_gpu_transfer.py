"""Weights go from GPU to GPU to the engines of several training processes, also if these hold parts of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import tiny
from inference_servers import VLLM, ragged, sampled
from processes import in_processes
from ranks import free_port, joined

from posttrain.core.types import UserError
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.engines.pool.engine_pool import EnginePool
from posttrain.engines.pool.pool_member import MemberState
from posttrain.engines.pool.pool_protocol import Gone
from posttrain.engines.pool.replicas import probe_of
from posttrain.engines.servers.server_client import ServedRun
from posttrain.engines.servers.server_places import GivenServer
from posttrain.engines.servers.server_setup import server_layout
from posttrain.engines.vllm.gpu_transfer import AHEAD, GPUTransfer, WeightFeed
from posttrain.engines.vllm.vllm_client import VLLMClient
from posttrain.engines.weight_sync import Receiver
from posttrain.learners import process_group, sharded_decoder
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.row_shards import is_sharded
from posttrain.models.tokenizer.tokenizer import Tokenizer

LETTERS = Tokenizer.train(["0123456789+-*/= .abcdefghijklmnopqrstuvwxyz"], 64, "characters")
SECONDS = 60.0


def in_parts(rank: int, port: int, out: Path) -> None:
    """Two processes with halves of the weights. The first one has two servers, of which one is lost."""
    joined(rank, port)
    VLLM.install(out / f"packages {rank}", pytest.MonkeyPatch())
    together = process_group.joined("cpu", SECONDS)
    models = [tiny(LETTERS, seed=version) for version in range(3)]
    shard = partial(sharded_decoder.shard, size=2, device=torch.device("cpu"))
    parts: list[Any] = []
    for version, model in enumerate(models):
        if rank == 0:
            save_model(model, out / f"{version}", LETTERS)
        together.gather(None)
        parts.append(load_model(out / f"{version}", shard=shard, shares=2))
        sharded_decoder.open_shards(parts[-1], together, None)
    assert all(map(is_sharded, parts[0].parameters()))
    layout = server_layout(parts[0], torch.float32)
    run = ServedRun(LETTERS, models[0].eos_ids, 64, 8, 1.0, True, layout.described)
    transport = GPUTransfer("nccl", layout, SECONDS)
    with ExitStack() as opened:
        servers = [opened.enter_context(VLLM.running(models[2], LETTERS, out / f"{rank}{i}")) for i in range(2 - rank)]
        places = [GivenServer(url, VLLMClient, run, transport) for url, _ in servers]
        sizes = models[0].config.context, models[0].config.vocab
        probe = probe_of(parts[0], "float32")
        pool = opened.enter_context(closing(EnginePool(places, probe, *sizes, seconds=SECONDS, restarts=0)))
        for version in range(2):
            pool.load(parts[version], version)
            assert all(m.state is MemberState.READY for m in pool.members) and transport.offer is None
            assert sampled(pool, ragged(6)) == sampled(loaded(models[version], version), ragged(6))
        if rank == 0:
            servers[0][1].kill()
            servers[0][1].wait()
        pool.load(parts[2], 2)  # the other process gathers with this one, whatever becomes of its servers
        assert [m.state is MemberState.READY for m in pool.members] == [[False, True], [True]][rank]
        assert sampled(pool, ragged(6)) == sampled(loaded(models[2], 2), ragged(6))
        together.gather(None)
        if rank == 0:
            pool.load(parts[0], 3)
        else:  # all engines of this process are lost
            pool.probe.look(parts[0])
            transport.put(parts[0], 3)
            assert transport.send([]) == {} and transport.offer is None
        together.gather(None)
    (out / f"{rank} ended").touch()


def loaded(model: Any, version: int) -> LocalEngine:
    engine = LocalEngine(model, LETTERS, slots=8)
    engine.load(model, version)
    return engine


@pytest.mark.timeout(600)
def test_processes_with_parts_of_the_weights_gather_them_once_for_the_servers_of_each(tmp_path: Path) -> None:
    in_processes(in_parts, (free_port(), tmp_path), 2)
    assert all((tmp_path / f"{rank} ended").exists() for rank in range(2))


def read_all(feed: WeightFeed, found: list[Any]) -> None:
    try:
        for name, _ in feed:
            found.append(name)
    except Exception as error:
        found.append(error)


def given_to(
    feed: WeightFeed, count: int, alive: Callable[[], bool] = lambda: True, seconds: float = 60.0
) -> list[bool]:
    end = time.monotonic() + seconds
    return [feed.give(str(number), torch.zeros(1), None, end, alive) for number in range(count)]


def test_weights_are_gathered_no_faster_than_an_engine_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.engines.vllm.gpu_transfer.LOOK_SECONDS", 0.01)
    feed, found = WeightFeed(), list[Any]()
    assert given_to(feed, AHEAD + 1, seconds=0.0) == [True] * AHEAD + [False], "there is no room"
    assert not feed.give("more", torch.zeros(1), None, time.monotonic() + 60, lambda: False), "its reader has ended"
    reader = threading.Thread(target=read_all, args=(feed, found))
    reader.start()
    assert all(given_to(feed, 5))
    feed.end()
    feed.end(ValueError("it has ended before"))
    reader.join()
    assert found == ["0", "1", "0", "1", "2", "3", "4"]


def test_a_reader_of_half_of_the_weights_fails() -> None:
    feed, found = WeightFeed(), list[Any]()
    given_to(feed, 1)
    feed.end(ValueError("some are missing"))
    read_all(feed, found)
    assert found[0] == "0" and str(found[1]) == "some are missing"


class Trainer:
    """Stand-in of vLLM's trainer side, which is lost after `takes` tensors (0: never)."""

    def __init__(self, source: Any, takes: int) -> None:
        self.source, self.takes, self.client = source, takes, type("Client", (), {})()
        self.got: list[str] = []
        self.kinds = set[torch.dtype]()

    def send_weights(self) -> None:
        for name, tensor in self.source:
            self.got.append(name)
            self.kinds.add(tensor.dtype)
            if len(self.got) == self.takes:
                threading.Event().wait(self.hangs)
                raise ValueError("it is lost")

    hangs = 0.0


@pytest.mark.parametrize("hangs", [0.0, 60.0])
def test_an_engine_that_is_lost_or_hangs_does_not_keep_the_weights_from_the_others(
    hangs: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.engines.vllm.gpu_transfer.LOOK_SECONDS", 0.01)
    model = tiny(LETTERS)
    layout = server_layout(model, torch.bfloat16)
    made, connected = dict[str, Trainer](), list[str]()

    def connect(self: Any, name: str, call: Any) -> Trainer:
        connected.append(name)
        source = type("Source", (), {"__iter__": lambda _: iter(self.feed)})()
        made[name] = Trainer(source, 3 if name == "bad" else 0)
        made[name].hangs = hangs
        return made[name]

    monkeypatch.setattr("posttrain.engines.vllm.gpu_transfer._Sender._connect", connect)
    transport = GPUTransfer("nccl", layout, 0.3 if hangs else 60.0)
    transport.put(model, 0)
    to = [Receiver(name, True, lambda method, info: None) for name in ("good", "bad", "fine")]
    lost = transport.send(to)
    assert lost.keys() == {"bad"} and ("within 0.3 s" if hangs else "it is lost") in lost["bad"]
    assert made["good"].got == made["fine"].got == [stored.name for stored in layout.stored]
    assert transport.offer is not None, "this process has all weights, so an engine that starts again can get them"
    assert transport.send([replace(receiver, first=False) for receiver in to]).keys() == {"bad"}
    assert made["good"].got == [stored.name for stored in layout.stored] * 2 and made["good"].kinds == {torch.bfloat16}
    assert transport.send([to[2]]) == {} and connected == ["good", "bad", "fine", "bad", "fine"], "it started again"


class LimitedFeed:
    """A feed that has room for some tensors, and records how it ends."""

    def __init__(self, room: int) -> None:
        self.room, self.ends = room, list[Any]()

    def give(self, *more: Any) -> bool:
        self.room -= 1
        return self.room >= 0

    def end(self, error: Exception | None = None) -> None:
        self.ends.append(error)


def test_an_engine_that_was_too_slow_does_not_take_part_of_the_weights_for_all_of_them() -> None:
    model = tiny(LETTERS)
    transport = GPUTransfer("nccl", server_layout(model, torch.float32), 1.0)
    transport.put(model, 0)
    senders: list[Any] = [SimpleNamespace(feed=LimitedFeed(room), alive=lambda: True) for room in (1000, 5)]
    transport._feed(senders)
    whole, half = (sender.feed.ends for sender in senders)
    assert whole[0] is None and isinstance(half[0], Gone)
    broken: Any = SimpleNamespace(parameters=lambda: [], decoder=None)  # gathering fails
    transport._weights, senders[0].feed = broken, LimitedFeed(1000)
    with pytest.raises(UserError):
        transport._feed(senders[:1])
    assert isinstance(senders[0].feed.ends[0], Gone)
