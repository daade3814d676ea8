"""Renders untrusted chat templates, conversations to text, with bounds on time and memory.

Jinja's sandbox protects the machine from a template, but not its time and memory: `'a' * 10**10`, a macro that calls
itself twice, a string doubled in a loop. No signal or thread can interrupt such an operation in C, and a process for
every rendering would cost more than the rendering. Therefore every operation is paid from a budget of characters before
it is executed. Each round of a loop and each call of a macro pays for the size of its body, which bounds all operations
of constant time. Longer operations (operators, comparisons, calls, filters, output) pay for every character and element
of their operands and, if it may be larger, of their result. Only listed filters, tests and methods, which take time in
proportion to their price, may be called. The budget is a number of characters, not of seconds, so that every machine
renders or refuses the same templates.

Implementation: `template_budget.Pricing` rewrites the parsed template so that operations which Jinja compiles to bare
Python call functions of this package, under names that no template can write. Constants are not folded beforehand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextvars import ContextVar
from functools import lru_cache
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS as DEFAULT_FILTERS
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS as DEFAULT_TESTS
from jinja2.utils import Namespace, _PassArg

from posttrain.core.messages import one_line
from posttrain.core.run_date import template_date
from posttrain.core.types import UserError
from posttrain.models.tokenizer.template_budget import (
    BUDGET,
    INTEGER_BITS,
    OPERATIONS,
    PER_CHARACTER,
    STEP,
    BudgetContext,
    Overspent,
    Pricing,
    key,
    size_of,
    weighed,
)

LONGEST_TEMPLATE = 128 * 1024  # characters; a template of this length takes a second or two to compile
RANGE = 100_000  # maximal length of a range, as in Jinja's sandbox
_day: ContextVar[str | None] = ContextVar("the day that the template is told", default=None)


def render(template: str, variables: Mapping[str, Any], name: str = "the chat template", day: str | None = None) -> str:
    """Render messages and flags with a chat template. `name`: the template's name in errors.

    `day`: the date for `strftime_now` if no run has fixed one (see `posttrain.core.run_date`); None: today.

    Raises UserError, with the template's line, if it is malformed, refuses the messages, fails in any way, or exceeds
    its budget.
    """
    compiled, asked = None, _day.set(day)
    try:
        compiled = _compiled(template)
        context: BudgetContext = compiled.new_context(dict(variables))  # type: ignore[assignment]
        context.left = BUDGET + PER_CHARACTER * _characters(variables["messages"])
        text = "".join(compiled.root_render_func(context))
        if not text.isascii():
            text.encode()  # a lone surrogate raises here instead of in the tokenizer
    except Exception as error:  # a template can make Jinja and Python raise anything
        raise UserError(f"{name} cannot render these messages{_line(error, compiled)}: {_reason(error)}") from None
    finally:
        _day.reset(asked)
    return text


@lru_cache(maxsize=8)
def variables_read(template: str) -> frozenset[str]:
    """Return the variables that have to be passed to a template, without the functions that every template has.

    Jinja also lists names that a template sets in one branch and reads after it. They are excluded, unless the template
    tests whether they are defined. Raises UserError if the template is malformed.
    """
    environment = _Environment()
    try:
        parsed = environment.parse(template)
    except TemplateSyntaxError as error:
        raise UserError(f"the chat template is malformed{_line(error, None)}: {_reason(error)}") from None
    names = list(parsed.find_all(nodes.Name))
    own = {name.name for name in names if name.ctx != "load"}
    given = {name.name for name in names if name.ctx == "param"}  # parameters of macros, which may be tested as well
    asked = {
        node.node.name
        for node in parsed.find_all((nodes.Test, nodes.Filter))
        if node.name in ("defined", "undefined", "default", "d") and isinstance(node.node, nodes.Name)
    }
    return frozenset(meta.find_undeclared_variables(parsed) - set(environment.globals) - (own - asked) - given)


def _characters(messages: Sequence[Mapping[str, Any]]) -> int:
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    texts = [*contents, *(part.get("text") for part in parts)]
    return sum(len(text) for text in texts if type(text) is str)


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or calls itself without end"
    if isinstance(error, TemplateError | Overspent):
        return one_line(error)
    return f"{type(error).__name__}: {one_line(error)}"


def _line(error: BaseException, compiled: Template | None) -> str:
    if isinstance(error, TemplateSyntaxError):
        return f" (line {error.lineno})"
    line, trace = 0, error.__traceback__
    while compiled is not None and trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = compiled.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    return f" (line {line})" if line else ""


# -- the environment of a template -------------------------------------------------------------------------------------


class _Generation(Extension):
    """The block {% generation %} ... {% endgeneration %}, which marks the assistant's text for other libraries. Here it
    is a scope without effect.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja environment with the conventions of transformers, in which every operation has a price."""

    context_class = BudgetContext
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[_Generation, loopcontrols],
        )
        filters: Mapping[str, Any] = DEFAULT_FILTERS
        tests: Mapping[str, Any] = DEFAULT_TESTS
        self.filters = {name: _pay_first(filters[name], price) for name, price in _FILTERS.items()}
        self.filters |= {"tojson": _to_json, "replace": _replace_filter, "join": _join_filter, "indent": _indent_filter}
        self.filters |= {"trim": _trim_filter, "int": _int_filter, "float": _float_filter}
        self.filters |= OPERATIONS
        self.tests = {name: tests[name] for name in _FREE_TESTS}
        self.tests |= {name: _pay_first(tests[name], _compared) for name in _COMPARING_TESTS}
        self.tests |= {"odd": lambda value: isinstance(value, int) and value % 2 == 1}
        self.tests |= {"even": lambda value: isinstance(value, int) and value % 2 == 0}
        self.globals = {"range": _range, "namespace": _namespace, "dict": _dict}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.offered = {id(value) for value in self.globals.values()}

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        pricing = Pricing(source)
        for number, node in enumerate(source.body):
            source.body[number] = pricing.visit(node)
        return super()._generate(source, name, filename, defer_init)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        context.spend(size_of(left) + size_of(right))
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, Sized) and isinstance(times, int):
                    context.spend(size_of(sequence) * max(0, times))
        elif operator == "%" and not isinstance(left, int | float):
            raise SecurityError("a chat template takes % of numbers only")
        elif operator == "**":
            _check_power(left, right)
        return _small(self.binop_table[operator](left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # kwargs may be named self
        kwargs.pop("_loop_vars", None)  # variables of enclosing loops, which no function here uses
        kwargs.pop("_block_vars", None)
        given = [*args, *kwargs.values()]
        if isinstance(__obj, Macro | LoopContext):
            __context.spend(sum(map(size_of, given)))
            return super().call(__context, __obj, *args, **kwargs)
        if isinstance(__obj, Undefined):
            return __obj()
        for value in given:
            key(__context, value)
        if id(__obj) not in __self.offered:
            _pay_method(__context, __obj, given)
        found = __obj(*args, **kwargs)
        if isinstance(found, list):
            __context.spend(STEP * len(found))
        return found


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    if len(source) > LONGEST_TEMPLATE:
        raise TemplateSyntaxError(f"it has {len(source):,} characters, and may have at most {LONGEST_TEMPLATE:,}", 1)
    return _Environment().from_string(source)


def _check_power(base: Any, exponent: Any) -> None:
    numbers = isinstance(base, int | float) and isinstance(exponent, int | float)
    exact = isinstance(base, int) and isinstance(exponent, int)
    if not numbers or (exact and base.bit_length() * exponent > INTEGER_BITS):
        raise SecurityError(f"a chat template takes powers of numbers only, of at most {INTEGER_BITS} bits")


def _small(value: Any) -> Any:
    """Return the value. Raises SecurityError for an integer that is so large that its reuse could exceed all bounds."""
    if type(value) is int and value.bit_length() > INTEGER_BITS:
        raise SecurityError(f"a chat template takes integers of at most {INTEGER_BITS} bits")
    return value


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return "str"
    if isinstance(value, Mapping):
        return "dict"
    return "list" if isinstance(value, list | tuple) else type(value).__name__


def _pay_method(context: BudgetContext, method: Any, args: Sequence[Any]) -> None:
    owner = getattr(method, "__self__", None)
    price = (
        _METHODS.get((_kind(owner), method.__name__)) if isinstance(method, BuiltinMethodType | MethodType) else None
    )
    if price is None:
        name = getattr(method, "__name__", "")
        raise SecurityError(f"a chat template may not call {type(owner or method).__name__}{name and '.'}{name:.40}")
    context.spend(size_of(owner))
    price(context, owner, args)


Price = Callable[[BudgetContext, Any, Sequence[Any]], None]
"""Counts the cost of an operation on a value, with these arguments."""


def _linear(context: BudgetContext, value: Any, args: Sequence[Any]) -> None:
    """Charge nothing beyond the operands."""


def _by_argument(context: BudgetContext, value: str, args: Sequence[Any]) -> None:
    """Charge for comparing every character with each one of an argument: strip(chars), and searches from the right."""
    context.spend(sum(len(value) * len(arg) for arg in args if isinstance(arg, str)) // 16)


def _throughout(context: BudgetContext, value: Any, args: Sequence[Any]) -> None:
    """Charge for comparing every element with the argument."""
    context.spend_deeply(value)


def _replacing(context: BudgetContext, value: str, args: Sequence[Any]) -> None:
    old, new = (str(arg) for arg in args[:2])
    context.spend(len(new) * (value.count(old) if old else len(value) + 1))


def _joining(context: BudgetContext, value: str, args: Sequence[Any]) -> None:
    context.spend(len(value) * sum(map(size_of, args)))


_METHODS: dict[tuple[str, str], Price] = {
    **{("str", name): _linear for name in (
        *("lower", "upper", "capitalize", "title", "casefold", "swapcase", "split", "splitlines", "partition", "startswith"),
        *("endswith", "find", "index", "count", "removeprefix", "removesuffix", "isdigit", "isalpha", "isalnum"),
        *("isnumeric", "isspace", "isupper", "islower", "istitle", "isdecimal", "isascii"),
    )},
    **{("str", name): _by_argument for name in ("strip", "lstrip", "rstrip", "rfind", "rindex", "rsplit", "rpartition")},
    ("str", "replace"): _replacing,
    ("str", "join"): _joining,
    **{("dict", name): _linear for name in ("get", "items", "keys", "values", "copy")},
    **{("list", name): _throughout for name in ("index", "count", "copy")},
    **{("LoopContext", name): _linear for name in ("cycle", "changed")},
}  # fmt: skip
"""Methods that a template may call, and their cost besides the characters of their operands."""


def _compared(context: BudgetContext, value: Any, args: Sequence[Any]) -> None:
    key(context, value)
    for arg in args:
        weighed(context, arg)


def _shallow(context: BudgetContext, value: Any, args: Sequence[Any]) -> None:
    context.spend(size_of(value))
    for arg in args:
        key(context, arg)


def _deep(context: BudgetContext, value: Any, args: Sequence[Any]) -> None:
    weighed(context, value)
    for arg in args:
        key(context, arg)


def _by_attribute(context: BudgetContext, value: Any, args: Sequence[Any]) -> None:
    """Charge the arguments, such as the path of an attribute, again for each element."""
    _deep(context, value, args)
    context.spend(size_of(value) * sum(map(size_of, args)))


def _free(context: BudgetContext, value: Any, args: Sequence[Any]) -> None:
    """Charge nothing: the operation takes constant time."""


_FILTERS = {
    **dict.fromkeys(("abs", "count", "d", "default", "first", "last", "length"), _free),
    **dict.fromkeys(("items", "list", "reverse"), _shallow),
    **dict.fromkeys(("capitalize", "e", "escape", "lower", "safe", "string", "title", "upper"), _deep),
    **dict.fromkeys(("dictsort", "map", "max", "min", "reject", "rejectattr"), _by_attribute),
    **dict.fromkeys(("select", "selectattr", "sort"), _by_attribute),
}
"""Jinja's filters that a template may use unchanged, and the operands that they read."""

