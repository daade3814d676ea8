"""Verifiers by name: each gives what its function gives, alone and in sums; what is none is refused with the fix."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import posttrain.verify
from posttrain.cli import write_types
from posttrain.cli.main import main
from posttrain.config.inference import Check
from posttrain.core.types import Invalid, UserError
from posttrain.envs.check import check
from posttrain.envs.play.env_outputs import Done
from posttrain.envs.play.load_env import about, load_converter, load_env, success_of
from posttrain.envs.reward_sums import RewardTerm, is_sum, terms_of
from posttrain.verify.named_verifiers import ANSWERS, OTHERS, VERIFIERS
from posttrain.verify.short_answer import exact_match
from posttrain.verify.similarity import rouge_l
from posttrain.verify.unit_tests import share_of_tests

SETTINGS = {"length_penalty": ",most=4,soft=2", "within": ",least=1", "numeric": ",tolerance=0.01"}
"""Settings of those that need some, or are more interesting with them."""
ROW = {
    "id": "a", "prompt": "?", "answer": "42", "reference": "def double(x): return 2 * x", "language": "en", "target": 3,
    "pattern": r"4\d", "schema": {"type": "number"}, "headings": ["Plan"], "shown": ["1"], "sources": ["so it is 42"],
    "signature": "double(x)", "tests": ["assert double(2) == 4"], "harmful": True,
}  # fmt: skip


def score(spec: str, reply: str, **row: Any) -> Any:
    return load_env(spec)({**ROW, **row}, reply)


def test_every_verifier_of_the_package_has_a_name_or_a_reason_and_what_to_name_instead() -> None:
    functions = {v.function.__name__ for v in VERIFIERS.values()}
    named = functions | {"refusal_reward", "same_number"}
    assert set(posttrain.verify.__all__) <= named | set(OTHERS)
    assert not set(VERIFIERS) & set(OTHERS)


@pytest.mark.parametrize("name", VERIFIERS)
def test_every_verifier_gives_a_number_for_a_row_that_has_its_columns(name: str) -> None:
    reward = load_env(f"verify:{name}{SETTINGS.get(name, '')}")
    for reply in ("The answer is 42.", "def double(x): return x + x", ""):
        assert type(reward(ROW, reply)) is float
    bare = {"id": "a", "prompt": "?"}
    needed = [column for column in VERIFIERS[name].columns_of() if not column.startswith("[")]
    found = reward(bare, "42")
    assert isinstance(found, Invalid) == bool(needed)
    if needed:
        assert f"the column {needed[0]!r}" in found.reason and f"--fields.{needed[0]} COLUMN" in found.reason


def test_a_verifier_by_name_is_its_function_with_columns_and_settings() -> None:
    assert score("verify:exact_match", "Paris", answer=["paris", "Lutetia"]) == exact_match("Paris", ["paris"]) == 1.0
    assert score("verify:rouge_l,beta=2", "a b c", reference="a c d") == rouge_l("a b c", "a c d", 2.0)
    code, tests = "def f(): return 1", ["assert f() == 1", "assert f() == 2"]
    assert score("verify:share_of_tests", code, tests=tests) == share_of_tests(code, tests) == 0.5
    assert score("verify:tags,names=a b,only=false", "x <a>1</a> <b>2</b>") == 1.0
    assert score("verify:matches,pattern=^b", "abc") == 0.0 and score("verify:matches,pattern=^a", "abc") == 1.0
    assert score("verify:numeric,tolerance=0.01", "about 3.14", answer=3.14159) == 1.0
    assert score("verify:numeric", "about 3.14", answer=3.14159) == 0.0
    assert score("verify:within,most=2,unit=sentences", "One. Two. Three.") == 0.0
    assert score("verify:refusal_reward,missed=-1", "Sure: ...") == -1.0


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("Paris", ("final", "reply")),
        ("<think>Lyon?</think> Paris", ("final", "reply")),
        ("<think>hm</think><answer>Paris</answer>", ("final", "tags")),
        (r"So it is \boxed{Paris}.", ("final", "boxed")),
        ("The answer is Paris.", ("final",)),
        ("It is not Paris.", ()),
    ],
)
def test_the_answer_is_read_where_the_setting_says(reply: str, right: tuple[str, ...]) -> None:
    found = [way for way in ANSWERS if score(f"verify:exact_match,answer={way}", reply, answer="Paris") == 1.0]
    assert tuple(found) == right
    assert score("verify:exact_match", reply, answer="Paris") == float("final" in right), "final is the default"


def test_a_sum_adds_up_weights_and_names_every_part() -> None:
    spec = "verify:exact_match*0.9 + verify:tags*0.1"
    assert score(spec, "<think>6*7</think><answer>42</answer>") == {"reward": 1.0, "exact_match": 1.0, "tags": 1.0}
    assert score(spec, "42") == {"reward": 0.9, "exact_match": 1.0, "tags": 0.0}
    assert load_env(spec.replace(" + ", "+"))(ROW, "42") == score(spec, "42")
    two = score("verify:matches,pattern=^4*2 + verify:matches,pattern=^5*-1", "42")
    assert two == {"reward": 2.0, "matches": 1.0, "matches-2": 0.0}
    assert score("verify:length_error*-0.5", "one") == {
        "reward": pytest.approx(-1 / 3),
        "length_error": pytest.approx(2 / 3),
    }


def test_a_sum_takes_rewards_of_ones_own_and_built_in_ones_with_their_rows(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("def reward(task, reply):\n    return {'a': 1, 'b': 1.0}\n")
    mixed = f"{tmp_path / 'my.py'}:reward*0.25 + verify:exact_match"
    assert score(mixed, "42") == {"reward": 1.5, "my": 2.0, "exact_match": 1.0}
    spec = "gsm8k + verify:length_penalty,most=400,soft=100*0.2"
    task = load_converter(spec)({"question": "6*7?", "answer": "so #### 42"})  # type: ignore[misc]
    assert task is not None and task["answer"] == "42"
    assert load_env(spec)(task, "<answer>42</answer>")["gsm8k"] == 1.0


def test_no_summand_is_lost_where_two_have_one_name(tmp_path: Path) -> None:
    """Names with a dash too, and a file that is called as the second of two would be."""
    names = ("a/my-own.py", "b/my-own.py", "my-own-2.py", "c/my-own.py")
    for worth, name in zip((1, 10, 100, 1000), names, strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"def reward(task, reply):\n    return {worth}.0\n")
    found = score(" + ".join(f"{tmp_path / name}:reward" for name in names) + " + verify:exact_match*0", "42")
    assert found["reward"] == 1111.0 and sorted(found.values()) == [1.0, 1.0, 10.0, 100.0, 1000.0, 1111.0]


def test_right_is_what_has_full_marks_in_every_part_that_has_any() -> None:
    assert success_of("verify:exact_match", None) == 1.0 and success_of("verify:exact_match", 0.5) == 0.5
    assert success_of("verify:exact_match*0.9 + verify:tags*0.1", None) == 1.0
    assert success_of("gsm8k + verify:exact_match*0.5", None) == 1.5
    for without in ("verify:count", "verify:exact_match + verify:length_penalty,most=4,soft=2", "verify:refuses*-1"):
        assert success_of(without, None) is None


def test_sums_are_told_from_files_and_patterns_by_their_names() -> None:
    assert terms_of("verify:a*2+verify:b") == [RewardTerm("verify:a", 2.0), RewardTerm("verify:b", None)]
    assert terms_of("verify:matches,pattern=a+b") == [RewardTerm("verify:matches,pattern=a+b", None)]
    assert not is_sum("a+b/my.py:reward") and not is_sum("search-qa,topk=5")


def test_a_worker_plays_a_sum_by_its_name() -> None:
    [case] = check("verify:exact_match*0.5 + verify:parses*0.5", [ROW], ["42"], seconds=30).cases
    assert case.result == Done(1.0, {"exact_match": 1.0, "parses": 1.0})


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("verify:exactmatch", "there is no such verifier; did you mean 'exact_match'?"),
        ("verify:between", "between finds a text: give verify:exact_match,answer=tags"),
        ("verify:Weighted", "is written as a sum"),
        ("verify:same_number", "is called verify:numeric"),
        ("verify:within,lest=1", "no setting 'lest'; did you mean 'least'?"),
        ("verify:parses,most=1", "no setting 'most'; it has none"),
        ("verify:within,least", "the setting least has no value"),
        ("verify:within,least=few", "least is a whole number, not 'few'"),
        ("verify:length_penalty,soft=3", "needs the setting most"),
        ("verify:exact_match*0.9 + ", 'is not a sum of rewards: write "verify:exact_match*0.9 + verify:tags*0.1"'),
        ("verify:exact_match*1e999", 'is not a sum of rewards: write "verify:exact_match*0.9 + verify:tags*0.1"'),
        ("guess + verify:tags", "guess cannot be added to others"),
        ("posttrain.verify:exact_match", "name a verifier without its module: --env verify:exact_match"),
        ("posttrain.verify.math:verify", "name a verifier without its module: --env verify:math"),
        ("posttrain.verify:between", "between finds a text"),
    ],
)
def test_a_name_that_cannot_be_is_refused_in_one_line_with_the_fix(spec: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        load_env(spec)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_verifier_given_as_a_function_is_refused_and_a_weighted_one_is_a_reward() -> None:
    with pytest.raises(
        UserError, match="exact_match is a verifier, not a reward: give its name, env='verify:exact_match'"
    ):
        load_env(exact_match)
    whole = posttrain.verify.Weighted({"same": (1.0, lambda task, reply: reply == task["answer"])})
    assert load_env(whole)(ROW, "42")["reward"] == 1.0


def test_a_column_that_cannot_be_read_is_invalid_and_never_wrong() -> None:
    for wrong in ({"a": 1}, True, [["42"]]):
        found = score("verify:exact_match", "42", answer=wrong)
        assert isinstance(found, Invalid)
        assert found.reason.startswith("verify:exact_match cannot read the column 'answer': expected text, or a list")
    assert score("verify:exact_match", "42", answer=42) == score("verify:exact_match", "42", answer=[41, 42]) == 1.0


def test_check_says_what_a_verifier_reads_and_lists_them_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    Path("rows.jsonl").write_text(json.dumps({"prompt": "6*7=", "answer": 42}) + "\n")
    assert main(["check", "--env", "verify:exact_match*0.9 + verify:tags*0.1", "--tasks", "rows.jsonl"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "verify:exact_match: 1.0 if the answer equals" in said and "Reads answer; settings: answer=final." in said
    assert "reward 0.9 (exact_match 1, tags 0)" in said
    assert main(["check", "--verifiers"]) == 0
    listed = capsys.readouterr().out
    assert (
        set(re.findall(r"(?m)^  verify:(\w+)", listed)) == set(VERIFIERS) and max(map(len, listed.splitlines())) <= 80
    )
    assert about("gsm8k + verify:tags") == about("verify:tags")


def test_the_page_of_verifiers_is_written_from_the_table() -> None:
    page = Path(write_types.__file__).parents[2] / "docs" / "guides" / "verifiers-by-name.md"
    assert page.read_text() == write_types.verifiers_page(), "run python -m posttrain.cli.write_types"
    assert Check(verifiers=True).verifiers
