"""Parses tests: each is a call with an expected value, or code to be run.

A test in MBPP's form, `assert f(1, [2]) == 3`, is split: the program evaluates `f(1, [2])`, and the result is compared
with 3 in this process. Any other test, such as `assert math.isclose(f(1), 0.1)` or HumanEval's `check(f)`, runs in a
jail of its own (`posttrain.sandbox.examiner`), and the program in another. In both cases the expected value never
reaches the program, and the comparison never runs in its process.
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
    """A test with a `call` that the program evaluates; the result must equal `expected`."""

    call: str
    expected: Any


@dataclass(frozen=True)
class PlayedCase:
    """A test that is code: it raises unless the program is right."""

    source: str


@dataclass(frozen=True)
class Suite:
    """The tests of a program, in order."""

    cases: tuple[ComparedCase | PlayedCase, ...]
    setup: str = ""  # code to run before the first test
    names: tuple[str, ...] = ()  # names of the program that the tests use


def read_tests(tests: Sequence[str], setup: str = "", entry: Sequence[str] = ()) -> Suite | Invalid:
    """Parse the tests of a task. `setup`: code before them; `entry`: builtins, such as "sum", that the program
    redefines and the tests use. Invalid if there are no tests, or if they are not Python.
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
    """Split a test if possible, else return None."""
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
    """Return whether an expression consists of calls and attributes of the program's names, with literal arguments."""
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
    """Return the setup after imports of those modules of the standard library that tests use without importing them.

    The program may have imported these modules for itself, or replaced them.
    """
    modules = sorted(_free(played) & sys.stdlib_module_names)
    return "\n".join([*(f"import {name}" for name in modules), setup])


def _of_the_program(played: str, entry: Sequence[str]) -> tuple[str, ...]:
    free = _free(played)
    own = {name for name in free if hasattr(builtins, name) and name not in entry}
    return tuple(sorted(free - own - sys.stdlib_module_names))
