"""SGLang's part of a pool of servers, with a stand-in for SGLang. `test_servers.py` tests what all servers share."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny
from fake_server import FAULT
from inference_servers import SGLANG, ragged, sampled

from posttrain.config.resolve import validate
from posttrain.config.training import RL
from posttrain.core.types import Sampling, StopReason, UserError
from posttrain.engines.engine_options import EngineOptions
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.engines.pool.pool_protocol import Gone
from posttrain.engines.request import Request
from posttrain.engines.servers.adapter_sync import rank_for
from posttrain.engines.servers.server_client import ServedRun
from posttrain.engines.servers.server_setup import COMMAND, prepare
from posttrain.engines.sglang.sglang_client import SGLangClient
from posttrain.engines.sglang.sglang_setup import SGLangSetup
from posttrain.models.adapters.lora import LoRA, attach, begin
from posttrain.models.tokenizer.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
    pytest.mark.timeout(600),
]

SETUP = SGLangSetup("folder", torch.bfloat16, 64, 8, 1 << 20, 1, token_bytes=1 << 10)


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SGLANG.install(tmp_path / "packages", monkeypatch)


def urls_of(url: str, folder: Path) -> EngineOptions:
    return EngineOptions(urls=(url,), folder=folder / "weights", restarts=0)


def test_replies_fill_the_runs_context_to_its_last_token(tokenizer: Tokenizer) -> None:
    model = tiny(tokenizer)
    asked = [([5 + i % 40 for i in range(n)], Sampling(seed=n, max_tokens=100)) for n in (2, 50, 62, 63)]
    with closing(SGLANG.opened(model, tokenizer, EngineOptions(replicas=1))) as pool:
        found = sampled(pool, asked)
        with pytest.raises(UserError, match="SGLang returns log-probabilities from before top-p and top-k"):
            pool.submit(9, [5], Sampling(top_p=0.9))
    assert found == sampled(LocalEngine(model, tokenizer, slots=8), asked)
    assert StopReason.CONTEXT in {stop for *_, stop, _ in found}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("not a number", "it ended a reply in a way that is none of this run's: .*NaN happened"),
        ("no version", "it sampled with weights of version default, not 0"),
        ("old weights", "nats off the learner's log-probabilities"),
        ("little memory", "it cut a reply after 3 tokens: its cache has no room for longer ones"),
    ],
)
def test_a_reply_that_is_none_of_the_runs_is_a_loss(
    fault: str, message: str, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a server that runs already, with the weights of another model."""
    monkeypatch.setenv(FAULT, fault)
    with (
        SGLANG.running(tiny(tokenizer, seed=1), tokenizer, tmp_path / "theirs") as (url, _),
        pytest.raises(UserError, match=f"no engine is left.*{message}"),
        closing(SGLANG.opened(tiny(tokenizer), tokenizer, urls_of(url, tmp_path))) as pool,
    ):
        sampled(pool, ragged(8))


@pytest.mark.parametrize(
    ("fault", "seeds", "message"),
    [
        (
            "raw",
            True,
            "log-probabilities are those before the temperature: start it without SGLANG_RETURN_ORIGINAL_LOGPROB",
        ),
        ("", False, "--engine-seeds needs a server that was started with --enable-deterministic-inference"),
    ],
)
def test_a_server_that_was_started_otherwise_than_a_run_needs_is_refused(
    fault: str, seeds: bool, message: str, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULT, fault)
    model, program = tiny(tokenizer), SGLANG if seeds else replace(SGLANG, seeds=())
    with program.running(model, tokenizer, tmp_path / "theirs") as (url, _), pytest.raises(UserError, match=message):
        program.opened(model, tokenizer, urls_of(url, tmp_path))


