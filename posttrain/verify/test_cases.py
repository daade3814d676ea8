"""Parses tests: a call with an expected value, or code that has to be run.

A test in MBPP's form, `assert f(1, [2]) == 3`, is split. The program is asked for `f(1, [2])`, and its answer is
compared with 3 outside. Any other test, such as `assert math.isclose(f(1), 0.1)` or HumanEval's `check(f)`, is run in a
jail of its own (`posttrain.sandbox.examiner`), with the program in another. Either way the expected value never reaches
the program, and the comparison never runs beside it.
"""

from __future__ import annotations

import ast
import builtins
import symtable
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from posttrain.core.types import Invalid

LITERALS = (bool, int, float, complex, str, bytes, list, tuple, set, dict, type(None))


@dataclass(frozen=True)
class ComparedCase:
    """A test whose `call` the program evaluates; the answer has to be `expected`."""

    call: str
    expected: Any


@dataclass(frozen=True)
class PlayedCase:
    """A test as code that raises unless the program is right."""

    source: str


@dataclass(frozen=True)
class Suite:
    """Tests of a program, in order."""

    cases: tuple[ComparedCase | PlayedCase, ...]
    setup: str = ""  # code before the first test that is run
    names: tuple[str, ...] = ()  # names of the program that the tests use


def read_tests(tests: Sequence[str], setup: str = "", entry: Sequence[str] = ()) -> Suite | Invalid:
    """Parse the tests of a task. `setup`: code before them; `entry`: builtins that the program redefines, such as
    "sum", and that tests refer to. Invalid where there are none, or they are not Python.
    """
    return _read(tuple(tests), setup, tuple(entry))


@lru_cache(maxsize=4096)
def _read(tests: tuple[str, ...], setup: str, entry: tuple[str, ...]) -> Suite | Invalid:
    if not tests:
        return Invalid("the task has no tests")
    try:
        bound = _bound(setup)
        cases: list[ComparedCase | PlayedCase] = []
        for test in tests:
            compared = None if _does_more_than_import(setup) else _compared(ast.parse(test), bound)
            cases.append(compared or PlayedCase(test))
        played = "\n".join([setup, *(case.source for case in cases if isinstance(case, PlayedCase))])
        return Suite(tuple(cases), _with_modules(setup, played), _of_the_program(played, entry))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # ValueError: a null character
        return Invalid(f"a test is not Python: {error}")


def _compared(tree: ast.Module, bound: frozenset[str]) -> ComparedCase | None:
    """Split a test, where that is possible."""
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.Assert):
        return None
    test = tree.body[0].test
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return None
    for call, value in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
        if isinstance(call, ast.Call) and _is_programs(call, bound) and (literal := _literal(value)) is not None:
            return ComparedCase(ast.unparse(call), literal[0])
    return None


def _is_programs(node: ast.expr, bound: frozenset[str]) -> bool:
    """Return whether everything in this expression is the program's: calls and attributes of its names, with
    literals.
    """
    if isinstance(node, ast.Call):
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        named = all(keyword.arg is not None for keyword in node.keywords)
        return named and all(_literal(value) is not None for value in values) and _is_programs(node.func, bound)
    if isinstance(node, ast.Attribute):
        return not hasattr(builtins, _root(node)) and _is_programs(node.value, bound)
    return isinstance(node, ast.Name) and node.id not in bound and node.id not in sys.stdlib_module_names


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else ""


def _literal(node: ast.expr) -> tuple[Any] | None:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return (value,) if _is_plain(value) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(x) for pair in value.items() for x in pair)
    return type(value) in LITERALS and (
        not isinstance(value, (list, tuple, set)) or all(_is_plain(item) for item in value)
    )


def _does_more_than_import(setup: str) -> bool:
    return any(not isinstance(node, ast.Import | ast.ImportFrom) for node in ast.parse(setup).body)


def _bound(code: str) -> frozenset[str]:
    """Return the names that code binds at its top level."""
    table = symtable.symtable(code, "<setup>", "exec")
    return frozenset(s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported())


def _free(code: str) -> set[str]:
    """Return the names that code reads and does not bind."""
    top = symtable.symtable(code, "<tests>", "exec")
    bound = _bound(code)
    found, line = set(), [top]
    while line:
        table = line.pop()
        line += table.get_children()
        outermost = table.get_type() == "module"
        found |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (outermost or s.is_global())}
    return found - bound


def _with_modules(setup: str, played: str) -> str:
    """Return the setup behind imports of the standard library's modules that tests use without importing them.

    A program may have imported them for itself, or replaced them.
    """
    modules = sorted(_free(played) & sys.stdlib_module_names)
    return "\n".join([*(f"import {name}" for name in modules), setup])


def _of_the_program(played: str, entry: Sequence[str]) -> tuple[str, ...]:
    free = _free(played)
    own = {name for name in free if hasattr(builtins, name) and name not in entry}
    return tuple(sorted(free - own - sys.stdlib_module_names))
