"""vLLM's part of a pool of servers, with a stand-in for vLLM. `test_servers.py` tests the part that all servers share, and
`test_vllm.py` a real vLLM.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import tiny
from fake_server import FAULT
from inference_servers import VLLM, ragged, sampled
from tiny_models import make

from posttrain.config.training import RL
from posttrain.core.protocols import Alone
from posttrain.core.types import Sampling, UserError
from posttrain.engines.engine_options import EngineOptions
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.engines.model_manifest import backbone_of
from posttrain.engines.pool.engine_pool import EnginePool
from posttrain.engines.pool.replicas import probe_of
from posttrain.engines.request import Request, tokens_to_stop
from posttrain.engines.servers.server_client import ServedRun
from posttrain.engines.servers.server_places import GivenServer
from posttrain.engines.servers.server_pool import check_transfer, open_servers
from posttrain.engines.servers.server_setup import cache_bytes, prepare, server_layout
from posttrain.engines.vllm.gpu_transfer import GPUTransfer
from posttrain.engines.vllm.vllm_client import LOGPROBS, VLLMClient
from posttrain.engines.vllm.vllm_setup import VLLMSetup, socket_at
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.free_memory import ALLOCATOR
from posttrain.models.gpu_placement import GPUPlacement
from posttrain.models.native.decoder import new_decoder
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.verbs.rl import _engine as rl_engine

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
    pytest.mark.timeout(1200),  # starts a dozen processes, which a busy machine does in minutes
]

FIFTHS = (20 << 30, 10 << 30)  # of the GPU of a test, for one server and for each of two
SETUP = VLLMSetup("folder", torch.float32, 64, 8, 1 << 20, 1)


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    VLLM.install(tmp_path / "packages", monkeypatch)


@pytest.mark.slow
def test_a_server_of_several_gpus_gets_weights_by_transfer_or_says_what_it_lacks(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    learner, later, asked = tiny(tokenizer), tiny(tokenizer, seed=1), ragged(6)
    weight_layout = server_layout(learner, torch.float32)
    run = ServedRun(tokenizer, learner.eos_ids, 64, 8, 1.0, True, weight_layout.described)

    def pool_of(url: str) -> EnginePool:
        place = GivenServer(url, VLLMClient, run, GPUTransfer("nccl", weight_layout, 20.0))
        sizes = learner.config.context, learner.config.vocab
        return EnginePool([place], probe_of(learner, "float32"), *sizes, seconds=20.0, start_seconds=60.0, restarts=0)

    with (
        VLLM.running(learner, tokenizer, tmp_path / "a", "--tensor-parallel-size", "3") as (url, _),
        closing(pool_of(url)) as pool,
    ):
        for version, model in enumerate((later, learner)):
            pool.load(model, version)
            engine = LocalEngine(model, tokenizer, slots=8)
            engine.load(model, version)
            assert sampled(pool, asked) == sampled(engine, asked)
    monkeypatch.setenv(FAULT, "no size")
    with (
        VLLM.running(learner, tokenizer, tmp_path / "b") as (url, _),
        closing(pool_of(url)) as pool,
        pytest.raises(UserError, match="/get_world_size: 404 .*; start it with VLLM_SERVER_DEV_MODE=1"),
    ):
        pool.load(later, 0)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    ("options", "sleeps"),
    [({}, True), ({"shard": True}, True), ({"tensor_parallel": 2}, True), ({"expert_parallel": 2}, True),
     ({"async_steps": 1}, False), ({"shard": True, "async_steps": 1}, False)],
)  # fmt: skip
def test_only_an_engine_that_samples_during_updates_stays_awake(
    options: dict[str, Any], sleeps: bool, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    monkeypatch.setattr(
        "posttrain.engines.servers.server_pool.open_servers", lambda *a, **how: told.append(how["sleeps"])
    )
    run: Any = SimpleNamespace(config=RL(engine="vllm", **options), path=tmp_path, world=Alone())
    rl_engine(run, tiny(tokenizer), tokenizer)
    assert told == [sleeps]


def test_a_reply_ends_at_the_first_token_that_completes_a_stop_string(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("12ab345ab")

    def end(stop: tuple[str, ...], prompt: str = "0", begun: int = 0) -> int | None:
        request = Request(0, tuple(tokenizer.encode(prompt)), Sampling(stop=stop, begun=begun))
        return tokens_to_stop(tokenizer, request.begun, tokens, stop)

    assert end(("ab",)) == 4 and end(("345", "b")) == 4 and end(("b3",)) == 5 and end(("c",)) is None
    assert end(("012",)) is None and end(("012",), begun=1) == 2  # begun by an earlier request


def test_the_command_asks_for_what_the_options_name() -> None:
    def words(setup: VLLMSetup, gpus: tuple[int, ...], sleeps: bool = False) -> str:
        return " ".join(setup.arguments("socket", gpus, sleeps))

    cpu = words(SETUP, ())
    assert cpu.startswith("--model folder --uds socket ") and "--enforce-eager" in cpu and "tensor-parallel" not in cpu
    assert "--logprobs-mode processed_logprobs" in cpu and "--max-model-len 64" in cpu and "--enable-lora" not in cpu
    assert "--kv-cache-memory-bytes 1048576" in cpu and "--gpu-memory-utilization 0.05" in cpu
    alone = words(replace(SETUP, cache_bytes=None), (1,))
    assert "--gpu-memory-utilization 0.85" in alone and "kv-cache-memory-bytes" not in alone
    four = words(replace(SETUP, lora_rank=8, transfer="nccl"), (4, 5, 6, 7), True)
    assert "--tensor-parallel-size 4" in four and "--enable-sleep-mode" in four and "--max-lora-rank 8" in four
    assert '--weight-transfer-config {"backend": "nccl"}' in four and "--enforce-eager" not in four


def test_engines_of_several_gpus_get_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    eight = GPUPlacement(8, 2, 0)  # 0 and 1 learn
    assert [eight.engine_gpus(number, 3) for number in (0, 1)] == [(2, 3, 4), (2, 3, 4)]  # of the first process
    assert GPUPlacement(8, 2, 1).engine_gpus(0, 3) == (5, 6, 7)
    named = GPUPlacement(8, engine_devices=(4, 5, 6, 7))
    assert [named.engine_gpus(number, 2) for number in (0, 1)] == [(4, 5), (6, 7)]
    assert not named.shares((4, 5)) and GPUPlacement(1).shares((0,))
    with pytest.raises(UserError, match="--engine-tensor-parallel 8: engines have 4 GPUs here"):
        named.engine_gpus(0, 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    assert SETUP.environment([], (0, 2), False)["CUDA_VISIBLE_DEVICES"] == "3,7"


def test_a_server_that_frees_its_memory_does_not_inherit_the_learners_allocator() -> None:
    for sleeps in (True, False):  # None: it has no such variable
        names = {name for name, value in SETUP.environment([], (0,), sleeps).items() if value is None}
        assert names == ({*ALLOCATOR} if sleeps else set())


def test_the_gpus_of_a_server_divide_the_cache_as_they_divide_heads(tokenizer: Tokenizer) -> None:
    model = new_decoder(replace(tiny(tokenizer).config, heads=8, kv_heads=4), 0)
    one, two, four, eight = (cache_bytes(model, 8, torch.bfloat16, 99.0, gpus) for gpus in (1, 2, 4, 8))
    assert one == 2 * two == 4 * four == 4 * eight, "with more GPUs than heads each has one"
    assert cache_bytes(model, 8, torch.bfloat16, two / 2**30, 2) == two < one, "the limit is that of a GPU"


@pytest.mark.parametrize(
    ("given", "learners", "devices", "roles", "replicas", "found"),
    [
        (None, 4, (), (), 1, [20 << 30]),  # asleep during updates: a fifth of the GPU
        (None, 4, (), (), 2, [10 << 30] * 2),
        (None, 1, (), (), 3, [None] * 3),  # GPUs 1, 2, 3
        (None, 1, (), (), 4, [4 << 30, None, None, 4 << 30]),  # the first and the last one share GPU 1
        (None, 1, (0, 1), (), 2, [20 << 30, None]),  # GPU 0 learns
        (None, 1, (1, 2), (2,), 2, [None, 4 << 30]),  # GPU 2 has a reference
        (None, 2, (), (), 1, [None]),  # each learner has one
        (None, 2, (), (), 2, [4 << 30] * 2),  # of which each GPU has two
        (2.0, 1, (), (), 1, [2 << 30]),
    ],
)
def test_a_server_takes_what_is_free_only_where_nobody_else_is(
    given: float | None, learners: int, devices: tuple[int, ...], roles: tuple[int, ...], replicas: int, found: list[Any],
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(learners))
    monkeypatch.setenv("LOCAL_RANK", str(learners - 1))
    pool = "posttrain.engines.servers.server_pool"
    monkeypatch.setattr(f"{pool}.EnginePool", lambda places, *more, **how: list(places))
    monkeypatch.setattr(f"{pool}.require", lambda kind: None)
    monkeypatch.setattr(f"{pool}.on_gpu", lambda model: True)
    monkeypatch.setattr(f"{pool}.gpu_memory", lambda device: 100 << 30)
    monkeypatch.setattr(f"{pool}.cache_bytes", lambda model, slots, dtype, most_gib, gpus: int(most_gib * 2**30))
    options = EngineOptions(8, replicas=learners * replicas, cache_gib=given, devices=devices, role_devices=roles)
    world: Any = SimpleNamespace(size=learners, rank=learners - 1, gather=lambda x: [x] * learners, apart=lambda: world)
    own = options.of(world)
    places: Any = open_servers(VLLMSetup, tiny(tokenizer), tokenizer, own, sleeps=True)
    assert [place.setup.cache_bytes for place in places] == found
    awake: Any = open_servers(VLLMSetup, tiny(tokenizer), tokenizer, own)
    assert [place.setup.cache_bytes for place in awake] == [4 << 30 if size in FIFTHS else size for size in found]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["native", "gemma3_text", "gpt2"])
def test_a_tied_head_is_handed_over_twice_and_lies_where_the_embedding_does(
    kind: str, tied: bool, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    config = replace(tiny(tokenizer).config, tied=tied)
    model = new_decoder(config, 0) if kind == "native" else load_model(make(kind, tmp_path, tie_word_embeddings=tied))
    laid = server_layout(model, torch.float32)
    memory = torch.zeros(laid.bytes, dtype=torch.uint8)
    laid.write(model, memory)
    stored = {own.name: own for own in laid.stored}
    assert len(stored) == len(laid.stored), "each name once"
    head, embedding = (stored[name] for name in ("lm_head.weight", backbone_of(model).embedding_name))
    assert (head.offset == embedding.offset) is tied
    assert torch.equal(head.tensor_in(memory, torch.float32), model.head.weight)
    assert {own.offset + 4 * torch.Size(own.shape).numel() <= laid.bytes for own in laid.stored} == {True}
    prepare(VLLMSetup, tmp_path, model, tokenizer, ())
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False


class Noted(VLLMClient):
    """A client whose calls are noted and answered here. `adapters`: those that the server has."""

    def __init__(self, *adapters: str) -> None:
        self.calls: list[str] = []
        self.adapters = adapters
        run = ServedRun(SimpleNamespace(pictures=None), (), 64, 8, 60.0, False, {})  # type: ignore[arg-type]
        super().__init__(run, "http://here")

    async def _call(self, method: str, path: str, body: Any = None) -> bytes:
        named = [body[key] for key in ("method", "lora_name") if key in (body or {})]
        self.calls.append(" ".join([path, *named]))
        answers: dict[str, Any] = {
            "/v1/models": {"data": [{"id": id, "max_model_len": 64} for id in ("policy", *self.adapters)]},
            "/server_info?config_format=json": {"vllm_config": {"model_config": {"logprobs_mode": LOGPROBS}}},
            "/collective_rpc posttrain_load": {"results": [[0, 1]]},
            "/collective_rpc posttrain_adapter": {"results": [[2, 14]]},
        }
        return json.dumps(answers.get(self.calls[-1])).encode()

    def answer(self) -> list[Any]:
        end = time.monotonic() + 60
        while not (messages := self.receive()):
            assert time.monotonic() < end
            time.sleep(0.001)
        [message] = messages
        return message


def test_a_server_that_slept_gets_the_base_again_and_lost_adapters_are_unloaded() -> None:
    client = Noted("theirs", "posttrain-version-5")
    with closing(client):
        assert client.answer()[0] == "started"
        unloaded = [call for call in client.calls if "unload" in call]
        assert unloaded == ["/v1/unload_lora_adapter posttrain-version-5"]
        base = {"version": 0, "checksum": 1, "file": "weights"}
        offer = {"version": 5, "checksum": 2, "adapter": "folder", "matrices": 14, "base": base}
        loads = []
        for slept in (False, False, True):
            if slept:
                client.send("sleep")
                assert client.answer() == ["slept"]
            del client.calls[:]
            client.send("load", offer)
            assert client.answer() == ["loaded", 5, 2]
            loads.append(client.calls.count("/collective_rpc posttrain_load"))
        assert loads == [1, 0, 1]


def test_weights_are_sent_from_gpu_to_gpu_while_nothing_is_sampled() -> None:
    client = Noted()
    with closing(client):
        client.answer()
        del client.calls[:]
        for method in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
            client.send("transfer", method, {})
            assert client.answer() == ["transferred", None]
        client.send("load", {"version": 3, "checksum": 4})
        assert client.answer() == ["loaded", 3, 4]
        assert client.calls.index("/pause?mode=abort") < client.calls.index("/start_weight_update")
        assert client.calls[-1] == "/resume"


def test_servers_that_one_run_starts_draw_from_seeds_of_their_own(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []

    def environment(self: VLLMSetup, *how: Any) -> dict[str, str | None]:
        seeds.append(self.seed)
        return {}

    class Process:
        def __init__(self, *how: Any) -> None: ...

    monkeypatch.setattr(VLLMSetup, "environment", environment)
    monkeypatch.setattr("posttrain.engines.vllm.vllm_setup.EngineProcess", Process)
    monkeypatch.setattr("posttrain.engines.servers.server_pool.EnginePool", lambda places, *more, **how: list(places))

    def started(**how: Any) -> None:
        options = EngineOptions(8, replicas=2, cache_gib=0.1, **how)
        places: Any = open_servers(VLLMSetup, tiny(tokenizer), tokenizer, options)
        for place in [*places, places[0]]:  # the first one was lost
            place.open().wire.close()

    monkeypatch.setattr("posttrain.engines.servers.server_pool.require", lambda kind: None)
    started()
    started(rank=1)
    assert len(set(seeds)) == 6 and max(seeds) < 1 << 32
    first = seeds[:]
    started()
    assert seeds[6:] == first[:3]


def test_advice_for_a_refused_call_names_what_the_server_lacks() -> None:
    missing = '{"error": {"message": "Not Found", "type": "NotFoundError"}}'
    assert VLLMClient.way("/inference/v1/generate", 404, missing) == "; start it with --enable-scale-out"
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in VLLMClient.way("/v1/load_lora_adapter", 404, missing)
    assert VLLMClient.way("/pause", 404, missing) == "; start it with VLLM_SERVER_DEV_MODE=1"
    assert VLLMClient.way("/v1/load_lora_adapter", 404, '{"error": {"message": "No adapter found for x"}}') == ""
    assert (
        VLLMClient.way("/v1/models", 401, "") == "; set VLLM_API_KEY to the key of the server"
        and VLLMClient.way("/pause", 500, "") == ""
    )


def test_weights_are_sent_only_where_vllm_can_send_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    eight = GPUPlacement(8, engine_devices=(0, 1))
    check_transfer("ipc", (0,), eight)
    check_transfer("nccl", (1,), eight)
    check_transfer(None, (0,), eight)
    with pytest.raises(UserError, match="--weight-sync nccl sends weights to other GPUs than the learner's: .* ipc"):
        check_transfer("nccl", (0, 1), eight)
    for gpus in ((1,), (0, 1)):
        with pytest.raises(UserError, match="within one GPU, the learner's: give --engine-devices 0 and servers"):
            check_transfer("ipc", gpus, eight)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    check_transfer("nccl", (1,), eight)
    with pytest.raises(UserError, match="expandable segments of PYTORCH_ALLOC_CONF: unset it"):
        check_transfer("ipc", (0,), eight)


@pytest.mark.parametrize("learners", [1, 2, 4, 8])
def test_each_of_several_processes_sends_weights_to_servers_of_its_own_gpu_or_of_free_ones(learners: int) -> None:
    full, half = GPUPlacement(learners, learners), GPUPlacement(2 * learners, learners)
    taken: list[int] = []
    for place in range(learners):
        check_transfer("ipc", full.at(place).engine_gpus(0, 1), full.at(place))
        gpus = half.at(place).engine_gpus(0, 1)
        check_transfer("nccl", gpus, half.at(place))
        taken += gpus
    assert sorted(taken) == list(range(learners, 2 * learners))
    with pytest.raises(UserError, match=f"--engine-devices {' '.join(map(str, range(learners)))} and servers of one"):
        check_transfer("ipc", half.engine_gpus(0, 1), half)


def test_a_path_that_no_socket_can_have_is_refused() -> None:
    assert str(socket_at(Path("/" + "a" * 97, "0"))).endswith("/0.socket")
    with pytest.raises(UserError, match="too long a path for a socket: set TMPDIR"):
        socket_at(Path("/" + "a" * 98, "0"))
