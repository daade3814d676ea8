"""A frozen model over the weights of a sharded decoder, with other adapters than the decoder's own, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from posttrain.core.batch import Layout
from posttrain.core.protocols import Model, ModelShape
from posttrain.models.backbone import Backbone
from posttrain.models.hf.experts import watching
from posttrain.models.native.head import Head
from posttrain.models.native.linear import Adapter


class OtherAdapters(nn.Module):
    """Implements `posttrain.core.protocols.Model`, for passes without gradients.

    A whole decoder is copied around its weights (`lora.sharing`). A sharded one cannot be, since torch gathers each
    weight for one module. So a pass exchanges the adapters of that module for its duration. Parameters are those of the
    other adapters alone, by the names that the decoder's own have.
    """

    def __init__(self, decoder: Backbone) -> None:
        """Create the model without adapters; within `exchanged` the decoder can be given some."""
        super().__init__()
        self._held = (decoder,)  # in a tuple: its weights are not this module's
        self._adapters: dict[str, Adapter] = {}
        self.lora = decoder.lora
        self.replays = False  # whether tokens use the experts that a layout names
        self.eos_ids = decoder.eos_ids

    @contextmanager
    def exchanged(self) -> Iterator[Backbone]:
        """Context in which the decoder has this model's adapters. Adapters that it is given within stay this model's."""
        (decoder,) = self._held
        linears = {name: linear for name, linear, _ in decoder.linears()}
        own = {name: linear.adapter for name, linear in linears.items()}
        settings, replays = decoder.lora, decoder.replays
        decoder.replays = self.replays
        for name, linear in linears.items():
            linear.adapter = self._adapters.get(name)
        try:
            yield decoder
        finally:
            for name, linear in linears.items():
                if linear.adapter is not None:
                    self._keep(name, linear.adapter)
                linear.adapter = own[name]
            decoder.lora, decoder.replays = settings, replays

    def _keep(self, name: str, adapter: Adapter) -> None:
        if self._adapters.get(name) is adapter:
            return
        self._adapters[name] = adapter
        place: nn.Module = self
        for part in name.split("."):
            if part not in place._modules:
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.add_module("adapter", adapter.requires_grad_(False))

    @property
    def decoder(self) -> Backbone:
        return self._held[0]

    @property
    def config(self) -> ModelShape:
        return self.decoder.config

    @property
    def head(self) -> Head:
        return self.decoder.head

    def hidden(self, layout: Layout, at: Tensor) -> Tensor:
        """See `posttrain.core.protocols.Model`."""
        assert not torch.is_grad_enabled(), "a backward pass would find the decoder's own adapters"
        with watching(self), self.exchanged() as decoder:  # its routing is not recorded as the decoder's
            return decoder.hidden(layout, at)

    def save(self, folder: Path) -> None:
        """Write a folder of adapters."""
        assert self.lora is not None and self._adapters, "a checkpoint without adapters is the base itself"
        with self.exchanged() as decoder:
            self.lora.save(decoder, folder)


if TYPE_CHECKING:
    _proof: Callable[..., Model] = OtherAdapters