def test_the_options_are_those_that_a_run_names() -> None:
    cpu = SETUP.options((), False)
    assert cpu["device"] == "cpu" and cpu["context-length"] > 64 + 5 and cpu["max-total-tokens"] == 1 << 10
    assert cpu["load-format"] == "dummy" and cpu["sampling-defaults"] == "openai" and "attention-backend" not in cpu
    assert not (cpu["enable-memory-saver"] or cpu["enable-lora"] or cpu["enable-deterministic-inference"])
    alone = replace(SETUP, cache_bytes=None, dtype=torch.float32, seeds=True).options((1,), False)
    assert not {"max-total-tokens", "device", "tp-size"} & set(alone) and alone["attention-backend"] == "triton"
    assert alone["enable-deterministic-inference"]
    four = replace(SETUP, lora_rank=8, lora_targets=("q_proj", "v_proj")).options((4, 5, 6, 7), True)
    assert four["tp-size"] == 4 and four["enable-memory-saver"] and four["max-lora-rank"] == 8
    assert four["enable-lora"] and four["lora-target-modules"] == ["q_proj", "v_proj"]
    assert four["max-loras-per-batch"] == 2, "its check of health has none"
    assert SETUP.environment([], (), False)["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"


def test_the_ends_of_a_reply_are_the_runs_alone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prepare(SGLangSetup, tmp_path, tiny(tokenizer), tokenizer, (3, 4))
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == [3, 4]
    assert tokenizer.eos_id is not None and Tokenizer.load(tmp_path).eos_id is None


def test_the_key_of_a_server_is_not_among_the_words_of_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr("posttrain.engines.sglang.sglang_setup.EngineProcess", lambda *how: told.append(how))
    run = ServedRun(None, (), 64, 8, 60.0, False, {})  # type: ignore[arg-type]
    keys = set()
    for number in range(2):
        _, client = replace(SETUP, lora_rank=4).start(run, tmp_path / str(number), (), False)
        client.close()
        given = json.loads((tmp_path / f"{number}.yaml").read_text())
        keys.add(given["api-key"])
        command = told[-1][2][COMMAND]
        assert given["api-key"] not in command and given["host"] == "127.0.0.1"
        assert "--lora-strict-loading" in command, "a file has no place for it"
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("names", "how", "lacks"),
    [
        ("q_proj v_proj", {}, None),
        ("q_proj k_proj v_proj o_proj gate_proj up_proj down_proj", {}, None),
        ("k_proj v_proj", {}, "adapters of k_proj, v_proj without q_proj"),
        ("v_proj", {}, "adapters of v_proj without q_proj"),
        ("q_proj o_proj", {}, "adapters of q_proj without v_proj"),
        ("up_proj down_proj", {}, "adapters of up_proj without gate_proj"),
        ("c_attn", {}, "adapters of c_attn"),
        ("o_proj", {"rslora": True}, "rsLoRA"),
        ("o_proj", {"dora": True}, "DoRA"),
    ],
)
def test_adapters_that_sglang_computes_otherwise_are_refused(
    names: str, how: dict[str, Any], lacks: str | None
) -> None:
    assert SGLangSetup.lacks(LoRA(3, 8.0, **how), names.split()) == lacks


def test_the_names_that_have_adapters_are_read_from_the_model(tokenizer: Tokenizer) -> None:
    model = tiny(tokenizer)
    attach(model, LoRA(3, 8.0), lambda name: "up_proj" in name)
    begin(model, 0)
    with pytest.raises(UserError, match="SGLang does not support adapters of up_proj without gate_proj: leave it out"):
        rank_for(model, SGLangSetup)


@pytest.mark.parametrize("kind", ["nccl", "ipc"])
def test_weights_from_gpu_to_gpu_are_refused(kind: Any) -> None:
    with pytest.raises(UserError, match=f"--weight-sync {kind} requires --engine vllm, .*: leave it out"):
        validate(RL(tasks="x", model="x", env="x", engine="sglang", weight_sync=kind))


