"""The experts that servers return for `--routing-replay`, as transcripts hold them.

L    layers of the model, M of which have a router    k    experts per token
n    tokens that a server computed: all of a prompt and its reply but the last one, behind which nothing was sampled
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from posttrain.core.protocols import Model
from posttrain.core.types import UserError
from posttrain.engines.model_manifest import backbone_of
from posttrain.engines.pool.pool_protocol import Gone

LAYER = re.compile(r"\blayers\.(\d+)\.")
UNKNOWN = -1  # in place of an expert that was not recorded; see `posttrain.models.hf.experts`


@dataclass(frozen=True)
class RoutedLayers:
    """The layers of a model that have a router, and the experts of each."""

    numbers: tuple[int, ...]  # [M], among all layers of the model
    experts: int  # of a layer
    taken: int  # k

    @staticmethod
    def of(model: Model) -> RoutedLayers | None:
        """Return the layers with routers of a model that replays experts, else None. Raises UserError if a layer has two
        routers, or a router is in no numbered layer.
        """
        decoder = backbone_of(model)
        if not decoder.replays:
            return None
        assert decoder.routers is not None, "a dense model replays nothing"
        places = [LAYER.search(router.module) for router in decoder.routers.found]
        numbers = tuple(int(place[1]) for place in places if place is not None)
        if len(numbers) < len(places) or list(numbers) != sorted(set(numbers)):
            raise UserError(
                f"--routing-replay with --engine needs at most one router in each numbered layer, which {decoder.family} "
                "does not have: leave out --engine"
            )
        return RoutedLayers(numbers, decoder.routers.experts, decoder.routers.taken)

    def split(
        self, found: NDArray[np.integer], prompt: int, computed: int, sampled: int
    ) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
        """Return the experts of the sampled tokens, int16 [sampled, M, k], and of the prompt, [prompt, M, k].

        `found`: integers [n, L, k]; `computed`: n; `sampled`: tokens of the reply, which may be shorter than the server's.
        Raises Gone if they are not those of this model.
        """
        rows, layers, taken = found.shape if found.ndim == 3 else (0, 0, 0)
        if (rows, taken) != (computed, self.taken) or layers <= self.numbers[-1] or found.dtype.kind not in "iu":
            raise Gone(
                f"it returned experts of the shape {list(found.shape)} and type {found.dtype}, not {self.taken} numbers in "
                f"all layers of {computed} tokens"
            )
        routes = found[: prompt + sampled - 1, list(self.numbers)]
        first = np.sort(routes[0], -1)  # one token shows whether these are the layers with routers: others are zeros
        if routes.min() < 0 or routes.max() >= self.experts or (first[:, 1:] == first[:, :-1]).any():
            raise Gone(f"it returned experts that are not {self.taken} different ones of the model's {self.experts}")
        last = np.full((1, *routes.shape[1:]), UNKNOWN)
        own = np.concatenate([routes[prompt:], last]).astype(np.int16)
        return own, routes[:prompt].astype(np.int16)
