"""The runs of tools/golden.py on the card and on the processor: exit codes, and the metrics of their first step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import golden
from findings import Findings, Setting

AT_ONCE = 10  # runs
SPARE = 10  # seconds of the part's time that are left for the report
LEAST = 1e-3  # smaller metrics are compared as if they were this large
TRIED = ("sft", "grpo", "dpo")  # with --tiny
HERE, THERE = "here", "there"  # the processor's runs, the device's


def verbs(setting: Setting, found: Findings) -> None:
    """Every run starts from the processor's checkpoints, so that both sides have the same weights."""
    place = setting.run_folder("verbs")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    golden.write_data(place)
    names = TRIED if setting.tiny else tuple(golden.RUNS)
    with ThreadPoolExecutor(2 if setting.tiny else AT_ONCE) as pool:
        bases = sorted({golden.RUNS[name][0] for name in names} - {""})
        first = {base: pool.submit(_run, place, base, "cpu", base) for base in bases}
        wait(first.values())
        runs = {
            name: (
                first.get(name) or pool.submit(_run, place, name, "cpu", f"{name}-{HERE}"),
                pool.submit(_run, place, name, setting.device, f"{name}-{THERE}"),
            )
            for name in names
        }
        wait([run for pair in runs.values() for run in pair], timeout=max(1.0, setting.left() - SPARE))
        _report(setting, found, place, runs)


def _run(place: Path, name: str, device: str, out: str) -> CompletedProcess[str]:
    words = f"{golden.RUNS[name][1]} --out runs/{out} --threads 1 --quiet --overwrite --device {device}"
    return golden.played(place, words)


def _report(
    setting: Setting,
    found: Findings,
    place: Path,
    runs: Mapping[str, tuple[Future[CompletedProcess[str]], Future[CompletedProcess[str]]]],
) -> None:
    table = found.table(
        f"The fourteen short runs of tools/golden.py on {setting.device} compared with cpu",
        "run",
        "exit code",
        "cpu",
        "largest relative difference of the first step's metrics",
        "of",
        notes=(
            f"Metrics smaller than {LEAST:g} are compared as if they were that large. Both start from the same bits.",
        ),
    )
    for name, (here, there) in runs.items():
        with found.trying(name):
            assert here.done() and there.done(), "it did not end in time"
            codes = there.result().returncode, here.result().returncode
            if any(codes):
                table.add(name, *codes, "", "")
                ran = there.result() if codes[0] else here.result()
                found.failures.append(f"{name}: exit code {ran.returncode}: {last_line(ran)}")
                continue
            own = name if (place / "runs" / name).exists() else f"{name}-{HERE}"
            worst, metric = difference(*(first_step(place / "runs" / run) for run in (own, f"{name}-{THERE}")))
            table.add(name, *codes, f"{worst:.1e}", metric)


def last_line(ran: CompletedProcess[str]) -> str:
    lines = f"{ran.stdout}\n{ran.stderr}".strip().splitlines()
    return lines[-1][:300] if lines else ""


def first_step(run: Path) -> dict[str, Any]:
    """The metrics of a run's first step."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found: dict[str, Any] = next(row for line in lines if (row := json.loads(line))["step"] > 0)
    return found


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, str]:
    """The largest relative difference of two steps' metrics, and its metric."""
    if missing := one.keys() ^ other.keys():
        return float("inf"), f"only one side has {', '.join(sorted(missing))}"
    numbers = {name for name, value in one.items() if isinstance(value, int | float)}
    found = {n: abs(one[n] - other[n]) / max(abs(one[n]), abs(other[n]), LEAST) for n in numbers}
    name = max(found, key=lambda n: (found[n], n))
    return found[name], name if found[name] else "all metrics equal"
