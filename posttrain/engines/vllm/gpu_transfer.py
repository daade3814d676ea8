"""Weight sync from GPU to GPU by vLLM's weight-transfer API: over NCCL, or by CUDA IPC on one GPU.

vLLM's trainer side drives each weight sync (init once, then start / update / finish). This module has the client
through which it calls a server, and the source from which it reads weights. It follows the documented API of
vLLM 0.32 and is tested with stand-ins: no run on GPUs has been recorded yet. Differences from the other transports: weights
are read from the learner while they are sent, so an engine that restarts within a step gets them with the next one; and
the checksum covers only names, types and shapes, so that only the weight probe verifies the contents.
"""

from __future__ import annotations

import base64
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import torch
from torch import Tensor

from posttrain.core.messages import one_line
from posttrain.engines.pool.pool_protocol import Gone
from posttrain.engines.servers.server_setup import checkpoint_tensors
from posttrain.engines.weight_sync import Call, Fetched, Receiver, Transport, WeightLayout, checksum_of_names
from posttrain.models.gpu_placement import working_on
from posttrain.models.row_shards import is_sharded
from posttrain.models.tensor_files import size_of

PIECE = 1 << 28  # bytes of weights that are sent at once within a GPU, unless one tensor has more
AHEAD = 2  # tensors that may be gathered before an engine's sender has taken them
LOOK_SECONDS = 0.5  # between two looks whether an engine that takes no tensor is lost

Backend = Literal["nccl", "ipc"]


class Client:
    """Implementation of vLLM's `VLLMWeightSyncClient`, whose four calls go to the server."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.call("start_weight_update", None)

    def update_weights(self, update_info: Any) -> None:
        for info in update_info if isinstance(update_info, list) else [update_info]:
            handles = info.pop("ipc_handles", None)
            if handles is not None:  # memory handles are not JSON; only our own server unpickles them
                info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
        self.call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update", None)


class WeightFeed:
    """Queue of weights from the thread that gathers them to the thread that sends them to an engine."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[str, Tensor, torch.Event | None] | Exception | None] = SimpleQueue()
        self._room = threading.Semaphore(AHEAD)

    def give(
        self, name: str, tensor: Tensor, event: torch.Event | None, until: float, alive: Callable[[], bool]
    ) -> bool:
        """Add a tensor as soon as there is room. Return False if there is none before `until`, or the reader has ended.

        `event`: recorded when the tensor is complete; `until`: a time of `time.monotonic`.
        """
        while not self._room.acquire(timeout=LOOK_SECONDS):
            if not alive() or time.monotonic() > until:
                return False
        self._queue.put((name, tensor, event))
        return True

    def end(self, error: Exception | None = None) -> None:
        """End the feed. `error`: raised where it is read, since weights are missing."""
        self._queue.put(error)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        while (given := self._queue.get()) is not None:
            if isinstance(given, Exception):
                raise given
            name, tensor, event = given
            if event is not None:  # vLLM reads in streams of its own
                stream = torch.cuda.current_stream(tensor.device)
                stream.wait_event(event)
                tensor.record_stream(stream)
            yield name, tensor
            del given, tensor
            self._room.release()


class GPUTransfer(Fetched):
    """Transport from GPU to GPU; implements `weight_sync.Transport`.

    Weights are gathered once and sent to all engines at the same time. If they are sharded, all training processes gather
    them together, and each sends them to its own engines. An engine that is lost meanwhile then gets the next version.
    """

    def __init__(self, backend: Backend, weight_layout: WeightLayout, seconds: float) -> None:
        """`seconds`: timeout of an engine between two tensors."""
        self.backend, self.weight_layout, self.seconds = backend, weight_layout, seconds
        self._weights: Any = None
        self._senders: dict[str, _Sender] = {}  # by the engine's name

    def put(self, weights: Any, version: int) -> None:
        layout = self.weight_layout.described
        names, shapes = [s["name"] for s in layout["stored"]], [s["shape"] for s in layout["stored"]]
        self._weights = weights
        self.offer = {
            "version": version,
            "checksum": checksum_of_names(names, [layout["dtype"]] * len(names), shapes),
        }

    def send(self, to: Sequence[Receiver]) -> dict[str, str]:
        sharded = any(map(is_sharded, self._weights.parameters()))
        for receiver in to:
            if receiver.first or receiver.name not in self._senders:
                self._senders[receiver.name] = _Sender(self.backend, self.weight_layout)
        senders = {receiver.name: self._senders[receiver.name] for receiver in to}
        device = self._weights.head.device
        for receiver in to:
            senders[receiver.name].start(receiver.name, receiver.call, device)
        if to or sharded:
            self._feed(list(senders.values()))
        if sharded:
            self.offer = None
        lost = {name: why for name, sender in senders.items() if (why := sender.join(self.seconds)) is not None}
        for name in lost:
            del self._senders[name]
        return lost

    def _feed(self, senders: list[_Sender]) -> None:
        """Gather the weights one by one, in the order of all training processes, for the engines that still read."""
        dtype, reading, error = self.weight_layout.dtype, senders, Gone("not all weights were gathered")
        try:
            with torch.no_grad():
                for name, stored in checkpoint_tensors(self._weights):
                    tensor = stored.to(dtype).contiguous()
                    event = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None
                    until = time.monotonic() + self.seconds
                    reading = [s for s in reading if s.feed.give(name, tensor, event, until, s.alive)]
            for sender in reading:
                sender.feed.end()
        finally:
            for sender in senders:
                sender.feed.end(error)  # has no effect if the feed has ended

    def done(self) -> None:
        self.offer = self._weights = None

    def close(self) -> None:
        self.done()
        self._senders.clear()


