"""Tries mutants: a private copy of the checkout, in which one process has collected every test and forks for each mutant.

Importing torch and collecting the tests takes most of the time of a trial, so it is done once. In the fork the functions
of the changed module get their new code; what runs at import, such as a default or a table, is tried in a fork of a
process that has imported the libraries but nothing of the package.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEST_SECONDS = 30  # a test that takes longer hangs: none takes half of it
OPTIONS = [
    "-q",
    "-s",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "--hypothesis-seed=0",
    "-o",
    f"timeout={TEST_SECONDS}",
]
# hundreds, each a whole step of which little is told
LONG = "tests/algorithms/test_axes.py::test_row_with_the_option_takes_a_step"
WHOLE = ["-o", "timeout=180", "-m", "not long"]
QUICK = ["-o", f"timeout={TEST_SECONDS}", "-m", "not slow", f"--deselect={LONG}"]


@dataclass(frozen=True)
class Copy:
    """A checkout of its own, so that nothing of the one that is tested changes."""

    tree: Path

    @staticmethod
    def make(scratch: Path) -> Copy:
        tree = scratch / "tree"
        shutil.rmtree(tree, ignore_errors=True)
        left_out = shutil.ignore_patterns(".git", ".venv*", "runs", ".*_cache", ".hypothesis", "build")
        # at the root alone: posttrain/runs and tests/runs are rooms
        shutil.copytree(
            ROOT, tree, symlinks=True, ignore=lambda place, names: left_out(place, names) if place == str(ROOT) else ()
        )
        with contextlib.suppress(FileExistsError):
            (scratch / "shared").symlink_to(ROOT.parent / "shared")  # data that tests read in place
        return Copy(tree)

    def enter(self) -> None:
        os.chdir(self.tree)
        os.environ |= {"PYTHONPATH": str(self.tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_WAIT_POLICY": "passive"}
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(self.tree))  # pytest adds its helpers

    @contextlib.contextmanager
    def changed(self, module: str, source: bytes) -> Iterator[Path]:
        file = self.tree / "posttrain" / module
        own = (ROOT / "posttrain" / module).read_bytes()
        file.write_bytes(source)
        try:
            yield file
        finally:
            file.write_bytes(own)


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: "killed" by a test, by a "time-out", at "import", or it "survived"."""

    status: str
    by: str = ""
    seconds: float = 0.0


@dataclass
class Record:
    """What a test takes and runs."""

    seconds: float = 0.0
    lines: dict[str, list[int]] = field(default_factory=dict)


# -- forks -------------------------------------------------------------------------------------------------------------


def in_fork(work: Any, seconds: float) -> tuple[Any, str]:
    """What `work()` returns in a fork, as JSON would have it, and how that ended: "", "time-out" or "crash"."""
    reading, writing = os.pipe()
    child = _forked()
    if not child:
        code = 1
        try:
            os.setsid()
            os.close(reading)
            result = json.dumps(work()).encode()
            with open(writing, "wb") as pipe:
                pipe.write(result)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    end = "crash"
    with open(reading, "rb") as pipe:
        os.set_blocking(reading, False)
        told, deadline = b"", time.monotonic() + seconds
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            told += pipe.read() or b""
            if done:
                end = "" if status == 0 else "crash"
                break
            if time.monotonic() > deadline:
                end = "time-out"
                break
            time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # and whatever it started
    if end == "time-out":
        os.waitpid(child, 0)
    return (json.loads(told) if not end else None), end


def _forked() -> int:
    for _ in range(60):
        with contextlib.suppress(BlockingIOError):  # others have all the processes that there may be, for now
            return os.fork()
        time.sleep(1)
    return os.fork()


def outcome(found: Any, end: str, began: float) -> Outcome:
    seconds = round(time.monotonic() - began, 2)
    if end:
        return Outcome("time-out" if end == "time-out" else "killed", end, seconds)
    status, by = found
    return Outcome(status, by, seconds)


# -- the process that has collected the tests --------------------------------------------------------------------------


class Collected:
    """A plugin: instead of running what was collected it answers, in forks, what is asked of it through pipes."""

    def __init__(self, questions: Any, answers: Any) -> None:
        self.questions, self.answers = questions, answers

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        self.answers.write(json.dumps(list(items)) + "\n")
        self.answers.flush()
        for line in self.questions:
            asked = json.loads(line)
            if "record" in asked:
                own = [item for item in session.items if item.nodeid.startswith(asked["record"] + "::")]
                reply = in_fork(lambda own=own: record(own), 900)
            else:
                chosen = [items[name] for name in asked["tests"]]
                reply = in_fork(lambda chosen=chosen, asked=asked: attempt(chosen, asked), asked["seconds"])
            self.answers.write(json.dumps(reply) + "\n")
            self.answers.flush()
        return True


class Failures:
    """A plugin that notes the first test that fails."""

    def __init__(self) -> None:
        self.first = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.first:
            self.first = report.nodeid


def run(items: Sequence[pytest.Item]) -> str:
    """Run them until one fails, and say which; "": none."""
    watch = Failures()
    if items:
        items[0].config.pluginmanager.register(watch)
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if watch.first:
            break
    return watch.first


def attempt(items: Sequence[pytest.Item], asked: dict[str, Any]) -> tuple[str, str]:
    if not change(asked["file"]):
        return "unchanged", ""
    failed = run(items)
    return ("killed", failed) if failed else ("survived", "")


