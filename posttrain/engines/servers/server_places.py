"""Places of servers: processes that the run starts, and servers that run already."""

from __future__ import annotations

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
from posttrain.engines.servers.server_client import ServedRun, ServerClient
from posttrain.engines.servers.server_setup import ServerSetup
from posttrain.engines.weight_sync import Transport

SEEDS = 1 << 32  # servers take lower seeds


class OwnServer:
    """A server in a child process; implements `pool_member.EnginePlace`."""

    def __init__(
        self, name: str, folder: Path, setup: ServerSetup, run: ServedRun, transport: Transport, gpus: Sequence[int],
        sleeps: bool,
    ) -> None:  # fmt: skip
        """`folder`: for its files. `setup`: with the seed of this server, from which those of its starts follow. `gpus`:
        its GPUs, one for each part of tensor parallelism; none: the processor. `sleeps`: it frees their memory for
        updates.
        """
        self._starts = count()
        self.name, self.setup, self.run, self.transport = name, setup, run, transport
        self.folder, self.gpus, self.sleeps = folder, gpus, sleeps

    def open(self) -> EngineLink:
        # servers of one seed give their nth requests the same random numbers, so equal prompts the same replies
        seed = seed_of(self.setup.seed, self.setup.client.program, next(self._starts)) % SEEDS
        setup = replace(self.setup, seed=seed)
        return _Link(*setup.start(self.run, self.folder / self.name, self.gpus, self.sleeps), setup.fix)


class _Link:
    def __init__(
        self, process: EngineProcess | None, wire: ServerClient, fix: Callable[[str], str] = lambda error: ""
    ) -> None:
        """`process`: None for a server that somebody else has started, whose end the client notices. `fix`: see `ended`."""
        self.process: Any = process
        self.wire, self.fix = wire, fix

    def look(self) -> None:
        if self.process is not None and self.process.child.ended:
            raise Gone("its process has ended")

    def end(self, kept: bool) -> str:
        self.wire.close()
        return "" if self.process is None else ended(self.process, kept, 0.0, self.fix)


class GivenServer:
    """A server that somebody else has started; implements `pool_member.EnginePlace`."""

    sleeps = False

    def __init__(self, address: str, client: type[ServerClient], run: ServedRun, transport: Transport) -> None:
        """Raises UserError for an invalid address."""
        try:
            parts = urlsplit(address)
            fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.path in ("", "/")
            fits = fits and parts.port != 0  # raises ValueError for one that is no port
        except ValueError:
            fits = False
        if not fits:
            raise UserError(f"--engine-url {address}: give http://HOST:PORT, such as http://127.0.0.1:8000")
        self.name, self.client, self.run, self.transport = address, client, run, transport

    def open(self) -> EngineLink:
        return _Link(None, self.client(self.run, self.name))


if TYPE_CHECKING:
    _proof: tuple[Callable[..., EnginePlace], ...] = (OwnServer, GivenServer)
