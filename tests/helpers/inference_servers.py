"""Stand-ins for the servers of vLLM and SGLang, pools of them, and what these sample."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_sglang
import fake_vllm
import pytest
from processes import descendants, gone

from posttrain.core.types import Completion, Sampling
from posttrain.engines.engine_options import EngineOptions
from posttrain.engines.pool.engine_pool import EnginePool
from posttrain.engines.pool.pool_member import PoolMember
from posttrain.engines.servers.server_pool import open_servers
from posttrain.engines.servers.server_setup import PACKAGES, ServerSetup
from posttrain.engines.sglang.sglang_setup import SGLangSetup
from posttrain.engines.vllm.vllm_setup import VLLMSetup
from posttrain.models.native.decoder import Decoder
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class StandIn:
    """A program whose server has a stand-in."""

    setup: type[ServerSetup]
    fake: ModuleType
    words: tuple[str, ...]  # of its command: those before a folder and a context
    seeds: tuple[str, ...] = ()  # with which it samples by the seeds of requests

    def install(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake.installed(folder)
        monkeypatch.syspath_prepend(folder)
        paths = [str(folder), str(Path(self.fake.__file__ or "").parent), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [*paths, PACKAGES])))

    def with_key(self, key: str) -> list[str]:
        """The words that give a server its key, if that is not in the environment."""
        return [] if self.setup is VLLMSetup else ["--api-key", key]

    def opened(self, model: Decoder, tokenizer: Tokenizer, options: EngineOptions, **how: Any) -> EnginePool:
        given = {"slots": 8, "cache_gib": 0.1, "seconds": 20.0, "seeds": True, **how}
        pool = open_servers(self.setup, model, tokenizer, replace(options, **given))
        pool.load(model, 0)
        return pool

    @contextmanager
    def running(
        self, model: Decoder, tokenizer: Tokenizer, folder: Path, *words: str
    ) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
        """A server that somebody has started with a checkpoint. `words`: further arguments."""
        save_model(model, folder, tokenizer)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        places = [self.words[0], str(folder), self.words[1], str(model.config.context), "--port", str(port)]
        started = [sys.executable, "-m", self.fake.MODULE, *places, *self.seeds, *words]
        process = subprocess.Popen(started, stdout=subprocess.DEVNULL)
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


VLLM = StandIn(VLLMSetup, fake_vllm, ("--model", "--max-model-len"))
SGLANG = StandIn(
    SGLangSetup, fake_sglang, ("--model-path", "--context-length"), ("--enable-deterministic-inference",)
)  # fmt: skip


@contextmanager
def leaves_no_process() -> Iterator[None]:
    before = set(descendants(os.getpid()))
    yield
    gone(*(pid for pid in descendants(os.getpid()) if pid not in before))


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
        assert not found.keys() & new.keys()
        found |= new
    return [(list(c.tokens), list(c.logp), c.text, c.stop, c.version) for _, c in sorted(found.items())]


def server_of(member: PoolMember) -> int:
    return descendants(member.link.process.child.process.pid)[0]  # type: ignore[attr-defined]


def until(pool: EnginePool, holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not holds():
        pool.poll()
        assert time.monotonic() < end
