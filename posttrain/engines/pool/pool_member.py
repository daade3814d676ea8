"""An engine as its pool sees it: connection, state and open requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from posttrain.core.types import Completion
from posttrain.engines.pool.pool_protocol import Wire
from posttrain.engines.request import Request
from posttrain.engines.weight_sync import Offer, Transport


class MemberState(StrEnum):
    STARTING = "starting"
    STALE = "stale"  # alive, without weights or with old ones
    READY = "ready"
    DEAD = "dead"


class EngineLink(Protocol):
    """Connection to an engine that was started."""

    @property
    def wire(self) -> Wire: ...
    def look(self) -> None: ...  # raises Gone if the engine has ended
    def end(self, kept: bool) -> str: ...  # returns a description of the end. `kept`: keep the log


class EnginePlace(Protocol):
    """The place of one engine of a pool, which opens the engine again after each loss."""

    @property
    def name(self) -> str: ...
    @property
    def transport(self) -> Transport: ...
    @property
    def sleeps(self) -> bool: ...  # whether its engine can free its GPU memory between the phases of a step
    def open(self) -> EngineLink: ...  # returns at once


@dataclass(eq=False)
class PoolMember:
    """An engine of a pool, and its state."""

    place: EnginePlace
    link: EngineLink
    state: MemberState = MemberState.STARTING
    properties: dict[str, Any] = field(default_factory=dict)  # as the engine reported them at its start
    requests: dict[int, Request] = field(default_factory=dict)  # open requests by ticket
    tokens: int = 0  # maximum of tokens of the open requests
    cancelled: set[int] = field(default_factory=set)  # tickets of cancelled requests
    offered: Offer | None = None  # weights that it was asked to load, and has not answered
    sleep_requested: bool = False  # it was asked to free its GPU memory, and has not answered
    probe: dict[int, int] = field(default_factory=dict)  # open tickets of the weight probe -> number of its request
    probed: dict[int, Completion] = field(default_factory=dict)  # results of the weight probe, by number of the request
    held: int | None = None  # version of the weights that last passed the probe; None: none since its start
    memory: float = 0.0  # GB: most of its GPU between two weight syncs; 0: not known
    silent: float = 0.0  # seconds without a message
    failures: int = 0  # losses in a row
    restart_at: float = 0.0  # earliest time of the next start
    useful: bool = False  # whether it has answered since the last weight sync

    @property
    def awaited(self) -> bool:
        """Whether the engine owes an answer."""
        return (
            self.state is MemberState.STARTING
            or self.offered is not None
            or self.sleep_requested
            or bool(self.probe or self.requests)
        )

    @property
    def room(self) -> bool:
        """Whether the engine could begin another request soon."""
        return len(self.requests) <= self.properties["slots"] + self.properties["slots"] // 8
