"""Reward functions written for TRL and verl run unchanged, with what those libraries give them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import tiny
from episodes import played
from scored_groups import scored

import posttrain
from posttrain.core.types import Completion, Invalid, InvalidKind, Reply, StopReason, UserError
from posttrain.envs.check import check
from posttrain.envs.play.load_env import load_env, success_of
from posttrain.envs.preview import Viewer
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.fingerprint import of_code

TRL = """
import asyncio, re

SUCCESS = 1.5

def accuracy(completions, solution, **kwargs):
    contents = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [None if s == "?" else float(s in c) for c, s in zip(contents, solution)]

def think(completions, **kwargs):
    return [0.5 * c.startswith("<") for c in completions]

async def slow(completions, log_metric=None, **kwargs):
    await asyncio.sleep(0.01)
    log_metric("mean", sum(map(len, completions)) / len(completions))
    return [float(len(c)) for c in completions]

def longest(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def named(prompts, completions):
    return [float(p == "p") for p in prompts]

def columns(prompts, completions, log_extra, **kwargs):
    log_extra("seen", [sorted(kwargs)] * len(completions))
    assert all(len(values) == len(completions) for values in kwargs.values() if isinstance(values, list))
    return [1.0] * len(completions)

def few(completions, **kwargs):
    return [1.0]

def fails(completions, **kwargs):
    raise ValueError("bad thing")

def stateful(completions, trainer_state):
    return [0.0]

def reward(task, reply):
    return {"a": 1.0, "b": 2.0}

name = "a-reward-model"
"""
VERL = """
SUCCESS = 1.0

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    score = float(solution_str.strip() == str(ground_truth))
    return {"score": score, "acc": score > 0, "split": extra_info["split"], "source": data_source}

def plain(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    return scale * (solution_str == ground_truth)

async def waits(data_source, solution_str, ground_truth, extra_info=None):
    return 2.0

def several(data_sources, solution_strs, ground_truths, extra_infos):
    best = max(solution_strs, key=len)
    return [{"score": float(s == best), "n": len(ground_truths)} for s in solution_strs]

def level(data_source, solution_str, ground_truth, extra_info=None):
    return float(extra_info.get("level", 5))

def odd(solution_str, **kwargs):
    return {"points": 1.0}

def needs(data_source, solution_str, ground_truth, tool):
    return 1.0
"""
ROW = {
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "7"},
    "extra_info": {"split": "x"},
}


@pytest.fixture
def trl(tmp_path: Path) -> str:
    (tmp_path / "rewards.py").write_text(TRL)
    return f"trl:{tmp_path / 'rewards.py'}"


@pytest.fixture
def verl(tmp_path: Path) -> str:
    (tmp_path / "score.py").write_text(VERL)
    return f"verl:{tmp_path / 'score.py'}"


@pytest.mark.parametrize("workers", [0, 1])
def test_weighted_sum_is_that_of_trl(trl: str, workers: int) -> None:
    replies = ["7", "<8", "<7>", ""]
    spec = f"{trl}:accuracy*2 + {trl}:think,slow + {trl.removeprefix('trl:')}:reward*0.1 + verify:tags"
    for solution in ("7", "?"):
        [found] = scored(spec, [replies], workers, solution=solution)
        accuracy = [math.nan if solution == "?" else float(solution in reply) for reply in replies]
        think = [0.5 * reply.startswith("<") for reply in replies]
        columns = np.array([accuracy, think, [len(r) for r in replies], [3.0] * 4, [0.0] * 4])
        expected = np.nansum(columns * np.array([[2], [1], [1], [0.1], [1]]), axis=0)
        assert [done.reward for done in found] == pytest.approx(expected.tolist(), abs=1e-12)
        names = ["accuracy", "think", "slow", "rewards", "tags"][solution == "?" :]
        assert all(list(done.rewards) == names for done in found)
        assert all(done.notes == {"mean": 1.5} for done in found)


def test_reply_that_no_function_scores_is_invalid(trl: str) -> None:
    [found] = scored(f"{trl}:accuracy", [["7", "8"]], solution="?")
    assert [d.reward for d in found] == [Invalid("no reward function scored it: each of them returned None")] * 2
    [found] = scored(f"{trl}:accuracy", [["7", "8"]], solution="7")
    assert [(d.reward, d.rewards) for d in found] == [(1.0, {}), (0.0, {})]


def test_completions_are_messages_where_the_prompt_is() -> None:
    seen: list[Any] = []

    def look(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        seen.append((prompts, completions))
        return [0.0] * len(prompts)

    reward = load_env(posttrain.trl_reward(look))
    asked = [{"role": "user", "content": "p"}]
    reward([{"messages": asked}] * 2, [Reply("a"), Reply("b")])
    reward([{"prompt": "p", "messages": asked}], [Reply("a")])  # a plain prompt, shown in a chat template
    said = [[{"role": "assistant", "content": text}] for text in "ab"]
    assert seen == [([asked] * 2, said), (["p"], ["a"])]


def test_function_that_changes_its_arguments_changes_nothing_for_others() -> None:
    def changing(prompts: Any, completions: Any, meta: Any, **_: Any) -> list[float]:
        prompts[0][0]["content"] = completions[0][0]["content"] = meta[0]["x"] = "changed"
        return [1.0] * len(prompts)

    def reading(prompts: Any, completions: Any, meta: Any, **_: Any) -> list[float]:
        whole = zip(prompts, completions, meta, strict=True)
        return [float((p[0]["content"], c[0]["content"], m["x"]) == ("q", "a", 1)) for p, c, m in whole]

    task = {"messages": [{"role": "user", "content": "q"}], "meta": {"x": 1}}
    found = posttrain.trl_reward(changing, reading)([task, task], [Reply("a"), Reply("a")])
    assert [of["reward"] for of in found] == [2.0, 2.0] and task["meta"] == {"x": 1}


def test_columns_are_those_of_the_rows_and_only_named_ones_where_a_function_names_them(trl: str) -> None:
    [[one]] = scored(f"{trl}:columns", [["a"]], solution="7", level=3)
    assert one.reward == 1.0 and one.notes == {"seen": ["id", "level", "log_metric", "solution"]}
    assert scored(f"{trl}:named", [["a"]], solution="7")[0][0].reward == 1.0


def test_completion_ids_are_the_sampled_tokens_with_the_end(trl: str, tokenizer: Tokenizer) -> None:
    rollouts = played(f"{trl}:longest", tokenizer)
    assert [r.reward for r in rollouts] == [float(r.n_sampled) for r in rollouts]
    assert any(r.stop is StopReason.EOS for r in rollouts)
    [[unsampled]] = scored(f"{trl}:longest", [["a"]])
    assert isinstance(unsampled.reward, Invalid) and "these replies have no tokens" in unsampled.reward.reason
    sampled = Reply("a", sampled=Completion(0, [5, 6], [0.0, 0.0], "a", StopReason.EOS, 0))
    assert load_env(f"{trl}:longest")([{"prompt": "p"}], [sampled]) == [2.0]


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("few", InvalidKind.UNREADABLE, "few: returned 1 rewards for 2 replies; expected a list with one for each"),
        ("fails", InvalidKind.RAISED, "fails: ValueError: bad thing (rewards.py:33)"),
        (
            "accuracy",
            InvalidKind.REPORTED,
            "accuracy: it reads the column 'solution', and the row has answer: rename one",
        ),
    ],
)
def test_failure_names_its_function(trl: str, name: str, kind: InvalidKind, reason: str) -> None:
    [found] = scored(f"{trl}:{name},think", [["a", "b"]], answer="7")
    for done in found:
        assert isinstance(done.reward, Invalid) and done.reward.kind is kind and reason in done.reward.reason


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (
            "{}:stateful",
            "needs trainer_state, which TRL's trainer passes and posttrain does not: give the parameter a default",
        ),
        (
            "{}:reward",
            r"takes \(task, reply\), not TRL's completions: name a reward of \(task, reply\) without trl:",
        ),
        ("{}:acuracy", r"has no 'acuracy'; did you mean 'accuracy'"),
        ("{}:accuracy,accuracy", "has accuracy twice: give it once, with a weight"),
        ("{}:accuracy*2,think", "give each function with a weight as a term of its own: trl:FILE:f"),
        ("{}:accuracy,", "'' is not the name of a function"),
        ("{}", "names no function: write .*rewards.py:accuracy or"),
        ("{}:name", "is 'a-reward-model' .*, not a reward function of TRL.*--reward-model FOLDER"),
        (
            "trl:accuracy_reward_of_nobody",
            "TRL is not installed: pip install trl, or name your file|has no 'accuracy_reward_of_nobody'",
        ),
    ],
)
def test_name_that_is_no_function_of_trl_is_refused(trl: str, spec: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        load_env(spec.format(trl))


def test_function_of_another_library_is_refused_with_its_prefix(trl: str, verl: str) -> None:
    with pytest.raises(UserError, match="as a reward of TRL does: give it as trl:FILE:NAME, or trl_reward"):
        load_env(f"{trl.removeprefix('trl:')}:accuracy")
    with pytest.raises(UserError, match="as a reward of verl does: give it as verl:FILE:NAME, or verl_reward"):
        load_env(f"{verl.removeprefix('verl:')}:compute_score")


def test_weights_from_python_are_one_for_each_function() -> None:
    def f(completions: Any, **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)

    found = posttrain.trl_reward(f, f, weights=[1.0, 0.5])([{"prompt": "p"}], [Reply("a")])
    assert found == [{"reward": 1.5, "f": 1.0, "f-2": 1.0}]
    with pytest.raises(UserError, match="has 2 functions and 1 weights: give one for each"):
        posttrain.trl_reward(f, f, weights=[1.0])


def test_functions_from_python_travel_to_workers(tmp_path: Path) -> None:
    def f(completions: Any, **kwargs: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    def g(data_source: Any, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        return float(solution_str == ground_truth)

    assert [d.reward for d in scored(posttrain.trl_reward(f), [["a", "ab"]])[0]] == [1.0, 2.0]
    assert [d.reward for d in scored(posttrain.verl_reward(g), [["7", "8"]], **ROW)[0]] == [1.0, 0.0]


def test_reward_of_success_and_files_are_found_behind_a_prefix(trl: str, verl: str) -> None:
    assert success_of(f"{trl}:accuracy", None) == 1.5 and success_of(f"{verl}:plain,scale=2", None) == 1.0
    assert success_of(f"{trl}:accuracy*2 + verify:tags", None) == 4.0
    assert success_of(f"{trl}:accuracy,think + verify:tags", None) is None
    one, both = of_code(f"{trl}:accuracy"), of_code(f"{trl}:accuracy + {verl}:plain")
    assert of_code("verify:exact_match*0.5 + verify:f1*0.5") is None and of_code("verify:f1") is None
    assert of_code(f"verify:f1 + {trl}:accuracy") == one
    assert one and both and one["digest"] != both["digest"] and both["bytes"] == len(TRL) + len(VERL)


def test_a_function_for_verl_says_which_replies_are_right_whatever_their_score(tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(
        "def inner(text):\n    return {'score': 0.6 if text == '7' else 2.0, 'is_correct': text == '7'}\n"
        "def compute_score(solution_str, **kwargs):\n    return inner(solution_str)\n"
        "def plain(solution_str, **kwargs):\n    return 1.0\n"
    )
    file = f"verl:{tmp_path / 'right.py'}"
    spec = f"{file}:compute_score"
    [found] = scored(spec, [["7", "8"]], **ROW)
    assert [(d.reward, d.rewards["outcome"]) for d in found] == [(0.6, 1.0), (2.0, 0.0)]
    assert success_of(spec, None) == 1 and success_of(spec, 0.5) == 0.5
    assert success_of(load_env(spec), None) == 1 and success_of(f"{file}:plain", None) is None
    assert success_of(f"{spec}*0.5", None) is None, "of a sum nobody says it"
    assert success_of(spec, 2.0) == 2.0, "what is given counts"


def test_only_a_function_that_writes_acc_is_taken_to_say_which_replies_are_right(tmp_path: Path) -> None:
    (tmp_path / "acc.py").write_text(
        "import functools\n"
        "def reads(solution_str, extra_info=None, **kwargs):\n    return {'score': 2.0 * extra_info.get('acc', 1.0)}\n"
        "def stores(solution_str, **kwargs):\n    found = {'score': 0.5}\n    found['acc'] = 1\n    return found\n"
        "def called(solution_str, **kwargs):\n    return dict(score=0.5, acc=True)\n"
        "class Judge:\n    def __call__(self, solution_str, **kwargs):\n        return {'score': 0.2, 'acc': True}\n"
        "judge, bound = Judge(), functools.partial(called)\n"
    )
    told = {
        name: success_of(f"verl:{tmp_path / 'acc.py'}:{name}", None) for name in ("stores", "called", "judge", "bound")
    }
    assert set(told.values()) == {1.0}, told
    assert success_of(f"verl:{tmp_path / 'acc.py'}:reads", None) is None


@pytest.mark.parametrize("workers", [0, 1])
def test_score_of_verl_is_the_reward_with_its_other_numbers_beside_it(verl: str, workers: int) -> None:
    [found] = scored(f"{verl}:compute_score", [[" 7", "8"]], workers, **ROW)
    assert [(d.reward, d.rewards) for d in found] == [
        (1.0, {"outcome": 1.0, "acc": 1.0}),
        (0.0, {"outcome": 0.0, "acc": 0.0}),
    ]
    assert found[0].notes == {"split": "x", "source": "openai/gsm8k"}
    assert [d.reward for d in scored(f"{verl}:plain,scale=3", [["7", "8"]], workers, **ROW)[0]] == [3.0, 0.0]
    assert scored(f"{verl}:plain", [["9"]], workers, **ROW, **{"ground_truth": "9"})[0][0].reward == 1.0
    assert scored(f"{verl}:waits", [["9"]], workers, **ROW)[0][0].reward == 2.0
    several = scored(f"{verl}:several", [["1", "12"]], workers, **ROW)[0]
    assert [(d.reward, d.rewards) for d in several] == [(0.0, {"n": 2.0}), (1.0, {"n": 2.0})]
    without = {**ROW, "extra_info": None}  # verl gives an empty dict then
    assert scored(f"{verl}:level", [["9"]], workers, **without)[0][0].reward == 5.0
    [[odd]] = scored(f"{verl}:odd", [["1"]], workers, **ROW)
    assert isinstance(odd.reward, Invalid) and 'returned a dict without "score"; it has points' in odd.reward.reason


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("{}:needs", "needs tool, which verl does not pass to .* as verl:.*:needs,tool=VALUE"),
        ("{}:plain,scael=2", "no option 'scael'; did you mean 'scale'"),
        ("{}:SUCCESS", "is not a function: verl's is def compute_score"),
    ],
)
def test_name_that_is_no_function_of_verl_is_refused(verl: str, spec: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        load_env(spec.format(verl))


def test_row_without_the_columns_of_a_function_is_told_before_the_run(trl: str, verl: str) -> None:
    rows = [{"prompt": "p", "answer": "7"}]
    for env, reason in (
        (f"{trl}:accuracy", "row 1: trl:.*rewards.py:accuracy: it reads the column 'solution', and the row has answer"),
        (
            f"{verl}:plain",
            "row 1: verl:.*:plain reads reward_model.ground_truth, and the row has answer: name its column",
        ),
    ):
        with pytest.raises(UserError, match=reason):
            posttrain.rl(rows, env, "nowhere", out="nowhere")


def test_check_scores_the_sample_replies_of_a_task_as_one_group_with_their_tokens(
    trl: str, tokenizer: Tokenizer
) -> None:
    viewer = Viewer(tokenizer, 256, (0,))
    found = check(f"{trl}:longest", [{"id": "t", "prompt": "p", "answer": "77"}], viewer=viewer)
    expected = {case.kind: len(tokenizer.encode(case.reply)) + 1 for case in found.cases}
    assert {case.kind: case.result.reward for case in found.cases if case.result} == expected and expected["empty"] == 1
    assert found.ok and all(case.repeats for case in found.cases)

    def ranks(tasks: Any, replies: Any) -> list[float]:
        return [sum(len(o) < len(r) for o in replies) for r in replies]

    found = check(ranks, [{"id": "t", "prompt": "p"}], ["a", "abc", "ab"])
    assert [case.result.reward for case in found.cases if case.result] == [0.0, 2.0, 1.0]


FOR_VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, strict=False, **kwargs):
    return kwargs["fmt"] * 2 if kwargs["on"] else kwargs["name"]
"""


BROKEN_TRL = {
    "return None": "f: returned None (NoneType) for 2 replies; expected a list with one for each",
    "return 1.0": "f: returned 1.0 (float) for 2 replies; expected a list",
    "return 'ab'": "f: returned 'ab' (str) for 2 replies; expected a list",
    "return [1.0] * 3": "f: returned 3 rewards for 2 replies; expected a list with one for each",
    "return ['good', 1.0]": "f: returned 'good' (str) for a reply; expected a finite number of at most 1e+06, or None",
    "return [float('nan'), 1.0]": "f: returned nan (float) for a reply; expected a finite number",
    "return [{'score': 1.0}, 1.0]": "f: returned {'score': 1.0} (dict) for a reply; expected a finite number",
    "return wait(1.0)": "f: returned a coroutine (declare the function with async def) for 2 replies",
    "raise KeyError('x')": "f: KeyError: 'x' (bad.py:5)",
    "raise SystemExit(3)": "f: SystemExit: 3 (bad.py:5)",
    "await wait(1); return None": "f: returned None (NoneType) for 2 replies",
    "await wait(1); raise KeyError('x')": "f: KeyError: 'x' (bad.py:5)",
}
BROKEN_VERL = {
    "return None": "returned None (is a return missing?); expected a finite number",
    "return 'good'": "returned 'good' (str); expected a finite number",
    "return float('nan')": "returned nan; expected a finite number",
    "return [1.0, 2.0]": "returned [1.0, 2.0] (list); expected a finite number",
    "return {}": 'returned a dict without "score"; it has nothing',
    "return {'score': None}": 'returned a dict whose "score" is None (is a return missing?)',
    "return {'score': '1'}": "returned a dict whose \"score\" is '1' (str); expected a finite number",
    "return wait(1.0)": "returned a coroutine (declare the function with async def); expected a finite number",
    "raise KeyError('x')": "KeyError: 'x' (bad.py:5)",
    "raise SystemExit(3)": "SystemExit: 3 (bad.py:5)",
    "await wait(1); return None": "returned None (is a return missing?); expected a finite number",
    "await wait(1); raise KeyError('x')": "KeyError: 'x' (bad.py:5)",
}


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize(
    ("library", "body", "reason"),
    [(name, *case) for name, cases in (("trl", BROKEN_TRL), ("verl", BROKEN_VERL)) for case in cases.items()],
)
def test_a_function_that_misbehaves_is_one_line_that_says_how(
    tmp_path: Path, library: str, body: str, reason: str
) -> None:
    """Functions of these libraries often take **kwargs alone."""
    begin = "async def" if body.startswith("await") else "def"
    (tmp_path / "bad.py").write_text(f"async def wait(x):\n    return x\n\n{begin} f(**kwargs):\n    {body}\n")
    [found] = scored(f"{library}:{tmp_path / 'bad.py'}:f", [["a", "b"]], **ROW)
    reward = found[0].reward
    assert isinstance(reward, Invalid) and reward.reason.startswith(reason) and "\n" not in reward.reason, reward


def test_a_verl_score_that_is_invalid_keeps_its_reason_and_another_is_told_what_a_score_is(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from posttrain import Invalid\n"
        "def f(solution_str, **kwargs):\n"
        "    return {'score': Invalid('no answer') if solution_str == 'a' else '1'}\n"
    )
    [[own, text]] = scored(f"verl:{tmp_path / 'own.py'}:f", [["a", "b"]], **ROW)
    assert own.reward == Invalid("no answer")
    assert isinstance(text.reward, Invalid) and text.reward.reason.endswith("expected a finite number of at most 1e+06")


def test_a_function_that_takes_kwargs_alone_gets_everything(tmp_path: Path) -> None:
    (tmp_path / "kwargs.py").write_text(
        "def several(**kwargs):\n    return [float(len(c)) for c in kwargs['completions']]\n"
        "def one(**kwargs):\n    return float(len(kwargs['solution_str'] + kwargs['ground_truth']))\n"
    )
    found = [scored(f"{term}", [["a", "ab"]], **ROW)[0] for term in
             (f"trl:{tmp_path / 'kwargs.py'}:several", f"verl:{tmp_path / 'kwargs.py'}:one")]  # fmt: skip
    assert [[done.reward for done in each] for each in found] == [[1.0, 2.0], [2.0, 3.0]]


def test_ten_updates_with_a_function_of_verl_are_those_with_the_same_reward_of_ours(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    save_model(tiny(tokenizer), tmp_path / "start", tokenizer)
    (tmp_path / "score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert data_source == 'sums' and extra_info['index'] >= 0\n"
        "    digits = sum(c.isdigit() for c in solution_str + ground_truth) - len(ground_truth)\n"
        "    return {'score': digits / (1 + len(solution_str)), 'length': len(solution_str)}\n"
        "def reward(task, reply):\n"
        "    return sum(c.isdigit() for c in reply) / (1 + len(reply))\n"
    )
    rows = [
        {"data_source": "sums", "prompt": f"{i}+1=", "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
         "extra_info": {"split": "train", "index": i}} for i in range(8)
    ]  # fmt: skip
    how: dict[str, Any] = {"steps": 10, "prompts": 8, "group": 8, "max_tokens": 8, "lr": 3e-2}
    how |= {"threads": 1, "env_workers": 0, "quiet": True}
    start, file = str(tmp_path / "start"), tmp_path / "score.py"
    runs = [
        posttrain.rl(rows, f"{prefix}{file}:{name}", start, out=str(tmp_path / name), **how)
        for prefix, name in (("verl:", "compute_score"), ("", "reward"))
    ]  # fmt: skip
    verl, ours = ([row["reward"] for row in run.metrics if row["step"]] for run in runs)
    assert verl == ours and len(verl) == 10 and sum(verl[-3:]) > sum(verl[:3]) + 0.3
    assert not any(row["invalid"] for row in runs[0].metrics if row["step"])


def test_settings_that_only_kwargs_takes_reach_a_verl_function_as_its_configuration_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("score.py").write_text(FOR_VERL)
    for given, score in (("fmt=0.1,on=true", 0.2), ("on=false,name=a b", "a b")):
        assert load_env(f"verl:score.py:compute_score,{given}")({"ground_truth": "1"}, "x") == score


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("trl:score.py:compute_score", "give it as verl:score.py:compute_score"),
        ("trl:f.py", "trl:f.py names no function: write trl:f.py:f"),
        ("verl:missing.py", "there is no file missing.py: write verl:FILE.py:compute_score"),
    ],
)
def test_a_name_that_lacks_its_function_or_has_the_other_library_s_prefix_gets_the_whole_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("score.py").write_text(FOR_VERL)
    Path("f.py").write_text("def f(completions, **kwargs):\n    return [1.0]\n")
    with pytest.raises(UserError) as refused:
        load_env(spec)
    assert told in str(refused.value)
