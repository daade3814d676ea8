"""A pool's view of an engine: its connection, its state, its open requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from posttrain.core.types import Completion
from posttrain.engines.pool.pool_protocol import Wire
from posttrain.engines.request import Request
from posttrain.engines.weight_sync import Transport


class MemberState(StrEnum):
    STARTING = "starting"
    STALE = "stale"  # alive, with no weights or old ones
    READY = "ready"
    DEAD = "dead"


class EngineLink(Protocol):
    """Connection to an engine that was started or is being reached."""

    @property
    def wire(self) -> Wire | None: ...  # None: not connected yet
    def look(self) -> None: ...  # raises Gone if it cannot be reached
    def end(self, kept: bool) -> str: ...  # returns how it ended, in words. `kept`: keep the log. May be called twice


class EnginePlace(Protocol):
    """Source of an engine of a pool: opens it as often as needed."""

    @property
    def name(self) -> str: ...
    @property
    def transport(self) -> Transport: ...
    def open(self) -> EngineLink: ...  # returns at once


@dataclass(eq=False)
class PoolMember:
    """An engine of a pool with its state."""

    place: EnginePlace
    link: EngineLink
    state: MemberState = MemberState.STARTING
    hello: dict[str, Any] = field(default_factory=dict)  # the properties that it reported at its start
    requests: dict[int, Request] = field(default_factory=dict)  # requests by ticket
    tokens: int = 0  # most tokens of its open requests
    cancelled: set[int] = field(default_factory=set)  # tickets
    loading: bool = False
    probe: dict[int, int] = field(default_factory=dict)  # tickets of the weight probe -> places
    probed: dict[int, Completion] = field(default_factory=dict)  # its results, by place
    held: int | None = None  # the version before the current one
    silent: float = 0.0  # seconds
    failures: int = 0  # in a row
    restart_at: float = 0.0  # earliest time of the next start
    useful: bool = False  # whether it has answered since the last weight sync

    @property
    def awaited(self) -> bool:
        """Whether an answer is due."""
        return self.state is MemberState.STARTING or self.loading or bool(self.probe or self.requests)

    @property
    def room(self) -> bool:
        """Whether it could begin another request soon."""
        return len(self.requests) <= self.hello["slots"] + self.hello["slots"] // 8
