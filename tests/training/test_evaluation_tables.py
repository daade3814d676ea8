"""The tables of `posttrain eval`: a suite has room for every mean."""

from __future__ import annotations

import random
from typing import Any

import pytest

from posttrain.cli.evaluation_tables import _further


def side(names: list[str], draw: random.Random, **own: float) -> dict[str, Any]:
    figures: dict[str, Any] = {name: {"mean": draw.random()} for name in ("reward", "accuracy", *names)}
    return {"figures": {"tasks": 8, "samples": 64, **figures}, "rates": {"tokens": 5.0, "invalid": 0.0, **own}}


@pytest.mark.parametrize("count", [0, 1, 3, 8, 20])
def test_a_suite_shows_every_mean_beside_the_headline_within_80_columns(
    count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    draw, names = random.Random(count), [f"{kind}@{2**k}" for k in range(7) for kind in ("pass", "maj", "best")][:count]
    sides = {"arithmetic": side(names, draw), "code": side(names[:2], draw)}
    _further("model", sides)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    shown: dict[str, dict[str, str]] = {part: {} for part in sides}
    for line in lines:
        cells = line.split()
        if cells[0] == "part":
            head = cells[1:]
        elif cells[0] in shown:
            shown[cells[0]] |= dict(zip(head, cells[1:], strict=True))
    for part, own in sides.items():
        means = {name: own["figures"][name]["mean"] for name in names if name in own["figures"]}
        assert {name: shown[part][name] for name in means} == {name: f"{mean:.4g}" for name, mean in means.items()}
    assert all(shown["code"][name] == "-" for name in names[2:])


def test_a_suite_without_further_means_has_no_second_table(capsys: pytest.CaptureFixture[str]) -> None:
    _further("model", {"sums": side([], random.Random(0))})
    assert capsys.readouterr().out == ""
