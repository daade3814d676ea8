"""Recognises the run of another trainer in a file: a command, or a script or a configuration of TRL."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from posttrain.apps.migration.foreign_run import (
    ENVIRONMENT,
    LARGEST,
    ForeignRun,
    Unresolved,
    flat,
    shown,
    value_of,
    yaml_of,
)
from posttrain.apps.migration.hydra_files import configured
from posttrain.apps.migration.other_programs import answer_to, refuse_configuration, script_that_is_missing
from posttrain.apps.migration.shell_script import BRANCH, commands
from posttrain.apps.migration.trl_script import CONFIGS, read_script
from posttrain.core import user_files
from posttrain.core.messages import clip, one_line
from posttrain.core.types import UserError

TRL_TRAINERS = tuple(CONFIGS.values())
VERL = {
    **dict.fromkeys(("main_ppo", "main_ppo_v0", "main_dapo"), "main_ppo"),
    **dict.fromkeys(("sft_trainer", "sft_trainer_ray"), "sft_trainer"),
    "fsdp_sft_trainer": "fsdp_sft_trainer",
}
"""Module of verl that is started -> its trainer here."""
OPENRLHF = ("train_ppo_ray", "train_sft", "train_dpo", "train_rm")
_CONFIGURATIONS = (".yaml", ".yml")
_PROCESSES = {"--num_processes", "--num-processes", "--nproc_per_node", "--nproc-per-node", "--num_gpus"}
_HYDRA = {
    **dict.fromkeys(("--config-name", "-cn"), "name"),
    **dict.fromkeys(("--config-path", "-cp", "--config-dir", "-cd"), "path"),
}
_LARGEST_NOTEBOOK = 1 << 24  # bytes, pictures that it shows included
_RUNS_PYTHON = re.compile(r"%%(capture|prun|python3?|time|timeit|wandb)\b")
"""Magics of a notebook's cell whose further lines are Python that it runs."""
_COMMAND = re.compile(r"(\s*)(?:\w+\s*=\s*)?[!%]")  # !pip install x, %env A=b, files = !ls
_VARIABLE = re.compile(r"\$\{?[A-Za-z_]\w*(\[[@*]\])?\}?|\$\(.*\)", re.DOTALL)
_CHOICES = {"engine", "optim", "model", "model_engine", "profiler"}
_NODES = {"--nnodes", "--num_machines", "--num_nodes"}


def read(source: str, trainer: str | None = None, beside: str = "") -> ForeignRun:
    """Return the run that a file describes. `trainer`: that of a configuration of TRL, which does not name it. `beside`:
    beginning of the names of files that are written with the recipe.

    Raises UserError for a file that cannot be read, or that is none of these.
    """
    path = Path(source)
    if trainer is not None and path.suffix not in _CONFIGURATIONS:
        raise UserError(f"--trainer is of a YAML configuration, and {clip(source)} is none: leave it out")
    try:
        text = user_files.text(path, _LARGEST_NOTEBOOK if path.suffix == ".ipynb" else LARGEST)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{clip(source)} is not text in UTF-8: byte {error.start} is {error.object[error.start]:#04x}"
        ) from None
    except OSError as error:
        raise UserError(f"{clip(source)} cannot be read: {error.strerror or one_line(error)}") from None
    if path.suffix == ".py":
        return read_script(text, path.name, beside=beside, files=_FilesBeside(path.parent))
    if path.suffix == ".ipynb":
        return read_script(_cells(text, path.name), path.name, beside=beside, files=_FilesBeside(path.parent))
    if path.suffix == ".toml":
        raise UserError(
            f"{clip(source)} is TOML, which TRL, verl and OpenRLHF do not read: configurations of prime-rl are not "
            "converted, and a recipe of posttrain is run with --config"
        )
    if path.suffix in _CONFIGURATIONS:
        return _of_configuration(_mapping(text, path.name), trainer, path.name)
    words: list[str] = []
    rest = commands(text)
    for command in rest:
        if (run := _of_command(command, path, beside)) is not None:
            if more := _more(rest, path):
                run.notes.append(
                    f"that you mean this command, the first of {more + 1} in {path.name}: give another a file of its own"
                )
            _of_environment(run, text)
            return run
        words += ["", *command]
    told = answer_to(words)
    if not told and (missing := script_that_is_missing(words, path)):
        raise UserError(f"{clip(missing)} is not beside {path.name}: put it there, so that its options can be read")
    raise UserError(
        f"{clip(source)} has no command of TRL (trl grpo), verl (python -m verl.trainer.main_ppo) or OpenRLHF "
        f"(python -m openrlhf.cli.train_ppo_ray){told}"
    )


