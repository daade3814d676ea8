"""The file of a suite: which evaluations it consists of.

A suite is a TOML file. Every table is a part, with options of `posttrain eval` as keys; keys before the first table are
options of all parts. `out_of_distribution = true` marks a part that differs from the model's training data.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, get_origin, get_type_hints

from posttrain.config.inference import Evaluation
from posttrain.config.resolve import filled, validate
from posttrain.core import user_files
from posttrain.core.messages import dashed, toml_problem
from posttrain.core.types import UserError

OF_THE_SUITE = ("suite", "model", "against", "harness", "out", "overwrite", "inspect_log")
"""Options of the whole suite, which a part may not set."""
MARK = "out_of_distribution"
PARTS = 1000  # most parts of a suite


@dataclass(frozen=True)
class Part:
    """A part of a suite."""

    name: str
    config: Evaluation
    out_of_distribution: bool = False

    @contextmanager
    def named(self) -> Iterator[None]:
        """Context manager in which a user's mistake is one of this part."""
        try:
            yield
        except UserError as error:
            raise UserError(f"[{self.name}] {error}") from None


def suite_of(config: Evaluation) -> list[Part]:
    """Read the parts of `config.suite`, with the options given.

    Raises UserError as `read_suite` does, and for options that do not go with a suite.
    """
    assert config.suite is not None
    given = {name: getattr(config, name) for name in config.given if name not in OF_THE_SUITE}
    if config.harness is not None:
        raise UserError("--harness does not go with --suite: give it in a command of its own")
    if "tasks" in given:
        raise UserError("--tasks does not go with --suite, whose parts name their own tasks: leave it out")
    return read_suite(config.suite, given | {"model": config.model, "against": config.against})


def read_suite(file: str, given: Mapping[str, Any], option: str = "--suite") -> list[Part]:
    """Read the parts of a suite. `given`: options of the command line, which override those of the file;
    `option`: the one that names the file.

    Raises UserError for a file that cannot be read, and for unknown or invalid options.
    """
    try:
        content = tomllib.loads(user_files.text(file))
    except OSError as error:
        raise UserError(f"{option} {file:.100} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{option} {file:.100} is not valid TOML: {toml_problem(error)}") from None
    for name, own in content.items():
        if isinstance(own, list) and any(isinstance(each, dict) for each in own):
            raise UserError(f"{option} {file:.100}: [[{name:.60}]] is a list of tables: write [{name:.60}] for a part")
    options = {f.name for f in fields(Evaluation) if get_origin(get_type_hints(Evaluation)[f.name]) is dict}
    tables = {
        name: own for name, own in content.items() if isinstance(own, dict) and name.replace("-", "_") not in options
    }
    common = {name: own for name, own in content.items() if name not in tables}
    if not tables:
        raise UserError(
            f"{option} {file:.100} has no part: write one table for each, such as [arithmetic] with tasks and env"
        )
    if len(tables) > PARTS:
        raise UserError(
            f"{option} {file:.100} has {len(tables):,} parts, and the maximum is {PARTS:,}: split it into several files"
        )
    return [_part(f"{file:.100}: ", name, {**common, **own}, given) for name, own in tables.items()]


def _part(where: str, name: str, options: dict[str, Any], given: Mapping[str, Any]) -> Part:
    if not re.fullmatch(r"[\w-]{1,60}", name):
        raise UserError(
            f"{where}[{name:.60}] must be a name of letters, digits, _ and -: it becomes part of file names"
        )
    if name == "mean":
        raise UserError(f"{where}[mean] has the name of the mean over parts: choose another name")
    where = f"{where}[{name}] "
    options = {key.replace("-", "_"): value for key, value in options.items()}
    marked = options.pop(MARK, False)
    if not isinstance(marked, bool):
        raise UserError(f"{where}{MARK} must be true or false, not {marked!r:.40}")
    if wrong := next((key for key in OF_THE_SUITE if key in options), None):
        raise UserError(f"{where}{wrong} belongs to the whole suite: give {dashed(wrong)} on the command line")
    config = filled(Evaluation, {**options, **given}, where)
    try:
        validate(config)
    except UserError as error:
        raise UserError(f"{where}{error}") from None
    return Part(name, config, marked)
