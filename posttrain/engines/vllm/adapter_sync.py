"""Sync of adapters alone to vLLM, which gets the base weights once: a folder in PEFT's format for each version.

Before sampling it is verified that the bytes read are those that were written, and that every matrix of vLLM's model
that should have an adapter has one, since vLLM silently skips adapters for which it finds no module.
"""

from __future__ import annotations

from pathlib import Path

from posttrain.core.protocols import Model
from posttrain.core.types import UserError
from posttrain.engines.weight_sync import checksum_of
from posttrain.models.adapters.adapter_writer import adapters, save_adapter, stored_adapters
from posttrain.models.adapters.lora import decoder_of, sharing
from posttrain.models.backbone import Backbone
from posttrain.models.row_shards import is_sharded
from posttrain.system.temp_folders import TempFolder

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM supports; an adapter of a lower rank uses the next higher one."""


class AdapterSync:
    """The learner's side of the sync. It must be closed: it has a temporary folder."""

    def __init__(self, model: Model) -> None:
        """Check the adapters. Raises UserError for a model without adapters, with adapters that vLLM lacks, or with
        sharded weights.
        """
        lora = decoder_of(model).lora
        if lora is None:
            raise UserError("--weight-sync adapter requires a model with adapters: give --lora, or leave it out")
        if any(map(is_sharded, decoder_of(model).parameters())):
            raise UserError(
                "--weight-sync adapter sends the frozen weights without adapters, and with --shard or --tensor-parallel no "
                "process has them: leave it out, merged weights are sent"
            )
        if lora.dora or lora.rank > RANKS[-1]:
            what = "DoRA" if lora.dora else f"ranks above {RANKS[-1]}"
            raise UserError(
                f"--weight-sync adapter needs plain adapters, and vLLM does not support {what}: leave it out, so that "
                "adapters are merged"
            )
        self.room = min(rank for rank in RANKS if rank >= lora.rank)
        self.folder = TempFolder("adapter")

    def base_of(self, model: Model) -> Backbone:
        """Return the model whose weights are sent once: the base, without adapters."""
        return sharing(decoder_of(model))

    def write(self, model: Model) -> tuple[str, tuple[int, int]]:
        """Write a model's adapters into the folder. Return (folder, (checksum, number of adapted matrices))."""
        decoder = decoder_of(model)
        save_adapter(decoder, Path(self.folder.name))
        matrices = sum(len(adapter.names) for adapter in adapters(decoder))
        return self.folder.name, (checksum_of(sorted(stored_adapters(decoder).items())), matrices)

    def close(self) -> None:
        self.folder.cleanup()
