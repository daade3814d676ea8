"""What mistakes are tried: every place of a module's syntax at which an operator applies, with the text it puts there.

Beside the usual ones (comparisons, signs, constants, and/or, returns, statements) they are those that reinforcement
learning gets wrong: denominators, seeds, step numbers, temperatures, swapped arguments, indices into what was kept,
remainders, axes, gradients that should not flow, bounds and masks.

Words for readers are not tried: docstrings, annotations, errors' messages, assertions, f-strings, `__repr__`, and what
stands under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

Edit = tuple[str, ast.AST, ast.AST | None]
"""Kind of mistake, what is replaced, and by what (None: the statement is left out)."""

COUNTED = {"number", "epoch", "update", "place", "visit", "member", "turns", "version", "part"}
"""Names that say which step, epoch, update or turn something belongs to."""
RANDOM = {"seed_of", "order", "draw"}
"""Functions whose arguments decide what is drawn."""
COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
}  # fmt: skip
OPPOSITES = {
    "min": "max", "minimum": "maximum", "amin": "amax", "argmin": "argmax", "clamp_min": "clamp_max",
    "clamp_min_": "clamp_max_",
}  # fmt: skip
OPPOSITES |= {b: a for a, b in OPPOSITES.items()}
AXES = {"sum", "softmax", "log_softmax", "cumsum", "amax", "amin", "argmax", "mean", "cat", "flip", "sort", "any", "all",
        "gather", "squeeze", "concatenate", "unflatten", "stack"}  # fmt: skip
FUNCTIONS = {"exp", "exp_", "abs", "square", "sqrt", "log", "log_", "expm1", "clone"}


@dataclass(frozen=True)
class Mutant:
    """One mistake."""

    module: str  # "training/sources/rl_source.py", in the package
    kind: str
    line: int
    lines: tuple[int, int]  # first and last line of the statement: a test that runs none of them cannot notice
    span: tuple[int, int]  # bytes that are replaced
    before: str
    after: str
    statement: str  # the line as it stands, by which an equivalent one is known when others move
    within: str | None  # the function whose body holds it; None: it runs when the module is imported
    number: int = 0  # of those that say the same, in other places

    @property
    def id(self) -> str:
        """A name that stays when lines move."""
        told = (self.module, self.kind, self.within, self.statement, self.before, self.after, self.number)
        return hashlib.blake2b(repr(told).encode(), digest_size=6).hexdigest()

    def applied(self, source: bytes) -> bytes:
        """The module with the mistake in it, every other line where it was."""
        first, last = self.span
        return source[:first] + self.after.encode() + source[last:]

    def stands(self, source: bytes) -> bool:
        """Whether the module is still a program with it."""
        try:
            with warnings.catch_warnings(action="ignore"):
                compile(self.applied(source), self.module, "exec", dont_inherit=True)
        except SyntaxError:
            return False
        return True


def mutants(module: str, source: bytes) -> list[Mutant]:
    """Every mistake that can be made in a module, each once."""
    tree, rows = ast.parse(source), source.splitlines(keepends=True)
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row))
    found: dict[tuple[tuple[int, int], str], Mutant] = {}
    known: list[str] = []
    for node, statement, within in _eligible(tree):
        for kind, old, new in _edits(node):
            span = (starts[old.lineno - 1] + old.col_offset, starts[old.end_lineno - 1] + old.end_col_offset)  # type: ignore
            before = source[span[0] : span[1]].decode()
            after = _text(new, before)
            if _same(before, after) or (span, after) in found:
                continue
            line = rows[old.lineno - 1].decode().strip()  # type: ignore[attr-defined]
            mutant = Mutant(
                module,
                kind,
                old.lineno,
                _lines(statement),
                span,
                before,
                after,
                line,
                within,  # type: ignore[attr-defined]
            )
            known.append(mutant.id)
            found[span, after] = replace(mutant, number=known.count(mutant.id) - 1)
    return list(found.values())


def digest(source: bytes) -> str:
    """Of what a module does: comments, docstrings and other words may change."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            node.value = ""
    return hashlib.blake2b(ast.dump(tree).encode(), digest_size=8).hexdigest()


# -- where -------------------------------------------------------------------------------------------------------------


def _eligible(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.stmt, str | None]]:
    """Nodes, the innermost statement of each, and the outermost function whose body it is in."""

    def visit(node: ast.AST, statement: ast.stmt | None, within: str | None, names: str) -> Iterator[Any]:
        if isinstance(node, ast.stmt):
            statement = node
        if _spared(node):
            return
        if statement is not None:
            yield node, statement, within
        named = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        inner = f"{names}.{node.name}".lstrip(".") if named else names  # type: ignore[attr-defined]
        for name, child in _children(node):
            inside = within
            if isinstance(node, ast.FunctionDef) and within is None and name == "body":
                inside = inner
            yield from visit(child, statement, inside, inner)

    for node in tree.body:
        yield from visit(node, None, None, "")


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield name, child


