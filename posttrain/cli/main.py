"""The command `posttrain`: its verbs, recipes and exit codes. The verbs are implemented in `commands`, imported on
demand.

Exit codes: 0 done, 1 our own mistake (with a traceback), 2 the user's (one line), 3 stopped by the health check (and
saved), 130 interrupted by Ctrl-C, SIGTERM or SIGHUP (and saved).
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import signal
import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO, cast, get_args, get_type_hints

from cyclopts import App
from cyclopts.exceptions import CycloptsError

from posttrain import __version__
from posttrain.cli.argument_errors import explanation, hint, no_command, option_names
from posttrain.cli.command_table import COMMANDS, command_of, is_heading
from posttrain.config.verbs import VERBS, load, sampling, training
from posttrain.core import user_files
from posttrain.core.messages import safe, toml_problem
from posttrain.core.progress import doing, watch
from posttrain.core.types import UserError
from posttrain.system import garbage

if TYPE_CHECKING:
    from posttrain.runs.terminal.live_region import Passing
    from posttrain.runs.terminal.output import Output

LONGEST = 450  # most characters of a message
BY_NAME = {
    "--chat-template-kwargs": "enable_thinking=false",
    "--optimizer-options": "momentum=0.95",
    "--role-devices": "reference=1",
}
"""Options that take KEY=VALUE, and an example of each."""
TEMPLATES = ("--prompt-template", "--response-template", "--teacher-prompt-template")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "{": "{{", "}": "}}"}
"""Escapes after a backslash in a template on the command line; any other backslash is literal."""
_FRACTION = re.compile(r"[+-]?\d*\.\d+(e[+-]?\d+)?|[+-]?\d+\.\d*", re.IGNORECASE)
_ESCAPE = re.compile(r"\\([ntr\\{}])")

app = App(
    name="posttrain",
    version=__version__,
    help_flags=[],  # `help_pages` prints help
    suppress_keyboard_interrupt=False,  # handled below
)
for _command in COMMANDS:
    _app, (*_above, _name) = app, _command.name.split()
    for _word in _above:
        if _word not in _app:
            _app.command(App(name=_word, help_flags=[]))
        _app = _app[_word]
    _app.command(f"posttrain.cli.{_command.function}", name=_name, help=_command.help)

_asked_to_stop = False  # whether a signal has requested the end


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    try:
        if (text := _help(words)) is not None:
            print(text)
            return 0
        result = app(
            prepared(words),
            exit_on_error=False,
            print_error=False,
            result_action="return_value",
        )
        return result if isinstance(result, int) else 0
    except (UserError, CycloptsError) as error:
        said = explanation(error, words)
        from posttrain.runs.terminal.output import Output, columns, wrapped

        # of several processes in a run, only the first prints messages, unless it cannot know of one
        if os.environ.get("RANK", "0") == "0" or getattr(error, "unheard", False):
            print(wrapped(f"posttrain: {_presentable(said)}", columns(Output(sys.stderr))), file=sys.stderr)
        return error.code if isinstance(error, UserError) else 2
    except KeyboardInterrupt:
        return _stopped()
    except Exception:
        if not _asked_to_stop:
            raise
        return _stopped()  # Ctrl-C during an import may raise any exception
    except SystemExit as error:  # only other libraries raise it
        print(
            f"posttrain: your code ended the process (sys.exit({error.code!r})): let it return instead", file=sys.stderr
        )
        return 2


def _help(words: list[str]) -> str | None:
    """Return the help page that these words request; None if they request none, or that of an unknown command."""
    own = words[: words.index("--")] if "--" in words else words
    if own and not {"--help", "-h", "--help-all"} & set(own) and not is_heading(own):
        return None
    from posttrain.cli import help_pages

    return help_pages.page(app, own)


def prepared(words: list[str]) -> list[str]:
    """Return the words with recipes, numbers and escapes processed. Words after -- belong to another command."""
    end = words.index("--") if "--" in words else len(words)
    own = _recipe(_unescaped(_refuse_fractions(_by_name(words[:end]))))
    return [*_tables_of_parts(own), *words[end:]]


def _stop(number: int, frame: FrameType | None) -> None:
    """Handle a signal before or after training."""
    global _asked_to_stop
    _asked_to_stop = True
    raise KeyboardInterrupt


def _stopped() -> int:
    print("posttrain: stopped", file=sys.stderr)
    return 130


def _presentable(said: str) -> str:
    """Return the message, which may quote the user's text, in characters that any encoding can print."""
    said = safe(said.encode("utf-8", "backslashreplace").decode())
    return said if len(said) <= LONGEST else f"{said[: LONGEST * 2 // 3]} ... {said[-LONGEST // 3 :]}"


