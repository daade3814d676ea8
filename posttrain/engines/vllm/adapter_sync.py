"""An adapter handed to vLLM without its base, which goes over once: a folder in PEFT's form for each version.

Decides what has to be true of it before anything is sampled: the bytes that were read are those that were written, and as
many matrices of vLLM's model have an adapter as there are in it. vLLM leaves out in silence what it finds no module for.
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
"""Those that vLLM has room for; an adapter of fewer rows takes the next."""


class AdapterSync:
    """Our side of it. Close it: it has a folder."""

    def __init__(self, model: Model) -> None:
        """Raises UserError for a model without adapters, or with some that vLLM cannot compute."""
        lora = decoder_of(model).lora
        if lora is None:
            raise UserError(
                "--weight-sync adapter hands adapters over, and the model has none: give --lora, or leave it out"
            )
        if lora.dora or lora.rank > RANKS[-1]:
            what = "DoRA" if lora.dora else f"ranks above {RANKS[-1]}"
            raise UserError(
                f"--weight-sync adapter: vLLM computes plain adapters, not {what}: leave it out, they are merged"
            )
        self.room = min(rank for rank in RANKS if rank >= lora.rank)
        self.folder = TempFolder("adapter")

    def base_of(self, model: Model) -> Backbone:
        """What goes over once: the model without adapters, its packed weights unpacked."""
        return sharing(decoder_of(model))

    def write(self, model: Model) -> tuple[str, tuple[int, int]]:
        """Put the adapters of a model into the folder. Returns it, the checksum and how many matrices are adapted."""
        decoder = decoder_of(model)
        save_adapter(decoder, Path(self.folder.name))
        matrices = sum(len(adapter.names) for adapter in adapters(decoder))
        return self.folder.name, (checksum_of(sorted(stored_adapters(decoder).items())), matrices)

    def close(self) -> None:
        self.folder.cleanup()