def _of_environment(run: ForeignRun, text: str) -> None:
    """Add the variables that a shell script sets for its run."""
    for name in ENVIRONMENT:
        if found := re.search(rf"(?:^|[\s;]){name}=(\"[^\"\n]*\"|'[^'\n]*'|[^\s;\"']+)", text):
            run.options.setdefault(name, value_of(found[1]))


def _more(rest: Iterable[list[str]], path: Path) -> int:
    """Return how many of the commands start a run; one that cannot be read ends the count."""
    found = 0
    with suppress(UserError):
        for command in rest:
            found += _of_command(command, path) is not None
    return found


def _of_command(words: list[str], path: Path, beside: str = "") -> ForeignRun | None:
    """Return the run of a command, or None if it is of no trainer that is known here. Words that only a run of the script
    would give are left out and noted.
    """
    unknown = [
        place
        for place, word in enumerate(words)
        if word.startswith(BRANCH) or (_VARIABLE.fullmatch(word) and not words[place - 1].startswith(("-", "$")))
    ]
    run = _of_words([word for place, word in enumerate(words) if place not in unknown], path, beside)
    if run is not None:
        for word in (words[place] for place in unknown):
            branch = word[1:].replace(BRANCH, " ")
            what = f"of a branch of the script, {branch}" if word.startswith(BRANCH) else f"in {word}"
            run.notes.append(f"the options {clip(what)}: only the script knows them, so add those that you want")
    return run


def _of_words(words: list[str], path: Path, beside: str) -> ForeignRun | None:
    for place, word in enumerate(words):
        module = re.sub(r"\.py$", "", word).replace("/", ".").rpartition(".")
        after = words[place + 1 :]
        if module[2] in VERL and (
            module[0].split(".")[0] in ("verl", "recipe") or "verl" in module[0] or "dapo" in module[0]
        ):
            run = _of_hydra(VERL[module[2]], after, _launched(words[:place]), path.parent)
            if ("recipe" in module[0] and "dapo" not in module[0]) or "experimental" in module[0]:
                run.notes.append(
                    f"what is learned: {clip(module[0])} has a trainer of its own, and this recipe is main_ppo's"
                )
            if module[2] == "main_dapo":  # of verl's recipe for DAPO, whose configuration has another manager
                run.defaults["reward.reward_manager.name"] = "dapo"
            return run
        if module[2] in OPENRLHF and "openrlhf" in module[0]:
            return ForeignRun("OpenRLHF", module[2], _of_arguments(after), _launched(words[:place]))
        if module[2] in TRL_TRAINERS and (
            ("trl" in module[0].split(".") and "scripts" in module[0]) or words[place - 1] == "trl"
        ):
            return _launched_by(_of_trl_command(module[2], after, path), words[:place], path)
        if Path(word).suffix == ".py" and _is_trl_script(path.parent / word):
            return _launched_by(_with_script(path.parent / word, after, path, beside), words[:place], path)
        if words[place - 1 : place] == ["trl"] and re.fullmatch(r"[a-z][\w-]*", word):
            if told := answer_to(words):
                raise UserError(told.removeprefix("; "))
            raise UserError(
                f"trl {word} has no counterpart in posttrain; there are {', '.join(f'trl {name}' for name in TRL_TRAINERS)}"
            )
    return None


def _launched(words: list[str]) -> int | None:
    """Return the processes that accelerate, torchrun or deepspeed start, if their options name them."""
    found: dict[str, int] = {}
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        value = value if equals else "".join(words[place + 1 : place + 2])
        if value.isdecimal() and len(value) < 7:
            found |= (
                {"processes": int(value)} if name in _PROCESSES else {"nodes": int(value)} if name in _NODES else {}
            )
    if "processes" not in found:
        return None
    per_machine = any(Path(word).name == "torchrun" or "torch.distributed" in word for word in words)
    return found["processes"] * (found.get("nodes", 1) if per_machine else 1)


def _launched_by(run: ForeignRun, words: list[str], path: Path) -> ForeignRun:
    """Return a run of TRL with the processes of what launches it: its options, or those of accelerate's configuration."""
    run.devices = _launched(words) or run.devices
    given = _of_arguments(words).get("config_file") or run.options.pop("accelerate_config", None)
    if run.devices is None and isinstance(given, str):
        try:
            count = _mapping(user_files.text(path.parent / given, LARGEST), given).get("num_processes")
            run.devices = count if isinstance(count, int) and 0 < count < 10**6 else None
        except (OSError, UnicodeDecodeError):
            run.notes.append(f"the number of devices in {given}, which is not beside {path.name}: --devices N")
    return run


