"""Reads a training script of TRL as a syntax tree: configurations, trainer, model, rewards, data. Nothing of it is run."""

from __future__ import annotations

import ast
import json
import re
from typing import Any, NoReturn, TypeGuard

from posttrain.apps.migration.foreign_run import ENVIRONMENT, ForeignRun, Unresolved, shown
from posttrain.apps.migration.reward_source import needs_training, source_of
from posttrain.apps.migration.script_changes import note_changes, set_mask
from posttrain.apps.migration.script_model import raise_batch_of_unsloth, take_adapters, take_type_of_weights
from posttrain.apps.migration.script_names import name_of
from posttrain.apps.migration.script_rows import take_rows
from posttrain.apps.migration.script_values import ConfigurationFiles, ScriptValues
from posttrain.core.foreign_options import ELSEWHERE
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

_ONLINE_DPO = "rounds of posttrain sample, label and prefer: see Online DPO in docs/guides/preferences.md"
_DISTILLATION = "posttrain distill --tasks rows.jsonl --model MODEL --teacher MODEL"
OTHER_TRAINERS = {
    **dict.fromkeys(("GKDTrainer", "MiniLLMTrainer", "DistillationTrainer", "GOLDTrainer"), _DISTILLATION),
    **dict.fromkeys(("OnlineDPOTrainer", "XPOTrainer", "NashMDTrainer"), _ONLINE_DPO),
    "PRMTrainer": "posttrain reward-model --algorithm outcome, on rows with labelled steps (docs/guides/process-rewards.md)",
    "PPOTrainer": "posttrain rl --algorithm ppo",
    "BCOTrainer": "posttrain prefer --algorithm bco",
    "GMPOTrainer": "posttrain rl --algorithm gmpo",
}
"""Trainers of TRL whose options are not converted -> their equal here."""

_DATA = ("train_dataset", "eval_dataset", "processing_class")
_POSITIONS = {
    **dict.fromkeys(("grpo", "rloo"), ("model", "reward_funcs", "args", *_DATA)),
    **dict.fromkeys(("dpo", "kto"), ("model", "ref_model", "args", "data_collator", *_DATA)),
    **dict.fromkeys(("sft", "reward", "orpo", "cpo"), ("model", "args", "data_collator", *_DATA)),
}
"""Trainer -> what its arguments without a name are."""
_SCRIPT_ARGUMENTS = {"dataset_train_split": "train", "dataset_test_split": "test", "dataset_config": None}
"""Defaults of TRL's own class of arguments."""
_STARTS = 256  # rows for episodes of an environment that makes its own tasks
_OF_TRANSFORMERS = {"learning_rate": 5e-5, "gradient_checkpointing": False, "bf16": False}
"""Defaults of transformers' TrainingArguments that TRL's configurations change."""
_CHANGES = ("update", "pop", "popitem", "setdefault", "clear")
"""Methods that change a mapping."""
_OF_TRAINERS = (
    "max_seq_length",
    "max_length",
    "max_prompt_length",
    "packing",
    "dataset_text_field",
    "beta",
    "loss_type",
)
"""Options that older trainers took themselves."""
_NAMES = {
    "model_name_or_path": "model",
    "dataset_name": "train_dataset",
    "dataset_config": "train_dataset's configuration",
    "dataset_train_split": "train_dataset's split",
    "eval_dataset_name": "eval_dataset",
}
"""Option of a command of TRL -> how a script gives it."""


