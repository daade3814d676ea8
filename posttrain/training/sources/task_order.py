"""Task orders: uniform, by solve rate, by stages, by levels of tasks made on demand, and mixtures.

The collector gets the tasks of a step from a `TaskOrder`, and reports how often they were solved, where rollouts are
sampled, step after step. So the tasks of a step depend on the results of all steps before it, however many steps ahead
of the updates it is sampled. All memory of an order is in its state, and random numbers derive from counts.

n    tasks    r_i, w_i    right and wrong rollouts of task i, those of earlier visits decayed
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from posttrain.core.batch import Stats
from posttrain.core.seeds import seed_of
from posttrain.data.levels import SPAN, Levels
from posttrain.data.tasks import ENDLESS, Integers, draw
from posttrain.training.sources.length_filter import Placed

Fits = Callable[[int], bool]
"""Returns whether the task at a place fits into the model's context."""
Drawn = list[tuple[int, int]]
"""(visit, place) of each task drawn. Visits distinguish equal places."""


@dataclass(frozen=True)
class Solved:
    """Results of the rollouts of a task in a step, invalid ones left out."""

    place: int
    id: str
    right: int
    wrong: int


class TaskOrder(Protocol):
    """The order of the tasks of a run."""

    def draw(self, count: int, fits: Fits, taken: Collection[int]) -> Drawn:
        """Return the next `count` tasks that fit. `taken`: places that the step, or an unfinished group, already has.

        Raises UserError if nothing fits.
        """
        ...

    def observe(self, results: Sequence[Solved]) -> None:
        """Record the results of a step."""
        ...

    def measure(self, stats: Stats) -> None:
        """Add the metrics of a step, after its results."""
        ...

    def state(self) -> dict[str, Any]:
        """Return a copy of the state, as JSON data."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. Raises ValueError, LookupError or TypeError if it is invalid."""
        ...


LARGEST = 2**62
"""Above every count of a run: larger integers do not fit the numbers of numpy and torch."""


def counted(value: Any) -> int:
    """Return a count from a state. Raises ValueError for anything else."""
    if type(value) is not int or not 0 <= value < LARGEST:
        raise ValueError(f"a count of {value!r:.40}")
    return value


def amount(value: Any) -> float:
    """Return a number of rollouts from a state. Raises ValueError, TypeError or OverflowError for anything else."""
    found = float(value)
    if not 0 <= found < float("inf"):
        raise ValueError(f"an amount of {value!r:.40}")
    return found


@dataclass
class Uniform:
    """Visits each task once per epoch, in a new order each epoch."""

    count: int  # n
    seed: int
    cursor: int = field(default=0, init=False)  # tasks passed so far, including those that do not fit

    def draw(self, count: int, fits: Fits, taken: Collection[int] = ()) -> Drawn:
        drawn, self.cursor = draw(self.count, self.cursor, count, self.seed, fits)
        return drawn

    def observe(self, results: Sequence[Solved]) -> None:
        pass

    def measure(self, stats: Stats) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"cursor": self.cursor}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.cursor = counted(state["cursor"])


@dataclass
class Floor:
    """The share of the draws that a curriculum does not decide. The share is exact over all draws, not random."""

    share: float
    drawn: int = 0  # tasks drawn so far
    step: tuple[int, int] = (0, 0)  # tasks of the floor, and all tasks, of the step

    def take(self, count: int) -> int:
        """Return how many of the next `count` tasks belong to the floor."""
        found = int(self.share * (self.drawn + count)) - int(self.share * self.drawn)
        self.drawn += count
        self.step = self.step[0] + found, self.step[1] + count
        return found

    def pass_over(self, count: int) -> None:
        """Count tasks of a step while there are no tasks for a floor."""
        self.step = self.step[0], self.step[1] + count

    def measure(self, stats: Stats) -> None:
        stats.add("curriculum/share", *self.step)
        self.step = 0, 0


