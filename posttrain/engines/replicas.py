"""Where the engines of a pool come from: processes of this machine, or engines that listen elsewhere."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from posttrain.engines.canary import LIMIT, LIMIT_BFLOAT16, Canary
from posttrain.engines.handover import Files, SharedMemory, Transport
from posttrain.engines.pool import Link, Place, Pool
from posttrain.engines.process import Process
from posttrain.engines.vllm import (
    SAME,
    cache_bytes,
    dtype_of,
    environment,
    handed_over,
    prepare,
    require_vllm,
    shared_with_vllm,
)
from posttrain.engines.wire import PROOF_SECONDS, Gone, Wire, prove
from posttrain.kernels import build
from posttrain.messages import one_line
from posttrain.models.config_json import written_config
from posttrain.models.decoder import Decoder
from posttrain.models.json_files import write_json
from posttrain.models.tokenizer import Tokenizer
from posttrain.types import UserError

ALIVE_SECONDS = 1.0  # between two signs of life of an engine that works, at most
WORKER = "posttrain.engines.replica:main"

Kind = Literal["local", "vllm"]


def setup_of(
    kind: Kind,
    model: Decoder,
    tokenizer: Tokenizer,
    folder: Path,
    slots: int,
    precision: str,
    cache_gib: float,
    threads: int,
) -> dict[str, Any]:
    """What an engine has to know, but for what the pool says when it comes; files for it are written into a folder."""
    if kind == "vllm":
        require_vllm()
        eos = prepare(str(folder), model, tokenizer)
    else:
        tokenizer.save(folder)
        write_json(folder / "config.json", dict(model.source) or written_config(model.config))
        eos = model.eos_ids
    return {
        "engine": kind,
        "folder": str(folder),
        "context": model.config.context,
        "eos_ids": list(eos),
        "slots": slots,
        "precision": precision,
        "cache_gib": cache_gib,
        "cache_bytes": cache_bytes(model.config, slots, dtype_of(precision), cache_gib),
        "threads": threads,
        "compiled": build.used(),
        "device": str(model.head.device),
    }


class LocalProcess:
    """See `pool.Place`: a process of this machine, with the weights in memory that it shares."""

    def __init__(self, name: str, setup: dict[str, Any], transport: SharedMemory) -> None:
        self.name, self.transport = name, transport
        self.setup = {**setup, "layout": transport.layout}

    def open(self) -> Link:
        own = {"OMP_NUM_THREADS": str(self.setup["threads"])}
        if self.setup["engine"] == "vllm":
            device = torch.device(self.setup["device"])
            cards = {} if device.type == "cpu" else {"CUDA_VISIBLE_DEVICES": str(device.index or 0)}
            own = {**environment(), **own, **cards}
        return _ProcessLink(Process(WORKER, "engine", [self.transport.descriptor], own), self.setup)


class _ProcessLink:
    def __init__(self, process: Process, setup: dict[str, Any]) -> None:
        self.process, self.wire, self.ended = process, Wire(process.socket), False
        self.wire.tell("setup", setup)

    def look(self) -> None:
        pass

    def end(self, kept: bool) -> str:
        if self.ended:
            return ""
        self.ended = True
        if not kept:
            self.process.leave()
            return ""
        how = f" ({self.process.child.exit()})" if self.process.child.wait(0.1) else ""
        self.process.kill()
        if not self.process.log.stat().st_size:
            self.process.log.unlink()
            return how
        return f"{how}; its output is in {self.process.log}"


class Listening:
    """See `pool.Place`: an engine that was started with posttrain engine, here or elsewhere."""

    def __init__(self, address: str, token: bytes, transport: Transport, alive: float) -> None:
        """`alive`: seconds between two signs of life. Raises UserError for what is no address."""
        self.name, self.token, self.transport, self.alive = address, token, transport, alive
        self.host, self.port = host_and_port(address, "--engines")

    def open(self) -> Link:
        return _ListeningLink(self)


class _ListeningLink:
    """Connecting may take long, so it is done beside the pool."""

    def __init__(self, place: Listening) -> None:
        self.place = place
        self.wire: Wire | None = None
        self._found: socket.socket | Gone | None = None
        threading.Thread(target=self._connect, name=f"connects to {place.name}", daemon=True).start()

    def _connect(self) -> None:
        end = None
        try:
            end = socket.create_connection((self.place.host, self.place.port), PROOF_SECONDS)
            keep_alive(end)
            prove(end, self.place.token, listening=False)
            self._found = end
        except (OSError, Gone) as error:
            if end is not None:
                end.close()
            self._found = Gone(f"it cannot be reached: {one_line(error)}")

    def look(self) -> None:
        found = self._found
        if isinstance(found, Gone):
            raise found
        if self.wire is None and found is not None:
            self.wire = Wire(found)
            self.wire.tell("setup", {"layout": self.place.transport.layout, "alive": self.place.alive})

    def end(self, kept: bool) -> str:
        if self.wire is not None:
            self.wire.close()
        elif isinstance(self._found, socket.socket):
            self._found.close()
        return ""


def keep_alive(end: socket.socket) -> None:
    """Notice within a minute that the other machine is gone."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def host_and_port(address: str, option: str) -> tuple[str, int]:
    """Raises UserError for what is no address."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise UserError(f"{option} {address}: give a machine and a port, such as 127.0.0.1:7000")
    return host.strip("[]"), int(port)


def open_pool(
    kind: Kind,
    model: Decoder,
    tokenizer: Tokenizer,
    slots: int,
    precision: str,
    *,
    cache_gib: float,
    seconds: float,
    restarts: int,
    replicas: Sequence[int] = (),
    addresses: Sequence[str] = (),
    token: bytes = b"",
    folder: Path | None = None,
    rank: int = 0,
) -> Pool:
    """`replicas`: numbers of the processes to start. `addresses`: of engines that listen; `token`: what they want to know;
    `folder`: of the weights for them, on a disk that they see too; `rank`: of the process whose engines these are.

    Nothing is sampled, and nothing written there, before weights are loaded. Raises UserError where one does not start.
    """
    files = tempfile.TemporaryDirectory(prefix="posttrain-engines-")
    alive = min(ALIVE_SECONDS, seconds / 4)
    try:
        places: list[Place] = []
        if replicas:
            threads = max(1, torch.get_num_threads() // len(replicas))
            setup = setup_of(kind, model, tokenizer, Path(files.name), slots, precision, cache_gib, threads)
            shared = shared_with_vllm(model, precision) if kind == "vllm" else SharedMemory(model, model.head.dtype)
            setup["alive"] = alive
            places += [LocalProcess(str(number), _on_device(setup, number), shared) for number in replicas]
        if addresses:
            own = folder or Path(files.name) / "weights"
            laid = Files(own, rank, model, dtype_of(precision), handed_over, SAME if model.config.tied else None)
            on_disk = laid if kind == "vllm" else Files(own, rank, model, model.head.dtype)
            places += [Listening(address, token, on_disk, alive) for address in addresses]
        canary = Canary(model, LIMIT_BFLOAT16 if precision == "bfloat16" else LIMIT)
        sizes = model.config.context, model.config.vocab
        return Pool(places, canary, *sizes, seconds=seconds, restarts=restarts, closed=files.cleanup)
    except BaseException:
        files.cleanup()
        raise


def _on_device(setup: dict[str, Any], number: int) -> dict[str, Any]:
    """Each replica has a CUDA device of its own, as far as there are enough."""
    if setup["device"].startswith("cuda"):
        return {**setup, "device": f"cuda:{number % torch.cuda.device_count()}"}
    return setup


if TYPE_CHECKING:
    _proof: tuple[Callable[..., Place], ...] = (LocalProcess, Listening)
