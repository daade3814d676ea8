"""Stands in for the process in which vLLM runs, where only what happens to processes is of interest."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from posttrain.core.types import Completion, StopReason
from posttrain.engines.weight_sync import shared_memory


def main(socket_fd: int, memory_fd: int) -> None:
    connection: Connection[Any, Any] = Connection(socket_fd)
    setup, memory = connection.recv(), shared_memory(memory_fd)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    if os.environ.get("STUB") == "slow start":
        time.sleep(1000)
    connection.send(("answer", None))
    version = 0
    while True:
        what, value = connection.recv()
        if what == "load":
            checksum, version = 0, value
            for stored in setup.weights:
                checksum = stored.checksum(memory, setup.dtype, checksum)
            connection.send(("answer", (version, checksum)))
        else:
            wrong = version + (os.environ.get("STUB") == "other version")
            done = [Completion(request.id, [0], [0.0], "", StopReason.EOS, wrong) for request in value[0]]
            connection.send(("answer", (done, 0, {})))
