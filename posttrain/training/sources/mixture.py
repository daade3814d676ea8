"""Mixtures of tasks: the choice of the part of the next task, and the metrics of each part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from posttrain.core.batch import Stats
from posttrain.core.rollouts import Rollout
from posttrain.core.seeds import seed_of
from posttrain.core.types import Invalid, succeeds
from posttrain.data.mixed_tasks import MixedTasks, part_of
from posttrain.data.tasks import order
from posttrain.training.sources.task_order import Drawn, Fits, Solved, TaskOrder, amount, counted


def next_part(shares: Mapping[str, float], drawn: Mapping[str, int]) -> str:
    """Return the part that is furthest behind its share.

    It has the greatest share x (N + 1) - n, after N tasks in all and n of this part; of equal parts the first.
    """
    total = sum(drawn.values()) + 1
    behind = {name: shares[name] * total - count for name, count in drawn.items()}
    return max(behind, key=lambda part: behind[part])


class MixedRows:
    """The rows of each step of passes over a mixture, by the shares of the parts. Each part has epochs, and orders, of
    its own.

    They depend on the number of the step alone.
    """

    def __init__(self, tasks: MixedTasks, rows: int, seed: int) -> None:
        self.tasks, self.rows, self.seed = tasks, rows, seed
        self._step, self._drawn = 0, dict.fromkeys(tasks.parts, 0)  # last step made; rows of each part up to its end
        self._last: list[tuple[str, int]] = []  # rows of the last step, see `_advance`
        # part -> the epoch that was asked for last, and its order
        self._orders: dict[str, tuple[int, Sequence[int]]] = {}

    def of_step(self, number: int) -> list[int]:
        """Return the places of the rows of a step: int [rows]."""
        if number != self._step:
            if number < self._step:
                self._step, self._drawn = 0, dict.fromkeys(self.tasks.parts, 0)
            while self._step < number:
                self._last = self._advance()
        return [self._place(name, visit) for name, visit in self._last]

    def shares_of(self, number: int) -> dict[str, float]:
        """Return the share of each part in the rows of a step."""
        self.of_step(number)
        counts = Counter(name for name, _ in self._last)
        return {name: counts[name] / self.rows for name in self.tasks.parts}

    def following(self, number: int) -> Iterator[int]:
        """Yield the places of the rows after a step."""
        while True:
            number += 1
            yield from self.of_step(number)

    def _advance(self) -> list[tuple[str, int]]:
        """Return (part, number of its earlier rows) for each row of the next step."""
        found = []
        for _ in range(self.rows):
            name = next_part(self.tasks.shares, self._drawn)
            found.append((name, self._drawn[name]))
            self._drawn[name] += 1
        self._step += 1
        return found

    def _place(self, name: str, visit: int) -> int:
        size = len(self.tasks.parts[name])
        epoch, at = divmod(visit, size)
        start = self.tasks.ends[list(self.tasks.parts).index(name)] - size
        if name not in self._orders or self._orders[name][0] != epoch:
            self._orders[name] = epoch, order(size, epoch, seed_of(self.seed, "part", name))
        return start + int(self._orders[name][1][at])


FAST, SLOW = 0.8, 0.95  # decays of a part's results, at each step with results of it


class LearningProgress:
    """Shares of the parts of a mixture by their learning progress.

    p_i(d) is a running solve rate of part i: r / (r + w), of right and wrong rollouts that decay by d at each step with
    results of the part. Progress is the absolute difference of a fast and a slow one, |p_i(FAST) - p_i(SLOW)|, the
    bidirectional learning progress of arXiv 2106.14876: it is high for what is being learned, and for what is being
    forgotten. The share of part i is

        floor f_i + (1 - floor) progress_i / sum_j progress_j,    f_i: its fixed share

    and f_i alone while no part has progressed.
    """

    def __init__(self, fixed: Mapping[str, float], floor: float) -> None:
        self.fixed, self.floor = dict(fixed), floor
        self.results = {name: [[0.0, 0.0], [0.0, 0.0]] for name in fixed}  # part -> fast and slow: right, wrong
        self.due = dict.fromkeys(fixed, 0.0)  # part -> tasks by which it is behind its shares so far

    def of(self, name: str) -> float:
        """Return the progress of a part; 0 without results."""
        fast, slow = (right / (right + wrong) if right + wrong else 0.0 for right, wrong in self.results[name])
        return abs(fast - slow)

    def shares(self) -> dict[str, float]:
        """Return the share of each part: they sum to 1."""
        progress = {name: self.of(name) for name in self.fixed}
        total = sum(progress.values())
        if not total:
            return dict(self.fixed)
        own = 1 - self.floor
        return {name: self.floor * self.fixed[name] + own * progress[name] / total for name in self.fixed}

    def draw(self, count: int) -> list[str]:
        """Return the parts of the next `count` tasks: each time the one that is furthest behind, of equal ones the first.

        Shares change, so each task is counted with the shares of its own step: a part that begins to progress gets its
        new share, and no arrears.
        """
        shares, found = self.shares(), []
        for _ in range(count):
            for name, share in shares.items():
                self.due[name] += share
            found.append(max(self.due, key=lambda part: self.due[part]))
            self.due[found[-1]] -= 1
        return found

    def observe(self, name: str, results: Sequence[Solved]) -> None:
        """Record the results of a part in a step."""
        right, wrong = sum(seen.right for seen in results), sum(seen.wrong for seen in results)
        if right + wrong:
            for counts, decay in zip(self.results[name], (FAST, SLOW), strict=True):
                counts[:] = decay * counts[0] + right, decay * counts[1] + wrong

    def state(self) -> dict[str, Any]:
        return {"results": {name: [[*own] for own in both] for name, both in self.results.items()}, "due": {**self.due}}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state["results"].keys() != self.fixed.keys() or state["due"].keys() != self.fixed.keys():
            raise ValueError(f"progress of {', '.join(state['results'])}")
        for name in self.fixed:
            (fast, slow), due = state["results"][name], float(state["due"][name])
            self.results[name] = [[amount(right), amount(wrong)] for right, wrong in (fast, slow)]
            if not -len(self.fixed) < due < len(self.fixed):
                raise ValueError(f"{due} tasks behind")
            self.due[name] = due


class Mixture:
    """An order of tasks of several parts by their shares, which are exact, not random.

    `next_part`, or the progress of the parts, decides the part of the next task, and the part's own order the task.
    """

    def __init__(
        self,
        orders: Mapping[str, TaskOrder],
        ends: Sequence[int],
        shares: Mapping[str, float],
        progress: LearningProgress | None = None,
    ) -> None:
        """`orders`: of each part, with places from 0 on; `ends`: the place after each part; `shares`: fixed ones, which
        sum to 1; `progress`: shares that change.
        """
        self.orders, self.shares, self.progress = dict(orders), shares, progress
        self.ranges = {name: range(first, end) for name, first, end in zip(orders, [0, *ends], ends, strict=False)}
        self.drawn = dict.fromkeys(orders, 0)
        self._step = dict.fromkeys(orders, 0)  # tasks of the step

    def draw(self, count: int, fits: Fits, taken: Collection[int]) -> Drawn:
        counts = dict.fromkeys(self.orders, 0)
        of_progress = iter(self.progress.draw(count) if self.progress else ())
        for _ in range(count):
            name = next(of_progress) if self.progress else next_part(self.shares, self.drawn)
            counts[name] += 1
            self.drawn[name] += 1
        found: Drawn = []
        for name, own in counts.items():
            self._step[name] += own
            found += self._of_part(name, own, fits, taken) if own else []
        return found

    def _of_part(self, name: str, count: int, fits: Fits, taken: Collection[int]) -> Drawn:
        places = self.ranges[name]
        own = {place - places.start for place in taken if place in places}
        drawn = self.orders[name].draw(count, lambda place: fits(places.start + place), own)
        return [(visit, places.start + place) for visit, place in drawn]

    def observe(self, results: Sequence[Solved]) -> None:
        for name, places in self.ranges.items():
            own = [replace(seen, place=seen.place - places.start) for seen in results if seen.place in places]
            self.orders[name].observe(own)
            if self.progress:
                self.progress.observe(name, own)

    def measure(self, stats: Stats) -> None:
        total = sum(self._step.values())
        for name, own in self.orders.items():
            stats.add(f"mixture/{name}/share", self._step[name], total)
            self._step[name] = 0
            if self.progress:
                stats.add(f"mixture/{name}/progress", self.progress.of(name))
            own.measure(stats)

    def state(self) -> dict[str, Any]:
        orders = {name: order.state() for name, order in self.orders.items()}
        changing = {"progress": self.progress.state()} if self.progress else {}
        return {"drawn": dict(self.drawn), "parts": orders, **changing}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state["parts"].keys() != self.orders.keys() or state["drawn"].keys() != self.orders.keys():
            raise ValueError(f"parts {', '.join(state['parts'])}")
        for name, own in self.orders.items():
            own.restore(state["parts"][name])
            self.drawn[name] = counted(state["drawn"][name])
        if self.progress:
            self.progress.restore(state["progress"])


def part_metrics(rollouts: Sequence[Rollout], success: float | None, before: str = "") -> Stats:
    """Return the metrics of each part of a mixture. `before`: prefix of their names."""
    stats = Stats()
    for rollout in rollouts:
        part = part_of(rollout.task)
        stats.add(f"{before}mixture/{part}/length", rollout.n_sampled)
        stats.add(f"{before}mixture/{part}/invalid", isinstance(rollout.reward, Invalid))
        if isinstance(rollout.reward, Invalid):
            continue
        stats.add(f"{before}mixture/{part}/reward", rollout.reward)
        if success is not None:
            stats.add(f"{before}mixture/{part}/accuracy", succeeds(rollout.outcome, success))
    return stats


if TYPE_CHECKING:
    _proof: Callable[..., TaskOrder] = Mixture
