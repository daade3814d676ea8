"""The fast tests of the repository, on a machine with a card."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from findings import ROOT, Findings, Setting
from recorder import RESULTS

SPARE = 15  # seconds of the part's time that are left for the report
WORKERS = 14
TRIED = "tests/core/test_intervals.py"  # with --tiny
LISTED = 100  # failures


def fast_tests(setting: Setting, found: Findings) -> None:
    results, log = setting.out / "tests.jsonl", setting.out / "tests.log"
    results.unlink(missing_ok=True)
    seconds = max(10.0, setting.left() - SPARE)
    ended = _run(setting, results, log, seconds)
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    tests: dict[str, dict[str, str]] = {}
    for row in (json.loads(line) for line in lines):
        if tests.get(row["test"], {}).get("outcome") != "failed":  # also if its end fails after it has passed
            tests[row["test"]] = row
    counts = Counter(row["outcome"] for row in tests.values())
    names = "passed", "failed", "skipped"
    table = found.table("The fast tests (not slow, not long)", *names, "finished")
    table.add(*(counts[name] for name in names), "yes" if ended else f"no: stopped after {seconds:.0f} s")
    found.figures |= {f"tests {name}": counts[name] for name in names}
    failed = [row for row in tests.values() if row["outcome"] == "failed"]
    found.failures += [f"{row['test']}: {row['said']}" for row in failed[:LISTED]]
    if len(failed) > LISTED:
        found.failures.append(f"and {len(failed) - LISTED} more")
    if not tests:
        found.failures.append(f"no test ran: {' / '.join(log.read_text(errors='replace').splitlines()[-3:])}")


def _run(setting: Setting, results: Path, log: Path, seconds: float) -> bool:
    """Whether the session ended by itself."""
    spread = ["-n", str(WORKERS), "--dist", "worksteal"] if importlib.util.find_spec("xdist") else []
    which = [TRIED] if setting.tiny else ["tests", *spread]
    bounded = ["--timeout=120"] if importlib.util.find_spec("pytest_timeout") else []
    command = [sys.executable, "-m", "pytest", *which, "-m", "not slow and not long", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "recorder", "-rf", f"--junitxml={setting.out / 'tests.xml'}", *bounded]
    paths = os.pathsep.join((str(ROOT), str(Path(__file__).parent)))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**inherited, "PYTHONPATH": paths, RESULTS: str(results)}
    with open(log, "w") as file:
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
