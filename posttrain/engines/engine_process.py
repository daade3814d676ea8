"""Starts and ends the process of an engine, connected by a socket, with a log file for its output."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from posttrain.system.child_processes import Child, pair
from posttrain.system.temp_folders import temp_log

CLOSE_SECONDS = 5.0  # timeout for an idle process to exit by itself
LAUNCHED = re.compile(r"TORCHELASTIC_.*|MASTER_(ADDR|PORT)|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME")
"""Variables by which torchrun tells a training process its place."""


class EngineProcess:
    """The process of an engine. `target`: "package.module:function", called with the socket's file descriptor."""

    def __init__(self, target: str, name: str, environment: Mapping[str, str | None]) -> None:
        """Start the process. It is none of the run's, so it does not inherit their variables: a server that found torchrun's
        would wait for torchrun's store at an address of its own.
        """
        descriptor, log = temp_log(name)
        dropped: dict[str, str | None] = {own: None for own in os.environ if LAUNCHED.fullmatch(own)}
        self.log = Path(log)
        try:
            self.socket, theirs = pair()
            with theirs:
                self.child = Child(target, [theirs.fileno()], output=descriptor, environment={**dropped, **environment})
        finally:
            os.close(descriptor)

    def kill(self) -> None:
        """Kill the process, and keep its log."""
        self.child.kill()
        self.socket.close()

    def leave(self, seconds: float = CLOSE_SECONDS) -> None:
        """End the process by closing its socket, or after so many seconds by force, and remove its log."""
        self.socket.close()
        self.child.wait(seconds)
        self.child.kill()
        self.log.unlink(missing_ok=True)
