"""Help pages: `posttrain`, `posttrain --help`, `posttrain VERB --help` and `--help-all`.

A --help page shows the first sentence about each option that a new user needs; --help-all shows the whole text of all
options. Both come from the declarations of the options: see `posttrain.config.option_groups`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import is_dataclass
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin

from posttrain.cli.command_table import COMMANDS, FIRST, HEADINGS, Command, command_of
from posttrain.config.verbs import VERBS
from posttrain.core.extras import runnable

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.argument import Argument

HELP_ALL = "--help-all"
WIDEST, NARROWEST = 100, 60  # columns of a page
LEFT = 25  # columns for the names
LONGEST_CHOICE = 18  # most characters of choices shown beside an option's name
ARGUMENTS, OPTIONS = "arguments", "options"  # groups of parameters that no class of options declares
WORDS = {int: "N", float: "X", str: "TEXT"}
_SENTENCE = re.compile(r"(?<=[^.]\.)\s+")


class HelpEntry(NamedTuple):
    """An option on a help page."""

    group: str
    names: str  # with a word for the value
    help: str
    first_hour: bool


def page(app: App, words: Sequence[str]) -> str | None:
    """Return the help page that these words request; None for an unknown command."""
    command = command_of([word for word in words if not word.startswith("-")])
    if command is not None:
        return "\n".join(_command_page(app, command, HELP_ALL in words))
    start = next((word for word in words if not word.startswith("-")), "")
    within = [c for c in COMMANDS if c.name.startswith(f"{start} ")]
    if start and not within:
        return None
    if within:
        return "\n".join([f"posttrain {start} COMMAND", "", *_listed(within), "", f"  posttrain {start} build --help"])
    return "\n".join(_all_commands() if words else _front_page())


def _width() -> int:
    return max(NARROWEST, min(WIDEST, get_terminal_size().columns))


# -- the front page ----------------------------------------------------------------------------------------------------


def _front_page() -> list[str]:
    by_name = {c.name: c for c in COMMANDS}
    return [
        "posttrain: post-training for language models",
        "",
        "Start with the files of a first run; the command prints what to type next:",
        "  posttrain init first",
        "",
        "Train and evaluate:",
        *_listed([by_name[name] for name in FIRST]),
        "",
        "Look into a run, while it goes on or later:",
        f"  {runnable('posttrain view runs/rl')}",
        "",
        "Help:",
        *beside("posttrain --help", "all commands", 24),
        *beside("posttrain rl --help", "the options of a first hour; --help-all: every option", 24),
        *beside("posttrain algorithms", "all algorithms, with their formulas", 24),
    ]


def _all_commands() -> list[str]:
    lines = ["posttrain COMMAND: post-training for language models"]
    for heading, title in HEADINGS.items():
        lines += ["", f"{title}:", *_listed([c for c in COMMANDS if c.heading == heading])]
    return [
        *lines,
        "",
        "Help on a command: posttrain rl --help; --help-all shows every option.",
        "Options may be in a recipe: posttrain rl --config recipe.toml --steps 100",
        "reads its table [rl]; the command line wins. Version: posttrain --version",
    ]


def _listed(commands: Sequence[Command]) -> list[str]:
    return [line for c in commands for line in beside(c.name, c.help, 18)]


def beside(name: str, text: str, left: int) -> list[str]:
    """Return the lines of a name and its text, in two columns."""
    lines = textwrap.wrap(text, _width() - left, break_long_words=False, break_on_hyphens=False)
    if len(name) + 3 > left or not lines:
        return [f"  {name}", *(" " * left + line for line in lines)]
    return [f"  {name}".ljust(left) + lines[0], *(" " * left + line for line in lines[1:])]


# -- the page of a command ---------------------------------------------------------------------------------------------


def _command_page(app: App, command: Command, whole: bool) -> list[str]:
    entries = entries_of(app, command)
    shown = [entry for entry in entries if whole or entry.first_hour]
    lines = [
        *textwrap.wrap(f"posttrain {command.name}: {command.help}", _width()),
        "",
        *_typed(f"posttrain {command.name} {command.example}"),
        "",
    ]
    for group in dict.fromkeys(entry.group for entry in shown):
        lines.append(f"{group.capitalize()}:")
        for entry in shown:
            if entry.group == group:
                lines += beside(entry.names, entry.help if whole else _SENTENCE.split(entry.help)[0], LEFT)
    hidden = len(entries) - len(shown)
    if hidden or (not whole and any(len(_SENTENCE.split(entry.help)) > 1 for entry in shown)):
        more = (
            f"shows {hidden} more option{'s'[: hidden - 1]}, and more about these"
            if hidden
            else "says more about these"
        )
        text = f"posttrain {command.name} --help-all {more}."
        lines += ["", *textwrap.wrap(text, _width())]
    return lines


def _typed(line: str) -> list[str]:
    """Return a command as typed, over several lines if it is long."""
    if len(line) + 2 <= _width():
        return [f"  {line}"]
    # keeps an option and its value together
    joined = re.sub(r"(?<= )(--?[\w-]+|>) (?=[^-\s])", "\\1\0", line)
    first, *rest = (
        part.replace("\0", " ")
        for part in textwrap.wrap(joined, _width() - 8, break_long_words=False, break_on_hyphens=False)
    )
    return " \\\n".join([f"  {first}", *(f"      {part}" for part in rest)]).split("\n")


def entries_of(app: App, command: Command) -> list[HelpEntry]:
    """Return the arguments and options of a command, sorted by group in the order of `GROUPS`."""
    from posttrain.config.option_groups import GROUPS, options_of

    for word in command.name.split():
        app = app[word]
    arguments = list(app.assemble_argument_collection(parse_docstring=True))
    kinds = [a.hint for a in arguments if isinstance(a.hint, type) and is_dataclass(a.hint)]
    declared = {option.name: option for kind in kinds for option in options_of(kind)}
    flags = VERBS[command.name].options.flags() if command.name in VERBS else {}
    found = []
    for argument in arguments:
        if argument.hint in kinds or not argument.show:
            continue
        name, text = argument.field_info.name, argument.parameter.help or ""
        if argument.field_info.is_positional:
            found.append(HelpEntry(ARGUMENTS, argument.name.lstrip("-").upper(), text, True))
        elif name in flags:
            found.append(_entry("algorithm", argument, flags[name].help, None, flags[name].first_hour))
        elif name in declared:
            own = declared[name]
            found.append(_entry(own.group, argument, own.help, own.default, own.first_hour, own.value))
        else:  # a parameter of the function itself
            group = "algorithm" if kinds else OPTIONS
            found.append(_entry(group, argument, text, argument.field_info.default, not kinds))
    if command.name in VERBS:
        found.append(HelpEntry("record", "--config FILE", RECIPE.format(verb=command.name), True))
    order = [ARGUMENTS, OPTIONS, *GROUPS]
    return sorted(found, key=lambda entry: (order.index(entry.group), not entry.first_hour))


RECIPE = "Read options from a TOML recipe: its table [{verb}]. The command line wins."


def _entry(group: str, argument: Argument, text: str, default: Any, first_hour: bool, value: str = "") -> HelpEntry:
    """Return an option's entry: its name with a word for the value, its text with choices and default in the first
    sentence.
    """
    hint, name = argument.hint, argument.names[0]
    kind = next((kind for kind in get_args(hint) if kind is not type(None)), hint) if _may_be_none(hint) else hint
    more = []
    if kind is bool:
        name = ", ".join(argument.names if default is True else argument.names[:1])
    elif get_origin(kind) is Literal:
        choices = list(map(str, get_args(kind)))
        short = "|".join(choices)
        name += f" {short}" if len(short) <= LONGEST_CHOICE else " CHOICE"
        more += [] if len(short) <= LONGEST_CHOICE else [f"one of {', '.join(choices)}"]
    elif get_origin(kind) is dict:
        inner = ".NAME.SETTING" if get_origin(get_args(kind)[1]) is dict else ".NAME"
        name += f"{inner} {value or 'VALUE'}"
    else:
        name += f" {_word(kind, value)}"
    if isinstance(default, int | float | str | tuple) and not isinstance(default, bool) and default not in ("", ()):
        values = map(str, default if isinstance(default, tuple) else (default,))
        more.append(f"default: {' '.join(values).replace('e-0', 'e-')}")
    return HelpEntry(group, name, _with(text, "; ".join(more)), first_hour)


def _with(text: str, more: str) -> str:
    """Return the text with `more` in brackets at the end of its first sentence, or in the brackets that are there."""
    if not more:
        return text
    first, *rest = _SENTENCE.split(text, maxsplit=1)
    first = first if first.endswith("...") else first.rstrip(".")
    return " ".join([f"{first[:-1]}; {more})." if first.endswith(")") else f"{first} ({more}).", *rest])


def _may_be_none(hint: Any) -> bool:
    return type(None) in get_args(hint)


def _word(kind: Any, value: str) -> str:
    """Return a word for values of this type."""
    if get_origin(kind) not in (tuple, list):
        return value or WORDS.get(kind, "VALUE")
    inner = get_args(kind)
    if len(inner) == 1 or inner[-1] is Ellipsis:
        return value or f"{WORDS.get(inner[0], 'VALUE')} ..."
    return " ".join([value or WORDS.get(inner[0], "VALUE")] * len(inner))
