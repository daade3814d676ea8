"""Rows: every format gives the same rows, large files are read as they are needed, every mistake names its place."""

from __future__ import annotations

import gzip
import json
import os
import sys
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from row_files import ROWS, refused, write_jsonl, write_parquet, write_table

from posttrain.data import arrow_store
from posttrain.data import rows as rows_module
from posttrain.data import tasks as tasks_module
from posttrain.data.rows import load_rows
from posttrain.data.tasks import to_tasks
from posttrain.envs.play.load_env import load_converter


@pytest.fixture(params=["small", "large"])
def size(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every file is read as one of this size: small ones into memory, large ones by way of the cache."""
    cache(monkeypatch, tmp_path, all_large=request.param == "large")
    return request.param


def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, all_large: bool = True) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if all_large:
        monkeypatch.setattr(rows_module, "SMALL", -1)
        monkeypatch.setattr(rows_module, "FEW", 0)
        monkeypatch.setattr(rows_module, "BLOCK", 2)
        monkeypatch.setattr(arrow_store, "SLOW_SECONDS", -1.0)
    return tmp_path / "cache" / "posttrain" / "rows"


def test_every_format_gives_the_same_rows(tmp_path: Path, size: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "b.json").write_text(json.dumps({"version": 1, "data": ROWS}))
    with gzip.open(tmp_path / "c.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    sources: list[tuple[Any, str]] = [
        (write_jsonl(tmp_path / "train.jsonl", ROWS), "train.jsonl:3"),
        (tmp_path / "a.json", "a.json item 3"),
        (tmp_path / "b.json", "b.json item 3"),
        (tmp_path / "c.jsonl.gz", "c.jsonl.gz:3"),
        (write_table(tmp_path / "d.csv", ","), "d.csv:5"),  # a header, and a cell of two lines
        (write_table(tmp_path / "e.tsv", "\t"), "e.tsv:5"),
        (write_parquet(tmp_path / "f.parquet", ROWS), "f.parquet row 3"),
        (ROWS, "row 3"),
        (iter(ROWS), "row 3"),
    ]
    for source, place in sources:
        rows = load_rows(source)
        assert list(rows) == ROWS == [rows[number] for number in range(len(rows))]
        assert rows.where(2) == rows.where(-1) == place
    assert list(load_rows(str(tmp_path / "train.jsonl"))) == ROWS


ODD: list[dict[str, Any]] = [
    {"a": 1, "b": None},
    {"b": 1.0, "c": [1, {"d": None}, "2020-01-01"]},
    {"a": True, "b": 10**30, "half": "\ud83d"},
    {},
    {"a": float("inf"), "b": -0.0},
]


def test_rows_that_fit_no_table_are_kept_exactly(tmp_path: Path, size: str) -> None:
    path = write_jsonl(tmp_path / "odd.jsonl", ODD)
    for rows in (list(load_rows(path)), list(load_rows(path))):
        assert repr(rows) == repr(ODD)


def test_columns_of_parquet_keep_their_types(tmp_path: Path, size: str) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    words = pa.array(["x", "y", "x"]).dictionary_encode()
    nested = pa.array([["x"], [], None], pa.list_(pa.dictionary(pa.int32(), pa.string())))
    days = pa.array([date(2020, 1, 1), None, date(2021, 1, 1)])
    table = pa.table({"word": words, "nested": nested, "day": days, "item": [{"n": 1}, {"n": None}, None]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert list(load_rows(tmp_path / "a.parquet")) == table.to_pylist()


def test_saved_dataset_gives_its_rows_by_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="saved datasets need the library `datasets`")
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": one.select([2])}).save_to_disk(tmp_path / "two")
    for source in (tmp_path / "one", one, one.select([2, 1, 0]).select([2, 1, 0])):
        rows = load_rows(source)
        assert list(rows) == ROWS == [rows[number] for number in range(3)]
    assert list(load_rows(one, limit=2)) == ROWS[:2] and load_rows(one).where(2) == "dataset row 3"
    rows = load_rows(tmp_path / "two", split="test")
    assert list(rows) == ROWS[2:] and rows.where(0) == "two test row 1"
    refused(lambda: load_rows(tmp_path / "two"), "two has several splits", "train, test")
    refused(lambda: load_rows(tmp_path / "two", split="tset"), "no split 'tset'", "did you mean 'test'?")
    refused(lambda: load_rows(tmp_path / "one", split="test"), "without splits")
    (tmp_path / "one" / "state.json").write_text("{")
    refused(lambda: load_rows(tmp_path / "one"), "cannot be read as a saved dataset")


@pytest.mark.parametrize("inside", ["", "train"])
def test_no_pipe_in_a_saved_dataset_is_waited_for(tmp_path: Path, inside: str) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list(ROWS)
    (datasets.DatasetDict({inside: saved}) if inside else saved).save_to_disk(tmp_path / "saved")
    data = tmp_path / "saved" / inside / "data-00000-of-00001.arrow"
    data.unlink()
    os.mkfifo(data)
    refused(lambda: load_rows(tmp_path / "saved"), "saved", "it is a pipe, not a file")


def test_folder_of_files_is_read_by_split_with_shards_in_order(tmp_path: Path, size: str) -> None:
    write_parquet(tmp_path / "train-00001-of-00002.parquet", ROWS[1:])
    write_parquet(tmp_path / "train-00000-of-00002.parquet", ROWS[:1])
    (tmp_path / "README.md").write_text("about")
    assert list(load_rows(tmp_path)) == ROWS
    write_jsonl(tmp_path / "test.jsonl", ROWS[:1])
    refused(lambda: load_rows(tmp_path), "several splits", "test, train")
    rows = load_rows(tmp_path, split="train")
    assert list(rows) == ROWS == [rows[number] for number in range(3)]
    assert rows.where(2) == "train-00001-of-00002.parquet row 2"
    assert [len(load_rows(tmp_path, split="train", limit=limit)) for limit in (1, 2, 3, 4)] == [1, 2, 3, 3]
    (tmp_path / "empty").mkdir()
    refused(lambda: load_rows(tmp_path / "empty"), "holds no data file")


def test_limit_stops_reading(tmp_path: Path, size: str) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", ROWS)
    path.write_text(path.read_text() + "not json\n")
    assert list(load_rows(path, limit=2)) == ROWS[:2]
    assert list(load_rows(write_parquet(tmp_path / "a.parquet", ROWS), limit=2)) == ROWS[:2]
    assert list(load_rows(ROWS, limit=2)) == ROWS[:2]
    refused(lambda: load_rows(path, limit=0), "at least 1")


def test_byte_order_mark_windows_ends_and_blank_lines_are_no_rows(tmp_path: Path, size: str) -> None:
    text = "\r\n".join(["", *(json.dumps(row, ensure_ascii=False) for row in ROWS), "  ", ""])
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    rows = load_rows(path)
    assert list(rows) == ROWS and rows.where(0) == "train.jsonl:2"
    table = tmp_path / "train.csv"
    table.write_bytes(b"\xef\xbb\xbfquestion,answer\r\n\r\n1+1,2\r\n")
    rows = load_rows(table)
    assert list(rows) == [{"question": "1+1", "answer": "2"}] and rows.where(0) == "train.csv:3"


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.jsonl", b'{"x": 1}\n\n{"x": \n', ("a.jsonl:3", "not valid JSON")),
        ("a.jsonl", b'{"x": 1}\n[1]\n', ("a.jsonl:2", "must be an object", "list")),
        ("a.jsonl", b'{"x": 1}\n{"x": "\xe9"}\n', ("a.jsonl:2", "byte 0xe9 is not UTF-8")),
        ("a.jsonl", '{"x": 1}'.encode("utf-16"), ("a.jsonl:1", "UTF-8")),
        ("a.jsonl", b'{"x": ' + b"1" * 5000 + b"}", ("a.jsonl:1", "not valid JSON")),
        ("a.jsonl", b"\n \n", ("a.jsonl has no rows",)),
        ("a.json", b"", ("a.json has no rows",)),
        ("a.json", b"[]", ("a.json has no rows",)),
        ("a.json", b'[{"x": 1},\n{"x": }]', ("a.json:2", "not valid JSON")),
        ("a.json", b'{"x": 1}\n{"x": 2}\n', ("a.json:2", ".jsonl")),
        ("a.json", b'[{"x": 1}, 2]', ("a.json item 2", "must be an object", "int")),
        ("a.json", b'{"a": [], "b": []}', ("a.json:1", "one list; it has 2")),
        ("a.json", b'{"a": {"b": 1}}', ("a.json:1", "a row, or an object with one list; it has 0 lists")),
        ("a.json", b'{\n"a": 1\n}\n{\n"a": 2\n}', ("a.json:4", "put several rows into a list")),
        ("a.jsonl", b'{\n  "a": 1\n}', ("a.jsonl:1", "each row on a line of its own")),
        ("a.json", b'"text"', ("a.json:1", "expected a list", "str")),
        ("a.csv", b'x,y\n"1\n1",2\n3\n', ("a.csv:4", "1 cells under a header of 2")),
        ("a.csv", b"x,y\n1,2,3\n", ("a.csv:2", "3 cells")),
        ("a.csv", b"x;y\n1;2\n", ("a.csv:1", "columns are separated by ';'", "commas")),
        ("a.csv", b'x,y\n1,2\n"3,4\n', ("a.csv:3", "not a valid table row")),
        ("a.csv", b"x,x\n1,2\n", ("a.csv:1", "'x' twice")),
        ("a.csv", b"x,y\n1,\xff\n", ("a.csv:2", "byte 0xff")),
        ("a.csv", b"x,y\n", ("a.csv has no rows",)),
        ("a.parquet", b"PAR1 not really", ("a.parquet", "cannot be read as parquet")),
        ("a.jsonl.gz", b"not gzip", ("a.jsonl.gz cannot be read",)),
        ("a.txt", b"x", ("a.txt", ".jsonl", "convert it")),
    ],
)
def test_malformed_file_is_refused_with_its_place(
    tmp_path: Path, size: str, name: str, content: bytes, parts: tuple[str, ...]
) -> None:
    (tmp_path / name).write_bytes(content)
    refused(lambda: to_tasks(load_rows(tmp_path / name), need=()), *parts)


def test_missing_source_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", ROWS)
    refused(lambda: load_rows(tmp_path / "trian.jsonl"), "there is no file", "did you mean 'train.jsonl'?")
    refused(lambda: load_rows("nowhere/train.jsonl"), "there is no folder nowhere")
    refused(lambda: load_rows("https://some.where/train.jsonl"), "is an address", "download")
    refused(lambda: load_rows(path, split="test"), "no split 'test'")
    refused(lambda: load_rows(ROWS, split="test"), "no split 'test'")
    refused(lambda: load_rows({"train": ROWS}), "not a mapping", "train")  # type: ignore[dict-item]
    refused(lambda: load_rows([ROWS[0], "text"]), "row 2", "must be an object")  # type: ignore[list-item]
    refused(lambda: load_rows([]), "the list of rows has no rows")


def odd_columns() -> dict[str, Any]:
    """Columns whose second value cannot become Python's, as files of other writers have them."""
    pa = pytest.importorskip("pyarrow")
    invalid = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(np.array([0, 1, 3], np.int32)), pa.py_buffer(b"a\xff\xfe")]
    )
    twice = pa.StructArray.from_arrays([pa.array([1, 1]), pa.array([2, 2])], names=["a", "a"])
    return {
        "far": pa.array([0, 10**18], pa.timestamp("us")),
        "day": pa.array([0, 2**31 - 1], pa.int32()).cast(pa.date32()),
        "zone": pa.array([None, 0], pa.timestamp("us", "Nowhere/Bad")),
        "text": invalid,
        "list": pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), invalid),
        "category": pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int32()), invalid),
        "twice": twice,
    }


