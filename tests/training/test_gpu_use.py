"""Peak memory and arithmetic of a step in timing.jsonl: memory with a simulated CUDA, arithmetic in runs on a CPU."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pools import Put, World, pool_of
from sums import SUMS

import posttrain
from posttrain.core.protocols import Alone
from posttrain.engines.pool import replica
from posttrain.runs.metrics_table import metric_named
from posttrain.runs.run_reading import read_timing
from posttrain.training import gpu_use, trainer
from posttrain.training.gpu_use import gpus_by_role, peaks

CARDS = torch.device("cuda", 0), torch.device("cuda", 1)
SMALL: dict[str, Any] = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 24, "context": 32}


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[float]]:
    """Peaks in GB by the number of the card; a reset drops the first."""
    found: dict[int, list[float]] = {}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda card: int(1e9 * found[card.index][0]))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda card: found[card.index].pop(0))
    return found


def test_each_step_records_the_peak_of_each_gpu_since_the_step_before(
    allocated: dict[int, list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated |= {0: [30.0, 20.0, 25.0], 1: [5.0, 6.0, 4.0]}
    monkeypatch.setattr(
        trainer, "gpus_by_role", lambda *given: {"policy": CARDS[0], "reference": CARDS[1]}, raising=True
    )
    posttrain.sft(SUMS, out=str(tmp_path), steps=3, rows=4, lr=1e-2, quiet=True, threads=1, **SMALL)
    told = [(row["memory/policy"], row["memory/reference"]) for row in read_timing(tmp_path)]
    assert told == [(30.0, 5.0), (20.0, 6.0), (25.0, 4.0)]
    known = metric_named("memory/reference")
    assert known is not None and known.unit == "GB" and known.title == "Peak memory: GPU of reference"


def test_a_processor_has_no_peak(tmp_path: Path) -> None:
    posttrain.sft(SUMS, out=str(tmp_path), steps=1, rows=4, lr=1e-2, quiet=True, threads=1, **SMALL)
    assert not [name for row in read_timing(tmp_path) for name in row if name.startswith("memory/")]


def test_a_gpu_has_the_name_of_its_first_role(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"reference": CARDS[1], "critic": CARDS[1], "teacher": CARDS[0], "judge": torch.device("cpu")}
    monkeypatch.setattr(gpu_use, "role_device", lambda config, role, device: places[role])
    config: Any = SimpleNamespace(role_devices=dict.fromkeys(places, "1"))
    assert gpus_by_role(config, CARDS[0]) == {"policy": CARDS[0], "reference": CARDS[1]}


def test_of_several_processes_the_highest_peak_is_told(allocated: dict[int, list[float]]) -> None:
    class Three(Alone):
        def gather(self, value: Any) -> list[Any]:
            return [{name: most - 1 for name, most in value.items()}, {name: 77.0 for name in value}, value]

    allocated[0] = [40.0]
    assert peaks({"policy": CARDS[0]}, Three()) == {"memory/policy": 77.0}


def test_roles_that_have_a_gpu_in_some_processes_only_are_told(allocated: dict[int, list[float]]) -> None:
    class Two(Alone):
        def gather(self, value: Any) -> list[Any]:
            return [value, {"memory/policy": 7.0, "memory/critic": 9.0}]

    allocated |= {0: [40.0], 1: [5.0]}
    told = peaks({"policy": CARDS[0], "reference": CARDS[1]}, Two())
    assert told == {"memory/policy": 40.0, "memory/reference": 5.0, "memory/critic": 9.0}


def test_an_engine_on_a_gpu_of_its_own_tells_its_peak_at_each_weight_sync(
    allocated: dict[int, list[float]],
) -> None:
    allocated[1] = [9.0, 7.5]
    sent: list[tuple[Any, ...]] = []
    wire: Any = SimpleNamespace(send=lambda *message: sent.append(message))
    host: Any = SimpleNamespace(take=lambda offer: (offer["version"], 7), device=CARDS[1])
    for version in (1, 2):
        replica._carry_out(host, wire, {}, ["load", {"version": version}])
    assert sent == [("loaded", 1, 7), ("memory", 9_000_000_000), ("loaded", 2, 7), ("memory", 7_500_000_000)]
    host.device = torch.device("cpu")
    replica._carry_out(host, wire, {}, ["load", {"version": 3}])
    assert sent[4:] == [("loaded", 3, 7)]

    world = World(Random(0), 0)
    pool = pool_of(world, 2, Put(world))
    pool.load(1, 1)
    assert "memory" not in pool.counts()
    for engine, most in zip(world.engines, (3_000_000_000, 9_000_000_000), strict=True):
        engine.outbox.append(["memory", most])
    pool.poll()
    assert pool.counts()["memory"] == 9.0