class Noted(SGLangClient):
    """A client whose calls are noted, and never answered where they ask for a reply."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        super().__init__(ServedRun(None, (7,), 64, 8, 60.0, False, {}), "http://here", own=True)  # type: ignore[arg-type]

    async def _call(self, method: str, path: str, body: Any = None) -> bytes:
        self.calls.append((path, body))
        if path == "/generate":
            await self._turn.acquire()
            await self._turn.acquire()
        return json.dumps({"data": [{"id": "policy", "max_model_len": 72}]}).encode()

    def until(self, path: str) -> Any:
        end = time.monotonic() + 60
        while not (found := [body for called, body in self.calls if called == path]):
            assert time.monotonic() < end
            time.sleep(0.001)
        return found[0]


def test_a_cancelled_request_is_ended_by_its_name_which_no_other_begins_with() -> None:
    client = Noted()
    with closing(client):
        client.until("/v1/models")
        how = {"temperature": 0.7, "max_tokens": 100, "stop": [str(n) for n in range(40)], "seed": 2**62}
        client.send("submit", 0, 1, [5, 6], [8], how, False)
        asked = client.until("/generate")
        client.send("cancel", 1)
        assert client.until("/abort_request") == {"rid": asked["rid"]}
    assert not client._rid(11).startswith(client._rid(1))
    assert asked["input_ids"] == [5, 6, 8] and asked["return_logprob"] and "lora_path" not in asked
    found = asked["sampling_params"]
    assert found["max_new_tokens"] == 61 and found["stop_token_ids"] == [7] and found["ignore_eos"] is False
    assert found["sampling_seed"] == 2**62 and len(found["stop"]) == 32
    assert (found["top_p"], found["top_k"], found["repetition_penalty"]) == (1, -1, 1), (
        "whatever the server's defaults are"
    )


def test_requests_of_two_runs_and_their_ends_have_different_names() -> None:
    with closing(Noted()) as one, closing(Noted()) as other:
        assert one._rid(1) != other._rid(1)


def test_a_reply_ends_at_its_maximum_less_what_sglang_never_samples_or_in_a_way_of_the_run() -> None:
    request = Request(1, (5, 6), Sampling(max_tokens=100, stop=("!",)))
    most = request.budget(64) - 2
    with closing(Noted()) as client:

        def cut(count: int, **finish: Any) -> bool:
            return client._is_cut(request, [9] * count, finish)

        assert cut(most, type="length") and not cut(3, type="stop", matched=7) and not cut(3, type="stop", matched="!")
        for count, finish in (
            (most - 1, {"type": "length"}),
            (3, {"type": "stop", "matched": 8}),
            (3, {"type": "abort"}),
        ):
            with pytest.raises(Gone):
                cut(count, **finish)


def test_weights_are_loaded_without_a_cache_and_requests_go_on_after_it_is_emptied() -> None:
    """The cache holds what other weights computed, and its memory may not be there while weights are loaded."""
    with closing(Noted()) as client:
        client.until("/v1/models")
        client.calls.clear()

        async def load() -> tuple[int, int]:
            await client.pause()
            found = await client.read_weights({"folder": "/weights", "version": 3, "checksum": 5})
            await client.resume()
            return found

        assert asyncio.run_coroutine_threadsafe(load(), client._loop).result(60) == (3, 5)
        (first, mode), (second, weights), (third, _), (last, body) = client.calls
        assert (first, mode, last, body) == ("/pause_generation", {"mode": "abort"}, "/continue_generation", {})
        assert second == "/update_weights_from_disk" and third.startswith("/flush_cache?")
        assert weights["weight_version"] == "3" and not weights["flush_cache"] and weights["model_path"] == "/weights"


def test_a_request_names_the_adapter_whose_version_is_loaded() -> None:
    with closing(Noted()) as client:
        client.until("/v1/models")
        client.model = "policy-3"
        client.send("submit", 0, 1, [5], [], {"temperature": 1.0, "max_tokens": 4, "stop": [], "seed": 1}, False)
        assert client.until("/generate")["lora_path"] == "policy-3"
        client.send("cancel", 1)
