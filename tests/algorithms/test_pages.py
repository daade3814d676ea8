"""The pages of the documentation are what the tables say, and so is their form as data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from places import ROOT

from posttrain.algorithms.algorithm_base import AlgorithmBase
from posttrain.algorithms.all_algorithms import EVERY, beside, verb_of
from posttrain.algorithms.choices import FIRST, FURTHER, choice_table
from posttrain.algorithms.describe import (
    COMMON_TASKS,
    as_data,
    axes,
    cited,
    components,
    curves_in,
    describe,
    differences,
    index,
    objective,
    page,
    requirements,
    settings,
)
from posttrain.algorithms.policy import Algorithm
from posttrain.algorithms.policy_table import TABLE
from posttrain.algorithms.preference import PreferenceAlgorithm
from posttrain.algorithms.preference_table import PREFERENCES
from posttrain.algorithms.reward_model_table import REWARD_MODELS
from posttrain.algorithms.settings import change
from posttrain.cli.argument_errors import option_names
from posttrain.cli.command_table import COMMANDS
from posttrain.cli.main import main

PAGES = ROOT / "docs" / "algorithms"
ALL = pytest.mark.parametrize("row", EVERY.values(), ids=lambda r: r.name)


@ALL
def test_page_of_every_row_is_what_the_table_says(row: AlgorithmBase) -> None:
    written = (PAGES / f"{row.name}.md").read_text(encoding="utf-8")
    assert written == page(row, beside(row), curves_in(PAGES, row)), (
        "write it again: posttrain algorithms --pages docs/algorithms"
    )


def test_page_that_leads_to_all_others_is_what_the_tables_say() -> None:
    written = (PAGES / "index.md").read_text(encoding="utf-8")
    assert written == index(list(EVERY.values())), "write it again: posttrain algorithms --pages docs/algorithms"
    assert all(f"[`{row.name}`]({row.name}.md) | {row.idea} |" in written for row in EVERY.values())
    assert all(0 < len(row.idea.split()) <= 8 for row in EVERY.values())
    assert all(0 < len(row.best_for.split()) <= 12 and not row.best_for.endswith(".") for row in EVERY.values())


@ALL
def test_page_fits_one_screen_and_shows_the_curve_that_there_is(row: AlgorithmBase) -> None:
    measured = curves_in(PAGES, row)
    text = page(row, beside(row), measured)
    assert text.count("\n") <= 50
    practised = isinstance(row, Algorithm) and row.teacher is None and row.branching is None
    for folder in COMMON_TASKS:
        assert (f"{folder}/{row.name}.png" in text) == (folder in measured), (
            "write it again: posttrain algorithms --pages"
        )
    assert practised or not measured, "the common tasks are of rewards, without tools"


def test_no_curve_is_left_of_a_row_that_is_gone() -> None:
    assert {p.stem for folder in COMMON_TASKS for p in (PAGES / folder).glob("*.png")} <= TABLE.keys()


def test_no_page_is_left_of_a_row_that_is_gone() -> None:
    assert {p.stem for p in PAGES.glob("*.md")} == {"index", "expected-gradients", *EVERY}


@ALL
def test_every_part_names_its_formula_and_where_it_comes_from(row: AlgorithmBase) -> None:
    for what, formula, source in components(row):
        assert formula and (source or what == "updates per step"), (row.name, what)
    text = "\n".join(describe(row))
    assert row.name in text and objective(row) in text
    assert ("advantage A: " if isinstance(row, Algorithm) else "loss: ") in text


def test_difference_from_itself_is_nothing_and_from_grpo_what_the_papers_changed() -> None:
    grpo = TABLE["grpo"]
    assert differences(grpo, grpo) == []
    told = "\n".join(differences(TABLE["dapo"], grpo))
    for word in ("1.28", "sum_j n_j", "unequal rewards", "cut off", "KL to the reference, in the loss: none"):
        assert word in told


@ALL
def test_data_of_a_row_is_json_with_every_default(row: AlgorithmBase) -> None:
    data = as_data(row)
    assert json.loads(json.dumps(data)) == data
    assert data["name"] == row.name and data["paper"] == row.paper and len(data["parts"]) == len(components(row))
    known = {"epochs", "surrogate"} if isinstance(row, Algorithm) else {"link", "denominator"}
    known |= {"link.beta", "score"} if isinstance(row, PreferenceAlgorithm) else set()
    assert known <= data["settings"].keys()


@ALL
def test_settings_as_they_are_listed_change_nothing_when_they_are_given(row: AlgorithmBase) -> None:
    given = dict(line.split()[0].split("=", 1) for line in settings(row))
    assert change(row, given) == row
    assert given.keys() == as_data(row)["settings"].keys()


def test_each_choice_is_a_command_with_options_and_an_algorithm_that_there_are() -> None:
    for command in "; ".join(choice.command for choice in (*FIRST, *FURTHER)).split("; "):
        verb, *words = command.split()
        assert verb in {known.name for known in COMMANDS}
        given = [word[2:].replace("-", "_") for word in words if word.startswith("--")]
        assert set(given) <= set(option_names(verb)), command
        if "algorithm" in given:
            name = words[words.index("--algorithm") + 1]
            assert verb_of(EVERY[name]) == verb.replace("distill", "rl")
    assert {"rl", "prefer", "sft", "distill", "reward-model"} <= {choice.command.split()[0] for choice in FIRST}


def test_guide_shows_every_choice_and_the_command_shows_the_first_ones_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    guide = (ROOT / "docs" / "guides" / "algorithms.md").read_text(encoding="utf-8")
    assert choice_table() in guide, "put posttrain.algorithms.choices.choice_table() into the guide"
    assert main(["algorithms"]) == 0
    shown = capsys.readouterr().out.splitlines()[: len(FIRST) + 2]
    assert all(choice.command in line for choice, line in zip(FIRST, shown[2:], strict=True))
    assert max(map(len, shown)) <= 80 and len(FIRST) == 10


def test_algorithms_verb_prints_the_table_a_row_and_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == list(EVERY)
    assert main(["algorithms", "dapo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == as_data(TABLE["dapo"])
    assert main(["algorithms", "dapo"]) == 0
    assert "differences from grpo:" in capsys.readouterr().out
    assert main(["algorithms", "dpo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == as_data(PREFERENCES["dpo"])
    assert main(["algorithms", "ipo"]) == 0
    shown = capsys.readouterr().out
    assert "differences from dpo:" in shown and "link.beta=0.1   --beta" in shown and "s_w, s_l" in shown


def test_algorithms_verb_finds_rows_of_both_kinds_and_names_both_where_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        "from posttrain.algorithms.links import Hinge\n"
        "from posttrain.algorithms.preference import PreferenceAlgorithm\n"
        "mine = PreferenceAlgorithm('mine', 'Mine', link=Hinge(0.5))\n"
        "nothing = 3\n"
    )
    assert main(["algorithms", "own.py:mine"]) == 0
    assert "max(0, 1 - x), x = 0.5 (s_w - s_l)" in capsys.readouterr().out
    assert main(["algorithms", "own.py:nothing"]) == 2
    told = capsys.readouterr().err
    assert (
        "an Algorithm(...) of posttrain.algorithms.policy or a PreferenceAlgorithm(...)" in told
        and told.count("\n") == 1
    )
    assert main(["algorithms", "simp"]) == 2
    told = capsys.readouterr().err
    assert "did you mean 'simpo'? posttrain algorithms lists all" in told


def test_names_of_the_tables_are_different() -> None:
    assert len(EVERY) == len(TABLE) + len(PREFERENCES) + len(REWARD_MODELS)


@pytest.mark.parametrize("row", PREFERENCES.values(), ids=lambda r: r.name)
def test_options_on_a_page_give_the_formula_that_stands_beside_them(row: PreferenceAlgorithm) -> None:
    for option, said, source in axes(row):
        name, _, value = option.removeprefix("--").partition(" ")
        changed = change(row, {name: value or "true"})
        assert source and any(formula in said for _, formula, _ in components(changed)), option
    offered = {option.split()[0] for option, _, _ in axes(row)}
    assert ("--divergence" in offered) == ("ref" in row.score.formula and row.name != "aot")
    assert ("--policy-weight" in offered) == (row.name not in ("wpo", "aot", "aot-unpaired"))
    assert ("--transport" not in offered) or row.name != "wpo"
    assert ("--tail" in offered) == (row.name not in ("orpo", "kto", "aot-unpaired", "ld-dpo"))


def test_requirements_tell_each_row_once_and_what_it_needs() -> None:
    found = {}
    for line in requirements(EVERY.values())[2:]:
        name, *needed = (cell.strip() for cell in line.strip("|").split("|"))
        assert name.strip("`") not in found
        found[name.strip("`")] = needed
    assert found.keys() == EVERY.keys()
    assert all(row.best_for == found[row.name].pop() for row in EVERY.values())
    assert found["ppo"] == ["yes", "yes", "yes", "yes", "prompts"]
    assert found["dr-grpo"] == ["yes", "yes", "no", "no", "prompts"]
    assert found["dpo"] == ["no", "no", "no", "yes", "comparisons of responses"]
    assert found["simpo"] == ["no", "no", "no", "no", "comparisons of responses"]
    assert found["kto"][3:] == ["yes", "labels of single responses, or comparisons"]


@pytest.mark.parametrize(("columns", "papers"), [(80, False), (200, True)])
def test_table_of_algorithms_is_as_wide_as_the_screen(
    columns: int, papers: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["algorithms"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(FIRST) + len(EVERY) + 8 and max(map(len, lines)) <= columns
    for row in EVERY.values():
        [line] = [line for line in lines if line.split()[0] == row.name]
        assert row.idea in line and (cited(row) in line) == papers
