"""Two real processes on torch.distributed: an update is that of one process with all of the rollouts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import in_processes
from torch import Tensor, nn
from update_cases import ROWS, Case, board, chosen_row, credit, feed, gathered, new_case, old_of

from posttrain.algorithms.all_algorithms import find
from posttrain.algorithms.policy import Algorithm, PolicyObjective
from posttrain.core.batch import Batch, Scores
from posttrain.core.protocols import Alone, World
from posttrain.core.rollouts import Rollout
from posttrain.core.types import UserError
from posttrain.learners import process_group
from posttrain.learners.process_group import FIRST_PAUSE, LONGEST_PAUSE, Elsewhere, Processes, backend, gpus_of_all
from posttrain.models.gpu_placement import GPUPlacement

GROUPS, SIZE = 3, 2
SPLITS = {"two groups and one": 4, "all and none": 6, "none and all": 0}
"""How many of the rollouts are process 0's."""
WARM = [chosen_row(find("ppo")), chosen_row(find("trpo"), advantage="gae")]
"""Rows to prove the critic's warm-up with: there the policy must not even feel the optimizer's weight decay."""


def micro_batches(case: Case, world: World, rollouts: Sequence[Rollout], texts: int, warm: bool) -> list[Batch]:
    """What this process feeds: its own rollouts, with credit and weights from the scoreboard of all."""
    boards = world.gather(board(case, rollouts))
    offset = sum(len(b.reward) for b in boards[: world.rank])
    old = [logp for own in world.gather(old_of(case, rollouts)) for logp in own]
    found = credit(case.row, Scores.join(boards), old)
    own = [list(range(i, min(i + 2, len(rollouts)))) for i in range(0, len(rollouts), 2)]
    share = case.texts[world.rank * texts :][:texts] if world.size > 1 else case.texts
    tokens = sum(t.n_scored for t in case.texts)
    batches = feed(case, rollouts, found, own, share, tokens, offset)
    return [replace(b, coefficients={**b.coefficients, "policy": 0.0}) for b in batches] if warm else batches


def updated(row: Algorithm, world: World, end: int, warm: bool) -> dict[str, Tensor]:
    """Two updates with the rollouts up to `end` in process 0; gradients of the first, weights after the second."""
    case = new_case(row, groups=GROUPS, size=SIZE, world=world)
    own = case.rollouts
    if world.size > 1:
        own = own[:end] if world.rank == 0 else own[end:]
    batches = micro_batches(case, world, own, 2, warm)
    stats = case.learner.update(batches, PolicyObjective(row))
    first = gathered(case.learner)
    case.learner.update(batches, PolicyObjective(row))
    every = [p for m in (case.learner.model, case.learner.critic) if m is not None for p in m.parameters()]
    norms = [stats[name][0] for name in ("grad_norm", "grad_norm/critic") if name in stats]
    return {
        "gradient": first,
        "weights": nn.utils.parameters_to_vector(every).detach().clone(),
        "norms": torch.tensor(norms, dtype=torch.float64),
        "moments": torch.tensor(sorted(s["step"].item() for s in case.learner.optimizer.state.values())),
    }


def cases() -> list[tuple[str, Algorithm, int, bool]]:
    found = []
    for name, end in SPLITS.items():
        for row in ROWS:
            if row.trust_region is not None:  # fewer iterations: time
                row = replace(row, trust_region=replace(row.trust_region, iterations=3))
            if name == "two groups and one" or row.name in ("ppo-ptx", "trpo", "sac", "dapo"):
                found.append((f"{row.name}, {name}", row, end, False))
    return [*found, *((f"warm-up of {row.name}", row, 4, True) for row in WARM)]


