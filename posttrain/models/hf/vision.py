"""The vision part of a model of transformers: computes features of each picture once, for insertion at placeholders.

The model's own forward inserts the features and processes them further (Qwen3-VL also adds features in deeper layers).
Only their computation is separate: each picture goes through the vision tower once per call of `hidden`, or once for
prompts that begin together, independent of the number of rows or replies that contain it.

F    features of all pictures, one for each placeholder
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posttrain.core.types import UserError
from posttrain.models.image_processor import ImageProcessor

MASKED = -1e4
"""Added to the logits of placeholders: probability 0 in any type, without the NaN in an entropy that minus infinity
gives.
"""


class Vision(nn.Module):
    """The vision part of a model, with whose weights it works."""

    forbidden: Tensor  # [V], added by the head: `MASKED` at placeholders

    def __init__(self, inner: Any, processor: ImageProcessor, placeholders: Sequence[int]) -> None:
        super().__init__()
        self._inner = [inner]  # in a list, so that it is not registered as a submodule
        self.processor, self.placeholders = processor, tuple(placeholders)
        weight = inner.get_output_embeddings().weight
        forbidden = torch.zeros(len(weight), dtype=weight.dtype, device=weight.device)
        forbidden[list(placeholders)] = MASKED
        self.register_buffer("forbidden", forbidden, persistent=False)

    @property
    def base(self) -> Any:
        return self._inner[0].base_model

    def weights(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the vision tower and of the projection to the text model's width: all but the
        language model's.
        """
        model = self._inner[0]
        text = next(getattr(self.base, name) for name in ("language_model", "text_model") if hasattr(self.base, name))
        own = {id(p) for p in (*text.parameters(), *model.get_output_embeddings().parameters())}
        yield from (p for p in model.parameters() if id(p) not in own)

    def features(self, digests: Sequence[str]) -> PictureFeatures:
        """Compute features of each distinct picture once. Raises PictureError for an invalid one."""
        found: dict[str, _Features] = {}
        for alike in _alike({digest: self.processor.pixels(digest).inputs for digest in dict.fromkeys(digests)}):
            inputs = {
                name: torch.cat([one[name] for one in alike.values()]).to(self.forbidden.device)
                for name in next(iter(alike.values()))
            }
            counts = [self.processor.pixels(digest).count for digest in alike]
            out = self.base.get_image_features(**inputs, return_dict=True)
            pooled, deep = _flat(out.pooler_output), [_flat(x) for x in getattr(out, "deepstack_features", None) or ()]
            if len(pooled) != sum(counts):
                raise UserError(
                    f"the model makes {len(pooled)} features of pictures for which {sum(counts)} tokens stand: its image "
                    "processor and its config.json do not belong together"
                )
            parts = [x.split(counts) for x in (pooled, *deep)]
            own = zip(alike, zip(*parts, strict=True), strict=True)
            found |= {digest: _Features(features, out) for digest, features in own}
        return found

    @contextmanager
    def shown(self, features: PictureFeatures, digests: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Context in which the base model's forward reads these pictures, in order. Yields further arguments for the
        call.
        """
        if not digests:
            yield {}
            return
        kinds = [features[digest] for digest in digests]
        pooled, *deep = (torch.cat(parts) for parts in zip(*(kind.features for kind in kinds), strict=True))
        like = kinds[0].like.pooler_output
        deeper = [
            [x] if isinstance(theirs, list | tuple) else x
            for x, theirs in zip(deep, getattr(kinds[0].like, "deepstack_features", None) or (), strict=True)
        ]
        whole = [pooled] if isinstance(like, list | tuple) else pooled.reshape(-1, *like.shape[1:])
        out = SimpleNamespace(pooler_output=whole, deepstack_features=deeper or None)
        self.base.get_image_features = lambda *_, **__: out
        try:
            yield {"pixel_values": pooled.new_zeros(1)}
        finally:
            del self.base.get_image_features


class _Features(NamedTuple):
    """Features of one picture."""

    features: Sequence[Tensor]  # [n, D] each: the main ones, then those for deeper layers
    like: Any  # the model's output


PictureFeatures = Mapping[str, _Features]
"""Features of pictures, by the pictures' hashes."""


def _flat(features: Any) -> Tensor:
    """Flatten to [F, D]."""
    whole = torch.cat(list(features)) if isinstance(features, list | tuple) else features
    return whole.flatten(0, -2)


def _alike(inputs: Mapping[str, Mapping[str, Tensor]]) -> Iterator[dict[str, Mapping[str, Tensor]]]:
    """Yield groups of pictures whose tensors can be concatenated."""
    groups: dict[tuple[Any, ...], dict[str, Mapping[str, Tensor]]] = {}
    for digest, one in inputs.items():
        shape = tuple((name, tuple(x.shape[1:])) for name, x in sorted(one.items()))
        groups.setdefault(shape, {})[digest] = one
    yield from groups.values()
