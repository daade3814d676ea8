"""A pool of vLLM servers samples what one engine samples, and one that dies, hangs or reads wrong weights is replaced.

A server with the embedded engine behind vLLM's HTTP stands in for vLLM itself, which need not be installed. The same
with a real one: `test_vllm.py`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import pytest
import torch
from conftest import tiny
from fake_server import FAULT
from processes import descendants, gone
from rl_sources import digits
from tiny_models import make

import posttrain
from posttrain.config.training import RL
from posttrain.core.protocols import Alone
from posttrain.core.types import Completion, Sampling, UserError
from posttrain.engines.engine_options import EngineOptions
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.engines.model_manifest import backbone_of
from posttrain.engines.pool.engine_pool import EnginePool
from posttrain.engines.pool.pool_member import MemberState, PoolMember
from posttrain.engines.pool.replicas import probe_of
from posttrain.engines.request import Request, tokens_to_stop
from posttrain.engines.servers.server_client import ServedRun
from posttrain.engines.servers.server_places import GivenServer
from posttrain.engines.servers.server_pool import check_transfer, open_servers
from posttrain.engines.servers.server_setup import PACKAGES, cache_bytes, prepare, server_layout
from posttrain.engines.vllm.gpu_transfer import CardToCard
from posttrain.engines.vllm.vllm_client import LOGPROBS, VLLMClient
from posttrain.engines.vllm.vllm_setup import MODULE, VLLMSetup, socket_at
from posttrain.models.adapters.adapter_writer import adapters
from posttrain.models.adapters.lora import LoRA, attach, begin
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.gpu_placement import GPUPlacement
from posttrain.models.native.decoder import Decoder, new_decoder
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.verbs.rl import _engine as rl_engine

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
    pytest.mark.timeout(1200),  # starts a dozen processes, which a busy machine does in minutes
]

SETUP = VLLMSetup("folder", torch.float32, 64, 8, 1 << 20, 1)


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.installed(tmp_path / "packages")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    paths = [str(tmp_path / "packages"), str(Path(fake_vllm.__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [*paths, PACKAGES])))


@contextmanager
def leaves_no_process() -> Iterator[None]:
    before = set(descendants(os.getpid()))
    yield
    gone(*(pid for pid in descendants(os.getpid()) if pid not in before))


def opened(model: Decoder, tokenizer: Tokenizer, options: EngineOptions, **how: Any) -> EnginePool:
    given = {"slots": 8, "cache_gib": 0.1, "seconds": 20.0, "seeds": True, **how}
    pool = open_servers(VLLMSetup, model, tokenizer, replace(options, **given))
    pool.load(model, 0)
    return pool


def ragged(count: int) -> list[tuple[list[int], Sampling]]:
    return [
        ([5 + i % 5] * (2 + i % 5), Sampling(seed=i, max_tokens=4 + i % 40, stop=("ab", "7") if i % 3 else ()))
        for i in range(count)
    ]


def sampled(engine: Any, asked: list[tuple[list[int], Sampling]], meanwhile: Callable[[], None] = lambda: None) -> Any:
    """`meanwhile`: what happens when the first replies have come."""
    for id, (prompt, sampling) in enumerate(asked):
        engine.submit(id, prompt, sampling)
    found: dict[int, Completion] = {}
    while len(found) < len(asked):
        new = {done.id: done for done in engine.poll()}
        if new and not found:
            meanwhile()
        found |= new
    return [(list(c.tokens), list(c.logp), c.text, c.stop, c.version) for _, c in sorted(found.items())]


def server_of(member: PoolMember) -> int:
    return descendants(member.link.process.child.process.pid)[0]  # type: ignore[attr-defined]


def until(pool: EnginePool, holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        pool.poll()
        assert time.monotonic() < end


@pytest.mark.slow
def test_servers_that_are_killed_stopped_or_wrong_change_no_token(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = tiny(tokenizer)
    later, asked = tiny(tokenizer, seed=1), ragged(40)
    calm = sampled(LocalEngine(learner, tokenizer, slots=8), asked)
    said: list[str] = []
    with leaves_no_process(), closing(opened(learner, tokenizer, EngineOptions(replicas=2), seconds=15.0)) as pool:
        pool.say = said.append
        first, second = pool.members
        assert not pool.batch_invariant and pool.backend == "2 engines (vLLM)"
        assert sampled(pool, asked) == calm and not said
        assert 0 <= pool.counts()["probe_gap"] < 1e-5

        os.kill(server_of(second), signal.SIGKILL)  # while nothing is asked of it
        assert sampled(pool, asked, lambda: os.kill(server_of(first), signal.SIGSTOP)) == calm
        assert any("the engine 1 is lost: " in line for line in said)
        assert any("the engine 0 is lost: it sent nothing for 15 s" in line for line in said)
        assert pool.counts()["resubmitted"] > 0 == pool.counts()["duplicate_answers"]
        until(pool, lambda: all(m.state is MemberState.READY for m in pool.members))
        assert pool.counts()["restarts"] == 2

        del said[:]
        written = pool.members[0].place.transport.weight_layout.write  # type: ignore[attr-defined]
        damaged: list[int] = []

        def write(weights: Any, memory: torch.Tensor) -> int:
            checksum: int = written(weights, memory)
            damaged.append(1)
            return checksum ^ (len(damaged) == 1)

        monkeypatch.setattr(pool.members[0].place.transport.weight_layout, "write", write)  # type: ignore[attr-defined]
        pool.restarts = 0
        with pytest.raises(UserError, match="no engine is left.* loaded version 1 with checksum .*, not 1 with"):
            pool.load(later, 1)
    with closing(opened(later, tokenizer, EngineOptions(replicas=1))) as pool:
        other = LocalEngine(later, tokenizer, slots=8)
        assert sampled(pool, asked) == sampled(other, asked)
        pool.load(learner, 1)
        assert [reply[:4] for reply in sampled(pool, asked)] == [reply[:4] for reply in calm]


@pytest.mark.slow
def test_a_run_with_servers_of_which_one_is_killed_is_the_run_without(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tiny(tokenizer), tmp_path / "start", tokenizer)
    poll, lose, killed, lost = EnginePool.poll, EnginePool._lose, list[int](), list[str]()

    def polled(self: EnginePool) -> list[Completion]:
        done = poll(self)
        if done and self.version == 1 and not killed:
            killed.append(server_of(self.members[0]))
            os.kill(killed[0], signal.SIGKILL)
        return done

    def noted(self: EnginePool, member: PoolMember, why: str) -> None:
        lost.append(why)
        lose(self, member, why)

    monkeypatch.setattr(EnginePool, "poll", polled)
    monkeypatch.setattr(EnginePool, "_lose", noted)
    tasks = [{"id": str(i), "prompt": f"{i}+1="} for i in range(6)]
    how: dict[str, Any] = {"algorithm": "grpo", "kl": 0.0, "lr": 1e-3, "steps": 3, "prompts": 3, "group": 4, "quiet": True,
                           "max_tokens": 8, "slots": 8, "seed": 3, "env_workers": 0}  # fmt: skip
    with leaves_no_process():
        local, served = (
            posttrain.rl(tasks, env=digits, model=str(tmp_path / "start"), out=str(tmp_path / name), **how, **more)
            for name, more in (("one", {}), ("two", {"engine": "vllm", "replicas": 2, "engine_seeds": True}))
        )
    assert killed and [row["reward"] for row in served.metrics] == [row["reward"] for row in local.metrics]
    assert len(lost) == 1, lost
    timing = [json.loads(line) for line in (tmp_path / "two" / "timing.jsonl").read_text().splitlines()]
    assert timing[-1]["engines/restarts"] == 1


@contextmanager
def running(
    model: Decoder, tokenizer: Tokenizer, folder: Path, *words: str
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server that somebody has started with a checkpoint. `words`: further arguments."""
    save_model(model, folder, tokenizer)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = [sys.executable, "-m", MODULE, "--model", str(folder), "--port", str(port), *words]
    process = subprocess.Popen([*started, "--max-model-len", str(model.config.context)], stdout=subprocess.DEVNULL)
    engine: list[int] = []
    try:
        end = time.monotonic() + 900
        while True:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60):
                break
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", process
        engine = descendants(process.pid)
    finally:
        process.kill()
        process.wait()
        for pid in engine:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_servers_that_run_already_get_checkpoints_and_are_dropped_with_their_requests_when_they_die(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    learner = tiny(tokenizer)
    later, asked, said = tiny(tokenizer, seed=1), ragged(30), list[str]()
    with (
        running(learner, tokenizer, tmp_path / "a") as (one, process),
        running(learner, tokenizer, tmp_path / "b") as (two, _),
    ):
        options = EngineOptions(urls=(one, two), restarts=1, folder=tmp_path / "weights")
        with closing(opened(learner, tokenizer, options)) as pool:
            pool.say = said.append
            for version, model in enumerate((learner, later)):
                pool.load(model, version)
                assert [path.name for path in (tmp_path / "weights").iterdir()] == [f"weights-0-{version}"]
                engine = LocalEngine(model, tokenizer, slots=8)
                engine.load(model, version)
                calm = sampled(engine, asked)
                assert sampled(pool, asked) == calm
            assert sampled(pool, asked, process.kill) == calm
            assert sampled(pool, asked) == calm
            assert pool.counts()["ready"] == 1 and any(f"the engine {one} is lost" in line for line in said)
        assert not list((tmp_path / "weights").iterdir())


def adapted(tokenizer: Tokenizer, version: int) -> Decoder:
    """A policy with adapters that have moved."""
    model = tiny(tokenizer)
    attach(model, LoRA(4, 8.0), lambda name: "gate" not in name)
    begin(model, 0)
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for adapter in adapters(model):
            adapter.b.add_(0.05 * torch.randn(adapter.b.shape, generator=generator))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("given", [False, True], ids=["started", "given"])
def test_adapters_alone_are_what_a_server_samples_with(
    given: bool, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")  # of servers and of the run
    asked = ragged(6)
    with ExitStack() as stack:
        options = EngineOptions(replicas=1, weight_sync="adapter")
        if given:
            url, _ = stack.enter_context(running(tiny(tokenizer), tokenizer, tmp_path / "base", "--enable-lora"))
            options = EngineOptions(urls=(url,), weight_sync="adapter", folder=tmp_path / "weights")
        pool = stack.enter_context(closing(opened(adapted(tokenizer, 0), tokenizer, options)))
        for version in (0, 1):
            model = adapted(tokenizer, version)
            pool.load(model, version)
            engine = LocalEngine(model, tokenizer, slots=8)
            engine.load(model, version)
            for mine, theirs in zip(sampled(pool, asked), sampled(engine, asked), strict=True):
                assert mine[0] == theirs[0] and mine[1] == pytest.approx(theirs[1], abs=1e-5)
        if given:  # a run that is lost leaves its adapter, which the next one unloads
            again = stack.enter_context(closing(opened(adapted(tokenizer, 1), tokenizer, options)))
            assert sampled(again, asked)
            calls = json.load(urllib.request.urlopen(f"{url}/calls"))
            assert [call for call in calls if "load " in call] == [
                f"{what} posttrain-version-{number}" for what, number in
                (("load", 0), ("unload", 0), ("load", 0), ("unload", 0), ("load", 1), ("unload", 1), ("load", 0))
            ]  # fmt: skip


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
        place = GivenServer(url, VLLMClient, run, CardToCard("nccl", weight_layout, 20.0))
        sizes = learner.config.context, learner.config.vocab
        return EnginePool([place], probe_of(learner, "float32"), *sizes, seconds=20.0, start_seconds=60.0, restarts=0)

    with (
        running(learner, tokenizer, tmp_path / "a", "--tensor-parallel-size", "3") as (url, _),
        closing(pool_of(url)) as pool,
    ):
        for version, model in enumerate((later, learner)):
            pool.load(model, version)
            engine = LocalEngine(model, tokenizer, slots=8)
            engine.load(model, version)
            assert sampled(pool, asked) == sampled(engine, asked)
    monkeypatch.setenv(FAULT, "no size")
    with (
        running(learner, tokenizer, tmp_path / "b") as (url, _),
        closing(pool_of(url)) as pool,
        pytest.raises(UserError, match="/get_world_size: 404 .*; start it with VLLM_SERVER_DEV_MODE=1"),
    ):
        pool.load(later, 0)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)


def test_a_server_whose_key_is_another_is_refused_with_the_name_of_the_variable(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(tokenizer)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with running(model, tokenizer, tmp_path / "base") as (url, _):
        monkeypatch.setenv("VLLM_API_KEY", "another")
        with pytest.raises(UserError, match="/v1/models: 401 .*; set VLLM_API_KEY to the key of the server"):
            opened(model, tokenizer, EngineOptions(urls=(url,), folder=tmp_path / "weights", restarts=0))


def test_a_server_that_is_not_there_or_too_short_ends_the_run_in_one_line(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.engines.servers.server_client.REACH_SECONDS", 0.5)
    model = tiny(tokenizer)
    with pytest.raises(UserError, match="the engine http://127.0.0.1:9 is lost: it cannot be reached: "):
        opened(model, tokenizer, EngineOptions(urls=("http://127.0.0.1:9",), folder=tmp_path))
    for url in ("127.0.0.1:8000", "ftp://a", "http://", "http://a:1/v1", "http://[::1", "http://a:x", "http://a:99999"):
        with pytest.raises(UserError, match=f"--engine-url {re.escape(url)}: give http://HOST:PORT"):
            GivenServer(url, VLLMClient, None, None)  # type: ignore[arg-type]
    short = new_decoder(replace(model.config, context=16), 0)
    monkeypatch.setenv(FAULT, "raw")
    with (
        running(model, tokenizer, tmp_path / "raw") as (url, _),
        pytest.raises(UserError, match="start it with that one"),
    ):
        opened(model, tokenizer, EngineOptions(urls=(url,), folder=tmp_path / "weights"))
    monkeypatch.delenv(FAULT)
    with (
        running(short, tokenizer, tmp_path / "short") as (url, _),
        pytest.raises(UserError, match="its context is 16 tokens, the run's is 64"),
    ):
        opened(model, tokenizer, EngineOptions(urls=(url,), folder=tmp_path / "weights"))


def test_without_vllm_the_message_says_how_to_get_it(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install vllm"):
        opened(tiny(tokenizer), tokenizer, EngineOptions(replicas=1))


def test_an_interrupted_start_leaves_no_process(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULT, "slow start")

    def interrupted(self: EnginePool, seconds: float) -> None:
        if len(descendants(self.members[0].link.process.child.process.pid)) > 1:  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    monkeypatch.setattr(EnginePool, "_exchange", interrupted)
    with leaves_no_process(), pytest.raises(KeyboardInterrupt):
        opened(tiny(tokenizer), tokenizer, EngineOptions(replicas=1))


@pytest.mark.slow
def test_a_server_that_shares_the_learners_gpu_sleeps_until_it_is_asked_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULT, "slow sleep")
    model, asked = tiny(tokenizer), ragged(6)
    with closing(opened(model, tokenizer, EngineOptions(replicas=1))) as pool:
        (member,) = pool.members
        member.place.sleeps = True  # type: ignore[misc]
        calls: list[str] = []
        call = member.link.wire._call  # type: ignore[union-attr]

        async def noted(method: str, path: str, body: Any = None) -> bytes:
            answer: bytes = await call(method, path, body)
            calls.append(path)
            return answer

        member.link.wire._call = noted  # type: ignore[union-attr]
        calm = sampled(pool, asked)
        pool.rest()
        assert "/sleep?level=2" in calls, "it sleeps when the update begins"
        assert member.state is MemberState.STALE
        assert sampled(pool, asked) == calm  # the same weights again
        used = [path for path in calls if not path.startswith(("/inference", "/metrics"))]
        awake = ["/wake_up?tags=weights", "/pause?mode=abort", "/collective_rpc", "/wake_up?tags=kv_cache"]
        assert used == ["/sleep?level=2", *awake, "/reset_prefix_cache", "/resume"]
        pool.rest()
        pool.load(tiny(tokenizer, seed=1), 1)
        assert calls.count("/wake_up?tags=kv_cache") == 2 and member.state is MemberState.READY


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
    assert SETUP.environment([], (0, 2))["CUDA_VISIBLE_DEVICES"] == "3,7"


def test_the_gpus_of_a_server_divide_the_cache_as_they_divide_heads(tokenizer: Tokenizer) -> None:
    model = new_decoder(replace(tiny(tokenizer).config, heads=8, kv_heads=4), 0)
    one, two, four, eight = (cache_bytes(model, 8, torch.bfloat16, 99.0, gpus) for gpus in (1, 2, 4, 8))
    assert one == 2 * two == 4 * four == 4 * eight, "with more GPUs than heads each has one"
    assert cache_bytes(model, 8, torch.bfloat16, two / 2**30, 2) == two < one, "the limit is that of a GPU"


@pytest.mark.parametrize(
    ("given", "learners", "devices", "roles", "replicas", "found"),
    [
        (None, 1, (), (), 3, [None] * 3),  # GPUs 1, 2, 3
        (None, 1, (), (), 4, [4 << 30, None, None, 4 << 30]),  # the first and the last one share GPU 1
        (None, 1, (0, 1), (), 2, [4 << 30, None]),  # GPU 0 learns
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
    monkeypatch.setattr(f"{pool}.cache_bytes", lambda model, slots, dtype, most_gib, gpus: int(most_gib * 2**30))
    options = EngineOptions(8, replicas=learners * replicas, cache_gib=given, devices=devices, role_devices=roles)
    own = options.of(SimpleNamespace(size=learners, rank=learners - 1))  # type: ignore[arg-type]
    places: Any = open_servers(VLLMSetup, tiny(tokenizer), tokenizer, own)
    assert [place.setup.cache_bytes for place in places] == found


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
    prepare(str(tmp_path), model, tokenizer, True)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False


class Noted(VLLMClient):
    """A client whose calls are noted and answered here. `adapters`: those that the server has."""

    def __init__(self, *adapters: str) -> None:
        self.calls: list[str] = []
        self.adapters = adapters
        run = ServedRun(None, (), 64, 8, 60.0, False, {})  # type: ignore[arg-type]
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
        assert client.answer()[0] == "hello"
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

    def environment(self: VLLMSetup, *how: Any) -> dict[str, str]:
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


def test_weights_are_sent_only_where_vllm_can_send_them() -> None:
    eight = GPUPlacement(8, engine_devices=(0, 1))
    check_transfer("ipc", (0,), eight)
    check_transfer("nccl", (1,), eight)
    check_transfer(None, (0,), eight)
    with pytest.raises(UserError, match="--weight-sync nccl sends weights to other GPUs than the learner's: .* ipc"):
        check_transfer("nccl", (0, 1), eight)
    for gpus in ((1,), (0, 1)):
        with pytest.raises(UserError, match="within one GPU, the learner's: give --engine-devices 0 and servers"):
            check_transfer("ipc", gpus, eight)


def test_a_path_that_no_socket_can_have_is_refused() -> None:
    assert str(socket_at(Path("/" + "a" * 97, "0"))).endswith("/0.socket")
    with pytest.raises(UserError, match="too long a path for a socket: set TMPDIR"):
        socket_at(Path("/" + "a" * 98, "0"))
