"""Reads a training script of TRL as a syntax tree: configurations, trainer, model, rewards, data. Nothing of it is run."""

from __future__ import annotations

import ast
import operator
from typing import Any

from posttrain.apps.migration.foreign_run import ENVIRONMENT, ForeignRun, Unresolved
from posttrain.core.types import UserError

CONFIGS = {
    "GRPOConfig": "grpo",
    "RLOOConfig": "rloo",
    "DPOConfig": "dpo",
    "KTOConfig": "kto",
    "ORPOConfig": "orpo",
    "CPOConfig": "cpo",
    "SFTConfig": "sft",
    "RewardConfig": "reward",
}
"""Configuration -> its trainer, as the command line of TRL names it."""

_LORA = {
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
}
_NAMES = {
    "model_name_or_path": "model",
    "dataset_name": "train_dataset",
    "dataset_config": "train_dataset's configuration",
    "dataset_train_split": "train_dataset's split",
    "eval_dataset_name": "eval_dataset",
}
"""Option of a command of TRL -> how a script gives it."""
_LOADS = ("load_dataset", "load_from_disk", "from_pretrained")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}
_LONGEST_CHAIN = 100  # methods that are called on rows one after another, and names that stand for them
_LONGEST = 10_000  # characters or elements of a value that an operator makes


class ScriptValues(ast.NodeVisitor):
    """The assignments, imports, functions and calls of a script, in its order, whatever function they are in."""

    def __init__(self) -> None:
        self.values: dict[str, ast.expr] = {}
        self.calls: list[ast.Call] = []
        self.functions: set[str] = set()
        self.imported: dict[str, str] = {}  # name -> module
        self.attributes: list[tuple[str, str, ast.expr, str]] = []  # object, attribute, value, the branch it is set in
        self.environment: dict[str, ast.expr] = {}
        self._branch = ""

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            for name in names:
                self._assign(name, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.generic_visit(node)
        if isinstance(node.target, ast.Attribute):
            self._assign(node.target, ast.BinOp(node.target, node.op, node.value))

    def visit_If(self, node: ast.If) -> None:
        outer, test = self._branch, ast.unparse(node.test)[:100]
        self._branch = outer if "__name__" in test else f"if {test}"
        self.generic_visit(node)
        self._branch = outer

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            inner, before = _innermost(value), self.values.get(target.id)
            if inner is not None and isinstance(inner.value, ast.Name) and inner.value.id == target.id and before:
                inner.value = before  # rows = rows.map(f): what is mapped is the name's value before
            self.values[target.id] = value
        elif isinstance(target, ast.Attribute):
            self.attributes.append((ast.unparse(target.value), target.attr, value, self._branch))
        elif isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
            name, key = ast.unparse(target.value), target.slice
            if name.endswith("environ"):
                self.environment[str(key.value)] = value
            elif (before := self.values.get(name)) is not None and (isinstance(before, ast.Dict) or _is_dict(before)):
                self.values[name] = ast.Dict([None, key], [before, value])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name) and node.value is not None:
            self.values[node.target.id] = node.value

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        self.calls.append(node)
        if (
            name_of(node).endswith("environ.setdefault")
            and len(node.args) == 2
            and isinstance(node.args[0], ast.Constant)
        ):
            self.environment.setdefault(str(node.args[0].value), node.args[1])

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.functions.add(node.name)
        self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.functions.add(node.name)
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self.imported[alias.asname or alias.name] = "." * node.level + (node.module or "")

    def value(self, node: ast.expr | None, depth: int = 0) -> Any:
        """Return the value of an expression of constants, lists, names and sums of these; `Unresolved` for any other."""
        if node is None or depth > 20:
            return Unresolved("?") if node is not None else None
        if isinstance(node, ast.Constant):
            plain = isinstance(node.value, (bool, int, float, str)) or node.value is None
            return node.value if plain else Unresolved(ast.unparse(node))
        if isinstance(node, ast.Name) and node.id in self.values:
            return self.value(self.values[node.id], depth + 1)
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self.value(part, depth + 1) for part in node.elts]
        if isinstance(node, ast.Dict) or _is_dict(node):
            return self._mapping(node, depth)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self.value(node.operand, depth + 1)
            return -inner if isinstance(inner, (int, float)) else Unresolved(ast.unparse(node))
        if isinstance(node, ast.JoinedStr):
            return self._joined(node, depth)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return self._sum(node, depth)
        if isinstance(node, ast.Call) and name_of(node).endswith(("environ.get", "getenv")) and len(node.args) == 2:
            return self.value(node.args[1], depth + 1)
        return Unresolved(ast.unparse(node)[:200])

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
        texts = isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Add)
        try:
            found = _OPERATORS[type(node.op)](left, right) if numbers or texts else None
        except (ZeroDivisionError, OverflowError):
            found = None
        return Unresolved(ast.unparse(node)[:200]) if found is None else found[:_LONGEST] if texts else found

    def source(self, node: ast.expr | None) -> tuple[ast.Call | None, list[ast.expr]]:
        """Return the call that loads a model or a dataset, and what is done with it, last step first.

        These are calls of methods, such as map, and subscripts, such as `["train"]`.
        """
        after: list[ast.expr] = []
        for _ in range(_LONGEST_CHAIN):
            if isinstance(node, ast.Name) and node.id in self.values:
                node = self.values[node.id]
            elif isinstance(node, ast.Call) and name_of(node).rpartition(".")[2] in _LOADS:
                return node, after
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