def entry() -> None:
    """Run the command as a process. Closed or full streams, and those of a narrow encoding, never end a run."""
    garbage.search_seldom()
    out = _prepare_streams()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # training installs its own handlers
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _stop)
    passing = _watched(out)
    code = main()
    watch(None)
    if passing is not None:
        passing.erase()
    out.flush()
    lost = getattr(out.lost, "errno", None)
    if lost is not None and lost not in (errno.EPIPE, errno.EIO):  # not if the reader closed the stream
        print(f"posttrain: standard output could not be written: {os.strerror(lost)}", file=sys.stderr)
        # a run's folder has all of its output too
        code = code or (0 if sys.argv[1:2] and sys.argv[1] in training() else 2)
    sys.stderr.flush()
    sys.exit(code)


def _prepare_streams() -> Output:
    """Replace standard output and standard error by streams that never fail; return the first."""
    from posttrain.runs.terminal.output import Output

    for descriptor in range(3):  # otherwise output would go into a file opened under the number of a closed stream
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    out, told = Output(sys.stdout), Output(sys.stderr)
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, told)
    return out


def _watched(out: Output) -> Passing | None:
    """Show the current activity: in a temporary line if standard error is a terminal, else in a line now and then."""
    from posttrain.runs.terminal.live_region import Passing, Reports
    from posttrain.runs.terminal.output import fancy

    told = cast("Output", sys.stderr)
    if "--quiet" in sys.argv or os.environ.get("RANK", "0") != "0":
        return None
    if not fancy(told):
        watch(Reports(told).show)
        return None
    passing = Passing(told, [out] if out.isatty() else [])
    watch(passing.show)
    doing("loading libraries")
    return passing


def _recipe(arguments: list[str]) -> list[str]:
    """Remove `--config FILE` from the arguments, and make the verb's table in that file the defaults."""
    app.config = ()
    for place, word in enumerate(arguments):
        name, equals, path = word.partition("=")
        if name == "--config":
            rest = arguments[place + 1 :]
            if not equals:
                path, rest = (rest[0], rest[1:]) if rest else ("", [])
            if not path:
                raise UserError("--config needs a file: --config recipe.toml")
            words = arguments[:place] + rest
            return _take_defaults(Path(path), arguments[0], words)
    return arguments


def _by_name(arguments: list[str]) -> list[str]:
    """Return the arguments with each KEY=VALUE as an option: --chat-template-kwargs.KEY=VALUE."""
    read: list[str] = []
    within = ""  # the option to which the words belong
    for word, after in zip(arguments, [*arguments[1:], "--"], strict=True):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            within = plain if (plain := name.replace("_", "-")) in BY_NAME else ""
            if within and not equals and not after.startswith("--"):
                continue
            word = value if within else word
        if within and not word.startswith("{"):
            name, equals, value = word.partition("=")
            if not (name and equals):
                given = f"{within} {word:.60}".strip()
                raise UserError(f"{given}: write {within} KEY=VALUE, such as {within} {BY_NAME[within]}")
            word = f"{within}.{name}={value}"
        elif within:  # a JSON table, as in other trainers
            word = f"{within}={word}"
        read.append(word)
    return read


def _refuse_fractions(arguments: list[str]) -> list[str]:
    """Return the arguments. Raises UserError if an integer is written as a fraction, which would be rounded."""
    if not any(_FRACTION.search(word) for word in arguments):
        return arguments
    whole = _whole_numbers(arguments[0])
    for before, word in pairwise(["", *arguments]):
        name, equals, value = word.partition("=")
        name, value = (name, value) if equals and name.startswith("--") else (before, word)
        if name.startswith("--") and name[2:].replace("-", "_") in whole and _FRACTION.fullmatch(value):
            raise UserError(f"{name} is a whole number, not {value}")
    return arguments