@pytest.mark.parametrize("column", ["far", "day", "zone", "text", "list", "category", "twice"])
def test_parquet_values_that_python_cannot_hold_are_refused_with_row_and_column(
    size: str, tmp_path: Path, column: str
) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({"prompt": ["a", "b"], column: odd_columns()[column]})
    parquet.write_table(table, tmp_path / "x.parquet")
    row = 1 if column == "twice" else 2
    refused(lambda: to_tasks(load_rows(tmp_path / "x.parquet")), f"x.parquet row {row}: column {column} ")


def test_a_parquet_file_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    parquet.write_table(table, tmp_path / "x.parquet")
    refused(lambda: load_rows(tmp_path / "x.parquet"), "x.parquet has the column 'prompt' twice")


def test_what_is_there_but_no_file_is_called_what_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    (tmp_path / "gone.jsonl").symlink_to("nowhere")
    refused(lambda: load_rows(tmp_path / "pipe.jsonl"), "pipe.jsonl is a pipe or a device")
    for name in ("loop.jsonl", "gone.jsonl"):
        refused(lambda name=name: load_rows(tmp_path / name), f"{name} is a link that leads to no file")


def test_unreachable_hub_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="hub datasets need the library `datasets`")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write_jsonl(tmp_path / "gsm8k.jsonl", ROWS)
    refused(lambda: load_rows("gsm8k"), "there is no file gsm8k", "'gsm8k.jsonl'", "HF_HUB_OFFLINE is set")


