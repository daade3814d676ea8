"""Names of a Python script and their values where they are read: by function, by order, and by branch."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

Scope = tuple[str, ...]
"""The functions, classes and comprehensions around a statement, outermost first; () is the module."""


class Arm(NamedTuple):
    """One side of a branch."""

    number: int  # its own
    text: str  # its condition as words
    test: ast.expr | None  # None: nothing that a script's text could decide, such as a loop
    wanted: bool  # the value of the test with which it runs


Branch = tuple[Arm, ...]
"""The branches around a statement, outermost first."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
_Loop = ast.For | ast.AsyncFor
_Augmented = (ast.Name, ast.Attribute)
_LONGEST_CHAIN = 100  # names that are set to one another
_REST = -2  # place of a parameter such as **options
_DEEPEST = 20  # parts of parts of an expression


class Assigned(NamedTuple):
    """An expression that a name is set to, the branch in which it is, and what the name was set to before."""

    value: ast.expr
    branch: Branch
    before: Assigned | None = None


class Parameter(NamedTuple):
    name: str
    function: str  # "function", "Class.method", or "" for one that is never known
    place: int
    default: ast.expr | None


def unknown(text: str) -> ast.Name:
    """Return an expression that has no value: a name that is not read."""
    return ast.Name(text, ast.Store())


