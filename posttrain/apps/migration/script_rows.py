"""Finds the rows that a script of TRL gives to its trainer: files and datasets, their splits, and how many of them."""

from __future__ import annotations

import ast
import re
from typing import Any

from posttrain.apps.migration.foreign_run import ForeignRun, Unresolved, is_known, shown
from posttrain.apps.migration.script_names import name_of
from posttrain.apps.migration.script_values import ScriptValues

_PAIRS = "the columns chosen and rejected, and prompt where they do not repeat it"
_COLUMNS = {
    **dict.fromkeys(("grpo", "rloo"), "the column prompt, and those that its rewards take"),
    **dict.fromkeys(("dpo", "orpo", "cpo", "reward"), _PAIRS),
    "kto": "the columns prompt, completion and label",
    "sft": "the column messages, or prompt and completion, or text",
}
"""Trainer -> what its rows have."""
_CHANGES = {
    "map",
    "filter",
    "remove_columns",
    "rename_column",
    "rename_columns",
    "select_columns",
    "sort",
    "shard",
    "skip",
}
_BUILDERS = ("json", "csv", "parquet", "text", "arrow")
"""Names that load_dataset takes in place of a dataset's, for files."""
_JOINS = ("concatenate_datasets", "interleave_datasets")
_OTHER_ROWS = ("data_dir", "revision", "field", "data_files")
"""Words of load_dataset that choose other rows than the dataset's own."""


def take_rows(script: ScriptValues, node: ast.expr, run: ForeignRun, prefix: str) -> None:
    """Add the rows of an argument of the trainer. `prefix`: "" for those that train, "eval_" for those that evaluate."""
    joined = script.origin(node)
    if isinstance(joined, ast.Call) and name_of(joined).rpartition(".")[2] in _JOINS and joined.args and not prefix:
        _take_joined(script, joined, run)
        return
    load, after = script.source(node)
    if load is None:
        run.options[f"{prefix}dataset_name"] = Unresolved(ast.unparse(node)[:200])
        if not prefix:
            run.notes.append(f"the rows, which the script makes: write them to a file with {_COLUMNS[run.trainer]}")
        return
    methods = [step for step in after if isinstance(step, ast.Call) and isinstance(step.func, ast.Attribute)]
    called = {step.func.attr: step for step in methods if isinstance(step.func, ast.Attribute)}
    if "train_test_split" in called:
        _take_held_out(script, called["train_test_split"], run)
        if prefix:
            return  # held_out keeps these rows
    parts = [value for step in after if isinstance(step, ast.Subscript) and (value := script.value(step.slice))]
    if "train_test_split" in called and parts[:1] == ["test"]:
        run.first.append(
            "the rows that train: those that train_test_split calls test, which held_out keeps from training"
        )
    path, configuration, split = _place(script, load, parts, run, prefix)
    run.options[f"{prefix}dataset_name"] = path
    if isinstance(configuration, str):
        run.options[f"{prefix}dataset_config"] = configuration
    if split is not None and not prefix:
        run.options["dataset_train_split"] = split
    elif isinstance(split, str):
        run.notes.append(f"the rows of eval_tasks, which names no split: write split {split} of {path} to a file")
    if not prefix:
        _take_number(script, methods, run)
        if "max_samples" in run.options:
            run.names["max_samples"] = "rows that the script takes"
        if isinstance(path, list) and len(path) > 1 and (number := run.options.pop("max_samples", None)):
            run.first.append(f"the rows: the script takes the first {number} of all files; limit is of each part here")
        shaped = any(isinstance(step, ast.Call) and isinstance(step.func, ast.Name) for step in after)
        if shaped or called.keys() & _CHANGES:
            _note_changes(script, called, run)


def _place(
    script: ScriptValues, load: ast.Call, parts: list[Any], run: ForeignRun, prefix: str
) -> tuple[Any, Any, Any]:
    """Return the name of a dataset or the files, the configuration and the split of a call of load_dataset."""
    named = {word.arg: script.value(word.value) for word in load.keywords if word.arg}
    first = named.get("path", named.get("dataset_path", named.get("path_or_paths")))
    path = script.value(load.args[0]) if load.args else first
    configuration = script.value(load.args[1]) if len(load.args) > 1 else named.get("name")
    split = named.get("split") or next((part for part in reversed(parts) if isinstance(part, (str, Unresolved))), None)
    split = _take_slice(split, run) if isinstance(split, str) and not prefix else split
    if isinstance(split, str):
        split = re.split(r"[\[+]", split)[0]
    if path in _BUILDERS and (files := named.pop("data_files", named.pop("data_dir", None))) is not None:
        path, split = _files(files, split), None
    elif path in _BUILDERS:
        path = Unresolved(ast.unparse(load)[:200])
    if isinstance(path, str) and "*" in path:
        run.first.append(f"tasks {path}: name its files, or a folder")
    for word in _OTHER_ROWS:
        if named.get(word) is not None:
            run.first.append(
                f"{word} = {shown(named[word])} of load_dataset: the recipe reads {shown(path)} as a whole"
            )
    return path, configuration, split


