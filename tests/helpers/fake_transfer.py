"""vLLM's weight transfer with sockets in place of NCCL: the trainer's side, as vLLM 0.32 documents it, and the server's.

A group forms only if as many processes join it as the trainer expects, as with NCCL.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

JOINED_SECONDS = 5.0
"""Within which all have to join; NCCL would wait for minutes."""


@dataclass
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: Sequence[int]


class WeightSource:
    """Weights to send: `metadata`, and an iterator of (name, tensor)."""


@dataclass
class NCCLTrainerInitInfo:
    master_address: str
    master_port: int
    world_size: int
    rank: int


class NCCLTrainerWeightTransferEngine:
    """The trainer, rank 0 of the group."""

    def __init__(self, client: Any, source: Any, peers: list[socket.socket]) -> None:
        self.client, self.source, self.peers = client, source, peers

    @classmethod
    def trainer_init(cls, info: NCCLTrainerInitInfo, *, client: Any, source: Any) -> NCCLTrainerWeightTransferEngine:
        where = {"master_address": info.master_address, "master_port": info.master_port}
        with socket.create_server((info.master_address, info.master_port)) as server:
            server.settimeout(JOINED_SECONDS)
            client.init_weight_transfer_engine({**where, "rank_offset": 1, "world_size": info.world_size})
            return cls(client, source, [server.accept()[0] for _ in range(info.world_size - 1)])

    def send_weights(self) -> None:
        meta = self.source.metadata()
        told = {
            "names": [m.name for m in meta],
            "dtype_names": [str(m.dtype).removeprefix("torch.") for m in meta],
            "shapes": [list(m.shape) for m in meta],
        }
        self.client.start_weight_update()
        broadcast = threading.Thread(target=self._broadcast)
        broadcast.start()
        self.client.update_weights(told)
        broadcast.join()
        self.client.finish_weight_update()

    def _broadcast(self) -> None:
        for _, tensor in self.source:
            for peer in self.peers:
                peer.sendall(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def join(info: dict[str, Any], processes: int) -> list[socket.socket]:
    """Join a server's processes to the trainer's group. Raises ValueError if it has no place for them."""
    if info["world_size"] != info["rank_offset"] + processes:
        raise ValueError(f"a group of {info['world_size']} has no ranks for {processes} processes")
    return [socket.create_connection((info["master_address"], info["master_port"])) for _ in range(processes)]


def received(info: dict[str, Any], peers: Sequence[socket.socket]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of an update; each process receives all of them."""
    for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
        like = torch.empty(shape, dtype=getattr(torch, dtype))
        for peer in peers:
            with peer.makefile("rb", buffering=0) as stream:
                content = bytearray()
                while len(content) < like.nbytes:
                    content += stream.read(like.nbytes - len(content)) or b""
        yield name, torch.frombuffer(content, dtype=like.dtype).view(like.shape)
