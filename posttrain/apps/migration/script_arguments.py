"""The arguments of a Python script: of argparse, dataclasses, click, typer, fire and Hydra, with their defaults."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from posttrain.apps.migration.foreign_run import Unresolved, value_of
from posttrain.apps.migration.script_names import Parameter, ScriptNames, name_of

_PARSES = (
    *(".parse_args(", ".parse_known_args(", ".parse_args_into_dataclasses(", ".parse_args_and_config("),
    *(
        ".parse_yaml_file(",
        ".parse_json_file(",
        ".parse_dict(",
        ".parse(",
        "tyro.cli(",
        "pyrallis.parse(",
        "draccus.parse(",
    ),
)
_RUNS = (
    "fire.Fire",
    "Fire",
    "typer.run",
    "tyro.cli",
    "tyro.extras.subcommand_cli_from_dict",
    "CLI",
    "jsonargparse.CLI",
)
"""Functions that call another one with what the command line gives."""
_ENTRIES = ("command", "main")
"""Last names of decorators that do the same: @app.command(), @click.command(), @hydra.main()."""


class ScriptArguments(ScriptNames):
    """The arguments of a script's command line. Their values are found by the class that inherits from this one."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: dict[str, ast.expr | None] = {}  # of its command line -> the default; None: without one
        self.flags: dict[str, tuple[str, bool]] = {}
        """As a command writes it -> its argument, and its value without one."""
        self.omitted: set[str] = set()  # arguments that are None unless they are given
        self.fields: dict[str, dict[str, ast.expr | None]] = {}  # dataclass -> its fields with their defaults
        self.used: dict[str, Any] = {}  # arguments whose default is used -> the default
        self.given: set[str] = set()  # arguments that the command gives
        self.commands: dict[str, str] = {}  # parser of one of several commands -> the command
        self._hydra: dict[str, str] = {}  # function that Hydra calls -> the file of its configuration
        self._runs: dict[str, str] = {}  # parser of one of several commands -> the function that it runs
        self._of_parsers: dict[tuple[str, str], ast.expr | None] = {}  # parser, argument -> the default

    def value(self, node: ast.expr | None, depth: int = 0) -> Any:
        """Return the value of an expression; `Unresolved` for one that only running the script would give."""
        raise NotImplementedError

    def take_entries(self) -> None:
        """Take the parameters of functions that a command line calls as its arguments. After the visit."""
        called = [call for call in self.calls if name_of(call) in _RUNS]
        parts = [node for call in called for argument in call.args for node in ast.walk(argument)]
        self.entries |= {node.id for node in parts if isinstance(node, ast.Name) and node.id in self.functions}
        for function in sorted(self.entries):
            for name, default in self.parameters_of(function).items():
                self.arguments.setdefault(name, _plain_default(default))
                self.flags.setdefault(name, (name, True))
        self.entry_point = self._argument_of_entry

    def _argument_of_entry(self, word: Parameter) -> ast.expr:
        """Return what a command line gives for a parameter: its value, the function's own default, or a decorator's."""
        default = _plain_default(word.default)
        if word.function in self._hydra:
            return ast.parse(f"OmegaConf.load({self._hydra[word.function]!r})", mode="eval").body
        if word.name in self.given or default is None:
            return ast.Attribute(ast.Name("args", ast.Load()), word.name, ast.Load())
        if not isinstance(found := self.value(default, 1), Unresolved):
            self.used[word.name] = found
        return default

    def take_given(self, given: dict[str, Any]) -> dict[str, Any]:
        """Take the values that a command gives to arguments of the script's own, and return them."""
        own = {name: value for name, value in given.items() if name in self.arguments.keys() | self.flags.keys()}
        for flag, value in own.items():
            argument, alone = self.flags.get(flag, (flag, True))
            self.arguments[argument] = ast.parse(repr(alone if value is True else value), mode="eval").body
            self.given.add(argument)
        return own

    def choose(self, words: Sequence[str]) -> list[str]:
        """Take the command of several that the words name: its arguments, and not the calls of the others' functions.
        Return the words without it.
        """
        commands = {command: parser for parser, command in self.commands.items()}
        chosen = next((word for word in words if word in commands), None)
        if chosen is None:
            return list(words)
        for (parser, name), default in self._of_parsers.items():
            if parser == commands[chosen]:
                self.arguments[name] = default
        others = {function for parser, function in self._runs.items() if parser != commands[chosen]}
        others -= {self._runs.get(commands[chosen], "")}
        self.calls = [call for call in self.calls if self.function_of[call] not in others]
        place = list(words).index(chosen)
        return [*words[:place], *words[place + 1 :]]

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        """Take the arguments that decorators of click and typer give to a function."""
        super().visit_FunctionDef(node)
        for decorator in getattr(node, "decorator_list", []):
            call = decorator if isinstance(decorator, ast.Call) else ast.Call(decorator, [], [])
            if name_of(call).rpartition(".")[2] in ("option", "argument"):
                self._argument(call)
            elif "." in name_of(call) and name_of(call).rpartition(".")[2] in _ENTRIES:
                self.entries.add(getattr(node, "name", ""))
                words = {word.arg: word.value for word in call.keywords}
                place = [self.value(words[part], 1) if part in words else "" for part in ("config_path", "config_name")]
                if name_of(call) == "hydra.main" and all(isinstance(part, str) for part in place):
                    file = "/".join(filter(None, place)).removesuffix(".yaml") + ".yaml"
                    self._hydra[getattr(node, "name", "")] = file

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef

    def set_target(self, target: ast.expr, value: ast.expr) -> None:
        super().set_target(target, value)
        parser = isinstance(value, ast.Call) and name_of(value).endswith(".add_parser") and value.args
        if parser and isinstance(value, ast.Call) and isinstance(value.args[0], ast.Constant):
            self.commands[ast.unparse(target)] = str(value.args[0].value)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Take the fields of a dataclass as arguments: HfArgumentParser makes them so."""
        super().visit_ClassDef(node)
        if any("dataclass" in ast.unparse(decorator)[:100] for decorator in node.decorator_list):
            for part in node.body:
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    self.fields.setdefault(node.name, {})[part.target.id] = _plain_default(part.value)
            for name, default in self.fields.get(node.name, {}).items():
                before = self.arguments.get(name)
                differs = before is not None and (default is None or ast.unparse(before) != ast.unparse(default))
                self.arguments[name] = None if differs else default  # of two classes: which is meant is not known

    def visit_Call(self, node: ast.Call) -> None:
        super().visit_Call(node)
        if name_of(node).endswith(".add_argument"):
            self._argument(node)
        elif name_of(node).endswith(".set_defaults"):
            self.arguments |= {word.arg: word.value for word in node.keywords if word.arg}
            named = next((word.value for word in node.keywords if isinstance(word.value, ast.Name)), None)
            if isinstance(node.func, ast.Attribute) and named is not None and named.id in self.functions:
                self._runs[ast.unparse(node.func.value)] = named.id

    def _argument(self, node: ast.Call) -> None:
        """Keep an argument of argparse with its default."""
        words = {word.arg: word.value for word in node.keywords}
        given = [part.value for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str)]
        flags = [flag for part in given for flag in part.split("/")[:1]]  # click: --lora/--no-lora
        flag = next((flag for flag in flags if flag.startswith("--")), flags[0] if flags else "")
        place, action = words.get("dest"), words.get("action")
        plain = next((flag for flag in flags if not flag.startswith("-")), flag)  # click: "--model-name", "model"
        name = place.value if isinstance(place, ast.Constant) else plain.lstrip("-").replace("-", "_")
        default = words.get("default")
        if default is None and isinstance(action, ast.Constant) and action.value in ("store_true", "store_false"):
            default = ast.Constant(action.value == "store_false")
        if default is None and flag.startswith("-") and "required" not in words:
            self.omitted.add(str(name))
        off = isinstance(action, ast.Constant) and action.value == "store_false"
        self.flags |= {part.lstrip("-").replace("-", "_"): (str(name), not off) for part in flags}
        kind = words.get("type")
        if isinstance(default, ast.Constant) and isinstance(default.value, str) and isinstance(kind, ast.Name):
            default = ast.Constant(value_of(default.value)) if kind.id in ("int", "float") else default
        if words.get("is_flag") is not None and default is None:
            default = ast.Constant(False)
        of = node.func.value if isinstance(node.func, ast.Attribute) else None
        parser = ast.unparse(of) if of is not None else ""
        self._of_parsers[parser, str(name)] = default
        before = [one for (_, argument), one in self._of_parsers.items() if argument == name]
        if len({ast.unparse(one) if one is not None else "" for one in before}) > 1:
            default = None  # parsers of several commands have one of this name: which is meant is not known
        self.arguments[str(name)] = default

    def is_made_by_parser(self, node: ast.expr) -> bool:
        node = self.origin(node)
        made = ast.unparse(node) if isinstance(node, (ast.Call, ast.Subscript)) else ""
        return any(way in made for way in _PARSES)


def _plain_default(default: ast.expr | None) -> ast.expr | None:
    """Return the default of a field or a parameter, out of field(default=...) or typer.Option(...); None: it has none."""
    if isinstance(default, ast.Call) and name_of(default).rpartition(".")[2] in (
        "field",
        "Field",
        "Option",
        "Argument",
        "arg",
    ):
        words = {word.arg: word.value for word in default.keywords}
        made = words.get("default_factory")
        if isinstance(made, ast.Lambda):
            made = made.body
        elif isinstance(made, ast.Name) and made.id in ("list", "dict"):
            made = ast.List([], ast.Load()) if made.id == "list" else ast.Dict([], [])
        first = default.args[0] if default.args and not name_of(default).endswith("field") else None
        default = words.get("default", made if made is not None else first)
    return None if isinstance(default, ast.Constant) and default.value is ... else default
