"""The parts that all experiments share: a measurement per seed, kept on disk, and a verdict that follows from intervals.

An experiment gives beforehand the range of each of its figures that the paper's claim implies. A figure is *seen* only if
the whole 95% interval over the seeds is in that range, and *contradicted* only if the whole interval is outside;
anything else is not seen at this scale. For this, intervals are as wide as Holm's correction over all figures of the
experiment demands: with many figures, some would be in their range by chance.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.figure import Panel, draw
from posttrain.core import user_files
from posttrain.core.intervals import LEVEL, Interval, holm, student_interval, student_quantile, student_test
from posttrain.core.types import UserError

Settings = Mapping[str, Any]
"""Numbers and names that decide an experiment's size; plain JSON."""

Numbers = dict[str, Any]
"""The measurement of one seed; plain JSON."""

Say = Callable[[str], None]

NORMAL = 1_000_000  # degrees of freedom from which on Student's distribution is the normal one


class Verdict(StrEnum):
    """The outcome of a claim."""

    SEEN = "seen"
    PARTLY = "partly seen"
    UNSEEN = "not seen at this scale"
    CONTRADICTED = "contradicted"


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95% interval."""

    mean: float
    low: float
    high: float
    why: str = ""  # there is no interval
    freedom: int = 0  # of Student's distribution; 0: the normal one

    def __str__(self) -> str:
        return f"{round(self.mean, 12) + 0.0:.3g} {Interval(self.low, self.high, self.why).text('.3g')}"


@dataclass(frozen=True)
class Comparison:
    """One figure, and the range that the claim gives for it."""

    what: str
    found: Estimate
    at_least: float = -math.inf
    at_most: float = math.inf

    @property
    def inside(self) -> bool:
        """Whether the middle of the interval is in the range."""
        return self.at_least < self._middle < self.at_most

    @property
    def p(self) -> float:
        """Of the figure, if it were on the border that decides: the nearer one inside of the range, the passed one
        outside. 1 without an interval, as of a single seed, or if it is the same in all: that shows nothing."""
        half = (self.found.high - self.found.low) / 2
        if math.isnan(half) or not half:
            return 1.0
        error = half / student_quantile(0.5 + LEVEL / 2, self.found.freedom or NORMAL)
        borders = [self.at_least, self.at_most]
        away = [abs(self._middle - border) / error for border in borders if math.isfinite(border)]
        return student_test(min(away), self.found.freedom)

    @property
    def _middle(self) -> float:
        return (self.found.low + self.found.high) / 2

    @property
    def claimed(self) -> str:
        if self.at_least == -math.inf:
            return f"below {self.at_most:g}"
        return f"above {self.at_least:g}" if self.at_most == math.inf else f"{self.at_least:g} to {self.at_most:g}"


JUDGED = ("figure", "found", "claimed", "p, corrected", "verdict")


@dataclass(frozen=True)
class Finding:
    """The result of an experiment: a table beside the published figures, a plot, a verdict with intervals."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    comparisons: Sequence[Comparison]
    panels: Sequence[Panel]
    notes: Sequence[str] = ()  # what a reader must know to read the table
    seeds: Sequence[int] = ()
    plot: Path | None = None

    @property
    def corrected(self) -> list[float]:
        """The p of each comparison, by Holm's correction over all of them."""
        return holm([c.p for c in self.comparisons])

    @property
    def verdicts(self) -> list[Verdict]:
        """That of each comparison."""

        def spoken(comparison: Comparison, p: float) -> Verdict:
            if p >= 1 - LEVEL:
                return Verdict.UNSEEN
            return Verdict.SEEN if comparison.inside else Verdict.CONTRADICTED

        return [spoken(c, p) for c, p in zip(self.comparisons, self.corrected, strict=True)]

    @property
    def verdict(self) -> Verdict:
        verdicts = set(self.verdicts)
        if verdicts == {Verdict.SEEN}:
            return Verdict.SEEN
        if Verdict.SEEN in verdicts:
            return Verdict.PARTLY
        return Verdict.CONTRADICTED if verdicts == {Verdict.CONTRADICTED} else Verdict.UNSEEN

    @property
    def judged(self) -> list[list[str]]:
        """A row for each comparison, with the columns `JUDGED`."""
        spoken = zip(self.comparisons, self.corrected, self.verdicts, strict=True)
        return [[c.what, str(c.found), c.claimed, f"{p:.2g}", verdict.value] for c, p, verdict in spoken]

    def as_dict(self) -> Numbers:
        spoken = zip(self.comparisons, self.corrected, self.verdicts, strict=True)
        comparisons = [{**asdict(c), "p": p, "verdict": verdict.value} for c, p, verdict in spoken]
        return {
            "verdict": self.verdict.value,
            "comparisons": [{k: _finite(v) for k, v in c.items()} for c in comparisons],
            "table": [list(self.columns), *map(list, self.rows)],
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Experiment:
    """A claim of a paper and how it is tested."""

    name: str
    claim: str
    paper: str
    settings: Settings
    measure: Callable[[int, Settings, Path, Say], Numbers] = field(repr=False)
    """(seed, settings, folder of this seed, say) -> what that seed gave."""
    conclude: Callable[[Mapping[int, Numbers], Settings], Finding] = field(repr=False)
    """(seed -> what it gave, settings) -> finding."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Those that are measured where none are given."""
    arena: str = ""
    """Name of the arena, one of `elsewhere`, which `measure` finds in the settings; "": the experiment's own."""
    elsewhere: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Name of another arena -> the fields of the experiment that differ there, such as its settings."""

    @property
    def folder(self) -> str:
        """Name of the folder that holds what it measures."""
        return f"{self.name}-{self.arena}" if self.arena else self.name

    def there(self, arena: str) -> Experiment:
        """The same experiment in another arena. Raises UserError if it has none of that name."""
        if arena not in self.elsewhere:
            known = ", ".join(self.elsewhere) or "none but its own: leave --arena out"
            raise UserError(f"{self.name} has no arena {arena!r}: there is {known}")
        return replace(self, arena=arena, **self.elsewhere[arena])

    def run(self, seeds: Sequence[int], out: Path, settings: Settings | None = None, say: Say = print) -> Finding:
        """Measure every seed that was not measured with these settings yet, conclude, write to `out`.

        Writes result.json, table.md, figure.png and seed-N.json for each seed. Raises UserError for settings that do
        not exist or are of another kind, and where nothing can be written.
        """
        if not seeds:
            raise UserError("an experiment needs a seed: --seeds 0 1 2")
        seeds, chosen = sorted(set(seeds)), self._settings(settings or {})
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{out} cannot be written: {error.strerror}; give another --out") from error
        numbers = {seed: self._of_seed(seed, chosen, out, say) for seed in seeds}
        found = self.conclude(numbers, chosen)
        plot = draw(found.panels, out / "figure.png", f"{self._title}: {found.verdict.value}")
        finding = replace(found, seeds=tuple(seeds), plot=plot)
        about = {
            "name": self.name,
            "arena": self.arena,
            "claim": self.claim,
            "paper": self.paper,
            "settings": chosen,
            "seeds": list(seeds),
        }
        _write(out / "result.json", json.dumps({**about, **finding.as_dict()}, indent=1) + "\n")
        _write(out / "table.md", self._markdown(finding, chosen))
        return finding

    def _settings(self, given: Settings) -> dict[str, Any]:
        if unknown := sorted(given.keys() - self.settings.keys()):
            known = ", ".join(self.settings)
            raise UserError(f"{self.name} has no setting {', '.join(unknown)}: there are {known}")
        for name, value in given.items():
            kind = (int, float) if isinstance(self.settings[name], float) else type(self.settings[name])
            if not isinstance(value, kind):
                raise UserError(f"{self.name}: setting {name} is like {self.settings[name]!r}, not {value!r}")
        return {**self.settings, **given}

    def _of_seed(self, seed: int, settings: Settings, out: Path, say: Say) -> Numbers:
        kept = out / f"seed-{seed}.json"
        if kept.exists():
            content = json.loads(user_files.text(kept))
            if content["settings"] == json.loads(json.dumps(settings)):
                say(f"{self.name}: seed {seed} is kept from before")
                numbers: Numbers = content["numbers"]
                return numbers
        torch.set_num_threads(1)  # the models are tiny, and seconds are comparable
        begin = time.perf_counter()
        numbers = self.measure(seed, {**settings, "arena": self.arena}, out / f"seed-{seed}", say)
        seconds = time.perf_counter() - begin
        say(f"{self.name}: seed {seed} took {seconds:.0f} s")
        content = {"settings": settings, "seconds": round(seconds, 1), "numbers": numbers}
        _write(kept, json.dumps(content) + "\n")
        return json.loads(json.dumps(numbers))  # as it will be read next time

    @property
    def _title(self) -> str:
        return f"{self.name}, arena {self.arena}" if self.arena else self.name

    def _markdown(self, finding: Finding, settings: Settings) -> str:
        seeds = " ".join(map(str, finding.seeds))
        changed = "".join(
            f" --settings.{k.replace('_', '-')} {v}" for k, v in settings.items() if v != self.settings[k]
        )
        listed = ", ".join(f"{k} {v}" for k, v in settings.items())
        parts = [
            f"# {self._title}",
            f"    posttrain reproduce {self.name}{f' --arena {self.arena}' * bool(self.arena)} --seeds {seeds}{changed}",
            f"{time.strftime('%Y-%m-%d')}, one thread, {platform.machine()}, torch {version('torch')}.",
            f"Claim ({self.paper}): {self.claim}",
            f"Verdict: **{finding.verdict.value}**. Mean over {len(finding.seeds)} seeds, 95% interval (Student); p by "
            f"Holm's correction over {len(finding.comparisons)} figures.",
            _grid(JUDGED, finding.judged),
            _grid(finding.columns, finding.rows),
            *finding.notes,
            f"Settings: {listed}.",
            f"![{self.name}](figure.png)",
        ]
        return "\n\n".join(parts) + "\n"


def read_settings(given: Mapping[str, str]) -> dict[str, Any]:
    """Settings of a command line: numbers and lists in JSON, anything else is text."""

    def value(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    return {name.replace("-", "_"): value(text) for name, text in given.items()}


# -- intervals ---------------------------------------------------------------------------------------------------------


def over_seeds(values: Sequence[float]) -> Estimate:
    """Mean with Student's 95% interval."""
    found = student_interval(values)
    return Estimate(float(np.mean(values)), found.low, found.high, found.why, len(values) - 1)


def differences(numbers: Mapping[int, Numbers], one: str, other: str, figure: Callable[[Numbers], float]) -> Estimate:
    """figure(one arm) - figure(other arm), seed by seed: both begin with the same model and tasks."""
    return over_seeds([figure(n[one]) - figure(n[other]) for n in numbers.values()])


def _grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(columns), ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _finite(value: Any) -> Any:
    """As JSON can hold it, which knows neither infinity nor not-a-number."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write(path: Path, text: str) -> None:
    """All or nothing: a half-written file must not pass for a finished seed."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
