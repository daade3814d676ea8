"""A pool of servers samples what one engine samples, and one that dies, hangs or reads wrong weights is replaced: the same
for every program.

A server with the embedded engine behind the HTTP of vLLM or SGLang stands in for the program itself, which need not be
installed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import urllib.request
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny
from fake_server import FAULT, NO_LOAD, NO_START
from inference_servers import SGLANG, VLLM, StandIn, leaves_no_process, ragged, sampled, server_of, until
from processes import descendants
from rl_sources import digits

import posttrain
from posttrain.core.types import Completion, Sampling, StopReason, UserError
from posttrain.engines.engine_options import EngineOptions
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.engines.pool.engine_pool import EnginePool
from posttrain.engines.pool.pool_member import MemberState, PoolMember
from posttrain.engines.pool.pool_protocol import Gone
from posttrain.engines.servers.routed_layers import RoutedLayers
from posttrain.engines.servers.server_places import GivenServer
from posttrain.models.adapters.adapter_writer import adapters
from posttrain.models.adapters.lora import LoRA, attach, begin
from posttrain.models.hf.experts import Router, Routers
from posttrain.models.native.decoder import Decoder, new_decoder
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
    pytest.mark.timeout(1200),  # starts a dozen processes, which a busy machine does in minutes
]


AWAKE = {
    "vllm": (
        ["/sleep?level=2"],
        ["/wake_up?tags=weights", "/pause?mode=abort", "/collective_rpc", "/wake_up?tags=kv_cache", "/reset_prefix_cache",
         "/resume"],
    ),
    "sglang": (
        ["/pause_generation", "/flush_cache?timeout=30", "/release_memory_occupation"],
        ["/resume_memory_occupation", "/pause_generation", "/update_weights_from_disk", "/resume_memory_occupation",
         "/flush_cache?timeout=30", "/continue_generation"],
    ),
}  # fmt: skip
"""The calls with which a server falls asleep, and those with which it gets its weights again."""


@pytest.fixture(params=[VLLM, SGLANG], ids=["vllm", "sglang"])
def server(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found: StandIn = request.param
    found.install(tmp_path / "packages", monkeypatch)
    return found


@pytest.mark.slow
def test_servers_that_are_killed_or_stopped_change_no_token(server: StandIn, tokenizer: Tokenizer) -> None:
    learner = tiny(tokenizer)
    later, asked = tiny(tokenizer, seed=1), ragged(40)
    calm = sampled(LocalEngine(learner, tokenizer, slots=8), asked)
    said: list[str] = []
    with (
        leaves_no_process(),
        closing(server.opened(learner, tokenizer, EngineOptions(replicas=2), seconds=15.0)) as pool,
    ):
        pool.say = said.append
        first, second = pool.members
        assert not pool.batch_invariant and pool.backend == f"2 engines ({server.setup.client.program})"
        assert sampled(pool, asked) == calm and not said
        assert 0 <= pool.counts()["probe_gap"] < 1e-5

        os.kill(server_of(second), signal.SIGKILL)  # while nothing is asked of it
        assert sampled(pool, asked, lambda: os.kill(server_of(first), signal.SIGSTOP)) == calm
        assert any("the engine 1 is lost: " in line for line in said)
        assert any("the engine 0 is lost: it sent nothing for 15 s" in line for line in said)
        assert pool.counts()["resubmitted"] > 0 == pool.counts()["duplicate_answers"]
        until(pool, lambda: all(m.state is MemberState.READY for m in pool.members))
        assert pool.counts()["restarts"] == 2
        pool.load(later, 1)
        other = LocalEngine(later, tokenizer, slots=8)
        other.load(later, 1)
        assert sampled(pool, asked) == sampled(other, asked)


def test_weights_whose_checksum_is_another_end_the_run(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    VLLM.install(tmp_path / "packages", monkeypatch)
    learner, later = tiny(tokenizer), tiny(tokenizer, seed=1)
    with leaves_no_process(), closing(VLLM.opened(learner, tokenizer, EngineOptions(replicas=2), seconds=15.0)) as pool:
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


@pytest.mark.slow
def test_a_run_with_servers_of_which_one_is_killed_is_the_run_without(
    server: StandIn, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
            for name, more in (
                ("one", {}),
                ("two", {"engine": server.setup.package, "replicas": 2, "engine_seeds": True}),
            )
        )
    assert killed and [row["reward"] for row in served.metrics] == [row["reward"] for row in local.metrics]
    assert len(lost) == 1, lost
    timing = [json.loads(line) for line in (tmp_path / "two" / "timing.jsonl").read_text().splitlines()]
    assert timing[-1]["engines/restarts"] == 1


@pytest.mark.slow
def test_servers_that_run_already_get_checkpoints_and_are_dropped_with_their_requests_when_they_die(
    server: StandIn, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    learner = tiny(tokenizer)
    later, asked, said = tiny(tokenizer, seed=1), ragged(30), list[str]()
    with (
        server.running(learner, tokenizer, tmp_path / "a") as (one, process),
        server.running(learner, tokenizer, tmp_path / "b") as (two, _),
    ):
        options = EngineOptions(urls=(one, two), restarts=1, folder=tmp_path / "weights")
        with closing(server.opened(learner, tokenizer, options)) as pool:
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
    attach(model, LoRA(4, 8.0), lambda name: "o_proj" not in name)
    begin(model, 0)
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for adapter in adapters(model):
            adapter.b.add_(0.05 * torch.randn(adapter.b.shape, generator=generator))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("given", [False, True], ids=["started", "given"])
def test_adapters_alone_are_what_a_server_samples_with(
    given: bool, server: StandIn, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(server.setup.client.key, "secret")  # of servers and of the run
    asked = ragged(6)
    with ExitStack() as stack:
        options = EngineOptions(replicas=1, weight_sync="adapter")
        if given:
            url, _ = stack.enter_context(
                server.running(
                    tiny(tokenizer), tokenizer, tmp_path / "base", "--enable-lora", *server.with_key("secret")
                )
            )
            options = EngineOptions(urls=(url,), weight_sync="adapter", folder=tmp_path / "weights")
        pool = stack.enter_context(closing(server.opened(adapted(tokenizer, 0), tokenizer, options)))
        for version in (0, 1):
            model = adapted(tokenizer, version)
            pool.load(model, version)
            engine = LocalEngine(model, tokenizer, slots=8)
            engine.load(model, version)
            for mine, theirs in zip(sampled(pool, asked), sampled(engine, asked), strict=True):
                assert mine[0] == theirs[0] and mine[1] == pytest.approx(theirs[1], abs=1e-5)
        if given:  # a run that is lost leaves its adapter, which the next one unloads
            again = stack.enter_context(closing(server.opened(adapted(tokenizer, 1), tokenizer, options)))
            assert sampled(again, asked)
            calls = json.load(urllib.request.urlopen(f"{url}/calls"))
            assert [call for call in calls if "load " in call] == [
                f"{what} posttrain-version-{number}" for what, number in
                (("load", 0), ("unload", 0), ("load", 0), ("unload", 0), ("load", 1), ("unload", 1), ("load", 0))
            ]  # fmt: skip


def test_a_server_whose_key_is_another_is_refused_with_the_name_of_the_variable(
    server: StandIn, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(tokenizer)
    key = server.setup.client.key
    monkeypatch.setenv(key, "secret")
    with server.running(model, tokenizer, tmp_path / "base", *server.with_key("secret")) as (url, _):
        monkeypatch.setenv(key, "another")
        with pytest.raises(UserError, match=f": 401 .*; set {key} to the key of the server"):
            server.opened(model, tokenizer, EngineOptions(urls=(url,), folder=tmp_path / "weights", restarts=0))


def test_a_server_that_is_not_there_or_too_short_ends_the_run_in_one_line(
    server: StandIn, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.engines.servers.server_client.REACH_SECONDS", 0.5)
    model = tiny(tokenizer)
    with pytest.raises(UserError, match="the engine http://127.0.0.1:9 is lost: it cannot be reached: "):
        server.opened(model, tokenizer, EngineOptions(urls=("http://127.0.0.1:9",), folder=tmp_path))
    for url in ("127.0.0.1:8000", "ftp://a", "http://", "http://a:1/v1", "http://[::1", "http://a:x", "http://a:99999"):
        with pytest.raises(UserError, match=f"--engine-url {re.escape(url)}: give http://HOST:PORT"):
            GivenServer(url, server.setup.client, None, None)  # type: ignore[arg-type]
    short = new_decoder(replace(model.config, context=16), 0)
    monkeypatch.setenv(FAULT, "raw")
    with (
        server.running(model, tokenizer, tmp_path / "raw") as (url, _),
        pytest.raises(UserError, match="start it with"),
    ):
        server.opened(model, tokenizer, EngineOptions(urls=(url,), folder=tmp_path / "weights"))
    monkeypatch.delenv(FAULT)
    with (
        server.running(short, tokenizer, tmp_path / "short") as (url, _),
        pytest.raises(UserError, match="its context is 16 tokens, the run's is 64"),
    ):
        server.opened(model, tokenizer, EngineOptions(urls=(url,), folder=tmp_path / "weights"))


def routing(tokenizer: Tokenizer) -> Decoder:
    """A dense policy that asks servers for experts of its layers 0 and 2 as a mixture does: stand-ins invent them."""
    model = tiny(tokenizer)
    model.replays = True
    model.routers = Routers((Router("model.layers.0.mlp.gate", 0), Router("model.layers.2.mlp.gate", 0)), 4, 2)
    return model


def test_experts_reach_transcripts_as_the_servers_return_them(
    server: StandIn, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with closing(server.opened(routing(tokenizer), tokenizer, EngineOptions(replicas=1))) as pool:
        asked = [([5 + i % 9] * (2 + i), Sampling(seed=i, max_tokens=20, stop=tuple("0123456789"))) for i in range(12)]
        for id, (prompt, sampling) in enumerate(asked):
            pool.submit(id, prompt, sampling)
        done: list[Completion] = []
        while len(done) < len(asked):
            done += pool.poll()
    assert StopReason.STOP in {c.stop for c in done}
    for completion in done:
        given, count = len(asked[completion.id][0]), len(completion.tokens)
        first = np.arange(given + count - 1)[:, None] + np.array([0, 2])
        known = np.stack([first % 4, (first + 1) % 4], -1)
        assert completion.prompt_experts is not None and completion.experts is not None
        assert np.array_equal(completion.prompt_experts, known[:given])
        assert np.array_equal(completion.experts[:-1], known[given:]) and (completion.experts[-1] == -1).all()


def test_experts_of_a_reply_that_ends_before_the_servers_did_end_with_it() -> None:
    found = np.arange(60).reshape(10, 3, 2) % 50
    own, before = RoutedLayers((0, 2), 50, 2).split(found, 4, 10, 3)
    assert np.array_equal(before, found[:4, [0, 2]]) and np.array_equal(own[:2], found[4:6, [0, 2]])
    assert len(own) == 3 and (own[2] == -1).all()


@pytest.mark.parametrize("change", [{"numbers": (0, 3)}, {"experts": 30}, {"taken": 3}])
def test_experts_of_another_model_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Gone, match="it returned experts"):
        replace(RoutedLayers((0, 2), 50, 2), **change).split(np.arange(60).reshape(10, 3, 2) % 50, 4, 10, 3)


@pytest.mark.parametrize("kind", [float, bool])
def test_experts_that_are_no_integers_are_refused(kind: type) -> None:
    with pytest.raises(Gone, match="it returned experts of the shape"):
        RoutedLayers((0, 2), 50, 2).split((np.arange(60).reshape(10, 3, 2) % 50).astype(kind), 4, 10, 3)


def test_layers_that_cannot_be_told_by_number_are_refused(tokenizer: Tokenizer) -> None:
    model = routing(tokenizer)
    model.routers = Routers((Router("blocks.0.gate", 0),), 4, 2)
    with pytest.raises(UserError, match="at most one router in each numbered layer, which .*: leave out --engine"):
        RoutedLayers.of(model)
    model.replays = False
    assert RoutedLayers.of(model) is None


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("", "--routing-replay needs a server that returns experts: start it with --enable-return-routed-experts"),
        ("no experts", "it returned no experts: start it with --enable-return-routed-experts"),
        ("more experts", r"it (returned experts of the shape|failed: ValueError)"),
        ("empty experts", "it returned experts that are not 2 different ones of the model's 4"),
    ],
)
def test_a_server_without_the_experts_of_its_tokens_is_refused(
    fault: str, message: str, server: StandIn, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULT, fault)
    words = ["--enable-return-routed-experts"] if fault else []
    with (
        server.running(tiny(tokenizer), tokenizer, tmp_path / "theirs", *words) as (url, _),
        pytest.raises(UserError, match=message),
    ):
        options = EngineOptions(urls=(url,), folder=tmp_path / "weights", restarts=0)
        server.opened(routing(tokenizer), tokenizer, options).close()


def test_without_the_program_the_message_says_how_to_get_it(
    server: StandIn, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"pip install {server.setup.package}"):
        server.opened(tiny(tokenizer), tokenizer, EngineOptions(replicas=1))


UNKNOWN_MODEL = "ValueError: Model architectures ['Odd'] are not supported for now. Supported architectures: ..."


def test_a_server_that_cannot_start_ends_the_run_with_the_error_of_its_log_and_the_fix(
    server: StandIn, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULT, NO_START + UNKNOWN_MODEL)
    said = (
        rf"the engine 0 is lost: its process has ended \(exit code 1\): {re.escape(UNKNOWN_MODEL)}: it cannot sample from "
        rf"this model: leave out --engine {server.setup.package}, .*; its output is in .*\.log"
    )
    with leaves_no_process(), pytest.raises(UserError, match=said) as told:
        server.opened(tiny(tokenizer), tokenizer, EngineOptions(replicas=1))
    assert told.value.code == 2


def test_a_server_that_ends_at_its_first_weights_twice_in_a_row_ends_the_run(
    server: StandIn, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FAULT, NO_LOAD + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    said = (
        r"no engine is left, as each failed 2 times in a row and none was ever ready; the last failure: .*: "
        r"OutOfMemoryError: CUDA out of memory\. .*: give it GPUs of its own .*--engine-devices"
    )
    with leaves_no_process(), pytest.raises(UserError, match=said) as told:
        server.opened(tiny(tokenizer), tokenizer, EngineOptions(replicas=1, restarts=5))
    assert told.value.code == 2 and capsys.readouterr().err.count("it restarts in 0 s") == 1


def test_an_interrupted_start_leaves_no_process(
    server: StandIn, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULT, "slow start")

    def interrupted(self: EnginePool, seconds: float) -> None:
        if len(descendants(self.members[0].link.process.child.process.pid)) > 1:  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    monkeypatch.setattr(EnginePool, "_exchange", interrupted)
    with leaves_no_process(), pytest.raises(KeyboardInterrupt):
        server.opened(tiny(tokenizer), tokenizer, EngineOptions(replicas=1))


@pytest.mark.slow
def test_a_server_that_shares_the_learners_gpu_sleeps_until_it_is_asked_again(
    server: StandIn, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULT, "slow sleep")
    model, asked = tiny(tokenizer), ragged(6)
    with closing(server.opened(model, tokenizer, EngineOptions(replicas=1))) as pool:
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
        slept, woken = AWAKE[server.setup.package]
        assert calls[-1] == slept[-1], "it sleeps when the update begins"
        assert member.state is MemberState.STALE
        assert sampled(pool, asked) == calm  # the same weights again
        used = [path for path in calls if not path.startswith(("/inference", "/metrics", "/generate", "/health"))]
        assert used == [*slept, *woken]
        pool.rest()
        pool.load(tiny(tokenizer, seed=1), 1)
        assert calls.count(slept[-1]) == 2 and member.state is MemberState.READY
