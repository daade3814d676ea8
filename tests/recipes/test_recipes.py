"""Recipes and examples stay runnable: every option exists, every file they name is made by something in the repository."""

from __future__ import annotations

import importlib.util
import json
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from places import ROOT

from posttrain.algorithms.all_algorithms import find
from posttrain.config.resolve import filled, validate
from posttrain.config.suite_file import read_suite
from posttrain.config.training import RL
from posttrain.config.verbs import VERBS
from posttrain.core.types import UserError
from posttrain.data.tasks import hold_out, to_tasks
from posttrain.envs.builtin.word_problems import row_to_task
from posttrain.envs.play.load_env import load_env, success_of
from posttrain.training.adjust import adjust
from posttrain.verify.expression import evaluate


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "recipes" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda p: p.stem)
def test_options_of_every_recipe_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for table, options in tomllib.loads(path.read_text()).items():
        config: Any = filled(VERBS[table].options, options, f"[{table}] ")
        validate(config)
        if isinstance(config, RL):
            adjust(find(config.algorithm), config)
        if config.env:
            load_env(config.env)
        if "k" in config.given:  # how often one of several replies is right needs to know which are
            assert success_of(config.env, config.success) is not None


@pytest.mark.parametrize("path", sorted((ROOT / "recipes/suites").glob("*.toml")), ids=lambda p: p.stem)
def test_options_of_every_suite_are_valid(path: Path) -> None:
    for part in read_suite(str(path), {"model": "x"}):
        load_env(part.config.env)
        assert success_of(part.config.env, part.config.success) is not None


def test_renumbered_problems_keep_their_expression_true() -> None:
    import random

    recipe = script("wordproblems")
    row = {"id": "a", "question": "Tom had 12 pens and gave 5 away.", "answer": "7", "equation": "X = 12 - 5"}
    task, rng = row_to_task(row), random.Random(0)
    assert task is not None
    for _ in range(20):
        fresh = recipe.renumber(task, rng)
        left, right = fresh["response"].split("-")
        assert f"had {left} pens and gave {right} away" in fresh["prompt"]
        assert str(evaluate(fresh["response"])) == fresh["answer"] and int(fresh["answer"]) > 0


def test_no_demonstration_comes_from_a_held_out_problem(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = script("wordproblems")
    source, out = str(data / "wordproblems" / "train.jsonl"), tmp_path / "rows.jsonl"
    monkeypatch.setattr("sys.argv", ["x", "--tasks", source, "--out", str(out), "--copies", "2", "--seed", "3"])
    recipe.main()
    from posttrain.data.rows import load_rows

    _, held_out = hold_out(to_tasks(load_rows(source), convert=row_to_task), 0.2, 3)
    shapes = {recipe.shape(json.loads(line)["prompt"]) for line in out.read_text().splitlines()}
    assert len(shapes) > 500 and not shapes & {recipe.shape(t["prompt"]) for t in held_out}


@pytest.mark.parametrize(
    ("reply", "reward"),
    [(" The dog ran home.<s>", 1.0), (" The dog ran home.", 0.75), (" It ran.<s>", 0.5), (" It ran", 0.0), ("", 0.0)],
)
def test_reward_of_the_stories(reply: str, reward: float) -> None:
    assert sum(script("stories").reward({"animal": "dog"}, reply).values()) == reward


def test_what_people_wrote_around_the_marks_of_a_page_stays(tmp_path: Path) -> None:
    pages, file = script("pages"), tmp_path / "results" / "page.md"
    fresh = pages.write_page(file, ["# A title", "", "| a |"]).read_text()
    assert fresh == f"{pages.BEGIN}\n# A title\n\n| a |\n{pages.END}\n"
    file.write_text(f"Before.\n{fresh}\n## What its rollouts show\n\nMuch.\n")
    pages.write_page(file, ["# Another"])
    expected = f"Before.\n{pages.BEGIN}\n# Another\n{pages.END}\n\n## What its rollouts show\n\nMuch.\n"
    assert file.read_text() == expected
    pages.write_page(file, ["Of another recipe"], "steps")
    pages.write_page(file, ["Its own again"], "steps")
    assert file.read_text() == expected + pages.write_page(tmp_path / "new.md", ["Its own again"], "steps").read_text()
    for broken in (pages.BEGIN, pages.END, f"{pages.END}\n{pages.BEGIN}\n"):
        file.write_text(broken)
        with pytest.raises(UserError, match="both marks"):
            pages.write_page(file, ["# Lost"])
        assert file.read_text() == broken
    for name in ("algorithms", "generative-verifier", "reward-models", "rlhf"):
        text = (ROOT / "docs" / "results" / f"{name}.md").read_text()
        assert text.startswith(pages.BEGIN) and text.index(pages.END) < text.index("\n## What ")


def test_recipe_of_curricula_compares_the_orders_and_writes_its_part_of_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    recipe = script("curriculum")
    for name, counts in (("ROWS", (24, 24, 24)), ("SHOWN", (4, 4, 4)), ("ASKED", (2, 2, 2))):
        monkeypatch.setattr(recipe, name, dict(zip(recipe.LENGTHS, counts, strict=True)))
    page = tmp_path / "page.md"
    words = ["curriculum.py", "--seeds", "0", "--steps", "1", "--out", str(tmp_path / "runs"), "--page", str(page)]
    monkeypatch.setattr("sys.argv", words)
    recipe.main()
    found = json.loads((tmp_path / "runs" / "results.json").read_text())
    assert found.keys() == {f"{name} 0" for name in ("imitation", *recipe.ORDERS)}
    assert {task["level"] for task in recipe.sums(recipe.ROWS, 0)} == {2, 3, 4}
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows] == ["| order", "| imitation", *(f"| {name}" for name in recipe.ORDERS)]
    assert rows[1:] == capsys.readouterr().out.splitlines()[-4:]