def test_a_hub_that_cannot_be_reached_is_not_asked_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets", reason="hub datasets need the library `datasets`")
    from huggingface_hub import constants

    seen = []

    def load(*name: Any, split: Any, revision: Any) -> None:
        seen.append((*name, constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE))
        raise ConnectionError("no")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(datasets, "load_dataset", load)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    refused(
        lambda: load_rows("openai/gsm8k:main"),
        "127.0.0.1 cannot be reached",
        "no dataset of that name was downloaded before",
    )
    assert seen == [("openai/gsm8k", "main", True, True)]
    assert not constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE


def test_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_info.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    for source in (tmp_path / "saved", "some/dataset"):
        refused(lambda source=source: load_rows(source), "pip install 'datasets>=")  # type: ignore[misc]


# What is kept


def numbered(path: Path, count: int = 7) -> Path:
    return write_jsonl(path, [{"prompt": f"question {number}", "response": str(number)} for number in range(count)])


def test_second_start_reads_what_was_kept_and_gives_the_same_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cache(monkeypatch, tmp_path)
    path = numbered(tmp_path / "a.jsonl")
    path.write_text(path.read_text() + path.read_text().splitlines()[0] + "\n")
    first = to_tasks(load_rows(path), split_seed=1)
    assert len(list(folder.iterdir())) == 2 and first.merged == 1 and first.draws is not None
    monkeypatch.setattr(rows_module, "read_texts", None)
    monkeypatch.setattr("posttrain.data.tasks._survey", None)
    again = to_tasks(load_rows(path), split_seed=1)
    assert list(again) == list(first) and again.merged == 1 and again.where(-1) == "a.jsonl:7"
    assert again.draws is not None and (again.draws[1] == first.draws[1]).all()


