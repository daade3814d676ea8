"""Suites: one evaluation over several task files and environments, with averages over its parts.

A suite is a TOML file. Every table is a part, with options of `posttrain eval` as keys; keys before the first table are
options of all parts. `out_of_distribution = true` marks a part that differs from the model's training data.
"""

from __future__ import annotations

import re
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import sqrt
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import numpy as np

from posttrain.config.inference import Evaluation
from posttrain.config.resolve import filled, validate
from posttrain.core import user_files
from posttrain.core.intervals import Interval, stated
from posttrain.core.json_text import json_document
from posttrain.core.types import Invalid, Rollout, UserError
from posttrain.training.comparisons import with_verdicts
from posttrain.training.verbs import evaluate
from posttrain.training.verbs.evaluate import Evaluated

OF_THE_SUITE = ("suite", "model", "against", "out")
"""Options of the whole suite, which a part may not set."""
MARK = "out_of_distribution"
PARTS = 1000  # most parts of a suite


@dataclass(frozen=True)
class Part:
    """A part of a suite."""

    name: str
    config: Evaluation
    out_of_distribution: bool = False


@dataclass(frozen=True)
class EvaluatedSuite:
    """The result of a suite."""

    parts: dict[str, dict[str, Any]]
    """For each part: "in_distribution", "figures" as `Evaluated` has them, "rates" (see `rates`), "seconds", and with
    other models "against": a list of their `Comparison` as JSON data, with "rates". The p of each is corrected for the
    comparisons of all parts."""
    averages: dict[str, dict[str, Any]]
    """"all", and where there are both "in distribution" and "out of distribution": the mean over parts of their accuracy, or
    of their reward where a part has no threshold; with other models "against", a list of "model", "figures" and
    "difference"."""
    evaluated: dict[str, Evaluated]
    """For each part, everything: rollouts too."""


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
        raise UserError(f"{option} {file:.100} is not valid TOML: {error}") from None
    options = {f.name for f in fields(Evaluation) if get_origin(get_type_hints(Evaluation)[f.name]) is dict}
    tables = {name: own for name, own in content.items() if isinstance(own, dict) and name not in options}
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
    where = f"{where}[{name}] "
    options = {key.replace("-", "_"): value for key, value in options.items()}
    marked = options.pop(MARK, False)
    if not isinstance(marked, bool):
        raise UserError(f"{where}{MARK} must be true or false, not {marked!r:.40}")
    if wrong := next((key for key in OF_THE_SUITE if key in options), None):
        raise UserError(f"{where}{wrong} belongs to the whole suite: give --{wrong} on the command line")
    config = filled(Evaluation, {**options, **given}, where)
    try:
        validate(config)
    except UserError as error:
        raise UserError(f"{where}{error}") from None
    return Part(name, config, marked)


def evaluate_suite(
    config: Evaluation, say: Callable[[str, Evaluated], None] = lambda name, found: None
) -> EvaluatedSuite:
    """Evaluate a model, and those it is compared with, on every part of `config.suite`; call `say` after each part.

    With `config.out`, figures and rollouts of each part are written beside it as soon as the part is done, and the
    whole result at the end. Raises UserError before anything is sampled if the suite cannot be read, and for a part's
    mistakes.
    """
    assert config.suite is not None
    given = {name: getattr(config, name) for name in config.given if name not in OF_THE_SUITE}
    if "tasks" in given:
        raise UserError("--tasks does not go with --suite, whose parts name their own tasks: leave it out")
    parts = read_suite(config.suite, given | {"model": config.model, "against": config.against})
    told: dict[str, dict[str, Any]] = {}
    evaluated: dict[str, Evaluated] = {}
    for part in parts:
        began = time.perf_counter()
        try:
            found = evaluate.evaluate(part.config)
        except UserError as error:
            raise UserError(f"[{part.name}] {error}") from None
        told[part.name] = _told(part, found) | {"seconds": time.perf_counter() - began}
        evaluated[part.name] = found
        if config.out:
            evaluate.save(found, beside(Path(config.out), part.name))
        say(part.name, found)
    _with_verdicts(told)
    result = EvaluatedSuite(told, _averages(told), evaluated)
    if config.out:
        content = {"model": config.model, "against": config.against, "averages": result.averages, "parts": told}
        try:
            user_files.writable(Path(config.out)).write_bytes(json_document(content))
        except OSError as error:
            raise UserError(f"--out {config.out} cannot be written: {error.strerror}") from error
    return result


