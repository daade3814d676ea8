"""Runs cases, each in the very process of one of a few workers that are watched: whatever hangs or dies is told and
replaced. Starting an interpreter for each case would take ten times as long as the cases do."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any

from fuzzing.judge import Ended, judge
from fuzzing.kinds import KINDS

MEMORY = 6 * 2**30  # bytes of data a worker may have: what would take the whole machine is an error before it does
SECONDS = 30.0  # of a case, at most: beyond it the case hangs. None of the sound ones takes longer than two
RENEWED = 300  # cases of one worker

PRELOADED = (
    *(
        "posttrain.training.verbs.rl",
        "posttrain.cli.commands",
        "posttrain.cli.inspect_commands",
        "posttrain.runs.terminal.display",
        "transformers",
        "datasets",
        "jinja2",
    ),
    *(
        "pyarrow.parquet",
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
        "tensorboardX",
        "cyclopts.config",
        "tomllib",
    ),
)


@dataclass(frozen=True)
class Result:
    kind: str
    seed: int
    what: str
    words: list[str]
    code: int | None
    verdict: str | None  # None: as it should be
    details: str
    seconds: float


def run_case(kind: str, seed: int, samples: Path, place: Path) -> Result:
    """Make a case in the folder `place`, run it in this process, judge it."""
    case = KINDS[kind].make(Random(f"{kind}:{seed}"), place, samples)
    (place / "typed").write_bytes(case.typed.encode("utf-8", "surrogateescape"))
    began = time.perf_counter()
    ended = _run(case.words, place)
    seconds = time.perf_counter() - began
    found = judge(case, ended, place)
    verdict, details = found or (None, ended.said)
    return Result(kind, seed, case.what, case.words, ended.code, verdict, details, seconds)


def _run(words: list[str], place: Path) -> Ended:
    """The command, with its three streams in files: workers of its own and libraries in other languages write there too."""
    from posttrain.cli.main import main

    before = sys.path[:], dict(os.environ), Path.cwd(), set(sys.modules)
    streams = sys.stdin, sys.stdout, sys.stderr
    kept = [os.dup(number) for number in range(3)]
    for number, (name, flags) in enumerate(
        (("typed", os.O_RDONLY), ("out", os.O_RDWR | os.O_CREAT), ("err", os.O_RDWR | os.O_CREAT))
    ):
        descriptor = os.open(place / name, flags)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        for number, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    os.chdir(place)
    code: int | None = None
    shown = ""
    try:
        code = main(words)
    except BaseException as error:
        shown = "".join(traceback.format_exception(error, limit=-6))[-3000:]
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, descriptor in enumerate(kept):
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdin, sys.stdout, sys.stderr = streams
        os.environ.clear()
        os.environ.update(before[1])
        sys.path[:] = before[0]
        os.chdir(before[2])
        for name in set(sys.modules) - before[3]:
            if name.startswith(("_posttrain_user_", "own", "env")):
                del sys.modules[name]
    return Ended(code, (place / "err").read_bytes().decode("utf-8", "replace"), shown)


def _serve(connection: Connection[Any, Any], samples: Path, scratch: Path) -> None:
    """A worker: cases in, results out."""
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import torch

    torch.set_num_threads(1)
    _leave_out_pictures()
    while True:
        try:
            kind, seed = connection.recv()
        except EOFError:
            os._exit(0)
        place = scratch / f"{kind}-{seed}"
        place.mkdir()
        try:
            connection.send(run_case(kind, seed, samples, place))
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _leave_out_pictures() -> None:
    """curves.png takes longer than all else of a run of one step, and what it is drawn from is judged anyway."""
    from posttrain.runs.curves import curves as original

    for module in list(sys.modules.values()):
        if getattr(module, "curves", None) is original:
            module.curves = lambda *a, **k: None  # type: ignore[attr-defined]


class _Worker:
    def __init__(self, samples: Path, scratch: Path) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, samples, scratch), daemon=False)
        self.process.start()
        theirs.close()
        self.case: tuple[str, int] | None = None
        self.since = 0.0
        self.done = 0

    def give(self, case: tuple[str, int]) -> None:
        self.case, self.since = case, time.monotonic()
        self.connection.send(case)

    def end(self) -> int | None:
        """Kill it and what it started; its exit code."""
        self.connection.close()
        code = self.process.exitcode
        try:
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self.process.kill()
        self.process.join()
        return code


def run_all(cases: Iterable[tuple[str, int]], workers: int, samples: Path, scratch: Path) -> Iterator[Result]:
    """The results, as they come."""
    from importlib import import_module

    for name in PRELOADED:
        import_module(name)
    waiting = iter(cases)
    busy: dict[Connection[Any, Any], _Worker] = {}

    def next_case(worker: _Worker | None) -> None:
        case = next(waiting, None)
        if worker is not None and (case is None or worker.done >= RENEWED):
            worker.end()
            worker = None
        if case is not None:
            worker = worker or _Worker(samples, scratch)
            busy[worker.connection] = worker
            worker.give(case)

    for _ in range(workers):
        next_case(None)
    while busy:
        ready = wait(list(busy), timeout=0.5)
        for connection, worker in list(busy.items()):
            assert worker.case is not None
            kind, seed = worker.case
            if connection in ready:
                del busy[connection]
                try:
                    yield connection.recv()
                except (EOFError, OSError):
                    worker.process.join(1.0)
                    yield _lost(
                        kind,
                        seed,
                        "crash",
                        f"the process ended with {worker.process.exitcode}",
                        worker,
                        samples,
                        scratch,
                    )
                    worker.end()
                    next_case(None)
                else:
                    worker.done += 1
                    next_case(worker)
            elif time.monotonic() - worker.since > SECONDS:
                del busy[connection]
                worker.end()
                yield _lost(kind, seed, "hang", f"no end after {SECONDS:g} s", worker, samples, scratch)
                next_case(None)


def _lost(kind: str, seed: int, verdict: str, details: str, worker: _Worker, samples: Path, scratch: Path) -> Result:
    """The result of a case whose process is gone: the case is made again to say what it was."""
    place = scratch / f"{kind}-{seed}"
    said = (place / "err").read_text(errors="replace")[-2000:] if (place / "err").exists() else ""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    case = KINDS[kind].make(Random(f"{kind}:{seed}"), place, samples)
    shutil.rmtree(place, ignore_errors=True)
    seconds, code = time.monotonic() - worker.since, worker.process.exitcode
    if verdict == "crash" and code in case.codes:  # the user's code ends its process, which nobody can prevent
        return Result(kind, seed, case.what, case.words, code, None, said, seconds)
    return Result(kind, seed, case.what, case.words, None, verdict, f"{details}; {said}", seconds)


def as_dict(result: Result) -> dict[str, Any]:
    return asdict(result)
