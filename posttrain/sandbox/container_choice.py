"""Chooses where the containers of tasks run: in Docker or Podman on this machine, in its jails, or at a service."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path

from posttrain.core.types import UserError
from posttrain.sandbox import bubblewrap, capabilities
from posttrain.sandbox.bubblewrap_container import NAME, BubblewrapContainer, about_machine
from posttrain.sandbox.containers import (
    CHOICE,
    SERVICES,
    Container,
    ContainerEngine,
    ContainerLimits,
    built_image,
    find_engine,
    remove_abandoned,
)
from posttrain.sandbox.remote.remote_sandbox import RemoteSandbox

AnyContainer = Container | BubblewrapContainer | RemoteSandbox
Home = ContainerEngine | type[BubblewrapContainer] | type[RemoteSandbox]


def choose() -> Home:
    """Return the service or jail that POSTTRAIN_CONTAINERS names, or the engine of this machine, or its jail.

    Raises UserError, with the fix, without the service's client or key, or without an engine and bubblewrap.
    """
    name = os.environ.get(CHOICE)
    if name in SERVICES:
        home = import_module(f"posttrain.sandbox.remote.{name}_sandbox")
        service: type[RemoteSandbox] = getattr(home, SERVICES[name])
        service.check()
        return service
    if name == NAME:
        bubblewrap.check()
        return BubblewrapContainer
    return find_engine() if name is not None else _of_this_machine()


@cache
def _of_this_machine() -> ContainerEngine | type[BubblewrapContainer]:
    try:
        return find_engine()
    except UserError as error:
        if (reason := BubblewrapContainer.unusable()) is not None:
            bare = "tasks of a plain Debian, Ubuntu or Python need bubblewrap alone"
            raise UserError(f"{error}; {bare}: {reason}") from None
        return BubblewrapContainer


async def start(
    image: str | None, folder: Path, build_seconds: float, limits: ContainerLimits, environment: Mapping[str, str]
) -> AnyContainer:
    """Start a container of an image's name, or else of a folder with a Dockerfile. Raises ContainerError, UserError."""
    chosen = choose()
    if isinstance(chosen, ContainerEngine):
        name = image or await built_image(chosen, folder, build_seconds)
        return await Container.start(chosen, name, limits, environment)
    return await chosen.start(image or folder, build_seconds, limits, environment)


def about() -> str:
    """Describe where containers run, and remove those that earlier runs left on this machine. Raises UserError."""
    chosen = choose()
    if isinstance(chosen, ContainerEngine):
        gone = remove_abandoned(chosen)
        left = f"; removed {gone} containers of processes that have ended" if gone else ""
        return f"containers: {chosen}{left}"
    if issubclass(chosen, RemoteSandbox):
        return f"containers: sandboxes of {chosen.SERVICE}"
    capabilities.sweep()
    return f"containers: {about_machine()}"


def check(source: Path | str, network: bool, users: Iterable[str | None]) -> None:
    """Raise UserError for an image's name, or a folder with a Dockerfile, of which no container can be made here."""
    if choose() is not BubblewrapContainer:
        return
    try:
        BubblewrapContainer.check(source, network, users)
    except UserError as error:
        raise UserError(f"{error}: this needs a container, and {_without_engine()}") from None


def _without_engine() -> str:
    try:
        return f"{CHOICE} chooses {NAME}, not {find_engine()}"
    except UserError as error:
        return str(error)
