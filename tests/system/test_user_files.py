"""Whatever stands in the place of a file, reading it ends at once in one line, and no module opens one by another way."""

from __future__ import annotations

import ast
import json
import os
import socket
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conftest import tiny
from items_place import furnish
from pyarrow import parquet

import posttrain
from posttrain.cli.main import main
from posttrain.config.inference import Check
from posttrain.config.resolve import validate
from posttrain.config.suite_file import read_suite
from posttrain.core import user_files
from posttrain.core.json_text import json_line, json_text, plain
from posttrain.core.types import UserError
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer

PACKAGE = Path(posttrain.__file__).parent


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(path))


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


STRANGE: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "link to a pipe": lambda path: (os.mkfifo(path.with_name("pipe")), path.symlink_to("pipe")),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": _socket,
    "folder": Path.mkdir,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "circle": lambda path: path.symlink_to(path.name),
    "terabyte": _sparse,
}
"""What may stand in the place of a file, by name, and what makes it."""


@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_no_file_is_neither_read_nor_written_nor_waited_for(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    path = Path("file")
    STRANGE[kind](path)
    with pytest.raises(OSError):
        user_files.content(path)
    with pytest.raises(OSError):
        user_files.text(path)
    if kind == "terabyte":
        with user_files.opened(path) as file, pytest.raises(OSError, match="a line of it"):
            list(user_files.lines(file, 1000))
    elif kind != "dangling link":
        with pytest.raises(OSError):
            user_files.writable(path)
    if kind in ("pipe", "device"):
        with pytest.raises(OSError, match=f"it is a {kind}, not a file"):
            user_files.readable_folder(".")


def test_a_name_with_a_character_of_code_0_is_no_name() -> None:
    with pytest.raises(OSError, match="code 0"):
        user_files.opened("a\0b")


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345\r\n")
    assert user_files.content(path, 7) == b"12345\r\n"
    assert user_files.text(path) == "12345\n"
    with pytest.raises(OSError, match="more than 6 bytes"):
        user_files.content(path, 6)


BY_THEMSELVES = (
    "apps/view/html_export.py", "apps/view/sql_worker.py", "apps/view/web_server.py", "cli/input_bounds.py",
    "cli/main.py", "core/user_files.py",
    "envs/bridges/verifiers_side.py", "models/free_memory.py", "models/native/kernels/build.py",
    "models/tokenizer/tokenizer_files.py", "runs/lock.py", "runs/terminal/output.py", "sandbox/",
    "system/bounded_process.py", "system/child_processes.py", "system/temp_folders.py",
    "training/distributed_setup.py", "verify/limited_process.py",
)  # fmt: skip
"""Modules that open what is no user's: of the system, of this package, of folders that nobody else writes to."""
GUARDED = ("user_files.readable(", "user_files.writable(")


def _opens(node: ast.Call) -> bool:
    """Whether a call opens a file by its name for reading, or, guarded by nothing, with a library."""
    function, text = ast.unparse(node.func), ast.unparse(node)
    first = ast.unparse(node.args[0]) if node.args else ""
    if first == "os.devnull":
        return False
    if function in ("open", "io.open"):
        return first not in ("descriptor", "0")
    if function.endswith((".read_text", ".read_bytes")):
        return True
    if function == "os.open":
        return "O_NONBLOCK" not in text and "O_DIRECTORY" not in text
    if function.endswith(".open") and first[:2] in ("'r", "'a"):
        return True
    named = (
        "np.load",
        "parquet.read_schema",
        "parquet.read_metadata",
        "parquet.ParquetFile",
        "pa.memory_map",
        "safe_open",
    )
    return function in named and not any(guard in text for guard in GUARDED) and first != "source"


def test_no_module_opens_a_file_of_a_user_by_another_way() -> None:
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        name = str(file.relative_to(PACKAGE))
        if not name.startswith(BY_THEMSELVES):
            calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
            found += [f"{name}:{call.lineno}: {ast.unparse(call)[:80]}" for call in calls if _opens(call)]
    assert not found, "open it with posttrain.core.user_files"


@pytest.mark.parametrize("kind", ("pipe", "device"))
def test_no_file_of_a_checkpoint_is_waited_for(kind: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_model(tiny(tokenizer), folder, tokenizer)
    for file in sorted(folder.iterdir()):
        kept = file.read_bytes()
        file.unlink()
        STRANGE[kind](file)
        for load in (load_model, Tokenizer.load):
            with pytest.raises(UserError) as told:
                load(folder)
            assert file.name in str(told.value)
        file.unlink()
        file.write_bytes(kept)
    load_model(folder)


def test_an_option_with_a_character_of_code_0_is_refused() -> None:
    for options in ({"retriever": ("\0",)}, {"model": "a\0b"}, {"env": "\0"}):
        with pytest.raises(UserError, match="null character"):
            validate(Check(tasks="rows.jsonl", **options))


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_bytes(b"\xef\xbb\xbf[check]\r\ntasks = 'rows.jsonl'\r\n")  # as editors of Windows save it
    assert user_files.text(recipe) == "[check]\ntasks = 'rows.jsonl'\n"
    suite = tmp_path / "suite.toml"
    suite.write_bytes(b"\xef\xbb\xbf[sums]\ntasks = 'rows.jsonl'\nenv = 'my.py:reward'\n")
    assert [part.name for part in read_suite(str(suite), {"model": "start"})] == ["sums"]


# -- JSON --------------------------------------------------------------------------------------------------------------

WHEN = datetime(2024, 2, 29, 12, 30, tzinfo=timezone(timedelta(hours=2)))


def test_whatever_a_row_holds_has_one_form_in_json() -> None:
    row = {
        "when": WHEN, "day": WHEN.date(), "took": timedelta(seconds=1.5), "price": Decimal("1.10"), "raw": b"\xff\0",
        "nan": float("nan"), "inf": float("-inf"), "array": np.array([[1.5, np.nan]]), "one": np.float32(0.5),
        "time64": np.datetime64("2024-02-29"), "set": [{"deep": (WHEN.time(),)}], 3: "\ud800",
    }  # fmt: skip
    said = json.loads(json_line(row))
    assert said == {
        "when": "2024-02-29T12:30:00+02:00", "day": "2024-02-29", "took": "0:00:01.500000", "price": "1.10", "raw": "/wA=",
        "nan": None, "inf": "-inf", "array": [[1.5, None]], "one": 0.5, "time64": "2024-02-29",
        "set": [{"deep": ["12:30:00"]}], "3": "\ud800",
    }  # fmt: skip
    assert json_text(plain(row)) == json_text(row)


def test_rows_of_parquet_with_dates_and_bytes_are_sampled(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    furnish(tmp_path, tokenizer)
    columns = {"prompt": ["1+1="], "when": [WHEN], "raw": [b"\xff"], "price": [Decimal("1.5")], "nan": [float("nan")]}
    parquet.write_table(pa.table(columns), "rows.parquet")
    words = (
        "sample --model start --tasks rows.parquet --samples 1 --max-tokens 2 --out out.jsonl --quiet --env-workers 0"
    )
    assert main(words.split()) == 0
    [row] = map(json.loads, Path("out.jsonl").read_text().splitlines())
    assert (row["when"][:10], row["raw"], row["price"], row["nan"]) == ("2024-02-29", "/w==", "1.5", None)
