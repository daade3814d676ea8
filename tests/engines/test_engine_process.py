"""The process of an engine is none of the training processes: it does not take itself for one of them."""

from __future__ import annotations

import json
import os
import socket

import pytest

from posttrain.engines.engine_process import EngineProcess

# those of torch 2.13's agent (torch/distributed/elastic/agent/server/local_elastic_agent.py) and of --processes
LAUNCHED = {
    "LOCAL_RANK": "3", "RANK": "3", "GROUP_RANK": "0", "ROLE_RANK": "3", "ROLE_NAME": "default", "LOCAL_WORLD_SIZE": "8",
    "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1", "ROLE_WORLD_SIZE": "8", "MASTER_ADDR": "node1", "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip


def tell(descriptor: int) -> None:
    with socket.socket(fileno=descriptor) as there:
        there.sendall(json.dumps(dict(os.environ)).encode())


def test_an_engine_does_not_inherit_the_place_of_the_process_that_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**LAUNCHED, "NCCL_DEBUG": "WARN", "DROPPED": "1"}.items():
        monkeypatch.setenv(name, value)
    process = EngineProcess(f"{__name__}:tell", "engine", {"OMP_NUM_THREADS": "2", "DROPPED": None})
    with process.socket.dup() as here:
        told = json.loads(b"".join(iter(lambda: here.recv(1 << 16), b"")))
    process.leave()
    assert not told.keys() & {*LAUNCHED, "DROPPED"}
    assert told["NCCL_DEBUG"] == "WARN" and told["OMP_NUM_THREADS"] == "2" and told["PATH"] == os.environ["PATH"]
