"""recipes/search_inference.py: searches have options that exist, a policy that was taught verdicts verifies itself, and one
of PPO searches with its critic."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recipe_modules import recipe_module

from posttrain.config.inference import Sample
from posttrain.config.resolve import filled, validate
from posttrain.envs.builtin import worked_sums

search = recipe_module("search_inference")


@pytest.mark.parametrize("name", list(search.SEARCHES))
@pytest.mark.parametrize("budget", search.BUDGETS)
def test_every_search_has_options_that_exist(name: str, budget: int) -> None:
    given = {"tasks": "x", "model": "x", "out": "x.jsonl", "env": search.WORKED_SUMS.env}
    validate(filled(Sample, {**given, **search.settings(name, budget)}))


def test_verdicts_are_those_of_the_exact_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search.process_rewards, "LABELLED", 40)
    rows = search.verdicts(0)
    for row in rows:
        prompt, _, rest = row["prompt"].partition(":")
        reply = rest.removesuffix("\nok?\n")
        right = sum(map(int, prompt.split())) == int(reply.rpartition("=")[2])
        assert row["response"] == ("Yes" if right else "No") and reply != rest
    assert len(rows) == 40 and len({row["response"] for row in rows}) == 2


def test_a_taught_policy_verifies_its_own_replies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common: dict[str, Any] = vars(search.WORKED_SUMS)
    few = SimpleNamespace(**{**common, "practice": lambda seed: worked_sums.tasks(64, seed, numbers=5)})
    few.imitation = {**few.imitation, "hidden": 16, "layers": 1, "epochs": 8, "warmup": 0}
    monkeypatch.setattr(search, "WORKED_SUMS", few)
    monkeypatch.setattr(search.process_rewards, "LABELLED", 64)
    monkeypatch.setattr(search, "ASKED", 2)
    options = argparse.Namespace(out=tmp_path, starts=tmp_path / "none")
    policy = search._policy(options, "taught, verified", 0)
    found = search.one(tmp_path, policy, tmp_path / "none", "taught, verified", 150, 0)
    assert found["finished"] > found["unverified"] >= 0 and found["tokens"] <= 150
    assert search._policy(options, "taught, majority", 0) == policy
    with pytest.raises(SystemExit, match="recipes/algorithms.py start"):
        search._policy(options, "majority", 0)


def test_a_policy_of_ppo_searches_with_its_own_critic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common: dict[str, Any] = vars(search.WORKED_SUMS)
    few = SimpleNamespace(**{**common, "practice": lambda seed: worked_sums.tasks(16, seed, numbers=5)})
    quick = {**search.WORKED_SUMS.settings("ppo"), "steps": 1, "prompts": 2, "group": 2, "minibatches": 1}
    few.settings = {"ppo": quick}.__getitem__
    rows = few.demonstrations(few.practice(0), 0)
    start = {**few.imitation, "hidden": 16, "layers": 1, "epochs": 1, "warmup": 0}
    search.posttrain.sft(rows, out=str(tmp_path / "start/seed-0/sft"), seed=0, **start)
    monkeypatch.setattr(search, "ASKED", 2)
    monkeypatch.setattr(search, "WORKED_SUMS", few)
    options = argparse.Namespace(out=tmp_path, starts=tmp_path / "start")
    policy = search._policy(options, "ppo, mcts", 0)
    found = search.one(tmp_path, policy, tmp_path / "none", "ppo, mcts", 150, 0)
    assert 0 < found["tokens"] <= 150
    assert search._policy(options, "ppo, majority", 0) == policy != search._policy(options, "mcts", 0)
