"""Places of a pool's engines: child processes on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from posttrain.engines.engine_log import last_error
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


def ended(
    process: EngineProcess, kept: bool, seconds: float = CLOSE_SECONDS, fix: Callable[[str], str] = lambda error: ""
) -> str:
    """End an engine's process. Return how it has ended, with the error in its log, and the place of the log if that is
    `kept`. `seconds`: for the process to exit by itself. `fix`: returns what a user can do about an error, if it is known.
    """
    if not kept:
        process.leave(seconds)
        return ""
    how = f" ({process.child.exit()})" if process.child.wait(0.1) else ""
    process.kill()
    if not process.log.stat().st_size:
        process.log.unlink()
        return how
    if error := last_error(process.log):
        how += f": {error}" + (f": {known}" if (known := fix(error)) else "")
    return f"{how}; its output is in {process.log}"


WORKER = "posttrain.engines.pool.replica:main"
