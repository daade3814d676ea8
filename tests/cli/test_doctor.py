"""`posttrain doctor`: its tables are those of the package, it needs neither torch nor network, a problem is code 2."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from typing import Any

import pytest
from places import ROOT

from posttrain.cli import doctor_command
from posttrain.cli.main import main
from posttrain.core.extras import EXTRAS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_extras_and_bounds_are_those_of_the_package() -> None:
    assert set(EXTRAS) == set(PROJECT["optional-dependencies"]) - {"dev", "docs"}
    torch = next(need for need in PROJECT["dependencies"] if need.startswith("torch>"))
    bounds = [tuple(map(int, found)) for found in re.findall(r"(\d+)\.(\d+)", torch)]
    assert bounds == list(doctor_command.TORCH)
    needed = {re.split(r"[<>=\[]", need)[0].lower() for need in PROJECT["dependencies"]}
    assert set(doctor_command.NEEDED) <= needed


@pytest.mark.parametrize(
    ("version", "fits"), [("2.10.9", False), ("2.11.0+cpu", True), ("2.15.1", True), ("2.16.0", False), ("odd", False)]
)
def test_versions_of_torch_are_compared_as_numbers(version: str, fits: bool) -> None:
    assert doctor_command.torch_fits(version) is fits


def test_the_report_is_80_columns_wide_and_names_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(doctor_command, "installed", lambda library: library != "duckdb")
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert "pip install 'duckdb>=2,<3'" in " ".join(said.split()) and "HF_HUB_OFFLINE" in said
    assert re.search(r"^torch +\d", said, re.MULTILINE) and "pip install 'wandb" not in said


def test_missing_torch_and_a_full_disk_are_problems(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(metadata, "version", version)
    assert main(["doctor"]) == 2
    assert "problem: not installed: pip install torch" in capsys.readouterr().out
    monkeypatch.undo()

    class Usage:
        free = 2**29

    def usage(place: Any) -> Usage:
        return Usage()

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(doctor_command.shutil, "disk_usage", usage)
    assert main(["doctor"]) == 2
    assert "problem: 0.5 GiB free" in capsys.readouterr().out


def test_it_loads_no_torch_where_the_system_shows_no_gpu() -> None:
    code = (
        "import os, sys\nos.environ['HF_HUB_OFFLINE'] = '1'\nfrom pathlib import Path\n"
        "from posttrain.cli import doctor_command\n"
        "there = Path.exists\nPath.exists = lambda self: str(self)[:5] != '/dev/' and there(self)\n"
        "list(doctor_command.findings())\nprint('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "False"


def test_a_hub_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://127.0.0.1:1")
    assert "cannot be reached" in doctor_command._hub()
    assert doctor_command.SECONDS <= 2
