"""Weight sync from GPU to GPU by vLLM's weight-transfer API: over NCCL, or by CUDA IPC on one GPU.

vLLM's trainer side drives each weight sync (init once, then start / update / finish). This module has the client
through which it calls a server, and the source from which it reads weights. It follows the documented API of
vLLM 0.32 and is tested with fakes: no run on GPUs has been recorded yet. Differences from the other transports: weights
are read from the learner while they are sent, so an engine that restarts within a step gets them with the next one; and
the checksum covers only names, types and shapes, so that only the weight probe verifies the contents.
"""

from __future__ import annotations

import base64
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import torch
from torch import Tensor

from posttrain.core.messages import one_line
from posttrain.engines.pool.pool_protocol import Gone
from posttrain.engines.servers.server_setup import checkpoint_tensors
from posttrain.engines.weight_sync import Call, Fetched, Transport, WeightLayout, checksum_of_names
from posttrain.models.gpu_placement import working_on
from posttrain.models.tensor_files import size_of

PIECE = 1 << 28  # bytes of weights that are sent at once within a GPU, unless one tensor has more

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


class CardToCard(Fetched):
    """Transport from GPU to GPU; implements `weight_sync.Transport`. `seconds`: timeout of one weight sync."""

    def __init__(self, backend: Backend, weight_layout: WeightLayout, seconds: float) -> None:
        self.backend, self.weight_layout, self.seconds = backend, weight_layout, seconds
        self._weights: Any = None
        self._senders: dict[str, Any] = {}  # vLLM's trainer side, by the engine's name

    def put(self, weights: Any, version: int) -> None:
        layout = self.weight_layout.described
        names, shapes = [s["name"] for s in layout["stored"]], [s["shape"] for s in layout["stored"]]
        self._weights = weights
        self.offer = {
            "version": version,
            "checksum": checksum_of_names(names, [layout["dtype"]] * len(names), shapes),
        }

    def send(self, name: str, first: bool, call: Call) -> None:
        """Send the weights in a thread, since a collective with a dead process may never return. Raises Gone."""
        failed: list[BaseException] = []

        def work() -> None:
            try:  # the current GPU and no_grad are a thread's own
                with working_on(self._weights.head.device), torch.no_grad():
                    if first or name not in self._senders:
                        self._senders[name] = self._sender(name, call)
                    self._senders[name].client.call = call
                    self._senders[name].send_weights()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=work, name=f"weights for {name}", daemon=True)
        thread.start()
        thread.join(self.seconds)
        if thread.is_alive():
            raise Gone(f"the weights did not reach it within {self.seconds:g} s")
        if failed:
            raise Gone(f"the weights did not reach it ({one_line(failed[0])[:200]})") from failed[0]

    def _sender(self, name: str, call: Call) -> Any:
        """Return vLLM's trainer side, connected to a server."""
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

        transport = self

        class Source(WeightSource):  # type: ignore[misc]
            def metadata(self) -> list[Any]:
                return [
                    ParamMeta(s.name, transport.weight_layout.dtype, s.shape) for s in transport.weight_layout.stored
                ]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                for name, tensor in checkpoint_tensors(transport._weights):
                    yield name, tensor.to(transport.weight_layout.dtype).contiguous()

        if self.backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

            # in pieces: else vLLM holds a second copy of all weights until the last one has arrived
            how = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=self._piece())
            return IPCTrainerWeightTransferEngine.trainer_init(how, client=Client(call), source=Source())
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        info = NCCLTrainerInitInfo(*free_address(name), 1 + world_size(call), rank=0)
        return NCCLTrainerWeightTransferEngine.trainer_init(info, client=Client(call), source=Source())

    def _piece(self) -> int:
        """Return the bytes that are sent at once: vLLM refuses a tensor that is larger."""
        dtype = self.weight_layout.dtype
        return max(PIECE, *(size_of(dtype, stored.shape) for stored in self.weight_layout.stored))

    def done(self) -> None:
        self.offer = self._weights = None

    def close(self) -> None:
        self.done()
        self._senders.clear()


def world_size(call: Call) -> int:
    """Return the number of a server's processes, each with a GPU of its own. Raises Gone for an answer that is none."""
    told = call("get_world_size", None)  # with those of pipeline and data parallelism
    if type(told) is not int or told < 1:
        raise Gone(f"/get_world_size returned {told!r}, not a number of processes")
    return told


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
    _proof: Callable[..., Transport] = CardToCard