class _Sender:
    """vLLM's trainer side of one engine. It works in a thread, since a collective with a dead process may never return."""

    def __init__(self, backend: Backend, weight_layout: WeightLayout) -> None:
        self.backend, self.weight_layout = backend, weight_layout
        self.feed = WeightFeed()
        self._trainer: Any = None
        self._failed: list[BaseException] = []
        self._thread = threading.Thread()

    def start(self, name: str, call: Call, device: torch.device) -> None:
        """Begin to send the weights of a new feed."""
        self.feed = WeightFeed()

        def work() -> None:
            try:  # the current GPU and no_grad are a thread's own
                with working_on(device), torch.no_grad():
                    if self._trainer is None:
                        self._trainer = self._connect(name, call)
                    self._trainer.client.call = call
                    self._trainer.send_weights()
            except BaseException as error:
                self._failed.append(error)

        self._thread = threading.Thread(target=work, name=f"weights for {name}", daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, seconds: float) -> str | None:
        """Wait until the engine has the weights. Return why it does not get them; None: it has them."""
        self._thread.join(seconds)
        if self.alive():
            return f"the weights did not reach it within {seconds:g} s"
        return f"the weights did not reach it ({one_line(self._failed[0])[:200]})" if self._failed else None

    def _connect(self, name: str, call: Call) -> Any:
        """Return vLLM's trainer side, connected to a server."""
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

        stored, dtype, sender = self.weight_layout.stored, self.weight_layout.dtype, self

        class Source(WeightSource):  # type: ignore[misc]
            def metadata(self) -> list[Any]:
                return [ParamMeta(s.name, dtype, s.shape) for s in stored]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                return iter(sender.feed)

        if self.backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

            class WithinGPU(IPCTrainerWeightTransferEngine):  # type: ignore[misc]
                """Sends to a server on this process's GPU alone, so no other training process takes part."""

                def _all_gather_and_merge_handles(self, handles: list[Any]) -> list[Any]:
                    return handles

                @staticmethod
                def _post_send_sync() -> None:
                    torch.cuda.ipc_collect()

            # in pieces: else vLLM holds a second copy of all weights until the last one has arrived. A piece has room for
            # the largest tensor, as vLLM refuses a larger one
            room = max(PIECE, *(size_of(dtype, s.shape) for s in stored))
            how = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=room)
            return WithinGPU.trainer_init(how, client=Client(call), source=Source())
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        info = NCCLTrainerInitInfo(*free_address(name), 1 + world_size(call), rank=0)
        return NCCLTrainerWeightTransferEngine.trainer_init(info, client=Client(call), source=Source())


def world_size(call: Call) -> int:
    """Return the number of a server's processes, each with a GPU of its own. Raises Gone for an answer that is none."""
    size = call("get_world_size", None)  # with those of pipeline and data parallelism
    if type(size) is not int or size < 1:
        raise Gone(f"/get_world_size returned {size!r}, not a number of processes")
    return size


def free_address(name: str) -> tuple[str, int]:
    """Return an address of this machine, with a free port, at which a server of this name or URL can reach it."""
    host = "127.0.0.1"
    if (there := urlsplit(name).hostname) is not None:
        with socket.socket(type=socket.SOCK_DGRAM) as route:  # sends nothing
            route.connect((there, 9))
            host = route.getsockname()[0]
    with socket.socket() as probe:
        probe.bind((host, 0))
        return host, probe.getsockname()[1]


if TYPE_CHECKING:
    _proof: Callable[..., Transport] = GPUTransfer
