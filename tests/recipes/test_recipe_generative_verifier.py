"""The recipe of judges that reason: labels are true, checks are right, nothing held out is trained on."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
from recipe_modules import recipe_module

from posttrain.config.resolve import filled, validate
from posttrain.config.training import RL, SFT, RewardModelling
from posttrain.verify.verdict import final_verdict


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return recipe_module("generative_verifier")


def last_digit(prompt: str) -> str:
    """Of the chain as a whole, without cutting any step down to its last digit."""
    first, *steps = re.findall(r"[+*]?\d", prompt)
    return str(eval("(" * len(steps) + first + "".join(f"{step})" for step in steps)) % 10)


def test_settings_exist(recipe: ModuleType) -> None:
    given = {"tasks": "x", **recipe.QUIET}
    validate(filled(SFT, {**given, **recipe.SIZE, **recipe.SFT}))
    validate(filled(RL, {**given, "model": "x", "env": "verdict", **recipe.RL}))
    validate(filled(RewardModelling, {**given, "model": "x", **recipe.HEAD}))
    assert recipe.RL["steps"] * recipe.RL["prompts"] == recipe.LABELLED, "each label is seen once"


def test_labels_are_true_and_half_of_the_answers_are_right(recipe: ModuleType) -> None:
    rows = recipe.labelled(recipe.chains(200, 0), 0)
    assert all(row["label"] == (row["response"] == last_digit(row["prompt"])) for row in rows)
    assert sum(row["label"] for row in rows) == 100 and len({row["prompt"] for row in rows}) == 200


def test_a_check_follows_the_chain_and_ends_with_the_verdict(recipe: ModuleType) -> None:
    rows = recipe.labelled(recipe.chains(200, 1), 1)
    for row, shown in zip(rows, recipe.demonstrations(rows, True), strict=True):
        total, digits, verdict = re.fullmatch(r"(\S+) (.*) (verdict: \w+)", shown["response"]).groups()  # type: ignore[union-attr]
        assert total.rpartition("=")[2] == last_digit(row["prompt"])
        assert re.sub(r"=\d", "", total) + "=" == row["prompt"]
        assert ("/" in digits) != row["label"] and final_verdict(verdict) == float(row["label"])
        assert shown["prompt"] == f"{row['prompt']}{row['response']}\n"


def test_nothing_held_out_is_trained_on(recipe: ModuleType) -> None:
    trained = {row["prompt"] for row in recipe.labelled(recipe.chains(recipe.SHOWN + recipe.LABELLED, 2), 2)}
    questions = recipe.questions(2)
    assert len(questions) == recipe.UNSEEN and not trained & {row["prompt"] for row in questions}
    for row in questions:
        right, wrong = row["responses"]
        assert right == last_digit(row["prompt"]) != wrong


def test_no_verdict_and_a_tie_count_as_wrong(recipe: ModuleType) -> None:
    assert recipe.right([1.0, 0.0, 1.0, 0.0]) == 1.0
    assert recipe.right([1.0, None, None, 1.0]) == 0.25


def test_the_page_tells_every_seed_and_an_interval(recipe: ModuleType, tmp_path: Path) -> None:
    def result(seed: int, value: float) -> dict[str, object]:
        judge = {"greedy": value, "one vote": 0.6, "votes": 0.7, "probability": 0.7, "tokens": 30.0,
                 "one vote, invalid": 1.0, "votes, invalid": 0.0}  # fmt: skip
        return {
            "seed": seed, "figures": {"reasons, after rl": judge, "head": {"accuracy": 0.5}}, "seconds": 60.0,
            "end": "2026-01-01T00:00:00", "git": {"revision": "abcdef0123", "dirty": False},
            "machine": {"platform": "linux", "cores": 2}, "versions": {"python": "3.11", "torch": "2"},
        }  # fmt: skip

    text = recipe.page([result(seed, v) for seed, v in enumerate((0.8, 0.85, 0.9))], tmp_path).read_text()
    assert "| reasons, after rl | 0.800, 0.850, 0.900: **0.850** [0.726, 0.974] |" in text  # 4.303 * 0.05 / sqrt(3)
    assert "--seeds 0 1 2\n" in text and "abcdef01" in text and "3 minutes of a core for 3 seeds" in text