def change(file: str) -> bool:
    """Give the functions of a module the code that its file now has. False: none of them has another."""
    new = dict(_functions(compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)))
    changed = False
    for found in gc.get_objects():
        if type(found) is FunctionType and found.__code__.co_filename == file:
            code = new.get((found.__code__.co_qualname, found.__code__.co_firstlineno))
            if code is not None and code != found.__code__:
                if code.co_freevars != found.__code__.co_freevars:
                    return False
                found.__code__ = code
                changed = True
    return changed


def _functions(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    """The functions of a module and of its classes, by name and line."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & 1:  # CO_OPTIMIZED: a function, and no class
                yield (constant.co_qualname, constant.co_firstlineno), constant
            else:
                yield from _functions(constant)


def record(items: Sequence[pytest.Item]) -> dict[str, dict[str, Any]]:
    """How long each test takes and which lines of the package it runs, those of the fixtures that it shares included."""
    package = f"{os.getcwd()}/posttrain/"
    running: list[dict[str, set[int]]] = [defaultdict(set)]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(package):
            return None
        lines = running[-1][name[len(package) :]]
        lines.add(frame.f_lineno)

        def line(inner: FrameType, what: str, _: Any) -> Any:
            running[-1][name[len(package) :]].add(inner.f_lineno)
            return line

        return line

    class Fixtures:
        def __init__(self) -> None:
            self.of: dict[str, dict[str, set[int]]] = {}

        @pytest.hookimpl(wrapper=True)
        def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
            running.append(defaultdict(set))
            try:
                return (yield)
            finally:
                own = running.pop()
                self.of[fixturedef.argname] = own
                for module, lines in own.items():
                    running[-1][module] |= lines

    fixtures, found = Fixtures(), {}
    if items:
        items[0].config.pluginmanager.register(fixtures)
    for item, following in zip(items, [*items[1:], None], strict=True):
        running[-1] = defaultdict(set)
        watch = Failures()
        item.config.pluginmanager.register(watch)
        began = time.monotonic()
        sys.settrace(trace)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        sys.settrace(None)
        seconds = time.monotonic() - began
        item.config.pluginmanager.unregister(watch)
        if watch.first:
            continue  # a test that fails without a mistake proves nothing
        for name in getattr(item, "fixturenames", ()):
            for module, lines in fixtures.of.get(name, {}).items():
                running[-1][module] |= lines
        found[item.nodeid] = {"seconds": seconds, "lines": {m: sorted(x) for m, x in running[-1].items()}}
    return found


class Server:
    """The process in which `Collected` runs, seen from outside."""

    def __init__(self, copy: Copy, files: Sequence[str], log: Path) -> None:
        asked, answered = os.pipe(), os.pipe()
        self.process = os.fork()
        if not self.process:
            os.close(asked[1])
            os.close(answered[0])
            try:
                with open(asked[0]) as questions, open(answered[1], "w") as answers:
                    self._serve(copy, files, log, Collected(questions, answers))
            finally:
                os._exit(0)
        os.close(asked[0])
        os.close(answered[1])
        self._asked, self._answered = os.fdopen(asked[1], "w"), os.fdopen(answered[0])
        self.tests: list[str] = json.loads(self._answered.readline() or "[]")

    @staticmethod
    def _serve(copy: Copy, files: Sequence[str], log: Path, plugin: Collected) -> None:
        copy.enter()
        _quiet(log)
        arguments = [*OPTIONS, *QUICK, f"--basetemp={copy.tree.parent}/temporary", *files]
        pytest.main(arguments, plugins=[_Profile(), plugin])

    def record(self, file: str) -> dict[str, Record]:
        found, end = self._ask({"record": file})
        assert not end, f"{file}: {end}"
        return {name: Record(**fields) for name, fields in found.items()}

    def attempt(self, file: Path, tests: Sequence[str], seconds: float) -> Outcome:
        """ "unchanged": the mistake is not in a function's body, or changes what the function closes over."""
        began = time.monotonic()
        return outcome(*self._ask({"file": str(file), "tests": list(tests), "seconds": seconds}), began)

    def close(self) -> None:
        self._asked.close()
        os.waitpid(self.process, 0)

    def _ask(self, question: dict[str, Any]) -> Any:
        self._asked.write(json.dumps(question) + "\n")
        self._asked.flush()
        return json.loads(self._answered.readline())


# -- a fresh process ---------------------------------------------------------------------------------------------------


class Chosen:
    """A plugin that runs some of the tests, in this order."""

    def __init__(self, tests: Sequence[str]) -> None:
        self.place = {name: place for place, name in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.place:
            items[:] = sorted((i for i in items if i.nodeid in self.place), key=lambda i: self.place[i.nodeid])


def attempt_afresh(copy: Copy, tests: Sequence[str], seconds: float, log: Path) -> Outcome:
    """With the module as it now stands in the copy. `tests`: their names, or files, of which all are run."""
    files = list(dict.fromkeys(name.partition("::")[0] for name in tests))
    named = [name for name in tests if "::" in name]

    def work() -> tuple[str, str]:
        copy.enter()
        _quiet(log)
        watch = Failures()
        arguments = [*OPTIONS, *(QUICK if named else WHOLE), "-x", f"--basetemp={copy.tree.parent}/temporary", *files]
        code = pytest.main(arguments, plugins=[_Profile(), watch, Chosen(named)])
        if code in (0, 5):
            return "survived", ""
        return "killed", watch.first or "import"

    began = time.monotonic()
    return outcome(*in_fork(work, seconds), began)


class _Profile:
    """Hypothesis looks for a failure, and no further: the smallest example takes long to find."""

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], database=None, deadline=None)
        settings.load_profile("mutants")


def _quiet(log: Path) -> None:
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
