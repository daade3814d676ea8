"""The tables of rollouts: what any library reads in them, what is rounded, older files, the index, questions in SQL."""

import json
import shutil
import sqlite3
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from posttrain.cli.main import main
from posttrain.core.rollouts import Branch, Fate, Outcome, PlayedTurn, Rollout
from posttrain.core.transcripts import Media, SpanKind, Transcript
from posttrain.core.types import Completion, Invalid, InvalidKind, StopReason, ToolCall, UserError
from posttrain.runs.record import rollout_index
from posttrain.runs.record.rollout_reading import EVERY, read_file, read_rollouts, read_table, rows_of
from posttrain.runs.record.rollout_rows import transcripts_of
from posttrain.runs.record.rollout_tables import rollouts_table, seconds_table
from posttrain.runs.record.schema import COMPARED, KEY, NUMBERS, PIECE, ROLLOUTS, VERSION
from posttrain.runs.record.sql_query import Questions
from posttrain.runs.record.table_writer import half, write_table
from posttrain.runs.run_record import RunRecord
from posttrain.runs.terminal.printing import sample


def said(seed: int, length: int = 4, version: int = 3) -> Transcript:
    logp = np.log(np.random.default_rng(seed).random(length)).astype(np.float32).tolist()
    transcript = Transcript()
    transcript.observe([5, 6, 7])
    transcript.sample(Completion(0, list(range(length)), logp, "", StopReason.EOS, version))
    return transcript


def conversation() -> Rollout:
    """Two contexts, a call of a tool, a picture, a branch, all that a row has room for."""
    first, second = said(1), said(2, 5, version=4)
    first.observe([8, 9], SpanKind.TOOL, [Media(0, 2, "ab" * 32, (1, 1, 2))])
    second.forks = (3,)
    call = ToolCall("search", {"query": "6*7", "most": 3}, 12)
    turns = [
        PlayedTurn(SpanKind.PROMPT, "Q", 0, 0, 3, seconds=0.25),
        PlayedTurn(SpanKind.SAMPLED, "look", 0, 3, 4, 0.5, 1.5, 0, (call,)),
        PlayedTurn(SpanKind.TOOL, "42", 0, 7, 2, cut=1),
        PlayedTurn(SpanKind.SAMPLED, "it is 42", 1, 3, 5),
    ]
    return Rollout(
        {"id": "17", "prompt": "Q", "answer": [42], "level": 3},
        "17#2",
        [first, second],
        1.5,
        {"right": 1.0, "form": 0.5},
        [(4, 0.5)],
        StopReason.TURNS,
        turns,
        "lookit is 42",
        "Q",
        [("judge", {"score": 3}), ("search", Invalid("no answer"))],
        "black",
        branch=Branch(0, 2, (4, 0)),
        seconds=0.125,
    )


def outcomes() -> list[Outcome]:
    rng = np.random.default_rng(0)
    numbers = {name: rng.normal(size=9).astype(np.float32) for name in (*NUMBERS, "kept")}
    plain = Rollout({"id": "18"}, "18#0", [said(3)], 0.0, text="no")
    late = Invalid("took too long", InvalidKind.TIMEOUT)
    return [
        Outcome(conversation(), -0.75, Fate.TRAINED, "", ("moved by KL",), -0.25, 0.125, numbers=numbers),
        Outcome(Rollout({"id": "17"}, "17#2", [], late, side="black")),
        Outcome(plain, 0.0, Fate.EQUAL, "all rewards are 0"),
    ]


def recorded(folder: Path, steps: int = 2) -> Path:
    record = RunRecord.create(folder, {"seed": 0}, "rl", {})
    for step in range(1, steps + 1):
        record.rollouts(step, outcomes())
        record.metrics(step, {"reward": step / 4, "rollouts": 3})
        if step % 2 == 0:
            record.evaluated(step, [Outcome(Rollout({"id": "held"}, "held", [said(9)], 1.0, text="yes"))])
    record.close({})
    return folder


