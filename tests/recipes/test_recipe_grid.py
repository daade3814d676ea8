"""recipes/grid.py: which cells there are, what each source learns from, and how a source is judged."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recipe_modules import recipe_module

import posttrain
from posttrain import Invalid, Rollout

grid = recipe_module("grid")


def reply(name: str, text: str, reward: float | Invalid) -> Rollout:
    answer = str(sum(map(int, name.split("+"))))
    return Rollout({"id": name, "prompt": f"{name}=", "answer": answer}, "g", [], reward, text=text)


SAMPLED = {
    "1+2": [reply("1+2", "3", 0.9), reply("1+2", "4", 0.2), reply("1+2", "5", 0.9), reply("1+2", " ", 1.0)],
    "2+2": [reply("2+2", "4", 0.1), reply("2+2", "5", 0.7), reply("2+2", "6", Invalid("no verdict"))],
    "3+3": [reply("3+3", "6", 0.5), reply("3+3", "6", 0.5)],
}


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(grid.Grid, "sampled", lambda *_: SAMPLED)
    monkeypatch.setattr(grid.Grid, "start", "start")
    return grid.Grid(tmp_path, 0)


def test_every_source_has_the_cells_that_exist() -> None:
    cells = list(grid.cells())
    assert len(cells) == len(set(cells)) == 28
    of_teacher = [credit for source, credit in cells if source == grid.TEACHER]
    assert of_teacher == ["every token", "offline pairs", "imitation"]
    assert all(credit != "every token" for source, credit in cells if source != grid.TEACHER)


def test_a_source_agrees_where_it_ranks_a_right_reply_above_a_wrong_one_and_half_where_it_ties(sampling: Any) -> None:
    # 1+2: the right 3 beside 4 (won), 5 (a tie) and " " (lost); 2+2: 4 beside 5 (lost); 3+3 has no wrong reply.
    assert sampling.agreement(grid.RULE, None) == pytest.approx((1 + 0.5 + 0 + 0) / 4)


def test_pairs_and_imitation_take_the_best_and_the_worst_replies_that_say_something(
    sampling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    for verb in ("sft", "prefer"):
        monkeypatch.setattr(posttrain, verb, lambda given, *_, verb=verb, **how: seen.update({verb: given}))
    for credit in grid.OFFLINE_CREDIT:
        sampling.offline(grid.RULE, credit, None, "out")
    assert seen["prefer"] == [
        {"prompt": "1+2=", "chosen": "3", "rejected": "4"},
        {"prompt": "2+2=", "chosen": "5", "rejected": "4"},
    ]
    assert [(row["prompt"], row["response"]) for row in seen["sft"]] == [("1+2=", "3"), ("2+2=", "5")]


def test_preferences_prefer_a_right_reply_to_a_wrong_one(sampling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling.__dict__["labelled"] = [[("1+2=", "4", False), ("1+2=", "3", True)], [("3+3=", "6", True)]]
    assert sampling.pairs == [{"prompt": "1+2=", "chosen": "3", "rejected": "4"}]


def test_the_judge_errs_in_a_tenth_of_its_verdicts_and_always_in_the_same(tmp_path: Path) -> None:
    with grid.served_judge(tmp_path) as file:
        address = json.loads(file.read_text().splitlines()[0].partition(" = ")[2])

        def verdict(prompt: str, text: str) -> int:
            shown = f"[prompt]\n{prompt}\n[a reply]\n{text}\n[end]"
            body = json.dumps({"messages": [{"content": ""}, {"content": shown}]}).encode()
            with urllib.request.urlopen(urllib.request.Request(f"{address}/chat/completions", body)) as answer:
                return int(json.loads(json.load(answer)["choices"][0]["message"]["content"])["score"])

        asked = [(a, b, a + b + off) for a in range(10) for b in range(10) for off in (0, 1)]
        said = [verdict(f"{a}+{b}=", str(c)) for a, b, c in asked]
        wrong = sum(one != (c == a + b) for one, (a, b, c) in zip(said, asked, strict=True))
        assert 10 <= wrong <= 32  # of 200
        assert said == [verdict(f"{a}+{b}=", str(c)) for a, b, c in asked]


def test_accuracy_is_that_of_the_exact_answer_whatever_rewarded(sampling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluated(rows: Any, env: str, model: str, **_: Any) -> Any:
        assert (env, model) == ("arithmetic", "trained") and len(rows) == 500
        return SimpleNamespace(figures={"accuracy": {"mean": 0.25}})

    monkeypatch.setattr(posttrain, "evaluate", evaluated)
    assert sampling.measured("trained") == 0.25
