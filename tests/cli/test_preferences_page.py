"""The page on preferences says what the code does, and what it shows runs."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import documents
import pytest
from documents import ROOT, blocks, run
from endpoints import serving
from items_place import read

from posttrain.cli.argument_errors import option_names
from posttrain.config.verbs import VERBS

PAGE = ROOT / "docs" / "guides" / "preferences.md"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_block_runs_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO("s\n" * 6))
    for verb in ("sample", "prefer", "reward-model"):
        monkeypatch.setitem(documents.ADDED, verb, ["--quiet"])
    monkeypatch.setitem(documents.ADDED, "rl", ["--quiet", "--env-workers", "0", "--prompts", "2", "--group", "2"])
    ran = 0
    with serving() as server:
        for block in blocks(PAGE):
            text = block.text.replace("http://127.0.0.1:8000/v1", server.address)
            if "--agreement" in text:  # of people who did not skip
                monkeypatch.setattr("sys.stdin", io.StringIO(answers(Path("items.jsonl"))))
            ran += run(replace(block, text=text))
    assert ran == 26
    assert all(row["score"] >= 0.1 for row in read("right.jsonl"))
    assert {row["labeller"] for row in read("judged.jsonl")} == {"judge=judge.toml"}


def answers(items: Path) -> str:
    """Rankings of the first three items by two people: as they are shown, and that one again with a tie."""
    counts = [len(set(row["responses"])) for row in read(items)[:3]]
    plain = [" ".join(str(n + 1) for n in range(count)) for count in counts if count > 1]
    return "".join(line + "\n" for line in [*plain, *(line.replace("1 2", "1=2") for line in plain)])


def test_options_that_the_page_names_exist() -> None:
    known = {f"--{name.replace('_', '-')}" for verb in VERBS for name in option_names(verb)}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE.read_text(encoding="utf-8")))
    assert named <= known, sorted(named - known)