def _spared(node: ast.AST) -> bool:
    if isinstance(node, (ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Raise)):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True  # a docstring
    if isinstance(node, ast.FunctionDef) and node.name == "__repr__":
        return True
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    # names of types: Callable[[str], None] stands where a value could
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript) and _is_type(node.value)


def _is_type(node: ast.Subscript) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("Callable", "Literal", "tuple", "dict", "list")


def _lines(statement: ast.stmt) -> tuple[int, int]:
    body = getattr(statement, "body", None)
    if isinstance(body, list) and body:
        return statement.lineno, max(statement.lineno, body[0].lineno - 1)
    return statement.lineno, statement.end_lineno or statement.lineno


# -- what --------------------------------------------------------------------------------------------------------------


def _edits(node: ast.AST) -> Iterator[Edit]:
    for operator in OPERATORS:
        yield from operator(node)


def _changed(node: ast.AST, **fields: Any) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _integer(value: int) -> ast.expr:
    return ast.UnaryOp(ast.USub(), ast.Constant(-value)) if value < 0 else ast.Constant(value)


def _number(node: ast.AST) -> int | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand)
        return None if inner is None else -inner
    is_integer = isinstance(node, ast.Constant) and type(node.value) is int
    return node.value if is_integer else None  # type: ignore[attr-defined,no-any-return]


