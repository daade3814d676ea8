"""A pool of several environments: each episode runs in the pool of its task's part."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from typing import Any

from posttrain.core.types import Task
from posttrain.data.mixed_tasks import part_of
from posttrain.envs.play.env_outputs import Done, Event
from posttrain.envs.play.env_pool import EnvPool

PAUSE = 0.001  # seconds of waiting for one pool before the next one is polled


class MixedPool:
    """The pools of a mixture's environments, with the methods of an `EnvPool`. It does not close the pools."""

    def __init__(self, pools: Mapping[str, EnvPool]) -> None:
        """`pools`: name of the part -> its pool."""
        self.pools = dict(pools)
        self._of: dict[int, EnvPool] = {}  # the caller's id of an episode -> its pool
        self._waited = 0.0

    def start(self, id: int, task: Task, group: Hashable = None) -> None:
        self._of[id] = self.pools[part_of(task)]
        self._of[id].start(id, task, group)

    def branch(self, id: int, to: int) -> None:
        self._of[to] = self._of[id]
        self._of[id].branch(id, to)

    def send(self, id: int, said: Any) -> None:
        self._of[id].send(id, said)

    def drop(self, id: int) -> None:
        self._of.pop(id).drop(id)

    def clear(self) -> None:
        for pool in self.pools.values():
            pool.clear()
        self._of.clear()

    def poll(self, timeout: float | None = 0.0) -> list[tuple[int, Event]]:
        """Return the events since the last call, as `EnvPool.poll` does."""
        end = None if timeout is None else time.monotonic() + timeout
        events = [event for pool in self.pools.values() for event in pool.poll(0.0)]
        while not events and self.pending and (end is None or time.monotonic() < end):
            events = [event for pool in self.pools.values() if pool.pending for event in pool.poll(PAUSE)]
        for id, event in events:
            if isinstance(event, Done):
                self._of.pop(id, None)
        return events

    def ready(self) -> None:
        for pool in self.pools.values():
            pool.ready()

    @property
    def pending(self) -> int:
        return sum(pool.pending for pool in self.pools.values())

    @property
    def waited(self) -> float:
        """Seconds in which the caller only waited for an event."""
        return self._waited + sum(pool.waited for pool in self.pools.values())

    @waited.setter
    def waited(self, seconds: float) -> None:
        self._waited = seconds - sum(pool.waited for pool in self.pools.values())

    @property
    def single_turn(self) -> bool:
        """Whether all environments are plain rewards."""
        return all([pool.single_turn for pool in self.pools.values()])

    @property
    def by_group(self) -> bool:
        """Whether any reward scores whole groups."""
        return any([pool.by_group for pool in self.pools.values()])
