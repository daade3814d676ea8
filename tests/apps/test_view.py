"""What `posttrain view` answers, compared with loops over the rows that it was given."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import generated_runs
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from viewed import Pages, viewing

from posttrain.algorithms.describe import describe
from posttrain.algorithms.policy_table import TABLE
from posttrain.apps.view import sql_worker, training_reasons
from posttrain.apps.view.api import Answers
from posttrain.apps.view.html_export import STATIC, Selection, bundled, exported
from posttrain.apps.view.open_run import OpenRun
from posttrain.apps.view.rollout_files import RolloutPart
from posttrain.apps.view.rollout_filters import ViewQuestion
from posttrain.apps.view.rollout_store import Store
from posttrain.apps.view.verdict_texts import verdicts
from posttrain.cli.main import main
from posttrain.core.intervals import paired_interval
from posttrain.core.types import UserError
from posttrain.runs.record.held_out_rewards import threshold
from posttrain.runs.record.rollout_reading import read_file, read_rollouts
from posttrain.runs.record.schema import KEY, VERSION
from posttrain.runs.record.sql_query import Questions
from posttrain.runs.record.table_writer import write_table
from posttrain.runs.run_reading import divides_by_sampler, read_run

TOKEN = "a-token"


def opened(folder: Path, name: str = "run") -> OpenRun:
    run = OpenRun(folder, name)
    run.read()
    run.store.read_texts()
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated_runs.make_run(tmp_path_factory.mktemp("view") / "run", steps=8, groups=8, tokens=20)


@pytest.fixture(scope="module")
def run(folder: Path) -> OpenRun:
    return opened(folder)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> OpenRun:
    return opened(generated_runs.make_hostile(tmp_path_factory.mktemp("view") / "hostile"))


def every_row(folder: Path, steps: int = 8) -> list[dict[str, Any]]:
    return [row for step in range(1, steps + 1) for row in read_rollouts(folder, step)]


def found(run: OpenRun, **query: str) -> list[dict[str, Any]]:
    query = {name.replace("__", "."): value for name, value in query.items()}
    return ViewQuestion.of({"held": "0", **query}, run.store).page(0, 10_000)["rows"]


def places(rows: list[dict[str, Any]]) -> set[tuple[int, int]]:
    return {(row["step"], row["index"]) for row in rows}


# -- questions ---------------------------------------------------------------------------------------------------------

FILTERS: list[tuple[dict[str, str], Any]] = [
    ({}, lambda r: True),
    ({"step": "2..4"}, lambda r: 2 <= r["step"] <= 4),
    ({"reward": "0.5..1"}, lambda r: r["reward"] is not None and r["reward"] >= 0.5),
    ({"reward": "none"}, lambda r: r["reward"] is None),
    ({"fate": "trained"}, lambda r: r["fate"] == "trained"),
    ({"fate": "invalid|equal group"}, lambda r: r["fate"] in ("invalid", "equal group")),
    ({"stop": "length"}, lambda r: r["stop"] == "length"),
    ({"part__animal": "0.5"}, lambda r: r["parts"].get("animal") == 0.5),
    ({"q": "BUNNY"}, lambda r: "bunny" in (r["prompt"] + r["text"]).lower()),
    ({"q": "it's"}, lambda r: "it's" in r["text"]),
    ({"col__level": "2"}, lambda r: r["columns"]["level"] == 2),
    ({"task": "8"}, lambda r: r["task"] == "8"),
    ({"where": "total > 30 and contains(text, 'cat')"}, lambda r: r["total"] > 30 and "cat" in r["text"]),
    ({"ask": "cut"}, lambda r: r["truncated"]),
]


@pytest.mark.parametrize("query, meant", FILTERS, ids=lambda value: str(value)[:40] if isinstance(value, dict) else "")
def test_a_filter_finds_the_rows_that_a_loop_finds(
    run: OpenRun, folder: Path, query: dict[str, str], meant: Any
) -> None:
    assert places(found(run, **query)) == places([row for row in every_row(folder) if meant(row)])


@pytest.mark.parametrize(
    "column", ["reward", "advantage", "length", "step", "text", "prompt", "part.animal", "sd", "task"]
)
def test_every_column_sorts_with_nulls_last(run: OpenRun, column: str) -> None:
    for order in (column, f"-{column}"):
        values = [row[column] for row in found(run, sort=order) if row[column] is not None]
        nulls = [row[column] is None for row in found(run, sort=order)]
        assert values == sorted(values, reverse=order.startswith("-")) and nulls == sorted(nulls)


def test_ready_questions_say_of_groups_what_a_loop_says(run: OpenRun, folder: Path) -> None:
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in every_row(folder):
        groups.setdefault((row["step"], row["group"]), []).append(row)
    limit = run.store.success
    assert limit is not None

    def right(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [r for r in rows if r["reward"] is not None and r["reward"] >= limit - 1e-6]

    last: dict[str, tuple[int, str]] = {}
    for step, group in groups:
        last[groups[step, group][0]["task"]] = (step, group)
    wrong = [row for key in last.values() if not right(groups[key]) for row in groups[key]]
    once = [row for rows in groups.values() if len(right(rows)) == 1 for row in right(rows)]
    assert places(found(run, ask="wrong")) == places(wrong) and wrong
    assert places(found(run, ask="once")) == places(once) and once
    by_group = {(r["step"], r["group"]): r for r in found(run, **{"as": "groups"})}
    assert by_group.keys() == groups.keys()
    for key, rows in groups.items():
        rewards = [r["reward"] for r in rows if r["reward"] is not None]
        assert by_group[key]["n"] == len(rows) and by_group[key]["right_n"] == len(right(rows))
        assert by_group[key]["mean"] == pytest.approx(np.mean(rewards)) and by_group[key]["sd"] == pytest.approx(
            np.std(rewards)
        )


def test_bins_of_a_histogram_hold_every_value_once(run: OpenRun, folder: Path) -> None:
    data = ViewQuestion.of({"held": "0"}, run.store).histograms(["reward", "advantage", "length", "part.animal"])
    rows = every_row(folder)
    for name in ("reward", "advantage", "length"):
        values = [row[name] for row in rows if row[name] is not None]
        bins = data[name]["bins"]
        assert sum(n for _, n in bins) == len(values) == data[name]["count"] and data[name]["none"] == len(rows) - len(
            values
        )
        for number, count in bins:
            low = data[name]["low"] + number * data[name]["width"]
            inside = [v for v in values if low - 1e-8 <= v < low + data[name]["width"] - 1e-8]
            assert len(inside) == count
    assert dict(data["fate"]) == {f: sum(r["fate"] == f for r in rows) for f in {r["fate"] for r in rows}}


MEANT: list[dict[str, str]] = [
    {"reward": "0.5..1"}, {"step": "3"}, {"q": "bunny"}, {"ask": "wrong"}, {"where": "total > 30 and animal > 0"},
    {"fate": "invalid"}, {"reward": "0.5..1", "stop": "length", "step": "2..6"},
]  # fmt: skip


@pytest.mark.parametrize("query", MEANT, ids=str)
def test_means_of_what_is_listed_and_of_the_rest_are_those_of_a_loop(
    run: OpenRun, folder: Path, query: dict[str, str]
) -> None:
    told = Answers([run]).of("0/means", {"held": "0", **query})
    own = places(found(run, **query))
    for name, meant in (("these", True), ("others", False)):
        rows = [row for row in every_row(folder) if ((row["step"], row["index"]) in own) is meant]
        rewards = [row["reward"] for row in rows if row["reward"] is not None]
        parts = [row["parts"]["animal"] for row in rows if "animal" in row["parts"]]
        expected = {
            "n": len(rows),
            "reward": np.mean(rewards) if rewards else None,
            "tokens": np.mean([row["sampled"] for row in rows]),
            "trained": np.mean([row["fate"] == "trained" for row in rows]),
            "cut off": np.mean([row["truncated"] for row in rows]),
            "part.animal": np.mean(parts) if parts else None,
        }
        for key, value in expected.items():
            assert told[name][key] == (value if value is None else pytest.approx(value)), (name, key)


def test_there_is_no_rest_to_compare_with_without_a_filter(run: OpenRun) -> None:
    assert Answers([run]).of("0/means", {"held": "0"}) == {} == Answers([run]).of("0/means", {"reward": "50..60"})


REFUSED = [
    "1=1; drop table base",
    "1=1) ; copy base to '/tmp/stolen.csv",
    "(select count(*) from read_text('/etc/passwd')) > 0",
    "(select count(*) from read_csv('/etc/passwd')) > 0",
    "1 in (select 1 from glob('/etc/*'))",
    "reward >",
    "nothing = 1",
    "length",
    "1=1) union select * from rollouts where (1=1; attach '/tmp/x.db'",
    "(select max(i) from range(100000000000) t(i)) > 0",
]


@pytest.mark.parametrize("condition", REFUSED)
def test_a_condition_reads_no_file_writes_nothing_and_ends_in_time(
    run: OpenRun, condition: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr("posttrain.apps.view.sql_conditions.SECONDS", 0.5)
    with pytest.raises(UserError) as refused:
        found(run, where=condition)
    assert "\n" not in str(refused.value) and len(found(run)) > 100


SHOWN = [{"ask": name} for name in ("wrong", "once", "lost", "cut", "idle", "moved")] + [query for query, _ in FILTERS]


@pytest.mark.parametrize("query", SHOWN, ids=str)
def test_the_select_that_is_shown_finds_the_same_in_the_terminal(run: OpenRun, query: dict[str, str]) -> None:
    asked = {name.replace("__", "."): value for name, value in query.items()}
    question = ViewQuestion.of(asked, run.store)
    with Questions(run.folder) as terminal:
        names, rows = terminal.ask(question.sql())
    assert names[:2] == ["step", "index"]
    assert {row[:2] for row in rows} == places(question.page(0, 10_000)["rows"])


# -- tokens ------------------------------------------------------------------------------------------------------------


def ratios(row: dict[str, Any]) -> list[float]:
    return [math.exp(x - y) for x, y in zip(row["learner"] or (), row["before"] or (), strict=True)]


MARKS: list[tuple[dict[str, str], Any]] = [
    ({"token": "ratio > 1.2"}, lambda r, words: max(ratios(r), default=0) > 1.2),
    ({"token": "abs(weight) > 0.002 and entropy > 3"}, lambda r, words: any(
        abs(w) > 0.002 and e > 3 for w, e in zip(r["weight"] or (), r["entropy"] or (), strict=True))),
    ({"token": "trim(text) = 'girl' and learned"}, lambda r, words: any(
        words[t].strip() == "girl" for t in r["tokens"][r["spans"][0]["length"] :])),
    ({"token": "origin = 'prompt' and trim(text) = '7'", "step": "2..5", "fate": "trained"}, lambda r, words: any(
        words[t].strip() == "7" for t in r["tokens"][: r["spans"][0]["length"]])
        and 2 <= r["step"] <= 5 and r["fate"] == "trained"),
]  # fmt: skip


@pytest.mark.parametrize("query, meant", MARKS, ids=lambda value: str(value)[:60] if isinstance(value, dict) else "")
def test_a_condition_on_tokens_finds_the_rollouts_that_a_loop_finds_here_and_in_the_terminal(
    run: OpenRun, folder: Path, query: dict[str, str], meant: Any
) -> None:
    words = run.pieces.vocabulary()
    rows = [row for step in range(1, 9) for row in read_rollouts(folder, step, None)]
    expected = places([row for row in rows if meant(row, words)])
    assert places(found(run, **query)) == expected and 0 < len(expected) < len(rows)
    assert sum(n for _, n in Answers([run]).of("0/histograms", {"held": "0", **query})["fate"]) == len(expected)
    question = ViewQuestion.of({"held": "0", **query}, run.store)
    with Questions(folder, vocabulary=run.pieces.vocabulary) as terminal:
        assert {row[:2] for row in terminal.ask(question.sql())[1]} == expected


def test_a_ratio_to_the_policy_that_sampled_divides_by_its_numbers(folder: Path, tmp_path: Path) -> None:
    row = TABLE["grpo"]
    assert not divides_by_sampler({"objective": describe(row)})
    shutil.copytree(folder, tmp_path / "run")
    about = {**read_run(folder), "objective": describe(replace(row, old="sampler", minibatches=2))}
    (tmp_path / "run" / "run.json").write_text(json.dumps(about))
    sql = "select ratio, learner, engine, before from tokens where step = 3 and learner is not null"
    for place, below in ((folder, 3), (tmp_path / "run", 2)):
        with Questions(place) as questions:
            _, rows = questions.ask(sql)
        assert len(rows) > 20 and any(row[2] != row[3] for row in rows)
        for found in rows:
            assert found[0] == pytest.approx(math.exp(found[1] - found[below]), rel=1e-6)
    for place, sampler in ((folder, False), (tmp_path / "run", True)):
        run = OpenRun(place, "run")
        assert Answers([run]).of("runs", {})["runs"][0]["sampler"] == sampler
        run.close()


def test_the_first_token_of_which_a_condition_holds_is_named(run: OpenRun, folder: Path) -> None:
    for row in found(run, token="ratio > 1.2", step="3"):
        [own] = [r for r in read_rollouts(folder, 3, None) if r["index"] == row["index"]]
        high = [n for n, ratio in enumerate(ratios(own)) if ratio > 1.2]
        assert row["at"] == own["spans"][1]["start"] + high[0] and row["times"] == len(high)
    assert "at" not in found(run)[0]


@pytest.mark.parametrize("condition", [*REFUSED, "text", "1=1) union select 1, 2, 3, 4, 5 from (select 1 where (1=1"])
def test_a_condition_on_tokens_reads_no_other_file_writes_nothing_and_ends_in_time(
    run: OpenRun, condition: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr("posttrain.apps.view.sql_conditions.SECONDS", 0.5)
    with pytest.raises(UserError) as refused:
        found(run, token=condition)
    assert "\n" not in str(refused.value) and len(found(run)) > 100


def test_of_more_tokens_than_can_be_looked_at_the_last_steps_are_and_the_answer_says_so(
    run: OpenRun, monkeypatch: Any
) -> None:
    rows = run.store.rows
    size = rows.number("total")[(rows.number("step") >= 7) & ~rows.flag("held_out")].sum()
    monkeypatch.setattr("posttrain.apps.view.token_conditions.TOKENS", int(size))
    question = ViewQuestion.of({"held": "0", "token": "learned and place > 0"}, run.store)
    page = question.page(0, 10_000)
    assert {row["step"] for row in page["rows"]} == {7, 8} and "from step 7 on" in page["note"]
    assert "step >= 7" in page["sql"]
    named = ViewQuestion.of({"held": "0", "token": "learned and place > 0", "step": "1..2"}, run.store)
    assert named.note == "" and {row["step"] for row in named.page(0, 10_000)["rows"]} == {1, 2}


# -- following ---------------------------------------------------------------------------------------------------------


def held(store: Store) -> list[int]:
    """The steps whose rollouts are in memory."""
    return sorted({row["step"] for row in store.rows.rows(np.flatnonzero(~store.rows.flag("held_out")))})


def count(store: Store, step: int) -> int:
    part = store.rows.of_part(RolloutPart(step, False))
    return part.stop - part.start


def shorten(file: Path) -> None:
    """Leave 40 rollouts in a file."""
    write_table(file, read_file(file).slice(0, 40).replace_schema_metadata({KEY: VERSION.encode()}))


def test_a_run_that_goes_on_is_followed_and_what_a_resume_deletes_is_gone(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("index", "step-00000[678]*"))
    store = Store(copy)
    assert store.follow() and not store.follow() and held(store) == [1, 2, 3, 4, 5]
    for step in (6, 7):
        shutil.copy(folder / "rollouts" / f"step-{step:06d}.parquet", copy / "rollouts")
    assert store.follow() and held(store) == [1, 2, 3, 4, 5, 6, 7]
    (copy / "rollouts" / "step-000007.parquet").unlink()
    file = copy / "rollouts" / "step-000006.parquet"
    shorten(file)
    assert store.follow() and held(store) == [1, 2, 3, 4, 5, 6] and count(store, 6) == 40
    assert store.rows.groups["n"].sum() == len(store.rows)


def damaged(file: Path, how: str) -> None:
    """Spoil a file of rollouts."""
    table = read_file(file)
    other: dict[str, tuple[str, pa.Array]] = {
        "types": ("reward", pa.array(["<script>"] * len(table))),
        "step": ("step", pa.array([2] * len(table), pa.int32())),
    }
    if how == "torn":
        file.write_bytes(file.read_bytes()[:-20])
    elif how == "columns":
        parquet.write_table(
            table.drop_columns(["group", "parts"]).replace_schema_metadata({KEY: VERSION.encode()}), file
        )
    else:
        name, values = other[how]
        table = table.set_column(table.schema.get_field_index(name), name, values)
        parquet.write_table(table.replace_schema_metadata({KEY: VERSION.encode()}), file)


@pytest.mark.parametrize("how", ["torn", "types", "columns", "step"])
def test_a_damaged_file_costs_its_own_rows_alone_and_each_other_is_read_once(
    folder: Path, tmp_path: Path, how: str
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("index"))
    file = copy / "rollouts" / "step-000003.parquet"
    damaged(file, how)
    store = Store(copy)
    assert store.follow() and not store.follow() and held(store) == [1, 2, 4, 5, 6, 7, 8]
    assert all(count(store, step) == 64 for step in held(store))
    assert store.problem is not None and str(file) in store.problem and "\n" not in store.problem
    file.unlink()
    shutil.copy(folder / "rollouts" / file.name, file)
    assert store.follow() and held(store) == list(range(1, 9)) and count(store, 3) == 64 and store.problem is None


def test_a_piece_of_the_index_that_does_not_fit_its_rollouts_is_not_read(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    file = copy / "rollouts" / "step-000003.parquet"
    shorten(file)
    store = Store(copy)
    store.follow()
    assert count(store, 3) == 40
    shutil.copy(folder / "rollouts" / file.name, file)
    (piece,) = (copy / "index").iterdir()
    table = parquet.read_table(piece)
    parquet.write_table(table.drop_columns(["reward"]).replace_schema_metadata(table.schema.metadata), piece)
    store = Store(copy)
    store.follow()
    assert np.isfinite(store.rows.number("reward")).sum() > 400


def test_a_question_leaves_nothing_in_the_working_directory(
    run: OpenRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with sql_worker._limited(10.0) as cursor:
        place = cursor.execute("select current_setting('temp_directory')").fetchone()[0]
        assert Path(place).is_absolute() and not Path(place).is_relative_to(tmp_path)


def test_the_index_and_the_rollouts_say_the_same(folder: Path, run: OpenRun, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("index"))
    own, other = (found(one, sort="-reward") for one in (opened(copy), run))
    for a, b in zip(own, other, strict=True):
        for name in ("mean", "sd"):  # sums in another order
            assert a.pop(name) == pytest.approx(b[name])
        assert a == {name: value for name, value in b.items() if name in a}


def test_what_counts_as_right_is_the_threshold_that_gives_the_accuracy() -> None:
    assert threshold([0.0, 0.5, 1.0, 1.0], 0.5) == 1.0
    assert threshold([0.0, 0.5, 1.0, 1.0], 0.75) == 0.5
    assert threshold([0.0, 0.5], 0.9) is None and threshold([], 0.5) is None


# -- one rollout -------------------------------------------------------------------------------------------------------


def numbers(text: str) -> np.ndarray:
    return np.frombuffer(b64decode(text), dtype="<f4")


def test_each_number_stands_at_its_token(run: OpenRun, folder: Path) -> None:
    answers = Answers([run])
    for index in (0, 9, 25):
        [row] = [r for r in read_rollouts(folder, 3, None) if r["index"] == index]
        one = answers.of(f"0/rollout/3/{index}", {})
        assert "".join(one["pieces"]) == row["prompt"] + row["text"]
        scored = [n for s in row["spans"] if s["learned"] for n in range(s["start"], s["start"] + s["length"])]
        for name in ("before", "learner", "reference", "entropy", "weight", "after", "engine"):
            if row[name] is None:
                assert name not in one["numbers"]
                continue
            expected = np.full(len(row["tokens"]), np.nan, dtype=np.float32)
            expected[scored] = row[name]
            np.testing.assert_array_equal(numbers(one["numbers"][name]), expected)
        assert one["seconds"]["turns"] == pytest.approx([0.2, 0.21])


def test_a_long_rollout_comes_in_windows(run: OpenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers([run])
    whole = answers.of("0/rollout/3/0", {})
    monkeypatch.setattr("posttrain.apps.view.rollout_page.WINDOW", 10)
    parts = [answers.of("0/rollout/3/0", {"begin": str(begin)}) for begin in range(0, whole["total"], 10)]
    assert [p for part in parts for p in part["pieces"]] == whole["pieces"]
    joined = np.concatenate([numbers(part["numbers"]["engine"]) for part in parts])
    np.testing.assert_array_equal(joined, numbers(whole["numbers"]["engine"]))


def test_pieces_joined_are_the_text_whatever_the_bytes(run: OpenRun) -> None:
    text = "déjà vu 猫が好き 🐈‍⬛ \ud83d".encode("utf-8", "ignore").decode() + "ñ" * 5
    tokens = generated_runs.tokenizer().encode(text)
    pieces = run.pieces.of(tokens)
    assert "".join(pieces) == text and len(pieces) == len(tokens) and "\ufffd" not in "".join(pieces)


def test_the_equation_is_one_that_gives_the_advantage() -> None:
    rewards = [1.0, 0.0, 0.5, 0.0]
    mean = sum(rewards) / 4
    sd = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 4)
    sample = sd * math.sqrt(4 / 3)
    cases = {
        "(R − mean) / std": [(1.0 - mean) / (sd + 1e-6), (1.0 - mean) / (sample + 1e-6)],
        "R − mean": [1.0 - mean],
        "R − mean of the others": [1.0 - 0.5 / 3],
        "R": [1.0],
    }
    for name, advantages in cases.items():
        for advantage in advantages:
            row = {"used": 1.0, "reward": 1.0, "advantage": advantage}
            assert training_reasons.equation(row, rewards, [])["equation"] == name
    unknown = training_reasons.equation(
        {"used": 1.0, "reward": 1.0, "advantage": 0.123}, rewards, ["  advantage A: R - V(s)"]
    )
    assert "equation" not in unknown and unknown["formula"] == "R - V(s)"


def test_every_fate_has_its_sentence() -> None:
    from posttrain.core.rollouts import Fate

    row = {"advantage": 0.0, "flags": [], "invalid": None, "kind": "rl", "reward": 0.0}
    said = {fate: training_reasons.why({**row, "fate": str(fate), "why": "longer than 512 tokens"}) for fate in Fate}
    assert len(set(said.values())) == len(Fate) and all(text.endswith(".") for text in said.values())
    assert "longer than 512 tokens" in said[Fate.FILTERED]


def test_what_a_step_changed_is_what_a_loop_adds_up(run: OpenRun, folder: Path) -> None:
    data = Answers([run]).of("0/step/3", {"by": "after"})
    changes, by_token = [], {}
    for row in read_rollouts(folder, 3, None):
        scored = [n for s in row["spans"] if s["learned"] for n in range(s["start"], s["start"] + s["length"])]
        for at, after, before in zip(scored, row["after"] or [], row["before"] or [], strict=False):
            changes.append((after - before, row["index"], at))
            by_token[row["tokens"][at]] = by_token.get(row["tokens"][at], 0.0) + after - before
    changes.sort()
    assert data["n"] == len(changes) == sum(data["histogram"]["counts"])
    assert [(d["index"], d["at"]) for d in data["down"][:5]] == [(i, at) for _, i, at in changes[:5]]
    assert data["up"][0]["value"] == pytest.approx(changes[-1][0], rel=1e-5)
    best = max(by_token, key=lambda token: by_token[token])
    assert data["vocabulary"]["up"][0]["id"] == best
    assert data["vocabulary"]["up"][0]["sum"] == pytest.approx(by_token[best], rel=1e-5)


# -- comparison --------------------------------------------------------------------------------------------------------


def test_two_runs_are_paired_task_by_task(run: OpenRun, folder: Path, tmp_path: Path) -> None:
    other = opened(generated_runs.make_run(tmp_path / "other", steps=8, groups=8, tokens=20, seed=1), "other")
    data = Answers([run, other]).of("compare", {"a": "0", "b": "1", "of_a": "eval-6", "of_b": "eval-6"})
    sides = []
    for place in (folder, other.folder):
        rows = read_rollouts(place, 6, held_out=True)
        sides.append({row["task"]: row["reward"] for row in rows if row["reward"] is not None})
    both = [task for task in sides[0] if task in sides[1]]
    assert data["n"] == len(both)
    expected = paired_interval([sides[1][t] for t in both], [sides[0][t] for t in both])
    assert (data["difference"]["low"], data["difference"]["high"]) == pytest.approx(tuple(expected), abs=1e-4)
    assert data["difference"]["mean"] == pytest.approx(np.mean([sides[1][t] - sides[0][t] for t in both]))
    assert data["worse"] == sum(sides[1][t] < sides[0][t] for t in both) and any("seeds" in w for w in data["warnings"])
    assert [o["name"] for o in data["options"]] == ["seed"]
    for opened_run, seed in ((run, None), (other, 0)):
        opened_run.about["config"] |= {"held_out": 0.2, "split_seed": seed}
    assert not any("hold out" in w for w in Answers([run, other]).of("compare", {"a": "0", "b": "1"})["warnings"])
    other.about["config"]["split_seed"] = None  # that of --seed, which differs
    assert any(
        "they hold out other tasks" in w for w in Answers([run, other]).of("compare", {"a": "0", "b": "1"})["warnings"]
    )
    del run.about["config"]["held_out"], run.about["config"]["split_seed"]


def rewritten(folder: Path, place: Path, step: int, change: Any) -> OpenRun:
    """A copy of a run with the rows of a step changed."""
    shutil.copytree(folder, place)
    file = place / "rollouts" / f"step-{step:06d}.parquet"
    rows = read_file(file).to_pylist()
    generated_runs.save(file, change(rows) or rows)
    return opened(place, place.name)


def test_two_runs_part_at_the_first_token_that_differs(run: OpenRun, folder: Path, tmp_path: Path) -> None:
    def sampled(rows: list[dict[str, Any]]) -> None:
        for index, at in ((9, 2), (6, 3)):  # the later rollout, too
            rows[index]["tokens"][rows[index]["spans"][1]["start"] + at] += 1

    other = rewritten(folder, tmp_path / "other", 3, sampled)
    told = Answers([run, other]).of("parting", {"a": "0", "b": "1"})
    at = read_rollouts(folder, 3, None)[6]["spans"][1]["start"] + 3
    assert (told["first"]["part"], told["first"]["a"], told["first"]["b"], told["first"]["at"]) == ("3", 6, 6, at)
    assert told["says"].startswith("They differ first in step 3, rollout 6") and "sampled" in told["says"]
    before = sum(len(read_rollouts(folder, step)) for step in (1, 2))
    assert f"The {before} rollouts before it are the same." in told["says"]
    assert "log-probabilities too" in told["why"] and "A drew its token with probability" in told["why"]
    assert Answers([other, run]).of("parting", {"a": "0", "b": "1"})["first"]["at"] == at


def test_what_a_parting_points_at_follows_from_where_the_token_came_from(
    run: OpenRun, folder: Path, tmp_path: Path
) -> None:
    def prompted(rows: list[dict[str, Any]]) -> None:
        rows[5]["tokens"][1] += 1

    def ended(rows: list[dict[str, Any]]) -> None:
        row = rows[5]
        row["tokens"], row["engine"] = row["tokens"][:-2], row["engine"][:-2]
        row["spans"][1]["length"] -= 2

    def weighed(rows: list[dict[str, Any]]) -> None:
        rows[4]["engine"][1] -= 0.25

    def another(rows: list[dict[str, Any]]) -> None:
        rows[0]["group"] = "another#0"

    told = {}
    for change in (prompted, ended, weighed, another):
        other = rewritten(folder, tmp_path / change.__name__, 2, change)
        told[change.__name__] = Answers([run, other]).of("parting", {})
    assert "of the prompt" in told["prompted"]["says"] and "template" in told["prompted"]["why"]
    assert "B ends before token" in told["ended"]["says"] and told["ended"]["first"]["pieces"][1] is None
    assert told["weighed"]["first"] is None and "never differ" in told["weighed"]["says"]
    assert "from step 2 on" in told["weighed"]["why"] and "in rollout 4" in told["weighed"]["why"]
    assert "is in A alone" in told["another"]["says"]
    shutil.copytree(folder, tmp_path / "same")
    same = Answers([run, opened(tmp_path / "same")]).of("parting", {})
    count = len(run.store.rows)
    assert f"all {count:,} rollouts" in same["says"] and same["why"].startswith("Nor do") and same["first"] is None


# -- the server --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(run: OpenRun, hostile: OpenRun) -> Iterator[Pages]:
    with viewing([run, hostile], TOKEN) as client:
        yield client


def test_only_who_knows_the_token_and_names_this_machine_is_answered(client: Pages) -> None:
    assert client.get(f"/{TOKEN}/").status == 200
    for path in ("/", "/api/runs", "/another/api/runs", f"/{TOKEN}x/", "//", f"/{TOKEN[:-1]}/"):
        assert client.get(path).status == 403, path
    for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:80", ""):
        assert client.get(f"/{TOKEN}/api/runs", host).status == 403, host
    assert client.get(f"/{TOKEN}/api/runs", method="POST").status == 403
    assert client.get(f"/{TOKEN}/api/runs", method="HEAD").status == 200


def test_every_answer_carries_the_policy(client: Pages) -> None:
    for path in (
        "/",
        f"/{TOKEN}/",
        f"/{TOKEN}/app.css",
        f"/{TOKEN}/api/runs",
        f"/{TOKEN}/api/nothing",
        f"/{TOKEN}/text/1/1/0",
    ):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    "path",
    ["../store.py", "%2e%2e/store.py", "vendor/../../store.py", "/etc/passwd", "picture/0/..%2frun.json", "picture/0/x",
     "api/9/overview", "api/0/rollout/1/999999", "api/0/rollout/x/1", "api/0/step/999", "api/0/rollouts?sort=1;drop",
     *(way + "9" * 5000 for way in ("text/0/1/", "api/", "picture/", "export/0?rollouts=", "api/compare?a=")),
     "api/0/rollout/1/1?begin=999999999", "api/0/rollouts?reward=x", "api/0/rollouts?where=1%3B",
     "api/compare?a=7", "export/0?rollouts=-1", "text/0/1/99999"],
)  # fmt: skip
def test_a_wrong_request_is_refused_in_one_line_and_nothing_breaks(client: Pages, path: str) -> None:
    answer = client.get(f"/{TOKEN}/{path}")
    assert answer.status in (200, 400, 403, 404)
    if answer.status != 200:
        assert "\n" not in answer.json()["problem"]
    assert client.get(f"/{TOKEN}/api/runs").status == 200


def test_hostile_texts_arrive_as_the_texts_they_are(client: Pages) -> None:
    rows = client.get(f"/{TOKEN}/api/1/rollouts").json()["rows"]
    said = list(generated_runs.HOSTILE.values())
    assert len(rows) == len(said)
    for row, text in zip(rows, said, strict=True):
        assert len(row["text"]) <= 80
        if "\ud83d" not in text and "\x00" not in text:
            assert row["text"] == text[:80]
    long = client.get(f"/{TOKEN}/api/1/rollout/1/6")
    assert len(long.content) < 200_000 and long.json()["characters"] == 10_000_000
    whole = client.get(f"/{TOKEN}/text/1/1/6")
    assert len(whole.content) == 10_000_000 and whole.headers["content-type"].startswith("text/plain")
    assert "attachment" in whole.headers["content-disposition"]


# -- files -------------------------------------------------------------------------------------------------------------


def test_what_is_not_ours_is_as_it_was_published() -> None:
    vendor = STATIC / "vendor"
    for line in (vendor / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == digest, name
    assert {p.name for p in vendor.glob("LICENSE*")} == {"LICENSE.htm", "LICENSE.preact", "LICENSE.uplot"}


def test_no_script_makes_html_of_text() -> None:
    for path in STATIC.glob("*.js"):
        text = path.read_text()
        for name in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "dangerouslySetInnerHTML",
            "eval(",
        ):
            assert name not in text, f"{path.name}: {name}"


def test_the_modules_of_the_front_end_make_one_script() -> None:
    script = bundled()
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)
    names = re.findall(r"^(?:async )?(?:function|const|let|class) (\w+)", script, re.MULTILINE)
    assert len(names) == len(set(names)), {name for name in names if names.count(name) > 1}


def test_an_exported_file_stands_alone_and_is_small(tmp_path: Path) -> None:
    run = opened(generated_runs.make_run(tmp_path / "run", steps=4, groups=16, group=8, tokens=500, evals=0))
    page = exported(run, Selection())
    text = page.decode()
    assert len(page) < 5_000_000, f"{len(page):,} bytes"
    assert "<script src" not in text and "default-src 'none'" in text


def test_one_run_is_exported_and_a_wrong_selection_refused(run: OpenRun, hostile: OpenRun) -> None:
    assert b"window.pwned" not in exported(hostile, Selection())
    with pytest.raises(UserError, match="fits"):
        exported(run, Selection(where="reward > 100"))
    with pytest.raises(UserError, match="rollouts is a number"):
        Selection.of({"rollouts": "x"})


WRONG: list[tuple[list[str], str]] = [
    (["--where", "nothing = 1"], "--where: .*nothing.*; the columns are step.* animal"),
    (["--where", "reward >"], "--where: "),
    (["--where", "length"], "a condition is true or false"),
    (["--where", "1=1; drop table base"], "--where: "),
    (["--rollouts", "5001"], "rollouts is a number from 1 to 5000"),
    (["--export", "no/such/folder/run.html"], "there is no folder"),
]


@pytest.mark.parametrize("words, said", WRONG, ids=str)
def test_a_wrong_export_is_refused_before_a_rollout_is_read(
    folder: Path, tmp_path: Path, words: list[str], said: str, monkeypatch: Any, capsys: Any
) -> None:
    def forbidden(run: OpenRun) -> None:
        raise AssertionError("work has begun")

    monkeypatch.setattr(OpenRun, "read", forbidden)
    given = ["view", str(folder), *(["--export", str(tmp_path / "run.html")] if "--export" not in words else [])]
    assert main([*given, *words]) == 2
    told = capsys.readouterr().err.strip()
    assert re.search(said, told) and "\n" not in told
    assert not list(tmp_path.iterdir())


def test_a_condition_of_an_export_names_parts_of_the_reward(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    assert main(["view", str(folder), "--export", str(file), "--where", "animal > 0.4 and step < 3"]) == 0
    assert file.stat().st_size > 50_000


def test_what_is_replayed_from_earlier_steps_is_told_apart(folder: Path, tmp_path: Path, capsys: Any) -> None:
    earlier = read_file(folder / "rollouts" / "step-000002.parquet").to_pylist()[:5]

    def replay(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        again = [{**row, "step": 4, "index": len(rows) + n, "replayed": True} for n, row in enumerate(earlier)]
        return rows + again

    other = rewritten(folder, tmp_path / "again", 4, replay)
    own = found(other, replayed="1")
    assert len(own) == 5 and {row["step"] for row in own} == {4} and all(row["replayed"] for row in own)
    assert len(found(other, replayed="0")) == len(found(other)) - 5
    assert dict(Answers([other]).of("0/histograms", {"held": "0"})["replayed"])[True] == 5
    data = Answers([other]).of(f"0/rollout/4/{own[3]['index']}", {})
    assert data["first"] == {"step": 2, "index": 3} and Answers([other]).of("0/rollout/2/3", {})["first"] is None
    question = ViewQuestion.of({"replayed": "1"}, other.store)
    with Questions(other.folder) as terminal:
        assert len(terminal.ask(question.sql())[1]) == 5
    assert main(["rollouts", str(other.folder), "--step", "4"]) == 0
    assert "5 rollouts of earlier steps, replayed in this one" in capsys.readouterr().out


def test_replies_are_told_apart_by_more_than_their_beginning(folder: Path, tmp_path: Path) -> None:
    def begun_alike(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["text"] = "Let me think about this step by step. " * 5 + f"{row['member']} {row['task']}"

    other = rewritten(folder, tmp_path / "alike", 5, begun_alike)
    assert {row["replies"] for row in found(other, step="5", **{"as": "groups"})} == {8}
    alike = next(
        panel
        for question in Answers([other]).of("0/overview", {})["questions"]
        for panel in question["panels"]
        if "alike" in panel["title"]
    )
    assert "400 characters" in alike["about"] and alike["lines"][0]["values"][alike["steps"].index(5)] == 0


def test_questions_of_the_overview_are_answered_for_every_verb(run: OpenRun, tmp_path: Path) -> None:
    items = opened(generated_runs.make_items(tmp_path / "items"))
    for one in (run, items):
        data = Answers([one]).of("0/overview", {})
        assert data["questions"][0]["name"] == "Is it learning?" and len(data["questions"]) == 4
        assert all(q["word"] and q["text"] for q in data["questions"])
        json.dumps(data, allow_nan=False)
    learning = Answers([run]).of("0/overview", {})["questions"][0]
    assert learning["word"] in ("yes", "yes, but")
    (groups,) = (panel for panel in learning["panels"] if panel["title"] == "Groups")
    right, mixed, wrong = (line["values"] for line in groups["lines"])
    assert all(abs(a + b + c - 1) < 1e-5 for a, b, c in zip(right, mixed, wrong, strict=True))


def test_a_gap_of_replies_that_may_be_old_is_no_sign_of_a_stale_engine() -> None:
    metrics: dict[str, list[float | None]] = {"sampler/gap": [1e-6, 0.3, 0.4], "sampler/gap/max": [1e-5, 2.0, 3.0]}
    assert "other weights" in verdicts(metrics, {})["Is it stable?"]["text"]
    aged = verdicts({**metrics, "staleness": [0.0, 1.0, 2.0], "staleness/max": [0.0, 2.0, 4.0]}, {})["Is it stable?"]
    assert aged["word"] == "yes" and "replies up to 4 updates old" in aged["text"]
    stale = verdicts({**metrics, "staleness": [0.0, 0.0, 2.0]}, {})["Is it stable?"]
    assert stale["word"] == "look"


def test_a_picture_is_not_shown_by_its_hash_in_lists(tmp_path: Path) -> None:
    seen = opened(generated_runs.make_seen(tmp_path / "seen"))
    [first, *_] = found(seen)
    assert first["prompt"].startswith("▣ task") and found(seen, q="once there was")


def test_parts_of_an_address_are_read_back() -> None:
    for part in (RolloutPart(12, False), RolloutPart(0, True), RolloutPart(999999, True)):
        assert RolloutPart.of(part.name) == part
    assert RolloutPart.of("x") is None and RolloutPart.of("-1") is None and RolloutPart.of("1ee") is None