def read_script(
    text: str, name: str, given: dict[str, Any] | None = None, beside: str = "", files: ConfigurationFiles | None = None
) -> ForeignRun:
    """Return the run that a script of TRL starts. Raises UserError for another, or if its options are not in it.

    `given`: what its command gives. Arguments that the script parses by itself, for itself alone, are removed from it.
    `beside`: beginning of the names of files that are written with the recipe. `files`: those that the script may read.
    """
    script, tree = _parsed(text, name, files)
    own = script.take_given(given or {})
    run_last = [call for call in script.calls if script.condition(script.branch_of[call]) is not None]
    called = ((name_of(call).rpartition(".")[2], call) for call in (*script.calls, *run_last))
    last = {_root(script, name): call for name, call in called}
    parsed, parsed_as = _parsed_configuration(script, last) if given is not None else ("", "")
    config, call = (parsed, None) if parsed else _configuration(script, last, name)
    started, others_of_class = _take_trained(script, last, config)
    if call is not None:
        call = last.get(config, call)
    if given is not None:
        for flag in own.keys() - (_fields(script, parsed_as).keys() | set(ELSEWHERE) if parsed else set()):
            del given[flag]
    run = ForeignRun("TRL", CONFIGS[config], names=dict(_NAMES))
    run.first += [*others_of_class, *_writes_not_followed(script)]
    _of_class(script, parsed_as if call is None else name_of(call).rpartition(".")[2], run)
    if call is not None:
        run.options |= script.keywords(call)
        run.notes += _not_read(script, tree, call, run)
        _of_configuration(script, call, run)
        if name_of(call).endswith("TrainingArguments"):
            run.defaults = _OF_TRANSFORMERS
    if others := [c for c in last if (c in CONFIGS and c != config) or c in OTHER_TRAINERS]:
        run.notes.append(
            f"that you mean the run of {config}: {name} calls {' and '.join(others)} too, which need a script of their own"
        )
    trainer = last.get(config.replace("Config", "Trainer"))
    if parsed:
        _set_later(script, trainer, run, name)
    if trainer is not None:
        _of_trainer_and_rewards(script, (tree, text, name), trainer, run, beside)
        if started is not None:
            run.options |= {n: v for n, v in script.keywords(started).items() if n == "resume_from_checkpoint"}
    take_adapters(script, last, run, config.replace("Config", "Trainer"))
    note_changes(script, tree, trainer, run)
    set_mask(script, run)
    if script.read:
        run.notes.append(f"{', '.join(sorted(script.read))}, which {name} reads: its values are those of the recipe")
    raise_batch_of_unsloth(script, run)
    if "max_seq_length" in run.options:
        longest = run.options.pop("max_seq_length")
        if "max_length" not in run.options:
            run.options["max_length"], run.names["max_length"] = longest, "max_seq_length"
    if script.used:
        shown_defaults = ", ".join(f"{argument} = {shown(value)}" for argument, value in script.used.items())
        run.notes.append(f"the arguments of {name}, which are its command's or else their defaults: {shown_defaults}")
    return run


def _take_trained(script: ScriptValues, last: dict[str, ast.Call], config: str) -> tuple[ast.Call | None, list[str]]:
    """Of several trainers of a class, put into `last` the first that is trained, with its configurations. Return the call
    of its train, and a line that names the others.
    """
    root = config.replace("Config", "Trainer")
    run = [call for call in script.calls if script.condition(script.branch_of[call]) is not None]
    made = [call for call in run if _root(script, _last_name(call)) == root]
    trains = [call for call in run if _last_name(call) == "train" and isinstance(call.func, ast.Attribute)]
    trained = [(script.origin(call.func.value), call) for call in trains if isinstance(call.func, ast.Attribute)]
    chosen, started = next(((one, call) for one, call in trained if one in made), (last.get(root), last.get("train")))
    if not isinstance(chosen, ast.Call):
        return started, []
    last[root] = chosen
    words = {word.arg: word.value for word in chosen.keywords if word.arg}
    words = dict(zip(_POSITIONS[CONFIGS[config]], chosen.args, strict=False)) | words
    for argument, name in (("args", config), ("peft_config", "LoraConfig")):
        given = script.origin(words[argument]) if argument in words else None
        if name in last and isinstance(given, ast.Call) and _root(script, _last_name(given)) == name:
            last[name] = given
    others = [f"line {call.lineno}" for call in made if call is not chosen]
    told = f"the recipe is of the {root} in line {chosen.lineno}, not of those in {', '.join(others)}"
    return started, [f"{told}: import each of these from a script of its own"] if others else []


def _writes_not_followed(script: ScriptValues) -> list[str]:
    """Return a line for each write to attributes whose names only the script knows."""
    return [
        f"line {call.lineno} of the script, {ast.unparse(call)[:80]}: set here what it sets, which only the script knows"
        for call in script.not_followed
    ]


def _last_name(call: ast.Call) -> str:
    return name_of(call).rpartition(".")[2]


