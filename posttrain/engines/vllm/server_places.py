"""Places of vLLM servers: processes that the run starts, and servers that run already."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from posttrain.core.seeds import seed_of
from posttrain.core.types import UserError
from posttrain.engines.engine_process import EngineProcess
from posttrain.engines.pool.places import ended
from posttrain.engines.pool.pool_member import EngineLink, EnginePlace
from posttrain.engines.pool.pool_protocol import Gone
from posttrain.engines.vllm.server_client import ServedRun, ServerClient
from posttrain.engines.vllm.server_setup import SERVER, ServerSetup
from posttrain.engines.weight_sync import Transport

SEEDS = 1 << 32  # vLLM takes lower seeds
LONGEST = 107 if sys.platform == "linux" else 103  # bytes in the path of a socket


class OwnServer:
    """A server in a child process; implements `pool_member.EnginePlace`."""

    def __init__(
        self, name: str, folder: Path, setup: ServerSetup, run: ServedRun, transport: Transport, gpus: Sequence[int],
        sleeps: bool,
    ) -> None:  # fmt: skip
        """`folder`: for its socket. `setup`: with the seed of this server, from which those of its starts follow. `gpus`:
        its GPUs, one for each part of tensor parallelism; none: the processor. `sleeps`: it frees their memory for
        updates. Raises UserError if the path of the socket is too long.
        """
        self._starts = count()
        self.name, self.setup, self.run, self.transport = name, setup, run, transport
        self.socket, self.gpus, self.sleeps = folder / f"{name}.socket", gpus, sleeps
        if len(os.fsencode(self.socket)) > LONGEST:
            raise UserError(f"{self.socket} is too long a path for a socket: set TMPDIR to a folder with a shorter one")

    def open(self) -> EngineLink:
        self.socket.unlink(missing_ok=True)  # of a process that was lost
        # servers of one seed give their nth requests the same random numbers, so equal prompts the same replies
        setup = replace(self.setup, seed=seed_of(self.setup.seed, "vLLM", next(self._starts)) % SEEDS)
        process = EngineProcess(SERVER, "vllm", setup.environment(str(self.socket), self.gpus, self.sleeps))
        return _OwnLink(process, ServerClient(self.run, "http://vllm", str(self.socket)))


class _OwnLink:
    def __init__(self, process: EngineProcess, wire: ServerClient) -> None:
        self.process, self.wire = process, wire

    def look(self) -> None:
        if self.process.child.ended:
            raise Gone("its process has ended")

    def end(self, kept: bool) -> str:
        self.wire.close()
        return ended(self.process, kept, 0.0)


class GivenServer:
    """A server that somebody else has started; implements `pool_member.EnginePlace`."""

    sleeps = False

    def __init__(self, address: str, run: ServedRun, transport: Transport) -> None:
        """Raises UserError for an invalid address."""
        try:
            parts = urlsplit(address)
            fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.path in ("", "/")
            fits = fits and parts.port != 0  # raises ValueError for one that is no port
        except ValueError:
            fits = False
        if not fits:
            raise UserError(f"--engine-url {address}: give http://HOST:PORT, such as http://127.0.0.1:8000")
        self.name, self.run, self.transport = address, run, transport

    def open(self) -> EngineLink:
        return _GivenLink(ServerClient(self.run, self.name))


class _GivenLink:
    def __init__(self, wire: ServerClient) -> None:
        self.wire: Any = wire

    def look(self) -> None:
        pass  # the client notices

    def end(self, kept: bool) -> str:
        self.wire.close()
        return ""


if TYPE_CHECKING:
    _proof: tuple[Callable[..., EnginePlace], ...] = (OwnServer, GivenServer)