def test_what_was_kept_serves_the_same_code_and_options_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache(monkeypatch, tmp_path)
    path = numbered(tmp_path / "a.jsonl")
    code = tmp_path / "mine.py"
    surveyed: list[int] = []
    survey = tasks_module._survey
    monkeypatch.setattr(tasks_module, "_survey", lambda *given: surveyed.append(1) or survey(*given))

    def count(text: str, **options: Any) -> int:
        """How often all rows were looked at, with a converter of that text."""
        code.write_text(f"def row_to_task(row):\n    {text}\n")
        os.utime(code, (len(surveyed), len(surveyed)))
        before = len(surveyed)
        to_tasks(load_rows(path), convert=load_converter(f"{code}:reward"), **options)
        return len(surveyed) - before

    assert count("return row") == 1 and count("return row") == 0
    assert count("return row if row['response'] < '5' else None") == 1
    assert (
        count("return row") == 0 and count("return row", split_seed=1) == 1 and count("return row", split_seed=2) == 1
    )
    assert count("return row", fields={"x": "response"}) == 1 and count("return row", need=("response",)) == 1
    assert count("return row", prompt_template="{prompt}") == 1
    for _ in range(2):  # what another function makes, no file tells
        before = len(surveyed)
        to_tasks(load_rows(path), convert=lambda row: row)
        assert len(surveyed) == before + 1


