"""`posttrain init` writes files that run as they stand, says what to type next, and overwrites nothing."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from endpoints import serving

from posttrain.cli.init_command import FIRST, Kind, files_of, init
from posttrain.cli.main import main
from posttrain.config.resolve import filled
from posttrain.config.verbs import VERBS
from posttrain.core.types import UserError

KINDS = get_args(Kind)
SHORT = {
    "sft": "--steps 2 --rows 4 --layers 1 --hidden 16 --heads 2",
    "rl": "--steps 2 --prompts 2 --group 2 --eval-limit 2 --env-workers 1",
    "prefer": "--epochs 0.01 --rows 4",
    "eval": "--samples 1 --k 1 --limit 40 --env-workers 1",
    "check": "",
}
"""Options that make a command of a recipe quick; nothing else is changed."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def verbs_of(kind: Kind) -> list[str]:
    """The verbs that the head of a recipe names, in their order."""
    head = files_of(kind)["recipe.toml"][1].partition("\n[")[0]
    return re.findall(r"(?m)^#   posttrain (\S+) +--config recipe.toml  ", head)


def run(verb: str, file: str) -> int:
    more = SHORT[verb].split() + (["--threads", "1", "--quiet"] if verb in ("sft", "rl", "prefer") else [])
    return main([verb, "--config", file, *more])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "judge"])
def test_every_command_that_a_recipe_names_runs_in_its_order(
    kind: Kind, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "first", "--kind", kind]) == 0
    assert f"next        cd first && posttrain {FIRST[kind]}\n" in capsys.readouterr().out
    monkeypatch.chdir("first")
    assert main(FIRST[kind].split()) == 0
    verbs = verbs_of(kind)
    assert verbs[-1] == "eval" and set(verbs) == set(tomllib.loads(Path("recipe.toml").read_text()))
    for verb in verbs:
        assert run(verb, "recipe.toml") == 0, verb
    last = {"preferences": "prefer"}.get(kind, "rl")
    assert any(Path(f"runs/{last}/checkpoints").glob("step-*"))


def test_a_judge_runs_on_this_machine_and_behind_an_endpoint_as_its_file_says(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init("first", kind="judge")
    monkeypatch.chdir("first")
    assert run("sft", "train_judge.toml") == 0 and any(Path("runs/judge/checkpoints").glob("step-*"))
    assert run("check", "recipe.toml") == 2, "two steps make no judge: no verdict is none"
    own = [
        line.removeprefix("#").strip()
        for line in Path("judge.toml").read_text().partition("replace all of the above:")[2].splitlines()
    ]
    with serving() as server:
        told = "\n".join(own).replace("http://127.0.0.1:8000/v1", server.address).replace("OPENAI_API_KEY", "")
        Path("judge.toml").write_text(told)
        for verb in verbs_of("judge"):
            assert run(verb, "recipe.toml") == 0, verb
        assert server.asked and all("digits" in json.dumps(request) for request in server.asked), "the rubric is asked"


@pytest.mark.parametrize("kind", KINDS)
def test_recipes_hold_options_that_exist_and_files_that_are_there(kind: Kind, place: Path) -> None:
    init(kind=kind)
    for file in place.glob("*.toml"):
        if file.name == "judge.toml":
            continue
        for verb, options in tomllib.loads(file.read_text()).items():
            config: Any = filled(VERBS[verb].options, options)
            named = [config.tasks, *getattr(config, "judge", ()), getattr(config, "replies", None)]
            own = config.env.partition(":")[0] if ".py:" in config.env else None
            assert all((place / name).exists() for name in (*named, own) if name)


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_has_comments_and_is_named_on_the_screen_with_what_it_is(
    kind: Kind, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--kind", kind]) == 0
    said = capsys.readouterr().out
    assert sorted(file.name for file in place.iterdir()) == sorted(files_of(kind))
    assert said.endswith(f"next        posttrain {FIRST[kind]}\n"), "nothing to enter where we are"
    for name, (what, text) in files_of(kind).items():
        assert re.search(rf"(?m)^wrote +{re.escape(name)} +{re.escape(what)}$", said)
        assert name.endswith((".jsonl", ".txt")) or text.startswith(("#", '"""'))
        assert name.endswith(".jsonl") or max(map(len, text.splitlines())) <= 80


def test_nothing_is_overwritten_and_nothing_half_written(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "first").mkdir()
    (place / "first" / "recipe.toml").write_text("mine")
    assert main(["init", "first"]) == 2
    assert "first/recipe.toml is there already: choose another folder, or delete it" in capsys.readouterr().err
    assert [file.name for file in (place / "first").iterdir()] == ["recipe.toml"]
    assert (place / "first" / "recipe.toml").read_text() == "mine"
    (place / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        init("file/below")
    assert main(["init", "x", "--kind", "rewards"]) == 2 and not (place / "x").exists()


def test_rows_are_the_same_every_time() -> None:
    assert all(files_of(kind) == files_of(kind) for kind in KINDS)
