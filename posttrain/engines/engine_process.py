"""The parent's side of a process in which an engine runs: a socket to it, and a log file with its output."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from posttrain.system.child_processes import Child, pair
from posttrain.system.temp_folders import temp_log

CLOSE_SECONDS = 5.0  # for an idle process to exit by itself


class EngineProcess:
    """An engine's process. `target`: "package.module:function", called with the number of the socket and with
    `descriptors`.
    """

    def __init__(self, target: str, name: str, descriptors: Sequence[int], environment: Mapping[str, str]) -> None:
        descriptor, log = temp_log(name)
        self.log = Path(log)
        try:
            self.socket, theirs = pair()
            with theirs:
                numbers = [theirs.fileno(), *descriptors]
                self.child = Child(target, numbers, output=descriptor, environment=environment)
        finally:
            os.close(descriptor)

    def kill(self) -> None:
        """Kill the process; its log stays."""
        self.child.kill()
        self.socket.close()

    def leave(self) -> None:
        """End the process, by closing its socket and, if need be, by force; its log is removed."""
        self.socket.close()
        self.child.wait(CLOSE_SECONDS)
        self.child.kill()
        self.log.unlink(missing_ok=True)

    def exit_code(self) -> str:
        return self.child.exit() if self.child.wait(1.0) else "it closed its socket"
