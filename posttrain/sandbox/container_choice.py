"""Chooses where the containers of tasks run: in Docker or Podman on this machine, or at a service."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

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


def choose() -> ContainerEngine | type[RemoteSandbox]:
    """Return the service that POSTTRAIN_CONTAINERS names, or the engine of this machine.

    Raises UserError, with the fix, without the service's client or key, or without an engine.
    """
    name = os.environ.get(CHOICE)
    if name not in SERVICES:
        return find_engine()
    home = import_module(f"posttrain.sandbox.remote.{name}_sandbox")
    service: type[RemoteSandbox] = getattr(home, SERVICES[name])
    service.check()
    return service


async def start(
    image: str | None, folder: Path, build_seconds: float, limits: ContainerLimits, environment: Mapping[str, str]
) -> Container | RemoteSandbox:
    """Start a container of an image's name, or else of a folder with a Dockerfile. Raises ContainerError, UserError."""
    chosen = choose()
    if isinstance(chosen, ContainerEngine):
        name = image or await built_image(chosen, folder, build_seconds)
        return await Container.start(chosen, name, limits, environment)
    return await chosen.start(image or folder, build_seconds, limits, environment)


def about() -> str:
    """Describe where containers run, and remove those that earlier runs left on this machine. Raises UserError."""
    chosen = choose()
    if not isinstance(chosen, ContainerEngine):
        return f"containers: sandboxes of {chosen.SERVICE}"
    gone = remove_abandoned(chosen)
    left = f"; removed {gone} containers of processes that have ended" if gone else ""
    return f"containers: {chosen}{left}"
