"""Input of a simulation: episodes to sample, speeds of engines and learners, and their numbers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class JobTurn:
    """A turn of an episode: the environment works, the engine reads the new tokens, and samples."""

    steps: int  # decoding steps of the reply
    read: int = 0  # prompt tokens that the model reads before the first decoding step
    wait: float = 0.0  # seconds of the environment before the engine gets the request


@dataclass(frozen=True)
class JobEpisode:
    """A rollout as the simulation samples it."""

    stages: tuple[JobTurn, ...]
    reward: float = 0.0  # seconds from the last reply to the reward

    @property
    def sampled(self) -> int:
        return sum(stage.steps for stage in self.stages)


@dataclass(frozen=True)
class Group:
    """The rollouts of a task. An engine computes their shared first prompt once."""

    episodes: tuple[JobEpisode, ...]
    tokens: int  # tokens that an update learns from or reads; the shared prompt counts once


@dataclass(frozen=True)
class Speed:
    """The speed of one engine."""

    decoding: tuple[tuple[float, float], ...]  # (running requests, seconds of a step), sorted by requests
    read: float = 0.0  # seconds per prompt token
    load: float = 0.0  # seconds of a weight sync
    reply: float = 0.0  # seconds per finished reply in which the engine does not decode
    slots: int = 256  # requests at once
    admitted: int = 1  # free slots needed to admit requests while others run

    def step(self, running: int) -> float:
        """Return seconds of a decoding step: linear between measurements; beyond the last, the last line goes on."""
        known = self.decoding
        if len(known) == 1 or running <= known[0][0]:
            return known[0][1]
        place = min(bisect_right(known, (running, float("inf"))), len(known) - 1)
        (x, low), (y, high) = known[place - 1], known[place]
        slope = (high - low) / (y - x)
        return max(low if running < y else high, low + slope * (running - x))


@dataclass(frozen=True)
class Learning:
    """The speed of one learner; several learners share the tokens."""

    token: float  # seconds of scoring and updating, for each token of a group
    step: float = 0.0  # further seconds of a step: its record, evaluation and checkpoint
    sum: float = 0.0  # seconds a step to sum gradients, where there are several


@dataclass(frozen=True)
class Job:
    """The part of a job that does not depend on the machines."""

    prompts: int  # groups a step
    group: Callable[[int], Group]  # number n -> the n-th group of the job
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
    """Each device samples and learns in turns, as with --processes."""
    clock: bool = False
    """New weights go to all engines at once, under replies that are being sampled, and a step learns from the groups
    that are whole first: what other asynchronous trainers do, and the clock decides. For comparison."""

    @property
    def devices(self) -> int:
        return self.engines if self.shared else self.engines + self.learners
