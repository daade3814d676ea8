"""Plugin of pytest that appends each test's result to a file at once: a killed session leaves what it has found.

POSTTRAIN_RESULTS names the file. Under xdist it writes in the process that collects results, not in the workers.
"""

from __future__ import annotations

import json
import os
from typing import Any

RESULTS = "POSTTRAIN_RESULTS"
ERROR = "E "  # pytest begins the lines of a traceback that say what is wrong with it


def pytest_runtest_logreport(report: Any) -> None:
    """One line for a test's call, and for a set-up or an end that did not pass."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    lines = str(report.longrepr).splitlines() if report.failed else []
    said = next((line.removeprefix(ERROR).strip() for line in lines if line.startswith(ERROR)), "".join(lines[-1:]))
    with open(os.environ[RESULTS], "a", encoding="utf-8") as file:
        file.write(json.dumps({"test": report.nodeid, "outcome": report.outcome, "said": said[:300]}) + "\n")


def pytest_collectreport(report: Any) -> None:
    """A module that cannot be imported."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        last = str(report.longrepr).strip().splitlines()[-1:]
        with open(os.environ[RESULTS], "a", encoding="utf-8") as file:
            file.write(json.dumps({"test": report.nodeid, "outcome": "failed", "said": "".join(last)[:300]}) + "\n")
