"""Event files for TensorBoard. Decides how a resumed run hides the values of an earlier attempt at the same steps."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path

SECONDS_BETWEEN_FLUSHES = 10.0  # while a run is active


class Events:
    """An event file of TensorBoard; in older files, TensorBoard then shows only the steps before `first`.

    It is written in the caller's thread. tensorboardX's SummaryWriter has a thread for it that dies if the disk is
    full; then its queue fills up, and the run waits for ever.
    """

    def __init__(self, folder: Path, first: int, suffix: str) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar, text

        folder.mkdir(exist_ok=True)
        self._event, self._scalar, self._text = Event, scalar, text
        self._file = EventsWriter(str(folder / "events"), suffix)
        begin = Event(step=first, wall_time=time.time(), session_log=SessionLog(status=SessionLog.START))
        self._file.write_event(begin)
        self._flushed = time.monotonic()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if math.isfinite(value):
                summary = self._scalar(name, float(value))
                self._file.write_event(self._event(step=step, wall_time=time.time(), summary=summary))
        if time.monotonic() - self._flushed > SECONDS_BETWEEN_FLUSHES:
            self.flush()

    def text(self, step: int, name: str, content: str) -> None:
        """Add a text in Markdown format."""
        self._file.write_event(self._event(step=step, wall_time=time.time(), summary=self._text(name, content)))

    def flush(self) -> None:
        self._file.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        self._file.close()
