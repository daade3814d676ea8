"""The tasks and rewards of the built-in environments, on generated tasks and on the real rows."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import DATA, TESTS

from posttrain.core.types import Invalid, UserError
from posttrain.envs.builtin import arithmetic, gsm8k, math_problems, word_problems

VECTORS = TESTS / "vectors"


def rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        pytest.skip(f"needs {path}, which is not part of the project")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("digits", "operators"), [(1, "+-*"), (2, "+"), (3, "+-"), (9, "*")])
def test_arithmetic_tasks_are_right_distinct_and_reproducible(digits: int, operators: str) -> None:
    tasks = arithmetic.tasks(100, 7, digits=digits, operators=operators)
    assert len({task["prompt"] for task in tasks}) == len({task["id"] for task in tasks}) == 100
    assert tasks == arithmetic.tasks(100, 7, digits=digits, operators=operators)
    assert tasks != arithmetic.tasks(100, 8, digits=digits, operators=operators)
    for task in tasks:
        assert int(task["answer"]) == eval(task["prompt"].rstrip("="))
        assert arithmetic.reward(task, task["response"]) == 1.0
        assert arithmetic.reward(task, str(int(task["answer"]) + 1)) == 0.0


def test_arithmetic_held_out_tasks_never_meet_training_tasks_whatever_the_seeds() -> None:
    train = {task["prompt"] for seed in range(5) for task in arithmetic.tasks(3000, seed)}
    held_out = {task["prompt"] for seed in range(5) for task in arithmetic.tasks(500, seed, held_out=True)}
    assert not train & held_out
    assert len(train) > 6000


def test_arithmetic_refuses_more_tasks_than_exist() -> None:
    with pytest.raises(UserError, match="exist"):
        arithmetic.tasks(101, 0, digits=1)
    with pytest.raises(UserError, match="operators"):
        arithmetic.tasks(1, 0, operators="/")


@pytest.mark.parametrize(
    "reply", ["", "132.0", "132 apples", "1 32", "47+85", "\u0661\u0663\u0662", "9" * 10_000, "1_32"]
)
def test_arithmetic_takes_nothing_but_the_integer(reply: str) -> None:
    task = {"id": "47+85", "prompt": "47+85=", "answer": "132"}
    assert arithmetic.reward(task, " 132\n") == 1.0
    assert arithmetic.reward(task, reply) == 0.0


def test_every_row_of_gsm8k_becomes_a_task_that_its_own_solution_solves() -> None:
    tasks = [gsm8k.row_to_task(row) for row in rows(DATA / "gsm8k" / "test.jsonl")]
    assert len({task["id"] for task in tasks if task}) == len(tasks) == 1319
    for task in tasks:
        assert task is not None
        assert "<<" not in task["response"] and "####" not in task["response"]
        assert gsm8k.reward(task, task["response"]) == {"answer": 1.0, "format": 0.1}
        assert gsm8k.reward(task, task["response"] + " 1") == {"answer": 1.0, "format": 0.0}
        assert gsm8k.reward(dict(task, answer=task["answer"] + "1"), task["response"])["answer"] == 0.0  # type: ignore[index]


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("<answer>$2,125.00</answer>", 1),
        ("<answer>2125 dollars</answer>", 1),
        ("so\n#### 2,125", 1),
        ("2125", 0),
        ("<answer>2125 or 2126</answer>", 0),
        ("<answer>2125</answer> <answer>2126</answer>", 0),
        ("#### 2125 <answer>1</answer>", 0),
        ("<answer></answer> #### 2125", 0),
        ("", 0),
    ],
)
def test_gsm8k_reads_the_answer_from_its_tags_or_after_the_marker(reply: str, answer: int) -> None:
    verdict = gsm8k.reward({"id": "1", "prompt": "<answer>2125</answer>", "answer": "2125"}, reply)
    assert isinstance(verdict, dict)
    assert verdict["answer"] == answer


def test_a_row_without_an_answer_is_left_out_and_a_gold_that_is_none_is_invalid() -> None:
    assert gsm8k.row_to_task({"question": "?", "answer": "no marker"}) is None
    assert math_problems.row_to_task({"problem": "?", "solution": "no box"}) is None
    assert word_problems.row_to_task({"id": "1", "question": "?", "answer": "many"}) is None
    task = {"id": "1", "prompt": "?", "answer": "many"}
    assert isinstance(gsm8k.reward(task, "<answer>1</answer>"), Invalid)
    assert isinstance(word_problems.reward(task, "1"), Invalid)


def test_equation_and_expression_vectors() -> None:
    for vector in rows(VECTORS / "equations.jsonl"):
        assert word_problems.expression(vector["equation"]) == vector["expression"], vector
    for vector in rows(VECTORS / "expressions.jsonl"):
        value = word_problems.evaluate(vector["text"])
        assert (None if value is None else str(value)) == vector["value"], vector


def test_word_problem_equations_become_expressions_with_the_value_of_the_answer() -> None:
    for name, equations, solved in (("train", 1099, 1086), ("svamp", 1000, 999)):  # the others contradict their answer
        found = rows(DATA / "wordproblems" / f"{name}.jsonl")
        tasks = [word_problems.row_to_task(row) for row in found]
        assert None not in tasks
        assert sum("equation" in row for row in found) == equations
        responses = [(task, task["response"]) for task in tasks if task and "response" in task]
        assert len(responses) == solved
        assert all(word_problems.reward(task, response) == 1.0 for task, response in responses)
        assert all(word_problems.reward(task, response + "+1") == 0.0 for task, response in responses)
        assert all(word_problems.reward(task, task["answer"]) == 1.0 for task in tasks if task)


trees = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda parts: f"({''.join(parts)})"),
    max_leaves=8,
)


@given(trees)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_dropping_brackets_never_changes_the_value(text: str) -> None:
    value = word_problems.evaluate(text)
    written = word_problems.expression(f"x={text}")
    assert written is not None
    assert word_problems.evaluate(written) == value
    if value is not None:
        scope = {"Fraction": Fraction}
        digits = "".join(f" {part} " if not part.isdigit() else f"Fraction({part})" for part in _split(text))
        assert value == eval(digits, scope)


def _split(text: str) -> list[str]:
    for mark in "+-*/()":
        text = text.replace(mark, f" {mark} ")
    return text.split()


def test_math_problems_read_the_answer_from_the_reply_and_not_from_the_prompt() -> None:
    task = math_problems.row_to_task(
        {"problem": r"Write it as \boxed{7}. What is 3+4?", "solution": r"It is \boxed{7}.", "level": "1", "type": "A"}
    )
    assert task is not None
    assert task["answer"] == "7"
    assert math_problems.reward(task, task["response"]) == 1.0
    assert math_problems.reward(task, "I do not know.") == 0.0


def test_every_row_of_math_becomes_a_task() -> None:
    tasks = [math_problems.row_to_task(row) for row in rows(DATA / "math" / "math_test.jsonl")]
    assert None not in tasks
    assert len({task["id"] for task in tasks if task}) == len(tasks)
