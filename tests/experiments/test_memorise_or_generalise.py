"""Memorise or generalise: its kinds of tasks, what its arms share, and how its figures are read."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments import memorise_or_generalise as memo
from experiments.experiment import Verdict

SETTINGS = memo.EXPERIMENT.settings


def silent(text: str) -> None:
    pass


def digits_of(prompts: Sequence[str]) -> set[str]:
    return {"".join(filter(str.isdigit, prompt)) for prompt in prompts}


# -- tasks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, numbers, prompt, answer",
    [("same", [6, 4, 5, 2], "6 4 5 2:", "17"), ("longer", [6, 4, 5, 2, 1], "6 4 5 2 1:", "18"),
     ("rule", [6, 4, 5, 2], "6 4 5 2%", "7"), ("form", [6, 4, 5, 2], "6,4,5,2:", "17"),
     ("old", [6, 4, 5, 2], "6 4 5 2<", "2546")],
)  # fmt: skip
def test_a_kind_is_asked_by_its_prompt_and_answered_by_its_rule(
    kind: str, numbers: list[int], prompt: str, answer: str
) -> None:
    task = memo.asked(kind, numbers)
    assert (task["prompt"], task["answer"]) == (prompt, answer)
    assert memo.answered(task, f"1+1=2\n{answer}") == 1.0 and memo.answered(task, f"1{answer}") == 0.0
    assert memo.answered(task, f"{answer}\n1+1=") == 0.0 and memo.answered(task, "") == 0.0


@pytest.mark.parametrize("kind", memo.KINDS)
def test_demonstrations_without_slips_are_right_and_with_slips_often_wrong(kind: str) -> None:
    draw, tasks = random.Random(0), memo.tasks_of(kind, 100, 0, SETTINGS)
    right = [memo.answered(t, memo.demonstrated(t, draw, {**SETTINGS, "slips": 0.0})["response"]) for t in tasks]
    assert right == [1.0] * 100
    slipped = [memo.answered(t, memo.demonstrated(t, draw, {**SETTINGS, "slips": 0.4})["response"]) for t in tasks]
    assert (sum(slipped) == 100) == (kind == memo.OLD)
    if kind in (memo.SAME, memo.FORM, memo.LONGER):
        assert all(memo.answered(t, t["right"]) for t in tasks)  # what SFT is told


def test_held_out_numbers_are_in_no_demonstration_and_in_no_training_whatever_the_kind() -> None:
    seed = 3
    held = [t for kind in memo.KINDS for t in memo.tasks_of(kind, SETTINGS["unseen"], seed, SETTINGS, held_out=True)]
    assert len({t["prompt"] for t in held}) == len(memo.KINDS) * SETTINGS["unseen"]
    trained = [t for kind in (memo.SAME, memo.RULE) for t in memo.tasks_of(kind, SETTINGS["practice"], seed, SETTINGS)]
    prompts = [row["prompt"] for row in [*memo.imitated(seed, SETTINGS), *trained]]
    assert not digits_of(prompts) & digits_of([t["prompt"] for t in held])


# -- figures -----------------------------------------------------------------------------------------------------------


def point(same: float, beyond: float = 0.2, old: float = 0.9, kl: float = 0.0) -> dict[str, float]:
    return {**dict.fromkeys(memo.BEYOND, beyond), "same": same, "old": old, "kl": kl, "kl_back": kl, "forget": 0.1}


def planted(worse: str, first: dict[str, float]) -> dict[int, dict[str, Any]]:
    """Five seeds in which one arm loses elsewhere and forgets much, and the others the reverse."""
    numbers: dict[int, dict[str, Any]] = {}
    for seed in range(5):
        off, begin = seed / 1000, point(0.3)
        good = [begin, point(0.5 + off, 0.3 + off, 0.88, 0.1 + off), point(0.7, 0.4 + off, 0.8, 0.2)]
        bad = [begin, point(0.6 + off, 0.15 - off, 0.7 + off, 0.5), point(0.9, 0.1 - off, 0.5, 0.9)]
        arms = {arm: {"course": bad if arm == worse else good, "tokens": 1.0} for arm in memo.ARMS}
        then = {f"then {arm}": point(share + off * (arm != "plain")) for arm, share in first.items()}
        numbers[seed] = {**arms, **then}
    return numbers


def test_claims_are_seen_where_they_were_planted_and_contradicted_where_their_reverse_was() -> None:
    kept = {"plain": 0.3, "KL": 0.5, "replay": 0.6, "ptx": 0.4}
    found = memo.conclude(planted("sft", kept), SETTINGS)
    assert found.verdicts == [Verdict.SEEN] * 8
    assert all(len(row) == len(found.columns) for row in found.rows)
    lost = {"plain": 0.7, "KL": 0.5, "replay": 0.6, "ptx": 0.4}
    assert memo.conclude(planted("grpo", lost), SETTINGS).verdicts == [Verdict.CONTRADICTED] * 8


def test_figures_at_equal_accuracy_are_read_between_the_checkpoints_around_it() -> None:
    sft = {"course": [point(0.2, old=0.9), point(0.6, old=0.5), point(0.8, old=0.3)]}
    grpo = {"course": [point(0.2, old=0.9), point(0.5, old=0.8), point(0.4, old=0.7)]}
    level = memo.level({"sft": sft, "grpo": grpo})
    assert level == 0.5  # grpo's best, which it had on the way
    assert memo.at_level(grpo, level, "old") == 0.8
    assert memo.at_level(sft, level, "old") == pytest.approx(0.9 + 0.75 * (0.5 - 0.9))
    assert memo.at_level(sft, 0.1, "old") == 0.9  # the start was there already
    assert memo.beyond({"course": [point(0.2, 0.3), point(0.5, 0.1)]}) == pytest.approx(-0.2)


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_arms_of_a_seed_begin_with_one_start_and_the_second_half_with_what_grpo_made_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memo, "ENV", "verify:within,least=1,most=7,unit=characters")
    small = {"tasks": 64, "unseen": 4, "imitation_epochs": 1.0, "steps": 2, "prompts": 4, "group": 4, "max_tokens": 8,
             "demonstrators": 1, "seldom": 16, "practice": 16, "samples": 2, "points": 2, "then_steps": 2}  # fmt: skip
    settings = {**SETTINGS, **small}
    numbers = memo.measure(0, settings, tmp_path, silent)

    def model(name: str) -> str:
        return str(json.loads((tmp_path / name / "run.json").read_text())["config"]["model"])

    assert len({model(name) for name in ("sft", "sft-own-replies", "dpo", "grpo")}) == 1
    assert {model(f"then-{arm}") for arm in memo.AFTER} == {str(tmp_path / "grpo/checkpoints/step-000002")}
    for arm in memo.ARMS:
        begin, *_, end = numbers[arm]["course"]
        assert len(numbers[arm]["course"]) == (5 if arm == "sft" else 3) and begin == numbers["sft"]["course"][0]
        assert begin["kl"] == pytest.approx(0.0, abs=1e-5) and begin["kl_back"] == begin["kl"] != end["kl"]
    examined = [json.loads(line)["prompt"] for line in (tmp_path / "old.jsonl").read_text().splitlines()]
    assert len(examined) == 4 and not digits_of(examined) & digits_of([r["prompt"] for r in memo.imitated(0, settings)])