def _files(given: Any, split: Any) -> Any:
    """Return the files of a split. `datasets` calls the only split of files "train"; a file here has none."""
    if not isinstance(given, dict):
        return given
    name = split if isinstance(split, str) else next(iter(given), "") if len(given) == 1 else "train"
    return given.get(name, Unresolved(shown(given)))


def _take_joined(script: ScriptValues, joined: ast.Call, run: ForeignRun) -> None:
    """Add several datasets that a script joins, as the parts of a mixture."""
    places, splits = [], []
    for part in script.elements(joined.args[0]):
        own = ForeignRun(run.framework, run.trainer)
        take_rows(script, part, own, "")
        name, configuration = own.options.get("dataset_name"), own.options.get("dataset_config")
        for place in name if isinstance(name, list) else [name]:
            places.append(f"{place}:{configuration}" if isinstance(configuration, str) else place)
        splits.append(own.options.get("dataset_train_split"))
        run.notes += [note for note in own.notes if note not in run.notes]
        run.first += [f"{shown(name)}: {line}" for line in own.first]
        if number := own.options.get("max_samples"):
            run.first.append(f"limit = {shown(number)} of the part {shown(name)}: write it into its table")
    run.options["dataset_name"] = places or Unresolved(ast.unparse(joined)[:200])
    if len(set(map(str, splits))) == 1 and splits[0] is not None:
        run.options["dataset_train_split"] = splits[0]
    elif len(set(map(str, splits))) > 1:
        told = ", ".join(f"{shown(place)}: {shown(split)}" for place, split in zip(places, splits, strict=False))
        run.first.append(f"the splits of the parts: write split into the table of each ({told})")
    if name_of(joined).endswith("interleave_datasets"):
        run.first.append("interleave_datasets draws from its datasets by probabilities of its own: weight of each part")


def _take_slice(split: str, run: ForeignRun) -> str:
    """Add the rows that a split such as "train[:1000]" has; note one that the recipe cannot have."""
    if found := re.fullmatch(r"(\w+)\[:(\d+)\]", split):
        run.options["max_samples"] = int(found[2])
        return found[1]
    if split == "all":
        run.first.append("split = all is every split of the dataset: write these rows to a file")
    if "[" in split or "+" in split:
        run.first.append(f"the rows: the script reads {split} alone; write these rows to a file")
    return split


def _take_number(script: ScriptValues, methods: list[ast.Call], run: ForeignRun) -> None:
    """Add how many rows a script takes: .select(range(n)), .take(n), after which nothing filters."""
    before: set[str] = set()
    for step in reversed(methods):  # in their order
        name = step.func.attr if isinstance(step.func, ast.Attribute) else ""
        first = step.args[0] if step.args else next((word.value for word in step.keywords), None)
        chosen = script.origin(first) if first is not None else None
        if name in ("select", "take") and chosen is not None:
            if isinstance(chosen, ast.Call) and name_of(chosen) == "range" and len(chosen.args) == 1:
                chosen = chosen.args[0]
            number = _smallest(script, chosen)
            known = isinstance(number, int) and (name == "take" or chosen is not first)
            if not known or before & {"filter", "train_test_split"}:
                run.first.append(f"the rows: the script takes {ast.unparse(step)[-100:]}; write them to a file")
            else:
                run.options["max_samples"] = min(number, run.options.get("max_samples", number))
                if "shuffle" in before:
                    run.notes.append(f"the rows: limit takes the first {number}; the script shuffles them before")
        before.add(name)


def _smallest(script: ScriptValues, node: ast.expr) -> Any:
    """Return a number; of min(n, len(rows)) the n."""
    if isinstance(node, ast.Call) and name_of(node) == "min":
        return min((value for part in node.args if isinstance(value := script.value(part), int)), default=None)
    return script.value(node)


def _note_changes(script: ScriptValues, called: dict[str, ast.Call], run: ForeignRun) -> None:
    run.notes.append(
        "the rows: the script changes them after loading (map, filter ...); write them to a file with "
        f"{_COLUMNS[run.trainer]}, or use fields"
    )
    if "map" in called and _makes_messages(script, called["map"]):
        run.notes.append("chat: the script makes messages of its rows (map); delete chat = false for their template")


def _makes_messages(script: ScriptValues, mapped: ast.Call) -> bool:
    """Return whether a function that maps rows, or one of the script that it names, has the word of messages, role."""
    parts: list[ast.AST] = [mapped]
    for part in parts:  # it grows
        for node in ast.walk(part):
            if isinstance(node, ast.Constant) and node.value == "role":
                return True
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            body = script.bodies.get(name)
            if body is not None and body not in parts and node is not mapped.func:
                parts.append(body)
    return False


def _take_held_out(script: ScriptValues, call: ast.Call, run: ForeignRun) -> None:
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
    if not is_known(run.options["train_test_split"]):
        run.first.append(f"held_out: {ast.unparse(call)[-100:]} keeps rows from training")
