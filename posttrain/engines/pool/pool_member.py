"""An engine of a pool as the pool knows it: how it is reached, what state it is in, what it owes."""

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
    STALE = "stale"  # it lives, and has no weights or old ones
    READY = "ready"
    DEAD = "dead"


class EngineLink(Protocol):
    """The way to an engine that was started or is being reached."""

    @property
    def wire(self) -> Wire | None: ...  # None: it is not reached yet
    def look(self) -> None: ...  # raises Gone if it cannot be reached
    def end(self, kept: bool) -> str: ...  # `kept`: what tells why; says how it ended, in words. May be called twice


class EnginePlace(Protocol):
    """Where an engine of a pool comes from, as often as it is needed."""

    @property
    def name(self) -> str: ...
    @property
    def transport(self) -> Transport: ...
    def open(self) -> EngineLink: ...  # waits for nothing


@dataclass(eq=False)
class PoolMember:
    """An engine as the pool knows it."""

    place: EnginePlace
    link: EngineLink
    state: MemberState = MemberState.STARTING
    hello: dict[str, Any] = field(default_factory=dict)  # what it said of itself when it was heard last
    owes: dict[int, Request] = field(default_factory=dict)  # by ticket
    tokens: int = 0  # that it owes at most
    cancelled: set[int] = field(default_factory=set)  # tickets
    loading: bool = False
    canary: dict[int, int] = field(default_factory=dict)  # tickets -> places
    sung: dict[int, Completion] = field(default_factory=dict)  # by place
    held: int | None = None  # the version that it had last
    silent: float = 0.0  # seconds
    failures: int = 0  # in a row
    again: float = 0.0  # when it may be started anew
    useful: bool = False  # whether it has answered since the last weight sync

    @property
    def awaited(self) -> bool:
        """Whether it has to say something."""
        return self.state is MemberState.STARTING or self.loading or bool(self.canary or self.owes)

    @property
    def room(self) -> bool:
        """Whether it could begin with one more soon."""
        return len(self.owes) <= self.hello["slots"] + self.hello["slots"] // 8
