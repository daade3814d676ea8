"""The README says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from posttrain.algorithms.describe import line
from posttrain.algorithms.policy import Algorithm
from posttrain.algorithms.table import TABLE
from posttrain.cli.main import app

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda r: r.name)
def test_table_of_algorithms_is_the_one_in_the_code(row: Algorithm) -> None:
    assert line(row) in README, line(row)


def test_every_command_of_the_readme_exists() -> None:
    verbs = set(re.findall(r"posttrain (\w+)[ `]", README)) - {"import"}
    assert {"sft", "rl", "eval", "chat", "check", "algorithms"} <= verbs <= {name.lstrip("-") for name in app}


def test_pictures_and_files_named_in_the_readme_exist() -> None:
    root = Path(__file__).resolve().parents[1]
    for path in re.findall(r"\]\(([\w/.-]+)\)", README):
        assert (root / path).exists(), path
