"""Sync of an adapter alone to vLLM, whose base weights are sent once: a folder in PEFT's format for each version.

It verifies before anything is sampled: the bytes that were read are those that were written, and every matrix of vLLM's
model that should have an adapter has one. vLLM silently skips adapters for which it finds no module.
"""

from __future__ import annotations

from pathlib import Path

from posttrain.core.protocols import Model
from posttrain.core.types import UserError
from posttrain.engines.weight_sync import checksum_of
from posttrain.models.adapters.adapter_writer import adapters, save_adapter, stored_adapters
from posttrain.models.adapters.lora import decoder_of, sharing
from posttrain.models.backbone import Backbone
from posttrain.system.temp_folders import TempFolder

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM supports; an adapter of a lower rank uses the next higher one."""


class AdapterSync:
    """Our side of the sync. Close it: it has a folder."""

    def __init__(self, model: Model) -> None:
        """Check the adapters. Raises UserError for a model without adapters, or with some that vLLM cannot compute."""
        lora = decoder_of(model).lora
        if lora is None:
            raise UserError("--weight-sync adapter requires a model with adapters: give --lora, or leave it out")
        if lora.dora or lora.rank > RANKS[-1]:
            what = "DoRA" if lora.dora else f"ranks above {RANKS[-1]}"
            raise UserError(
                f"--weight-sync adapter: vLLM computes plain adapters, not {what}: leave it out, they are merged"
            )
        self.room = min(rank for rank in RANKS if rank >= lora.rank)
        self.folder = TempFolder("adapter")

    def base_of(self, model: Model) -> Backbone:
        """Return the model that is sent once: without adapters, its packed weights unpacked."""
        return sharing(decoder_of(model))

    def write(self, model: Model) -> tuple[str, tuple[int, int]]:
        """Write a model's adapters into the folder. Return the folder, the checksum and how many matrices are
        adapted.
        """
        decoder = decoder_of(model)
        save_adapter(decoder, Path(self.folder.name))
        matrices = sum(len(adapter.names) for adapter in adapters(decoder))
        return self.folder.name, (checksum_of(sorted(stored_adapters(decoder).items())), matrices)

    def close(self) -> None:
        self.folder.cleanup()
