"""Recipes from scripts of TRL: what a script gives to its configuration and to its trainer otherwise than by keywords."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from posttrain.apps.migration.migrate import recipe_for
from posttrain.config.resolve import filled, validate
from posttrain.config.verbs import VERBS

SCRIPT = """
import os
from datasets import load_dataset
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
{before}
args = {config}
{after}
"""


def imported(folder: Path, config: str, after: str = "", before: str = "", **given: Any) -> tuple[str, dict[str, Any]]:
    """Return the recipe and its table, which a run accepts."""
    path = folder / "own.py"
    path.write_text(SCRIPT.format(config=config, after=after, before=before), encoding="utf-8")
    draft = recipe_for(str(path), given.get("devices"), given.get("rows"), None)
    text = draft.toml(path.name, "recipe.toml")
    table = tomllib.loads(text)[draft.verb]
    validate(filled(VERBS[draft.verb].options, table))
    return text, table


@pytest.mark.parametrize(
    ("config", "after", "before", "lines"),
    [
        ("GRPOConfig(learning_rate=1e-5)", "args.learning_rate = 3e-6; args.beta = 0.02", "", {"lr": 3e-6, "kl": 0.02}),
        ("GRPOConfig()", "trainer = GRPOTrainer(args=args)\nargs.num_generations = 4", "", {"group": 4}),
        ("GRPOConfig(beta=1)", "if __name__ == '__main__':\n    args.beta = 0.5", "", {"kl": 0.5}),
        ("GRPOConfig()", "other.beta = 0.5", "", {"kl": 0.0}),
        ("DPOConfig('out/dpo', beta=0.3)", "", "", {"out": "out/dpo", "beta": 0.3}),
        ("GRPOConfig(seed=7, **common)", "", "common = dict(num_generations=4, beta=0.1)", {"group": 4, "kl": 0.1}),
        ("GRPOConfig(**common)", "", "common = {'num_generations': 4}\ncommon['beta'] = 0.1", {"group": 4, "kl": 0.1}),
        ("GRPOConfig(**{**a, 'beta': 0.2})", "", "a = dict(beta=0.1, seed=3)", {"kl": 0.2, "seed": 3}),
    ],
)
def test_options_that_a_script_gives_in_other_places_than_keywords_are_taken_over(
    config: str, after: str, before: str, lines: dict[str, Any], tmp_path: Path
) -> None:
    _, table = imported(tmp_path, config, after, before)
    assert {name: table.get(name) for name in lines} == lines


@pytest.mark.parametrize(
    ("after", "told"),
    [
        ("args.beta = choose()", "beta: only the script computes its value, choose(): set it here"),
        ("if fast:\n    args.beta = 0.5", "beta: only the script computes its value, 0.5 if fast: set it here"),
        ("args.beta *= 2", "beta: only the script computes its value, args.beta * 2: set it here"),
    ],
)
def test_an_attribute_that_only_the_script_computes_is_listed(after: str, told: str, tmp_path: Path) -> None:
    text, table = imported(tmp_path, "GRPOConfig(beta=0.1)", after)
    assert told in text and table["kl"] == 0.0 and "beta, not known here" in text
    assert "DPOConfig's argument 2: only the script computes its value" in imported(tmp_path, "DPOConfig('o', 8)")[0]


FILES = 'd = load_dataset("json", data_files={"train": "a.jsonl", "test": "b.jsonl"})'
ONE = 'd = load_dataset("json", data_files="a.jsonl", split="train")\nd = d.map(shape)\n'
CHANGED = "Check the rows: the script changes them"


@pytest.mark.parametrize(
    ("config", "load", "train", "test", "lines", "changed"),
    [
        ("GRPO", FILES, "d['train']", "d['test']", {"tasks": "a.jsonl", "eval_tasks": ["b.jsonl"]}, False),
        ("GRPO", FILES, "d['train'].map(f)", "d['test'].map(f)", {"tasks": "a.jsonl", "eval_tasks": ["b.jsonl"]}, True),
        ("DPO", f"{FILES}\nd = d.map(f)", "d['train']", "d['test']", {"tasks": "a.jsonl", "held_out": None}, True),
        ("GRPO", f"{ONE}d = d.train_test_split(0.1)", "d['train']", "d['test']",
         {"tasks": "a.jsonl", "held_out": 0.1, "eval_tasks": None}, True),
        ("DPO", f"{ONE}e = d.train_test_split(test_size=20, seed=1)", "e['train']", "e['test']",
         {"tasks": "a.jsonl", "held_out": 0.2}, True),
        ("DPO", f"{ONE}e = d.train_test_split(train_size=0.9)", "e['train']", "e['test']",
         {"tasks": "a.jsonl", "held_out": 0.1}, True),
        ("DPO", f"{ONE}e = d.train_test_split(train_size=90)", "e['train']", "e['test']", {"held_out": None}, True),
        ("DPO", 'd = load_dataset("u/rows")["train"].train_test_split(0.2)', "d['train']", "d['test']",
         {"tasks": "u/rows", "split": "train", "held_out": 0.2}, False),
    ],
)  # fmt: skip
def test_held_out_rows_of_a_script_are_found(
    config: str, load: str, train: str, test: str, lines: dict[str, Any], changed: bool, tmp_path: Path
) -> None:
    trainer = f"{config}Trainer(model='m', args=args, train_dataset={train}, eval_dataset={test}).train()"
    text, table = imported(tmp_path, f"{config}Config()", trainer, load, rows=100)
    assert {name: table.get(name) for name in lines} == lines
    assert (CHANGED in text) == changed
    assert "dataset_name" not in text and "model_name_or_path" not in text, "names of options that a script has not"
    assert ("eval_dataset = b.jsonl: held_out keeps a share" in text) == (config == "DPO" and load.startswith(FILES))


@pytest.mark.parametrize(
    ("before", "project"),
    [
        ("os.environ.setdefault('WANDB_PROJECT', 'p')", "p"),
        ("os.environ['WANDB_PROJECT'] = 'p'\nos.environ.setdefault('WANDB_PROJECT', 'q')", "p"),
    ],
)
def test_an_environment_variable_is_read_as_the_script_sets_it(before: str, project: str, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    words = {"config": "DPOConfig(report_to='wandb')", "after": "DPOTrainer(args=args)", "before": before}
    path.write_text(SCRIPT.format(**words), encoding="utf-8")
    draft = recipe_for(str(path), None, None, None)
    assert tomllib.loads(draft.toml(path.name, "recipe.toml"))["prefer"]["track_project"] == project
