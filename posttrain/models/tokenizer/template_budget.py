"""Budget of a rendering: the price of each operation in a chat template, and the rewriting that charges it. See
`posttrain.models.tokenizer.chat_template`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from functools import partial, reduce
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import TemplateSyntaxError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, Undefined
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

BUDGET = 16_000_000  # characters that a rendering may process: at most some five seconds, and some hundred MiB
PER_CHARACTER = 1024  # additional budget per character of the conversation, since some templates loop over characters
STEP = 4  # price of each node of a body in each round, and of each new element
ACCESS = 16  # additional price of an attribute or call, which Jinja's sandbox checks: microseconds
WALK = 16  # price of each value inside a container: a microsecond
INTEGER_BITS = 1024


class Overspent(Exception):
    """Raised when the budget is used up."""

    def __str__(self) -> str:
        return (
            f"it exceeds its budget ({BUDGET:,} characters handled, and {PER_CHARACTER} for each one of the "
            "conversation): correct the template"
        )


_CONSTANT = frozenset((bool, int, float, type(None)))


class BudgetContext(Context):
    """Variables of one rendering, and the remaining budget, `left`."""

    left = 0

    def spend(self, units: int) -> None:
        self.left -= units
        if self.left < 0:
            raise Overspent

    def spend_deeply(self, value: Any) -> int:
        """Pay for a value and all values inside it, each as often as it occurs. Return the price."""
        before = self.left
        waiting = [value]
        while waiting:
            item = waiting.pop()
            kind = type(item)
            inside: Collection[Any] = ()
            if kind is list or kind is tuple:
                inside = item
            elif isinstance(item, str | bytes):
                self.left -= len(item)
            elif kind in _CONSTANT:
                pass
            elif isinstance(item, Mapping):
                inside = [*item.keys(), *item.values()] if len(item) <= self.left else item
            elif isinstance(item, Namespace):  # its text shows all of its values
                inside = item._Namespace__attrs.values()
            elif isinstance(item, MethodType | BuiltinMethodType):  # its text shows its object
                inside = (item.__self__,)
            elif isinstance(item, Collection) and not isinstance(item, range | Undefined):
                inside = item
            self.left -= WALK + len(inside)
            if self.left < 0:
                raise Overspent
            waiting.extend(inside)
        return before - self.left


def size_of(value: Any) -> int:
    """Return the number of characters or elements; nested elements are not counted."""
    kind = type(value)
    if kind in _CONSTANT:
        return 1
    if kind is str or kind is list or kind is dict:
        return len(value)
    return len(value) if isinstance(value, Sized) and not isinstance(value, Undefined) else 1


@pass_context
def weighed(context: BudgetContext, value: Any) -> Any:
    """Pay for the whole of a value that is compared or written out, and return it."""
    if type(value) is str:
        context.left -= len(value)
        if context.left < 0:
            raise Overspent
    elif type(value) not in _CONSTANT:
        context.spend_deeply(value)
    return value


@pass_context
def key(context: BudgetContext, value: Any) -> Any:
    """Pay for a key or an element to find, and return it. Nested tuples are refused: hashing them has no bound."""
    if isinstance(value, tuple) and any(isinstance(part, tuple) for part in value):
        raise SecurityError("a chat template may look up strings and numbers, not nested tuples")
    return weighed(context, value)


@pass_context
def _within(context: BudgetContext, value: Any) -> Any:
    """Pay for a container that is searched, except a dictionary, and return it."""
    return value if type(value) is dict else weighed(context, value)


@pass_context
def _name(context: BudgetContext, value: Any) -> Any:
    """Check and pay for the key of a new entry. Larger integers could be chosen to collide, which slows insertions."""
    if not isinstance(value, str) and not (isinstance(value, int) and value.bit_length() < 32):
        raise SecurityError("a chat template may use strings and small numbers as keys")
    return weighed(context, value)


@pass_context
def _each(context: BudgetContext, value: Any) -> Any:
    """Pay for a value that is iterated or sliced, and return it."""
    context.spend(size_of(value))
    return value


@pass_context
def _added(context: BudgetContext, values: tuple[Any, ...]) -> Any:
    """Pay for and add the operands of a chain of `+`."""
    units = 0
    for value in values:
        if type(value) is not str:
            sandbox: Any = context.environment
            return reduce(partial(sandbox.call_binop, context, "+"), values)
        units += len(value)
    context.spend(units)
    return "".join(values)


@pass_context
def _joined(context: BudgetContext, values: tuple[Any, ...]) -> str:
    """Pay for and join the operands of `~`."""
    for value in values:
        weighed(context, value)
    return "".join(map(str, values))


@pass_context
def _tick(context: BudgetContext, units: int) -> None:
    """Pay for a round of a loop, or a call of a macro; `units`: see `Pricing.size`."""
    context.spend(units)


class Pricing(NodeTransformer):
    """Rewrites a template so that operations compiled to bare Python pay, through filters whose names begin with a
    space, which no template can write.
    """

    STATEMENTS = (
        *(nodes.Output, nodes.For, nodes.If, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.With, nodes.Assign),
        *(nodes.AssignBlock, nodes.Scope, nodes.Break, nodes.Continue),
    )

    def __init__(self, template: nodes.Template) -> None:
        """Prepare the rewriting. `template`: the whole template; its body is then passed to `visit`."""
        self.names = len({node.name for node in template.find_all(nodes.Name) if node.ctx == "store"})

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        if isinstance(node, nodes.Stmt) and not isinstance(node, self.STATEMENTS):
            raise TemplateSyntaxError(f"a chat template takes no {type(node).__name__.lower()}", node.lineno)
        if getattr(node, "dyn_args", None) is not None or getattr(node, "dyn_kwargs", None) is not None:
            raise TemplateSyntaxError("a chat template takes no * and ** in calls", node.lineno)
        if isinstance(node, nodes.Const) and isinstance(node.value, int) and node.value.bit_length() > INTEGER_BITS:
            raise TemplateSyntaxError(f"a chat template takes integers of at most {INTEGER_BITS} bits", node.lineno)
        return super().visit(node, *args, **kwargs)

    def size(self, body: Sequence[nodes.Node]) -> int:
        """Return the price of one round of a body, in addition to the price of its operations: for its plain text and
        its nodes.
        """
        size = STEP
        for part in body:
            size += STEP
            if isinstance(part, nodes.TemplateData):
                size += len(part.data)
            elif isinstance(part, nodes.Const):
                size += len(str(part.value))
            elif isinstance(part, nodes.Call):
                size += self.names  # Jinja passes all variables of enclosing loops to a call
            if isinstance(part, nodes.Getattr | nodes.Getitem | nodes.Call | nodes.Filter | nodes.NSRef):
                size += ACCESS
            inner = isinstance(part, nodes.For | nodes.Macro | nodes.CallBlock)  # their bodies pay separately
            size += 0 if inner else self.size(list(part.iter_child_nodes()))
        return size

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        for place, part in enumerate(node.nodes):
            # already paid by the operation
            done = isinstance(part, nodes.Filter) and part.name in (" added", " joined")
            if not done and not isinstance(part, nodes.TemplateData | nodes.Const):
                node.nodes[place] = _paid(part, " weighed")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _paid(nodes.Tuple(node.nodes, "load", lineno=node.lineno), " joined")

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        terms: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):  # a + b + c is (a + b) + c
            terms.insert(0, self.visit(left.right))
            left = left.left
        return _paid(nodes.Tuple([self.visit(left), *terms], "load", lineno=node.lineno), " added")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        holders: tuple[Any, ...] = (node, *node.ops)
        looked_for = any(operand.op in ("in", "notin") for operand in node.ops)
        if looked_for and len(node.ops) == 1:
            if not isinstance(node.expr, nodes.Const):
                node.expr = _paid(node.expr, " key")
            node.ops[0].expr = _paid(node.ops[0].expr, " within")
        elif looked_for or not any(isinstance(holder.expr, nodes.Const) for holder in holders):
            for holder in holders:  # a comparison with a constant reads at most the constant's length
                if not isinstance(holder.expr, nodes.Const):
                    holder.expr = _paid(holder.expr, " key" if looked_for else " weighed")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _paid(node.node, " each")
        elif not isinstance(node.arg, nodes.Const):
            node.arg = _paid(node.arg, " key")
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _paid(node.key, " name")
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        size = self.size(node.body)
        self.generic_visit(node)
        node.iter = _paid(node.iter, " each")
        node.body.insert(0, _round(size, node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock) -> nodes.Node:
        size = self.size(node.body)
        self.generic_visit(node)
        node.body.insert(0, _round(size, node.lineno))
        return node

    visit_CallBlock = visit_Macro


def _paid(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _round(size: int, line: int) -> nodes.Stmt:
    return nodes.ExprStmt(_paid(nodes.Const(size, lineno=line), " tick"), lineno=line)


OPERATIONS: dict[str, Callable[..., Any]] = {" weighed": weighed, " key": key, " within": _within}
OPERATIONS |= {" name": _name, " each": _each, " added": _added, " joined": _joined, " tick": _tick}
"""Functions that `Pricing` adds to templates, as filters."""
