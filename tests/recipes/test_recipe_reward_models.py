"""The recipe of reward models: which rows it learns from, settings that exist, and a page with every seed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from recipe_modules import recipe_module

from posttrain.config.resolve import filled, validate
from posttrain.config.training import RewardModelling
from posttrain.data.preference_examples import to_item
from posttrain.data.tasks import hold_out, to_tasks


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return recipe_module("reward_models")


def test_every_experiment_has_settings_that_exist(recipe: ModuleType) -> None:
    for experiment in recipe.EXPERIMENTS:
        validate(filled(RewardModelling, {"tasks": "x", "model": "x", **recipe.COMMON, **experiment.settings}))
    assert {experiment.group for experiment in recipe.EXPERIMENTS} == set(recipe.TOLD)


def test_arithmetic_solutions_without_mistake_and_with_a_wrong_answer_are_left_out(
    recipe: ModuleType, data: Path
) -> None:
    rows = recipe.read(data / "process" / "multistep_arithmetic.jsonl")
    faultless = [row for row in rows if row["mistake_index"] is None]
    assert (len(faultless), sum(row["answer"] != row["target"] for row in faultless)) == (62, 18)
    kept = recipe.solutions("multistep_arithmetic")(data)
    assert len(kept) == len(rows) - 18
    assert all(row["answer"] == row["target"] for row in kept if row["mistake_index"] is None)


def test_shuffled_pairs_are_the_comparisons_of_the_prompts_and_are_held_out_with_them(
    recipe: ModuleType, data: Path
) -> None:
    whole = to_tasks(recipe.few(data), convert=to_item, split_seed=3)
    single = to_tasks(recipe.shuffled(data), convert=to_item, split_seed=3)
    said = {
        (task["prompt"], task["responses"][int(b)], task["responses"][int(w)])
        for task in whole
        for b, w, _, _ in task["comparisons"]
    }
    apart = {(task["prompt"], *task["responses"]) for task in single}
    assert apart == said and len(apart) > 4 * 40
    held = [{task["prompt"] for task in hold_out(tasks, 0.2, 3)[1]} for tasks in (whole, single)]
    assert held[0] == held[1] and len(held[0]) > 3


def test_the_page_tells_every_seed_and_an_interval(recipe: ModuleType, tmp_path: Path) -> None:
    shared = {
        "end": "2026-01-01T00:00:00", "git": {"revision": "abcdef0123", "dirty": False}, "seconds": 60.0,
        "machine": {"platform": "linux", "cores": 2}, "versions": {"python": "3.11", "torch": "2"}, "prompts": 10,
    }  # fmt: skip
    seeds = [{**shared, "figures": {"accuracy": value, "bag of words": 0.9}} for value in (0.8, 0.85, 0.9)]
    text = recipe.page({"pairs": {"last token": seeds}}, tmp_path, [0, 1, 2]).read_text()
    assert (
        "| last token | 10, 10, 10 | 0.800, 0.850, 0.900: **0.850** [0.726, 0.974] |" in text
    )  # 4.303 * 0.05 / sqrt(3)
    assert "--seeds 0 1 2 --only pairs\n" in text and "abcdef01" in text and "3 runs, 3 minutes" in text
