"""Checks Python code without running it: whether it parses, which names it defines, how similar two programs are.

Parsing runs in a process with limits, because deep nesting can exhaust the parser's stack. The code of a reply is its
last fenced block, else the whole reply (`posttrain.verify.fenced.code_in`).
"""

from __future__ import annotations

import ast
from collections import Counter
from typing import Any

from posttrain.core.types import Invalid, UserError
from posttrain.verify.fenced import code_in
from posttrain.verify.limited_process import CheckFailed, limited, limited_verdict

LONGEST = 200_000  # most characters of code; longer code is wrong
SECONDS = 2.0  # of processor time per call

_LEFT_OUT = ("annotation", "returns", "type_comment", "type_ignores", "ctx", "kind")
_BOUND = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def parses(reply: str) -> float | Invalid:
    """1.0 if the code of a reply is valid Python with a statement, else 0.0.

    >>> parses("x = (1,")
    0.0
    """
    return _asked("posttrain.verify.syntax:is_code", code_in(reply))


def defines(reply: str, signature: str) -> float | Invalid:
    """1.0 if the code of a reply defines the requested function or class at its top level, else 0.0.

    `signature` is a name ("solve", also of a class), or a name with parameters ("solve(text, limit=10)"). Parameters
    are compared by name, order and kind, and by whether they have a default; annotations are ignored. Raises UserError
    if the signature cannot be parsed.

    >>> defines("def solve(a: int, b: int) -> int:\\n    return a + b", "solve(a, b)")
    1.0
    """
    name, bracket, _ = signature.partition("(")
    if not name.strip().isidentifier() or (bracket and _parameters(signature) is None):
        raise UserError(
            f"{signature!r} is not a signature: give a name, or a name with parameters, such as solve(a, b=1)"
        )
    wanted = _parameters(signature) if bracket else None
    return _asked("posttrain.verify.syntax:has", code_in(reply), name.strip(), wanted)


def tree_similarity(reply: str, reference: str) -> float | Invalid:
    """The similarity of two programs' syntax trees, from 0.0 to 1.0: 1.0 for the same code with other names.

    2 |A and B| / (|A| + |B|) over their subtrees, counted with repetitions: the syntactic match of CodeBLEU (Ren et al.
    2020, arXiv 2009.10297, section 3.2), made symmetric, so that more code is not better. All names that the code
    itself binds are equal; attributes, constants and other names are compared. Docstrings, comments and annotations are
    ignored. 0.0 for a reply that does not parse, Invalid if the reference does not.

    >>> tree_similarity("def f(x): return x + 1", "def add(n): return n + 1")
    1.0
    """
    found = limited("posttrain.verify.syntax:similarity", code_in(reply)[:LONGEST], code_in(reference), seconds=SECONDS)
    if isinstance(found, CheckFailed):
        alone = limited("posttrain.verify.syntax:similarity", "", code_in(reference), seconds=SECONDS)
        if isinstance(alone, (CheckFailed, Invalid)):
            return Invalid(f"the reference cannot be compared: {alone.reason}")
        found = alone
    if isinstance(found, Invalid):
        return found
    return Invalid("the reference is not Python code") if found is None else float(found)


def _asked(function: str, code: str, *more: Any) -> float | Invalid:
    return 0.0 if len(code) > LONGEST else limited_verdict(function, code, *more, seconds=SECONDS)


# -- in a process with limits ------------------------------------------------------------------------------------------


def is_code(code: str) -> bool:
    tree = _tree(code)
    return tree is not None and bool(tree.body)


def has(code: str, name: str, parameters: list[list[Any]] | None) -> bool:
    tree = _tree(code)
    found = [node for node in tree.body if isinstance(node, _BOUND) and node.name == name] if tree else []
    if not found:
        return False
    last = found[-1]  # the definition that a caller would get
    if parameters is None:
        return True
    return not isinstance(last, ast.ClassDef) and _described(last.args) == parameters


def similarity(code: str, reference: str) -> float | None:
    """Return the similarity, None if the reference does not parse."""
    gold, said = _tree(reference), _tree(code)
    if gold is None or not gold.body:
        return None
    if said is None or not said.body:
        return 0.0
    known: dict[Any, int] = {}  # shared by both programs: equal subtrees have equal numbers
    one, other = _subtrees(said, known), _subtrees(gold, known)
    return 2 * (one & other).total() / (one.total() + other.total())


def _tree(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError):  # ValueError: a null character or half a surrogate pair
        return None


def _parameters(signature: str) -> list[list[Any]] | None:
    tree = _tree(f"def {signature.strip().removesuffix(':')}: pass") if len(signature) < 1000 else None
    first = tree.body[0] if tree and len(tree.body) == 1 else None
    return _described(first.args) if isinstance(first, ast.FunctionDef) else None


def _described(arguments: ast.arguments) -> list[list[Any]]:
    """Return (kind, name, whether there is a default) for each parameter, in order."""
    found: list[list[Any]] = []
    plain = [("positional", a.arg) for a in arguments.posonlyargs] + [("plain", a.arg) for a in arguments.args]
    first_default = len(plain) - len(arguments.defaults)
    found += [[kind, name, i >= first_default] for i, (kind, name) in enumerate(plain)]
    if arguments.vararg:
        found.append(["*", arguments.vararg.arg, False])
    found += [
        ["keyword", a.arg, d is not None] for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        found.append(["**", arguments.kwarg.arg, False])
    return found


def _subtrees(tree: ast.Module, known: dict[Any, int]) -> Counter[int]:
    """Count the subtrees of every statement and expression, by number."""
    bound = _bound_names(tree)
    found: Counter[int] = Counter()

    def number(node: Any) -> int:
        if isinstance(node, ast.AST):
            fields = [(name, value) for name, value in ast.iter_fields(node) if name not in _LEFT_OUT]
            key: Any = (type(node).__name__, *((name, number(value)) for name, value in fields))
        elif isinstance(node, list):
            key = ("list", *(number(x) for x in node if not _is_docstring(x)))
        else:
            key = ("bound",) if isinstance(node, _Name) and node in bound else (type(node).__name__, repr(node))
        place = known.setdefault(key, len(known))
        if isinstance(node, (ast.stmt, ast.expr)):
            found[place] += 1
        return place

    number(_marked(tree))
    return found


class _Name(str):
    """A name that the program binds, distinct from equal text in it."""


def _marked(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        for field in ("id", "arg", "name"):
            if isinstance(getattr(node, field, None), str) and not isinstance(node, (ast.keyword, ast.alias)):
                setattr(node, field, _Name(getattr(node, field)))
    return tree


def _bound_names(tree: ast.Module) -> set[str]:
    """Return the names that the code binds: variables, parameters, functions, classes."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, (*_BOUND, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            found.add(node.name)
    return found


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