def _parsed(text: str, name: str, files: ConfigurationFiles | None) -> tuple[ScriptValues, ast.Module]:
    """Return the values of a script and its tree. Raises UserError for text that is none."""
    try:
        tree = ast.parse(text)
        script = ScriptValues(files)
        script.visit(tree)
        script.take_entries()
        script.take_writes()
        if files is not None:
            files.words = script.choose(files.words)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{name} is not a Python script that can be read: {type(error).__name__}") from error
    if (long := next(filter(_is_unprintable, ast.walk(tree)), None)) is not None:
        raise UserError(f"{name}:{long.lineno} has an integer of more than 64 bits: correct it")
    if script.imported.get("ScriptArguments", "").startswith("trl"):
        script.arguments |= {part: ast.Constant(value) for part, value in _SCRIPT_ARGUMENTS.items()}
    return script, tree


def _set_later(script: ScriptValues, trainer: ast.Call | None, run: ForeignRun, name: str) -> None:
    """Add what a script sets of its options after it has read its command: `later`, which that does not change."""
    words = {word.arg: word.value for word in trainer.keywords} if trainer is not None else {}
    own = ast.unparse(script.origin(words["args"])) if "args" in words else ""
    others: list[str] = []
    for owner, option, node, branch, where in script.attributes:
        told = script.condition(branch, where)
        if told is not None and ast.unparse(script.origin(owner)) == own:
            run.later[option] = Unresolved(f"{ast.unparse(node)[:200]} {told}") if told else script.value(node)
        elif told is not None and script.is_made_by_parser(owner):
            others.append(option)
    if others:
        run.notes.append(f"{', '.join(dict.fromkeys(others))}, which {name} sets after it has read its command")


def _of_class(script: ScriptValues, name: str, run: ForeignRun) -> None:
    """Add the defaults of a configuration of the script's own."""
    fields = _fields(script, name)
    run.options |= {option: script.value(default) for option, default in fields.items() if default is not None}
    if made := {"__init__", "__post_init__"}.intersection(script.methods.get(name, ())):
        run.first.append(f"{name}.{made.pop()}, which changes the options after they are given: read it")


def _of_trainer_and_rewards(
    script: ScriptValues, source: tuple[ast.Module, str, str], trainer: ast.Call, run: ForeignRun, beside: str
) -> None:
    """Add the arguments of the trainer, and copies of its rewards where the script cannot be imported for them."""
    tree, text, name = source
    within = "it defines them in a function" if _within_functions(script, tree, trainer) else ""
    anonymous = "it makes them where it gives them" if _are_made(script, trainer) else ""
    why = needs_training(tree) or within or anonymous
    run.home = f"{beside}rewards.py" if why else name
    made: dict[str, ast.expr] = {}
    _of_trainer(script, trainer, run, beside, made)
    if why:
        _copy_rewards(tree, text, run, f"{name} cannot be imported for them, as {why}", made)


def _is_unprintable(node: ast.AST) -> TypeGuard[ast.Constant]:
    """Whether it is an integer that Python does not write out, as it has thousands of digits."""
    return isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value.bit_length() > 10_000


def _root(script: ScriptValues, name: str) -> str:
    """Return the class of TRL that a class of the script inherits from, as TRL calls it; any other name is its own."""
    known = {*CONFIGS, *OTHER_TRAINERS, *(config.replace("Config", "Trainer") for config in CONFIGS)}
    names = [script.renamed.get(one, one) for one in script.lineage(name)]
    return next((one for one in names if one in known), names[0])


def _fields(script: ScriptValues, name: str) -> dict[str, ast.expr | None]:
    """Return the fields that a configuration of the script's own has, with their defaults, nearest class first."""
    found: dict[str, ast.expr | None] = {}
    for one in reversed(script.lineage(name)):
        found |= script.fields.get(one, {})
    return found


def _parsed_configuration(script: ScriptValues, last: dict[str, ast.Call]) -> tuple[str, str]:
    """Return the configuration that a parser of the script makes of its command, and the class that it parses; "" if it
    calls one itself, or none.
    """
    parser = next(
        (call for name, call in last.items() if name.endswith("Parser") and (call.args or call.keywords)), None
    )
    if parser is None or CONFIGS.keys() & last.keys():
        return "", ""
    names = [part.attr if isinstance(part, ast.Attribute) else part.id
             for argument in (*parser.args, *(word.value for word in parser.keywords))
             for part in ast.walk(script.origin(argument)) if isinstance(part, (ast.Name, ast.Attribute))]  # fmt: skip
    return next(((root, name) for name in names if (root := _root(script, name)) in CONFIGS), ("", ""))