def _whole_numbers(verb: str) -> frozenset[str]:
    """Return the options of a verb that are integers."""
    kinds: dict[str, Any] = {}
    for command in COMMANDS:
        if command.options and verb in (command.name, command.name.split()[0]):
            kinds |= get_type_hints(load(command.options))
    if verb in VERBS:
        kinds |= {name: flag.type for name, flag in VERBS[verb].options.flags().items()}
    return frozenset(name for name, kind in kinds.items() if kind is int or int in get_args(kind))


def _unescaped(arguments: list[str]) -> list[str]:
    """Replace \\n and other escapes in templates: a shell keeps them, unlike recipes and Python."""
    read: list[str] = []
    for before, word in pairwise(["", *arguments]):
        name, equals, value = word.partition("=")
        if _is_template(name) and equals:
            word = f"{name}={_ESCAPE.sub(lambda found: ESCAPES[found[1]], value)}"
        elif _is_template(before):
            word = _ESCAPE.sub(lambda found: ESCAPES[found[1]], word)
        read.append(word)
    return read


def _is_template(name: str) -> bool:
    """Return whether an option is a template, for the run or for a part of a mixture."""
    if name.startswith("--mixture."):
        name = f"--{name.rpartition('.')[2]}"
    return name.replace("_", "-") in TEMPLATES


def _take_defaults(file: Path, verb: str, words: list[str]) -> list[str]:
    """Make the verb's table of a recipe the defaults. Return the words, with the rest of the tables that they change."""
    from cyclopts.config import Dict

    if command_of([verb]) is None and not is_heading([verb]):
        raise UserError(no_command(verb))
    if verb not in VERBS:
        raise UserError(f"--config works only with {', '.join(VERBS)}: posttrain rl --config recipe.toml")
    content = _read_recipe(file)
    trained = [name for name in sampling() if name in content] if verb in _OF_TRAINING else []
    if verb not in content and len(trained) != 1:
        raise UserError(f"{file} has no table [{verb}]; it has {', '.join(f'[{t:.60}]' for t in content) or 'none'}")
    read = _OF_TRAINING.get(verb)
    options = dict(content[verb]) if verb in content or not read else read(file, trained[0], content[trained[0]], words)
    if hasattr(VERBS[verb].options, "epochs"):  # it trains in passes, whose number either option gives
        for given, other in (("steps", "epochs"), ("epochs", "steps")):
            if given in _given(words):
                options.pop(other, None)
    if settings := options.pop("settings", None):
        options["set"] = [f"{place}={value}" for place, value in settings.items()]
    nested = [name for name in ("kinds", "mixture") if isinstance(options.get(name), dict)]
    for name in nested:
        if dotted := next((part for part in options[name] if "." in part), None):
            raise UserError(f"{file}: [{verb}.{name}] has the name {dotted!r:.60}: write it without a dot")
    words = [*words, *_rest_of_tables(options, words)]
    for name in options.keys() & nested:
        options[name] = {kind: _as_words(own) for kind, own in options[name].items()}
    app.config = (Dict({verb: options}, source=str(file)),)
    return words


def _rest_of_tables(options: dict[str, Any], words: list[str]) -> list[str]:
    """Remove the tables of a recipe in which these words set entries, and return their other entries as words: the
    command line replaces an entry, not its table.
    """
    given = {_plain(word.partition("=")[0]) for word in words if word.startswith("--")}
    settings = {word.removeprefix("--set=").partition("=")[0].strip() for word in words}  # --set NAME=VALUE
    rest: list[str] = []
    for name, table in list(options.items()):
        if name == "set" and "--set" in given:
            rest += [f"--set={one}" for one in options.pop(name) if one.partition("=")[0].strip() not in settings]
        elif isinstance(table, dict) and any(word.startswith(f"{_plain(f'--{name}')}.") for word in given):
            entries = _entries(options.pop(name), f"--{name.replace('_', '-')}")
            rest += [f"{entry}={value}" for entry, value in entries.items() if _plain(entry) not in given]
    return rest


def _tables_of_parts(words: list[str]) -> list[str]:
    """Return the words with the entries of a part's table, as --mixture.PART.fields.NAME COLUMN, in one as JSON."""
    tables: dict[str, dict[str, str]] = {}
    rest: list[str] = []
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        option, *inner = name.split(".", 3)
        if option == "--mixture" and len(inner) == 3:
            tables.setdefault(".".join([option, *inner[:2]]), {})[inner[2]] = value if equals else next(left, "")
        else:
            rest.append(word)
    return [*rest, *(f"{name}={json.dumps(table)}" for name, table in tables.items())]


