"""Finds the tests that `make check` leaves out: those of which a case takes more than a fraction of a second.

As a plugin of pytest (`-p slow_tests`) it appends the processor seconds of each test, child processes included, to a file
of each worker in the folder SLOW_TESTS. As a program it reads these files and writes tests/slow_tests.txt.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

LIST = Path(__file__).parent.parent / "tests" / "slow_tests.txt"
FOLDER = "SLOW_TESTS"  # environment variable
SECONDS = 0.3  # of processor time, the mean over the cases of a test


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = sum(os.times()[:4])
    done = yield
    file = Path(os.environ[FOLDER], os.environ.get("PYTEST_XDIST_WORKER", "main"))
    with open(file, "a", encoding="utf-8") as out:
        out.write(json.dumps([item.nodeid, sum(os.times()[:4]) - before]) + "\n")
    return done


def slow(folder: Path) -> list[str]:
    """Return the tests, without their parameters, whose cases take SECONDS or more on average."""
    taken = defaultdict[str, list[float]](list)
    for file in folder.iterdir():
        for line in file.read_text(encoding="utf-8").splitlines():
            name, seconds = json.loads(line)
            taken[name.partition("[")[0]].append(seconds)
    return sorted(name for name, found in taken.items() if sum(found) >= SECONDS * len(found))


if __name__ == "__main__":
    LIST.write_text("".join(f"{name}\n" for name in slow(Path(sys.argv[1]))), encoding="utf-8")