def _configuration(script: ScriptValues, last: dict[str, ast.Call], name: str) -> tuple[str, ast.Call | None]:
    """Return the configuration of the run and the call that makes it; None where its trainer is called without one."""
    trainers = [n for n in last if n.endswith("Trainer") and n not in ("Trainer", "Seq2SeqTrainer")]
    configs = [n for n in last if n in CONFIGS]
    if configs:
        config = next((c for c in configs if c.replace("Config", "Trainer") in trainers), configs[-1])
        return config, last[config]
    known = [n for n in trainers if n.replace("Trainer", "Config") in CONFIGS]
    if not known:
        _refuse(script, trainers, name)
    trainer = last[known[0]]
    most = _POSITIONS[CONFIGS[known[0].replace("Trainer", "Config")]].index("args")
    if len(trainer.args) > most or any(word.arg in ("args", None) for word in trainer.keywords):
        if (older := last.get("TrainingArguments")) is None:
            _refuse(script, known, name)
        return known[0].replace("Trainer", "Config"), older
    return known[0].replace("Trainer", "Config"), None


def _within_functions(script: ScriptValues, tree: ast.Module, trainer: ast.Call) -> bool:
    """Return whether a reward, a tool or an environment is defined in a function, where its name cannot be imported."""
    given = [word.value for word in trainer.keywords if word.arg in ("reward_funcs", "tools", "environment_factory")]
    used = {part.id for node in given for part in ast.walk(script.origin(node)) if isinstance(part, ast.Name)}
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    top = {node.name for node in tree.body if isinstance(node, kinds)}
    return bool(used & (script.functions | script.classes.keys()) - top)


def _copy_rewards(tree: ast.Module, text: str, run: ForeignRun, why: str, made: dict[str, ast.expr]) -> None:
    """Keep the functions that env names of the file of rewards, with what they use. `made`: those without a name of their
    own -> their expressions.
    """
    start = f"trl:{run.home}:"
    given = run.options.get("reward_funcs")
    terms = [term for term in given if isinstance(term, tuple) and len(term) == 2] if isinstance(given, list) else []
    names = [str(told).removeprefix(start) for kind, told in terms if kind == "function" and told.startswith(start)]
    agent = [run.options.get(argument) for argument in ("tools", "environment_factory")]
    names += [name for part in agent if isinstance(part, str) for name in part.split("+")]
    if not names:
        return
    content, missing = source_of(tree, text, names, made)
    lost = [name for name in made if not re.search(rf"^{name} = ", content, re.MULTILINE)]
    run.options["reward_funcs"] = [
        ("unknown", ast.unparse(made[name])[:100]) if (name := str(told).removeprefix(start)) in lost else (kind, told)
        for kind, told in terms
    ] if terms else given  # fmt: skip
    if not (kept := [name for name in names if name not in lost]):
        return
    run.files[run.home] = content
    run.notes.append(f"{run.home}, which --out writes: it has copies of {', '.join(kept)}: {why}")
    for name in missing:
        run.notes.append(f"{name} in {run.home}, which uses it: the script loads or computes it, so define it there")


def _of_configuration(script: ScriptValues, call: ast.Call, run: ForeignRun) -> None:
    """Add what a configuration gets otherwise than by keywords: its place of output, and attributes that are set later."""
    for place, argument in enumerate(call.args):
        name = f"{name_of(call)}'s argument {place + 1}" if place else "output_dir"
        run.options.setdefault(name, script.value(argument) if not place else Unresolved(ast.unparse(argument)[:200]))
    names = {name for (_, name), assigned in script.values.items() if assigned.value is call}
    for owner, name, node, branch, where in script.attributes:
        of_trainer = isinstance(owner, ast.Attribute) and owner.attr == "args" and name in run.options
        made = script.origin(owner)
        perhaps = isinstance(owner, ast.Name) and isinstance(made, ast.Name) and owner.id in names
        if (told := script.condition(branch, where)) is None:
            continue
        if told or perhaps:
            value: Any = Unresolved(f"{ast.unparse(node)[:200]} {told}".strip())
        else:
            value = script.value(node)
        if of_trainer or perhaps or made is call:
            run.options[name] = value
    for name in ENVIRONMENT:
        if name in script.environment:
            run.options[name] = script.value(script.environment[name])


