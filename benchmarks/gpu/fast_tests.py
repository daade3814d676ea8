"""The fast tests of the repository: those of the card on it, the others on the processor of that machine.

Many of the others compare bits that do not depend on what is computed beside them, which only processors give.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from findings import ROOT, Findings, Setting
from recorder import RESULTS

HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}
SPARE = 15  # seconds of the part's time that are left for the report
WORKERS = 14
TRIED = "tests/core/test_intervals.py"  # with --tiny
LISTED = 100  # failures


def fast_tests(setting: Setting, found: Findings) -> None:
    results, log = setting.out / "tests.jsonl", setting.out / "tests.log"
    results.unlink(missing_ok=True)
    seconds = max(10.0, setting.left() - SPARE)
    ended = _run(setting, results, log, seconds, "gpu", {})
    seconds = max(10.0, setting.left() - SPARE)
    ended = _run(setting, results, log, seconds, "not gpu and not slow and not long", HIDDEN) and ended
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    tests: dict[str, dict[str, str]] = {}
    for row in (json.loads(line) for line in lines):
        if tests.get(row["test"], {}).get("outcome") != "failed":  # also if its end fails after it has passed
            tests[row["test"]] = row
    counts = Counter(row["outcome"] for row in tests.values())
    names = "passed", "failed", "skipped"
    table = found.table(
        "Tests of the card, and the fast tests (not slow, not long) on the processor", *names, "finished"
    )
    table.add(*(counts[name] for name in names), "yes" if ended else f"no: stopped after {seconds:.0f} s")
    found.figures |= {f"tests {name}": counts[name] for name in names}
    failed = [row for row in tests.values() if row["outcome"] == "failed"]
    found.failures += [f"{row['test']}: {row['said']}" for row in failed[:LISTED]]
    if len(failed) > LISTED:
        found.failures.append(f"and {len(failed) - LISTED} more")
    if not tests:
        found.failures.append(f"no test ran: {' / '.join(log.read_text(errors='replace').splitlines()[-3:])}")


def _run(setting: Setting, results: Path, log: Path, seconds: float, marked: str, hidden: Mapping[str, str]) -> bool:
    """Whether the session ended by itself."""
    spread = ["-n", str(WORKERS), "--dist", "worksteal"] if importlib.util.find_spec("xdist") else []
    few = ["tests/engines/test_cuda_step.py", "tests/models"]
    which = [TRIED] if setting.tiny else few if marked == "gpu" else ["tests", *spread]
    bounded = ["--timeout=120"] if importlib.util.find_spec("pytest_timeout") else []
    command = [sys.executable, "-m", "pytest", *which, "-m", marked, "-q", "-p", "no:cacheprovider"]
    command += ["-p", "recorder", "-rf", *bounded]
    paths = os.pathsep.join(filter(None, (str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**inherited, **hidden, "PYTHONPATH": paths, RESULTS: str(results)}
    with open(log, "a") as file:
        session = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            session.wait(seconds)
            return True
        except subprocess.TimeoutExpired:
            os.killpg(session.pid, signal.SIGKILL)
            session.wait()
            return False