_FREE_TESTS = (
    *("boolean", "callable", "defined", "escaped", "false", "filter", "float", "integer", "iterable", "mapping"),
    *("none", "number", "sameas", "sequence", "string", "test", "true", "undefined"),
)
_COMPARING_TESTS = (
    *("!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lt", "ne"),
    *("lower", "upper"),
)


def _pay_first(function: Callable[..., Any], price: Price) -> Any:
    """Wrap a filter or test so that it pays first, and returns a list instead of a generator, which has no size."""
    passed = _PassArg.from_obj(function)

    @pass_context
    def priced(context: BudgetContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        price(context, value, [*args, *kwargs.values()])
        first = {None: (), _PassArg.context: (context,), _PassArg.eval_context: (context.eval_ctx,)}
        found = function(*first.get(passed, (context.environment,)), value, *args, **kwargs)
        if isinstance(found, Iterator):
            found = list(found)
        if isinstance(found, list):
            context.spend(STEP * len(found))
        return found

    return priced


@pass_context
def _to_json(
    context: BudgetContext,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as transformers' `tojson` filter does; Jinja's own filter escapes HTML."""
    weight = context.spend_deeply(value)
    width = (indent if isinstance(indent, int) else size_of(indent)) + sum(map(size_of, separators or ()))
    context.spend(weight * max(0, width))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_context
def _replace_filter(context: BudgetContext, value: Any, old: str, new: str, count: int | None = None) -> str:
    _deep(context, value, (old, new))
    _replacing(context, str(value), (old, new))
    replaced: str = DEFAULT_FILTERS["replace"](context.eval_ctx, value, old, new, count)
    return replaced


@pass_context
def _join_filter(context: BudgetContext, value: Any, d: str = "", attribute: str | None = None) -> str:
    _by_attribute(context, value, (d, attribute))
    joined: str = DEFAULT_FILTERS["join"](context.eval_ctx, value, d, attribute)
    return joined


@pass_context
def _indent_filter(
    context: BudgetContext, value: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    _deep(context, value, (width,))
    text = str(value)
    context.spend((text.count("\n") + 1) * max(0, width if isinstance(width, int) else len(width)))
    indented: str = DEFAULT_FILTERS["indent"](value, width, first, blank)
    return indented


@pass_context
def _trim_filter(context: BudgetContext, value: Any, chars: str | None = None) -> str:
    if type(value) is str and chars is None:
        context.spend(len(value))
        return value.strip()
    _deep(context, value, (chars,))
    _by_argument(context, str(value), (chars,))
    trimmed: str = DEFAULT_FILTERS["trim"](value, chars)
    return trimmed


@pass_context
def _int_filter(context: BudgetContext, value: Any, default: int = 0, base: int = 10) -> Any:
    weighed(context, value)
    return _small(DEFAULT_FILTERS["int"](value, default, base))


@pass_context
def _float_filter(context: BudgetContext, value: Any, default: float = 0.0) -> Any:
    weighed(context, value)
    return DEFAULT_FILTERS["float"](value if not isinstance(value, str) else value[:400], default)


def _range(*bounds: int) -> range:
    found = range(*bounds)
    if len(found) > RANGE or any(bound.bit_length() > 31 for bound in bounds):
        raise OverflowError(f"a chat template takes ranges of at most {RANGE:,} numbers")
    return found


def _dict(**entries: Any) -> dict[str, Any]:
    return entries


def _namespace(**entries: Any) -> Namespace:
    return Namespace(**entries)


def _raise_exception(message: str = "") -> None:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    if not isinstance(format, str) or len(format) > 200:
        raise TypeError("strftime_now takes a short format such as '%d %B %Y'")
    return template_date(_day.get()).strftime(format)
