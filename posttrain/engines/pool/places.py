"""Places of a pool's engines: child processes on this machine, or engines that listen at an address."""

from __future__ import annotations

import socket
import threading
from typing import Any

import torch

from posttrain.core.messages import one_line
from posttrain.engines.engine_process import EngineProcess
from posttrain.engines.pool.pool_member import EngineLink
from posttrain.engines.pool.pool_protocol import PROOF_SECONDS, Gone, Wire, host_and_port, keep_alive, prove
from posttrain.engines.vllm.vllm_engine import environment
from posttrain.engines.weight_sync import SharedMemory, Transport
from posttrain.models.gpu_placement import visible_name


def environment_of(setup: dict[str, Any]) -> dict[str, str]:
    """Return the environment variables of an engine's process, in addition to those of this process."""
    threads = {"OMP_NUM_THREADS": str(setup["threads"])}
    return {**environment(), **threads} if setup["engine"] == "vllm" else threads


class LocalProcess:
    """An engine in a child process, with the weights in shared memory; implements `pool_member.EnginePlace`."""

    def __init__(self, name: str, setup: dict[str, Any], memory: SharedMemory, transport: Transport) -> None:
        """Create the place. `transport`: the shared memory, or the transfer from GPU to GPU instead."""
        self.name, self.memory, self.transport = name, memory, transport
        self.setup = {**setup, "layout": transport.layout}

    def open(self) -> EngineLink:
        own, device = environment_of(self.setup), torch.device(self.setup["device"])
        if self.setup.get("transfer") == "ipc":
            own["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for memory handles, which come from this process
        if self.setup["engine"] == "vllm" and device.type == "cuda":
            own["CUDA_VISIBLE_DEVICES"] = visible_name(device.index or 0)
        return _ProcessLink(EngineProcess(WORKER, "engine", [self.memory.descriptor], own), self.setup)


class _ProcessLink:
    def __init__(self, process: EngineProcess, setup: dict[str, Any]) -> None:
        self.process, self.wire, self.ended = process, Wire(process.socket), False
        self.wire.send("setup", setup)

    def look(self) -> None:
        pass

    def end(self, kept: bool) -> str:
        if self.ended:
            return ""
        self.ended = True
        if not kept:
            self.process.leave()
            return ""
        how = f" ({self.process.child.exit()})" if self.process.child.wait(0.1) else ""
        self.process.kill()
        if not self.process.log.stat().st_size:
            self.process.log.unlink()
            return how
        return f"{how}; its output is in {self.process.log}"


class Listening:
    """An engine started with `posttrain engine`, on any machine; implements `pool_member.EnginePlace`."""

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
