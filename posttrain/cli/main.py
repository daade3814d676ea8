"""The command `posttrain`: its verbs, recipes and exit codes. What a verb does stands in `verbs`, imported on demand.

Exit codes: 0 done, 1 our own mistake (with a traceback), 2 the user's (one line), 3 stopped by the health check (and
saved), 130 interrupted (and saved).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, get_origin

from cyclopts import App
from cyclopts.exceptions import CoercionError, CycloptsError, UnknownOptionError

from posttrain import __version__
from posttrain.types import UserError

app = App(
    name="posttrain",
    help="Post-training for language models: supervised fine-tuning, reinforcement learning, evaluation.\n\n"
    "Options may stand in a recipe: posttrain rl --config recipe.toml --steps 100 takes them from its table [rl], "
    "and what is on the command line wins.",
    help_format="plaintext",
    version=__version__,
    help_flags=["--help", "-h"],
    suppress_keyboard_interrupt=False,  # it is told below
)
for _name, _function, _help in (
    ("sft", "sft", "Supervised fine-tuning: imitate the responses of a dataset."),
    ("rl", "rl", "Reinforcement learning from a reward function, a verifier or an environment."),
    ("eval", "evaluate", "Mean reward, accuracy and pass@k on a set of tasks; --against compares two checkpoints."),
    ("chat", "chat", "Talk to a checkpoint (to one without a chat template: give it text to continue)."),
    ("algorithms", "algorithms", "The table of algorithms, or one of them in plain mathematics."),
    ("check", "check", "Run a reward or an environment against sample replies, before any training."),
    ("reproduce", "reproduce", "Test what a paper claims in a small experiment: table, plot, verdict with intervals."),
):
    app.command(f"posttrain.cli.commands:{_function}", name=_name, help=_help, help_format="markdown")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        result = app(_recipe(words), exit_on_error=False, print_error=False, result_action="return_value")
        return result if isinstance(result, int) else 0
    except (UserError, CycloptsError) as error:
        said = " ".join(str(error).split())
        if isinstance(error, UnknownOptionError) and error.token is not None and words:
            said = f"unknown option {error.token.keyword}{_suggested(str(error.token.keyword), words[0])}"
        if isinstance(error, CoercionError) and get_origin(error.target_type) is dict and error.token is not None:
            said += f" Name one entry at a time: {error.token.keyword}.NAME VALUE"
        print("posttrain:", said, file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read what we print has seen enough, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail again
        return 0
    except KeyboardInterrupt:
        print("posttrain: stopped", file=sys.stderr)
        return 130


def entry() -> None:
    sys.exit(main())


def _recipe(arguments: list[str]) -> list[str]:
    """Take `--config FILE` out of the arguments and make the file's table of the verb its defaults."""
    app.config = ()
    for place, word in enumerate(arguments):
        name, equals, path = word.partition("=")
        if name == "--config":
            rest = arguments[place + 1 :]
            if not equals:
                path, rest = (rest[0], rest[1:]) if rest else ("", [])
            if not path:
                raise UserError("--config needs a file: --config recipe.toml")
            _take_defaults(Path(path), arguments[0])
            return arguments[:place] + rest
    return arguments


def _take_defaults(file: Path, verb: str) -> None:
    from cyclopts.config import Dict

    from posttrain.config import VERBS

    if verb not in VERBS:
        raise UserError(f"--config goes with {', '.join(VERBS)}: posttrain rl --config recipe.toml")
    content = _read_recipe(file)
    if verb not in content:
        raise UserError(f"{file} has no table [{verb}]; it has {', '.join(f'[{t}]' for t in content) or 'none'}")
    options = dict(content[verb])
    if settings := options.pop("settings", None):
        options["set"] = [f"{place}={value}" for place, value in settings.items()]
    app.config = (Dict({verb: options}, source=str(file)),)


def _read_recipe(file: Path) -> dict[str, Any]:
    import tomllib

    from posttrain.config import VERBS

    if not file.is_file():
        raise UserError(f"--config {file}: there is no such file")
    try:
        content = tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not valid TOML: {error}") from error
    for table, options in content.items():
        if table not in VERBS or not isinstance(options, dict):
            raise UserError(
                f"{file}: [{table}] is no table of a recipe; there are {', '.join(f'[{v}]' for v in VERBS)}"
            )
        for name in options:
            if name.replace("-", "_") not in _known(table):
                raise UserError(f"{file}: [{table}] has an unknown option {name!r}{_suggested(name, table)}")
        if not isinstance(options.get("settings", {}), dict):
            raise UserError(f'{file}: settings are a table: [{table}.settings], then "surrogate.high" = 0.28')
    return content


def _known(verb: str) -> list[str]:
    """The names of all options of a verb that takes a configuration."""
    from dataclasses import fields

    from posttrain.algorithms.settings import flags
    from posttrain.config import VERBS

    own = [f.name for f in fields(VERBS[verb])]
    return [*own, *flags()] if "settings" in own else own


def _suggested(word: str, verb: str) -> str:
    from posttrain.config import VERBS
    from posttrain.names import suggestion

    return (suggestion(word, _known(verb)) if verb in VERBS else "") or f": see posttrain {verb} --help"


if __name__ == "__main__":
    entry()