def _of_hydra(trainer: str, words: list[str], devices: int | None, folder: Path) -> ForeignRun:
    """Return a run of verl: name=value, +name=value, ++name=value, over a configuration; ~name takes one away."""
    options, notes = configured(_hydra_files(words), folder)
    sweep = "--multirun" in words or "-m" in words
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("~"):
            options.pop(name[1:], None)
            notes.append(f"{word}, which deletes an option: the recipe uses the default of {name[1:]}")
        elif equals and re.fullmatch(r"\+{0,2}[\w@][\w.@/-]*", name):
            read = value_of(value)
            if sweep and isinstance(read, str) and "," in read:
                raise UserError(f"{clip(word)} is a sweep of several runs: give one value, without --multirun")
            if (
                ("." not in name and name in _CHOICES) or "/" in name or "@" in name
            ):  # of files of verl's own configuration
                continue
            options |= flat({name.lstrip("+"): read}) if isinstance(read, dict) else {name.lstrip("+"): read}
    gpus, nodes = options.get("trainer.n_gpus_per_node"), options.get("trainer.nnodes", 1)
    if isinstance(gpus, int) and isinstance(nodes, int):
        devices = gpus * nodes
    return ForeignRun("verl", trainer, options, devices, notes)


def _hydra_files(words: list[str]) -> dict[str, str]:
    """Return "name" and "path", where a command names a configuration of Hydra."""
    found: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if what := _HYDRA.get(name):
            found[what] = value if equals else following
    return found


def _of_arguments(words: list[str]) -> dict[str, Any]:
    """Return the options of an argparse command: --name value, --name=value, --name value value, --switch."""
    options: dict[str, Any] = {}
    name = ""
    values: list[Any] = []
    for word in [*words, "--"]:
        if word.startswith("--") or (word.startswith("-") and re.match(r"-[a-z]", word)):
            if name:
                options[name] = True if not values else values[0] if len(values) == 1 else values
            name, equals, value = word.lstrip("-").partition("=")
            name, values = name.replace("-", "_"), [value_of(value)] if equals else []
        elif name and word not in (")", "&"):
            values.append(value_of(word))
    return options


def _of_trl_command(trainer: str, words: list[str], path: Path) -> ForeignRun:
    """Return a run of `trl TRAINER`: its options, over those of its --config file, if that is there."""
    run = ForeignRun("TRL", trainer)
    run.options |= _configured(words, path, run.notes)
    if isinstance(processes := run.options.pop("num_processes", None), int):
        run.devices = processes
    return run


def _configured(words: list[str], path: Path, notes: list[str]) -> dict[str, Any]:
    """Return the options of a command over those of its configuration: --config FILE, or a first word that is a file."""
    options = _of_arguments(words)
    first = words[0] if words and Path(words[0]).suffix in (*_CONFIGURATIONS, ".json") else None
    file = options.pop("config", first)
    found: dict[str, Any] = {}
    if isinstance(file, str):
        try:
            found = _mapping(user_files.text(path.parent / file, LARGEST), file)
        except (OSError, UnicodeDecodeError) as error:
            named = file if file == first else f"--config {file}"
            notes.append(f"the options of {named}, which cannot be read ({one_line(error)}): add them here")
    return found | {name: value for name, value in options.items() if value is not None}


def _is_trl_script(place: Path) -> bool:
    try:
        return re.search(r"\b(from|import) trl\b", user_files.text(place, LARGEST)) is not None
    except (OSError, UnicodeDecodeError):
        return False


def _with_script(place: Path, words: list[str], path: Path, beside: str) -> ForeignRun:
    """Return the run of a script of one's own, with the options of its command over its own."""
    text = user_files.text(place, LARGEST)
    notes: list[str] = []
    commands = re.findall(r"\.add_parser\(\s*[\"']([\w-]+)[\"']", text)
    given = _configured([word for word in words if word not in commands], path, notes)
    rest = dict(given)  # less what the script parses by itself
    files = _FilesBeside(place.parent, path.parent, words=[place.name, *words])
    try:
        run = read_script(text, place.name, rest, beside, files)
    except UserError:
        if (config := next((name for name in CONFIGS if re.search(rf"\b{name}\b", text)), None)) is None:
            raise
        run = ForeignRun("TRL", CONFIGS[config], {}, None, [f"{place.name} decides too: read it"])
        rest = given
    run.notes += notes
    if "reward_funcs" in run.options and "reward_funcs" in rest:  # names that only the script reads
        run.notes.append(f"reward_funcs = {shown(rest.pop('reward_funcs'))}, of which {place.name} makes its functions")
    run.options |= rest | run.later
    if others := [word for word in words if re.match(r"[+~]{0,2}[A-Za-z_][\w.]*=", word)]:
        run.notes.append(f"{', '.join(others)[:200]}, which the command gives to the script: not in the recipe")
    for name, function in (("use_peft", "get_peft_config"), ("load_in_4bit", "get_quantization_config")):
        if rest.get(name) and function not in text and "ModelConfig" in text:
            run.notes.append(f"whether {name} acts: {place.name} does not call {function}")
    return run


