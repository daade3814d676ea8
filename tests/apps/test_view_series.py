"""Series over steps that follow from rollouts, compared with loops over the rows."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import generated_runs
import numpy as np
import pyarrow as pa
import pytest

from posttrain.apps.view.api import Answers
from posttrain.apps.view.column_table import RolloutColumns
from posttrain.apps.view.open_run import OpenRun
from posttrain.apps.view.rollout_files import RolloutPart
from posttrain.apps.view.step_series import _pairs, series
from posttrain.core.intervals import mean_interval
from posttrain.runs.record.rollout_reading import read_rollouts

STEPS = [1, 2, 3, 4, 5]
GIVEN = [0, *STEPS, 9]  # steps of the metrics: at some of them nothing was played


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> OpenRun:
    folder = tmp_path_factory.mktemp("series") / "run"
    opened = OpenRun(generated_runs.make_run(folder, steps=5, groups=9, group=5, tokens=1, evals=2), "run")
    opened.read()
    return opened


def close(own: Any, expected: Any) -> None:
    """Whether they are the same to six digits, which is what goes to the page."""
    assert own == [None if e is None else pytest.approx(e, rel=6e-6, abs=1e-9) for e in expected]


def at_steps(of: dict[int, Any]) -> list[Any]:
    return [of.get(step) for step in GIVEN]


def groups_of(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["group"], []).append(row)
    return list(found.values())


def test_series_of_groups_are_what_a_loop_finds(run: OpenRun) -> None:
    own = series(run.store.rows, GIVEN)
    limit = run.store.success
    assert limit is not None
    expected: dict[str, dict[int, float]] = {}
    for step in STEPS:
        groups = groups_of(read_rollouts(run.folder, step))
        valid = [[row["reward"] for row in group if row["reward"] is not None] for group in groups]
        means = [statistics.fmean(rewards) for rewards in valid]
        said = {
            "reward": statistics.fmean(means),
            "least": mean_interval(means).low,
            "most": mean_interval(means).high,
            "right": np.mean([all(r >= limit for r in rewards) for rewards in valid]),
            "wrong": np.mean([not any(r >= limit for r in rewards) for rewards in valid]),
            "equal": np.mean([len(set(rewards)) == 1 for rewards in valid]),
            "replies": np.mean([len({row["text"] for row in group}) for group in groups]),
        }
        for name, value in said.items():
            expected.setdefault(name, {})[step] = float(value)
    for name, values in expected.items():
        close(own[name], at_steps(values))
    assert own["n"] == 5 and len(set(expected["replies"].values())) > 1


def test_rows_of_a_group_are_found_wherever_in_their_step_they_stand(run: OpenRun) -> None:
    table = run.store.rows.table
    names = table["group"].to_pylist()
    own = run.store.rows.of_part(RolloutPart(2, False))
    names[own] = names[own][::2] + names[own][1::2]
    rows = RolloutColumns(
        table.set_column(table.column_names.index("group"), "group", pa.array(names).dictionary_encode())
    )
    known: dict[Any, int] = {}
    where = zip(*(table[name].to_pylist() for name in ("step", "held_out", "side")), names, strict=True)
    assert rows.gid.tolist() == [known.setdefault(group, len(known)) for group in where]


def test_equal_replies_of_two_steps_are_no_pairs() -> None:
    key, at = np.array([5, 7, 5, 7, 7, 7, 9]), np.array([0, 0, 0, 1, 1, 1, 1])
    expected = [sum(a == b for a in own for b in own) for own in (key[:3], key[3:])]
    assert _pairs(key.copy(), at, np.array([0, 3])).tolist() == expected == [5, 10]


def test_replies_alike_are_pairs_with_different_prompts_and_the_same_text(run: OpenRun) -> None:
    expected = {}
    for step in STEPS:
        rows = read_rollouts(run.folder, step)
        pairs = [(a, b) for a in rows for b in rows if a["prompt"] != b["prompt"]]
        expected[step] = sum(a["text"] == b["text"] for a, b in pairs) / len(pairs)
    close(series(run.store.rows, GIVEN)["alike"], at_steps(expected))
    assert max(expected.values()) > 0


def test_fates_and_parts_are_counted_at_their_steps(run: OpenRun) -> None:
    own = series(run.store.rows, GIVEN)
    rows = {step: read_rollouts(run.folder, step) for step in STEPS}
    fates = {row["fate"] for found in rows.values() for row in found}
    expected = {f: [sum(row["fate"] == f for row in rows.get(step, ())) for step in GIVEN] for f in fates}
    assert own["fates"] == expected and len(fates) == 3
    for name in ("animal", "full stop"):
        means = {
            step: statistics.fmean(row["parts"][name] for row in found if name in row["parts"])
            for step, found in rows.items()
        }
        close(own["parts"][name], at_steps(means))


def test_a_group_is_shown_with_all_visits_to_its_task_in_order(tmp_path: Path) -> None:
    run = OpenRun(generated_runs.make_run(tmp_path / "run", steps=9, groups=4, group=3, tokens=4, evals=0), "run")
    run.read()
    rows = [row for step in range(1, 10) for row in read_rollouts(run.folder, step)]
    for step, index in ((1, 0), (5, 4), (9, 11)):
        [own] = [row for row in rows if (row["step"], row["index"]) == (step, index)]
        expected = sorted({(row["step"], row["group"]) for row in rows if row["task"] == own["task"]})
        data = Answers([run]).of(f"0/group/{step}/{index}", {})
        assert [(visit["step"], visit["group"]) for visit in data["visits"]] == expected and len(expected) > 1
        for visit in data["visits"]:
            members = [r for r in rows if (r["step"], r["group"]) == (visit["step"], visit["group"])]
            assert visit["index"] == min(row["index"] for row in members) and visit["n"] == len(members)
        assert [row["index"] for row in data["rollouts"]] == [
            row["index"] for row in rows if (row["step"], row["group"]) == (step, own["group"])
        ]


def test_the_overview_counts_what_was_trained_on_and_is_made_again_when_there_is_more(
    run: OpenRun, tmp_path: Path
) -> None:
    answers = Answers([run])
    data = answers.of("0/overview", {})
    rows = [row for step in STEPS for row in read_rollouts(run.folder, step)]
    assert (data["rollouts"], data["tokens"]) == (len(rows), sum(row["sampled"] for row in rows))
    file = run.folder / "rollouts" / "step-000005.parquet"
    (tmp_path / "kept").write_bytes(file.read_bytes())
    file.unlink()
    run.read()
    assert answers.of("0/overview", {})["rollouts"] == len(rows) - 45
    file.write_bytes((tmp_path / "kept").read_bytes())
    run.read()
    assert answers.of("0/overview", {})["rollouts"] == len(rows)


def test_where_nothing_was_ever_right_no_reward_counts_as_right(tmp_path: Path) -> None:
    folder = generated_runs.make_run(tmp_path / "run", steps=2, groups=4, group=3, tokens=4, evals=0)
    lines = [{**json.loads(line), "accuracy": 0.0} for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = OpenRun(folder, "run")
    run.read()
    assert run.store.rows.groups["right_n"].sum() == 0 and run.store.rows.number("reward").max() > 0
