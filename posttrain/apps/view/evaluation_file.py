"""A file that `posttrain eval --out` wrote, as a page of `view`: the figures of each model on each part, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.types import UserError
from posttrain.runs.jsonl import FILE, content_of, parsed

ALONE = "all tasks"  # the only part of an evaluation that is no suite
OWN = "evaluated model"  # as which a file without its name shows it
BESIDE = ("tool_calls", "valid_calls", "successful_calls", "cost")  # rates that are shown beside the means
FIRST = ("accuracy", "reward")  # the headline is the first of these


@dataclass(frozen=True)
class EvaluationFile:
    """The content of a file with figures: of a suite, or of one evaluation."""

    name: str
    page: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> EvaluationFile:
        """Read a file. Raises UserError for one that is damaged, or holds no figures of an evaluation."""
        content = parsed(content_of(path), str(path), FILE)
        if not ("parts" in content or "figures" in content):
            raise UserError(f"{path} holds no figures: give a file that posttrain eval --out has written")
        try:
            return cls(str(path), _page(content))
        except (LookupError, TypeError, AttributeError, StopIteration) as error:
            raise UserError(
                f"{path} is damaged ({type(error).__name__}: {error}): write it again with eval --out"
            ) from None


def _page(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the page as JSON data: models, a row for each part and model, and the means over parts."""
    parts = content.get("parts", {ALONE: content})
    rows = [row for name, part in parts.items() for row in _rows(name, part, content.get("model", OWN))]
    return {
        "models": list(dict.fromkeys(row["model"] for row in rows)),
        "rows": rows,
        "means": list(dict.fromkeys(name for row in rows for name in row["means"])),
        "averages": [_average(name, one) for name, one in content.get("averages", {}).items()],
        "cost": content.get("cost"),
    }


def _rows(name: str, part: Mapping[str, Any], model: str) -> list[dict[str, Any]]:
    """Return the row of the evaluated model on a part ("own"), then those of the models that it is compared with."""
    sides = [
        {"model": model, **{key: part[key] for key in ("figures", "rates") if key in part}},
        *part.get("against", ()),
    ]
    inside = part.get("in_distribution")
    return [{"part": name, "inside": inside, "own": not place, **_side(side)} for place, side in enumerate(sides)]


def _side(side: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a model on a part. `difference` and `wins` compare the evaluated model with this one."""
    figures, rates = side["figures"], side.get("rates", {})
    of = next(name for name in FIRST if name in figures)
    means = {name: _figure(one) for name, one in figures.items() if isinstance(one, Mapping) and name not in FIRST}
    parts = {name.removeprefix("part/"): {"mean": mean} for name, mean in rates.items() if name.startswith("part/")}
    calls = {name.replace("_", " "): {"mean": rates[name]} for name in BESIDE if name in rates}
    found = {"model": side["model"], "tasks": figures["tasks"], "of": of, "figure": _figure(figures[of])}
    found |= {name: rates.get(name) for name in ("length", "truncated", "invalid")}
    found |= {"means": means | calls | parts}
    if "differences" in side:
        wins = {name: side["wins"].get(name) for name in ("won", "lost", "tied", "p", "p_holm", "verdict")}
        found |= {"difference": _figure(side["differences"].get(of, side["differences"]["reward"])), "wins": wins}
        if "text loss" in side["differences"]:
            found["means"] = {"difference in text loss": _figure(side["differences"]["text loss"]), **found["means"]}
    if side.get("win_rate"):
        found["means"] = {"win rate of the evaluated model": _figure(side["win_rate"]), **found["means"]}
    return found


def _figure(figure: Mapping[str, Any]) -> dict[str, Any]:
    return {"mean": figure["mean"], **{name: figure.get(name) for name in ("low", "high", "why")}}


def _average(name: str, average: Mapping[str, Any]) -> dict[str, Any]:
    others: Sequence[Mapping[str, Any]] = average.get("against", ())
    compared = [
        {"model": one["model"], "figure": _figure(one["figures"]), "difference": _figure(one["difference"])}
        for one in others
    ]
    return {"of": name, "parts": average["parts"], "figure": _figure(average), "against": compared}