def test_task_is_made_of_its_row_alone_when_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache(monkeypatch, tmp_path)
    tasks = to_tasks(load_rows(numbered(tmp_path / "a.jsonl")))
    asked: list[int] = []
    parse = rows_module.parse_row
    monkeypatch.setattr(rows_module, "parse_row", lambda text, *place: asked.append(place[-1]) or parse(text, *place))
    assert tasks[4]["response"] == "4" and tasks[-1]["response"] == "6" and asked == [5, 7]
    assert tasks.where(4) == "a.jsonl:5"


def test_changed_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache(monkeypatch, tmp_path)
    path = numbered(tmp_path / "a.jsonl")
    stat = path.stat()
    assert load_rows(path)[0]["response"] == "0"
    path.write_text(path.read_text().replace('"0"', '"9"'))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as large and as old as before
    assert load_rows(path)[0]["response"] == "9"


@pytest.mark.parametrize("damage", [b"", b"ARROW1\0\0", None])
def test_what_cannot_be_read_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes | None
) -> None:
    folder = cache(monkeypatch, tmp_path)
    path = numbered(tmp_path / "a.jsonl")
    first = list(to_tasks(load_rows(path)))
    for file in folder.iterdir():
        file.write_bytes(file.read_bytes()[:-20] if damage is None else damage)
    assert list(to_tasks(load_rows(path))) == first
    assert len(list(folder.iterdir())) == 2


def test_rows_stay_in_memory_where_nothing_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache(monkeypatch, tmp_path)
    path = numbered(tmp_path / "a.jsonl")
    folder.mkdir(parents=True)
    folder.chmod(0o777)  # others could put rows there
    assert len(to_tasks(load_rows(path))) == 7 and not list(folder.iterdir())
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert [row["response"] for row in load_rows(path)] == list("0123456")
    assert list(load_rows(write_parquet(tmp_path / "a.parquet", ROWS))) == ROWS


def test_cache_may_be_emptied_while_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache(monkeypatch, tmp_path)
    rows = load_rows(numbered(tmp_path / "a.jsonl"))
    for file in folder.iterdir():
        file.unlink()
    assert rows[3]["response"] == "3" and [row["response"] for row in rows] == list("0123456")


def test_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = cache(monkeypatch, tmp_path)
    monkeypatch.setattr(arrow_store.os, "replace", full)
    refused(lambda: load_rows(numbered(tmp_path / "a.jsonl")), "No space left", "XDG_CACHE_HOME")
    assert not list(folder.iterdir())


def test_what_was_not_used_for_long_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache(monkeypatch, tmp_path)
    for name in "ab":
        load_rows(numbered(tmp_path / f"{name}.jsonl"))
    before = set(folder.iterdir())
    for file in before:
        os.utime(file, (0, 0))
    load_rows(tmp_path / "a.jsonl")
    load_rows(numbered(tmp_path / "c.jsonl"))
    left = set(folder.iterdir())
    assert len(before) == len(left) == 2 and len(before & left) == 1


@pytest.mark.parametrize("around", ["instruction", "prompt", "text", "version"])
def test_a_list_of_rows_in_an_object_is_read_whatever_describes_it(around: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"q{n}"} for n in range(5)]
    (tmp_path / "rows.json").write_text(json.dumps({around: "about this set", "examples": rows, "tags": ["a"]}))
    assert list(load_rows(tmp_path / "rows.json")) == rows
    one = {"prompt": "q", "completions": [{"response": "a", "score": 1}, {"response": "b", "score": 2}]}
    said = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    for row in (one, said):
        (tmp_path / "row.json").write_text(json.dumps(row, indent=1))
        assert list(load_rows(tmp_path / "row.json")) == [row]
