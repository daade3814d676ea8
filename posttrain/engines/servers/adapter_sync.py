"""Sync of adapters alone to servers, which get the base weights once: a folder in PEFT's format for each version.

From vLLM that the run started it is verified before sampling that the bytes read are those that were written, and that
every matrix of its model that should have an adapter has one, since vLLM silently skips adapters for which it finds no
module. SGLang reports one itself. A server that somebody else started has the base weights already, and only
the weight probe verifies what it has.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.protocols import Model
from posttrain.core.types import UserError
from posttrain.engines.servers.server_setup import ServerSetup
from posttrain.engines.weight_sync import Fetched, Transport, checksum_of
from posttrain.models.adapters.adapter_writer import adapters, save_adapter, stored_adapters
from posttrain.models.adapters.lora import decoder_of, sharing
from posttrain.models.backbone import Backbone
from posttrain.models.row_shards import is_sharded


def rank_for(model: Model, kind: type[ServerSetup]) -> int:
    """Return a server's rank for a model's adapters. Raises UserError for a model without adapters, with adapters that the
    server lacks, or with sharded weights.
    """
    lora = decoder_of(model).lora
    if lora is None:
        raise UserError("--weight-sync adapter requires a model with adapters: give --lora, or leave it out")
    if any(map(is_sharded, decoder_of(model).parameters())):
        raise UserError(
            "--weight-sync adapter sends the frozen weights without adapters, and with --shard, --tensor-parallel or "
            "--expert-parallel no process has them: leave it out, merged weights are sent"
        )
    if lacks := kind.lacks(lora, adapted_names(model)):
        raise UserError(
            f"--weight-sync adapter needs plain adapters, and {kind.client.program} does not support {lacks}: leave it out, "
            "so that adapters are merged"
        )
    return kind.rank_of(lora)


def adapted_names(model: Model) -> tuple[str, ...]:
    """Return the last parts of the names of the matrices that have adapters."""
    return tuple(sorted({name.rpartition(".")[2] for adapter in adapters(decoder_of(model)) for name in adapter.names}))


def base_of(model: Model) -> Backbone:
    """Return the model whose weights are sent once: the base, without adapters."""
    return sharing(decoder_of(model))


class AdapterFiles(Fetched):
    """Transport of adapters; implements `weight_sync.Transport`."""

    def __init__(self, folder: Path, rank: int, base: Transport | None) -> None:
        """`folder`: for the adapters; `rank`: of the process that writes them; `base`: for the base weights, None: the
        servers have them.
        """
        self.folder, self.rank, self.base = folder.absolute(), rank, base

    def put(self, weights: Any, version: int) -> None:
        """Write a model's adapters into a folder of their own."""
        decoder = decoder_of(weights)
        if self.base is not None and self.base.offer is None:
            self.base.put(base_of(weights), version)
        self._forget()
        folder = self.folder / f"adapter-{self.rank}-{version}"
        save_adapter(decoder, folder)
        self.offer = {
            "version": version,
            "checksum": checksum_of(sorted(stored_adapters(decoder).items())),
            "matrices": sum(len(adapter.names) for adapter in adapters(decoder)),
            "adapter": str(folder),
            "base": None if self.base is None else self.base.offer,
        }

    def close(self) -> None:
        self._forget()
        if self.base is not None:
            self.base.close()

    def _forget(self) -> None:
        if self.offer is not None:
            shutil.rmtree(self.offer["adapter"], ignore_errors=True)
        self.offer = None


if TYPE_CHECKING:
    _proof: Callable[..., Transport] = AdapterFiles
