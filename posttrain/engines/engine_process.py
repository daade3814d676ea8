"""A process in which an engine runs, as its parent sees it: a socket to it, and a file for what it prints."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from posttrain.system.child_processes import Child, pair

CLOSE_SECONDS = 5.0  # for an idle process to leave by itself


class EngineProcess:
    """`target`: "package.module:function", called with the number of the socket and with `descriptors`."""

    def __init__(self, target: str, name: str, descriptors: Sequence[int], environment: Mapping[str, str]) -> None:
        descriptor, log = tempfile.mkstemp(prefix=f"posttrain-{name}-", suffix=".log")
        self.log = Path(log)
        try:
            self.socket, theirs = pair()
            with theirs:
                numbers = [theirs.fileno(), *descriptors]
                self.child = Child(target, numbers, output=descriptor, environment=environment)
        finally:
            os.close(descriptor)

    def kill(self) -> None:
        """End it; what it printed stays."""
        self.child.kill()
        self.socket.close()

    def leave(self) -> None:
        """Let it end, which it does as soon as its socket is closed, or is made to; what it printed goes."""
        self.socket.close()
        self.child.wait(CLOSE_SECONDS)
        self.child.kill()
        self.log.unlink(missing_ok=True)

    def exit_code(self) -> str:
        return self.child.exit() if self.child.wait(1.0) else "it closed its socket"
