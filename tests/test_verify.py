"""Verifiers: vectors in tests/vectors, real data, and what a hostile reply or an unlucky process may do."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from posttrain.types import Invalid, UserError
from posttrain.verify.format import between, tags
from posttrain.verify.limit import _workers, limited
from posttrain.verify.math import last_boxed, verify
from posttrain.verify.numeric import equal_numbers, gsm8k_answer, last_number, read_number, written_tolerance

VECTORS = Path(__file__).parent / "vectors"
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
PACKAGE = Path(__file__).resolve().parents[1]


def rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        pytest.skip(f"needs {path}, which is not part of the project")
    return [json.loads(line) for line in path.read_text().splitlines()]


def wrong(vectors: list[dict[str, Any]], judge: Callable[[dict[str, Any]], Any], expected: str) -> list[Any]:
    return [(vector, judge(vector)) for vector in vectors if judge(vector) != vector[expected]]


def test_math_vectors() -> None:
    def judge(vector: dict[str, Any]) -> float | str:
        verdict = verify(vector["reply"], vector["gold"])
        return "invalid" if isinstance(verdict, Invalid) else verdict

    assert wrong(rows(VECTORS / "math.jsonl"), judge, "reward") == []


def test_numeric_vectors() -> None:
    def judge(vector: dict[str, Any]) -> str | None:
        number = read_number(vector["text"])
        return None if number is None else str(number)

    assert wrong(rows(VECTORS / "numeric.jsonl"), judge, "number") == []


def test_format_vectors() -> None:
    assert wrong(rows(VECTORS / "format.jsonl"), lambda vector: tags(vector["reply"]), "reward") == []


def test_tags_may_allow_text_outside() -> None:
    assert tags("so <think>a</think> hence <answer>b</answer>!", only=False) == 1.0
    assert tags("<answer>b</answer> <think>a</think>", only=False) == 0.0


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        ("<a>1</a>", "1"),
        ("<a> 1 </a> <a>2</a> <a>3", "2"),
        ("<a>1<a>2</a>", "2"),
        ("<a>1</a></a>", "1"),
        ("</a><a>", None),
        ("<a>1", None),
        ("", None),
        ("<a></a>", ""),
    ],
)
def test_between_is_the_last_closed_pair(text: str, inner: str | None) -> None:
    assert between(text, "a") == inner


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("a\n#### 72", "72"),
        ("#### 1\n#### 2,125 \nmore", "2,125"),
        ("#### -3", "-3"),
        ("72", None),
        ("#### ", None),
        ("#### 5\n####", None),
    ],
)
def test_gsm8k_answer_follows_the_last_marker(text: str, answer: str | None) -> None:
    assert gsm8k_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5 and then 6.", 6),
        ("10 - 3", 3),
        ("10-3", 3),
        ("x = -3", -3),
        ("(-3)", -3),
        ("it is \u22127", -7),
        ("$1,234.50.", Fraction(2469, 2)),
        ("3/4", Fraction(3, 4)),
        ("none", None),
        ("a2", None),
    ],
)
def test_last_number_is_the_last_that_stands_alone(text: str, number: Fraction | None) -> None:
    assert last_number(text) == number


def test_numbers_are_equal_exactly_unless_the_gold_was_rounded_by_a_computer() -> None:
    assert equal_numbers(Fraction("0.5"), Fraction(1, 2))
    assert not equal_numbers(Fraction("0.333"), Fraction(1, 3))
    rounded = "0.6666666666666666"
    assert equal_numbers(Fraction(2, 3), Fraction(rounded), written_tolerance(rounded))
    assert not equal_numbers(Fraction("0.667"), Fraction(rounded), written_tolerance(rounded))
    assert written_tolerance("0.67") == written_tolerance("12345678901234") == 0


def test_every_gold_of_math_is_reached_by_its_own_solution_and_not_by_its_neighbour() -> None:
    problems = rows(DATA / "math" / "math_test.jsonl")[::13]
    golds = [last_boxed(problem["solution"]) or "" for problem in problems]
    own = [verify(problem["solution"], gold) for problem, gold in zip(problems, golds, strict=True)]
    assert len(own) > 300
    assert own.count(1.0) >= 0.995 * len(own)
    foreign = [
        (golds[i], other, verify(problems[i]["solution"], other))
        for i, (gold, other) in enumerate(pairwise(golds))
        if gold != other
    ]
    assert [found for found in foreign if found[2] != 0.0] == []


def test_every_gold_of_gsm8k_verifies_and_its_successor_does_not() -> None:
    for row in rows(DATA / "gsm8k" / "test.jsonl"):
        gold = gsm8k_answer(row["answer"])
        assert gold is not None
        number = read_number(gold)
        assert number is not None
        assert verify(row["answer"], gold) == 1.0
        assert verify(row["answer"], str(number + 1)) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "9" * 100_000,
        "{" * 50_000 + "}" * 50_000,
        "(" * 400 + "5" + ")" * 400,
        "\\frac" * 20_000,
        "\\sqrt{" * 15 + "5" + "}" * 15,
        "answer is " * 10_000,
    ],
    ids=["digits", "braces", "brackets", "fractions", "roots", "phrases"],
)
def test_junk_is_wrong_and_quickly_so(answer: str) -> None:
    start = time.perf_counter()
    assert verify(f"\\boxed{{{answer}}}", "5") == 0.0
    assert verify(answer, "5") == 0.0
    assert verify("\\boxed{" * 1000 + answer, "5") == 0.0
    assert time.perf_counter() - start < 10


def test_an_answer_that_takes_for_ever_is_invalid_and_not_wrong() -> None:
    assert verify(r"\boxed{\frac{1}{2}\cdot\sqrt{4}}", "1", seconds=60) == 1.0
    verdict = verify(r"\boxed{9^{9^{9^9}}}", "5", seconds=0.5)
    assert isinstance(verdict, Invalid)
    assert "time limit" in verdict.reason
    assert verify(r"\boxed{\sqrt{25}}", "5") == 1.0


def test_a_limited_call_returns_the_result_or_invalid() -> None:
    assert limited(max, 3, 4, seconds=30) == 4
    assert isinstance(limited(time.sleep, 60, seconds=0.2), Invalid)
    assert limited(os.kill, os.getpid(), 0, seconds=30) is None
    assert isinstance(limited(os._exit, 1, seconds=30), Invalid)
    assert "ValueError" in limited(int, "x", seconds=30).reason
    assert "MemoryError" in limited(bytearray, 2**40, seconds=30).reason
    assert "no_such_module" in limited(max, 1, 2, seconds=30, imports=("no_such_module",)).reason
    assert limited(pow, 2, 10, seconds=30) == 1024


def test_a_limit_interrupts_a_computation_in_c() -> None:
    start = time.perf_counter()
    assert isinstance(limited(pow, 9, 9**9, seconds=0.3), Invalid)
    assert time.perf_counter() - start < 20


def test_a_worker_that_died_while_idle_costs_no_verdict() -> None:
    assert limited(pow, 2, 10, seconds=30) == 1024
    for worker in _workers.alive:
        worker.process.kill()
        worker.process.wait()
    assert limited(pow, 2, 10, seconds=30) == 1024


def test_a_function_that_cannot_be_imported_is_refused() -> None:
    with pytest.raises(UserError, match="top level"):
        limited(lambda: 1, seconds=1)


def test_many_threads_may_call_at_once() -> None:
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda i: verify(rf"\boxed{{\sqrt{{{i * i}}}+0}}", str(i)), range(1, 41)))
    assert results == [1.0] * 40


def in_child(queue: Any) -> None:
    queue.put(verify(r"\boxed{\sqrt{25}}", "5"))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_daemonic_child_process_has_workers_of_its_own(method: Any) -> None:
    assert verify(r"\boxed{\sqrt{25}}", "5") == 1.0  # a fork inherits a pool in use
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=in_child, args=(queue,), daemon=True)
    child.start()
    assert queue.get(timeout=60) == 1.0
    child.join(timeout=30)
    assert child.exitcode == 0
    assert verify(r"\boxed{\sqrt{25}}", "5") == 1.0


def test_a_script_without_a_main_guard_runs_once_and_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            r"""
            from posttrain.verify import limit
            from posttrain.verify.math import verify
            print("once", verify(r"\boxed{\sqrt{25}}", "5"), *[worker.process.pid for worker in limit._workers.alive])
            """
        )
    )
    environment = dict(os.environ, PYTHONPATH=str(PACKAGE))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=60)
    words = done.stdout.split()
    assert words[:2] == ["once", "1.0"], done.stderr
    assert done.stdout.count("once") == 1
    for pid in words[2:]:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), signal.SIGCONT)


def test_verifiers_import_nothing_heavy() -> None:
    code = (
        "import sys; import posttrain.verify.math, posttrain.verify.format; "
        "print({'torch', 'sympy', 'math_verify', 'numpy'} & set(sys.modules))"
    )
    environment = dict(os.environ, PYTHONPATH=str(PACKAGE))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr
