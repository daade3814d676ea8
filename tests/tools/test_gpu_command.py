"""`make gpu` on a processor with tiny shapes: a part that crashes, or does not fit, loses nothing of the others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT


def measured(place: Path, *options: str) -> tuple[int, str]:
    """(exit code, document) of the command with these options."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu" / "gpu.py"),
        "--device",
        "cpu",
        "--tiny",
        "--rounds",
        "1",
    ]
    places = ["--out", str(place / "out"), "--place", str(place / "models"), "--into", str(place / "gpu.md")]
    ran = subprocess.run([*command, *places, *options], capture_output=True, text=True, cwd=place)
    assert (place / "gpu.md").exists(), ran.stderr
    return ran.returncode, (place / "gpu.md").read_text()


@pytest.mark.slow
def test_a_part_that_crashes_is_reported_beside_those_that_do_not(tmp_path: Path) -> None:
    code, document = measured(tmp_path, "--only", "about", "sampling", "--crash", "about")
    assert code == 1
    assert "| about | CRASHED |" in document and "- about: exit code -9" in document
    assert "| sampling | done |" in document and "embedded engine, 1.5b, 16 at once" in document
    code, document = measured(tmp_path, "--only", "about")  # what the folder holds of other parts stays
    assert code == 0
    assert "| about | done |" in document and "embedded engine, 1.5b, 16 at once" in document
    results = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [(row["part"], row["ended"]) for row in results] == [
        ("about", "crashed"),
        ("sampling", "done"),
        ("about", "done"),
    ]


def test_parts_that_do_not_fit_into_the_time_are_listed(tmp_path: Path) -> None:
    code, document = measured(tmp_path, "--limit", "0")
    assert code == 1
    assert document.count("NOT RUN") == 14


def test_every_part_begins_however_long_the_others_take() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "gpu.py"), "--list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(listed) == 14 and sum(int(line.split()[1]) for line in listed) <= 25 * 60


@pytest.mark.slow
def test_packed_and_padded_updates_of_each_kernel_are_measured(tmp_path: Path) -> None:
    code, document = measured(tmp_path, "--only", "packed")
    assert code == 0, document
    for kind in ("gemma2", "gpt_oss", "qwen3_5_text"):
        assert f"| {kind} |" in document and f"{kind}: rows / packed" in json.dumps(
            [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
        )


@pytest.mark.long  # starts some thirty runs
@pytest.mark.timeout(1200)
def test_options_that_no_card_had_run_are_compared_with_the_run_without_them(tmp_path: Path) -> None:
    code, document = measured(tmp_path, "--only", "options", "cards", "vllm")
    assert code == 0, document
    assert "| --weights bfloat16 |" in document and "| --role-devices reference=cpu |" in document
    assert "--offload optimizer activations was not tried: it needs a card." in document
    assert "| --processes 2 --shard | 0 |" in document and "vLLM is not installed here" in document
