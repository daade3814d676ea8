"""--scorer: win rates of two models by a judge or a score, task by task, and the best of k replies by score."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from conftest import tiny
from endpoints import Said, by_length, replied, serving, write_recipe

import posttrain
from posttrain import Invalid, Rollout, UserError
from posttrain.cli.main import main
from posttrain.core.intervals import holm, share_interval, sign_test
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.figures import best_at_k
from posttrain.training.model_comparison import preferences, win_rate
from posttrain.training.verbs.suite import _with_verdicts

REWARDS = """
from posttrain import Invalid

def reward(task, reply):
    return 0.0

def even(task, reply):
    return float(len(reply) % 2 == 0)

def length(task, reply):
    return float(len(reply))

def never(task, reply):
    return Invalid("never")

def picky(task, reply):
    return Invalid("too short") if len(reply) < 3 else float(len(reply))
"""
HOW: dict[str, Any] = {"samples": 3, "max_tokens": 4, "env_workers": 0, "threads": 1, "compiled": False}
WORDS = "one two three four five six seven eight".split()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("rates")
    for name, seed in (("model", 0), ("other", 1), ("third", 2)):
        save_model(tiny(tokenizer, seed), folder / name, tokenizer)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"say {word}"}) + "\n" for word in WORDS))
    (folder / "rewards.py").write_text(REWARDS)
    return folder


@pytest.fixture(autouse=True)
def here(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)


def evaluated(scorer: str, env: str = "rewards.py:reward", **more: Any) -> Any:
    return posttrain.evaluate("rows.jsonl", env, "model", scorer=scorer, **{**HOW, **more})


def shares(own: list[Rollout], other: list[Rollout], worth: Callable[[str], float | None]) -> list[float]:
    """The share of won pairs of each task, in the plainest way."""
    tasks: dict[str, list[float]] = {}
    for task in dict.fromkeys(rollout.task["id"] for rollout in own):
        sides = [[worth(r.text) for r in side if r.task["id"] == task] for side in (own, other)]
        found = [
            1.0 if a > b else 0.0 if a < b else 0.5
            for a, b in zip(*sides, strict=True)
            if a is not None and b is not None
        ]
        if found:
            tasks[task] = found
    return [sum(won) / len(won) for won in tasks.values()]


def checked(rate: dict[str, Any], by_task: list[float]) -> None:
    """A win rate is the mean over tasks with its interval, and the sign test is over tasks."""
    assert rate["mean"] == pytest.approx(sum(by_task) / len(by_task)) and rate["tasks"] == len(by_task)
    assert (rate["low"], rate["high"]) == pytest.approx(tuple(share_interval(by_task)))
    won, lost = sum(share > 0.5 for share in by_task), sum(share < 0.5 for share in by_task)
    assert (rate["wins"]["won"], rate["wins"]["lost"]) == (won, lost)
    assert rate["wins"]["tied"] == len(by_task) - won - lost
    assert rate["wins"]["p"] == sign_test([1.0] * won + [-1.0] * lost)


def test_a_pairwise_judge_sees_different_replies_in_both_orders_and_its_win_rate_counts_each_task_once() -> None:
    with serving() as server:
        write_recipe(Path("judge.toml"), server.address, kind="pairwise", timeout=60.0)
        found = evaluated("judge=judge.toml", against=["other"])
        pairs = [tuple(replied(request)) for request in server.asked][1:]  # the first tries the endpoint
    (one,) = found.against
    checked(one.win_rate, shares(found.rollouts, one.rollouts, len))
    assert one.win_rate["pairs"] == len(found.rollouts) == 24 and 0 < one.win_rate["mean"] < 1
    assert all(a != b for a, b in pairs) and {(b, a) for a, b in pairs} == set(pairs), "both orders, equal ones in none"
    texts = {(own.text, theirs.text) for own, theirs in zip(found.rollouts, one.rollouts, strict=True)}
    assert {pair for pair in texts if pair[0] != pair[1]} <= set(pairs)
    assert found.figures.keys() == {"tasks", "samples", "reward"}, "a pairwise judge scores no single reply"


def test_a_judge_that_always_prefers_the_first_position_prefers_no_model() -> None:
    with serving(lambda request, number: Said({"reason": "first", "score": "A"})) as server:
        write_recipe(Path("first.toml"), server.address, kind="pairwise", timeout=60.0)
        (one,) = evaluated("judge=first.toml", against=["other"]).against
    assert one.win_rate["mean"] == 0.5
    assert one.win_rate["wins"] == {"won": 0, "lost": 0, "tied": 8, "p": 1.0, "p_holm": 1.0, "verdict": "undecided"}


def test_comparisons_without_a_verdict_are_left_out_and_told() -> None:
    def behave(request: dict[str, Any], number: int) -> Said:
        return by_length(request) if number == 0 or all(len(text) > 1 for text in replied(request)) else Said("hm")

    with serving(behave) as server:
        write_recipe(Path("hm.toml"), server.address, kind="pairwise", timeout=60.0)
        found = evaluated("judge=hm.toml", against=["other"])
    (one,) = found.against
    both = [(a.text, b.text) for a, b in zip(found.rollouts, one.rollouts, strict=True)]
    invalid = sum(a != b and min(len(a), len(b)) < 2 for a, b in both)
    assert 0 < invalid < 24 and one.win_rate["pairs"] == 24 - invalid
    (note,) = [note for note in found.notes if "by --scorer" in note]
    assert note.startswith(
        f"{invalid} of 24 comparisons with other by --scorer are left out as invalid; the first: judge: "
    )


def test_several_models_are_compared_by_their_scores_and_corrected_together(capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluated("rewards.py:picky", against=["other", "third"])
    for one in found.against:
        checked(one.win_rate, shares(found.rollouts, one.rollouts, lambda text: len(text) if len(text) > 2 else None))
    wins = [one.win_rate["wins"] for one in found.against]
    assert [own["p_holm"] for own in wins] == holm([own["p"] for own in wins])
    valid: dict[str, list[int]] = {}
    for rollout in found.rollouts:
        if len(rollout.text) > 2:
            valid.setdefault(rollout.task["id"], []).append(len(rollout.text))
    means = [sum(own) / len(own) for own in valid.values()]
    assert found.figures["score"]["mean"] == pytest.approx(sum(means) / len(means))
    invalid = 24 - sum(map(len, valid.values()))
    assert f"{invalid} of 24 scores of model by --scorer are left out as invalid; the first: too short" in found.notes
    words = ["--against", "other", "third", "--scorer", "rewards.py:picky", "--out", "found.json", "--max-tokens", "4"]
    words += ["--samples", "3", "--env-workers", "0", "--threads", "1", "--env", "rewards.py:reward", "--no-compiled"]
    assert main(["eval", "--tasks", "rows.jsonl", "--model", "model", *words]) == 0
    printed, told = capsys.readouterr().out, json.loads(Path("found.json").read_text())["against"]
    assert [one["win_rate"] for one in told] == [one.win_rate for one in found.against]
    assert (
        "How often rewards.py:picky prefers the reply of model, ties half\nwon, lost, tied: tasks, by win rate;"
        in printed
    )


def test_a_suite_corrects_the_win_rates_of_all_parts_together_and_averages_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    part = 'tasks = "rows.jsonl"\nenv = "rewards.py:reward"\n'
    part += "env_workers = 0\nthreads = 1\ncompiled = false\nmax_tokens = 4\n"
    Path("suite.toml").write_text(f"[near]\n{part}samples = 3\n[far]\n{part}samples = 2\nseed = 5\n")
    words = ["--model", "model", "--against", "other", "--scorer", "rewards.py:length", "--out", "suite.json"]
    assert main(["eval", "--suite", "suite.toml", *words]) == 0
    found = json.loads(Path("suite.json").read_text())
    near = evaluated("rewards.py:length", against=["other"])
    rates = [part["against"][0]["win_rate"] for part in found["parts"].values()]
    assert rates[0]["mean"] == near.against[0].win_rate["mean"]
    assert [own["wins"]["p_holm"] for own in rates] == holm([own["wins"]["p"] for own in rates])
    average = found["averages"]["all"]["against"][0]["win_rate"]
    assert average["mean"] == pytest.approx(sum(own["mean"] for own in rates) / 2)
    assert f"win rate {average['mean']:.3f}" in capsys.readouterr().out


def test_win_rates_of_all_parts_share_a_correction_of_their_own() -> None:
    def compared(p: float | None) -> dict[str, Any]:
        wins = {"won": 9, "lost": 1, "tied": 0}
        return {
            "wins": {**wins, "p": 0.001},
            **({} if p is None else {"win_rate": {"mean": 0.9, "wins": {**wins, "p": p}}}),
        }

    parts = {name: {"against": [compared(p)]} for name, p in (("near", 0.03), ("none", None), ("far", 0.04))}
    _with_verdicts(parts)
    rates = {name: part["against"][0].get("win_rate") for name, part in parts.items()}
    assert rates["none"] is None
    for name in ("near", "far"):
        assert (rates[name]["wins"]["p_holm"], rates[name]["wins"]["verdict"]) == (0.06, "undecided")
    assert all(part["against"][0]["wins"]["verdict"] == "better" for part in parts.values())


def test_an_episode_without_a_prompt_of_its_own_is_compared_by_the_first_one_that_was_shown() -> None:
    def asks(task: dict[str, Any]) -> Any:
        reply = yield f"say {task['word']} twice: "
        more = yield "again: "
        return float(len(reply) > len(more))

    rows = [{"word": word} for word in WORDS]
    with serving() as server:
        write_recipe(Path("judge.toml"), server.address, kind="pairwise", timeout=60.0)
        found = posttrain.evaluate(rows, asks, "model", against="other", scorer="judge=judge.toml", **HOW)
        asked = [request["messages"][1]["content"] for request in server.asked][1:]
    assert asked and all("say " in text and " twice: " in text and "again: " not in text for text in asked)
    (one,) = found.against
    checked(one.win_rate, shares(found.rollouts, one.rollouts, len))


@pytest.mark.parametrize(
    ("scorer", "told"),
    [
        (
            "judge=pair.toml",
            "--scorer judge=pair.toml compares two replies: add --against, or give a judge that scores",
        ),
        ("judge=nowhere.toml", "nowhere.toml"),
        (
            "people",
            "--scorer people is not a scorer: write --scorer reward-model=FOLDER, --scorer judge=RECIPE.toml, or",
        ),
        ("rewards.py:nothing", "nothing"),
    ],
)
def test_a_scorer_that_cannot_be_used_is_refused_in_one_line_before_anything_is_sampled(scorer: str, told: str) -> None:
    with serving() as server:
        write_recipe(Path("pair.toml"), server.address, kind="pairwise", timeout=60.0)
        with pytest.raises(UserError) as caught:
            evaluated(scorer)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_invalid_scores_decide_nothing() -> None:
    bad = Invalid("no")
    preferred = preferences([1.0, 2.0, 3.0, bad, 1.0], [2.0, 2.0, 1.0, 1.0, bad])
    assert preferred == [0.0, 0.5, 1.0, bad, bad]
    rate = win_rate(["a", "a", "b", "b", "c"], preferred)
    assert (rate["mean"], rate["tasks"], rate["pairs"]) == (0.625, 2, 3)
    assert rate["wins"] == {"won": 1, "lost": 1, "tied": 0, "p": 1.0}
    assert win_rate(["a"], [bad]) == {}


def test_the_cost_of_judging_is_that_of_all_answers_by_the_prices_of_the_recipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prices = {"prompt_price": 200.0, "reply_price": 5000.0}
    part = 'tasks = "rows.jsonl"\nenv = "rewards.py:reward"\nenv_workers = 0\nthreads = 1\ncompiled = false\n'
    Path("priced.toml").write_text(f"max_tokens = 4\nsamples = 1\n[near]\n{part}[far]\n{part}seed = 5\n")
    with serving() as server:
        write_recipe(Path("judge.toml"), server.address, kind="pairwise", timeout=60.0, **prices)
        found = evaluated("judge=judge.toml", against=["other"], samples=1)
        alone = len(server.asked)
        words = ["--model", "model", "--against", "other", "--scorer", "judge=judge.toml", "--out", "priced.json"]
        assert main(["eval", "--suite", "priced.toml", *words]) == 0
        suite = len(server.asked) - alone
    each = (100 * 200 + 10 * 5000) / 1e6  # tokens that the server reports, at these prices
    assert found.cost == pytest.approx(alone * each) and alone > 8
    content = json.loads(Path("priced.json").read_text())
    assert content["cost"] == pytest.approx(suite * each)
    costs = {name: part["services"]["--scorer judge"]["cost"] for name, part in content["parts"].items()}
    printed = f"cost        {suite * each:.4g}, of judges: near {costs['near']:.4g}, far {costs['far']:.4g}"
    assert printed in capsys.readouterr().out and costs["near"] == pytest.approx(found.cost)


@pytest.mark.parametrize("against", [[], ["other"]])
def test_a_scorer_without_a_valid_score_is_refused_in_one_line(
    against: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--tasks", "rows.jsonl", "--env", "rewards.py:reward", "--model", "model", "--samples", "1"]
    words += ["--max-tokens", "4", "--env-workers", "0", "--threads", "1", "--no-compiled", "--out", "none.json"]
    words += [word for model in against for word in ("--against", model)]
    assert main(["eval", *words, "--scorer", "rewards.py:never"]) == 2
    assert capsys.readouterr().err == (
        "posttrain: no score of --scorer rewards.py:never is valid: correct it, or leave it out; the first: never\n"
    )
    assert not Path("none.json").exists()


def test_a_judge_without_a_valid_comparison_is_refused_in_one_line() -> None:
    with serving(lambda request, number: by_length(request) if number == 0 else Said("hm")) as server:
        write_recipe(Path("mute.toml"), server.address, kind="pairwise", timeout=60.0)
        with pytest.raises(UserError, match="no score of --scorer judge=mute.toml is valid") as caught:
            evaluated("judge=mute.toml", against=["other"], samples=1)
    assert "\n" not in str(caught.value)


def test_one_model_without_a_valid_score_has_no_win_rate() -> None:
    unknown = {rollout.text for rollout in evaluated("", against=["other"]).against[0].rollouts}
    body = f"def score(task, reply):\n    return Invalid('no') if reply in {unknown!r} else 1.0\n"
    Path("choosy.py").write_text(f"from posttrain import Invalid\n{body}")
    found = evaluated("choosy.py:score", against=["other"])
    [one] = found.against
    assert found.figures["score"]["mean"] == 1 and "score" not in one.figures and one.win_rate == {}
    assert "24 of 24 scores of other by --scorer are left out as invalid; the first: no" in found.notes


def by_hand(scores: list[float], right: list[bool], k: int) -> float:
    """Best-of-k over every choice of k samples, the best ones of a choice equally often."""
    found = []
    for chosen in combinations(range(len(scores)), k):
        most = max(scores[i] for i in chosen)
        found.append(fmean(right[i] for i in chosen if scores[i] == most))
    return fmean(found)


def test_best_of_k_is_the_mean_over_all_choices_of_k_samples_with_ties_shared() -> None:
    draw = random.Random(0)
    for _ in range(60):
        n = draw.randint(1, 7)
        scores, right = [float(draw.randint(0, 3)) for _ in range(n)], [draw.random() < 0.5 for _ in range(n)]
        for k in range(1, n + 1):
            assert best_at_k(scores, right, k) == pytest.approx(by_hand(scores, right, k), abs=1e-12)
    with pytest.raises(ValueError, match="best@3 needs k from 1"):
        best_at_k([1.0, 2.0], [True, False], 3)


def test_best_at_k_is_that_of_the_replies_with_a_valid_score() -> None:
    found = evaluated("rewards.py:picky", env="rewards.py:even", success=1.0, samples=4, best=(1, 2, 4))
    for k in (1, 2):
        own = []
        for task in dict.fromkeys(r.task["id"] for r in found.rollouts):
            texts = [r.text for r in found.rollouts if r.task["id"] == task and len(r.text) > 2]
            if len(texts) >= k:
                own.append(by_hand([float(len(text)) for text in texts], [len(text) % 2 == 0 for text in texts], k))
        assert 0 < len(own) <= 8
        assert found.figures[f"best@{k}"]["mean"] == pytest.approx(fmean(own))
        assert found.figures[f"best@{k}"]["tasks"] == len(own)


def test_best_at_k_of_each_model_is_by_the_scores_of_its_own_replies() -> None:
    found = evaluated("rewards.py:length", env="rewards.py:even", success=1.0, samples=4, best=(2,), against=["other"])
    (one,) = found.against
    for rollouts, figures in ((found.rollouts, found.figures), (one.rollouts, one.figures)):
        own = []
        for task in dict.fromkeys(r.task["id"] for r in rollouts):
            texts = [r.text for r in rollouts if r.task["id"] == task]
            own.append(by_hand([float(len(text)) for text in texts], [len(text) % 2 == 0 for text in texts], 2))
        assert figures["best@2"]["mean"] == pytest.approx(fmean(own))
    assert found.figures["best@2"]["mean"] != one.figures["best@2"]["mean"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"best": (2,)},
            "--best needs scores: add --scorer, such as reward-model=FOLDER, judge=RECIPE.toml or my.py:reward",
        ),
        (
            {"best": (4,), "scorer": "rewards.py:length", "success": 1.0},
            "--best 4 needs 4 replies of each task, and there",
        ),
        ({"best": (2,), "scorer": "rewards.py:length"}, "--best needs to know which replies are right"),
        (
            {"best": (2,), "scorer": "judge=pair.toml", "success": 1.0, "against": "other"},
            "--scorer judge=pair.toml compares two replies: leave out --best, or give a judge that scores",
        ),
    ],
)
def test_a_best_reply_needs_scores_and_enough_samples(given: dict[str, Any], told: str) -> None:
    with serving() as server:
        write_recipe(Path("pair.toml"), server.address, kind="pairwise", timeout=60.0)
        with pytest.raises(UserError, match=re.escape(told)):
            posttrain.evaluate("rows.jsonl", "rewards.py:reward", "model", **{**HOW, **given})
