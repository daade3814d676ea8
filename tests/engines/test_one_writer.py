"""Of the training processes of a machine one writes the weights, and the engines of all read them."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import tiny
from processes import descendants, in_processes
from ranks import free_port, joined
from sampled import complete, ragged

from posttrain.core.types import UserError
from posttrain.engines import weight_sync
from posttrain.engines.engine_options import EngineOptions
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.engines.pool.engine_pool import EnginePool
from posttrain.engines.pool.pool_member import MemberState
from posttrain.engines.pool.replicas import open_pool
from posttrain.engines.weight_sync import OneWriter, SharedMemory
from posttrain.learners import process_group
from posttrain.learners.process_group import Processes
from posttrain.models.tokenizer.tokenizer import Tokenizer

OPTIONS = EngineOptions(8, replicas=2, cache_gib=0.1, seconds=30.0)
LETTERS = Tokenizer.train(["0123456789+-*/= .abcdefghijklmnopqrstuvwxyz"], 64, "characters")


def shared(rank: int, port: int, out: Path) -> None:
    """Two processes with an engine each: its replies, and where the weights are."""
    joined(rank, port)
    together = process_group.joined("cpu", 60.0)
    with closing(open_pool(tiny(LETTERS), LETTERS, OPTIONS.of(together))) as pool:
        for version in range(2):
            model = tiny(LETTERS, seed=version)
            pool.load(model, version)
            assert replies(pool) == replies(LocalEngine(model, LETTERS, slots=8))
            is_there_once(pool, together, version)
        [member] = pool.members
        if rank == 1:  # the process that did not write: its engine comes back, and reads what the other one wrote
            os.kill(descendants(member.link.process.child.process.pid)[0], signal.SIGKILL)  # type: ignore[attr-defined]
            end = time.monotonic() + 60
            while not (pool.counts()["restarts"] and member.state is MemberState.READY):
                pool.poll()
                assert time.monotonic() < end
            assert replies(pool) == replies(LocalEngine(model, LETTERS, slots=8))
        together.gather(None)
        refused(pool, together)
    assert not [target for target in map(target_of, Path("/proc/self/fd").iterdir()) if "posttrain weights" in target]
    (out / f"{rank}").write_text("shared")


def target_of(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:  # of the list itself
        return ""


def is_there_once(pool: EnginePool, together: Processes, version: int) -> None:
    transport: Any = pool.members[0].place.transport
    offer = transport.offer
    ranks = together.gather((os.getpid(), os.fstat(transport.memory.descriptor).st_blocks * 512, offer))
    (writer, written, _), (_, unwritten, theirs) = ranks
    assert offer == theirs and offer["version"] == version and offer["file"].startswith(f"/proc/{writer}/fd/")
    assert written >= transport.memory.weight_layout.bytes and unwritten == 0


def refused(pool: EnginePool, together: Processes) -> None:
    """If the writer fails, all processes end with its error."""

    def put(weights: Any, version: int) -> None:
        raise UserError("no memory is left")

    if together.rank == 0:
        pool.members[0].place.transport.memory.put = put  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="no memory is left"):
        try:
            pool.load(tiny(LETTERS), 2)
        except UserError as error:
            together.fail(error)
            raise


def replies(engine: Any) -> Any:
    return {id: done.tokens for id, done in complete(engine, *ragged(12)).items()}


def test_processes_of_a_machine_share_the_weights_that_one_of_them_writes(tmp_path: Path) -> None:
    in_processes(shared, (free_port(), tmp_path), 2)
    assert [(tmp_path / name).read_text() for name in "01"] == ["shared"] * 2


@pytest.mark.parametrize("rank", range(5))
def test_each_machine_has_a_writer_of_its_own(rank: int) -> None:
    machines, met = ["a", "b", "a", "b", "c"], list[int]()

    def gather(given: Any) -> list[Any]:
        if given is None and not met:
            met.append(rank), passed.clear()
        return [*machines] if given == weight_sync.machine() else [f"memory of {place}" for place in range(5)]

    passed: list[str] = []  # since all processes met
    memory: Any = SimpleNamespace(
        put=lambda weights, version: passed.append("written"), offer=None,
        weight_layout=SimpleNamespace(pass_by=lambda weights: passed.append("passed by")),
    )  # fmt: skip
    world: Any = SimpleNamespace(rank=rank, gather=gather, apart=lambda: world)
    transport = OneWriter(memory, world)
    transport.put(None, 0)
    writer = [0, 1, 0, 1, 4][rank]
    assert transport.offer == f"memory of {writer}" and passed == ["written" if writer == rank else "passed by"]
    assert met, "engines of any process read the previous version until then"


def test_machines_are_told_apart_by_host_process_numbers_and_user(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {weight_sync.machine()}
    with monkeypatch.context() as patch:
        patch.setattr(weight_sync.socket, "gethostname", lambda: "another")
        here.add(weight_sync.machine())
    with monkeypatch.context() as patch:
        patch.setattr(weight_sync.os, "stat", lambda place: SimpleNamespace(st_ino=1))
        here.add(weight_sync.machine())
    monkeypatch.setattr(weight_sync.os, "getuid", lambda: 4711)
    assert len(here | {weight_sync.machine()}) == 4


def test_a_process_that_does_not_write_takes_part_in_gathering_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gathered = tiny(LETTERS), list[Any]()
    layout = weight_sync.WeightLayout(model, torch.float32, lambda m: m.named_parameters())
    monkeypatch.setattr(weight_sync, "whole", lambda x: gathered.append(x) or x)
    layout.pass_by(model)
    assert not gathered
    monkeypatch.setattr(weight_sync, "is_sharded", lambda x: True)
    layout.pass_by(model)
    assert list(map(id, gathered)) == list(map(id, model.parameters()))


def test_the_checksum_is_that_of_the_numbers_wherever_they_are() -> None:
    bytes_ = torch.arange(3 * 8 * weight_sync.BLOCK + 5).to(torch.uint8)
    shifted = torch.cat((bytes_[:3], bytes_))[3:]
    changed = bytes_.clone()
    changed[-1] += 1
    found = [weight_sync.checksum_of([("a", x)]) for x in (bytes_, shifted, changed)]
    assert shifted.storage_offset() % 8 and found[0] == found[1] != found[2]


def test_engines_of_one_process_alone_have_its_memory() -> None:
    with closing(open_pool(tiny(LETTERS), LETTERS, EngineOptions(4, replicas=1))) as pool:
        assert isinstance(pool.members[0].place.transport, SharedMemory)
