"""Starts the processes of a run on this machine, watches them, and restarts them after a crash if the options request
it.

Each process is this command again, with torchrun's environment variables. The processes exchange messages without this
one, which only checks whether they are alive.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from posttrain.config.training import Training
from posttrain.runs.run_files import CHECKPOINTS, RUN
from posttrain.system.child_processes import MEETING

CRASHED = 1  # exit code for errors of our own, and of processes that lost another process
GRACE = 10.0  # seconds for the other processes to end by themselves after one crashed or was killed
DYING = 3.0  # further seconds to end, after they were asked to


def launch(config: Training) -> int:
    """Run this command in `config.processes` processes, and return the exit code."""
    words, found = sys.argv[1:], _written(config)
    for attempt in range(1, config.restarts + 2):
        code = _attempt(words, config)
        if code != CRASHED or attempt > config.restarts:
            return code
        saved = any((Path(config.out) / CHECKPOINTS).glob("step-*"))
        # otherwise nothing in the folder is from this launch, to be continued or deleted
        ours = _written(config) != found
        words = _again(sys.argv[1:], saved) if ours and not config.resume else words
        place = "from the newest checkpoint" if config.resume or (ours and saved) else "from the beginning"
        print(f"posttrain: started again {place} ({attempt} of {config.restarts})", file=sys.stderr)
    raise AssertionError("the last attempt returns")


def _again(words: Sequence[str], saved: bool) -> list[str]:
    """Return the command that continues a run begun by this launch, or begins it again if nothing was saved."""
    kept = [word for word in words if word.partition("=")[0] not in ("--resume", "--overwrite")]
    return [*kept, *(("--resume", "--no-overwrite") if saved else ("--overwrite",))]


def _written(config: Training) -> int | None:
    """Return when the record of the run in --out was written; None if there is none."""
    try:
        return (Path(config.out) / RUN).stat().st_mtime_ns
    except OSError:
        return None


def _attempt(words: Sequence[str], config: Training) -> int:
    count = config.processes
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    meeting = socket.create_server(("127.0.0.1", 0), backlog=count)
    common = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(meeting.getsockname()[1]),
        MEETING: str(meeting.fileno()),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),  # it prints stacks if a peer disconnects
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // count))),
    }
    children: list[subprocess.Popen[bytes]] = []

    def hear(number: int, frame: FrameType | None) -> None:
        """Pass a signal on that perhaps only this process received. A terminal sends typed ones to the children too, which
        count both as one request to stop.
        """
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    ends = (signal.SIGHUP,) if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else ()
    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM, *ends)}
    try:
        for rank in range(count):
            environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            held = (meeting.fileno(),) if rank == 0 else ()
            command = [sys.executable, "-m", "posttrain", *words]
            children.append(subprocess.Popen(command, env=environment, pass_fds=held))
        meeting.close()  # if the first process dies, the others notice it
        return _watched(children, config.collective_timeout)
    finally:
        meeting.close()
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _watched(children: Sequence[subprocess.Popen[bytes]], timeout: float) -> int:
    """Wait for all processes, and end those that remain after a failure. Return the exit code."""
    end: float | None = None
    ended: list[int | None] = []
    while any(child.poll() is None for child in children):
        codes = [child.poll() for child in children]
        if end is None and any(codes):
            lost = any(code is not None and (code < 0 or code == CRASHED) for code in codes)
            end = time.monotonic() + (GRACE if lost else GRACE + timeout)
        if end is not None and time.monotonic() > end:
            ended = codes  # before those end that wait on a GPU for another one, which no signal reaches
            for child in children:
                if child.poll() is None:
                    child.terminate()
            with suppress(subprocess.TimeoutExpired):
                for child in children:
                    child.wait(max(0.0, end + DYING - time.monotonic()))
            break
        time.sleep(0.02)
    ended = ended or [child.poll() for child in children]
    if killed := [(rank, -code) for rank, code in enumerate(ended) if code is not None and code < 0]:
        said = ", ".join(f"process {rank} was ended by {signal.Signals(number).name}" for rank, number in killed)
        print(f"posttrain: {said}", file=sys.stderr)
        return CRASHED
    return next((code for code in ended if code), CRASHED if None in ended else 0)