# -- rows --------------------------------------------------------------------------------------------------------------


def test_a_row_has_all_that_was_known_of_a_rollout(tmp_path: Path) -> None:
    first, second, third = read_rollouts(recorded(tmp_path), 1, EVERY)
    assert (first["task"], first["epoch"], first["member"], first["side"], first["kind"]) == ("17", 2, 0, "black", "rl")
    assert first["columns"] == {"prompt": "Q", "answer": [42], "level": 3}
    assert (first["reward"], first["shaping"], first["penalty"], first["used"]) == (1.5, -0.25, 0.125, 1.125)
    assert (first["advantage"], first["fate"], first["flags"]) == (-0.75, "trained", ["moved by KL"])
    assert (first["stop"], first["truncated"], first["version"], first["versions"]) == ("turns", True, 3, [3, 4])
    assert (first["sampled"], first["scored"], first["length"], first["total"]) == (9, 9, 9, 17)
    assert first["answers"] == [
        {"service": "judge", "answer": {"score": 3}},
        {"service": "search", "invalid": "no answer"},
    ]
    assert (first["branch_of"], first["branch_turns"], first["branch_taken"]) == (0, 2, [4, 0])
    assert first["media"] == ["ab" * 32] and first["parts"] == {"right": 1.0, "form": 0.5}
    assert first["turns"][1]["calls"] == [
        {"tool": "search", "arguments": {"query": "6*7", "most": 3}, "end": 12, "problem": None}
    ]
    assert [turn["cut"] for turn in first["turns"]] == [0, 0, 1, 0]
    read, written = transcripts_of(first), conversation().transcripts
    assert [t.as_dict() for t in read] == [t.as_dict() for t in written]
    assert (second["member"], second["reward"], second["used"]) == (1, None, None)
    assert (second["invalid"], second["invalid_kind"]) == ("took too long", "timeout")
    assert (third["fate"], third["why"], third["learner"]) == ("equal group", "all rewards are 0", None)


def test_bytes_in_a_task_are_counted_and_other_columns_stand_as_they_are() -> None:
    task = {
        "id": "a",
        "answer": 7,
        "raw": b"\x00" * 1000,
        "messages": [{"role": "user", "content": "hi"}],
        "odd": {1},
    }
    (row,) = rows_of(rollouts_table(1, [Outcome(Rollout(task, "a#0", [], 0.0))], "rl"))
    assert row["columns"] == {
        "answer": 7, "raw": "1000 bytes", "messages": [{"role": "user", "content": "hi"}], "odd": "{1}",
    }  # fmt: skip


def test_what_is_said_of_a_rollout_in_other_words_stands_in_its_row() -> None:
    seeing = said(4)
    seeing.observe([8, 9], SpanKind.TOOL, [Media(8, 1, "cd" * 32, (1, 1, 1))])
    turns = [PlayedTurn(SpanKind.PROMPT, "Q", 0, 0, 3), PlayedTurn(SpanKind.SAMPLED, "yes", 1, 3, 4, seconds=0.5)]
    second = Rollout(
        {"id": "a"}, "a#0", [said(3), seeing], float("inf"), turns=turns, text="yes", prompt="Q", seconds=2.0
    )
    given = [
        Outcome(Rollout({"id": "a"}, "a#0", [said(1)], 1.0, seconds=1.0), replayed=True),
        Outcome(second, float("nan"), shaping=float("inf"), member=5, label={"labels": [1.0]}),
    ]
    _, row = rollouts_table(1, given, "prefer").to_pylist()
    assert (row["member"], row["fate"], row["label"]) == (5, "trained", '{"labels":[1.0]}')
    assert [row[name] for name in ("reward", "shaping", "used", "advantage")] == [None] * 4
    assert [turn["text"] for turn in row["turns"]] == [None, None]  # they are the prompt and the text of the row
    assert row["pictures"] == [{"name": "cd" * 32, "start": 7 + 8, "length": 1, "grid": [1, 1, 1]}]
    assert [row["fate"] for row in rollouts_table(1, given, "eval").to_pylist()] == [None, None]
    assert seconds_table(given).to_pylist() == [{"index": 1, "reward": 2.0, "turns": [0.0, 0.5]}]


