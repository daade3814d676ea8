"""Runs the code of a reply against unit tests, in the sandbox. The comparison never shares an interpreter with the
program.

A program can influence its verdict only by the values that it returns: `sys.exit(0)`, an equality that is always true,
a patched assert, a forged line of output or a search of memory does not reach the comparison. A program that ends,
hangs or takes too much memory fails all further tests; it is never Invalid, so breaking the check gains nothing. A
verdict is Invalid for reasons beyond the program: tests that are not Python, a sandbox that does not start.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from posttrain.core.types import Invalid, UserError
from posttrain.sandbox.limits import ProgramLimits
from posttrain.sandbox.plain_values import equals
from posttrain.sandbox.program import Ended, Program, SandboxError
from posttrain.sandbox.shared_sandbox import shared, usual_limits
from posttrain.verify.fenced import code_in
from posttrain.verify.test_cases import ComparedCase, Suite, read_tests

LONGEST = 200_000  # most characters of a program; a longer one is wrong
MOST_ASKS = 100_000  # most calls of one test to the program


@dataclass(frozen=True)
class Grade:
    """The result of a program: which tests it passed, in order, and its first error."""

    passed: tuple[bool, ...]
    why: str = ""

    @property
    def share(self) -> float:
        return sum(self.passed) / len(self.passed)


def share_of_tests(reply: str, tests: Sequence[str], setup: str = "", entry: Sequence[str] = ()) -> float | Invalid:
    """The share of the tests that the code of a reply passes, from 0.0 to 1.0.

    `tests`: Python code that raises unless the program is right, such as "assert double(2) == 4"; undefined names in it
    refer to the program. `setup`: code before the tests. `entry`: names such as "sum" that the program defines although
    they are builtins.

    >>> share_of_tests("def double(x): return 2 + x", ["assert double(2) == 4", "assert double(3) == 6"])
    0.5
    """
    grade = graded(code_in(reply), tests, setup, entry)
    return grade if isinstance(grade, Invalid) else grade.share


def passes_tests(reply: str, tests: Sequence[str], setup: str = "", entry: Sequence[str] = ()) -> float | Invalid:
    """1.0 if the code of a reply passes all tests, else 0.0. Arguments as in `share_of_tests`."""
    grade = graded(code_in(reply), tests, setup, entry)
    return grade if isinstance(grade, Invalid) else float(all(grade.passed))


def graded(
    code: str, tests: Sequence[str], setup: str = "", entry: Sequence[str] = (), limits: ProgramLimits | None = None
) -> Grade | Invalid:
    """Grade a program. It runs once, and the tests then run in the same interpreter, in order."""
    read = read_tests(tests, setup, entry)
    if isinstance(read, Invalid):
        return read
    if len(code) > LONGEST:
        return Grade((False,) * len(read.cases), f"more than {LONGEST:,} characters")
    try:
        return _graded(code, read, limits)
    except (SandboxError, UserError) as error:
        return Invalid(str(error))


def behaviour(
    code: str, calls: Sequence[str], setup: str = "", limits: ProgramLimits | None = None
) -> tuple[str, ...] | Invalid:
    """Return the result of each call, such as "f(2)": programs with equal results behave the same.

    The result of an exception is its type; after the end of the program, results are "nothing". `setup`: code before
    the program.
    """
    found: list[str] = []
    if len(code) > LONGEST:
        return ("nothing",) * len(calls)
    try:
        with shared().start(limits or usual_limits()) as program:
            try:
                raised = (program.run(setup) if setup else None) or program.run(code)
                for call in () if raised else calls:
                    answer = program.asked({"do": "value", "source": call})
                    found.append(answer["raised"][0] if "raised" in answer else json.dumps(answer["value"]))
            except Ended:
                pass  # its results so far count
    except (SandboxError, UserError) as error:
        return Invalid(str(error))
    return (*found, *["nothing"] * (len(calls) - len(found)))


def _graded(code: str, tests: Suite, limits: ProgramLimits | None) -> Grade | Invalid:
    passed: list[bool] = []
    why = ""
    with ExitStack() as opened:
        try:
            began, sandbox, most = time.monotonic(), shared(), limits or usual_limits()
            waited = time.monotonic() - began  # for the sandbox, if this is its first program
            program = opened.enter_context(sandbox.start(replace(most, life=max(0.0, most.life - waited))))
            if raised := program.run(code):
                raise Ended(_error_line(raised))
            examination: Examination | None = None
            for case in tests.cases:
                if isinstance(case, ComparedCase):
                    wrong: str | Invalid = _compare(program, case)
                else:
                    if examination is None:
                        examination = opened.enter_context(Examination(program, tests))
                    wrong = examination.play(case.source)
                if isinstance(wrong, Invalid):
                    return wrong
                passed.append(not wrong)
                why = why or wrong
        except Ended as error:
            why = why or str(error)
    return Grade((*passed, *[False] * (len(tests.cases) - len(passed))), why)


def _compare(program: Program, case: ComparedCase) -> str:
    """Return an error message about the program's result; "" if it is right."""
    answer = program.asked({"do": "value", "source": case.call})
    if "raised" in answer:
        return f"{case.call} raised {_error_line(answer['raised'])}"
    return "" if equals(answer["value"], case.expected) else f"{case.call} is not {case.expected!r}"


class Examination:
    """Tests that run in one jail, with the program in another."""

    def __init__(self, program: Program, tests: Suite) -> None:
        self._program = program
        self._examiner = shared().start(program.limits)
        self._asked = False  # whether the program has been called
        self._broken: str | Invalid = self._verdict({"do": "examine", "setup": tests.setup, "names": tests.names})

    def play(self, source: str) -> str | Invalid:
        """Run a test. Return an error message; "" if it passed, Invalid if the test itself fails."""
        return self._broken or self._verdict({"do": "test", "source": source})

    def __enter__(self) -> Examination:
        return self

    def __exit__(self, *raised: object) -> None:
        self._examiner.close()

    def _verdict(self, request: dict[str, Any]) -> str | Invalid:
        """Pass the test's calls to the program and the results back, until there is a verdict."""
        for _ in range(MOST_ASKS):
            try:
                message = self._examiner.ask(request, self._program.left)
            except Ended as error:  # caused by the program's values or its use of time
                if self._asked or not self._program.left:
                    raise
                return Invalid(f"the tests alone {error}")
            if "verdict" in message:
                if message["verdict"] == "broken":
                    return Invalid(f"a test cannot be run: {message['why']}")
                return "" if message["verdict"] == "passed" else message["why"] or "failed"
            self._asked = True
            request = self._program.ask(message["ask"])
            if not {"value", "raised", "callback"} & request.keys():
                raise Ended("sent a message that cannot be read")
        raise Ended("was called too often")


def _error_line(raised: Sequence[str]) -> str:
    """Return an exception, as [type, text, ...], on one line."""
    return " ".join(f"{raised[0]}: {raised[1]}"[:300].split())
