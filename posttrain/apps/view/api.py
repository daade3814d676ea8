"""The JSON responses to the front end, by path: the same over HTTP and inside an exported file."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.apps.view import first_difference, paired_runs, rollout_page, step_changes
from posttrain.apps.view.evaluation_file import EvaluationFile
from posttrain.apps.view.open_run import OpenRun
from posttrain.apps.view.overview import overview
from posttrain.apps.view.rollout_files import RolloutPart
from posttrain.apps.view.rollout_filters import PAGE, QUESTIONS, ViewQuestion
from posttrain.apps.view.training_reasons import bounds
from posttrain.core.messages import one_line
from posttrain.core.types import UserError
from posttrain.runs.run_reading import divides_by_sampler

Query = Mapping[str, str]
WAIT = 1.0  # seconds to wait for data that is being read


class Answers:
    """Makes the JSON responses about some runs, and files of evaluations."""

    def __init__(self, runs: Sequence[OpenRun], evaluations: Sequence[EvaluationFile] = ()) -> None:
        self.runs, self.evaluations = list(runs), list(evaluations)
        self._kept: dict[str, tuple[Any, Any]] = {}  # path -> (stamp of the run, answer)
        self._making = threading.Lock()

    def of(self, path: str, query: Query) -> Any:
        """Return the response as plain JSON data. Raises UserError for missing or unreadable data, KeyError for an
        unknown path.

        Files may hold anything: content that no run writes becomes a UserError of one line, so that the other pages
        work.
        """
        ask = self._asked(path, query)
        try:
            return ask()
        except (UserError, AssertionError):
            raise
        except Exception as error:
            raise UserError(
                f"the run's files hold content that no run writes ({type(error).__name__}: {one_line(error)})"
            ) from error

    def _asked(self, path: str, query: Query) -> Callable[[], Any]:
        if path == "runs":
            named = [{"name": one.name} for one in self.evaluations]
            return lambda: {"runs": [self._about(r) for r in self.runs], "questions": _ready(), "evaluations": named}
        if path == "compare":
            return lambda: paired_runs.compared(self.runs, query)
        if path == "parting":
            return lambda: first_difference.parted(*paired_runs.sides(self.runs, query))
        number, _, rest = path.partition("/")
        if number == "evaluation":
            if not rest.isdecimal() or len(rest) > 9 or int(rest) >= len(self.evaluations):
                raise KeyError(path)
            return lambda: self.evaluations[int(rest)].page
        if not number.isdecimal() or int(number) >= len(self.runs):
            raise KeyError(path)
        name, *words = rest.split("/")
        answer, run = _OF_RUN.get(name), self.runs[int(number)]
        if answer is None:
            raise KeyError(path)
        run.ready.wait(WAIT)  # avoids a first page without figures

        def answered() -> Any:
            try:
                return answer(self, run, words, query)
            finally:
                run.shown.set()

        return answered

    def _about(self, run: OpenRun) -> dict[str, Any]:
        store = run.store
        return {
            "name": run.name,
            "folder": str(run.folder),
            "verb": run.about["verb"],
            "on": run.on,
            "stamp": run.stamp,
            "progress": round(store.progress, 3),
            "problem": run.problem,
            "searchable": store.searchable,
            "unsearched": store.unsearched,
            "parts": store.rows.parts,
            "success": store.success,
            "bounds": bounds(run.objective),
            "sampler": divides_by_sampler(run.about),
        }

    def _overview(self, run: OpenRun, words: Sequence[str], query: Query) -> Any:
        with self._making:  # a reloaded page waits for the overview that is being made
            stamp = run.stamp
            kept = self._kept.get(str(run.folder))
            if kept is None or kept[0] != stamp:
                kept = self._kept[str(run.folder)] = (stamp, overview(run))
            return kept[1]

    def _rollouts(self, run: OpenRun, words: Sequence[str], query: Query) -> Any:
        offset, limit = _whole(query, "offset", 0), min(1000, _whole(query, "limit", PAGE))
        return ViewQuestion.of(query, run.store).page(offset, limit)

    def _histograms(self, run: OpenRun, words: Sequence[str], query: Query) -> Any:
        names = [name for name in query.get("of", "reward,advantage,length").split(",") if name]
        return ViewQuestion.of(query, run.store).histograms(names[:12])

    def _means(self, run: OpenRun, words: Sequence[str], query: Query) -> Any:
        return ViewQuestion.of(query, run.store).means()

    def _rollout(self, run: OpenRun, words: Sequence[str], query: Query) -> Any:
        part, index = _place(words)
        begin = _whole(query, "begin", 0)
        return rollout_page.one(run.store, run.pieces, run.objective, part, index, begin)

    def _group(self, run: OpenRun, words: Sequence[str], query: Query) -> Any:
        return rollout_page.group(run.store, run.pieces, *_place(words))

    def _step(self, run: OpenRun, words: Sequence[str], query: Query) -> Any:
        part = RolloutPart.of(words[0]) if len(words) == 1 else None
        if part is None:
            raise UserError("a step is a number, such as 12")
        return step_changes.changes(run, part, query.get("by", ""))


def _ready() -> list[dict[str, str]]:
    return [{"name": n, "says": says, "means": means} for n, (says, means, *_) in QUESTIONS.items()]


def _place(words: Sequence[str]) -> tuple[RolloutPart, int]:
    part = RolloutPart.of(words[0]) if len(words) == 2 else None
    if part is None or not words[1].isdecimal() or len(words[1]) > 9:
        raise UserError("a rollout is named by its step and its number: 12/5, or 20e/5 of an evaluation")
    return part, int(words[1])


def _whole(query: Query, name: str, default: int) -> int:
    text = query.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or len(text) > 9:
        raise UserError(f"{name} is a whole number, not {text[:40]!r}")
    return int(text)


_OF_RUN: dict[str, Callable[[Answers, OpenRun, Sequence[str], Query], Any]] = {
    "overview": Answers._overview,
    "rollouts": Answers._rollouts,
    "histograms": Answers._histograms,
    "means": Answers._means,
    "rollout": Answers._rollout,
    "group": Answers._group,
    "step": Answers._step,
}
