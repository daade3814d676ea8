"""What goes into one file: all that can be read, with its pictures, and a word on what is missing."""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import generated_runs
import pytest
from generated_runs import spoiled

from posttrain.apps.view.html_export import Selection, exported
from posttrain.apps.view.open_run import OpenRun
from posttrain.cli.main import main
from posttrain.core.pictures import FOLDER
from posttrain.core.types import UserError


def content(page: bytes) -> dict[str, Any]:
    """The answers that lie in an exported file."""
    packed = re.search(rb'<script type="application/gzip" id="data">(.*?)</script>', page)
    assert packed is not None
    found: dict[str, Any] = json.loads(gzip.decompress(b64decode(packed[1])))
    return found


def opened(folder: Path) -> OpenRun:
    run = OpenRun(folder, "run")
    run.read()
    return run


def test_what_is_damaged_is_left_out_of_the_file_and_named_in_it_and_beside_it(tmp_path: Path, capsys: Any) -> None:
    whole = generated_runs.make_run(tmp_path / "whole", steps=3, groups=2, group=2, tokens=8, evals=0)
    run, file = spoiled(whole, tmp_path / "run", (2,)), tmp_path / "run.html"
    for damaged, said in (("2", "4 rollouts are left out: "), ("3", "and 1 more files")):  # in its tokens; altogether
        if damaged == "3":
            (run / "rollouts" / "step-000003.parquet").write_bytes(b"x")  # which no piece of the index was made of
        assert main(["view", str(run), "--export", str(file)]) == 0
        [told] = capsys.readouterr().err.splitlines()
        assert said in told and "step-000002.parquet is damaged" in told
        kept = content(file.read_bytes())
        assert told.removeprefix("missing").strip() == kept["runs"]["runs"][0]["problem"]
        assert {row["step"] for row in kept["rows"]} == {1, 2, 3} - set(range(2, int(damaged) + 1))


def test_pictures_go_into_the_file_as_far_as_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = opened(generated_runs.make_seen(tmp_path / "run"))
    [file] = (run.folder / FOLDER).iterdir()
    kept = content(exported(run, Selection()))
    begin, _, data = kept["pictures"][file.name].partition(",")
    assert begin == "data:image/png;base64" and b64decode(data) == file.read_bytes()
    assert kept["runs"]["runs"][0]["problem"] is None
    monkeypatch.setattr("posttrain.apps.view.html_export.PICTURES", file.stat().st_size - 1)
    kept = content(exported(run, Selection()))
    assert kept["pictures"] == {} and "1 of 1 pictures are left out" in kept["runs"]["runs"][0]["problem"]


def test_where_nothing_can_be_read_there_is_no_file(tmp_path: Path) -> None:
    run = opened(generated_runs.make_run(tmp_path / "run", steps=1, groups=1, group=2, tokens=8, evals=0))
    for file in (run.folder / "rollouts").iterdir():
        file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(UserError, match="is damaged"):
        exported(run, Selection())
