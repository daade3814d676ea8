"""Engines as Ray actors, which listen for the pool on any machine of the cluster.

Ray carries neither weights nor requests: the pool connects to an actor over a socket, as to any engine that listens,
with a token made for this run, and syncs weights through files. When an actor dies, its socket closes, and so the pool
detects the loss.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core import user_files
from posttrain.core.extras import install
from posttrain.core.messages import one_line
from posttrain.core.types import UserError
from posttrain.engines.pool.places import Listening
from posttrain.engines.pool.pool_member import EngineLink, EnginePlace
from posttrain.engines.pool.pool_protocol import Gone, Wire
from posttrain.engines.weight_sync import Files
from posttrain.system.temp_folders import TempFolder


class Actor:
    """The actor that runs an engine. `files`: contents of the files in the setup's folder, by name."""

    def __init__(self, setup: dict[str, Any], files: Mapping[str, bytes], token: bytes) -> None:
        import ray

        from posttrain.engines.pool.listener import listen

        os.environ["OMP_NUM_THREADS"] = str(setup["threads"])
        self._folder = TempFolder("engine")
        folder = self._folder.name
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        host = ray.util.get_node_ip_address()

        def work() -> None:
            try:
                listen({**setup, "folder": folder}, f"{host}:0", token, self._said.put)
            except BaseException:
                traceback.print_exc()
            os._exit(1)  # an actor without an engine is useless

        threading.Thread(target=work, daemon=True).start()

    def address(self) -> str:
        return self._said.get().split()[-1]  # the address in its first message


class RayPlaces:
    """Places of a pool's engines on the cluster at RAY_ADDRESS, or on a local cluster started for the run."""

    def __init__(self, setup: dict[str, Any], transport: Files, cpus: float, alive: float) -> None:
        """Connect to Ray. `cpus`: processors per engine. Raises UserError if Ray is not installed or not reachable."""
        try:
            import ray
        except ImportError as error:
            raise UserError(f"Ray is not installed: {install('ray')}, or leave out --launch") from error
        self.ray: Any = ray
        self._began = not ray.is_initialized()
        if self._began:
            here = os.pathsep.join(path or os.getcwd() for path in sys.path)
            variables = {"PYTHONPATH": here, "OMP_NUM_THREADS": str(setup["threads"])}
            try:
                ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
                         runtime_env={"env_vars": variables})  # fmt: skip
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise UserError(f"--launch ray: no cluster could be reached ({one_line(error)})") from error
        folder = Path(setup["folder"])
        self.setup, self.files = (
            setup,
            {path.name: user_files.content(path) for path in folder.iterdir() if path.is_file()},
        )
        self.transport, self.alive, self.token = transport, alive, secrets.token_hex(32).encode()
        cards = 1 if setup["device"].startswith("cuda") else 0
        self.actor: Any = self.ray.remote(num_cpus=cpus, num_gpus=cards, max_restarts=0)(Actor)

    def places(self, numbers: Sequence[int]) -> list[EnginePlace]:
        return [_RayPlace(f"{number} (Ray)", self) for number in numbers]

    def close(self) -> None:
        if self._began:
            self.ray.shutdown()


class _RayPlace:
    """Place of one engine on the cluster; implements `pool_member.EnginePlace`."""

    sleeps = False

    def __init__(self, name: str, of: RayPlaces) -> None:
        self.name, self.of, self.transport = name, of, of.transport

    def open(self) -> EngineLink:
        return _RayLink(self.of)


class _RayLink:
    """A pending request for an actor, and then the connection to the actor."""

    def __init__(self, of: RayPlaces) -> None:
        self.of = of
        self._reached: EngineLink | None = None
        setup = {**of.setup, "device": "cuda" if of.setup["device"].startswith("cuda") else "cpu"}
        self.actor = of.actor.remote(setup, of.files, of.token)
        self._address = self.actor.address.remote()

    @property
    def wire(self) -> Wire | None:
        return self._reached.wire if self._reached is not None else None

    def look(self) -> None:
        ray = self.of.ray
        if self._reached is not None:
            self._reached.look()
        elif ray.wait([self._address], timeout=0)[0]:
            try:
                address = ray.get(self._address)
            except ray.exceptions.RayError as error:
                raise Gone(f"Ray could not start it ({one_line(error)[:200]})") from error
            self._reached = Listening(address, self.of.token, self.of.transport, self.of.alive).open()

    def end(self, kept: bool) -> str:
        if self._reached is not None:
            self._reached.end(kept)
        self.of.ray.kill(self.actor)
        return ""


if TYPE_CHECKING:
    _proof: Callable[..., EnginePlace] = _RayPlace
