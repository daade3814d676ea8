"""Rollouts of the steps of a run, sampled directly before the step's update, or several steps ahead (asynchronous).

This module defines which weights sample each step. With k asynchronous steps, the weights after step n - 1 - k sample
the rollouts of step n. It counts steps, never time, so a run with k > 0 is as repeatable as one without. The first
steps, for which no such weights exist, are sampled by the weights at the start of the run, or at its continuation after
its end. With k > 0 a separate thread samples during the updates, with a copy of the weights. Rollouts that no update
has learned from yet are training state.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from posttrain.algorithms.filters import DynamicSampling
from posttrain.core.batch import Stats
from posttrain.core.protocols import Counting, Learner, Model, Paced, Resting
from posttrain.core.rollouts import Fate
from posttrain.core.types import UserError
from posttrain.engines.local.engine_weights import own_copy
from posttrain.models.gpu_placement import on_this_gpu
from posttrain.models.native.linear import compute_apart
from posttrain.system.worker_thread import WorkerThread
from posttrain.training.sources.collector import Collected, Collector, CollectorPosition
from posttrain.training.sources.rollout_state import restored, stored
from posttrain.training.sources.scoreboard import Dropped

T = TypeVar("T")
END_SECONDS = 10.0  # for the thread to notice that its rollouts are no longer needed


@dataclass(frozen=True)
class PlayedStep:
    """A step with its rollouts."""

    number: int
    after: CollectorPosition  # position of the collector after it
    collected: Collected
    stats: Stats
    seconds: Mapping[str, float]  # "load", "play", and in "play" those spent waiting for environments or services
    counts: Mapping[str, float]  # of services and engines; like seconds, unknown for steps from before a resumption
    work: Mapping[str, float]  # counts of the engine in this step, see `engines.throughput`


class StepQueue:
    """Queue of steps that are sampled, or being sampled, and not learned from yet. `state` holds all its memory."""

    def __init__(self, collector: Collector, groups: DynamicSampling | None, async_steps: int, last: int) -> None:
        """`groups`: dynamic sampling, or None; `async_steps`: number of steps ahead; `last`: number of the run's last
        step.
        """
        self.groups, self.async_steps, self.last = groups, async_steps, last
        self._steps: deque[_Step] = deque()  # in order, the next one to learn from first
        self._thread = WorkerThread("playing", on_this_gpu(compute_apart)) if async_steps else None
        if self._thread is not None:
            player = replace(collector.player, unwanted=self._thread.left, world=collector.player.world.apart())
            collector = replace(collector, player=player)
        self.collector = collector
        self._learned = collector.position  # position of the collector after the last step learned from

    def take(self, number: int, learner: Learner) -> PlayedStep:
        """Return the rollouts of a step. Before waiting for it, begin the steps that the current weights sample."""
        begun = [number + place for place in range(len(self._steps))]
        copied: Model | None = None
        for coming in range(number + len(begun), min(number + self.async_steps, max(self.last, number)) + 1):
            copied = copied or (own_copy(learner.weights()) if self.async_steps else learner.weights())
            self._begin(coming, copied, learner.version)
        played = self._steps.popleft().result()
        if played.number != number:
            raise UserError(
                f"the rollouts that the checkpoint holds for step {number} are of step {played.number}: delete it to use "
                "the previous one"
            )
        self._learned = played.after
        return played

    def run_between_steps(self, play: Callable[[Any], T]) -> T:
        """Return the result of `play(player)`, run after all steps begun so far."""
        player = self.collector.player
        return play(player) if self._thread is None else self._thread.call(lambda: play(player)).result()

    def state(self) -> dict[str, Any]:
        return {**self._learned.state(), **({"ahead": list(self._steps)} if self._steps else {})}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`. Raises ValueError, LookupError or TypeError if it is invalid."""
        self._learned = self.collector.restore(state)
        for row in state.get("ahead", ()):
            if row is None:  # it failed and ended the run, so it is sampled again, with the current weights
                break
            played = self._restored(row)
            if self._steps and played.number != self._steps[-1].result().number + 1:
                raise ValueError(f"rollouts of step {played.number} behind those of another step than the one before")
            self._steps.append(_Step(_made(played)))

    def close(self) -> None:
        """Stop, and abandon the steps that are being sampled."""
        if self._thread is not None:
            self._thread.close(END_SECONDS)

    def _begin(self, number: int, weights: Model, version: int) -> None:
        given = [weights]  # emptied by the engine that loads them: a copy must not last through an update

        def play() -> PlayedStep:
            return self._played(number, given, version)

        self._steps.append(_Step(self._thread.call(play) if self._thread is not None else _made(play())))

    def _played(self, number: int, given: list[Model], version: int) -> PlayedStep:
        player, stats = self.collector.player, Stats()
        before, began = self._work(), time.perf_counter()
        player.engine.load(given.pop(), version)
        loaded, seconds = time.perf_counter(), self._waited()
        player.services.begin(number)
        collected = self.collector.collect(number, self.groups, stats)
        if self._thread is None and isinstance(player.engine, Resting):  # the update follows
            player.engine.rest()
            player.world.gather(None)  # engines of other processes may be on this process's GPU
        seconds = {name: now - seconds[name] for name, now in self._waited().items()}
        seconds |= {"load": loaded - began, "play": time.perf_counter() - loaded}
        work = {name: now - before.get(name, 0.0) for name, now in self._work().items()}
        return PlayedStep(number, self.collector.position, collected, stats, seconds, self._counts(), work)

    def _work(self) -> dict[str, float]:
        """Return the counts of the engine so far."""
        engine = self.collector.player.engine
        return dict(engine.pace()) if isinstance(engine, Paced) else {}

    def _counts(self) -> dict[str, float]:
        """Return the counts of services, and of engines if there are several."""
        engine, services = self.collector.player.engine, self.collector.player.services
        engines = engine.counts() if isinstance(engine, Counting) else {}
        told = {f"services/{name}": value for name, value in services.counts().items()}
        return {**told, **{f"engines/{name}": value for name, value in engines.items()}}

    def _waited(self) -> dict[str, float]:
        """Return the seconds so far in which sampling waited for environments or services."""
        player = self.collector.player
        asked = {"services": player.services.waited} if player.services else {}
        return {"waiting": player.pool.waited, **asked}

    def _restored(self, row: Mapping[str, Any]) -> PlayedStep:
        places = {str(group): int(place) for group, place in row["places"].items()}
        tasks = {group: self.collector.task_of(group, place) for group, place in places.items()}
        rollouts = [restored(rollout, tasks[rollout["group"]]) for rollout in row["rollouts"]]
        stats = Stats({name: (float(total), float(count)) for name, (total, count) in row["stats"].items()})
        dropped = [Dropped(rollouts[place], Fate(fate), str(why)) for place, fate, why in row["left"]]
        collected = Collected(rollouts, [rollouts[place] for place in row["kept"]], dropped, places)
        return PlayedStep(int(row["number"]), self.collector.restore(row["after"]), collected, stats, {}, {}, {})


@dataclass(frozen=True)
class _Step:
    """A step that is being sampled, or has been. A state stores it as its rollouts."""

    result_of: Future[PlayedStep]

    def result(self) -> PlayedStep:
        return self.result_of.result()

    def plain(self) -> dict[str, Any] | None:
        """Return the step as JSON data; None if it failed, in which case the run has ended with its error."""
        try:
            played = self.result()
        except (Exception, CancelledError):
            return None
        places = {id(rollout): place for place, rollout in enumerate(played.collected.played)}
        return {
            "number": played.number,
            "after": played.after.plain(),
            "places": played.collected.places,
            "rollouts": [stored(rollout) for rollout in played.collected.played],
            "kept": [places[id(rollout)] for rollout in played.collected.kept],
            "left": [[places[id(each.rollout)], str(each.fate), each.why] for each in played.collected.dropped],
            "stats": played.stats,
        }


def _made(played: PlayedStep) -> Future[PlayedStep]:
    future: Future[PlayedStep] = Future()
    future.set_result(played)
    return future
