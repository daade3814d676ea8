"""Sync of adapters alone to vLLM, which gets the base weights once: a folder in PEFT's format for each version.

Before sampling it is verified that the bytes read are those that were written, and that every matrix of vLLM's model
that should have an adapter has one, since vLLM silently skips adapters for which it finds no module. A server that
somebody else started has the base weights already, and only the weight probe verifies what it has.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.protocols import Model
from posttrain.core.types import UserError
from posttrain.engines.weight_sync import Fetched, Transport, checksum_of
from posttrain.models.adapters.adapter_writer import adapters, save_adapter, stored_adapters
from posttrain.models.adapters.lora import decoder_of, sharing
from posttrain.models.backbone import Backbone
from posttrain.models.row_shards import is_sharded

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM supports; an adapter of a lower rank uses the next higher one."""


def rank_for(model: Model) -> int:
    """Return vLLM's rank for a model's adapters. Raises UserError for a model without adapters, with adapters that vLLM
    lacks, or with sharded weights.
    """
    lora = decoder_of(model).lora
    if lora is None:
        raise UserError("--weight-sync adapter requires a model with adapters: give --lora, or leave it out")
    if any(map(is_sharded, decoder_of(model).parameters())):
        raise UserError(
            "--weight-sync adapter sends the frozen weights without adapters, and with --shard, --tensor-parallel or "
            "--expert-parallel no process has them: leave it out, merged weights are sent"
        )
    if lora.dora or lora.rank > RANKS[-1]:
        what = "DoRA" if lora.dora else f"ranks above {RANKS[-1]}"
        raise UserError(
            f"--weight-sync adapter needs plain adapters, and vLLM does not support {what}: leave it out, so that "
            "adapters are merged"
        )
    return min(rank for rank in RANKS if rank >= lora.rank)


def base_of(model: Model) -> Backbone:
    """Return the model whose weights are sent once: the base, without adapters."""
    return sharing(decoder_of(model))


class AdapterFiles(Fetched):
    """Transport of adapters; implements `weight_sync.Transport`."""

    def __init__(self, folder: Path, rank: int, memory: Transport | None) -> None:
        """`folder`: for the adapters; `rank`: of the process that writes them; `memory`: for the base weights, None: the
        servers have them.
        """
        self.folder, self.rank, self.memory = folder.absolute(), rank, memory

    def put(self, weights: Any, version: int) -> None:
        """Write a model's adapters into a folder of their own."""
        decoder = decoder_of(weights)
        if self.memory is not None and self.memory.offer is None:
            self.memory.put(base_of(weights), version)
        self._forget()
        folder = self.folder / f"adapter-{self.rank}-{version}"
        save_adapter(decoder, folder)
        self.offer = {
            "version": version,
            "checksum": checksum_of(sorted(stored_adapters(decoder).items())),
            "matrices": sum(len(adapter.names) for adapter in adapters(decoder)),
            "adapter": str(folder),
            "base": None if self.memory is None else self.memory.offer,
        }

    def close(self) -> None:
        self._forget()
        if self.memory is not None:
            self.memory.close()

    def _forget(self) -> None:
        if self.offer is not None:
            shutil.rmtree(self.offer["adapter"], ignore_errors=True)
        self.offer = None


if TYPE_CHECKING:
    _proof: Callable[..., Transport] = AdapterFiles
