"""Engines as Ray actors, which Ray places on the machines of a cluster and calls.

An actor serves the pool at one end of a socket pair, like a child process. Calls of the actor write to and read from
the other end, so Ray carries the messages. Weights are in Ray's object store, and each machine gets one copy of a
version, which its actors read. When an actor dies, its calls raise an error; the pool then loses its connection, as
with any other engine.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.core import user_files
from posttrain.core.extras import install
from posttrain.core.messages import one_line
from posttrain.core.types import UserError
from posttrain.engines.pool.pool_member import EngineLink, EnginePlace
from posttrain.engines.pool.pool_protocol import PIECE, Wire
from posttrain.engines.pool.replica import LocalHost, serve_pool
from posttrain.engines.weight_sync import Fetched, Offer, Receiver, Transport, WeightLayout
from posttrain.system.temp_folders import TempFolder

INWARD, OUTWARD = "inward", "outward"  # calls of one group run one after the other, in the order of the caller
END_SECONDS = 10.0  # for the last call of an actor that was killed to raise its error


class Actor:
    """The actor that runs an engine. `files`: contents of the files in the setup's folder, by name."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files
        self._ours, self._theirs = socket.socketpair()
        self._weights: list[Any] = []  # a reference to the weights that are offered next

    def serve(self) -> None:
        """Serve the pool until it is gone."""
        with self._theirs:
            serve_pool(Wire(self._theirs), self._host)

    def write(self, piece: bytes) -> None:
        """Pass bytes of the pool on to the engine."""
        with suppress(OSError):  # the engine has failed: `read` returns the reason
            self._ours.sendall(piece)

    def read(self) -> bytes:
        """Wait for bytes of the engine; none: it has ended."""
        return self._ours.recv(PIECE)

    def give(self, weights: list[Any]) -> None:
        """Take the reference to weights, before their offer. It is in a list, as Ray passes a bare one on as its value."""
        self._weights = weights

    def _host(self, setup: dict[str, Any]) -> LocalHost:
        with TempFolder("engine") as folder:
            for name, content in self._files.items():
                Path(folder, name).write_bytes(content)
            return LocalHost({**setup, "folder": folder}, self._offered)

    def _offered(self, offer: Offer) -> Tensor:
        import ray

        [reference], self._weights = self._weights, []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that they are read-only
            return torch.from_numpy(ray.get(reference))


class RayWeights(Fetched):
    """Transport through Ray's object store; implements `weight_sync.Transport`."""

    def __init__(self, ray: Any, weight_layout: WeightLayout) -> None:
        self.ray, self.weight_layout = ray, weight_layout
        self.actors: dict[str, Any] = {}  # by the engine's name
        self._memory = torch.empty(weight_layout.bytes, dtype=torch.uint8)
        self._reference: Any = None

    def put(self, weights: Any, version: int) -> None:
        """Copy the weights into the object store. Raises UserError if they do not fit."""
        self._reference = None  # frees the last version first
        checksum = self.weight_layout.write(weights, self._memory)
        try:
            self._reference = self.ray.put(self._memory.numpy())
        except self.ray.exceptions.RayError as error:
            raise UserError(f"the weights cannot be put into Ray's object store: {one_line(error)[:200]}") from error
        self.offer = {"version": version, "checksum": checksum}

    def send(self, to: Sequence[Receiver]) -> dict[str, str]:
        for receiver in to:
            _call(self.actors[receiver.name].give, INWARD, [self._reference])
        return {}

    def close(self) -> None:
        self._reference = None


class RayPlaces:
    """Places of a pool's engines on the cluster at RAY_ADDRESS, or on a local cluster started for the run."""

    def __init__(self, setup: dict[str, Any], weight_layout: WeightLayout, cpus: float) -> None:
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
            except Exception as error:  # a timeout of its start has no class of its own
                raise UserError(f"--launch ray: no cluster could be reached ({one_line(error)})") from error
        folder, cuda = Path(setup["folder"]), setup["device"].startswith("cuda")
        self.setup = {**setup, "device": "cuda" if cuda else "cpu"}  # Ray shows an actor its own GPU alone
        self.files = {path.name: user_files.content(path) for path in folder.iterdir() if path.is_file()}
        self.transport = RayWeights(ray, weight_layout)
        self.actor: Any = ray.remote(
            num_cpus=cpus, num_gpus=int(cuda), max_restarts=0, concurrency_groups={INWARD: 1, OUTWARD: 1}
        )(Actor)

    def places(self, count: int) -> list[EnginePlace]:
        return [_RayPlace(f"{number} (Ray)", self) for number in range(count)]

    def close(self) -> None:
        if self._began:
            self.ray.shutdown()


class _RayPlace:
    """Place of one engine on the cluster; implements `pool_member.EnginePlace`."""

    sleeps = False

    def __init__(self, name: str, of: RayPlaces) -> None:
        self.name, self.of, self.transport = name, of, of.transport

    def open(self) -> EngineLink:
        actor = self.transport.actors[self.name] = self.of.actor.remote(self.of.files)
        return _RayLink(self.of, actor)


class _RayLink:
    """An actor, and the connection to it."""

    def __init__(self, of: RayPlaces, actor: Any) -> None:
        self.ray, self.actor = of.ray, actor
        self.wire = _RayWire(of.ray, actor)
        self.wire.send("setup", of.setup)

    def look(self) -> None:
        pass  # the wire notices

    def end(self, kept: bool) -> str:
        self.wire.close()
        self.ray.kill(self.actor)
        self.wire.reader.join(END_SECONDS)
        return ""


class _RayWire(Wire):
    """A connection of which calls of an actor are the other end."""

    def __init__(self, ray: Any, actor: Any) -> None:
        ours, self._theirs = socket.socketpair()
        super().__init__(ours)
        self._ray, self._actor = ray, actor
        _call(actor.serve)
        self.reader = threading.Thread(target=self._read, name="reads from Ray", daemon=True)
        self.reader.start()

    def flush(self) -> None:
        if self._out:
            _call(self._actor.write, INWARD, bytes(self._out))
            self._out.clear()

    def _read(self) -> None:
        """Forward the bytes of the actor, until it or this side ends."""
        with self._theirs, suppress(OSError):
            try:
                while piece := self._ray.get(self._actor.read.options(concurrency_group=OUTWARD).remote()):
                    self._theirs.sendall(piece)
            except self._ray.exceptions.RayError as error:
                why = (str(error).strip().splitlines() or [type(error).__name__])[-1]  # the lines before are ids
                Wire(self._theirs).send("failed", f"Ray lost it ({why:.200})")


def _call(method: Any, group: str | None = None, *arguments: Any) -> None:
    """Call a method of an actor that returns nothing. Calls of one group run in their order."""
    method.options(concurrency_group=group, num_returns=0).remote(*arguments)


if TYPE_CHECKING:
    _proof: tuple[Callable[..., EnginePlace], Callable[..., Transport]] = (_RayPlace, RayWeights)
