"""maj@k of an evaluation: replies to a task vote with their final answers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from conftest import tiny

import posttrain
from posttrain import UserError
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.evaluation_figures import _of_valid

TASKS = [{"prompt": f"say {word}"} for word in ("one", "two", "six", "ten", "red")]


def begins_low(task: dict[str, str], reply: str) -> float:
    """About half of the replies of a random model are right."""
    return float(reply.strip().casefold()[:1] < "k")


@pytest.fixture
def model(tmp_path: Path, tokenizer: Tokenizer) -> str:
    save_model(tiny(tokenizer), tmp_path / "model", tokenizer)
    return str(tmp_path / "model")


def test_an_evaluation_counts_the_votes_of_its_own_replies(model: str) -> None:
    how = {"samples": 6, "k": (1,), "max_tokens": 1, "success": 1.0, "env_workers": 0, "threads": 1}
    found = posttrain.evaluate(TASKS, begins_low, model, maj=(1, 3, 6), **how)
    by_hand = {}
    for k in (1, 3, 6):
        votes = []
        for task in {r.task["id"] for r in found.rollouts}:
            replies = [r for r in found.rollouts if r.task["id"] == task]
            for group in (replies[place : place + k] for place in range(0, 6, k)):
                said = Counter(" ".join(r.text.split()).casefold() for r in group)
                first = [answer for answer, number in said.items() if number == max(said.values())]
                votes.append(sum(begins_low({}, answer) for answer in first) / len(first))
        by_hand[f"maj@{k}"] = sum(votes) / len(votes)
    assert {name: found.figures[name]["mean"] for name in by_hand} == pytest.approx(by_hand, abs=1e-12)
    assert found.figures["maj@1"]["mean"] == pytest.approx(found.figures["accuracy"]["mean"])
    assert 0 < by_hand["maj@1"] < 1 and by_hand["maj@3"] != by_hand["maj@1"]


@pytest.mark.parametrize(("name", "told"), [("maj", "--maj 9 needs 9 replies"), ("k", "--k 9 needs 9 replies")])
def test_more_votes_than_replies_are_refused_before_anything_is_sampled(name: str, told: str) -> None:
    figures = {name: (1, 9)}
    with pytest.raises(UserError, match=f"{told} of each task, and there are 8: raise --samples, or give a smaller"):
        posttrain.evaluate(TASKS, begins_low, "no model", success=1.0, samples=8, **figures)  # type: ignore[arg-type]


def test_a_figure_is_left_out_unless_each_model_has_a_task_with_enough_valid_rewards() -> None:
    sides = [{"a": [1.0, 0.0], "b": []}, {"a": [1.0], "b": [0.0]}]
    for order in (sides, sides[::-1]):
        wanted, (note,) = _of_valid([("pass", 1), ("pass", 2), ("maj", 2)], order)
        assert wanted == [("pass", 1)] and note.startswith("pass@2, maj@2 left out: no task has more than 1 valid")


def test_a_vote_needs_to_know_which_replies_are_right(model: str) -> None:
    with pytest.raises(UserError, match="--maj needs to know which replies are right"):
        posttrain.evaluate(TASKS, begins_low, model, samples=2, maj=(2,), env_workers=0)
