"""Suites: one evaluation over several task files and environments, with averages over its parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from posttrain.config.inference import Evaluation
from posttrain.config.resolve import filled
from posttrain.config.suite_file import Part, suite_of
from posttrain.core.intervals import Interval, stated
from posttrain.core.types import UserError
from posttrain.training.model_comparison import verdicts_of_rates, with_verdicts
from posttrain.training.rollout_figures import headline, rates
from posttrain.training.verbs import evaluate
from posttrain.training.verbs.evaluate import Evaluated, write_figures


@dataclass(frozen=True)
class EvaluatedSuite:
    """The result of a suite."""

    parts: dict[str, dict[str, Any]]
    """For each part: "in_distribution", "figures" as `Evaluated` has them, "rates" (see `rates`), "seconds", and with
    other models "against": a list of their `ModelComparison` as JSON data, with "rates". The p of each is corrected for the
    comparisons of all parts."""
    averages: dict[str, dict[str, Any]]
    """"all", and where there are both "in distribution" and "out of distribution": the mean over parts of their accuracy, or
    of their reward where a part has no threshold; with other models "against", a list of "model", "figures",
    "difference", and with a scorer "win_rate"."""
    evaluated: dict[str, Evaluated]
    """For each part, everything: rollouts too."""

    @property
    def costs(self) -> dict[str, float]:
        """The cost of the judges of each part: see `Evaluated.cost`."""
        return {name: found.cost for name, found in self.evaluated.items() if found.cost is not None}


class UnfinishedSuite(UserError):
    """A user's mistake, or a file that cannot be written, after parts were done."""

    def __init__(self, message: str, done: EvaluatedSuite) -> None:
        """`done`: the result of the parts that are done."""
        super().__init__(message)
        self.done = done


def evaluate_suite(
    config: Evaluation, say: Callable[[str, Evaluated], None] = lambda name, found: None
) -> EvaluatedSuite:
    """Evaluate a model, and those it is compared with, on every part of `config.suite`; call `say` after each part.

    With `config.out`, figures and rollouts of each part are written beside it as soon as the part is done, and the
    whole result at the end. Raises UserError before anything is sampled if the suite, or the rows or environment of a
    part, cannot be read; for a part's other mistakes, an UnfinishedSuite with the parts before it.
    """
    parts = suite_of(config)
    for part in parts:
        with part.named():
            evaluate.read(part.config)  # a mistake in the last part does not cost the samples of the others
    told: dict[str, dict[str, Any]] = {}
    evaluated: dict[str, Evaluated] = {}
    for part in parts:
        began = time.perf_counter()
        try:
            with part.named():
                found = evaluate.evaluate_as_given(_logged(config, part))
        except UserError as error:
            if not told:
                raise
            raise UnfinishedSuite(f"{error}; {_outlook(config, list(told))}", _result(told, evaluated)) from None
        told[part.name] = _told(part, found) | {"seconds": time.perf_counter() - began}
        evaluated[part.name] = found
        say(part.name, found)
        if config.out:
            with _unwritten(lambda: _result(told, evaluated)):
                evaluate.save(found, beside(Path(config.out), part.name))
    result = _result(told, evaluated)
    if config.out:
        content: dict[str, Any] = {"model": config.model, "against": config.against, "averages": result.averages}
        content |= {"parts": told}
        content |= {"cost": sum(result.costs.values())} if result.costs else {}
        with _unwritten(lambda: result):
            write_figures(Path(config.out), content)
    return result


@contextmanager
def _unwritten(done: Callable[[], EvaluatedSuite]) -> Iterator[None]:
    """Context manager in which a file that cannot be written costs no figures: see `UnfinishedSuite`."""
    try:
        yield
    except UserError as error:
        raise UnfinishedSuite(f"{error}; the figures so far are above", done()) from None


def _result(parts: dict[str, dict[str, Any]], evaluated: dict[str, Evaluated]) -> EvaluatedSuite:
    _with_verdicts(parts)
    return EvaluatedSuite(parts, _averages(parts), evaluated)


def _outlook(config: Evaluation, done: Sequence[str]) -> str:
    """Return how to go on after the failure of a part."""
    kept = f" and in {beside(Path(config.out), done[0])} ..." if config.out else ""
    return (
        f"the figures of {done[0]}{' and others' * (len(done) > 1)} are above{kept}: correct this part, and leave the "
        f"tables of those out of a copy of {config.suite} to evaluate the rest alone"
    )


def _logged(config: Evaluation, part: Part) -> Evaluation:
    """Return the options of a part, with a log of its own."""
    if config.inspect_log is None:
        return part.config
    given = {name: getattr(part.config, name) for name in part.config.given}
    return filled(Evaluation, {**given, "inspect_log": str(beside(Path(config.inspect_log), part.name))})


def beside(out: Path, part: str) -> Path:
    """Return the file for what is a part's own."""
    return out.with_name(f"{out.stem}.{part}{out.suffix if out.suffix == '.eval' else '.json'}")


def _told(part: Part, found: Evaluated) -> dict[str, Any]:
    price = part.config.price
    told = {
        "in_distribution": not part.out_of_distribution,
        "figures": found.figures,
        "rates": rates(found.rollouts, price),
    }
    told |= {"services": found.services} if found.services else {}
    if not found.against:
        return told
    others = [one.as_dict() | {"rates": rates(one.rollouts, price)} for one in found.against]
    return told | {"against": others}


def _with_verdicts(parts: Mapping[str, dict[str, Any]]) -> None:
    """Correct the p of every comparison for those of all parts and models together, as all are read together."""
    every = [one for part in parts.values() for one in part.get("against", ())]
    for one, wins in zip(every, with_verdicts([one["wins"] for one in every]), strict=True):
        one["wins"] = wins
    rated = [one for one in every if "win_rate" in one]
    for one, rate in zip(rated, verdicts_of_rates([one["win_rate"] for one in rated]), strict=True):
        one["win_rate"] = rate


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
    found = {"model": parts[0]["model"], "figures": figures, "difference": difference}
    if all("win_rate" in part for part in parts):
        found["win_rate"] = macro_average([part["win_rate"] for part in parts])
    return found


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
