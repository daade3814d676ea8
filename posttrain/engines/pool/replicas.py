"""Where the engines of a pool come from: processes of this machine, or engines that listen elsewhere."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from posttrain.core.messages import one_line
from posttrain.core.protocols import Model, World
from posttrain.core.types import UserError
from posttrain.engines.engine_process import EngineProcess
from posttrain.engines.local.engine_weights import named_weights
from posttrain.engines.model_manifest import announced
from posttrain.engines.pool.engine_pool import EnginePool
from posttrain.engines.pool.pool_member import EngineLink, EnginePlace
from posttrain.engines.pool.pool_protocol import PROOF_SECONDS, Gone, Wire, prove, read_token
from posttrain.engines.pool.weight_probe import LIMIT, LIMIT_BFLOAT16, WeightProbe
from posttrain.engines.vllm.nccl_transfer import CardToCard
from posttrain.engines.vllm.vllm_engine import (
    cache_bytes,
    dtype_of,
    environment,
    laid_for_vllm,
    prepare,
    require_vllm,
)
from posttrain.engines.weight_sync import Files, Laid, SharedMemory, Transport
from posttrain.models.hf.backed import Backed
from posttrain.models.json_files import write_json
from posttrain.models.native.kernels import build
from posttrain.models.tokenizer.tokenizer import Tokenizer

ALIVE_SECONDS = 1.0  # between two signs of life of an engine that works, at most
WORKER = "posttrain.engines.pool.replica:main"

Kind = Literal["local", "vllm"]


@dataclass(frozen=True)
class Many:
    """Engines of a pool, as the options of a run name them. None: one engine, in the place that its kind has."""

    replicas: int = 0  # processes to start
    addresses: Sequence[str] = ()  # engines that listen
    token: str | None = None  # the file that holds what these want to know
    restarts: int = 5
    folder: Path | None = None  # of weights for engines elsewhere, on a disk that all see
    launch: Literal["local", "ray"] = "local"  # who starts processes, and where
    cpus: float = 1.0  # of a cluster, for each of them
    weight_sync: Literal["copied", "adapter", "nccl", "ipc"] = "copied"  # how weights reach processes of this machine
    rank: int = 0  # of the process whose engines these are

    def __bool__(self) -> bool:
        return bool(self.replicas or self.addresses)

    def of(self, world: World) -> Many:
        """The share of one of the processes of a run. Raises UserError where it has none."""
        if self.weight_sync == "adapter":
            if self or world.size > 1:
                raise UserError(
                    "--weight-sync adapter requires one training process with one vLLM: leave out --replicas and --engines"
                )
        elif self.weight_sync != "copied" and (world.size > 1 or not self.replicas or self.launch != "local"):
            raise UserError(
                f"--weight-sync {self.weight_sync} requires one training process, with --replicas on its machine"
            )
        if self and self.replicas + len(self.addresses) < world.size:
            raise UserError(
                f"each of {world.size} processes samples with engines of its own: give as many at least (--replicas, "
                "--engines)"
            )
        first = (world.rank - self.replicas) % world.size  # addresses are dealt on where the replicas end
        own = len(range(world.rank, self.replicas, world.size)), self.addresses[first :: world.size]
        return replace(self, replicas=own[0], addresses=own[1], rank=world.rank)


def setup_of(
    kind: Kind,
    model: Model,
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
        write_json(folder / "config.json", announced(model).config)
        eos = model.eos_ids
    cache = cache_bytes(model, slots, dtype_of(precision), cache_gib)
    return {
        "engine": kind, "folder": str(folder), "context": model.config.context, "eos_ids": list(eos), "slots": slots,
        "precision": precision, "cache_gib": cache_gib, "cache_bytes": cache, "threads": threads,
        "compiled": build.used(), "device": str(model.head.device), "backed": how(model),
    }  # fmt: skip


def how(model: Model) -> dict[str, Any] | None:
    """What was found out of a model of transformers when it was loaded."""
    if not isinstance(model, Backed):
        return None
    own = {"scale": model.scale, "cap": model.cap, "attention": model.rows_attention}
    return {**own, "replays": model.replays}


def environment_of(setup: dict[str, Any]) -> dict[str, str]:
    """What the process of an engine is to find in its environment, besides ours."""
    threads = {"OMP_NUM_THREADS": str(setup["threads"])}
    return {**environment(), **threads} if setup["engine"] == "vllm" else threads


class LocalProcess:
    """See `members.Place`: a process of this machine, with the weights in memory that it shares."""

    def __init__(self, name: str, setup: dict[str, Any], memory: SharedMemory, transport: Transport) -> None:
        """`transport`: the memory, or what hands weights over in its place."""
        self.name, self.memory, self.transport = name, memory, transport
        self.setup = {**setup, "layout": transport.layout}

    def open(self) -> EngineLink:
        own, device = environment_of(self.setup), torch.device(self.setup["device"])
        if self.setup.get("transfer") == "ipc":
            own["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # handles of memory, which come from us
        if self.setup["engine"] == "vllm" and device.type == "cuda":
            own["CUDA_VISIBLE_DEVICES"] = str(device.index or 0)
        return _ProcessLink(EngineProcess(WORKER, "engine", [self.memory.descriptor], own), self.setup)


class _ProcessLink:
    def __init__(self, process: EngineProcess, setup: dict[str, Any]) -> None:
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
    """See `members.Place`: an engine that was started with posttrain engine, here or elsewhere."""

    def __init__(self, address: str, token: bytes, transport: Transport, alive: float) -> None:
        """`alive`: seconds between two signs of life. Raises UserError for what is no address."""
        self.name, self.token, self.transport, self.alive = address, token, transport, alive
        self.host, self.port = host_and_port(address, "--engines")

    def open(self) -> EngineLink:
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
    scheme, found, rest = address.partition("://")
    if found:
        there = rest.partition("/")[0] or "127.0.0.1:7000"
        raise UserError(f"{option} {address}: it is no {scheme} that is spoken there: give {there} alone")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise UserError(f"{option} {address}: give a machine and a port, such as 127.0.0.1:7000")
    return host.strip("[]"), int(port)


def open_pool(
    kind: Kind,
    model: Model,
    tokenizer: Tokenizer,
    slots: int,
    precision: str,
    many: Many,
    *,
    cache_gib: float,
    seconds: float,
) -> EnginePool:
    """Nothing is sampled, and no weights are written to a disk, before some are loaded.

    Raises UserError where one of the engines does not start.
    """
    if many.weight_sync != "copied" and (kind != "vllm" or model.head.device.type != "cuda"):
        raise UserError(f"--weight-sync {many.weight_sync} requires vLLM on GPUs: --engine vllm --device cuda")
    token = read_token(many.token) if many.addresses else b""
    with ExitStack() as opened:
        own = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="posttrain-engines-")))
        alive = min(ALIVE_SECONDS, seconds / 4)
        dtype = dtype_of(precision) if kind == "vllm" else model.head.dtype
        laid = laid_for_vllm(model, dtype) if kind == "vllm" else Laid(model, dtype, named_weights)
        files = Files(many.folder or own / "weights", many.rank, laid)
        places: list[EnginePlace] = [Listening(address, token, files, alive) for address in many.addresses]
        if many.replicas:
            ray = many.launch == "ray"
            threads = many.cpus if ray else torch.get_num_threads() / many.replicas
            setup = setup_of(kind, model, tokenizer, own, slots, precision, cache_gib, max(1, int(threads)))
            if ray:
                from posttrain.engines.pool.ray_engines import RayPlaces

                cluster = opened.enter_context(closing(RayPlaces(setup, files, many.cpus, alive)))
                places += cluster.places(range(many.replicas))
            else:
                memory = SharedMemory(laid)
                opened.callback(memory.close)
                transport: Transport = memory
                if many.weight_sync in ("nccl", "ipc"):
                    transport = CardToCard(many.weight_sync, laid, seconds)
                    setup["transfer"] = many.weight_sync
                setups = [_on_device({**setup, "alive": alive}, number) for number in range(many.replicas)]
                places += [LocalProcess(str(number), setup, memory, transport) for number, setup in enumerate(setups)]
        canary = WeightProbe(model, LIMIT_BFLOAT16 if precision == "bfloat16" else LIMIT)
        sizes = model.config.context, model.config.vocab
        return EnginePool(
            places, canary, *sizes, seconds=seconds, restarts=many.restarts, closed=opened.pop_all().close
        )
    raise AssertionError("nothing above is left without a pool")


def _on_device(setup: dict[str, Any], number: int) -> dict[str, Any]:
    """Each replica has a CUDA device of its own, as far as there are enough."""
    if setup["device"].startswith("cuda"):
        return {**setup, "device": f"cuda:{number % torch.cuda.device_count()}"}
    return setup


if TYPE_CHECKING:
    _proof: tuple[Callable[..., EnginePlace], ...] = (LocalProcess, Listening)