def _called(node: ast.AST) -> str:
    """The name of what is called, without what it hangs on."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def compare(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            for other in COMPARISONS[type(op)]:
                yield "comparison", node, _changed(node, ops=[*node.ops[:i], other(), *node.ops[i + 1 :]])


def arithmetic(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield "arithmetic", node, _changed(node, op=ARITHMETIC[type(node.op)]())
        if isinstance(node.op, ast.Mult):
            yield "factor dropped", node, node.left
            yield "factor dropped", node, node.right
        if isinstance(node.op, ast.Sub):
            yield "operands swapped", node, _changed(node, left=node.right, right=node.left)
    elif isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield "arithmetic", node, _changed(node, op=ARITHMETIC[type(node.op)]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and _number(node) is None:
        yield "sign", node, node.operand


def denominator(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv)):
        yield "denominator", node, node.left
        for op in (ast.Add(), ast.Sub()):
            yield "denominator", node, _changed(node, right=ast.BinOp(node.right, op, ast.Constant(1)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("sum", "mean"):
        other = "mean" if node.func.attr == "sum" else "sum"
        yield "sum and mean", node, _changed(node, func=_changed(node.func, attr=other))


def constant(node: ast.AST) -> Iterator[Edit]:
    if not isinstance(node, ast.Constant):
        return
    if isinstance(node.value, bool):
        yield "constant", node, ast.Constant(not node.value)
    elif isinstance(node.value, int):
        yield "constant", node, ast.Constant(node.value + 1)
        if node.value:
            yield "constant", node, ast.Constant(node.value - 1)
    elif isinstance(node.value, float):
        yield "constant", node, ast.Constant(node.value * 2 if node.value else 1.0)
    elif isinstance(node.value, str) and node.value in ("amax", "amin"):
        yield "min and max", node, ast.Constant(OPPOSITES[node.value])


def logic(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.BoolOp):
        yield "and, or", node, _changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        for i in range(len(node.values)):
            rest = [*node.values[:i], *node.values[i + 1 :]]
            yield "condition dropped", node, rest[0] if len(rest) == 1 else _changed(node, values=rest)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert)):
        yield "not", node, node.operand
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        yield "and, or", node, _changed(node, op=ast.BitOr() if isinstance(node.op, ast.BitAnd) else ast.BitAnd())
        yield "mask", node, node.left
        yield "mask", node, node.right


def branch(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield "condition negated", node.test, ast.UnaryOp(ast.Not(), node.test)
    if isinstance(node, ast.If):
        for child in node.body:
            if isinstance(child, ast.Return):
                yield "return", child, None
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
        for generator in node.generators:
            for condition in generator.ifs:
                yield "filter dropped", condition, ast.Constant(True)


def statement(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield "statement dropped", node, None


def seeds(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Call) and _called(node) in RANDOM:
        for i, argument in enumerate(node.args):
            if isinstance(argument, ast.Lambda):
                continue
            zero = [*node.args[:i], ast.Constant(0), *node.args[i + 1 :]]
            yield "seed", node, _changed(node, args=zero)
            if _called(node) == "seed_of":
                yield "seed", node, _changed(node, args=[*node.args[:i], *node.args[i + 1 :]])
    if isinstance(node, ast.keyword) and node.arg == "seed":
        yield "seed", node.value, ast.Constant(0)


def steps(node: ast.AST) -> Iterator[Edit]:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    if name in COUNTED and isinstance(node.ctx, ast.Load):  # type: ignore[attr-defined]
        yield "which step", node, ast.Constant(1)
        yield "which step", node, ast.BinOp(node, ast.Add(), ast.Constant(1))  # type: ignore[arg-type]


def temperature(node: ast.AST) -> Iterator[Edit]:
    if not isinstance(node, ast.Call):
        return
    for i, argument in enumerate(node.args):
        if isinstance(argument, (ast.Name, ast.Attribute)) and ast.unparse(argument).endswith("temperature"):
            yield "temperature", argument, ast.Constant(1.0)
            if i == len(node.args) - 1:
                yield "temperature", node, _changed(node, args=node.args[:-1])


def swapped(node: ast.AST) -> Iterator[Edit]:
    if not isinstance(node, ast.Call) or any(isinstance(a, ast.Starred) for a in node.args):
        return
    for i in range(len(node.args) - 1):
        a, b = node.args[i : i + 2]
        if not isinstance(a, ast.Constant) or not isinstance(b, ast.Constant):
            yield "arguments swapped", node, _changed(node, args=[*node.args[:i], b, a, *node.args[i + 2 :]])


def index(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Call) and _called(node) == "enumerate" and len(node.args) == 1:
        yield "index", node, _changed(node, args=[*node.args, ast.Constant(1)])
    if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load):
        return
    if isinstance(node.slice, ast.Name):
        yield "index", node, node.slice
        yield "index", node, node.value
    elif isinstance(node.slice, ast.Slice):
        for bound in ("lower", "upper", "step"):
            if (value := getattr(node.slice, bound)) is not None:
                yield "slice", node, _changed(node, slice=_changed(node.slice, **{bound: None}))
                if bound != "step":
                    less = ast.BinOp(value, ast.Sub(), ast.Constant(1))
                    yield "slice", node, _changed(node, slice=_changed(node.slice, **{bound: less}))


def remainder(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.BinOp):
        inner = node.operand
        if isinstance(inner.op, ast.FloorDiv) and isinstance(inner.left, ast.UnaryOp):
            yield "remainder", node, _changed(inner, left=inner.left.operand)
    if isinstance(node, ast.Call) and _called(node) == "range" and len(node.args) == 3:
        first, last, step = node.args
        whole = ast.BinOp(ast.BinOp(last, ast.Sub(), step), ast.Add(), ast.Constant(1))
        yield "remainder", node, _changed(node, args=[first, whole, step])


def axis(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Call) and _called(node) in AXES:
        for value in [*node.args, *(k.value for k in node.keywords if k.arg in ("dim", "axis"))]:
            if _number(value) in (0, -1):
                yield "axis", value, _integer(-1 - (_number(value) or 0))


def gradient(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "detach":
            yield "detach", node, node.func.value
        elif node.func.attr == "no_grad":
            yield "detach", node, _changed(node, func=_changed(node.func, attr="enable_grad"))


def bounds(node: ast.AST) -> Iterator[Edit]:
    if not isinstance(node, ast.Call):
        return
    name, function = _called(node), node.func
    if name in OPPOSITES:
        if isinstance(function, ast.Attribute):
            yield "min and max", node, _changed(node, func=_changed(function, attr=OPPOSITES[name]))
        else:
            yield "min and max", node, _changed(node, func=ast.Name(OPPOSITES[name], ast.Load()))
            if len(node.args) == 2:
                yield "bound", node, node.args[0]
                yield "bound", node, node.args[1]
    if name in ("minimum", "maximum") and len(node.args) == 2:
        yield "bound", node, node.args[0]
        yield "bound", node, node.args[1]
    if isinstance(function, ast.Attribute) and name in ("clamp", "clamp_min", "clamp_max", "clamp_min_"):
        yield "bound", node, function.value
        if name == "clamp" and len(node.args) == 2:
            for bound, value in zip(("min", "max"), node.args, strict=True):
                yield "bound", node, _changed(node, args=[], keywords=[ast.keyword(bound, value)])


def masks(node: ast.AST) -> Iterator[Edit]:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    if node.func.attr in ("masked_fill", "masked_fill_"):
        yield "mask", node, node.func.value
    elif node.func.attr == "where" and len(node.args) == 3:
        yield "mask", node, node.args[1]
        yield "mask", node, node.args[2]


def function(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
        if node.func.attr in FUNCTIONS:
            yield "function dropped", node, node.func.value
    elif isinstance(node, ast.Call) and _called(node) in ("sorted", "reversed") and len(node.args) == 1:
        yield "order", node, ast.Call(ast.Name("list", ast.Load()), node.args, [])


OPERATORS: tuple[Callable[[ast.AST], Iterator[Edit]], ...] = (
    compare, arithmetic, denominator, constant, logic, branch, statement, seeds, steps, temperature, swapped, index,
    remainder, axis, gradient, bounds, masks, function,
)  # fmt: skip


# -- text --------------------------------------------------------------------------------------------------------------


def _text(new: ast.AST | None, before: str) -> str:
    """What stands in its place, of as many lines."""
    lines = "\n" * before.count("\n")
    if new is None:
        return f"pass{lines}"
    text = ast.unparse(new)
    if isinstance(new, ast.stmt):
        return text + lines
    atom = isinstance(new, (ast.Constant, ast.Name, ast.Attribute, ast.Call, ast.Subscript)) and not lines
    return text if atom else f"({text}{lines})"


def _same(before: str, after: str) -> bool:
    try:
        return ast.dump(ast.parse(before)) == ast.dump(ast.parse(after))
    except SyntaxError:
        return False
