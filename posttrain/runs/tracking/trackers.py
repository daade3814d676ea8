"""The trackers of a run, in the run's process: it starts their processes, shows their messages, and ends them in time.

A tracker cannot delay a step: between start and end, the run only checks whether messages have arrived.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from posttrain.config.known_trackers import TRACKERS, trackers_of
from posttrain.config.training import Training
from posttrain.core import user_files
from posttrain.core.json_text import json_line
from posttrain.runs.run_files import TRACKING
from posttrain.runs.run_reading import read_run
from posttrain.runs.tracking.follower import read_state, state_file
from posttrain.runs.tracking.tracker import Status
from posttrain.system.child_processes import Child, pair

FINISH_SECONDS = 60.0  # for trackers to deliver remaining records at the end of a run
PATIENCE_SECONDS = 2.0  # of these seconds, before a message about the wait


SECRETS = re.compile(r"(?P<before>://|(?<![A-Za-z])(?:[A-Za-z_-]*[_-])?(?:api_?key|token|secret|password)=)"
                     r"(?P<hidden>(?<=//)[^/@\s]+(?=@)|(?<==)[^,\s]+)", re.IGNORECASE)  # fmt: skip
"""Matches a password in an address, and an environment's setting whose name suggests a secret:
my.py:reward,api_key=...
"""


def without_secrets(value: Any) -> Any:
    """Return options with secrets in their texts replaced by "***": trackers send options to external servers."""
    if isinstance(value, str):
        return SECRETS.sub(r"\g<before>***", value)
    if isinstance(value, dict):
        return {name: without_secrets(one) for name, one in value.items()}
    return [without_secrets(one) for one in value] if isinstance(value, list) else value


class Trackers:
    """The trackers of a run."""

    def __init__(self, config: Training, folder: Path, say: Callable[[str], None]) -> None:
        """Start the trackers, after the record of the run has begun. `say` shows a message to the user."""
        self.folder, self._say = folder, say
        self._ended = False
        specs = trackers_of(config.track)
        self._open = [_TrackerProcess(spec, config, folder) for spec in specs]

    def look(self) -> None:
        """Show messages that have arrived, and drop trackers that have ended. Never waits."""
        for process in list(self._open):
            ended = process.child.ended
            said = process.messages()
            for text in said:
                self._say(text)
            if ended:
                self._open.remove(process)
                if process.child.code and not self._ended:
                    self._say(f"{process.spec} has ended, and the run continues without it ({process.child.exit()})")
                process.close()

    def finish(self, status: Status, seconds: float | None = None) -> None:
        """Wait until trackers have delivered all. Those that take longer than `seconds` (default: FINISH_SECONDS) are
        killed.
        """
        self._ended, seconds = True, FINISH_SECONDS if seconds is None else seconds
        for process in self._open:
            process.send(status)
        began, shown = time.monotonic(), False
        try:
            while self._open and (waited := time.monotonic() - began) < seconds:
                self._open[0].child.wait(0.05)
                self.look()
                if self._open and waited > PATIENCE_SECONDS and not shown:
                    shown = True
                    self._say(f"waiting for {', '.join(p.spec for p in self._open)}, at most {seconds:g} s")
        finally:
            for process in self._open:
                process.close()
                step = read_state(self.folder, process.spec).get("step", -1)
                self._say(
                    f"{process.spec} did not finish within {seconds:g} s and was ended (--resume delivers the rest): "
                    f"{f'it has the steps up to {step}' if step >= 0 else 'it has no step'}"
                )
            self._open = []


class _TrackerProcess:
    """The run's end of a tracker's process."""

    def __init__(self, spec: str, config: Training, folder: Path) -> None:
        self.spec = spec
        address = spec.partition(":")[2] if spec.partition(":")[0] in TRACKERS else ""
        place, run = folder.absolute(), read_run(folder)
        options = {**run.pop("config"), "run": run}
        told = {
            "name": place.name, "group": place.parent.name, "project": config.track_project, "verb": config.verb,
            "folder": str(place), "config": without_secrets(options), "address": address,
        }  # fmt: skip
        (folder / TRACKING).mkdir(exist_ok=True)
        self._socket, theirs = pair()
        with theirs, user_files.opened(state_file(folder, spec).with_suffix(".log"), "ab") as log:
            self.child = Child("posttrain.runs.tracking.follower:serve", [theirs.fileno()], output=log)
        self._unread = b""
        self.send({"tracker": spec, "run": told, "save_every": config.save_every})

    def send(self, message: Any) -> None:
        """Send a line. The process gets only two, one at its start, so one that does not read cannot delay the run."""
        with suppress(OSError):  # the process has ended
            self._socket.sendall(json_line(message))

    def messages(self) -> list[str]:
        """Return the messages that have arrived."""
        with suppress(OSError):  # there are no more, or the process has ended
            while part := self._socket.recv(1 << 16, socket.MSG_DONTWAIT):
                self._unread += part
        *whole, self._unread = self._unread.split(b"\n")
        return [json.loads(line) for line in whole]

    def close(self) -> None:
        self.child.kill()
        self._socket.close()
