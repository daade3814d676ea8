"""Messages about arguments that the command line cannot read: one line each, with the fix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import takewhile
from pathlib import Path
from typing import Literal, get_args, get_origin

from cyclopts.exceptions import (
    CoercionError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from posttrain.cli.command_table import COMMANDS, FIRST, command_of
from posttrain.config.verbs import VERBS
from posttrain.core.messages import inline, near

NUMBERS = {int: "a whole number", float: "a number"}
BY_POSITION = {
    "adapter": "the folder of an adapter, or of a run with --lora",
    "folder": "the folder of a run or of a checkpoint",
    "index": "the folder of an index, as posttrain retriever build makes it",
    "model": "the folder of a checkpoint or of a run",
    "repository": "a repository of the hub, org/name",
    "rows": "a file of rows, a folder, or the name of a dataset",
    "run": "the folder of a run, or a file of rollouts",
    "source": "the file of a command, a script or a configuration of TRL, verl or OpenRLHF",
    "runs": "the folder of a run, or several",
    "sql": "a question in SQL",
}
"""Meaning of each positional argument."""
OTHER_COMMANDS = ("trl", "verl", "openrlhf", "accelerate", "torchrun", "deepspeed")
OTHER_WORDS = {
    **dict.fromkeys(("list", "runs", "ls"), "show runs"),
    **dict.fromkeys(("status", "info", "summary"), "show runs/rl"),
    **dict.fromkeys(("diff", "compare"), "show runs/a runs/b"),
    "export": "view runs/rl --export run.html (a model: posttrain merge, posttrain push)",
}
"""Words that people type -> the command that does it."""
ANYWHERE = ("--version", "--help", "--help-all")
"""Options that are understood with and without a command."""
BEFORE_DASHES = {"launch": "launch --slurm", "memory": "memory"}
"""Commands that another one follows, as it is typed."""


def explanation(error: Exception, words: list[str]) -> str:
    """Return the message of an error about these words, in terms of the command where cyclopts has one of its own."""
    said = " ".join(str(error).split())
    if isinstance(error, UnknownOptionError) and error.token is not None and words:
        own = [name for one in error.argument_collection or () for name in one.names if name.startswith("--")]
        return _unknown(error.token.keyword or error.token.value, words, own)
    if isinstance(error, UnknownCommandError) and words:
        return no_command(words[0])
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        return _missing(error, words)
    if isinstance(error, RepeatArgumentError) and error.token.keyword:
        return _repeated(error.token.keyword, words)
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens and words:
        return _unused(error.unused_tokens[0], words)
    if isinstance(error, CoercionError) and error.token is not None:
        said = _no_value(error, error.token.keyword or "", error.token.value, words[0]) or said
    if said.startswith("Dictionary of tokens"):  # the message of cyclopts does not name it
        dotted = next((word for word in words if word.startswith("--") and word.count(".") > 1), "an option")
        return f"{dotted} has one dot too many: name a single entry, as in --fields.prompt COLUMN"
    return said


def _no_value(error: CoercionError, option: str, value: str, verb: str) -> str:
    """Return the message about a value that an option cannot have; "" if that of cyclopts is as good."""
    kind = get_origin(error.target_type)
    if error.target_type in NUMBERS:
        return f"{option} is {NUMBERS[error.target_type]}, not {value!r:.60}"
    if kind is Literal:
        return _no_choice(option, value, list(map(str, get_args(error.target_type))), verb)
    return f"{' '.join(str(error).split())} Name one entry at a time: {option}.NAME VALUE" if kind is dict else ""


def _unknown(option: str, words: list[str], own: list[str]) -> str:
    """Return the message for an option that a command does not have. `own`: the options that it has."""
    from posttrain.core.option_aliases import is_foreign

    verb, *rest = words
    if verb in BEFORE_DASHES and "--" not in rest and (command := next((word for word in rest if word in VERBS), None)):
        return f"a training command follows two dashes: posttrain {BEFORE_DASHES[verb]} -- {command} ..."
    others = [word.partition("=")[0] for word in rest if word.startswith("--")]
    known = option_names(verb) if verb in VERBS else ()
    foreign = [word for word in dict.fromkeys(others) if word != option and (known and is_foreign(word, known))]
    return "; ".join(f"unknown option {each}{hint(each, verb, own)}" for each in [option, *foreign])


def _unused(word: str, words: list[str]) -> str:
    """Return the message for a word without an option before it. `words`: those of the command."""
    verb, *rest = words
    if len(files := _files_of_tasks(rest)) > 1 and word in files:
        from posttrain.core.several_files import as_mixture

        return as_mixture(files)
    if verb == "query":
        return 'put the question into quotes: posttrain query RUN "select ..."'
    name, equals, _ = word.partition("=")
    if equals and verb in VERBS:  # the syntax of Hydra, and so of verl
        return f"options are written --name value, not {word!r:.60}{hint(f'--{name}', verb)}"
    option = "--env" if ":" in word else "--tasks" if Path(word).suffix else "--model"
    such = f", such as {option} {word}" if verb in VERBS else ""
    return f"{word!r:.60} has no option in front of it{inline(such)}: posttrain {verb} --help lists them"


def _files_of_tasks(words: list[str]) -> list[str]:
    """Return the words after --tasks, up to the next option."""
    after = words[words.index("--tasks") + 1 :] if "--tasks" in words else []
    return list(takewhile(lambda word: not word.startswith("-"), after))


def _missing(error: MissingArgumentError, words: list[str]) -> str:
    """Return the message about a missing argument."""
    verb = " ".join(takewhile(lambda word: not word.startswith("-"), words))
    assert error.argument is not None
    name = error.argument.name
    if not error.argument.field_info.is_positional:
        count, _ = error.argument.token_count()
        return f"{name} needs {'a value' if count < 2 else f'{count} values'}: posttrain {verb} --help-all explains it"
    command = command_of(words)
    assert command is not None
    said = BY_POSITION[name.lstrip("-").lower()]
    return f"posttrain {command.name} needs {said}: posttrain {command.name} {command.example}"


def _repeated(option: str, words: list[str]) -> str:
    """Return the message about an option that is given twice, or beside its opposite."""
    plain = option.removeprefix("--no-").removeprefix("--")
    both = [f"--{plain}", f"--no-{plain}"]
    if all(name in words for name in both):
        return f"{' and '.join(both)} contradict each other: leave one of them out"
    return f"{option} is given twice: leave one of them out"


def _no_choice(option: str, value: str, choices: Sequence[str], verb: str) -> str:
    """Return the message about a value that is none of an option's choices, with the one that is meant."""
    *others, last = choices
    listed = f"{', '.join(others)} or {last}" if others else last
    return f"{option} is {listed}, not {value!r:.60}{near(value, choices) or hint(f'--{value}', verb)}"