class SolveRate:
    """Prefers tasks that the policy solves about half of the time, which have most of the signal.

    A task has the weight (4 p (1 - p))^s, where p = (r + 1) / (r + w + 2) is the mean of a Beta distribution. p is 1/2
    for a task without results, so new tasks come first. Tasks of a step are drawn without replacement in proportion to
    their weights: task i has the key -log(u_i) / weight_i with a uniform u_i, and the least keys win (Efraimidis and
    Spirakis 2006). At each visit, r <- decay r + (right rollouts of the visit), likewise w. With s = 1 the weight is
    the learnability of arXiv 2502.12272; decayed Beta estimates of solve rates are those of arXiv 2507.04632. The
    floor's draws visit all tasks in turn, so each task is drawn at least once in n / floor draws.
    """

    def __init__(self, tasks: Placed, seed: int, floor: float, decay: float, sharpness: float) -> None:
        self.tasks, self.seed, self.decay, self.sharpness = tasks, seed, decay, sharpness
        self.floor = Floor(floor)
        self.in_turn = Uniform(len(tasks), seed)
        self.visits: dict[int, int] = {}  # place -> visits so far
        self.results: dict[int, tuple[str, float, float]] = {}  # place -> id, r, w
        self.rate = np.full(len(tasks), 0.5)  # [n], p

    def draw(self, count: int, fits: Fits, taken: Collection[int]) -> Drawn:
        turn = self.floor.drawn
        of_floor = self.floor.take(count)
        places = [place for _, place in self.in_turn.draw(of_floor, fits)]
        places += self._preferred(turn, count - of_floor, fits, {*taken, *places})
        return [_visit(self.visits, place) for place in places]

    def _preferred(self, turn: int, count: int, fits: Fits, taken: Collection[int]) -> list[int]:
        """Return `count` places by their keys; taken ones come last."""
        raw = np.random.Philox(key=seed_of(self.seed, "curriculum", turn)).random_raw(len(self.rate))
        uniform = ((raw >> np.uint64(11)) + 1) * 2.0**-53  # in (0, 1]
        with np.errstate(divide="ignore", invalid="ignore"):  # a weight may underflow to 0
            keys = -np.log(uniform) / (4 * self.rate * (1 - self.rate)) ** self.sharpness
        keys[list(taken)] = np.inf
        found: list[int] = []
        for place in np.argsort(keys, kind="stable").tolist() if count else ():
            if fits(place):
                found.append(place)
            if len(found) == count:
                return found
        if count and not found:
            self.in_turn.draw(1, fits)  # raises
        return [found[number % len(found)] for number in range(count)]

    def observe(self, results: Sequence[Solved]) -> None:
        for seen in results:
            _, right, wrong = self.results.get(seen.place, ("", 0.0, 0.0))
            self._set(seen.place, seen.id, self.decay * right + seen.right, self.decay * wrong + seen.wrong)

    def _set(self, place: int, id: str, right: float, wrong: float) -> None:
        self.results[place] = id, right, wrong
        self.rate[place] = (right + 1) / (right + wrong + 2)

    def measure(self, stats: Stats) -> None:
        self.floor.measure(stats)
        stats.add("curriculum/seen", len(self.results), len(self.rate))
        stats.add("curriculum/solve_rate", self.rate[sorted(self.results)].sum(), len(self.results))

    def state(self) -> dict[str, Any]:
        return {
            **self.in_turn.state(),
            "drawn": self.floor.drawn,
            "visits": list(map(list, self.visits.items())),
            "results": [[place, *result] for place, result in self.results.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.in_turn.restore(state)
        self.floor = Floor(self.floor.share, counted(state["drawn"]))
        self.visits = _visits(state["visits"])
        self.results, self.rate[:] = {}, 0.5
        for place, id, right, wrong in state["results"]:
            if counted(place) < len(self.rate) and self.tasks[place]["id"] == id:  # else tasks have changed
                self._set(place, id, amount(right), amount(wrong))


@dataclass
class RunningAccuracy:
    """Accuracy r / (r + w) over the rollouts of a stage's own tasks, both decayed at each step."""

    decay: float
    accuracy: float  # at which the stage ends
    least: float  # rollouts that a stage needs before it may end
    right: float = 0.0
    wrong: float = 0.0

    @property
    def reached(self) -> bool:
        seen = self.right + self.wrong
        return 0 < self.least <= seen and self.right >= self.accuracy * seen

    def begin(self) -> None:
        self.right, self.wrong = 0.0, 0.0

    def add(self, own: Sequence[Solved]) -> None:
        self.right = self.decay * self.right + sum(seen.right for seen in own)
        self.wrong = self.decay * self.wrong + sum(seen.wrong for seen in own)

    def measure(self, stats: Stats) -> None:
        if self.right + self.wrong:
            stats.add("curriculum/accuracy", self.right / (self.right + self.wrong))

    def state(self) -> list[float]:
        return [self.right, self.wrong]

    def restore(self, state: Sequence[Any]) -> None:
        self.right, self.wrong = map(amount, state)


class Stages:
    """Tasks by stages, one stage after the other, each until its running accuracy reaches a threshold.

    Within a stage, each task comes once per epoch. The floor's draws visit tasks of earlier stages, also in epochs. The
    last stage has no end.
    """

    def __init__(
        self,
        stages: Sequence[Integers],
        seed: int,
        floor: float,
        decay: float,
        accuracy: float,
        least: float,
        names: Sequence[str],
    ) -> None:
        """`stages`: the places of each stage's tasks. `least`: rollouts that a stage needs before it may end. `names`: of
        the stages.
        """
        self.stages, self.seed, self.running = stages, seed, RunningAccuracy(decay, accuracy, least)
        self.names = names
        self.of = {place: number for number, places in enumerate(stages) for place in places.tolist()}
        self.visits: dict[int, int] = {}
        self.floor = Floor(floor)
        self._begin(0)

    def _begin(self, stage: int) -> None:
        self.stage = stage
        self.running.begin()
        self.floor = Floor(self.floor.share, 0, self.floor.step)
        self.own, own_seed = self.stages[stage], seed_of(self.seed, "stage", stage)
        self.own_order = Uniform(len(self.own), own_seed)
        self.earlier = np.concatenate([np.empty(0, np.int64), *self.stages[:stage]])
        self.earlier_order = Uniform(len(self.earlier), seed_of(self.seed, "earlier stages", stage))

    def draw(self, count: int, fits: Fits, taken: Collection[int]) -> Drawn:
        if self.running.reached and self.stage + 1 < len(self.stages):
            self._begin(self.stage + 1)
        if not self.stage:
            self.floor.pass_over(count)
        of_floor = self.floor.take(count) if self.stage else 0
        earlier = self._next(self.earlier_order, self.earlier, of_floor, fits)
        return [*earlier, *self._next(self.own_order, self.own, count - of_floor, fits)]

    def _next(self, order: Uniform, places: Integers, count: int, fits: Fits) -> Drawn:
        drawn = order.draw(count, lambda number: fits(int(places[number])))
        return [_visit(self.visits, int(places[number])) for _, number in drawn]

    def observe(self, results: Sequence[Solved]) -> None:
        self.running.add([seen for seen in results if self.of[seen.place] == self.stage])

    def measure(self, stats: Stats) -> None:
        self.floor.measure(stats)
        stats.add("curriculum/stage", self.stage + 1)
        self.running.measure(stats)

    def state(self) -> dict[str, Any]:
        return {
            **self.own_order.state(),
            "earlier": self.earlier_order.cursor,
            "drawn": self.floor.drawn,
            "stage": self.stage,
            "results": self.running.state(),
            "visits": list(map(list, self.visits.items())),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        stage = counted(state["stage"])
        if stage >= len(self.stages):
            raise ValueError(f"stage {stage + 1} of {len(self.stages)}")
        self._begin(stage)
        self.own_order.restore(state)
        self.earlier_order.cursor = counted(state["earlier"])
        self.floor = Floor(self.floor.share, counted(state["drawn"]))
        self.running.restore(state["results"])
        self.visits = _visits(state["visits"])


class ByLevel:
    """New tasks of a level (0, 1, ...), each level until its running accuracy reaches a threshold.

    No task comes twice. The floor's draws take new tasks of the earlier levels in turn. The last level, after which the
    function makes no rows, has no end.
    """

    def __init__(self, tasks: Levels, floor: float, decay: float, accuracy: float, least: float) -> None:
        self.tasks, self.floor = tasks, Floor(floor)
        self.running = RunningAccuracy(decay, accuracy, least)
        self.next = [0]  # for each level so far, the number of its next task

    @property
    def level(self) -> int:
        return len(self.next) - 1

    def draw(self, count: int, fits: Fits, taken: Collection[int]) -> Drawn:
        if self.running.reached and self.tasks.has(self.level + 1):
            self.next.append(0)
            self.running.begin()
            self.floor = Floor(self.floor.share, 0, self.floor.step)
        if not self.level:
            self.floor.pass_over(count)
            return self._of(0, count, fits)
        before = int(self.floor.share * self.floor.drawn)
        of_floor = self.floor.take(count)
        earlier = [self._of((before + number) % self.level, 1, fits) for number in range(of_floor)]
        return [*(one for found in earlier for one in found), *self._of(self.level, count - of_floor, fits)]

    def _of(self, level: int, count: int, fits: Fits) -> Drawn:
        first = level * SPAN
        drawn, self.next[level] = draw(ENDLESS, self.next[level], count, 0, lambda number: fits(first + number))
        return [(first + number, first + number) for _, number in drawn]

    def observe(self, results: Sequence[Solved]) -> None:
        self.running.add([seen for seen in results if seen.place // SPAN == self.level])

    def measure(self, stats: Stats) -> None:
        self.floor.measure(stats)
        stats.add("curriculum/stage", self.level + 1)
        self.running.measure(stats)

    def state(self) -> dict[str, Any]:
        return {"next": list(self.next), "drawn": self.floor.drawn, "results": self.running.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.next = [counted(number) for number in state["next"]]
        if not self.next:
            raise ValueError("no level")
        self.floor = Floor(self.floor.share, counted(state["drawn"]))
        self.running.restore(state["results"])


def _visit(visits: dict[int, int], place: int) -> tuple[int, int]:
    """Count a visit to the task at a place; return (visits before, place)."""
    before = visits.get(place, 0)
    visits[place] = before + 1
    return before, place


def _visits(rows: Sequence[Sequence[int]]) -> dict[int, int]:
    return {counted(place): counted(visits) for place, visits in rows}


if TYPE_CHECKING:
    _proof: tuple[Callable[..., TaskOrder], ...] = (Uniform, SolveRate, Stages, ByLevel)
