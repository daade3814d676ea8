"""The values of a Python script, read from its syntax tree: assignments, calls, arguments. Nothing of it is run."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from posttrain.apps.migration.foreign_run import DEEPEST, MOST_VALUES, Unresolved, is_known
from posttrain.apps.migration.script_arguments import ScriptArguments
from posttrain.apps.migration.script_names import Assigned, Branch, name_of, unknown

_LOADS = ("load_dataset", "load_from_disk", "from_pretrained")
_WRAPS = ("get_peft_model", "prepare_model_for_kbit_training", "prepare_model_for_int8_training", "setup_chat_format")
"""Functions that return the model of their first argument, changed."""
_MAPPINGS = ("dict", "SimpleNamespace", "Namespace", "EasyDict", "edict", "DotDict", "Box")
"""Classes whose objects are their keywords."""
_OPERATORS = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv},
    **{ast.Div: operator.truediv, ast.Pow: operator.pow, ast.Mod: operator.mod},
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "str": str, "bool": bool, "Path": str}
_SAME = ("OmegaConf.to_container", "OmegaConf.create", "OmegaConf.to_object", "copy.deepcopy", "deepcopy", "copy.copy")
"""Functions that return what they get."""
_BFLOAT16 = ("is_bfloat16_supported", "is_bf16_supported", "is_torch_bf16_gpu_available")
"""Functions that say whether a machine has bfloat16: all of the last years have."""
_SHAPES = (
    *("standardize_sharegpt", "standardize_data_formats", "to_sharegpt", "apply_chat_template", "maybe_extract_prompt"),
    *("maybe_apply_chat_template", "maybe_unpair_preference_dataset", "unpair_preference_dataset", "extract_prompt"),
)
"""Functions that return the rows of their first argument, changed."""
_READS = {
    *("yaml.safe_load", "yaml.load", "yaml.full_load", "json.load", "json.loads", "OmegaConf.load"),
}
"""Functions that read a configuration."""
_LARGEST_POWER = 64
_MOST_TESTS = 5  # conditions that depend on one another
_LONGEST_CHAIN = 100  # methods that are called on rows one after another, and names that stand for them
_LONGEST = 10_000  # characters or elements of a value that an operator makes


class Write(NamedTuple):
    """A call that sets attributes of an object by their names: setattr, or an update of its __dict__."""

    call: ast.Call
    owner: ast.expr
    values: ast.expr  # a mapping of names to values
    branch: Branch
    where: Branch  # in which the object is made


class ConfigurationFiles(Protocol):
    """The configurations that a script may read, and the words of its command, its own name first."""

    words: Sequence[str]

    def __call__(self, name: str) -> dict[str, Any] | None:
        """Return the content of a file; None for one that is not there."""


class ScriptValues(ScriptArguments):
    """The assignments, imports, functions and calls of a script, in its order, whatever function they are in."""

    def __init__(self, files: ConfigurationFiles | None = None) -> None:
        super().__init__()
        self.files = files
        self.modules: set[str] = set()  # packages that it imports from
        self.read: set[str] = set()  # files whose content is used
        self.aliases: dict[str, str] = {}  # name -> module that it is
        self.imported: dict[str, str] = {}  # name -> module
        self.renamed: dict[str, str] = {}  # name -> what its module calls it
        self.attributes: list[tuple[ast.expr, str, ast.expr, Branch, Branch]] = []
        """Object, attribute, value, the branch in which it is set, and that in which the object is made."""
        self.writes: list[Write] = []
        self.not_followed: list[ast.Call] = []  # writes whose names only the script knows
        self._loops: list[ast.For | ast.AsyncFor] = []
        self.environment: dict[str, ast.expr] = {}
        self._seen = 0  # parts of the expression whose value is being found
        self._truths: dict[ast.expr, bool | None] = {}
        self._tests = 0  # conditions whose truth is being found

    def visit_Expr(self, node: ast.Expr) -> None:
        """Take name.append(x), name.extend(x) and name.update(x) as assignments."""
        super().generic_visit(node)
        call = node.value
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            return
        name, method = call.func.value, call.func.attr
        if isinstance(name, ast.Name) and method in ("append", "extend") and len(call.args) == 1:
            as_list = method == "append"
            self._replace(
                name,
                call.args[0],
                lambda before, part: ast.BinOp(before, ast.Add(), ast.List([part], ast.Load()) if as_list else part),
            )
        elif isinstance(name, ast.Name) and method == "update":
            given: list[tuple[ast.expr | None, ast.expr]] = [(None, part) for part in call.args]
            given += [(ast.Constant(word.arg) if word.arg else None, word.value) for word in call.keywords]
            more = ast.Dict([key for key, _ in given], [part for _, part in given])
            self._replace(name, more, lambda before, part: ast.Dict([None, None], [before, part]))

    def _replace(self, target: ast.Name, part: ast.expr, made: Callable[[ast.expr, ast.expr], ast.expr]) -> None:
        """Take a change of a list or a mapping as its new value, made of that before and of a part. The part has no value
        where a branch decides.
        """
        scope = self.scope
        while scope and (scope, target.id) not in self.values:
            scope = scope[:-1]
        if (before := self.values.get((scope, target.id))) is None:
            return
        inner = before.branch[: len(self.branch)] != self.branch
        told = self.branch[-1].text if inner else "in another function" * (scope != self.scope)
        part = unknown(f"{ast.unparse(part)[:200]} {told}") if told else part
        self.values[scope, target.id] = Assigned(made(before.value, part), before.branch, before)

    def set_target(self, target: ast.expr, value: ast.expr) -> None:
        super().set_target(target, value)
        if isinstance(target, ast.Attribute):
            made = self.values.get((self.scope, target.value.id)) if isinstance(target.value, ast.Name) else None
            self.attributes.append((target.value, target.attr, value, self.branch, made.branch if made else ()))
        elif isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
            self._set_item(target.value, target.slice, value)

    def _set_item(self, target: ast.expr, key: ast.Constant, value: ast.expr) -> None:
        """Take name["key"] = value, and an assignment to a variable of the environment."""
        if ast.unparse(target).endswith("environ"):
            self.environment[str(key.value)] = value
        elif isinstance(target, ast.Name):
            self._replace(target, value, lambda before, part: ast.Dict([None, key], [before, part]))

    def visit_Call(self, node: ast.Call) -> None:
        super().visit_Call(node)
        words = node.args
        if name_of(node).endswith("environ.setdefault") and len(words) == 2 and isinstance(words[0], ast.Constant):
            self.environment.setdefault(str(words[0].value), words[1])
        if name_of(node) == "setattr" and len(words) == 3:
            over, branch = self._loop_of(words[1], words[2])
            self._write(node, words[0], over or ast.Dict([words[1]], [words[2]]), branch)
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "update":
            of, given = node.func.value, ast.Call(ast.Name("dict", ast.Load()), words, node.keywords)
            if isinstance(of, ast.Attribute) and of.attr == "__dict__":
                self._write(node, of.value, given, self.branch)
            elif isinstance(of, ast.Call) and name_of(of) == "vars" and of.args:
                self._write(node, of.args[0], given, self.branch)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._loops.append(node)
        super().visit_For(node)
        self._loops.pop()

    visit_AsyncFor = visit_For

    def _loop_of(self, key: ast.expr, value: ast.expr) -> tuple[ast.expr | None, Branch]:
        """Return the mapping of a loop `for key, value in mapping.items()` around a statement, and its branch."""
        loop = self._loops[-1] if self._loops else None
        if loop is None or not isinstance(loop.iter, ast.Call) or not isinstance(loop.iter.func, ast.Attribute):
            return None, self.branch
        same = ast.unparse(loop.target).strip("()") == f"{ast.unparse(key)}, {ast.unparse(value)}"
        place = max((at for at, arm in enumerate(self.branch) if arm.text.startswith("for ")), default=-1)
        if loop.iter.func.attr != "items" or not same or place < 0:
            return None, self.branch
        return loop.iter.func.value, (*self.branch[:place], *self.branch[place + 1 :])

    def _write(self, call: ast.Call, owner: ast.expr, values: ast.expr, branch: Branch) -> None:
        made = self.values.get((self.scope, owner.id)) if isinstance(owner, ast.Name) else None
        self.writes.append(Write(call, owner, values, branch, made.branch if made else ()))

    def take_writes(self) -> None:
        """Take the writes by name as assignments to attributes. After the visit."""
        for call, owner, values, branch, where in self.writes:
            found = self.value(values)
            if not isinstance(found, dict):
                if self.condition(branch, where) is not None:
                    self.not_followed.append(call)
                continue
            for name, value in found.items():
                node = (
                    ast.parse(repr(value), mode="eval").body if is_known(value) else unknown(ast.unparse(values)[:200])
                )
                if isinstance(owner, ast.Name) and owner in self._selves:
                    self._members.setdefault((self._selves[owner], name), []).append((node, branch))
                else:
                    self.attributes.append((owner, name, node, branch, where))

    def visit_Import(self, node: ast.Import) -> None:
        self.aliases |= {alias.asname or alias.name: alias.name for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.modules.add((node.module or "").partition(".")[0])
        for alias in node.names:
            self.imported[alias.asname or alias.name] = "." * node.level + (node.module or "")
            self.renamed[alias.asname or alias.name] = alias.name

    def keywords(self, call: ast.Call) -> dict[str, Any]:
        """Return the keyword arguments of a call, those of **mappings of the script included."""
        found: dict[str, Any] = {}
        for keyword in call.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                found[keyword.arg] = value
            elif isinstance(value, dict):
                found |= value
            else:
                found[f"**{ast.unparse(keyword.value)[:100]}"] = value
        return found

    def value(self, node: ast.expr | None, depth: int = 0) -> Any:
        """Return the value of an expression of constants, lists, names and sums of these; `Unresolved` for any other."""
        if node is None:
            return None
        if not depth:
            self._seen = 0
            found = self.value(node, 1)
            return Unresolved(ast.unparse(node)[:200]) if self._seen > MOST_VALUES else found
        self._seen += 1
        if depth > DEEPEST or self._seen > MOST_VALUES:  # names of lists of names of lists ...
            return Unresolved("?")
        if isinstance(node, ast.Constant):
            plain = isinstance(node.value, (bool, int, float, str)) or node.value is None
            return node.value if plain else Unresolved(ast.unparse(node))
        if (assigned := self.meaning(node)) is not None:
            return self.value(assigned, depth + 1)
        if isinstance(node, ast.IfExp) and (truth := self.truth(node.test)) is not None:
            return self.value(node.body if truth else node.orelse, depth + 1)
        if isinstance(node, (ast.BoolOp, ast.Compare)) or (
            isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        ):
            return self._logical(node, depth)
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self.value(part, depth + 1) for part in node.elts]
        if isinstance(node, ast.Dict) or _is_dict(node):
            return self._mapping(node, depth)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self.value(node.operand, depth + 1)
            return -inner if isinstance(inner, (int, float)) else Unresolved(ast.unparse(node))
        if isinstance(node, ast.JoinedStr):
            return self._joined(node, depth)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return self._mapping(ast.Dict([None, None], [node.left, node.right]), depth)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return self._sum(node, depth)
        if isinstance(node, ast.Call) and (found := self._of_call(name_of(node), node, depth)) is not None:
            return found
        if isinstance(node, ast.Attribute) and node.attr == "argv" and self.files is not None:
            return list(self.files.words) or Unresolved("sys.argv")
        if isinstance(node, ast.Attribute) and node.attr in self.arguments and self._is_parsed(node.value):
            return self._argument_value(node, depth)
        if isinstance(node, (ast.Subscript, ast.Attribute)):
            return self._part(node.value, node, depth)
        return Unresolved(ast.unparse(node)[:200])

    def _of_call(self, name: str, node: ast.Call, depth: int) -> Any:
        """Return the value of a call of a function of Python or of a library that is known here; None for another one."""
        last, words = name.rpartition(".")[2], node.args
        if name.endswith(("environ.get", "getenv")) and len(words) == 2:
            found = self.value(words[1], depth + 1)
            if isinstance(words[0], ast.Constant) and not isinstance(found, Unresolved):
                self.used[f"${words[0].value!s}"] = found
            return found
        if name in _SAME and words:
            return self.value(words[0], depth + 1)
        if name in ("min", "max") and len(words) > 1:
            found = [self.value(word, depth + 1) for word in words]
            numbers = all(isinstance(number, (int, float)) for number in found)
            return {"min": min, "max": max}[name](found) if numbers else Unresolved(ast.unparse(node)[:200])
        if last in _BFLOAT16:
            self.used[f"{name}()"] = True
            return True
        if name in _READS and words:
            return self._content(node, depth)
        if name in _CONVERSIONS and len(words) == 1:
            return self._converted(name, node, depth)
        if isinstance(node.func, ast.Attribute) and last == "get" and words:
            return self._part(node.func.value, node, depth)
        return None

    def _content(self, node: ast.Call, depth: int) -> Any:
        """Return the content of a configuration that the script reads: yaml.safe_load(open(place)) and the like."""
        opened = self.origin(node.args[0])
        if isinstance(opened, ast.Call) and name_of(opened) in ("open", "io.open") and opened.args:
            opened = opened.args[0]
        elif isinstance(opened, ast.Call) and isinstance(opened.func, ast.Attribute):  # Path(place).read_text()
            opened = opened.func.value
        name = self.value(opened, depth + 1)
        content = self.files(name) if self.files is not None and isinstance(name, str) else None
        if content is None:
            return Unresolved(ast.unparse(node)[:200])
        self.read.add(str(name))
        return content

    def visit_With(self, node: ast.With) -> None:
        """Take `with open(place) as file` as an assignment."""
        for item in node.items:
            made, target = item.context_expr, item.optional_vars
            self._visit_all(made, target)
            if isinstance(made, ast.Call) and name_of(made) == "open" and isinstance(target, ast.Name):
                self.set_target(target, made)
        self._visit_all(*node.body)

    def _converted(self, name: str, node: ast.Call, depth: int) -> Any:
        value = self.value(node.args[0], depth + 1)
        if isinstance(value, (bool, int, float, str)) and not (isinstance(value, str) and len(value) > _LONGEST):
            with suppress(ValueError, OverflowError):
                return _CONVERSIONS[name](value)
        return Unresolved(ast.unparse(node)[:200])

    def _part(self, owner: ast.expr, node: ast.expr, depth: int) -> Any:
        """Return the value of an element of a list or of a mapping: of[key], of.key, of.get(key, otherwise)."""
        of, otherwise = self.value(owner, depth + 1), Unresolved(ast.unparse(node)[:200])
        key: Any = None
        if isinstance(node, ast.Attribute):
            key = node.attr
        elif isinstance(node, ast.Subscript):
            key = self.value(node.slice, depth + 1)
        elif isinstance(node, ast.Call):
            key = self.value(node.args[0], depth + 1)
            if isinstance(of, dict) and str(key) not in of:
                return self.value(node.args[1], depth + 1) if len(node.args) > 1 else None
        if isinstance(of, dict) and isinstance(key, (str, int)):
            return of.get(str(key), otherwise)
        if isinstance(of, list) and isinstance(key, int) and -len(of) <= key < len(of):
            return of[key]
        return otherwise

    def member(self, node: ast.Attribute) -> ast.expr | None:
        """Return the expression of an attribute, that which the script sets after it has made the object included."""
        made = self.origin(node.value)
        if isinstance(made, (ast.Call, ast.Name)):
            later = [
                (value, branch)
                for owner, name, value, branch, _ in self.attributes
                if name == node.attr and owner not in self._selves and self._is_same(owner, made)
            ]
            if len(later) > 1 or (later and self.condition(later[0][1])):
                return unknown(ast.unparse(node))
            if later and self.condition(later[0][1]) is not None and later[0][0] is not node:
                return later[0][0]
        return super().member(node)

    def _is_same(self, owner: ast.expr, made: ast.expr) -> bool:
        found = self.origin(owner)
        return found is made or (isinstance(made, ast.Name) and isinstance(found, ast.Name) and made.id == found.id)

    def _argument_value(self, node: ast.Attribute, depth: int) -> Any:
        """Return the value of an argument of the command line: as given, or its default."""
        given = self.arguments[node.attr]
        found = Unresolved("") if given is None else self.value(given, depth + 1)
        if given is None and self._tests and node.attr in self.omitted:
            found = None  # a switch or a name that is not given; elsewhere it must have been, or the script would fail
        if isinstance(found, Unresolved):
            return Unresolved(ast.unparse(node)[:200])
        self.used[node.attr] = found
        return found

    def truth(self, test: ast.expr) -> bool | None:
        if test not in self._truths and self._tests < _MOST_TESTS:
            self._truths[test] = None  # of one that depends on itself
            self._tests += 1
            found = self.value(test, 1)
            self._tests -= 1
            self._truths[test] = None if isinstance(found, Unresolved) else bool(found)
        return self._truths.get(test)

    def _logical(self, node: ast.expr, depth: int) -> Any:
        """Return the value of not, and, or, or one comparison."""
        left, right = None, None
        if isinstance(node, ast.UnaryOp):
            left = self.value(node.operand, depth + 1)
            return Unresolved(ast.unparse(node)[:200]) if isinstance(left, Unresolved) else not left
        if isinstance(node, ast.BoolOp):
            for part in node.values:
                left = self.value(part, depth + 1)
                if isinstance(left, Unresolved) or bool(left) == isinstance(node.op, ast.Or):
                    return left
            return left
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
            left, right = self.value(node.left, depth + 1), self.value(node.comparators[0], depth + 1)
            if is_known(left) and is_known(right):
                with suppress(TypeError):
                    return _COMPARISONS[type(node.ops[0])](left, right)
        return Unresolved(ast.unparse(node)[:200])

    def _is_parsed(self, node: ast.expr) -> bool:
        """Whether it is the object of a parser: one of its calls, or a name that the script does not set otherwise."""
        found = self.origin(node)
        if isinstance(found, ast.Attribute) and self._deep < DEEPEST:  # a part of it: args.optimizer.lr
            self._deep += 1
            parsed = self._is_parsed(found.value)
            self._deep -= 1
            return parsed
        return isinstance(found, ast.Name) or self.is_made_by_parser(node)

    def _mapping(self, node: ast.expr, depth: int) -> Any:
        """Return the value of {"name": value, **more} or of dict(more, name=value)."""
        parts: list[tuple[Any, ast.expr]] = []
        if isinstance(node, ast.Dict):
            parts = [
                (key and self.value(key, depth + 1), value) for key, value in zip(node.keys, node.values, strict=True)
            ]
        elif isinstance(node, ast.Call):
            parts = [*((None, more) for more in node.args), *((word.arg, word.value) for word in node.keywords)]
        found: dict[str, Any] = {}
        for name, part in parts:
            value = self.value(part, depth + 1)
            if isinstance(name, Unresolved) or (name is None and not isinstance(value, dict)):
                return Unresolved(ast.unparse(node)[:200])
            found |= value if name is None else {str(name): value}
        return found

    def _joined(self, node: ast.JoinedStr, depth: int) -> Any:
        parts = [self.value(p.value if isinstance(p, ast.FormattedValue) else p, depth + 1) for p in node.values]
        known = not any(isinstance(part, Unresolved) for part in parts)
        return "".join(map(str, parts))[:_LONGEST] if known else Unresolved(ast.unparse(node))

    def _sum(self, node: ast.BinOp, depth: int) -> Any:
        left, right = self.value(node.left, depth + 1), self.value(node.right, depth + 1)
        numbers = all(isinstance(x, (int, float)) and abs(x) < 1e12 for x in (left, right))
        texts = type(left) is type(right) and isinstance(left, (str, list)) and isinstance(node.op, ast.Add)
        if isinstance(node.op, ast.Pow) and numbers:
            numbers = abs(right) <= _LARGEST_POWER
        try:
            found = _OPERATORS[type(node.op)](left, right) if numbers or texts else None
        except (ZeroDivisionError, OverflowError):
            found = None
        if isinstance(found, complex):
            found = None
        return Unresolved(ast.unparse(node)[:200]) if found is None else found[:_LONGEST] if texts else found

    def elements(self, node: ast.expr, depth: int = 0) -> list[ast.expr]:
        """Return the elements of a list, of a sum of lists, or of [TABLE[name] for name in names]; else the expression."""
        node = self.origin(node)
        if isinstance(node, (ast.List, ast.Tuple)):
            return list(node.elts)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and depth < DEEPEST:
            return self.elements(node.left, depth + 1) + self.elements(node.right, depth + 1)
        if isinstance(node, ast.ListComp) and len(node.generators) == 1 and not node.generators[0].ifs:
            made, each, names = node.elt, node.generators[0].target, self.value(node.generators[0].iter)
            named = isinstance(made, ast.Subscript) and ast.unparse(made.slice) == ast.unparse(each)
            if isinstance(made, ast.Subscript) and named and isinstance(names, list) and is_known(names):
                found = [ast.Subscript(made.value, ast.Constant(name), ast.Load()) for name in names]
                return [self.origin(part, calls=False) for part in found]
        return [node]

    def source(self, node: ast.expr | None) -> tuple[ast.Call | None, list[ast.expr]]:
        """Return the call that loads a model or a dataset, and what is done with it, last step first.

        These are calls of methods, such as map, and subscripts, such as `["train"]`.
        """
        after: list[ast.expr] = []
        for _ in range(_LONGEST_CHAIN):
            if isinstance(node, ast.Name) and (found := self.found(node)) is not None:
                value, branch = found
                if branch and not _changes(value, node.id):
                    break
                node = value
            elif isinstance(node, ast.Call) and name_of(node) == "PeftModel.from_pretrained" and node.args:
                node = node.args[0]  # the model below the adapter
            elif isinstance(node, ast.Call) and name_of(node).rpartition(".")[2] in _LOADS:
                return node, after
            elif isinstance(node, ast.IfExp) and (truth := self.truth(node.test)) is not None:
                node = node.body if truth else node.orelse
            elif node is not None and not isinstance(node, ast.Name) and (made := self.meaning(node)) is not None:
                node = made
            elif isinstance(node, ast.Call) and (model := wrapped(node)) is not None:
                node = model
            elif isinstance(node, ast.Call) and name_of(node).rpartition(".")[2] in _SHAPES and node.args:
                after.append(node)
                node = node.args[0]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                after.append(node)
                node = node.func.value
            elif isinstance(node, ast.Subscript):
                after.append(node)
                node = node.value
            else:
                break
        return None, after


def _innermost(node: ast.expr) -> ast.Attribute | ast.Subscript | None:
    """Return the innermost part of a chain of methods and subscripts; None for any other expression."""
    found: ast.Attribute | ast.Subscript | None = None
    while isinstance(node, (ast.Call, ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Call):
            node = node.func
        else:
            found, node = node, node.value
    return found


def _changes(value: ast.expr, name: str) -> bool:
    """Whether a value is what the name was before with more done to it: rows.map(f), get_peft_model(model)."""
    inner = _innermost(value)
    before = wrapped(value) if inner is None or wrapped(value) is not None else inner.value
    if isinstance(value, ast.Call) and name_of(value).rpartition(".")[2] in _SHAPES and value.args:
        before = value.args[0]
    return isinstance(before, ast.Name) and before.id == name


def wrapped(node: ast.expr) -> ast.expr | None:
    """Return the model that a call wraps, with adapters or for training in 4 bits; None for any other expression."""
    if not isinstance(node, ast.Call) or name_of(node).rpartition(".")[2] not in _WRAPS:
        return None
    return node.args[0] if node.args else next((word.value for word in node.keywords if word.arg == "model"), None)


def _is_dict(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Call) and name_of(node).rpartition(".")[2] in _MAPPINGS