def no_command(word: str) -> str:
    """Return the message for an unknown command, with the most similar one, or the one to which an algorithm
    belongs.
    """
    from posttrain.algorithms.all_algorithms import EVERY, verb_of

    if word.lower() in EVERY:
        verb = verb_of(EVERY[word.lower()])
        return f"{word} is an algorithm: posttrain {verb} --algorithm {word.lower()}"
    if word in OTHER_COMMANDS:
        return (
            f"{word} is a command of another trainer: write it to run.sh; posttrain import run.sh makes a recipe of it"
        )
    if word in OTHER_WORDS:
        return f"there is no command {word!r}: posttrain {OTHER_WORDS[word]}"
    names = [c.name for c in COMMANDS]
    longer = next((name for name in names if word and name.startswith(word)), word)
    told = near(longer, [*names, *ANYWHERE]) or f"; there are {', '.join(FIRST)} and more"
    if word.startswith("-"):
        told = told.replace("'", "")
        return f"there is no option {word:.60} in front of a command{told}: posttrain --help"
    return f"there is no command {word!r:.60}{told}: posttrain --help"


def option_names(verb: str) -> list[str]:
    """Return the names of all options of a verb with a configuration."""

    kind = VERBS[verb].options
    return [*(f.name.rstrip("_") for f in fields(kind)), *kind.flags()]


def hint(word: str, verb: str, own: list[str] | None = None) -> str:
    """Return the end of a message about an unknown option: the one that may be meant, or where all are listed.

    `own`: the options of a command without a configuration.
    """
    from posttrain.core.option_aliases import suggestion

    if verb in VERBS:
        always = ANYWHERE if word.startswith("-") else ()  # a recipe has none of these
        found = suggestion(word, [*option_names(verb), *(name[2:] for name in always)])
    elif (command := command_of([verb])) and word.lstrip("-").replace("-", "_") in option_names("rl"):
        found = f": write posttrain {command.name} {command.example}"  # such as --tasks of a command for rows
    else:
        names = [name.lstrip("-") for name in (*(own or ()), *ANYWHERE)]  # dashes would make all names similar
        found = near(word.lstrip("-"), names).replace("mean '", "mean --").replace("'", "")
    return found or f": see posttrain {verb} --help-all"
