"""Who sits on which GPU: in simulated worlds no GPU is unused while another has two, and masks are honoured."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from posttrain.config.resolve import validate
from posttrain.config.training import RL
from posttrain.core.protocols import Alone
from posttrain.core.types import Sampling, UserError
from posttrain.engines.pool.replica import LocalHost
from posttrain.engines.pool.replicas import _on_devices, placement_of
from posttrain.engines.serving.engine_thread import EngineThread
from posttrain.models.gpu_placement import GPUPlacement, gpus_of_roles, visible_name
from posttrain.models.native.kernels import build
from posttrain.training.gpu_assignment import engine_options, gpu_assignment
from posttrain.training.role_devices import role_device
from posttrain.training.setup import choose_device
from posttrain.training.sources.async_rollouts import StepQueue


def seats(gpus: int, learners: int, each: int, **chosen: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """The GPUs of all learners, and of all engines, `each` of every learner."""
    world = [GPUPlacement(gpus, learners, place, **chosen) for place in range(learners)]
    return [p.learner() for p in world], [p.engine(number) for number in range(each) for p in world]


@pytest.mark.parametrize(("gpus", "learners", "each"), list(product([1, 2, 4, 8], [1, 2, 4, 8], [1, 2, 3])))
def test_nobody_shares_a_gpu_while_another_is_free(gpus: int, learners: int, each: int) -> None:
    learning, sampling = seats(gpus, learners, each)
    of_learners, of_engines = Counter(learning), Counter(sampling)
    assert set(learning + sampling) <= set(range(gpus)) and len(sampling) == learners * each
    assert max(of_learners.values()) - min(of_learners[g] for g in range(min(gpus, learners))) <= 1
    assert len(of_learners) == min(gpus, learners)
    free = set(range(gpus)) - set(learning)
    if free:
        assert set(of_engines) <= free and len(of_engines) == min(len(free), len(sampling))
        assert max(of_engines.values()) - min(of_engines[g] for g in of_engines) <= 1
    else:
        assert sampling[:learners] == learning or gpus < learners  # the first engine of each is on its own GPU
        assert len(of_engines) == min(gpus, len(sampling))


def test_devices_that_are_chosen_are_used_in_turn() -> None:
    learning, sampling = seats(8, 2, 2, learner_devices=(6, 7), engine_devices=(0, 1, 3))
    assert learning == [6, 7] and sampling == [0, 1, 3, 0]
    assert seats(4, 1, 3, learner_devices=(2,))[1] == [0, 1, 3]


@pytest.mark.parametrize(("gpus", "learners", "each"), list(product([2, 3, 4, 8], [1, 2, 4], [0, 1, 2])))
def test_nobody_takes_the_gpu_of_a_role_while_another_is_free(gpus: int, learners: int, each: int) -> None:
    for roles in ((0,), (gpus - 1,), (0, gpus - 1), (1, 1)):
        learning, sampling = seats(gpus, learners, each, role_devices=roles)
        left = set(range(gpus)) - set(roles)
        if not left:
            assert len(set(learning)) == min(gpus, learners), "all are named, so they are shared as without names"
            continue
        assert set(learning) <= left and len(set(learning)) == min(len(left), learners)
        if free := left - set(learning):
            assert set(sampling) <= free and len(set(sampling)) == min(len(free), len(sampling))
        elif sampling:
            assert sampling[:learners] == learning or len(left) < learners, "each engine is first with its own learner"


def test_a_placement_of_eight_gpus() -> None:
    """Two learners, their references and critics, and engines: no GPU has two that were not asked for."""
    named = {"reference": "2,3", "critic": "4, 5"}
    learning, sampling = seats(8, 2, 1, role_devices=gpus_of_roles(named))
    assert learning == [0, 1] and sampling == [6, 7]
    assert seats(8, 2, 1, learner_devices=(6, 7), role_devices=gpus_of_roles(named)) == ([6, 7], [0, 1])
    assert gpus_of_roles({"reference": "cpu", "teacher": "1,cpu"}) == (1,)


@pytest.mark.parametrize("place", [0, 1])
def test_each_process_has_its_own_gpu_of_a_role(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", str(place))
    monkeypatch.setattr("posttrain.training.role_devices.named_device", torch.device)
    own = torch.device("cuda", place)
    config = RL(role_devices={"reference": "2,3", "critic": "cpu", "teacher": "1"})
    assert role_device(config, "reference", own) == torch.device("cuda", 2 + place)
    assert role_device(config, "critic", own) == torch.device("cpu") and role_device(config, "judge", own) == own
    with pytest.raises(
        UserError, match="teacher=1 names 1 for 2 training processes of this machine: give each a number"
    ):
        role_device(config, "teacher", own)
    with pytest.raises(UserError, match="--role-devices 4 is not a GPU of this machine: it has 4, from 0 to 3"):
        role_device(RL(role_devices={"reference": "4,1"}), "reference", own)


class CurrentGPU(threading.local):
    """The current GPU of each thread, as the driver has it."""

    gpu = 0


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> CurrentGPU:
    """Four GPUs whose tensors are on the CPU."""
    found, zeros = CurrentGPU(), torch.zeros

    class Probe:
        def __init__(self, device: str) -> None:
            self.device = torch.device(device) if ":" in device else torch.device(device, found.gpu)

        def item(self) -> float:
            return 0.0

    def probe(*shape: Any, device: Any = "cpu", **how: Any) -> Any:
        return Probe(str(device)) if str(device).startswith("cuda") else zeros(*shape, device=device, **how)

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch, "zeros", probe)
    for name, stub in {
        "device_count": lambda: 4,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: found.gpu,
        "set_device": lambda device: setattr(found, "gpu", device if isinstance(device, int) else device.index),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    return found


def test_a_run_works_on_its_own_gpu_and_roles_do_not_change_that(
    current: CurrentGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose_device("cpu") == torch.device("cpu") and current.gpu == 0
    assert choose_device("cuda:2") == torch.device("cuda:2") and current.gpu == 2
    assert role_device(RL(role_devices={"reference": "3"}), "reference", torch.device("cuda:2")).index == 3
    assert current.gpu == 2, "the reference's GPU is not the run's"
    assert choose_device("cuda", (1,)) == torch.device("cuda:1") and current.gpu == 1
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device("auto") == torch.device("cuda:3") and current.gpu == 3


def test_threads_that_sample_work_on_the_gpu_of_the_run(current: CurrentGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_device("cuda:2")
    begun: list[int] = []
    player: Any = SimpleNamespace(engine=None, world=Alone(), unwanted=None)
    collector: Any = SimpleNamespace(player=player, position=None)
    monkeypatch.setattr("posttrain.training.sources.async_rollouts.replace", lambda given, **changes: given)
    rollouts = StepQueue(collector, None, 1, 1)
    assert rollouts._thread is not None
    assert rollouts._thread.call(lambda: current.gpu).result() == 2
    rollouts._thread.close(1.0)

    class Polled:
        def submit(self, *request: Any) -> None:
            begun.append(current.gpu)
            raise UserError("enough")

    async def ask() -> None:
        thread = EngineThread(cast(Any, Polled()), lambda problem: None)
        with pytest.raises(UserError, match="enough"):
            await thread.complete([1], Sampling())
        thread.close()

    asyncio.run(ask())
    assert begun == [2]


@pytest.mark.parametrize(
    ("device", "placement", "expected"),
    [
        ("cpu", GPUPlacement(0), ["cpu 3", "cpu 3", "cpu 3"]),
        ("cpu", GPUPlacement(0, learners=2), ["cpu 6", "cpu 6", "cpu 6"]),  # of which each has three engines
        ("cuda:0", GPUPlacement(4), ["cuda:1 1", "cuda:2 1", "cuda:3 1"]),
        ("cuda:0", GPUPlacement(3), ["cuda:1 2", "cuda:2 1", "cuda:1 2"]),
    ],
)
def test_engines_know_how_many_of_them_share_a_memory(
    device: str, placement: GPUPlacement, expected: list[str]
) -> None:
    found = _on_devices({"device": device, "sharers": 1}, 3, placement)
    assert [f"{setup['device']} {setup['sharers']}" for setup in found] == expected


def test_an_engine_in_another_process_works_on_its_gpu(current: CurrentGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*given: Any) -> Any:
        raise InterruptedError

    monkeypatch.setattr("posttrain.engines.pool.replica.read_json", stop)
    for device, gpu in (("cuda:3", 3), ("cuda", 3), ("cpu", 3)):
        setup = {
            "threads": torch.get_num_threads(),
            "compiled": build.used(),
            "folder": ".",
            "layout": {"dtype": "float32"},
            "backed": None,
        }
        with pytest.raises(InterruptedError):
            LocalHost({**setup, "device": device})
        assert current.gpu == gpu


@pytest.mark.parametrize(
    ("gpus", "learners", "device", "options", "said"),
    [
        (1, 1, 0, {}, None),
        (4, 1, 0, {}, None),  # the others are idle
        (4, 1, 0, {"replicas": 3}, "GPUs: 0 learns, 1-3 sample"),
        (4, 1, 2, {"replicas": 3}, "GPUs: 2 learns, 0-1 3 sample"),  # --device cuda:2
        (5, 1, 0, {"replicas": 3, "role_devices": {"reference": "4"}}, "GPUs: 0 learns, 1-3 sample, 4 reference"),
        (8, 2, 0, {"engine": "vllm", "replicas": 3, "engine_tensor_parallel": 2}, "GPUs: 0-1 learn, 2-7 sample"),
        (2, 2, 0, {}, "GPUs: 0-1 learn, 0-1 sample"),
        (2, 1, 0, {"engine": "vllm", "engine_url": ("http://10.0.0.7:8000",)}, None),
        (2, 1, 0, {"engine": "vllm", "engine_devices": (0, 1), "replicas": 2}, "GPUs: 0 learns, 0-1 sample"),
        (3, 2, 0, {"role_devices": {"critic": "2,2", "judge": "cpu"}}, "GPUs: 0-1 learn, 0-1 sample, 2 critic"),
    ],
)
def test_a_run_says_who_is_on_which_gpu(
    gpus: int, learners: int, device: int, options: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(learners))
    monkeypatch.setenv("LOCAL_RANK", "0")
    world: Any = SimpleNamespace(size=learners, rank=0)
    config = RL(model="m", **options)
    assert gpu_assignment(config, world, torch.device("cuda", device)) == ([said] if said else [])
    assert gpu_assignment(config, world, torch.device("cpu")) == []
    if options == {"replicas": 3}:
        where = placement_of(engine_options(config).of(world), torch.device("cuda", device))
        assert not any(where.shares(where.engine_gpus(number, 1)) for number in range(3)), "as the line says"


def test_another_process_gets_the_name_that_the_mask_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_name(2) == "2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-1f2a,0")
    assert [visible_name(gpu) for gpu in range(3)] == ["5", "GPU-1f2a", "0"]


def test_gpus_that_are_not_there_or_named_twice_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(UserError, match="--learner-devices 4 is not a GPU of this machine: it has 4, from 0 to 3"):
        GPUPlacement.here((0, 4))
    with pytest.raises(UserError, match="--engine-devices names a GPU twice: 1 1"):
        GPUPlacement.here((), (1, 1))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="--learner-devices 0 is not a GPU of this machine: it has none"):
        choose_device("auto", (0,))
    with pytest.raises(UserError, match="--learner-devices names GPUs, and --device cpu is not a GPU"):
        choose_device("cpu", (0,))
    with pytest.raises(UserError, match="--engine-devices has no effect without engines in processes of their own"):
        validate(RL(tasks="rows.jsonl", env="verify:exact_match", model="m", engine_devices=(0,)))