def test_numbers_of_tokens_keep_eleven_bits_and_the_engines_all(tmp_path: Path) -> None:
    row, *_ = read_rollouts(recorded(tmp_path), 1, EVERY)
    given = outcomes()[0].numbers
    for name in NUMBERS:
        assert row[name] == (given[name] if name in COMPARED else half(given[name])).tolist(), name
        assert np.allclose(row[name], given[name], rtol=2.0**-11, atol=0)
    (bare,) = rollouts_table(1, [replace(outcomes()[0], numbers={**given, "after": None})], "rl").to_pylist()  # type: ignore[dict-item]
    assert bare["after"] is None and all(bare[name] == half(given[name]).tolist() for name in COMPARED[:2])
    assert row["kept"] == [True] * 9
    engine = [value for transcript in conversation().transcripts for value in transcript.logp]
    assert row["engine"] == engine


def test_rounding_is_to_the_nearest_and_half_precisions_own_within_its_range() -> None:
    values = np.random.default_rng(0).normal(scale=10, size=10_000).astype(np.float32)
    assert (half(values) == values.astype(np.float16).astype(np.float32)).all()
    beyond = np.array([1e-30, 1e30, 0.0, -0.0, np.inf, -np.inf], np.float32)
    assert np.allclose(half(beyond), beyond, rtol=2.0**-11) and np.isnan(half([np.nan])).all()
    assert (half(values).view(np.uint32) & 0x1FFF == 0).all()


def test_the_bytes_of_a_file_follow_from_its_rows_alone(tmp_path: Path) -> None:
    tables = [rollouts_table(7, outcomes(), "rl") for _ in range(2)]
    for name, table in zip("ab", tables, strict=True):
        write_table(tmp_path / name, table)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert parquet.read_table(tmp_path / "a").equals(tables[0]) and not list(tmp_path.glob("*.tmp"))
    assert parquet.read_schema(tmp_path / "a").metadata[KEY] == VERSION.encode()


def test_some_rollouts_of_a_large_step_are_read_without_the_others(tmp_path: Path) -> None:
    many = [Outcome(Rollout({"id": f"{n}"}, f"{n}#0", [said(n, 2000)], float(n))) for n in range(150)]
    write_table(tmp_path / "a.parquet", table := rollouts_table(7, many, "rl"))
    assert parquet.ParquetFile(tmp_path / "a.parquet").num_row_groups == 3
    for places in ([149, 3, 64, 63, 3], [0], []):
        assert read_file(tmp_path / "a.parquet", None, places).equals(table.take(pa.array(places, pa.int64())))
    with pytest.raises(UserError, match="there is no rollout 150: there are 150"):
        read_file(tmp_path / "a.parquet", None, [150])