def one_of_two(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        world = Processes()
        assert (world.rank, world.size) == (rank, 2)
        assert world.gather({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
        own = torch.full((2,), rank + 1.0, requires_grad=True)
        total = world.sum(own)
        assert total.tolist() == [3.0, 3.0] and own.tolist() == [rank + 1.0] * 2 and not total.requires_grad
        found = {name: updated(row, world, end, warm) for name, row, end, warm in cases()}
        torch.save(found, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_update_of_two_processes_is_that_of_one_for_every_row(tmp_path: Path) -> None:
    in_processes(one_of_two, (str(tmp_path),), 2)  # one pair of processes runs all cases
    two = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    assert list(two[0]) == [name for name, *_ in cases()]
    every = {
        (row.name, warm): row for _, row, _, warm in cases()
    }  # one process has all rollouts, however others split them
    of_one = {(name, warm): updated(row, Alone(), 0, warm) for (name, warm), row in every.items()}
    for name, row, _, warm in cases():
        alone = of_one[row.name, warm]
        for process in two:
            assert (process[name]["gradient"] - alone["gradient"]).abs().max() < 1e-10, name
            assert (process[name]["weights"] - alone["weights"]).abs().max() < 1e-8, name
            assert torch.allclose(process[name]["norms"], alone["norms"], rtol=1e-10), name
            assert torch.equal(process[name]["moments"], alone["moments"]), f"{name}: the same parts were moved"
        assert torch.equal(two[0][name]["weights"], two[1][name]["weights"]), (
            f"{name}: bit for bit: they never drift apart"
        )


def test_joined_scoreboards_keep_groups_apart_and_order() -> None:
    case = new_case(chosen_row(find("ppo")), groups=GROUPS, size=SIZE)
    whole = board(case, case.rollouts)
    for parts in ((case.rollouts[:6], case.rollouts[6:]), (case.rollouts, []), ([], case.rollouts)):
        joined = Scores.join([board(case, part) for part in parts])
        for name in ("reward", "group", "length", "truncated", "success", "sampled"):
            assert torch.equal(getattr(joined, name), getattr(whole, name)), name
        assert joined.steps == whole.steps
        for name in ("value", "penalty"):
            pairs = zip(getattr(joined, name), getattr(whole, name), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


class Board(dict[str, str]):
    """A store on which the other process says that it is there after it was looked for some times."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks, self.noted, self.asked = looks, list[str](), 0

    def set(self, key: str, value: str) -> None:
        self.noted.append(key)
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        others = [key for key in keys if not key.endswith("/0") and "/" in key]
        if others:
            self.looks -= 1
            return self.looks < 0
        return all(key in self for key in keys)

    def delete_key(self, key: str) -> None:
        del self[key]


def with_others(monkeypatch: pytest.MonkeyPatch, store: Any, size: int = 2) -> Processes:
    """The first of some processes, as far as it waits for the others."""
    known = {"is_initialized": True, "get_rank": 0, "get_world_size": size, "new_group": None}
    for name, value in {**known, "get_process_group_ranks": list(range(size))}.items():
        monkeypatch.setattr(dist, name, lambda *group, value=value, **how: value)
    return Processes(store)


def test_views_of_a_world_never_count_their_calls_under_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Board(0)
    world = with_others(monkeypatch, store)
    views = [world.apart(), world.apart()]
    for view in (*views, views[0].apart(), views[1].apart(), world):
        with view.meeting():
            pass
    assert len(store.noted) == len(set(store.noted)) == 9


def test_pauses_between_looks_for_the_others_double_up_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    with with_others(monkeypatch, Board(10)).meeting():
        pass
    assert slept == [min(FIRST_PAUSE * 2**i, LONGEST_PAUSE) for i in range(10)] and slept[-1] == LONGEST_PAUSE


def test_a_process_asks_once_for_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for size in (2, 64):
        store = Board(0)
        with with_others(monkeypatch, store, size).meeting():
            pass
        asked.append(store.asked)
    assert asked == [1, 1]


NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, {}, NCCL version 2.29.3\n{}"
"""As torch writes it: `C10D_NCCL_CHECK` of c10d/NCCLUtils.hpp."""


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        (
            NCCL.format("unhandled cuda error (run with NCCL_DEBUG=INFO for details)", "ncclUnhandledCudaError: Call to "
            "CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"),
            UserError, "NCCL failed: Cuda failure 2 'out of memory' (with NCCL_DEBUG=INFO it says more)",
        ),
        (
            NCCL.format("invalid usage", "ncclInvalidUsage: This usually reflects invalid usage of NCCL library."),
            UserError, "NCCL failed: ncclInvalidUsage: This usually reflects invalid usage",
        ),
        (
            NCCL.format("remote process exited or there was a network error", "ncclRemoteError: A call failed possibly "
            "due to a network error or a remote process exiting prematurely."),
            Elsewhere, "another process of the run is gone (NCCL error in",
        ),
        ("[gloo/transport/tcp/pair.cc:525] Connection closed by peer", Elsewhere, "another process of the run is gone"),
    ],
)  # fmt: skip
def test_the_reason_at_the_end_of_what_nccl_says_is_reported(
    text: str, kind: type[UserError], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = with_others(monkeypatch, Board(0))
    with pytest.raises(UserError, match=re.escape(told)) as found, world.meeting():
        raise dist.DistBackendError(text)
    assert type(found.value) is kind and found.value.code == 1


@pytest.mark.parametrize(
    ("backends", "hears"), [("cpu:gloo,cuda:nccl", True), ("cpu:gloo,cuda:nccl", False), ("gloo", True)]
)
def test_a_failure_of_which_the_first_process_does_not_hear_is_printed_by_its_own(
    backends: str, hears: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(process_group, "HEARD_SECONDS", 10.0 if hears else 0.05)
    monkeypatch.setattr(process_group, "_failed", False)
    store = dist.HashStore()
    first = with_others(monkeypatch, store)
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    second, error = Processes(store), UserError("the GPU is full")
    waiting = threading.Thread(target=second.fail, args=(error,))
    waiting.start()
    if hears:
        with pytest.raises(Elsewhere, match="process 1: the GPU is full") as found, first.meeting():
            pass
        first.fail(found.value)  # as `open_world` does
    waiting.join()
    assert error.unheard is not hears


def test_a_process_that_has_failed_does_not_wait_for_others_at_its_end() -> None:
    program = (
        "import time, torch.distributed as dist\n"
        "from posttrain.learners import process_group\n"
        "dist.is_initialized, dist.destroy_process_group = lambda: True, lambda: time.sleep(60)\n"
        "process_group.LEAVE_SECONDS, process_group._failed = 0.1, True\n"
        "process_group._leave()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stderr) == (1, "")


@pytest.mark.parametrize(
    ("gpus", "wanted"),
    [
        (["", ""], "gloo"),
        (["GPU-1", ""], "gloo"),
        (["GPU-1", "GPU-2"], "cpu:gloo,cuda:nccl"),
        (["GPU-1"], "cpu:gloo,cuda:nccl"),
        (["GPU-1", "GPU-2", "GPU-1"], "cpu:gloo,cuda:gloo"),  # NCCL refuses two processes on one GPU
    ],
)
def test_processes_that_share_a_gpu_sum_through_gloo(gpus: list[str], wanted: str) -> None:
    assert backend(gpus) == wanted


@pytest.mark.parametrize(
    ("device", "masks", "wanted"),
    [
        ("cpu", [[0], [1]], ["", ""]),
        ("auto", [[], []], ["", ""]),
        ("auto", [[0, 1], [0, 1]], ["GPU-0", "GPU-1"]),
        ("auto", [[2], [3]], ["GPU-2", "GPU-3"]),  # a batch system shows each process its own
        ("cuda", [[2], [2]], ["GPU-2", "GPU-2"]),
        ("cuda:1", [[0, 1], [0, 1]], ["GPU-1", "GPU-1"]),
    ],
)
def test_each_process_knows_the_gpus_of_all(
    device: str, masks: list[list[int]], wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, visible = dist.HashStore(), masks[0]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid=f"GPU-{visible[gpu]}"))
    store.set("gpu/1", "waiting")
    for rank in (1, 0):
        visible = masks[rank]
        monkeypatch.setenv("RANK", str(rank))
        if rank:
            store.set("gpu/0", "none")  # it is not there yet, and would be waited for
        found = gpus_of_all(device, GPUPlacement(len(visible), 2, rank), store)
    assert found == wanted