def _refuse(script: ScriptValues, trainers: list[str], name: str) -> NoReturn:
    known = ", ".join(CONFIGS)
    if any(name_of(call).endswith(("TrlParser", "HfArgumentParser")) for call in script.calls):
        raise UserError(f"{name} takes its options from its command line: import the command, in a file of its own")
    if answered := next((trainer for trainer in reversed(trainers) if trainer in OTHER_TRAINERS), None):
        raise UserError(f"{name} uses {answered}, which is not converted; here it is {OTHER_TRAINERS[answered]}")
    if trainers and trainers[-1].replace("Trainer", "Config") in CONFIGS:
        raise UserError(
            f"{name} makes the args of {trainers[-1]} elsewhere: put the call of its configuration into {name}"
        )
    if trainers:
        raise UserError(f"{name} uses {trainers[-1]}, which has no counterpart in posttrain; there are {known}")
    raise UserError(f"{name} is not a script of TRL: it calls none of {known}")


def _not_read(script: ScriptValues, tree: ast.Module, call: ast.Call, run: ForeignRun) -> list[str]:
    """Return what to check: mappings of options whose values only the script knows, and calls that change the options."""
    found = [
        f"the options in {name}, which only the script knows: defaults here may be others there"
        for name in run.options
        if name.startswith("**")
    ]
    mapped = [node for word in call.keywords if word.arg is None for node in ast.walk(word.value)]
    names = {node.id for node in mapped if isinstance(node, ast.Name)}
    made = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and node.value is call]
    written = {write.call for write in script.writes}
    names |= {target.id for node in made for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node not in written and (changed := _changed(node)) in names:
            found.append(f"line {node.lineno} of the script, which changes {changed}: {ast.unparse(node)[:80]}")
    return found


def _changed(node: ast.Call) -> str | None:
    """Return the name that this call changes, if it is one of those that change a mapping or a configuration."""
    if isinstance(node.func, ast.Attribute):
        method, owner = node.func.attr, node.func.value
        if isinstance(owner, ast.Call) and name_of(owner) == "vars" and owner.args:
            owner = owner.args[0]
        owner = owner.value if isinstance(owner, ast.Attribute) and owner.attr == "__dict__" else owner
        if isinstance(owner, ast.Name) and (method in _CHANGES or method.startswith("set_")):
            return owner.id
    first = node.args[0] if node.args else None
    replaced = name_of(node) in ("setattr", "replace", "dataclasses.replace")
    return first.id if replaced and isinstance(first, ast.Name) else None


def _named_parts(script: ScriptValues, node: ast.expr) -> Any:
    """Return the names of functions or classes as env gives them, "f+g"; of a mapping the name that the script gives it."""
    value = script.origin(node)
    if isinstance(value, (ast.Dict, ast.ListComp)) and isinstance(node, ast.Name):
        return node.id
    parts = value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]
    known = script.functions | script.classes.keys() | script.imported.keys()
    names = [part.id for part in parts if isinstance(part, ast.Name) and part.id in known]
    return "+".join(names) if len(names) == len(parts) else Unresolved(ast.unparse(node)[:200])


def _of_trainer(script: ScriptValues, call: ast.Call, run: ForeignRun, beside: str, made: dict[str, ast.expr]) -> None:
    """Add the arguments of the trainer itself: model, data, rewards."""
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    given = dict(zip(_POSITIONS[run.trainer], call.args, strict=False)) | given
    if "model" in given:
        value, (load, _) = script.value(given["model"]), script.source(given["model"])
        if load is not None:
            named = {k.arg: k.value for k in load.keywords}
            place = next((named[n] for n in ("model_name", "pretrained_model_name_or_path") if n in named), None)
            value = script.value(load.args[0] if load.args else place)
            take_type_of_weights(script, load, named, run)
        run.options["model_name_or_path"] = value
    for argument, prefix in (("train_dataset", ""), ("eval_dataset", "eval_")):
        if argument in given:
            take_rows(script, given[argument], run, prefix)
    if "ref_model" in given and not _is_own(script, given["ref_model"], given.get("model")):
        load, _ = script.source(given["ref_model"])
        value = script.value(given["ref_model"] if load is None else load.args[0] if load.args else None)
        run.options["ref_model"] = value if isinstance(value, str) else ast.unparse(given["ref_model"])[:100]
    if "reward_funcs" in given:
        run.options["reward_funcs"] = _rewards(script, given["reward_funcs"], run, made)
    for argument in _OF_TRAINERS:
        if argument in given:
            run.options.setdefault(argument, script.value(given[argument]))
    for argument in ("tools", "environment_factory"):
        if argument in given:
            run.options[argument] = _named_parts(script, given[argument])
    if "environment_factory" in given and "train_dataset" not in given:
        rows = ({"prompt": [{"role": "user", "content": ""}], "seed": number} for number in range(_STARTS))
        file = f"{beside}episodes.jsonl"
        run.files[file] = "".join(f"{json.dumps(row)}\n" for row in rows)
        run.options["dataset_name"] = file
        run.notes.append(f"{file}, in place of the rows that the script has not: reset gets seed if it takes it")


