"""curves.png: which panels there are, what stands in them, and what the health check found."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.core.intervals import student_interval
from posttrain.runs import curves as drawing
from posttrain.runs.curves import curves
from posttrain.runs.run_record import RunRecord


def recorded(folder: Path, rows: Sequence[Mapping[str, float]], found: Sequence[tuple[int, str, str]] = ()) -> Path:
    record = RunRecord.create(folder, {"seed": 0}, "rl", {})
    for step, row in enumerate(rows, 1):
        record.metrics(step, dict(row))
    record.health(found)
    record.close({})
    return folder


def figure(runs: Any) -> Any:
    """What would be saved."""
    shown = runs if isinstance(runs, dict) else {"": runs}
    lines = [drawing._read(label, drawing._listed(given)) for label, given in shown.items()]
    return drawing._figure(lines, drawing._panels(lines))


def titles(drawn: Any) -> list[str]:
    return [axes.get_title(loc="left") for axes in drawn.axes]


def test_no_curve_is_drawn_twice(tmp_path: Path) -> None:
    rows = [
        {"reward": n / 9, "accuracy": n / 9, "eval/accuracy": n / 8, "eval/reward": n / 8, "loss": -n, "kl": n / 7}
        for n in range(9)
    ]
    assert titles(figure(recorded(tmp_path / "a", rows))) == [
        "Reward",
        "Held-out accuracy",
        "KL from the reference, nats per token",
    ]
    rows[3]["accuracy"] = 0.0
    other = recorded(tmp_path / "b", rows)
    assert titles(figure(other))[:3] == ["Reward", "Held-out accuracy", "Accuracy"]
    assert "Accuracy" in titles(figure({"a": tmp_path / "a", "b": other})), "in one of them it is another curve"


def test_parts_of_the_reward_share_a_panel(tmp_path: Path) -> None:
    rows = [
        {"reward": n + 0.5, "accuracy": n, "reward/right": n, "reward/form": 0.5, "reward/shaping": 1} for n in range(5)
    ]
    run = recorded(tmp_path / "a", rows)
    drawn = figure(run)
    assert titles(drawn) == ["Reward", "Parts of the reward"], "the accuracy is the part"
    assert [line.get_label() for line in drawn.axes[1].get_lines()] == ["form", "right"]
    assert titles(figure({"a": run, "b": run})) == ["Reward", "Accuracy"], "there colours tell runs apart"


def test_what_stays_at_nothing_has_no_panel(tmp_path: Path) -> None:
    rows = [{"reward": n, "kl": 0.0, "truncated": 0.0, "invalid": 0.0, "grad_norm": 1.0} for n in range(5)]
    assert titles(figure(recorded(tmp_path / "a", rows))) == ["Reward", "Gradient norm"]
    rows[4]["truncated"] = 0.25
    assert titles(figure(recorded(tmp_path / "b", rows))) == ["Reward", "Share of replies cut off", "Gradient norm"]


def test_findings_stand_on_the_axis_of_every_panel(tmp_path: Path) -> None:
    rows = [{"reward": n, "entropy": 1.0} for n in range(9)]
    run = recorded(tmp_path / "a", rows, [(3, "entropy", "x"), (5, "length", "y"), (7, "entropy", "x")])
    drawn = figure(run)
    for axes in drawn.axes:
        (mark,) = [line for line in axes.get_lines() if line.get_marker() == "^"]
        assert list(mark.get_xdata()) == [3, 5]
    assert [text.get_text() for text in drawn.texts] == ["health: entropy at step 3, length at step 5"]


def test_runs_under_one_label_give_a_mean_with_its_interval(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, 12))
    runs = [recorded(tmp_path / f"{n}", [{"reward": v} for v in own]) for n, own in enumerate(values)]
    shorter = recorded(tmp_path / "short", [{"reward": v} for v in values[0][:10]])
    drawn = figure({"seeds": [*runs, shorter], "alone": runs[0]})
    mean, alone = drawn.axes[0].get_lines()
    own = np.vstack([values[:, :10], values[0][:10]])
    assert list(mean.get_xdata()) == list(range(1, 11)) and np.allclose(mean.get_ydata(), own.mean(0))
    (band,) = drawn.axes[0].collections
    corners = band.get_paths()[0].vertices
    for step, column in zip(range(1, 11), own.T, strict=True):
        low, high = student_interval(column)
        there = corners[np.isclose(corners[:, 0], step)][:, 1]
        assert math.isclose(there.min(), low, rel_tol=1e-6) and math.isclose(there.max(), high, rel_tol=1e-6)
    assert len(alone.get_xdata()) == 12


@pytest.mark.parametrize("steps", [5, 40])
def test_the_picture_is_written(tmp_path: Path, steps: int) -> None:
    run = recorded(tmp_path / "a", [{"reward": float(n)} for n in range(steps)])
    assert curves(run).read_bytes().startswith(b"\x89PNG")
    assert curves({"two": [run, run]}, tmp_path / "two.png").stat().st_size > 5_000


@pytest.mark.filterwarnings("error")
def test_names_of_parts_are_drawn_as_they_are_written(tmp_path: Path) -> None:
    names = ["_private", r"$\nothing$", "\x1b[31mred", "中文"]
    run = recorded(tmp_path / "a", [{f"reward/{name}": n + len(name) for name in names} for n in range(3)])
    legend = figure(run).axes[-1].get_legend()
    assert {text.get_text().strip().replace(r"\$", "$") for text in legend.get_texts()} == {
        "_private", r"$\nothing$", r"\x1b[31mred", "中文"
    }  # fmt: skip
    assert curves(run).stat().st_size > 1000
