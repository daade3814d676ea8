"""Verifiers: vectors in tests/vectors, real data, and what a hostile reply or an unlucky process may do."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import answers
import pytest
from places import DATA, ROOT, TESTS

from posttrain.core.types import Invalid
from posttrain.verify import algebra, limited_process, math
from posttrain.verify.answer import last_boxed
from posttrain.verify.format import between, tags
from posttrain.verify.limited_process import CheckFailed
from posttrain.verify.math import verify
from posttrain.verify.numeric import equal_numbers, gsm8k_answer, last_number, read_number, written_tolerance

VECTORS = TESTS / "vectors"
PACKAGE = ROOT


def rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        pytest.skip(f"needs {path}, which is not part of the project")
    return [json.loads(line) for line in path.read_text().splitlines()]


def wrong(vectors: list[dict[str, Any]], judge: Callable[[dict[str, Any]], Any], expected: str) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        judged = zip(vectors, pool.map(judge, vectors), strict=True)
        return [(vector, verdict) for vector, verdict in judged if verdict != vector[expected]]


def test_math_vectors() -> None:
    def judge(vector: dict[str, Any]) -> float | str:
        verdict = verify(vector["reply"], vector["gold"])
        return "invalid" if isinstance(verdict, Invalid) else verdict

    assert wrong(rows(VECTORS / "math.jsonl"), judge, "reward") == []


def test_a_ratio_is_its_fraction_unless_it_is_not_to_be() -> None:
    for answer, gold in (("8:17", r"\frac{8}{17}"), ("16:34", "8:17"), (r"\frac{8}{17}", "8:17"), ("3", "3:1")):
        assert verify(rf"\boxed{{{answer}}}", gold) == 1.0
        assert verify(rf"\boxed{{{answer}}}", gold, ratios=False) == float(":" in gold or ":" not in answer)
    assert verify(r"\boxed{17:8}", r"\frac{8}{17}") == verify(r"\boxed{3:2}", "3:1", ratios=False) == 0.0


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


def test_a_tolerance_is_relative_to_the_gold_on_both_sides_of_it() -> None:
    within = [equal_numbers(Fraction(value), Fraction(100), Fraction(1, 10)) for value in (89, 90, 110, 111)]
    assert within == [False, True, True, False]


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
    assert set(own) == {1.0}
    foreign = [
        (golds[i], other, verify(problems[i]["solution"], other))
        for i, (gold, other) in enumerate(pairwise(golds))
        if gold != other
    ]
    assert [found for found in foreign if found[2] != 0.0] == []


SETTINGS: tuple[tuple[str, str], ...] = (
    (r"\\pi(?![a-zA-Z])", r"{\\pi}"),
    (r"\\sqrt\{([^{}]*)\}", r"{\\sqrt{\1}}"),
    (r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"{\1 \\over \2}"),
    (r"(?<![\\a-zA-Z{])([a-z])\^", r"{\1}^"),
    (r"\(([^(){}]*)\)", r"{(\1)}"),
    (r"^(.*)$", r"{\1}"),
    (r"^(.*)$", r"\\boldsymbol{\1}"),
    (r"^(.*)$", r"$\\displaystyle \1\\ $"),
)
"""What a gold may be rewritten by without a change that is seen."""


def test_a_gold_of_math_is_reached_however_it_is_set() -> None:
    golds = {last_boxed(problem["solution"]) or "" for problem in rows(DATA / "math" / "math_test.jsonl")[::9]}
    cases = [
        {"reply": rf"\boxed{{{written}}}", "gold": gold, "reward": 1.0}
        for pattern, replacement in SETTINGS
        for gold in sorted(golds)
        if (written := re.sub(pattern, replacement, gold)) != gold and r"\left" not in gold
    ]
    assert len(cases) > 800
    assert wrong(cases, lambda case: verify(case["reply"], case["gold"]), "reward") == []


def test_every_gold_of_gsm8k_verifies_and_its_successor_does_not() -> None:
    for row in rows(DATA / "gsm8k" / "test.jsonl"):
        gold = gsm8k_answer(row["answer"])
        assert gold is not None
        number = read_number(gold)
        assert number is not None
        assert verify(row["answer"], gold) == 1.0
        assert verify(row["answer"], str(number + 1)) == 0.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_reply_takes_longer_than_its_length_explains() -> None:
    """Replies of 50,000 characters, under a limit of processor time that one quadratic expression would exceed."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (45, 45)); "
        "from posttrain.verify import math; import answers; "
        "math.limited = lambda name, *_, seconds: name.endswith('readable'); "  # what runs there has a limit of its own
        "print(answers.judge_hostile(50_000))"
    )
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(PACKAGE), str(TESTS / "helpers")]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_answers_of_every_kind_get_the_verdict_of_an_independent_oracle() -> None:
    assert [pair for pair in map(answers.judge, answers.cases(100, 0)) if answers.differs(*pair)] == []


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        (r"2{\pi}", r"2\pi"), (r"3{\sqrt{2}}", r"3\sqrt{2}"), (r"\frac{6{\sqrt{5}}}{5}", r"\frac{6\sqrt{5}}{5}"),
        (r"2{x}+1", "2x+1"), (r"(a+1){b}", "(a+1)b"), (r"\frac1{x}", r"\frac{1}{x}"), ("8:17", r"\frac{8}{17}"),
    ],
)  # fmt: skip
def test_braces_that_group_nothing_change_no_answer(written: str, plain: str) -> None:
    assert verify(rf"\boxed{{{written}}}", plain) == verify(rf"\boxed{{{plain}}}", written) == 1.0
    assert verify(rf"\boxed{{{written}}}", f"{plain}+1") == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "+".join(rf"\sin(e^{{e^{{9.{digit}}}}})" for digit in range(40)),  # more work than the time allows
        r"x^{x^x}+x = 5",  # raises in sympy
        "9^{9^{9^{9^9}}}",
        "(" * 400 + "5" + ")" * 400,
        "{" * 450 + "}" * 450,
        "\\frac" * 150,
        "\\sqrt{" * 15 + "5" + "}" * 15,
        r"\frac{,,}{1}",
        "5" * 900,
        "1+" * 450 + "1",
        "\ud800",
        "\x00",
    ],
    ids=[
        "slow",
        "raises",
        "tower",
        "brackets",
        "braces",
        "fractions",
        "roots",
        "commas",
        "digits",
        "sum",
        "surrogate",
        "null",
    ],
)
@pytest.mark.parametrize("gold", ["x = 3", r"\sqrt{2}", r"\frac{1}{2}", r"\text{even}", "1,2", r"(-\infty,2)\cup(3,4)"])
def test_no_answer_leaves_its_group(answer: str, gold: str) -> None:
    assert verify(rf"\boxed{{{answer}}}", gold, timeout=0.5) == 0.0
    assert verify(f"The answer is ${answer}$.", gold, timeout=0.5) == 0.0


