"""Copies reward functions out of a training script, with the imports, constants and functions that they use."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

_TRAINS = ("Trainer", "load_dataset", "load_from_disk", "from_pretrained", "parse_args")
"""Ends of the names of calls that a module of rewards must not make when it is imported."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)


def runs_when_imported(tree: ast.Module) -> bool:
    """Whether importing a script would train or load: outside functions and the guard of `__main__`."""
    return any(_trains(node) for node in tree.body if not _is_guard(node) and not isinstance(node, _DEFINITIONS))


def source_of(tree: ast.Module, text: str, functions: Iterable[str]) -> str:
    """Return a module with these functions and what they use of the script, in the script's order."""
    made: dict[str, ast.stmt] = {}
    for node in _statements(tree.body):
        for name in _names_made(node):
            made[name] = node
    taken: list[ast.stmt] = [made[name] for name in functions if name in made]
    for node in taken:  # it grows
        used = (part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load))
        for name in used:
            of = made.get(name)
            if of is not None and of not in taken and (isinstance(of, _DEFINITIONS) or not _trains(of)):
                taken.append(of)
    future = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    ordered = sorted([*future, *taken], key=lambda node: node.lineno)
    parts = [(node, ast.unparse(node) if node.col_offset else _with_decorators(node, text)) for node in ordered]
    imports = "\n".join(part for node, part in parts if isinstance(node, _IMPORTS))
    return "\n\n\n".join([imports, *(part for node, part in parts if not isinstance(node, _IMPORTS))]).strip() + "\n"


def _trains(node: ast.AST) -> bool:
    calls = (ast.unparse(part.func)[-200:] for part in ast.walk(node) if isinstance(part, ast.Call))
    return any(call.endswith(_TRAINS) for call in calls)


def _is_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)[:200]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, of its branches and functions; the module's own last."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.If, ast.Try, ast.With)):
            yield from _statements(node.body)
    yield from body


def _names_made(node: ast.stmt) -> list[str]:
    if isinstance(node, _DEFINITIONS):
        return [node.name]
    if isinstance(node, _IMPORTS):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]


def _with_decorators(node: ast.stmt, text: str) -> str:
    """Return the source of a statement, comments in it included."""
    first = min([node.lineno, *(part.lineno for part in getattr(node, "decorator_list", []))])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