class ScriptNames(ast.NodeVisitor):
    """The names of a script. A visit goes in the order of execution, whatever function a statement is in."""

    def __init__(self) -> None:
        self.calls: list[ast.Call] = []
        self.branch_of: dict[ast.Call, Branch] = {}
        self.functions: set[str] = set()
        self.bodies: dict[str, ast.AST] = {}  # function or method, by its own name -> its definition
        self.classes: dict[str, Scope] = {}
        self.bases: dict[str, list[str]] = {}  # class -> the last names of those that it inherits from
        self.methods: dict[str, list[str]] = {}
        self.entries: set[str] = set()  # functions that a command line calls
        self.entry_point: Callable[[Parameter], ast.expr | None] = lambda word: None  # of one -> its expression
        self.function_of: dict[ast.Call, str] = {}  # call -> the function around it; "": none
        self.values: dict[tuple[Scope, str], Assigned] = {}  # the last of each scope
        self.branch: Branch = ()
        self.scope: Scope = ()
        self._count = 0
        self._reads: dict[ast.Name, tuple[Scope, Branch, Assigned | None]] = {}
        self._parameters: dict[tuple[Scope, str], Parameter] = {}
        self._returns: dict[str, list[tuple[ast.expr | None, Branch]]] = {}  # function -> what it returns, and where
        self._members: dict[tuple[str, str], list[tuple[ast.expr, Branch]]] = {}  # class, attribute of self -> values
        self._selves: dict[ast.Name, str] = {}  # a read of self -> its class
        self._deep = 0  # parts of parts whose expression is being found
        self._function: list[tuple[str, Branch, str]] = []
        """Those around a statement, with the branch of their definition and their name of `self`."""

    def truth(self, test: ast.expr) -> bool | None:
        """Return the truth of a condition; None where only running the script would give it."""
        raise NotImplementedError

    def condition(self, of: Branch, where: Branch = ()) -> str | None:
        """Return "" if branch `of` runs wherever branch `where` does, None if it never runs, else the innermost condition
        that is not known.
        """
        told = ""
        for place, arm in enumerate(of, 1):
            if where[:place] != of[:place]:
                found = None if arm.test is None else self.truth(arm.test)
                if found is not None and found != arm.wanted:
                    return None
                told = arm.text if found is None else told
        return told

    def set_target(self, target: ast.expr, value: ast.expr) -> None:
        """Take an assignment to a name or an attribute of self. Others are of the class that inherits from this one."""
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value in self._selves:
            own = self._members.setdefault((self._selves[target.value], target.attr), [])
            own.append((value, self.branch))
        if isinstance(target, ast.Name):
            before = self.values.get((self.scope, target.id))
            self.values[self.scope, target.id] = Assigned(value, self.branch, before)

    def found(self, name: ast.Name) -> tuple[ast.expr, str] | None:
        """Return the expression of a name where it is read, and "" or the branch in which alone it has it."""
        if name not in self._reads:
            return None
        scope, where, assigned = self._reads[name]
        while (found := self._that_runs(assigned, where)) is None:
            if (parameter := self._parameters.get((scope, name.id))) is not None:
                argument = self._argument_of(parameter)
                return None if argument is None else (argument, "")
            found = self._that_runs(self.values.get((scope, name.id)), where)
            if found is not None or not scope:
                break
            scope, assigned = scope[:-1], None
            while scope and scope[-1].startswith("class "):  # functions do not see the names of their class
                scope = scope[:-1]
        return found

    def _that_runs(self, assigned: Assigned | None, where: Branch) -> tuple[ast.expr, str] | None:
        """Return the last expression of a name whose branch can run, with its condition, or None."""
        while assigned is not None:
            if (told := self.condition(assigned.branch, where)) is not None:
                return assigned.value, told
            assigned = assigned.before
        return None

    def candidates(self, name: ast.Name) -> list[ast.expr]:
        """Return what a name may be where it is read: what branches before may have set, up to what was always set."""
        scope, where, assigned = self._reads.get(name, ((), (), None))
        if assigned is None and scope:
            assigned = self.values.get(((), name.id))
        found: list[ast.expr] = []
        after: Branch | None = None  # that of the assignment which follows
        while assigned is not None:
            told = self.condition(assigned.branch, where)
            if told is not None and assigned.branch != after:
                found.append(assigned.value)
            after, assigned = assigned.branch, None if told == "" else assigned.before
        return found

    def assigned(self, name: ast.Name) -> ast.expr | None:
        """Return the expression of a name: one without a value where a branch decides, None if nothing sets it."""
        if (found := self.found(name)) is None:
            return None
        value, branch = found
        return unknown(f"{ast.unparse(value)[:200]} {branch}") if branch else value

    def origin(self, node: ast.expr, calls: bool = True) -> ast.expr:
        """Return the expression of a name, of a part or attribute, or of a call of the script's own function unless `calls`
        is false; any other expression is its own.
        """
        for _ in range(_LONGEST_CHAIN):
            if isinstance(node, ast.IfExp) and (found := self.truth(node.test)) is not None:
                node = node.body if found else node.orelse
            elif (calls or not isinstance(node, ast.Call)) and (meant := self.meaning(node)) is not None:
                node = meant
            else:
                break
        return node

    def meaning(self, node: ast.expr) -> ast.expr | None:
        """Return the expression of a name, a part, an attribute or a call of an own function; None for any other."""
        if isinstance(node, ast.Name):
            return self.assigned(node)
        if isinstance(node, ast.Call):
            return self.returned(node)
        if not isinstance(node, (ast.Subscript, ast.Attribute)) or self._deep > _DEEPEST:
            return None
        self._deep += 1
        found = self.member(node) if isinstance(node, ast.Attribute) else self._element(node)
        self._deep -= 1
        return found

    def _element(self, node: ast.Subscript) -> ast.expr | None:
        """Return the element of a list or a mapping that is written in the script."""
        key, of = node.slice, self.origin(node.value)
        if isinstance(key, ast.Constant) and isinstance(of, (ast.List, ast.Tuple)) and isinstance(key.value, int):
            plain = not any(isinstance(part, ast.Starred) for part in of.elts)
            return of.elts[key.value] if plain and -len(of.elts) <= key.value < len(of.elts) else None
        if isinstance(key, ast.Constant) and isinstance(of, ast.Dict):
            for name, value in zip(reversed(of.keys), reversed(of.values), strict=True):
                if not isinstance(name, ast.Constant):
                    return None
                if name.value == key.value:
                    return value
        return None

    def class_of(self, node: ast.expr) -> str:
        """Return the class of the script of which an expression is an object; "" for any other."""
        if isinstance(node, ast.Name) and node in self._selves:
            return self._selves[node]
        made = self.origin(node)
        name = made.func.id if isinstance(made, ast.Call) and isinstance(made.func, ast.Name) else ""
        return name if name in self.classes else ""

    def lineage(self, name: str) -> list[str]:
        """Return a class of the script and those that it inherits from, nearest first, other libraries' included."""
        found = [name]
        for one in found:  # it grows
            found += [base for base in self.bases.get(one, ()) if base not in found]
        return found

    def member(self, node: ast.Attribute) -> ast.expr | None:
        """Return the expression of an attribute: of an object, of `self`, or of a class of the script."""
        made = self.origin(node.value)
        if isinstance(made, ast.Name) and made.id in self.classes and made not in self._selves:
            of, given = made.id, {}
        else:
            of = self.class_of(node.value)
            given = {word.arg: word.value for word in made.keywords} if isinstance(made, ast.Call) else {}
        if not of:
            return None
        for name in self.lineage(of):
            values = [
                (value, told)
                for value, branch in self._members.get((name, node.attr), ())
                if (told := self.condition(branch)) is not None
            ]
            if len(values) > 1 or any(told for _, told in values):
                return unknown(ast.unparse(node))
            if values:
                return values[0][0]
            if node.attr in given and f"{name}.__init__" not in self.functions:  # of a dataclass
                return given[node.attr]
            if (own := self.values.get((self.classes.get(name, ()), node.attr))) and name in self.classes:
                return own.value
        return None

    def returned(self, node: ast.expr) -> ast.expr | None:
        """Return what a call of the script's own function or method returns, if this does not depend on a branch."""
        if not isinstance(node, ast.Call):
            return None
        names = [node.func.id] if isinstance(node.func, ast.Name) else []
        if isinstance(node.func, ast.Attribute) and self._deep <= _DEEPEST:
            self._deep += 1
            of = self.class_of(node.func.value)
            self._deep -= 1
            names = [f"{name}.{node.func.attr}" for name in self.lineage(of)] if of else []
        name = next((name for name in names if name in self._returns), "")
        found = [
            (value, told)
            for value, branch in self._returns.get(name, ())
            if (told := self.condition(branch)) is not None
        ]
        return found[0][0] if len(found) == 1 and not found[0][1] else None

    def _argument_of(self, parameter: Parameter) -> ast.expr | None:
        """Return what a function gets for a parameter, if the script calls it once, or if its command line does."""
        name, function, place, default = parameter
        if function in self.entries:
            return self.entry_point(parameter)
        calls = [call for call in self.calls if self._calls(call, function)]
        if len(calls) == 1 and place == _REST:
            named = self.parameters_of(function)
            rest = [word for word in calls[0].keywords if word.arg not in named]
            return ast.Dict(
                [ast.Constant(word.arg) if word.arg else None for word in rest], [word.value for word in rest]
            )
        if len(calls) != 1 or any(word.arg is None for word in calls[0].keywords):
            return None
        given = {word.arg: word.value for word in calls[0].keywords}
        for at, argument in enumerate(calls[0].args):
            if isinstance(argument, ast.Starred):
                return None
            if at == place:
                return argument
        return given.get(name, default)

    def _calls(self, call: ast.Call, function: str) -> bool:
        """Whether a call is one of this function, method, or constructor."""
        of, _, name = function.rpartition(".")
        if not of or name == "__init__":
            return isinstance(call.func, ast.Name) and call.func.id == (of or name)
        return isinstance(call.func, ast.Attribute) and call.func.attr == name

    @contextmanager
    def _within(self, kind: str) -> Iterator[None]:
        outer, self._count = self.scope, self._count + 1
        self.scope = (*outer, f"{kind} {self._count}")
        yield
        self.scope = outer

    def _visit_branch(self, text: str, *parts: ast.AST, test: ast.expr | None = None, wanted: bool = True) -> None:
        outer, self._count = self.branch, self._count + 1
        self.branch = (*outer, Arm(self._count, text, test, wanted))
        self._visit_all(*parts)
        self.branch = outer

    def _visit_all(self, *parts: ast.AST | None) -> None:
        for part in parts:
            if part is not None:
                self.visit(part)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._reads[node] = (self.scope, self.branch, self.values.get((self.scope, node.id)))
            if self._function and node.id == self._function[-1][2]:
                self._selves[node] = self._function[-1][0].rpartition(".")[0]
        else:
            self.set_target(node, unknown(node.id))

    def visit_Assign(self, node: ast.Assign) -> None:
        self._visit_all(node.value, *node.targets)
        for target in node.targets:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            values: list[ast.expr] = [node.value] * len(names)
            if isinstance(target, ast.Tuple) and isinstance(node.value, (ast.Tuple, ast.List)):
                values = node.value.elts
            elif isinstance(target, ast.Tuple):
                values = [ast.Subscript(node.value, ast.Constant(at), ast.Load()) for at in range(len(names))]
            if len(values) == len(names) and not any(isinstance(part, ast.Starred) for part in (*names, *values)):
                for name, value in zip(names, values, strict=True):
                    self.set_target(name, value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._visit_all(node.value, node.target)
            self.set_target(node.target, node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._visit_all(node.value, node.target)
        self.set_target(node.target, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        before: ast.expr = node.target
        if isinstance(before, ast.Name):
            before = ast.Name(before.id, ast.Load())
            self.visit(before)
        self._visit_all(node.value, node.target)
        if isinstance(node.target, _Augmented):
            self.set_target(node.target, ast.BinOp(before, node.op, node.value))

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        test = ast.unparse(node.test)[:100]
        if "__name__" in test:
            self._visit_all(*node.body)
        else:
            self._visit_branch(f"if {test}", *node.body, test=node.test)
        self._visit_branch(f"if not ({test})", *node.orelse, test=node.test, wanted=False)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        test = ast.unparse(node.test)[:100]
        self._visit_branch(f"if {test}", node.body, test=node.test)
        self._visit_branch(f"if not ({test})", node.orelse, test=node.test, wanted=False)

    def visit_While(self, node: ast.While) -> None:
        self._visit_branch(f"while {ast.unparse(node.test)[:100]}", node.test, *node.body, *node.orelse)

    def visit_For(self, node: _Loop) -> None:
        self.visit(node.iter)
        text = f"for {ast.unparse(node.target)[:50]} in {ast.unparse(node.iter)[:100]}"
        self._visit_branch(text, node.target, *node.body)
        self._visit_all(*node.orelse)

    visit_AsyncFor = visit_For

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:
        self._visit_branch("in a try", *node.body, *node.orelse)
        for handler in node.handlers:
            self._visit_branch("in an except", handler)
        self._visit_all(*node.finalbody)

    visit_TryStar = visit_Try

    def visit_match_case(self, node: ast.match_case) -> None:
        self._visit_branch(f"in case {ast.unparse(node.pattern)[:100]}", node.pattern, *node.body)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        self.calls.append(node)
        self.branch_of[node] = self.branch
        self.function_of[node] = self._function[0][0] if self._function else ""

    def visit_Return(self, node: ast.Return) -> None:
        self._visit_all(node.value)
        if self._function and self._function[-1][0]:  # of no lambda
            name, outer, _ = self._function[-1]
            self._returns.setdefault(name, []).append((node.value, self.branch[len(outer) :]))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_all(*node.decorator_list, *node.bases, *node.keywords)
        self.bases[node.name] = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
        self.methods[node.name] = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
        with self._within(f"class {node.name}"):
            self.classes[node.name] = self.scope
            self._visit_all(*node.body)

    def visit_FunctionDef(self, node: _Function) -> None:
        name, own, words = "", "", [*node.args.posonlyargs, *node.args.args]
        if not isinstance(node, ast.Lambda):
            self._visit_all(*node.decorator_list)
            self.functions.add(node.name)
            self.bodies[node.name] = node
            name = node.name
            if self.scope[-1:] and self.scope[-1].startswith("class "):
                name = f"{self.scope[-1].split()[1]}.{node.name}"
                self.functions.add(name)
                own = words[0].arg if words and not any(isinstance(d, ast.Name) for d in node.decorator_list) else ""
        self._visit_all(*node.args.defaults, *node.args.kw_defaults)
        with self._within("function"):
            self._set_parameters(name, node.args, bool(own))
            self._function.append((name, self.branch, own))
            self._visit_all(*(node.body if isinstance(node.body, list) else [node.body]))
            self._function.pop()

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef

    def _set_parameters(self, function: str, words: ast.arguments, of_object: bool) -> None:
        positional = [*words.posonlyargs, *words.args]
        defaults = [*[None] * (len(positional) - len(words.defaults)), *words.defaults, *words.kw_defaults]
        for place, (word, default) in enumerate(zip([*positional, *words.kwonlyargs], defaults, strict=True)):
            at = place - of_object if place < len(positional) else -1
            known = function if at >= 0 or place >= len(positional) else ""  # not of self
            self._parameters[self.scope, word.arg] = Parameter(word.arg, known, at, default)
        if words.vararg is not None:
            self._parameters[self.scope, words.vararg.arg] = Parameter(words.vararg.arg, "", -1, None)
        if words.kwarg is not None:
            self._parameters[self.scope, words.kwarg.arg] = Parameter(words.kwarg.arg, function, _REST, None)

    def parameters_of(self, function: str) -> dict[str, ast.expr | None]:
        """Return the parameters of a function with their defaults."""
        words = [word for word in self._parameters.values() if word.function == function and word.place != _REST]
        return {word.name: word.default for word in words}

    def visit_ListComp(self, node: _Comprehension) -> None:
        with self._within("comprehension"):
            self._visit_all(*node.generators)
            self._visit_all(*([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]))

    visit_SetComp = visit_ListComp
    visit_GeneratorExp = visit_ListComp
    visit_DictComp = visit_ListComp

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._visit_all(node.iter, node.target, *node.ifs)


def name_of(node: ast.Call) -> str:
    """Return the dotted name of the function that is called; "" for one without a name."""
    parts: list[str] = []
    target: ast.expr = node.func
    while isinstance(target, ast.Attribute):
        parts.append(target.attr)
        target = target.value
    return ".".join(reversed([*parts, target.id])) if isinstance(target, ast.Name) else ".".join(reversed(parts))