class _FilesBeside:
    """The words of a command, and the content of the configurations that a script reads itself: YAML or JSON."""

    def __init__(self, *folders: Path, words: Sequence[str] = ()) -> None:
        self.folders, self.words = folders, words

    def __call__(self, name: str) -> dict[str, Any] | None:
        """Return the content of a file; None for one that is not there or has no options."""
        for folder in self.folders:
            with suppress(OSError, UnicodeDecodeError, UserError, ValueError):
                return _mapping(user_files.text(folder / name, LARGEST), name)
        return None


def _cells(text: str, name: str) -> str:
    """Return the code of a notebook, without commands of its shell and cells of other languages."""
    try:
        cells = json.loads(text)["cells"]
        code = ["".join(cell["source"]).lstrip("\n") for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{clip(name)} is not a Jupyter notebook: it has no cells") from None
    lines = [line for cell in code if not cell.startswith("%%") or _RUNS_PYTHON.match(cell) for line in _lines(cell)]
    out = "\n".join(lines)
    if len(out) > LARGEST:
        raise UserError(
            f"{clip(name)} has more than {LARGEST} characters of code: give the cell that trains, as a script"
        )
    return out


def _lines(cell: str) -> list[str]:
    """Return the lines of a cell with `pass` for each command of the shell, its further lines included."""
    out: list[str] = []
    goes_on = False
    for line in cell.splitlines():
        command = _COMMAND.match(line)
        if not goes_on:
            out.append(f"{command[1]}pass" if command else line)
        goes_on = (goes_on or command is not None) and line.rstrip().endswith("\\")
    return out


def _mapping(text: str, name: str) -> dict[str, Any]:
    import yaml

    try:
        content = yaml_of(text)
    except RecursionError:
        raise UserError(f"{clip(name)} is nested too deeply: an option of TRL is two levels deep at most") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{clip(name)} is not valid YAML: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{clip(name)} is not a configuration of TRL: it has no options (name: value)")
    plain = (bool, int, float, str, list, dict, type(None))
    if isinstance(environment := content.pop("env", None), dict):  # TRL sets these variables
        content |= {name: value for name, value in environment.items() if name in ENVIRONMENT}
    return {str(key): value if isinstance(value, plain) else str(value) for key, value in content.items()}


_SIGNS = (
    ("grpo", {"num_generations", "reward_funcs", "max_completion_length", "num_iterations"}),
    ("kto", {"desirable_weight", "undesirable_weight"}),
    ("reward", {"center_rewards_coefficient"}),
    ("sft", {"packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field", "eos_token"}),
    ("dpo", {"beta", "precompute_ref_log_probs", "f_divergence_type", "rpo_alpha", "truncation_mode"}),
)
"""Options that only one trainer of TRL has."""


def _of_configuration(options: dict[str, Any], trainer: str | None, name: str) -> ForeignRun:
    """Return a run of a YAML file. Raises UserError if nothing in it shows of which trainer."""
    if trainer is not None and trainer not in TRL_TRAINERS:
        raise UserError(f"--trainer is one of {', '.join(TRL_TRAINERS)}, not {trainer!r:.40}")
    if trainer is None:
        refuse_configuration(options, name)
    found = trainer or next((kind for kind, signs in _SIGNS if signs & options.keys()), None)
    found = found or next((kind for kind in TRL_TRAINERS if kind in re.split(r"\W|_", name.lower())), None)
    if found is None:
        raise UserError(
            f"{name} does not show which trainer of TRL it is for: give --trainer sft, dpo, grpo, reward or kto"
        )
    notes = [] if trainer else [f"that this configuration is one of trl {found}: --trainer names another"]
    options = {key: value for key, value in options.items() if not isinstance(value, Unresolved)}
    tables = {key: options.pop(key) for key in ("chat_template_kwargs",) if isinstance(options.get(key), dict)}
    return ForeignRun("TRL", found, {**flat(options), **tables}, None, notes)
