"""The process of vLLM ends with its parent, however that ends, and takes with it all that it started.

A stub stands in for vLLM itself, which need not be installed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import tiny
from processes import descendants, gone
from tiny_models import make

from posttrain.core.types import Sampling, UserError
from posttrain.engines.model_manifest import backbone_of
from posttrain.engines.vllm import vllm_engine
from posttrain.engines.vllm.vllm_engine import VLLMEngine
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.decoder import new_decoder
from posttrain.models.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

SCRIPT = """
import sys, time
from conftest import tiny
from posttrain.engines.vllm import vllm_engine as vllm
from posttrain.models.tokenizer.tokenizer import Tokenizer
vllm.WORKER = "vllm_stub:main"
vllm.VLLMEngine._run_probe = lambda engine, weights: None
tokenizer = Tokenizer.train(["0123456789"], 64, "characters")
engine = vllm.VLLMEngine(tiny(tokenizer), tokenizer)
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(vllm_engine, "WORKER", "vllm_stub:main")
    monkeypatch.setattr(VLLMEngine, "_run_probe", lambda engine, weights: None)  # it knows no weights


def test_weights_of_another_version_stop_the_run_in_one_line(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB", "other version")
    with closing(VLLMEngine(tiny(tokenizer), tokenizer)) as engine:
        engine.submit(0, [5, 6], Sampling())
        with pytest.raises(UserError, match="sampled with weights of version 1, not 0; its output is in") as caught:
            engine.poll()
    Path(str(caught.value).rpartition(" ")[2]).unlink()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["native", "gemma3_text", "gpt2"])
def test_a_tied_head_is_handed_over_twice_and_lies_where_the_embedding_does(
    kind: str, tied: bool, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    config = replace(tiny(tokenizer).config, tied=tied)
    model = new_decoder(config, 0) if kind == "native" else load_model(make(kind, tmp_path, tie_word_embeddings=tied))
    laid = vllm_engine.vllm_layout(model, torch.float32)
    memory = torch.zeros(laid.bytes, dtype=torch.uint8)
    laid.write(model, memory)
    stored = {own.name: own for own in laid.stored}
    assert len(stored) == len(laid.stored), "each name once"
    head, embedding = (stored[name] for name in ("lm_head.weight", backbone_of(model).embedding_name))
    assert (head.offset == embedding.offset) is tied
    assert torch.equal(head.tensor_in(memory, torch.float32), model.head.weight)
    assert {own.offset + 4 * torch.Size(own.shape).numel() <= laid.bytes for own in laid.stored} == {True}
    vllm_engine.prepare(str(tmp_path), model, tokenizer)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False


def test_closing_leaves_no_process(tokenizer: Tokenizer) -> None:
    before = set(descendants(os.getpid()))
    with closing(VLLMEngine(tiny(tokenizer), tokenizer)):
        own = [pid for pid in descendants(os.getpid()) if pid not in before]
        assert len(own) == 3  # a keeper, the process itself, and what that started
    gone(*own)


def test_an_interrupted_start_leaves_no_process(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB", "slow start")
    own: list[int] = []
    before = descendants(os.getpid())
    ask = vllm_engine._Process.ask

    def interrupted(self: vllm_engine._Process, message: object, doing: str, seconds: float) -> None:
        self.connection.send(message)
        while len(descendants(self.child.process.pid)) < 2:
            time.sleep(0.01)
        own.extend(p for p in descendants(os.getpid()) if p not in before)
        raise KeyboardInterrupt

    monkeypatch.setattr(vllm_engine._Process, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        VLLMEngine(tiny(tokenizer), tokenizer)
    gone(*own)
    monkeypatch.setattr(vllm_engine._Process, "ask", ask)


@pytest.mark.parametrize("start", ["", pytest.param("slow start", marks=pytest.mark.long)])
def test_a_killed_parent_leaves_no_process(start: str, tmp_path: Path) -> None:
    paths = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "STUB": start, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, env={**os.environ, **paths}
    )
    assert parent.stdout is not None
    with parent.stdout:
        end = time.monotonic() + 60
        while len(processes := descendants(parent.pid)) < 3:
            assert time.monotonic() < end and parent.poll() is None
            time.sleep(0.01)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    gone(*processes)
