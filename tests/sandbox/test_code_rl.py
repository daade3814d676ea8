"""Small functions and their parts, a choice among one's own programs, which candidate is submitted, how programs behave."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import pytest
from conftest import tiny

from experiments import code_rl, coder, functions
from experiments.coder import Candidate
from experiments.functions import PARTS, STEPS, Function, compositions
from posttrain.core.rollouts import Rollout
from posttrain.core.transcripts import SpanKind
from posttrain.core.types import Invalid, Reply, Sampling, Task, Turn, UserError
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.envs.builtin.code_choice import FAILS, PASSES, choice_of, code_choice, shown
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.episode import Episode
from posttrain.envs.play.load_env import load_env
from posttrain.envs.play.player import Player
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.sandbox import shared_sandbox
from posttrain.verify.fenced import code_in
from posttrain.verify.unit_tests import behaviour, graded

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")
BY_PHRASE = {step.phrase: step for step in functions.LISTS}
TASK: Task = {
    "id": "double",
    "prompt": "Double it.\n",
    "example": "assert f(2) == 4",
    "tests": ["assert f(3) == 6", "assert f(0) == 0"],
}
RIGHT, SQUARE, FOUR = "def f(x):\n    return x + x", "def f(x):\n    return x * x", "def f(x):\n    return 4"
BROKEN = "def f(x) return x"


@pytest.fixture(scope="module", autouse=True)
def one_sandbox() -> Iterator[None]:
    yield
    shared_sandbox.close()


# -- functions ---------------------------------------------------------------------------------------------------------


def test_references_pass_all_their_tests_in_the_sandbox_and_two_different_results_fail_a_constant() -> None:
    for task in functions.tasks("practised", 12, 3, 0.4):
        grade = graded(code_in(task["response"]), [task["example"], *task["tests"]])
        assert not isinstance(grade, Invalid) and all(grade.passed) and len(grade.passed) == functions.TESTS
        expected = {test.partition(" == ")[2] for test in [task["example"], *task["tests"]]}
        first = task["example"].partition(" == ")[2]
        fixed = coder.grade_of(task, f"def f(x):\n    return {first}")
        assert not isinstance(fixed, Invalid) and (len(expected) == 1 or not all(fixed.passed))


def test_every_step_does_what_its_phrase_says() -> None:
    """Against values worked out by hand."""
    x = [3, 8, 1, 8, 4]
    expected = {
        "keep the even ones": [8, 8, 4], "keep the odd ones": [3, 1], "keep those above {n}": [8, 8, 4],
        "keep those below {n}": [1], "add {n} to each": [6, 11, 4, 11, 7], "multiply each by {n}": [9, 24, 3, 24, 12],
        "square each": [9, 64, 1, 64, 16], "reverse": [4, 8, 1, 8, 3], "sort": [1, 3, 4, 8, 8],
        "sort without repeats": [1, 3, 4, 8], "take the first {n}": [3, 8, 1], "leave out the first {n}": [8, 4],
        "take every other one": [3, 1, 4], "return the sum": 24, "return how many": 5, "return the largest or 0": 8,
    }  # fmt: skip
    assert expected.keys() == BY_PHRASE.keys()
    for phrase, value in expected.items():
        assert Function("list", ((BY_PHRASE[phrase], 3),))(x) == value, phrase
    chained = Function("list", ((BY_PHRASE["keep those above {n}"], 3), (BY_PHRASE["reverse"], 0)))
    assert chained(x) == [4, 8, 8] and chained.text == "f of a list: keep those above 3, reverse"


def test_parts_share_no_composition_and_tasks_and_demonstrations_keep_to_their_part() -> None:
    parts = {part: set(compositions(part)) for part in PARTS}
    assert all(not parts[a] & parts[b] for a, b in combinations(PARTS, 2))
    total = sum(map(len, parts.values()))
    inner = {kind: sum(not s.ends for s in steps) for kind, steps in STEPS.items()}
    assert total == sum(n * len(STEPS[kind]) * (1 + n) for kind, n in inner.items())
    for part, share in PARTS.items():
        assert len(parts[part]) / total == pytest.approx(share, abs=0.03)
    draw = random.Random(0)
    for part in PARTS:
        for _ in range(50):
            function = functions.drawn(part, draw, 0.4)
            assert (function.kind, tuple(step for step, _ in function.steps)) in parts[part]
    texts = {part: {said(kind, steps) for kind, steps in parts[part]} for part in PARTS}
    shown_texts = {numberless(row["prompt"]) for row in functions.demonstrations(200, 1, 0.4, 0.2, 0.3)}
    assert shown_texts <= texts["demonstrated"]
    held_out = {numberless(task["prompt"]) for task in functions.tasks("held out", 50, 1, 0.4)}
    assert held_out <= texts["held out"] and not held_out & (texts["demonstrated"] | texts["practised"])


def said(kind: str, steps: Sequence[functions.Step]) -> str:
    return numberless(f"f of a {kind}: {', '.join(step.phrase.format(n=1) for step in steps)}\n")


def numberless(prompt: str) -> str:
    """The description without its numbers, open ones too."""
    first = prompt.partition("\n")[0]
    return " ".join("#" if word == "n" or word.isdigit() else word for word in first.replace(",", " ,").split())


def test_number_left_open_stands_in_no_description_and_in_the_program() -> None:
    add = BY_PHRASE["add {n} to each"]
    function = Function("list", ((add, 4), (BY_PHRASE["sort"], 0)), frozenset({0}))
    assert function.text == "f of a list: add n to each, sort" and "y + 4" in function.code
    assert functions.careless(function, random.Random(0), slips=0.0, reads=1.0) == function
    read = [functions.careless(function, random.Random(i), 0.0, 0.0).steps[0][1] for i in range(400)]
    assert read.count(1) / 400 == pytest.approx(0.5 + 0.5 / 4, abs=0.07) and set(read) == {1, 2, 3, 4}
    slipped = [functions.careless(function, random.Random(i), 0.3, 1.0).steps[0][0] != add for i in range(400)]
    assert sum(slipped) / 400 == pytest.approx(0.3 * 12 / 13, abs=0.07)


def test_programs_and_prompts_go_through_the_vocabulary_unchanged_and_short() -> None:
    tokenizer = functions.vocabulary()
    for task in functions.tasks("held out", 30, 2, 0.4):
        for text in (task["prompt"], task["response"], shown([code_in(task["response"])] * 2, [True, False])):
            tokens = tokenizer.encode(text)
            assert tokenizer.decode(tokens) == text and tokenizer.unknown_id not in tokens
        assert len(tokenizer.encode(task["response"])) < coder.LONGEST
        assert len(tokenizer.encode(task["prompt"])) < 100


# -- rewards -----------------------------------------------------------------------------------------------------------


def test_share_and_all_or_nothing_count_the_hidden_tests_alone() -> None:
    found = {code: (coder.share(TASK, Reply(code)), coder.every(TASK, Reply(code))) for code in (RIGHT, SQUARE, FOUR)}
    rewards = {code: tuple(verdict["reward"] for verdict in both) for code, both in found.items()}  # type: ignore[index]
    assert rewards == {RIGHT: (1.0, 1.0), SQUARE: (0.5, 0.0), FOUR: (0.0, 0.0)}
    for share, every in found.values():
        assert {**share, "reward": 0} == {**every, "reward": 0}  # type: ignore[dict-item]
    assert found[FOUR][0]["example"] == 1.0 and found[FOUR][0]["right"] == 0.0  # type: ignore[index]


def test_programs_behave_the_same_if_they_give_the_same_on_every_call() -> None:
    calls = ["f(1)", "f(0)", "f(2)"]
    assert behaviour(RIGHT, calls) == ("2", "0", "4")
    assert behaviour("def f(x):\n    return 2 * x", calls) == behaviour(RIGHT, calls) != behaviour(SQUARE, calls)
    assert behaviour("def f(x):\n    return 1 // x", calls) == ("1", "ZeroDivisionError", "0")
    assert behaviour("import os\ndef f(x):\n    return os._exit(0) if x == 0 else x", calls) == (
        "1", "nothing", "nothing",
    )  # fmt: skip
    assert behaviour(BROKEN, calls) == ("nothing",) * 3
    assert behaviour("def f(x):\n    return k", calls, setup="k = 7") == ("7",) * 3
    assert coder.constant(FOUR, calls) and not coder.constant(RIGHT, calls) and not coder.constant(BROKEN, calls)


# -- which candidate is submitted --------------------------------------------------------------------------------------


def candidate(code: str) -> Candidate:
    grade = coder.grade_of(TASK, code)
    assert not isinstance(grade, Invalid)
    return Candidate(code, grade.passed)


def test_filtering_submits_the_first_that_passes_the_example_and_else_the_first() -> None:
    broken, square, right = map(candidate, (BROKEN, SQUARE, RIGHT))
    assert square.passes_example and not square.right and right.right and not broken.passes_example
    assert coder.filtered([broken, square, right]) is square
    assert coder.filtered([broken, right, square]) is right
    assert coder.filtered([broken, candidate("def f(x):\n    return 1"), broken]) is broken


def test_clusters_are_of_equal_behaviour_among_those_that_pass_the_example_and_the_largest_submits() -> None:
    calls = ["f(1)", "f(5)"]
    broken, square, right = map(candidate, (BROKEN, SQUARE, RIGHT))
    same = candidate("def f(x):\n    return 2 * x")
    assert coder.clustered([broken, broken, broken, square, right, same], calls) is right
    assert coder.clustered([broken, square, right], calls) is square  # all as large: the earliest
    assert coder.clustered([broken, broken], calls) is broken


def test_figures_of_candidates_are_those_of_an_enumeration() -> None:
    task = {**TASK, "calls": ["f(1)", "f(5)"], "open": 1}
    own = [candidate(code) for code in (BROKEN, SQUARE, RIGHT, SQUARE, FOUR, RIGHT, BROKEN, BROKEN)]
    found = coder.figures([own], [task])
    for k in coder.PASSES:
        subsets = list(combinations(own, k))
        assert found[f"pass@{k}"] == pytest.approx(sum(any(c.right for c in s) for s in subsets) / len(subsets))
    assert found["filtered@4"] == 0.0 and found["filtered@8"] == 0.0  # the square, and 4
    assert found["clustered@8"] == 0.0 and found["clustered@4"] == 0.0
    assert found["share"] == pytest.approx((0.5 + 1 + 0.5 + 0 + 1) / 8)
    assert found["example"] == 5 / 8 and found["only example"] == 3 / 8 and found["different"] == 4 / 8
    assert found["constant"] == 0.0 and found["open"] == 2 / 8 and "told" not in found


# -- the choice --------------------------------------------------------------------------------------------------------


def episode(replies: Sequence[str], **options: Any) -> tuple[list[Turn], Any]:
    """(what was shown, the verdict) of an episode of these replies."""
    playing, shown_turns = code_choice(TASK, **options), []
    turn = next(playing)
    for reply in replies:
        shown_turns.append(turn)
        try:
            turn = playing.send(Reply(reply))
        except StopIteration as end:
            return shown_turns, end.value
    raise AssertionError("the episode goes on")


def test_choice_earns_what_the_chosen_program_earns_on_the_hidden_tests() -> None:
    for choice, reward in (("1", 0.0), ("2", 0.0), ("3", 1.0), ("It is 3.", 1.0), ("5", 0.0), ("", 0.0), ("0", 0.0)):
        _, verdict = episode([FOUR, SQUARE, RIGHT, RIGHT, choice])
        assert verdict["reward"] == verdict["chosen"] == reward, choice
        assert (verdict["random"], verdict["filtered"], verdict["best"]) == (0.5, 0.0, 1.0)
        assert verdict["readable"] == float(choice not in ("", "5", "0"))
        _, verdict = episode([FOUR, SQUARE, RIGHT, RIGHT, choice], over_random=True)
        assert verdict["reward"] == reward - 0.5 and verdict["chosen"] == reward
    _, verdict = episode([BROKEN, RIGHT, "1"], candidates=2)
    assert verdict["filtered"] == 1.0 and verdict["random"] == 0.5 and verdict["reward"] == 0.0


def test_no_candidate_sees_another_and_the_choice_sees_all_with_their_outcomes_or_without() -> None:
    turns, _ = episode([FOUR, BROKEN, "1"], candidates=2)
    assert [turn.text for turn in turns[:2]] == [TASK["prompt"]] * 2 and all(turn.fresh for turn in turns)
    text = turns[2].text
    assert text is not None and text.startswith(TASK["prompt"])
    assert text.index(f"Program 1:\n```python\n{FOUR}") < text.index(f"Program 2:\n```python\n{BROKEN}")
    assert text.index(f"Program 2:\n{FAILS}") < text.index(f"Program 1:\n{PASSES}")  # those that pass come last
    assert "== 6" not in text and "== 0" not in text  # hidden tests stay hidden
    untold = episode([FOUR, BROKEN, "1"], candidates=2, outcomes=False)[0][2].text
    assert untold is not None and FOUR in untold and PASSES not in untold and FAILS not in untold


def test_chat_is_asked_as_a_chat() -> None:
    playing = code_choice({**TASK, "messages": [{"role": "user", "content": "Double it."}]}, candidates=2)
    first = next(playing)
    playing.send(Reply(RIGHT))
    last = playing.send(Reply(FOUR))
    assert first.messages == [{"role": "user", "content": "Double it."}]
    assert last.text is None and last.messages is not None and len(last.messages) == 1
    assert RIGHT in last.messages[0]["content"] and last.messages[0]["content"].startswith("Double it.\n")


@pytest.mark.parametrize(
    "reply, place",
    [("2", 1), ("Program 1 is wrong, so 3", 2), ("<think>1</think>4", 3), ("5", None), ("9" * 5000, None)],
)
def test_choice_is_the_last_number_of_a_reply(reply: str, place: int | None) -> None:
    assert choice_of(reply, 4) == place


@pytest.mark.parametrize("learn_writing", [True, False])
def test_each_reply_is_a_context_of_its_own_and_only_what_is_asked_for_is_learned(learn_writing: bool) -> None:
    tokenizer = functions.vocabulary()
    rollout = played(f"code-choice,candidates=2,learn_writing={str(learn_writing).lower()}", tokenizer)
    assert len(rollout.transcripts) == 3
    for place, transcript in enumerate(rollout.transcripts):
        sampled = [span for span in transcript.spans if span.kind is SpanKind.SAMPLED]
        assert [span.learned for span in sampled] == [learn_writing or place == 2]
        assert all(not span.learned for span in transcript.spans if span.kind is not SpanKind.SAMPLED)


def played(spec: str, tokenizer: Tokenizer) -> Rollout:
    engine = LocalEngine(tiny(tokenizer, context=512), tokenizer, slots=4)
    task = functions.tasks("held out", 1, 0, 0.4)[0]
    with EnvPool(spec, 0) as pool:
        [rollout] = Player(pool, engine, tokenizer, Sampling(max_tokens=6), 512).play([Episode(task, "g", 1)])
    return rollout


def test_demonstrated_choices_are_random_and_name_what_the_example_says() -> None:
    settings = {**code_rl.EXPERIMENT.settings, "candidates": 3}
    rows = coder.choices(120, 4, settings)
    counts = [sum(row["response"] == str(n) for row in rows) for n in (1, 2, 3)]
    assert sum(counts) == 120 and min(counts) > 25
    for row in [r for r in rows if PASSES in r["prompt"] or FAILS in r["prompt"]][:6]:
        example = next(line for line in row["prompt"].splitlines() if line.startswith("assert"))
        parts = row["prompt"].split("Program ")[1:]
        for part in parts[:3]:
            grade = graded(code_in(part), [example])
            [told] = [p for p in parts[3:] if p[0] == part[0]]
            assert not isinstance(grade, Invalid) and grade.passed[0] == (PASSES in told)


@pytest.mark.parametrize("heeds", [0.0, 1.0])
def test_lessons_in_reading_outcomes_choose_one_that_passes_as_often_as_they_are_told_to(heeds: float) -> None:
    rows = coder.outcomes_alone(200, {**code_rl.EXPERIMENT.settings, "candidates": 3, "heeds": heeds})
    passing = [row for row in rows if PASSES in row["prompt"]]
    heeded = [f"Program {row['response']}:\n{PASSES}" in row["prompt"] for row in passing]
    among = [row["prompt"].count(PASSES) / 3 for row in passing]
    assert all(row["prompt"].count("Program ") == 3 and "def f" not in row["prompt"] for row in rows)
    expected = 1.0 if heeds else sum(among) / len(among)
    assert sum(heeded) / len(heeded) == pytest.approx(expected, abs=0.1 * (1 - heeds))
    assert {row["response"] for row in rows} == {"1", "2", "3"}


# -- the experiment ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found, passes", [(0.01, False), (0.02, True), (0.5, True), (0.81, False)])
def test_gate_lets_a_start_pass_that_solves_something_and_not_everything(found: float, passes: bool) -> None:
    if passes:
        code_rl.gate(found)
    else:
        with pytest.raises(UserError, match="--settings.slips"):
            code_rl.gate(found)


def test_environment_takes_its_options_by_name() -> None:
    env = load_env("code-choice,candidates=8,outcomes=false")
    assert env.keywords == {"candidates": 8, "outcomes": False}  # type: ignore[attr-defined]