def _is_dict(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Call) and name_of(node) == "dict"


def name_of(node: ast.Call) -> str:
    """Return the dotted name of the function that is called; "" for one without a name."""
    parts: list[str] = []
    target: ast.expr = node.func
    while isinstance(target, ast.Attribute):
        parts.append(target.attr)
        target = target.value
    return ".".join(reversed([*parts, target.id])) if isinstance(target, ast.Name) else ".".join(reversed(parts))


def read_script(text: str, name: str) -> ForeignRun:
    """Return the run that a script of TRL starts. Raises UserError for another, or if its options are not in it."""
    try:
        tree = ast.parse(text)
        script = ScriptValues()
        script.visit(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{name} is not a Python script that can be read: {type(error).__name__}") from error
    last = {name_of(call).rpartition(".")[2]: call for call in script.calls}
    trainers = [n for n in last if n.endswith("Trainer") and n not in ("Trainer", "Seq2SeqTrainer")]
    configs = [n for n in last if n in CONFIGS]
    if not configs:
        _refuse(script, trainers, name)
    config = next((c for c in configs if c.replace("Config", "Trainer") in trainers), configs[-1])
    run = ForeignRun("TRL", CONFIGS[config], _keywords(script, last[config]), names=dict(_NAMES))
    _of_configuration(script, last[config], run)
    if others := [c for c in configs if c != config]:
        run.notes.append(
            f"that you mean the run of {config}: {name} calls {' and '.join(others)} too, which need a script of their own"
        )
    trainer = last.get(config.replace("Config", "Trainer"))
    if trainer is not None:
        _of_trainer(script, trainer, run, name, _runs_when_imported(tree))
    if lora := last.get("LoraConfig"):
        run.options |= {"LoraConfig": True} | {_LORA.get(key, key): value for key, value in _keywords(script, lora).items()
                                               if key not in ("task_type", "bias")}  # fmt: skip
    return run


def _of_configuration(script: ScriptValues, call: ast.Call, run: ForeignRun) -> None:
    """Add what a configuration gets otherwise than by keywords: its place of output, and attributes that are set later."""
    for place, argument in enumerate(call.args):
        name = f"{name_of(call)}'s argument {place + 1}" if place else "output_dir"
        run.options.setdefault(name, script.value(argument) if not place else Unresolved(ast.unparse(argument)[:200]))
    names = {name for name, value in script.values.items() if value is call}
    for owner, name, node, branch in script.attributes:
        if owner in names or (owner.endswith(".args") and name in run.options):
            value = script.value(node)
            run.options[name] = Unresolved(f"{ast.unparse(node)[:200]} {branch}") if branch else value
    for name in ENVIRONMENT:
        if name in script.environment:
            run.options[name] = script.value(script.environment[name])


def _refuse(script: ScriptValues, trainers: list[str], name: str) -> None:
    known = ", ".join(CONFIGS)
    if any(name_of(call).endswith(("TrlParser", "HfArgumentParser")) for call in script.calls):
        raise UserError(f"{name} takes its options from its command line: import the command, in a file of its own")
    if trainers:
        raise UserError(f"{name} uses {trainers[-1]}, which has no counterpart in posttrain; there are {known}")
    raise UserError(f"{name} is not a script of TRL: it calls none of {known}")


def _keywords(script: ScriptValues, call: ast.Call) -> dict[str, Any]:
    """Return the keyword arguments of a call, those of **mappings of the script included."""
    found: dict[str, Any] = {}
    for keyword in call.keywords:
        value = script.value(keyword.value)
        if keyword.arg is not None:
            found[keyword.arg] = value
        elif isinstance(value, dict):
            found |= value
        else:
            found[f"**{ast.unparse(keyword.value)[:100]}"] = value
    return found


def _of_trainer(script: ScriptValues, call: ast.Call, run: ForeignRun, name: str, runs: bool) -> None:
    """Add the arguments of the trainer itself: model, data, rewards."""
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    if call.args:
        given.setdefault("model", call.args[0])
    if len(call.args) > 1 and run.trainer in ("grpo", "rloo"):
        given.setdefault("reward_funcs", call.args[1])
    if "model" in given:
        value, (load, _) = script.value(given["model"]), script.source(given["model"])
        if load is not None:
            named = {k.arg: k.value for k in load.keywords}
            value = script.value(load.args[0] if load.args else named.get("model_name"))
            dtype = named.get("torch_dtype") or named.get("dtype")
            if dtype is not None and "bfloat16" in ast.unparse(dtype):
                run.options.setdefault("torch_dtype", "bfloat16")
        run.options["model_name_or_path"] = value
    for argument, prefix in (("train_dataset", ""), ("eval_dataset", "eval_")):
        if argument in given:
            _dataset(script, given[argument], run, prefix)
    if "reward_funcs" in given:
        run.options["reward_funcs"] = _rewards(script, given["reward_funcs"], name, runs, run)
    for argument in ("callbacks", "compute_metrics", "tools", "environment_factory", "rollout_func"):
        if argument in given:
            run.options[argument] = Unresolved(ast.unparse(given[argument])[:200])


def _dataset(script: ScriptValues, node: ast.expr, run: ForeignRun, prefix: str) -> None:
    load, after = script.source(node)
    if load is None:
        run.options[f"{prefix}dataset_name"] = Unresolved(ast.unparse(node)[:200])
        return
    named = {k.arg: script.value(k.value) for k in load.keywords}
    path = script.value(load.args[0]) if load.args else named.get("path")
    configuration = script.value(load.args[1]) if len(load.args) > 1 else named.get("name")
    methods = {
        step.func.attr: step for step in after if isinstance(step, ast.Call) and isinstance(step.func, ast.Attribute)
    }
    if "train_test_split" in methods:
        _held_out(script, methods["train_test_split"], run)
        if prefix:
            return  # held_out keeps these rows
    parts = [script.value(step.slice) for step in after if isinstance(step, ast.Subscript)]
    split = named.get("split") or next((part for part in reversed(parts) if isinstance(part, str)), None)
    if isinstance(split, str) and "[" in split:
        run.notes.append(
            f"the number of rows: the script reads {split} alone; give limit, or write these rows to a file"
        )
        split = split.partition("[")[0]
    if path in ("json", "csv", "parquet") and "data_files" in named:
        path, split = _files(named["data_files"], split), None
    run.options[f"{prefix}dataset_name"] = path
    if isinstance(configuration, str):
        run.options[f"{prefix}dataset_config"] = configuration
    if isinstance(split, str) and not prefix:
        run.options["dataset_train_split"] = split
    elif isinstance(split, str):
        run.notes.append(f"the rows of eval_tasks, which names no split: write split {split} of {path} to a file")
    if not prefix and methods.keys() & {
        "map",
        "filter",
        "select",
        "shuffle",
        "take",
        "remove_columns",
        "rename_column",
    }:
        run.notes.append(
            "the rows: the script changes them after loading (map, filter ...); write them to a file, or use fields"
        )


def _held_out(script: ScriptValues, call: ast.Call, run: ForeignRun) -> None:
    """Add the share or number of rows that train_test_split keeps from training."""
    named = {k.arg: k.value for k in call.keywords}
    size = call.args[0] if call.args else named.get("test_size")
    kept = script.value(named.get("train_size"))
    if size is not None or kept is None:
        run.options["train_test_split"] = 0.25 if size is None else script.value(size)
    elif isinstance(kept, float):
        run.options["train_test_split"] = 1 - kept
    else:
        run.options["train_test_split"] = Unresolved(ast.unparse(call)[:200])


def _files(given: Any, split: Any) -> Any:
    """Return the files of a split. `datasets` calls the only split of files "train"; a file here has none."""
    return given.get(split, given) if isinstance(given, dict) and isinstance(split, str) else given


def _rewards(script: ScriptValues, node: ast.expr, name: str, runs: bool, run: ForeignRun) -> Any:
    """Return the reward functions as terms of --env, and models as ("model", name)."""
    if isinstance(node, ast.Name) and node.id in script.values:
        node = script.values[node.id]
    terms: list[Any] = []
    for part in node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node]:
        value = script.value(part)
        if isinstance(value, str):
            terms.append(("model", value))
        elif isinstance(part, ast.Name) and part.id in script.functions:
            terms.append(("function", f"trl:{'rewards.py' if runs else name}:{part.id}"))
            if runs:
                run.notes.append(
                    f"that rewards.py has {part.id}, copied from {name}: a reward is imported, and this file would train"
                )
        elif isinstance(part, ast.Name) and script.imported.get(part.id, "").startswith("trl"):
            terms.append(("function", f"trl:{part.id}"))
        elif isinstance(part, ast.Name) and part.id in script.imported:
            terms.append(("function", f"trl:{script.imported[part.id].lstrip('.')}:{part.id}"))
        else:
            terms.append(("unknown", ast.unparse(part)[:100]))
    return terms


def _runs_when_imported(tree: ast.Module) -> bool:
    """Whether importing the script would train: a trainer is made outside functions and the guard of `__main__`."""
    for node in tree.body:
        guarded = isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
        inner = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        made = (name_of(call) for call in ast.walk(node) if isinstance(call, ast.Call))
        if not guarded and not inner and any(name.endswith("Trainer") for name in made):
            return True
    return False