def test_a_check_that_fails_is_the_gold_answer_s_fault_only_if_that_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def call(function: str, *args: str, seconds: float) -> Any:
        calls.append(args)
        gold = args[-1]
        if function.endswith("readable"):
            return CheckFailed("too long") if gold == "z+1" else Invalid("no process") if gold == "z+2" else True
        return CheckFailed("too long") if args[0] == "z" else Invalid("no process")

    for module in (math, limited_process):
        monkeypatch.setattr(module, "limited", call)
    monkeypatch.setattr(math, "_unreadable", {})
    assert verify(r"\boxed{z}", "z+3") == 0.0
    assert isinstance(verify(r"\boxed{y}", "z+3"), Invalid)  # there was no process: that is nobody's fault
    assert calls == [("z+3",), ("z", "z+3"), ("y", "z+3")]
    for reply in (r"\boxed{z}", r"\boxed{z+1}", "I do not know.", "\\boxed{" + "9" * 5000 + "}"):
        verdict = verify(reply, "z+1")
        assert isinstance(verdict, Invalid) and "too long" in verdict.reason
    assert calls[3:] == [("z+1",)]
    assert isinstance(verify(r"\boxed{z}", "z+2"), Invalid)
    assert isinstance(verify(r"\boxed{z}", "z+2"), Invalid)
    assert calls[4:] == [("z+2",), ("z+2",)]  # what the machine could not do is tried again


def test_no_text_of_an_answer_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from sympy.parsing import sympy_parser

    def run(*_: object, **__: object) -> None:
        raise AssertionError("text was evaluated")

    monkeypatch.setattr(sympy_parser, "eval_expr", run)
    monkeypatch.setattr(sympy_parser, "parse_expr", run)
    code = "__import__('os').system('true')"
    places = ["%s", r"\sqrt{%s}", r"x_{%s}", r"f(%s)", r"\operatorname{%s}(2)", r"\begin{pmatrix}%s\end{pmatrix}"]
    places += ["%s=3", r"\{%s\}", r"x \in %s", r"\log_{%s} 2", r"\overline{%s}", r"\variable{%s}", r"\frac{d}{d%s}x"]
    for place in places:
        for text in (place % code, place % "exec(1)", place % "n0"):
            for gold in ("x", text):  # a gold answer may use commands that are refused otherwise
                try:
                    algebra.equal(text, gold)
                except AssertionError:
                    raise
                except Exception:
                    continue


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
            from posttrain.verify import limited_process as limit
            from posttrain.verify.math import verify
            print("once", verify(r"\boxed{\sqrt{25}}", "5"), *[server.process.pid for server in limit._servers.alive])
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
