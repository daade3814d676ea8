"""The README says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from posttrain.algorithms.policy import Algorithm
from posttrain.algorithms.table import TABLE
from posttrain.cli import app

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def line(row: Algorithm) -> str:
    kl = f"{row.kl.estimator} in the {row.kl.where}, {row.kl.beta:g}" if row.kl else "none"
    ratio = " then ".join(step.formula for step in row.ratio) or ("exp(lp - old)" if row.surrogate.uses_ratio else "")
    cells = (f"`{row.name}`", row.advantage.formula, ratio, row.surrogate.formula, row.aggregate.formula, kl)  # type: ignore[attr-defined]
    return f"| {' | '.join(cells)} |"


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
