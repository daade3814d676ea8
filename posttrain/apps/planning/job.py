"""The input of a simulation: episodes to be sampled, speeds of engines and learners, and their numbers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class JobTurn:
    """A turn of an episode: the environment works, the engine reads the new tokens, and samples."""

    steps: int  # decoding steps of the reply
    read: int = 0  # tokens that go through the model before the first of them
    wait: float = 0.0  # seconds of the environment before the engine is asked


@dataclass(frozen=True)
class JobEpisode:
    """One rollout as it is sampled."""

    stages: tuple[JobTurn, ...]
    reward: float = 0.0  # seconds from its last reply to its reward

    @property
    def sampled(self) -> int:
        return sum(stage.steps for stage in self.stages)


@dataclass(frozen=True)
class Group:
    """The rollouts of a task. The first prompt of all of them is computed once on an engine."""

    episodes: tuple[JobEpisode, ...]
    tokens: int  # that an update learns from or reads, the shared prompt once


@dataclass(frozen=True)
class Speed:
    """The speed of one engine."""

    decoding: tuple[tuple[float, float], ...]  # (running requests, seconds of a step), by the first
    read: float = 0.0  # seconds a token that is read
    load: float = 0.0  # seconds of a weight sync
    reply: float = 0.0  # seconds in which a finished reply keeps it from decoding
    slots: int = 256  # requests at once
    admitted: int = 1  # free slots that are waited for before requests are admitted, while others run

    def step(self, running: int) -> float:
        """Seconds of a decoding step: on the line between measurements, beyond them on the last line."""
        known = self.decoding
        if len(known) == 1 or running <= known[0][0]:
            return known[0][1]
        place = min(bisect_right(known, (running, float("inf"))), len(known) - 1)
        (x, low), (y, high) = known[place - 1], known[place]
        slope = (high - low) / (y - x)
        return max(low if running < y else high, low + slope * (running - x))


@dataclass(frozen=True)
class Learning:
    """The speed of one learner; several share the tokens."""

    token: float  # seconds of scoring and updating, for each token of a group
    step: float = 0.0  # seconds that a step takes besides: its record, evaluation and checkpoint
    sum: float = 0.0  # seconds a step to sum gradients, where there are several


@dataclass(frozen=True)
class Job:
    """The part of a job that the options fix on any machines."""

    prompts: int  # groups a step
    group: Callable[[int], Group]  # the n-th that is begun
    speed: Speed
    learning: Learning


@dataclass(frozen=True)
class PlanSetting:
    """The arrangement of a job: engines, learners, and how they work together."""

    engines: int
    learners: int = 1
    async_steps: int = 0
    """Step n learns from rollouts sampled by the weights after step n - 1 - async_steps."""
    tokens: int | None = None
    """A reply that is unfinished after so many tokens of its step goes on in the next one, with that one's weights."""
    shared: bool = False
    """Each device is engine and learner in turns, as with --processes."""
    clock: bool = False
    """New weights go to all engines at once, under replies that are being sampled, and a step learns from the groups
    that are whole first: what other asynchronous trainers do, and the clock decides. For comparison."""

    @property
    def devices(self) -> int:
        return self.engines if self.shared else self.engines + self.learners
