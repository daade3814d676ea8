"""Places of a pool's engines: child processes on this machine, or engines that listen at an address."""

from __future__ import annotations

import socket
import threading
from typing import Any

from posttrain.core.messages import one_line
from posttrain.engines.engine_process import CLOSE_SECONDS, EngineProcess
from posttrain.engines.pool.pool_member import EngineLink
from posttrain.engines.pool.pool_protocol import PROOF_SECONDS, Gone, Wire, host_and_port, keep_alive, prove
from posttrain.engines.weight_sync import SharedMemory, Transport


class LocalProcess:
    """An engine in a child process; implements `pool_member.EnginePlace`."""

    sleeps = False

    def __init__(self, name: str, setup: dict[str, Any], transport: SharedMemory) -> None:
        self.name, self.transport = name, transport
        self.setup = {**setup, "layout": transport.layout}

    def open(self) -> EngineLink:
        threads = {"OMP_NUM_THREADS": str(self.setup["threads"])}
        return _ProcessLink(EngineProcess(WORKER, "engine", threads), self.setup)


class _ProcessLink:
    def __init__(self, process: EngineProcess, setup: dict[str, Any]) -> None:
        self.process, self.wire, self.closed = process, Wire(process.socket), False
        self.wire.send("setup", setup)

    def look(self) -> None:
        pass

    def end(self, kept: bool) -> str:
        if self.closed:
            return ""
        self.closed = True
        return ended(self.process, kept)


def ended(process: EngineProcess, kept: bool, seconds: float = CLOSE_SECONDS) -> str:
    """End an engine's process. Return how it has ended, and the place of its log if that is `kept`. `seconds`: for the
    process to exit by itself.
    """
    if not kept:
        process.leave(seconds)
        return ""
    how = f" ({process.child.exit()})" if process.child.wait(0.1) else ""
    process.kill()
    if not process.log.stat().st_size:
        process.log.unlink()
        return how
    return f"{how}; its output is in {process.log}"


class Listening:
    """An engine started with `posttrain engine`, on any machine; implements `pool_member.EnginePlace`."""

    sleeps = False

    def __init__(self, address: str, token: bytes, transport: Transport, alive: float) -> None:
        """Parse the address. `alive`: seconds between two heartbeats. Raises UserError for an invalid address."""
        self.name, self.token, self.transport, self.alive = address, token, transport, alive
        self.host, self.port = host_and_port(address, "--engines")

    def open(self) -> EngineLink:
        return _ListeningLink(self)


class _ListeningLink:
    """A connection that a thread opens, since connecting may take long."""

    def __init__(self, place: Listening) -> None:
        self.place = place
        self.wire: Wire | None = None
        self._found: socket.socket | Gone | None = None
        threading.Thread(target=self._connect, name=f"connects to {place.name}", daemon=True).start()

    def _connect(self) -> None:
        end = None
        try:
            end = socket.create_connection((self.place.host, self.place.port), PROOF_SECONDS)
            keep_alive(end)
            prove(end, self.place.token, listening=False)
            self._found = end
        except (OSError, Gone) as error:
            if end is not None:
                end.close()
            self._found = Gone(f"it cannot be reached: {one_line(error)}")

    def look(self) -> None:
        found = self._found
        if isinstance(found, Gone):
            raise found
        if self.wire is None and found is not None:
            self.wire = Wire(found)
            self.wire.send("setup", {"layout": self.place.transport.layout, "alive": self.place.alive})

    def end(self, kept: bool) -> str:
        if self.wire is not None:
            self.wire.close()
        elif isinstance(self._found, socket.socket):
            self._found.close()
        return ""


WORKER = "posttrain.engines.pool.replica:main"
