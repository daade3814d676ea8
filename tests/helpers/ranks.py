"""Processes that torchrun would start."""

from __future__ import annotations

import os
import socket

import pytest
import torch
from conftest import bare


def joined(rank: int, port: int, size: int = 2) -> None:
    """Make this process one of several, as torchrun would."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in own.items()}, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    bare(pytest.MonkeyPatch())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