def _entries(table: dict[str, Any], name: str) -> dict[str, Any]:
    """Return option -> value, for all values of a table and of the tables in it."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _entries(value, f"{name}.{key}") if isinstance(value, dict) else {f"{name}.{key}": _as_word(value)}
    return found


def _plain(option: str) -> str:
    """Return the name of an option in one spelling: words within its first and its last name may be joined by - or _."""
    first, *inner = option.split(".")
    if not inner:
        return first.replace("_", "-")
    return ".".join([first.replace("_", "-"), *inner[:-1], inner[-1].replace("_", "-")])


def _as_trained(file: Path, verb: str, table: dict[str, Any], words: list[str]) -> dict[str, Any]:
    """Return options of eval for what the table of `verb` trains: its run, or the model that it starts from before it has
    run.
    """
    from posttrain.runs.run_reading import run_of
    from posttrain.runs.terminal.notices import tell
    from posttrain.runs.trained_options import evaluation_options

    options = {name.replace("-", "_"): value for name, value in table.items()}
    given = _given(words)
    where = f"[{verb}] of {file}"
    out = str(options.get("out", VERBS[verb].options.out))
    if "model" not in given and run_of(Path(out)) is not None:
        tell(f"evaluating {out}, the run of {where}")
        return {"model": out}
    found = evaluation_options(options, given, where)
    model = {} if "model" in given else {"model": options.get("model", "")}
    tell(f"taken from {where}: {', '.join([*model, *found])}")
    return {**model, **found}


def _as_checked(file: Path, verb: str, table: dict[str, Any], words: list[str]) -> dict[str, Any]:
    """Return options of check for the rows and the environment that the table of `verb` trains with."""
    from posttrain.runs.terminal.notices import tell

    known = {own.name for own in dataclasses.fields(VERBS["check"].options)} - {"limit"}  # there of all rows
    found = {name.replace("-", "_"): value for name, value in table.items()}
    found = {name: value for name, value in found.items() if name in known - _given(words).keys()}
    tell(f"taken from [{verb}] of {file}: {', '.join(found)}")
    return found


_OF_TRAINING = {"eval": _as_trained, "check": _as_checked}
"""Verb -> its options where a recipe has the table of a training instead of its own."""


def _given(words: list[str]) -> dict[str, str]:
    """Return the options among these words, by field, each with the word after it."""
    return {
        word[2:].partition("=")[0].partition(".")[0].removeprefix("no-").replace("-", "_"): word.partition("=")[2]
        or after
        for word, after in zip(words, [*words[1:], ""], strict=True)
        if word.startswith("--")
    }


def _as_words(own: Any) -> Any:
    """Return a settings value as the command line writes it: several values with commas between them."""
    if not isinstance(own, dict):
        return own
    return {name: _as_word(value) for name, value in own.items()}


def _as_word(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _read_recipe(file: Path) -> dict[str, Any]:
    import tomllib

    from posttrain.core.coerce import has_wide_integer

    try:
        content = tomllib.loads(user_files.text(file))
    except FileNotFoundError:
        raise UserError(f"--config {file}: there is no such file") from None
    except OSError as error:
        raise UserError(f"--config {str(file)[:100]} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, a number of thousands of digits, too deep
        raise UserError(f"{file}: not valid TOML: {toml_problem(error)}") from error
    for table, options in content.items():
        if table not in VERBS or not isinstance(options, dict):
            raise UserError(
                f"{file}: [{table:.60}] is not a table of a recipe; there are {', '.join(f'[{v}]' for v in VERBS)}"
            )
        whole = _whole_numbers(table)
        for name in options:
            if has_wide_integer(options[name]):
                raise UserError(f"{file}: [{table}] {name:.60} has an integer of more than 64 bits: correct it")
            if name.replace("-", "_") in whole and isinstance(options[name], float):
                raise UserError(f"{file}: [{table}] {name} is a whole number, not {options[name]:g}")
            if name.replace("-", "_") not in option_names(table):
                raise UserError(f"{file}: [{table}] has an unknown option {name!r:.60}{hint(name, table)}")
        if not isinstance(options.get("settings", {}), dict):
            raise UserError(f'{file}: settings are a table: [{table}.settings], then "surrogate.high" = 0.28')
    return content


if __name__ == "__main__":
    entry()
