"""What `posttrain view` makes of files that are damaged, too large or meant to harm: told in one line, within its memory."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import generated_runs
import numpy as np
import pyarrow as pa
import pytest
from generated_runs import spoiled

from posttrain.apps.view.api import Answers
from posttrain.apps.view.open_run import OpenRun
from posttrain.apps.view.rollout_filters import ViewQuestion
from posttrain.apps.view.rollout_store import Store
from posttrain.cli.main import main
from posttrain.core.types import UserError
from posttrain.runs.record.rollout_reading import read_file
from posttrain.runs.record.rollout_rows import transcripts_of
from posttrain.runs.record.schema import KEY, VERSION
from posttrain.runs.record.table_writer import write_table

LARGE = 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated_runs.make_run(tmp_path_factory.mktemp("damage") / "run", steps=6, groups=4, group=4, tokens=60)


def opened(folder: Path) -> OpenRun:
    run = OpenRun(folder, "run")
    run.read()
    run.store.read_texts()
    return run


def rewritten(folder: Path, copy: Path, step: int, change: Callable[[list[dict[str, Any]]], None]) -> Path:
    """A copy of a run, one of whose steps holds other rows."""
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("index"))
    file = copy / "rollouts" / f"step-{step:06d}.parquet"
    table = read_file(file)
    rows = table.to_pylist()
    change(rows)
    write_table(file, pa.Table.from_pylist(rows, schema=table.schema).replace_schema_metadata({KEY: VERSION.encode()}))
    return copy


def longer(span: int, **fields: int) -> Callable[[list[dict[str, Any]]], None]:
    def change(rows: list[dict[str, Any]]) -> None:
        rows[0]["spans"][span] |= fields

    return change


SPANS = {
    "beyond its tokens": longer(1, length=LARGE),
    "before its tokens": longer(1, start=-LARGE),
    "of negative length": longer(0, length=-5),
    "over another": longer(1, start=0),
}


@pytest.mark.parametrize("how", SPANS)
def test_spans_that_are_not_within_their_tokens_are_refused_in_one_line_and_nothing_is_made_of_their_size(
    folder: Path, tmp_path: Path, how: str
) -> None:
    answers = Answers([opened(rewritten(folder, tmp_path / "run", 3, SPANS[how]))])
    answers.of("0/rollout/3/1", {})
    tracemalloc.start()
    for path in ("0/rollout/3/0", "0/group/3/0", "0/step/3"):
        with pytest.raises(UserError, match="step-000003.parquet is damaged") as told:
            answers.of(path, {})
        assert "\n" not in str(told.value)
    answers.of("0/overview", {})
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 50e6
    assert answers.of("0/rollout/2/0", {})["total"] > 60


def test_a_row_whose_spans_are_not_its_tokens_is_no_transcript(folder: Path) -> None:
    row = read_file(folder / "rollouts" / "step-000001.parquet", None, [0]).to_pylist()[0]
    assert sum(map(len, transcripts_of(row))) == row["total"]
    row["spans"][1]["length"] = LARGE
    with pytest.raises(ValueError, match="spans of 1,073,741"):
        transcripts_of(row)


def test_columns_that_are_nested_too_deeply_are_shown_as_text(folder: Path, tmp_path: Path) -> None:
    deep = "[" * 50_000

    def change(rows: list[dict[str, Any]]) -> None:
        rows[0] |= {"columns": deep, "notes": deep}

    run = opened(rewritten(folder, tmp_path / "run", 3, change))
    answers = Answers([run])
    assert answers.of("0/rollout/3/0", {})["notes"].startswith("[[[") and answers.of("0/overview", {})["rollouts"] == 96
    assert ViewQuestion.of({"col.level": "2"}, run.store).page(0)["count"] > 0


# -- texts -------------------------------------------------------------------------------------------------------------


def test_where_texts_of_some_steps_cannot_be_read_the_others_are_searched_and_it_is_said(
    folder: Path, tmp_path: Path
) -> None:
    word = read_file(folder / "rollouts" / "step-000002.parquet", ["text"])["text"][0].as_py()[100:140]
    whole, run = opened(folder), opened(spoiled(folder, tmp_path / "run", (3, 5)))
    assert whole.store.searchable and whole.store.unsearched is None
    [found] = ViewQuestion.of({"q": word}, run.store).page(0)["rows"]
    assert (found["step"], found["index"]) == (2, 0) and word not in found["text"], "it stands behind the beginning"
    told = Answers([run]).of("runs", {})["runs"][0]
    assert told["searchable"] and "of steps 3, 5" in told["unsearched"] and "damaged" in told["unsearched"]
    beginning = read_file(folder / "rollouts" / "step-000003.parquet", ["text"])["text"][0].as_py()[:40]
    assert (3, 0) in {(r["step"], r["index"]) for r in ViewQuestion.of({"q": beginning}, run.store).page(0)["rows"]}
    run.store.read_texts()
    assert "of steps 3, 5" in str(run.store.unsearched)
    for step in (3, 5):
        shutil.copy(folder / "rollouts" / f"step-{step:06d}.parquet", run.folder / "rollouts")
    run.read()
    run.store.read_texts()
    assert run.store.unsearched is None


@pytest.mark.parametrize("limit", ["TEXT_BYTES", "FILE_BYTES"])
def test_where_texts_are_too_many_their_beginnings_are_searched_and_it_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(f"posttrain.apps.view.rollout_store.{limit}", 1000)
    run = opened(folder)
    told = Answers([run]).of("runs", {})["runs"][0]
    assert told["searchable"] and "only the first 80 characters of each text" in told["unsearched"]
    text = read_file(folder / "rollouts" / "step-000002.parquet", ["text"])["text"][0].as_py()
    assert ViewQuestion.of({"q": text[:40]}, run.store).page(0)["count"] == 1
    assert ViewQuestion.of({"q": text[100:140]}, run.store).page(0)["count"] == 0
    run.store.read_texts()
    assert "only the first 80 characters" in str(run.store.unsearched)


def test_texts_that_are_whole_in_the_index_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = generated_runs.make_run(tmp_path / "short", steps=2, groups=4, group=4, tokens=5, evals=0)
    read: list[tuple[str, ...]] = []
    kept = Store._texts_of

    def texts_of(store: Store, part: Any, long: bool) -> pa.Table:
        table = kept(store, part, long)
        read.append(tuple(table.column_names))
        return table

    monkeypatch.setattr(Store, "_texts_of", texts_of)
    run = opened(short)
    assert read and all("text" not in names and "columns" in names for names in read)
    text = read_file(short / "rollouts" / "step-000002.parquet", ["text"])["text"][3].as_py()
    assert (2, 3) in {(r["step"], r["index"]) for r in ViewQuestion.of({"q": text}, run.store).page(0)["rows"]}
    rows = ViewQuestion.of({"where": f"text = '{text}'"}, run.store).page(0)["rows"]
    assert (2, 3) in {(r["step"], r["index"]) for r in rows}


def test_texts_of_a_step_that_was_played_again_are_the_new_ones(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    run = opened(copy)
    old = read_file(copy / "rollouts" / "step-000004.parquet", ["text"])["text"][0].as_py()[100:140]
    assert ViewQuestion.of({"q": old}, run.store).page(0)["count"] == 1

    def change(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["text"] = "another reply " * 20 + "at its end a zebra"

    again = rewritten(folder, tmp_path / "again", 4, change)
    shutil.copy(again / "rollouts" / "step-000004.parquet", copy / "rollouts")
    run.read()
    run.store.read_texts()
    assert ViewQuestion.of({"q": old}, run.store).page(0)["count"] == 0
    assert ViewQuestion.of({"q": "a zebra"}, run.store).page(0)["count"] == 16


# -- orders and histograms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [[0.1, 0.1 + 1e-16], [1e-320, 2e-320], [-1e300, 1e300], [1e15, 1e15 + 1], [5.0]])
def test_bins_of_the_oddest_numbers_are_few_and_hold_all(folder: Path, tmp_path: Path, values: list[float]) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        for place, row in enumerate(rows):
            row["advantage"] = values[place % len(values)]

    run = opened(rewritten(folder, tmp_path / "run", 3, change))
    data = ViewQuestion.of({"step": "3"}, run.store).histograms(["advantage"])["advantage"]
    assert sum(n for _, n in data["bins"]) == 16 and len(data["bins"]) <= 40
    json.dumps(data, allow_nan=False)


def test_the_first_rows_of_an_order_are_those_of_the_whole_order() -> None:
    from posttrain.apps.view.column_table import first

    rng = np.random.default_rng(0)
    for _ in range(300):
        values = rng.integers(0, rng.integers(1, 30), size=rng.integers(1, 60)).astype(float)
        values[rng.random(len(values)) < 0.2] = np.nan
        for down in (False, True):
            keys = [(bool(np.isnan(v)), 0.0 if np.isnan(v) else -v if down else v, i) for i, v in enumerate(values)]
            whole = [i for _, _, i in sorted(keys)]
            count = int(rng.integers(1, 70))
            assert first(values, down, count).tolist()[:count] == whole[:count]


# -- what the terminal says --------------------------------------------------------------------------------------------


def test_an_answer_in_sql_says_which_steps_it_lacks(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder, run, ignore=shutil.ignore_patterns("index"))
    lines = [{**json.loads(line), "rollouts": 16} for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def told(table: str) -> list[str]:
        assert main(["query", str(run), f"select count(*) from {table}"]) == 0
        return capsys.readouterr().err.splitlines()

    assert told("rollouts") == told("rollout_index") == []
    (run / "rollouts" / "step-000002.parquet").unlink()
    [gone] = told("rollouts")
    assert "rollouts lacks step 2" in gone and told("metrics") == told("evals") == []
    about = json.loads((run / "run.json").read_text())
    last = max((run / "rollouts").iterdir())
    last.rename(run / "later")
    assert "lacks 2 steps from 2 on" in told("rollouts")[0]
    (run / "run.json").write_text(json.dumps({name: value for name, value in about.items() if name != "end"}))
    [gone] = told("rollouts")  # of a run that is on the last one is still being written
    assert "rollouts lacks step 2:" in gone
    (run / "later").rename(last)
    (run / "run.json").write_text(json.dumps(about))
    (run / "rollouts" / "step-000004.parquet").write_bytes(b"x")
    gone, damaged = told("rollout_index")
    assert "lacks step 2" in gone and "step-000004.parquet, which is damaged" in damaged


# -- conditions that nothing interrupts --------------------------------------------------------------------------------

STUBBORN = "levenshtein(repeat('a', 140000), repeat('b', 140000)) > 0"
"""One call of a function that takes half a minute."""


@pytest.mark.parametrize("query", [{"where": STUBBORN}, {"token": STUBBORN}], ids=str)
def test_a_condition_that_nothing_interrupts_is_killed_and_the_next_one_is_answered(
    folder: Path, query: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = opened(folder)
    assert ViewQuestion.of({"where": "step = 1"}, run.store).page(0)["rows"]
    monkeypatch.setattr("posttrain.apps.view.sql_conditions.SECONDS", 0.2)
    with pytest.raises(UserError, match="took longer than"):
        ViewQuestion.of({**query, "step": "1"}, run.store).page(0)
    monkeypatch.undo()
    assert ViewQuestion.of({"where": "step = 1"}, run.store).page(0)["rows"]
    run.store.close()


@pytest.mark.parametrize("kind", ["where", "token"])
def test_a_condition_takes_no_more_memory_than_it_may(folder: Path, kind: str) -> None:
    run = opened(folder)
    for condition in ("length(repeat('a', 3000000000)) > 1", "length(repeat('ab', 900000000)) > 1"):
        with pytest.raises(UserError):
            ViewQuestion.of({kind: condition, "step": "1"}, run.store).page(0)
    assert ViewQuestion.of({"where": "step = 1"}, run.store).page(0)["rows"]
    run.store.close()
