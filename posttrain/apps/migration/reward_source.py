"""Copies reward functions, tools and environments out of a training script, with what they use of it."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType

_TRAINS = (
    *("Trainer", "load_dataset", "load_from_disk", "from_pretrained", "parse_args", "parse_known_args"),
    *("parse_args_and_config", "parse_args_into_dataclasses", "Parser"),
)
"""Ends of the names of calls that a module of rewards must not make when it is imported."""
_LIBRARIES = frozenset({"trl", "peft", "unsloth", "datasets", "accelerate", "deepspeed", "wandb"})
"""Libraries that load data and models, and train. Rewards rarely use them; what they do use is copied with them."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)


def needs_training(tree: ast.Module) -> str:
    """Return why a script cannot be imported for its rewards, outside functions and the guard of `__main__`: it trains or
    loads, or needs a library of its training, which may not be installed. "" if it can.
    """
    outside = [node for node in tree.body if not _is_guard(node) and not isinstance(node, _DEFINITIONS)]
    if any(map(_trains, outside)):
        return "it trains or loads when it is imported"
    libraries = sorted({name for node in outside for name in _LIBRARIES & _modules(node)})
    return f"it imports {', '.join(libraries)}" if libraries else ""


class _Block:
    """The statements of a module or of a function by the names that they make, and the block around it."""

    def __init__(self, body: list[ast.stmt], around: _Block | None = None, parameters: Collection[str] = ()) -> None:
        self.around = around
        self.depth: int = 0 if around is None else around.depth + 1
        self.made: dict[str, list[ast.stmt]] = {name: [] for name in parameters}
        self.inner: list[_Block] = []
        for node in _statements(body):
            for name in _names_made(node):
                if name not in parameters:  # what the caller gives is not in the script's text
                    self.made.setdefault(name, []).append(node)
            if isinstance(node, _FUNCTIONS):
                words = [part.arg for part in ast.walk(node.args) if isinstance(part, ast.arg)]
                self.inner.append(_Block(node.body, self, words))

    def of(self, name: str) -> _Block | None:
        """Return the block that makes a name, seen from this one; None if none does."""
        return self if name in self.made else self.around.of(name) if self.around else None

    def defines(self, name: str) -> _Block | None:
        """Return the outermost block here that defines a function or a class; the module for what it sets or imports."""
        if any(isinstance(node, _DEFINITIONS) or not self.depth for node in self.made.get(name, ())):
            return self
        return next((found for block in self.inner if (found := block.defines(name))), None)


class _Copy:
    """The statements that functions need, each with the depth of its block, and the names that cannot be copied."""

    def __init__(self, module: _Block) -> None:
        self.module = module
        self.taken: dict[ast.stmt, int] = {}
        self.missing: list[str] = []

    def take(self, name: str, block: _Block) -> bool:
        """Take what makes a name, with all that this uses. Returns whether it can be made without training or loading."""
        if (of := block.of(name)) is None:
            if hasattr(builtins, name) or (name.startswith("__") and name.endswith("__")):
                return True
            stars = self.module.made.get("*", [])
            self.taken |= dict.fromkeys(stars, 0)
            return bool(stars)
        nodes = [node for node in of.made[name] if node not in self.taken]
        before = dict(self.taken)
        if all(self._take_statement(node, of) for node in nodes) and of.made[name]:
            return True
        self.taken = before
        return False

    def _take_statement(self, node: ast.stmt, block: _Block) -> bool:
        """Take a statement. A definition is copied whatever it uses: only its calls need what is missing."""
        if not isinstance(node, _DEFINITIONS) and _trains(node):
            return False
        self.taken[node] = block.depth
        for name in [] if isinstance(node, _IMPORTS) else _used(node):
            if not self.take(name, block):
                if not isinstance(node, _DEFINITIONS):
                    return False
                if name not in self.missing:
                    self.missing.append(name)
        return True


def source_of(
    tree: ast.Module, text: str, functions: Iterable[str], made: Mapping[str, ast.expr] = MappingProxyType({})
) -> tuple[str, list[str]]:
    """Return a module with these functions and what they use of the script, and the names that it cannot have.

    `made`: names that the script does not have -> the expressions that they are set to, at the end.

    These are made by the training itself: a tokenizer that is loaded, a parameter of the function around.
    """
    last = max((node.end_lineno or 0 for node in tree.body), default=0)
    ends = [
        ast.Assign([ast.Name(name, ast.Store())], value, lineno=last + 1, col_offset=1) for name, value in made.items()
    ]
    module = _Block([*tree.body, *ends])
    copy = _Copy(module)
    for name in functions:
        if (block := module.defines(name)) is not None:
            copy.take(name, block)
    future = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    taken: dict[ast.stmt, int] = {node: 0 for node in future} | copy.taken
    # what is around a function runs before what is in it
    ordered = sorted(taken, key=lambda node: (taken[node], node.lineno))
    parts = [(node, ast.unparse(node) if node.col_offset else _with_decorators(node, text)) for node in ordered]
    imports = "\n".join(part for node, part in parts if isinstance(node, _IMPORTS))
    rest = [part for node, part in parts if not isinstance(node, _IMPORTS)]
    return "\n\n\n".join([imports, *rest]).strip() + "\n", copy.missing


def _modules(node: ast.stmt) -> set[str]:
    """Return the packages that an import names."""
    if isinstance(node, ast.ImportFrom):
        return {(node.module or "").partition(".")[0]}
    return {alias.name.partition(".")[0] for alias in node.names} if isinstance(node, ast.Import) else set()


def _trains(node: ast.AST) -> bool:
    calls = (ast.unparse(part.func)[-200:] for part in ast.walk(node) if isinstance(part, ast.Call))
    return any(call.endswith(_TRAINS) for call in calls)


def _is_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)[:200]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a block. A branch or loop is one of them, unless it is the guard of `__main__` or trains."""
    for node in body:
        within = [part for name in ("body", "orelse", "finalbody") for part in getattr(node, name, [])]
        if isinstance(node, _DEFINITIONS) or not within or not (_is_guard(node) or _trains(node)):
            yield node
        else:
            yield from _statements(within)


def _names_made(node: ast.stmt) -> list[str]:
    """Return the names that a statement sets in its block."""
    if isinstance(node, _DEFINITIONS):
        return [node.name]
    if isinstance(node, _IMPORTS):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    return [
        symbol.get_name() for symbol in _symbols(node).get_symbols() if symbol.is_assigned() or symbol.is_imported()
    ]


def _symbols(node: ast.stmt) -> symtable.SymbolTable:
    try:
        return symtable.symtable(ast.unparse(node), "script", "exec")
    except (SyntaxError, RecursionError):  # nonlocal names of a function around, or nesting that Python refuses
        return symtable.symtable("", "script", "exec")


def _used(node: ast.stmt) -> list[str]:
    """Return the names that a statement reads and does not bind by itself, in arguments, loops and the like."""
    tables, found = [_symbols(node)], []
    for table in tables:  # it grows
        tables += table.get_children()
        found += [symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced() and symbol.is_global()]
    return list(dict.fromkeys(found))


def _with_decorators(node: ast.stmt, text: str) -> str:
    """Return the source of a statement, comments in it included."""
    first = min([node.lineno, *(part.lineno for part in getattr(node, "decorator_list", []))])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