def test_a_table_of_another_version_or_of_something_else_is_refused(tmp_path: Path) -> None:
    table = rollouts_table(7, outcomes(), "rl")
    write_table(tmp_path / "other.parquet", table.replace_schema_metadata({KEY: b"0"}))
    parquet.write_table(pa.table({"a": [1]}), tmp_path / "strange.parquet")
    for name in ("other", "strange"):
        with pytest.raises(UserError, match="holds no rollouts of this version of posttrain"):
            read_file(tmp_path / f"{name}.parquet")
    (tmp_path / "a.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"a.jsonl is not a file of rollouts: give one, whose name ends in .parquet"):
        read_file(tmp_path / "a.jsonl")


# -- other libraries ---------------------------------------------------------------------------------------------------


def checked(rows: list[dict[str, Any]]) -> None:
    """Whether a library has found what was written."""
    assert [row["group"] for row in rows] == ["17#2", "17#2", "18#0"]
    assert [row["fate"] for row in rows] == ["trained", "trained", "equal group"]
    assert list(rows[0]["tokens"]) == conversation().transcripts[0].tokens + conversation().transcripts[1].tokens
    assert np.allclose(np.array(list(rows[0]["learner"])), outcomes()[0].numbers["learner"], rtol=2.0**-11)
    assert [turn["role"] for turn in rows[0]["turns"]] == ["prompt", "sampled", "tool", "sampled"]
    assert rows[0]["turns"][1]["calls"][0]["tool"] == "search"


def test_pandas_opens_the_rollouts(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(recorded(tmp_path) / "rollouts" / "step-000001.parquet")
    checked(frame.to_dict("records"))
    assert frame.groupby("fate").reward.mean()["equal group"] == 0.0


def test_polars_opens_the_rollouts_of_all_steps(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    frame = polars.read_parquet(recorded(tmp_path) / "rollouts" / "*.parquet")
    assert frame.height == 6
    checked(frame.filter(polars.col("step") == 1).to_dicts())


def test_duckdb_opens_the_rollouts(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    path = recorded(tmp_path) / "rollouts" / "*.parquet"
    found = duckdb.connect().sql(f"select * from '{path}' where step = 2 order by index").to_arrow_table()
    checked(found.to_pylist())


def test_datasets_opens_the_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    files = {"train": str(recorded(tmp_path / "run") / "rollouts" / "*.parquet")}
    found = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert len(found) == 6
    checked([found[place] for place in range(3)])


# -- the index ---------------------------------------------------------------------------------------------------------


def test_the_index_of_a_run_is_whole_when_it_ends_and_made_again_when_it_is_not(tmp_path: Path) -> None:
    folder = recorded(tmp_path, PIECE + 2)
    left = sorted((folder / "index").iterdir())
    assert [path.name for path in left] == ["000000-000049.parquet", "000050-000099.parquet"]
    before = {path: path.read_bytes() for path in left}
    assert rollout_index.open_index(folder) == left and {path: path.read_bytes() for path in left} == before
    first = parquet.read_table(left[0])
    assert first.num_rows == 3 * (PIECE - 1) + PIECE // 2 - 1
    assert first["text_start"][0].as_py() == "lookit is 42" and "tokens" not in first.column_names
    left[0].unlink()
    left[1].write_bytes(b"damaged")
    assert rollout_index.open_index(folder) == left and {path: path.read_bytes() for path in left} == before
    (folder / "rollouts" / "step-000003.parquet").unlink()
    rollout_index.open_index(folder)
    assert parquet.read_table(left[0]).num_rows == first.num_rows - 3


def test_a_run_that_cannot_be_written_is_indexed_elsewhere(tmp_path: Path) -> None:
    one, two = (recorded(tmp_path / name, steps) for name, steps in (("one", 1), ("two", 2)))
    for folder in (one, two):
        shutil.rmtree(folder / "index")
        (folder / "index").write_text("in the way")
    found = [rollout_index.open_index(folder) for folder in (one, two)]
    rows = [sum(parquet.read_table(path).num_rows for path in paths) for paths in found]
    assert rows == [3, 7] and not any(tmp_path in path.parents for paths in found for path in paths)
    assert (one / "index").read_text() == "in the way"


def test_a_resumed_run_forgets_the_index_of_what_it_plays_again(tmp_path: Path) -> None:
    folder = recorded(tmp_path, PIECE + 2)
    RunRecord.resume(folder, PIECE + 1).close({})
    assert [path.name for path in (folder / "index").iterdir()] == ["000000-000049.parquet"]
    made = rollout_index.open_index(folder)
    assert parquet.read_table(made[1])["step"].to_pylist()[-1] <= PIECE + 1


def test_a_damaged_file_costs_the_index_its_own_rows_alone(tmp_path: Path) -> None:
    folder = recorded(tmp_path, 3)
    (folder / "rollouts" / "step-000002.parquet").write_bytes(b"PAR1")
    (made,) = rollout_index.open_index(folder)
    assert sorted(set(parquet.read_table(made)["step"].to_pylist())) == [1, 2, 3], "2 is that of the evaluation"


# -- questions ---------------------------------------------------------------------------------------------------------


def answer(folder: Path, sql: str, **limits: float) -> list[tuple[Any, ...]]:
    pytest.importorskip("duckdb")
    with Questions(folder, **limits) as questions:
        return questions.ask(sql)[1]


def test_every_table_of_a_run_answers(tmp_path: Path) -> None:
    folder = recorded(tmp_path, 4)
    assert answer(folder, "select fate, count(*) from rollouts group by fate order by 1") == [
        ("equal group", 4),
        ("trained", 8),
    ]
    assert answer(folder, "select count(*), sum(cast(held_out as int)) from rollout_index") == [(14, 2)]
    assert answer(folder, "select step, kind, text from evals order by step") == [
        (2, "eval", "yes"),
        (4, "eval", "yes"),
    ]
    assert answer(folder, "select m.reward, r.text from metrics m join rollouts r using (step) where r.index = 2 "
                  "and step = 3") == [(0.75, "no")]  # fmt: skip
    assert answer(folder, "select step, turns[2] from seconds where index = 0 order by step")[:2] == [
        (1, 1.5),
        (2, 1.5),
    ]
    assert answer(folder, "select count(*) from health") == [(0,)]
    assert answer(folder, "with a as (select unnest(tokens) as t from rollouts) select max(t) from a") == [(9,)]


def test_each_token_has_a_row_with_the_numbers_that_stand_at_it(tmp_path: Path) -> None:
    """A loop over the spans says which value of a list is whose."""
    pytest.importorskip("duckdb")
    folder = recorded(tmp_path, 2)
    words = [f"word {n}" for n in range(12)]
    expected = {}
    for held_out, steps in ((False, (1, 2)), (True, (2,))):
        for row in (row for step in steps for row in read_rollouts(folder, step, EVERY, held_out)):
            scored = sampled = 0
            for span in row["spans"]:
                for at in range(span["start"], span["start"] + span["length"]):
                    own = dict.fromkeys(("engine", *NUMBERS, "kept"))
                    if span["kind"] == "sampled":
                        own["engine"] = row["engine"][sampled]
                        sampled += 1
                    if span["learned"]:
                        own |= {name: row[name][scored] for name in (*NUMBERS, "kept") if row[name] is not None}
                        scored += 1
                        own["advantage"] = (
                            row["advantage"] if own["token_advantage"] is None else own["token_advantage"]
                        )
                    own |= {"origin": span["kind"], "token": row["tokens"][at], "version": span["version"]}
                    expected[row["step"], held_out, row["index"], at] = own
    names = ("origin", "token", "version", "engine", "learner", "weight", "entropy", "after", "advantage", "kept")
    with Questions(folder, vocabulary=lambda: words) as questions:
        sql = f"""select step, held_out, "index", place, text, {", ".join(names)}, ratio, before from tokens"""
        _, rows = questions.ask(sql)
    assert {row[:4] for row in rows} == expected.keys() and len(rows) == len(expected) > 40
    for row in rows:
        own = expected[row[:4]]
        assert row[4] == words[own["token"]]
        for name, value in zip(names, row[5:], strict=False):
            assert value == own.get(name), (row[:4], name)
        if own["learner"] is not None:
            assert row[-2] == pytest.approx(np.exp(own["learner"] - own["before"]), rel=1e-5)
        else:
            assert row[-2] is None


def test_tokens_that_are_sampled_and_not_learned_keep_their_log_probabilities(tmp_path: Path) -> None:
    """The engine's values are of all sampled tokens, in their order, whichever of them are learned."""
    pytest.importorskip("duckdb")
    written, own = Transcript(), np.linspace(-3, -0.5, 6, dtype=np.float32).tolist()
    written.observe([5, 6])
    written.sample(Completion(0, [7, 8], own[:2], "", StopReason.STOP, 3), learn=False)
    written.observe([9])
    written.sample(Completion(0, [4, 3, 2], own[2:5], "", StopReason.STOP, 3))
    written.sample(Completion(0, [1], own[5:], "", StopReason.EOS, 3), learn=False)
    record = RunRecord.create(tmp_path, {"seed": 0}, "rl", {})
    learner = np.array([-1.0, -2.0, -3.0], np.float32)
    record.rollouts(1, [Outcome(Rollout({"id": "a"}, "a#0", [written], 1.0), 0.5, numbers={"learner": learner})])
    record.close({})
    (row,) = read_rollouts(tmp_path, 1, EVERY)
    assert [t.as_dict() for t in transcripts_of(row)] == [written.as_dict()]
    found = answer(tmp_path, "select engine, learner from tokens order by place")
    assert [engine for engine, _ in found] == [None, None, *own[:2], None, *own[2:]]
    assert [logp for _, logp in found] == [None] * 5 + [-1.0, -2.0, -3.0] + [None]


def test_only_the_steps_that_a_question_on_tokens_names_are_read(tmp_path: Path) -> None:
    folder = recorded(tmp_path, 4)
    (folder / "rollouts" / "step-000003.parquet").write_bytes(b"no table")
    with pytest.raises(UserError, match="step-000003.parquet is damaged"):
        answer(folder, "select count(*) from tokens")
    with Questions(folder, only={(1, False), (4, False)}) as questions:
        assert {row[0] for row in questions.ask("select distinct step from tokens")[1]} == {1, 4}


def test_tokens_without_a_tokenizer_have_ids_alone(tmp_path: Path) -> None:
    folder = recorded(tmp_path, 1)
    assert answer(folder, "select count(*) from tokens where token = 5")[0][0] > 0
    with pytest.raises(UserError, match="tokenizer is missing.*select them by id"):
        answer(folder, "select count(*) from tokens where text = 'wait'")


@pytest.mark.parametrize(
    "sql",
    [
        "copy (select 1) to 'out.csv'",
        "copy rollouts to 'out.parquet'",
        "attach 'other.db'",
        "install httpfs",
        "load httpfs",
        "pragma database_list",
        "set memory_limit = '1TB'",
        "call pragma_version()",
        "export database 'out'",
        "create table a as select 1",
        "insert into metrics values (1)",
        "drop view rollouts",
        "explain analyze select 1",
        "select 1; select 2",
        "select 1; copy (select 1) to 'out.csv'",
        "",
    ],
)
def test_what_is_no_single_select_is_refused_in_one_line(tmp_path: Path, sql: str) -> None:
    folder = recorded(tmp_path / "run", 1)
    with pytest.raises(UserError, match="a question must be one SELECT statement") as told:
        answer(folder, sql)
    assert "\n" not in str(told.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_question_reads_no_file_but_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = recorded(tmp_path / "run", 1)
    other = tmp_path / "other.parquet"
    write_table(other, rollouts_table(7, outcomes(), "rl"))
    (tmp_path / "secret.txt").write_text("secret")
    with sqlite3.connect(tmp_path / "a.db") as base:
        base.execute("create table a (b)")
    secret = pa.table({"a": [1]})  # a variable of Python's that a name could reach
    assert secret.num_rows == 1
    for sql in (
        f"select * from '{other}'",
        f"select * from read_parquet('{other}')",
        f"select * from read_text('{tmp_path / 'secret.txt'}')",
        f"select * from read_blob('{folder / 'run.json'}')",
        f"select * from glob('{tmp_path}/*')",
        f"select * from read_csv('{tmp_path}/secret.txt')",
        f"select * from sqlite_scan('{tmp_path / 'a.db'}', 'a')",
        "select * from read_text('https://example.com')",
        "select * from secret",
    ):
        with pytest.raises(UserError, match="cannot be answered") as told:
            answer(folder, sql)
        assert "\n" not in str(told.value), sql
    assert answer(folder, "select count(*) from rollouts") == [(3,)]


def test_a_question_has_a_time_and_a_memory(tmp_path: Path) -> None:
    folder = recorded(tmp_path, 1)
    with pytest.raises(UserError, match=r"took longer than 0.2 s: narrow it, or raise --timeout"):
        answer(
            folder, "select count(*) from range(1000000000) a, range(1000) b where a.range + b.range > 5", seconds=0.2
        )
    with pytest.raises(UserError, match="needs more memory"):
        answer(folder, "select list(range) from range(100000000)", gib=0.1)


@pytest.mark.parametrize(
    "sql",
    [
        "select count(*) from rollouts a, rollouts b, range(10000000) c, range(10000000) d "
        "where a.reward + b.reward + c.range * d.range > 7",
        "select a.range from range(10000000) a, range(10000000) b where a.range * b.range = -1",
        "with recursive r(n) as (select 1 union all select n + 1 from r) select max(n) from r",
    ],
)
def test_a_question_that_would_never_end_ends_in_time_and_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sql: str
) -> None:
    folder, begin = str(recorded(tmp_path, 1)), time.monotonic()
    assert main(["query", folder, sql, "--timeout", "0.5"]) == 2
    assert time.monotonic() - begin < 20
    told = capsys.readouterr().err.strip()
    assert "took longer than 0.5 s: narrow it, or raise --timeout" in told and "\n" not in told


def test_the_command_prints_a_table_or_lines_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("duckdb")
    folder = str(recorded(tmp_path, 1))
    assert main(["query", folder, "select text, reward, tokens from rollouts where index <> 1 order by index"]) == 0
    head, names, first, *_ = capsys.readouterr().out.splitlines()
    assert head.strip() == "2 rows" and names.split() == ["text", "reward", "tokens"] and "lookit is 42" in first
    assert main(["query", folder, "select text from rollouts order by index", "--json", "--number", "1"]) == 0
    assert json.loads(capsys.readouterr().out) == {"text": "lookit is 42"}
    assert main(["query", folder, "select nothing"]) == 2
    assert main(["rollouts", folder, "--step", "1", "--json", "--number", "1"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["flags"] == ["moved by KL"] and len(row["weight"]) == 9
    assert row.keys() <= {*ROLLOUTS.names, "id"}


def test_evaluated_rollouts_are_printed_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(recorded(tmp_path, 2))
    assert main(["rollouts", folder, "--held-out"]) == 0
    assert "held [0] ── reward 1" in capsys.readouterr().out
    assert main(["rollouts", folder, "--held-out", "--step", "1"]) == 2
    assert rows_of(read_table(folder, 2, held_out=True))[0]["kind"] == "eval"


def test_given_rows_are_printed_with_what_was_said_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = RunRecord.create(tmp_path, {"seed": 0}, "prefer", {})
    given = [Rollout({"id": "a"}, "a#0", [said(n)], 0.0, text=f"reply {n}") for n in (0, 1)]
    label = {"comparisons": [[0, 1, 1.0, 0.0]], "labels": [0.5]}
    record.rollouts(1, [Outcome(r, None, member=n, label=label) for n, r in enumerate(given)], "prefer")
    record.close({})
    rows = read_rollouts(tmp_path, 1)
    assert [(row["kind"], row["member"], row["label"]) for row in rows] == [("prefer", 0, label), ("prefer", 1, label)]
    sample([{**row, "reward": None} for row in rows], 2)
    shown = capsys.readouterr().out
    assert "── a#0 ── response 0, 0 over 1, label 0.5 ── trained ── ended by eos" in shown and "response 1" in shown