def beside(out: Path, part: str) -> Path:
    """Return the file for a part's own figures and rewards."""
    return out.with_name(f"{out.stem}.{part}.json")


def headline(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figure of a part that averages use: accuracy, or reward if no success threshold exists."""
    found: dict[str, Any] = figures.get("accuracy", figures["reward"])
    return found


def rates(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return rates of these rollouts, and means per rollout.

    "invalid", "truncated": shares of all rollouts. "tokens": mean number sampled. "part/NAME": mean of a named part of
    the reward, over the rollouts that have it. "total_tokens": sum of sampled tokens.
    """
    sampled = [rollout.n_sampled for rollout in rollouts]
    found = {
        "invalid": float(np.mean([isinstance(rollout.reward, Invalid) for rollout in rollouts])),
        "truncated": float(np.mean([rollout.stop.truncated for rollout in rollouts])),
        "tokens": float(np.mean(sampled)),
        "total_tokens": float(sum(sampled)),
    }
    for name in sorted({name for rollout in rollouts for name in rollout.rewards}):
        found[f"part/{name}"] = float(np.mean([r.rewards[name] for r in rollouts if name in r.rewards]))
    return found


def _told(part: Part, found: Evaluated) -> dict[str, Any]:
    told = {"in_distribution": not part.out_of_distribution, "figures": found.figures, "rates": rates(found.rollouts)}
    if not found.against:
        return told
    others = [one.as_dict() | {"rates": rates(one.rollouts)} for one in found.against]
    return told | {"against": others}


def _with_verdicts(parts: Mapping[str, dict[str, Any]]) -> None:
    """Correct the p of every comparison for those of all parts and models together, as all are read together."""
    every = [one for part in parts.values() for one in part.get("against", ())]
    for one, wins in zip(every, with_verdicts([one["wins"] for one in every]), strict=True):
        one["wins"] = wins


def _averages(parts: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the means over parts: over all, and over each kind of parts."""
    kinds = {
        "all": list(parts.values()),
        "in distribution": [part for part in parts.values() if part["in_distribution"]],
        "out of distribution": [part for part in parts.values() if not part["in_distribution"]],
    }
    if not kinds["in distribution"] or not kinds["out of distribution"]:
        kinds = {"all": kinds["all"]}
    return {name: _average(own) for name, own in kinds.items()}


def _average(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found = macro_average([headline(part["figures"]) for part in parts])
    if all("against" in part for part in parts):
        found["against"] = [_of_other(others) for others in zip(*(part["against"] for part in parts), strict=True)]
    return found


def _of_other(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the means over parts of another model, and of the differences from it."""
    difference = macro_average([headline(part["differences"]) for part in parts])
    figures = macro_average([headline(part["figures"]) for part in parts])
    return {"model": parts[0]["model"], "figures": figures, "difference": difference}


def macro_average(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of these figures, each counted once, with its interval.

    The parts are fixed and their tasks are drawn, so the squared distances from mean to limit add up: the method of
    variance estimates recovery (Zou and Donner 2008, Statistics in Medicine 27:1693, eq. 2), which preserves asymmetric
    intervals. There is no interval unless every part has one.
    """
    mean = sum(figure["mean"] for figure in figures) / len(figures)
    if without := [figure for figure in figures if figure.get("why")]:
        return stated(
            mean, Interval(why=f"no interval: {len(without)} of {len(figures)} parts have none"), parts=len(figures)
        )
    below, above = (
        sqrt(sum((figure[end] - figure["mean"]) ** 2 for figure in figures)) / len(figures) for end in ("low", "high")
    )
    return stated(mean, Interval(mean - below, mean + above), parts=len(figures))
