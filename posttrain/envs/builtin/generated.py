"""Support for modules that generate tasks: the held-out split, and the command that writes tasks as rows.

The hash of a question decides whether it is a training or a held-out task, so the two parts never overlap, whatever the
seeds.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from hashlib import sha256
from typing import Any, NoReturn

from posttrain.core.messages import dashed
from posttrain.core.types import Task, UserError

HELD_OUT = 0.1  # share of all possible questions
FRUITLESS = 1000  # consecutive draws without a new question after which none is left


def is_held_out(question: str) -> bool:
    """Return whether a question is one that no training task has."""
    return int.from_bytes(sha256(question.encode()).digest()[:4], "big") < HELD_OUT * 2**32


def distinct(draws: Iterator[Task], count: int, held_out: bool) -> list[Task]:
    """Return the first `count` tasks of an endless iterator with distinct ids, all held out or none of them.

    Raises UserError if there seem to be too few.
    """
    found: dict[str, Task] = {}
    fruitless = 0
    while len(found) < count:
        task = next(draws)
        fruitless += 1
        if task["id"] not in found and is_held_out(task["id"]) == held_out:
            found[task["id"]] = task
            fruitless = 0
        elif fruitless > FRUITLESS:
            raise UserError(f"only {len(found)} such tasks were found: ask for fewer than {count}, or for larger ones")
    return list(found.values())


def read_json(text: str, option: str, what: str) -> dict[str, Any]:
    """Return the JSON object in the text of an option, {} for none. `what`: what it holds, with an example."""
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise UserError(f"{option} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{option} must be a JSON object of {what}")
    return found


def write(tasks: Callable[..., Sequence[Task]], words: Sequence[str] | None = None) -> None:
    """Run the command line of a module of tasks: arguments of `tasks` are options, and rows of JSON go to standard
    output.

    `words`: the command line's arguments; default: those of the process.
    """
    asked = vars(_parser(tasks).parse_args(words))
    if asked["count"] < 1:
        _refuse("--count must be 1 or more")
    try:
        with redirect_stdout(sys.stderr):  # libraries print
            rows = tasks(**asked)
    except UserError as error:
        _refuse(str(error))
    for row in rows:
        print(json.dumps(row, ensure_ascii=False))


def _parser(tasks: Callable[..., Any]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(inspect.getdoc(tasks) or "").partition("\n\n")[0])
    parser.add_argument("--count", type=int, default=1000, help="of rows (1000)")
    parser.add_argument("--seed", type=int, default=0, help="other rows for another one (0)")
    for name, parameter in inspect.signature(tasks).parameters.items():
        if name in ("count", "seed"):
            continue
        option, default = dashed(name), parameter.default
        if parameter.default is inspect.Parameter.empty:
            parser.add_argument(name)
        elif isinstance(default, bool):
            parser.add_argument(option, action="store_true")
        else:
            parser.add_argument(option, type=type(default), default=default, help=f"({default})")
    return parser


def _refuse(reason: str) -> NoReturn:
    print(f"error: {reason}", file=sys.stderr)
    raise SystemExit(2)
