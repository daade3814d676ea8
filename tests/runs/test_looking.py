"""What somebody is told who looks at runs from a terminal: which rollouts these are, where runs are, what went wrong."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import generated_runs
import pytest

from posttrain.cli.main import main
from posttrain.runs.lock import Lock, in_use
from posttrain.runs.record.schema import ROLLOUTS
from posttrain.runs.record.sql_query import TABLES
from posttrain.runs.terminal.printing import table


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    generated_runs.make_run(place / "a", steps=3, groups=2, group=2, tokens=6)
    generated_runs.make_run(place / "b", steps=1, groups=1, group=2, tokens=6, evals=0)
    return place


@pytest.fixture(autouse=True)
def there(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    """What a command says, in one line."""
    assert main(list(words)) == code
    captured = capsys.readouterr()
    return " ".join((captured.err if code else captured.out).split())


# -- where runs are ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["rollouts", "query", "view"])
def test_a_folder_without_a_run_is_told_where_runs_are(
    verb: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(folder: str | Path) -> str:
        return told(capsys, verb, str(folder), *(["select 1"] if verb == "query" else []))

    pytest.importorskip("duckdb")
    assert "holds no run: there are" in said(".") and {"a", "b"} <= set(said(".").replace(",", "").split())
    assert "there is no such folder; there are" in said("nope")
    assert said("no/such") == "posttrain: no/such holds no run: there is no such folder"
    assert said("a/rollouts") == "posttrain: a/rollouts holds no run: it is part of the run a: pass that"
    assert f"it is part of the run {runs / 'a'}: pass that" in said(runs / "a" / "evals")
    assert said(tmp_path).endswith("pass a folder with a run.json in it")
    Lock(tmp_path)
    assert said(tmp_path).endswith("it has just begun: try again in a few seconds")


def test_a_run_that_was_killed_is_not_in_use(tmp_path: Path) -> None:
    code = (
        "from posttrain.runs.lock import *; import sys; held = Lock(Path(sys.argv[1])); print(1, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None and owner.stdout.read(1) == b"1"
        assert in_use(tmp_path)
        owner.kill()
    assert (tmp_path / "lock").exists() and not in_use(tmp_path)
    lock = Lock(tmp_path)  # which the look has not taken
    assert in_use(tmp_path)
    lock.release()
    assert not in_use(tmp_path) and not in_use(tmp_path / "nowhere")


# -- posttrain rollouts ------------------------------------------------------------------------------------------------


def test_a_printed_rollout_says_which_it_is_and_what_became_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, "rollouts", "a", "--step", "2", "--number", "1", code=0)
    assert main(["rollouts", "a", "--step", "2", "--number", "1", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert f"── {row['group']} [{row['member']}] ── reward" in said
    assert f"── {row['fate']}" in said and f"── ended by {row['stop']}" in said
    assert all(f"{name} " in said for name in row["parts"])
    assert "1 of 4 rollouts of step 2: --number shows more" in said
    assert row.keys() == {*ROLLOUTS.names, "id"}, "what is not known is null, not missing"


def test_those_that_are_asked_for_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    def rows(order: str) -> list[dict[str, Any]]:
        assert main(["rollouts", "a", "--json", "--number", "99", "--order", order]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    invalid = [row["invalid"] is not None for row in rows("invalid")]
    assert invalid == sorted(invalid, reverse=True)
    rewards = [row["reward"] for row in rows("worst") if row["reward"] is not None]
    assert rewards == sorted(rewards) and next(row["reward"] for row in rows("best")) == rewards[-1]


def test_rollouts_of_a_task_are_found_by_its_name_or_that_of_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", "a", "--json", "--number", "9"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for name in (rows[0]["task"], rows[0]["group"]):
        assert main(["rollouts", "a", "--json", "--number", "9", "--group", name]) == 0
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert found and found == [row for row in rows if row["task"] == rows[0]["task"]]
    said = told(capsys, "rollouts", "a", "--group", "nobody's")
    assert 'there are no rollouts of "nobody\'s" in step 3 (there are: ' in said and rows[0]["group"] in said


def test_what_there_is_not_is_said_with_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "rollouts", "b", "--held-out").endswith("holds no evaluated rollouts: no step has left any")
    assert told(capsys, "rollouts", "a", "--step", "9").endswith("holds no rollouts of step 9: take one of 1 to 3")
    shutil.copytree("a", tmp_path / "gap")
    (tmp_path / "gap" / "rollouts" / "step-000002.parquet").unlink()
    assert told(capsys, "rollouts", str(tmp_path / "gap"), "--step", "2").endswith("take one of 1, 3")
    for number in ("0", "-1"):
        assert "--number" in told(capsys, "rollouts", "a", "--number", number)


# -- posttrain query ---------------------------------------------------------------------------------------------------


def test_a_question_that_goes_wrong_is_told_what_helps(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("duckdb")
    for sql, said in (
        ("select * from rollout", f"there is no table rollout: there are {', '.join(TABLES)}"),
        ("select group from rollouts", 'write "group", in double quotes'),
        ('select step from rollouts where text = "yes"', "write texts in single quotes"),
        ("select parts.form from rollouts", "write part(parts, 'form')"),
        ("select notes.moves from rollouts", "write notes->>'moves'"),
        ("select r.columns.level from rollouts r", "write columns->>'level'"),
        ("selct 1", "syntax error"),
        ("select rewrad from rollouts", "there is no column 'rewrad': like it are reward"),
    ):
        found = told(capsys, "query", "a", sql)
        assert said in found and "LINE 1" not in found, sql
    assert "--number" in told(capsys, "query", "a", "select 1", "--number", "0")


def test_a_part_of_the_reward_is_asked_for_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("duckdb")
    assert main(["rollouts", "a", "--json", "--number", "9"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    name = next(iter(rows[0]["parts"]))
    sql = f"select part(parts, '{name}') as p from rollouts where step = 3 order by index"
    assert main(["query", "a", sql, "--json"]) == 0
    assert [json.loads(line)["p"] for line in capsys.readouterr().out.splitlines()] == [
        row["parts"][name] for row in rows
    ]


def test_tables_are_listed_and_rows_that_are_not_shown_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("duckdb")
    assert set(TABLES) <= set(told(capsys, "query", "a", "show tables", code=0).split())
    assert main(["query", "a", "select index from rollouts order by step, index", "--number", "5"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("first 5 rows\n") and "more than 5 rows" in captured.err
    assert main(["query", "a", "select index from rollouts", "--number", "12"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("12 rows\n") and not captured.err


def test_a_damaged_file_is_named_where_all_are_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("duckdb")
    copy = tmp_path / "damaged"
    shutil.copytree("a", copy)
    file = copy / "rollouts" / "step-000002.parquet"
    for content in (b"", file.read_bytes()[:1000]):
        file.write_bytes(content)
        said = told(capsys, "query", str(copy), "select count(*) from rollouts")
        assert f"{file} is damaged" in said and "move it away" in said
    file.unlink()
    assert "8" in told(capsys, "query", str(copy), "select count(*) from rollouts", code=0).split()


def test_a_file_of_rollouts_is_asked_like_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("duckdb")
    assert (
        "4" in told(capsys, "query", "a/rollouts/step-000002.parquet", "select count(*) from rollouts", code=0).split()
    )
    assert told(capsys, "query", "a/rollouts/step-000002.parquet", "from metrics").endswith(
        "there are rollouts, tokens"
    )


def test_a_row_that_a_terminal_has_no_room_for_is_printed_line_by_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("posttrain.runs.terminal.printing.columns_of", lambda out: 79)
    names = [f"column {i}" for i in range(30)]
    long = "words " * 30
    table("2 rows", names, [[long, *range(29)], [None] * 30], upright=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 rows" and lines[1].startswith("── row 1 ─") and all(len(line) <= 79 for line in lines)
    assert [line.split()[:2] for line in lines if line.startswith("column")] == [
        n.split() for n in [*names, *names[1:]]
    ]
    assert [line.strip("─ ") for line in lines if line.startswith("──")] == ["row 1", "column 0 -"], "if it has room"
    shown = "".join(line.partition("│ ")[2] + " " for line in lines[2:] if not line.startswith("column 1"))
    assert shown.split()[:30] == long.split(), "nothing is cut where there is room"
    table("2 models", ["minus", *names], [["runs/a", *range(30)], ["runs/b", *range(30)]], upright=True)
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if line.startswith("──")]
    assert [head.strip("─ ") for head in heads] == ["minus runs/a", "minus runs/b"], "a block is named, not numbered"
    assert len(lines) == 1 + 2 * (1 + 30), "the name is not repeated below"
    table("1 row", names[:2], [[long, 1]], upright=True)
    assert "column 0" in (said := capsys.readouterr().out) and "row 1" not in said and long not in said
    for columns in (names, names[:2]):
        table(long, columns, [[1] * len(columns)], upright=True)
        title = capsys.readouterr().out.partition("──" if columns is names else "column")[0]
        assert title.split() == long.split() and all(len(line) <= 79 for line in title.splitlines())


# -- posttrain view ----------------------------------------------------------------------------------------------------


def test_a_port_in_use_ends_view_with_one_line(runs: Path) -> None:
    pytest.importorskip("duckdb")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ran = subprocess.run(
            [sys.executable, "-m", "posttrain", "view", "a", "--port", port], cwd=runs, capture_output=True, text=True
        )
    assert ran.returncode == 2 and f"--port {port} cannot be used" in ran.stderr
    assert ran.stderr.count("\n") == 1 and not ran.stdout


@pytest.mark.parametrize("absent", ["duckdb"])
def test_view_without_its_extra_says_what_to_install(
    absent: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    assert told(capsys, "view", "a") == f"posttrain: posttrain view needs {absent}: pip install 'duckdb>=2,<3'"


def test_options_of_view_that_would_do_nothing_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("duckdb")
    file = str(tmp_path / "run.html")
    for words, said in (
        (["--rollouts", "5"], "--rollouts has no effect without --export FILE"),
        (["--where", "step > 1"], "--where has no effect without --export FILE"),
        (["--export", file, "--rollouts", "0"], "--rollouts 0 must be at least 1"),
        (["--export", file, "--browser"], "leave out --port and --browser"),
        (["--export", file, "--port", "8000"], "leave out --port and --browser"),
    ):
        assert said in told(capsys, "view", "a", *words)
    assert not list(tmp_path.iterdir())