def _is_own(script: ScriptValues, reference: ast.expr, model: ast.expr | None) -> bool:
    """Return whether a reference is none, the policy itself, a copy of it, or loaded from the same place."""
    if isinstance(reference, ast.Name) and len(perhaps := script.candidates(reference)) > 1:
        return all(_is_own(script, one, model) for one in perhaps)
    if isinstance(reference, ast.IfExp) and script.truth(reference.test) is None:
        return _is_own(script, reference.body, model) and _is_own(script, reference.orelse, model)
    found = script.origin(reference)
    if model is None or script.value(reference) is None:
        return script.value(reference) is None
    if isinstance(found, ast.Call) and name_of(found).endswith(("deepcopy", "create_reference_model")) and found.args:
        found = found.args[0]
    (one, _), (other, _) = script.source(found), script.source(model)
    places = [
        script.value(load.args[0] if load and load.args else node) for load, node in ((one, found), (other, model))
    ]
    return places[0] == places[1]


def _are_made(script: ScriptValues, trainer: ast.Call) -> bool:
    """Return whether a reward is made where it is given: partial(f, ...), Reward(), a lambda."""
    given = next((word.value for word in trainer.keywords if word.arg == "reward_funcs"), None)
    parts = [] if given is None else script.elements(given)
    return any(_makes_one(script, script.origin(part, calls=False)) for part in parts)


def _makes_one(script: ScriptValues, part: ast.expr) -> bool:
    """Return whether an expression makes a reward function: a lambda, partial(f), an object, a function that returns one."""
    name = name_of(part) if isinstance(part, ast.Call) else ""
    returned = isinstance(script.origin(part), (ast.Name, ast.Lambda))
    made = name in ("partial", "functools.partial") or name in script.classes or (name in script.functions and returned)
    return isinstance(part, ast.Lambda) or made


def _rewards(script: ScriptValues, node: ast.expr, run: ForeignRun, made: dict[str, ast.expr]) -> Any:
    """Return the reward functions as terms of --env, and models as ("model", name). `made` gets those without a name."""
    terms: list[Any] = []
    for part in script.elements(node):
        value, part = script.value(part), script.origin(part, calls=False)
        load, _ = script.source(part)
        if load is not None and load.args and isinstance(place := script.value(load.args[0]), str):
            terms.append(("model", place))
        elif isinstance(value, str):
            terms.append(("model", value))
        elif isinstance(part, ast.Name) and part.id in script.functions:
            terms.append(("function", f"trl:{run.home}:{part.id}"))
        elif isinstance(part, ast.Name) and script.imported.get(part.id, "").startswith("trl"):
            terms.append(("function", f"trl:{script.renamed[part.id]}"))
        elif isinstance(part, ast.Name) and part.id in script.imported:
            terms.append(("function", f"trl:{script.imported[part.id].lstrip('.')}:{script.renamed[part.id]}"))
        elif isinstance(part, ast.Attribute) and (module := script.aliases.get(ast.unparse(part.value))):
            terms.append(("function", f"trl:{module}:{part.attr}"))
        elif _makes_one(script, part):
            name = f"reward_{len(terms) + 1}"
            made[name] = part
            terms.append(("function", f"trl:{run.home}:{name}"))
        else:
            terms.append(("unknown", ast.unparse(part)[:100]))
    return terms
