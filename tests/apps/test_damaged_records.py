"""Files that anybody may have made, in the place of a run's: view, query and rollouts tell what is wrong, and go on."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import generated_runs
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from viewed import viewing

from posttrain.apps.view.api import Answers
from posttrain.apps.view.open_run import OpenRun
from posttrain.apps.view.rollout_files import RolloutPart
from posttrain.apps.view.rollout_page import _seconds
from posttrain.apps.view.rollout_store import Store
from posttrain.cli.main import main
from posttrain.core.messages import safe_json
from posttrain.core.types import UserError
from posttrain.runs.record import rollout_reading
from posttrain.runs.record.rollout_index import open_index, piece_file
from posttrain.runs.record.rollout_reading import read_file, rows_of
from posttrain.runs.record.schema import KEY, VERSION
from posttrain.runs.record.sql_query import Questions
from posttrain.runs.run_files import step_of

PAGES = ("runs", "0/overview", "0/rollouts", "0/histograms", "0/rollout/2/0", "0/group/2/0", "0/step/2")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated_runs.make_run(tmp_path_factory.mktemp("sound") / "run", steps=3, groups=2, group=2, tokens=8)


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "run"))


def second(folder: Path) -> Path:
    return folder / "rollouts" / "step-000002.parquet"


def put(folder: Path, table: pa.Table) -> None:
    parquet.write_table(table.replace_schema_metadata({KEY: VERSION.encode()}), second(folder))


def alter(folder: Path, **values: Any) -> None:
    """Give every row of step 2 these values."""
    table = parquet.read_table(second(folder))
    for name, value in values.items():
        field = table.schema.field(name)
        table = table.set_column(table.schema.get_field_index(name), name, pa.array([value] * len(table), field.type))
    put(folder, table)


def nulls(folder: Path) -> None:
    table = parquet.read_table(second(folder))
    kept = {
        f.name: table[f.name] if f.name in ("step", "index") else pa.nulls(len(table), f.type) for f in table.schema
    }
    put(folder, pa.table(kept, schema=pa.schema(list(table.schema))))


def loop(folder: Path) -> None:
    second(folder).unlink()
    second(folder).symlink_to(second(folder))


SPAN = {"kind": "sampled", "version": None, "learned": True}
TURN = {"role": None, "text": None, "transcript": 9, "first": None, "length": None, "calls": [{"arguments": "{x"}]}
DAMAGE: dict[str, Callable[[Path], Any]] = {
    "nothing but a place": nulls,
    "no JSON": lambda f: alter(f, notes="[" * 100_000, columns="{none", answers="\0", label='{"comparisons": 5}'),
    "a number of thousands of digits": lambda f: alter(f, columns='{"answer": 1' + "0" * 5000 + "}"),
    "names that there are not": lambda f: alter(f, fate="nonsense", stop="nonsense", kind="nonsense", flags=[None]),
    "spans of billions": lambda f: alter(f, spans=[{**SPAN, "start": -5, "length": 2**31 - 1}]),
    "spans behind the end": lambda f: alter(f, spans=[{**SPAN, "start": 2**31 - 9, "length": 3}]),
    "turns of nowhere": lambda f: alter(f, turns=[TURN], transcripts=[]),
    "no turns at all": lambda f: alter(f, turns=[None], parts=[None], versions=[None]),
    "no numbers": lambda f: alter(f, reward=float("nan"), used=float("inf"), advantage=-float("inf"), learner=[np.nan]),
    "a link to itself": loop,
    "a column twice": lambda f: put(f, (t := parquet.read_table(second(f))).append_column("reward", t["reward"])),
    "a success beyond floats": lambda f: (f / "run.json").write_text(
        json.dumps({"verb": "rl", "config": {"success": 10**400}})
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGE)
def test_what_no_run_writes_costs_its_own_page_alone(
    folder: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGE[how](folder)
    run = OpenRun(folder, "run")
    run.read()
    run.store.read_texts()
    assert {RolloutPart(1, False), RolloutPart(3, False)} <= set(run.store.files)
    answers = Answers([run])
    for page in PAGES:
        try:
            answers.of(page, {})
        except UserError as error:
            assert page[-2:] in ("/0", "/2"), f"{page}: {error}"
    for words in (["rollouts", str(folder)], ["rollouts", str(folder), "--step", "2"]):
        assert main(words) in (0, 2)
    assert main(["rollouts", str(folder), "--step", "2", "--json"]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_only_the_name_that_a_step_has_is_a_steps_file(folder: Path) -> None:
    rows = len(read_file(second(folder)))
    for name in ("step-0000002", "step-9999999999", "step-2", "step-00000٢", f"step-{2**31}"):
        assert step_of(name) is None
        shutil.copy(folder / "rollouts" / "step-000003.parquet", folder / "rollouts" / f"{name}.parquet")
    shutil.rmtree(folder / "index")
    store = Store(folder)
    store.follow()
    assert store.problem is None and [part.step for part in store.files] == [1, 2, 3, 3]
    assert store.rows.of_part(RolloutPart(2, False)).stop - store.rows.of_part(RolloutPart(2, False)).start == rows


def test_rollouts_of_another_step_are_not_printed_as_those_of_this_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(folder / "rollouts" / "step-000003.parquet", second(folder))
    assert main(["rollouts", str(folder), "--step", "2"]) == 2
    assert "holds rollouts of another step: put the right file there" in capsys.readouterr().err


def test_a_piece_of_the_index_with_foreign_or_doubled_rows_is_not_read(folder: Path) -> None:
    piece = piece_file(folder, 0)
    table = parquet.read_table(piece)
    count = len(table)
    foreign = table.set_column(0, "step", pa.array([9] * count, pa.int32()))
    for lie in (foreign, pa.concat_tables([table, table]), table.take(pa.array(np.repeat(np.arange(count), 2)))):
        parquet.write_table(lie.replace_schema_metadata(table.schema.metadata), piece)
        store = Store(folder)
        store.follow()
        assert len(store.rows) == count and set(store.rows.number("step")) == {1.0, 2.0, 3.0}


def test_rows_that_come_back_at_the_same_size_are_indexed_again(folder: Path) -> None:
    whole, count = second(folder).read_bytes(), len(parquet.read_table(piece_file(folder, 0)))
    shutil.rmtree(folder / "index")
    second(folder).write_bytes(b"x" * len(whole))
    assert sum(len(parquet.read_table(path)) for path in open_index(folder)) < count
    second(folder).write_bytes(whole)
    assert sum(len(parquet.read_table(path)) for path in open_index(folder)) == count
    store = Store(folder)
    store.follow()
    assert len(store.rows) == count


def test_one_damaged_file_leaves_the_overview_of_an_indexed_run(folder: Path) -> None:
    content = bytearray(second(folder).read_bytes())
    for place in range(4, 600):
        content[place] ^= 255  # of the same size: the index holds
    second(folder).write_bytes(bytes(content))
    run = OpenRun(folder, "run")
    run.read()
    assert Answers([run]).of("0/overview", {})["questions"]
    with pytest.raises(UserError, match="is damaged"):
        Answers([run]).of("0/rollout/2/0", {})


def test_a_page_that_is_damaged_is_no_row_of_any_table(folder: Path) -> None:
    shutil.rmtree(folder / "index")
    at = parquet.read_metadata(second(folder)).row_group(0).column(0).data_page_offset
    content = bytearray(second(folder).read_bytes())
    content[at + 30] ^= 1
    second(folder).write_bytes(bytes(content))
    store = Store(folder)
    store.follow()
    assert RolloutPart(2, False) not in store.files and "is damaged" in str(store.problem)


def test_seconds_that_a_resumed_run_writes_anew_are_read_anew(folder: Path) -> None:
    path = folder / "seconds" / "step-000002.parquet"
    before = _seconds(folder, RolloutPart(2, False), 0)
    table = parquet.read_table(path)
    table = table.set_column(1, "reward", pa.array([9.5] * len(table)))
    parquet.write_table(table, path)
    os.utime(path, ns=(1, 1))
    after = _seconds(folder, RolloutPart(2, False), 0)
    assert before is not None and after is not None and before["reward"] != after["reward"] == 9.5


def test_a_file_that_claims_billions_of_rows_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_reading, "MOST", 3)
    with pytest.raises(UserError, match="claims to have 4 rollouts: no step has as many"):
        read_file(second(folder))
    shutil.rmtree(folder / "index")
    store = Store(folder)
    store.follow()
    assert "claims to have" in str(store.problem)


def test_lines_of_json_hold_no_code_that_a_terminal_obeys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = "\x1b[2J\x7f\x9b31m \u202e \u2028 \ufeff ä 😀"
    line = json.dumps({"a": said}, ensure_ascii=False)
    assert json.loads(safe_json(line)) == {"a": said} and "ä 😀" in safe_json(line)
    assert not any(c in safe_json(line) for c in "\x1b\x7f\x9b\u202e\u2028\ufeff")
    alter(folder, text=said, group=said, task=said, side=said)
    for words in (["rollouts", "--step", "2"], ["rollouts", "--step", "2", "--json"], ["rollouts", "--order", "best"]):
        assert main([words[0], str(folder), *words[1:]]) == 0
    pytest.importorskip("duckdb")
    for sql in ("select text, side from rollouts", 'select 1 as "\x1b[2J\x9b"'):
        assert main(["query", str(folder), sql]) == main(["query", str(folder), sql, "--json"]) == 0
    assert not set(capsys.readouterr().out) & set("\x1b\x7f\x9b\u202e\u2028\ufeff\x07")


@pytest.mark.parametrize("text", ["[1, {", "[" * 100_000, "1" + "0" * 5000])
def test_what_is_no_json_stands_as_the_text_it_is(folder: Path, text: str) -> None:
    alter(folder, notes=text)
    assert rows_of(read_file(second(folder)))[0]["notes"] == text


LARGE = (
    "select length(repeat('x', 4000000000))",
    "select generate_series(1, 1000000000)",
    pytest.param("select levenshtein(repeat('x', 9000000), repeat('y', 9000000))", marks=pytest.mark.long),
)


@pytest.mark.parametrize("sql", LARGE)
def test_a_question_that_no_interrupt_reaches_ends_all_the_same(folder: Path, sql: str) -> None:
    pytest.importorskip("duckdb")
    words = ["-m", "posttrain", "query", str(folder), sql, "--timeout", "0.5", "--memory", "0.3"]
    ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=False)
    assert (
        ended.returncode == 2 and ended.stderr.count("\n") == 1 and ended.stderr.startswith("posttrain: the question")
    )


@pytest.mark.parametrize("word", ["nan", "inf", "-1", "0"])
def test_a_question_takes_no_time_or_memory_that_is_none(
    folder: Path, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--timeout", "--memory"):
        assert main(["query", str(folder), "select 1", f"{option}={word}"]) == 2
        assert "must be above 0" in capsys.readouterr().err


@pytest.mark.parametrize("condition", ["(" * 30_000, "x" * 200_000, "text = '\udcff'"])
def test_a_condition_that_would_hold_up_everybody_is_not_read(folder: Path, condition: str) -> None:
    pytest.importorskip("duckdb")
    run = OpenRun(folder, "run")
    run.read()
    with pytest.raises(UserError, match="at most 100,000 characters and 300 nested brackets|text in UTF-8"):
        Answers([run]).of("0/rollouts", {"where": condition})
    with Questions(folder) as questions, pytest.raises(UserError, match="a question"):
        questions.ask(f"select 1 from rollouts where {condition}")


def test_a_link_among_the_pictures_leads_nowhere(folder: Path) -> None:
    (folder / "pictures").mkdir()
    (folder / "pictures" / ("a" * 64)).symlink_to(folder / "run.json")
    (folder / "pictures" / ("b" * 64)).write_bytes(b"GIF8")
    with viewing([OpenRun(folder, "run")]) as client:
        seen = [client.get(f"/token/picture/0/{name}").status for name in ("a" * 64, "b" * 64, "run.json")]
        assert seen == [404, 200, 404]
        assert client.get("/token/text/0/2/" + "9" * 30).status == 404


def test_view_ends_though_a_question_does_not(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "posttrain", "view", str(folder)]
    own = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # shells ignore it behind an &
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=own, preexec_fn=heard, **pipes) as view:
        assert view.stdout is not None
        address = view.stdout.readline().split()[-1].decode()
        port, token = address.removeprefix("http://127.0.0.1:").strip("/").split("/")
        endless = "damerau_levenshtein(repeat('x',300000),repeat('y',300000))>1"
        with socket.create_connection(("127.0.0.1", int(port))) as asked:
            where = f"/{token}/api/0/rollouts?where={endless}".replace(">", "%3E")
            asked.sendall(f"GET {where} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            deadline = time.monotonic() + 30
            while not list((tmp_path / "tmp").iterdir()) and time.monotonic() < deadline:  # until the database is open
                time.sleep(0.1)
            time.sleep(0.5)
            view.send_signal(signal.SIGINT)
            assert view.wait(20) in (0, 130)
    assert not list((tmp_path / "tmp").iterdir())


def test_numbers_and_texts_that_no_json_has_are_exported_as_null_or_told(
    folder: Path, tmp_path: Path, capsys: Any
) -> None:
    alter(folder, reward=float("inf"))
    assert main(["view", str(folder), "--export", str(tmp_path / "run.html")]) == 0
    table = parquet.read_table(second(folder))
    bad = b"\xff" * len(table)
    offsets = pa.array(range(len(table) + 1), pa.int32()).buffers()[1]
    texts = pa.Array.from_buffers(pa.string(), len(table), [None, offsets, pa.py_buffer(bad)])
    put(folder, table.set_column(table.schema.get_field_index("text"), "text", texts))
    assert main(["rollouts", str(folder), "--step", "2"]) == 2
    assert "not valid rollouts" in capsys.readouterr().err
