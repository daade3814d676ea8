"""Places of a pool's engines: child processes on this machine."""

from __future__ import annotations

from typing import Any

from posttrain.engines.engine_process import CLOSE_SECONDS, EngineProcess
from posttrain.engines.pool.pool_member import EngineLink
from posttrain.engines.pool.pool_protocol import Wire
from posttrain.engines.weight_sync import Transport


class LocalProcess:
    """An engine in a child process; implements `pool_member.EnginePlace`."""

    sleeps = False

    def __init__(self, name: str, setup: dict[str, Any], transport: Transport) -> None:
        self.name, self.setup, self.transport = name, setup, transport

    def open(self) -> EngineLink:
        threads = {"OMP_NUM_THREADS": str(self.setup["threads"])}
        return _ProcessLink(EngineProcess(WORKER, "engine", threads), self.setup)


class _ProcessLink:
    def __init__(self, process: EngineProcess, setup: dict[str, Any]) -> None:
        self.process, self.wire = process, Wire(process.socket)
        self.wire.send("setup", setup)

    def look(self) -> None:
        pass

    def end(self, kept: bool) -> str:
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


WORKER = "posttrain.engines.pool.replica:main"
