"""Any language model that transformers loads, with the `Model` protocol.

A layout has to be computed by a model that takes only rows of tokens. There are two modes; when a model is loaded, the
first one that reproduces the log-probabilities of the model's own forward is chosen. There is no list of architectures.

flat    all tokens in one row, and our attention in place of the model's own: shared prompts once, no padding. For
models whose layers mix tokens by attention, also within windows, with sinks or soft-capped scores, by the gated delta
rule, or by short convolutions.
rows    each reply behind its own prompt, in rows padded on the right: for state-space layers and all others. Later tokens
cannot influence earlier ones, so no mask is needed.

T    tokens of a micro-batch    n    hidden states that are requested
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from posttrain.core.batch import Layout
from posttrain.core.transcripts import Media
from posttrain.core.types import UserError
from posttrain.models.backbone import Backbone
from posttrain.models.hf.backed_writer import quiet, save_backed, stored_name, stored_tensors
from posttrain.models.hf.experts import Routers, attach, calling, find_routers, repeating, watched
from posttrain.models.hf.headless import classifier_of, grow, save_headless
from posttrain.models.hf.linear_layers import open_products, products
from posttrain.models.hf.probes import BEGINNING, PROBES, probe_ids
from posttrain.models.hf.token_mixing import NAME, LayoutMixing, current_mixing, mixing
from posttrain.models.hf.vision import PictureFeatures, Vision
from posttrain.models.native.head import Head
from posttrain.models.native.linear import Linear, narrow_layers
from posttrain.models.native.segments import Forest
from posttrain.models.peers import Peers

if TYPE_CHECKING:
    from posttrain.models.adapters.lora import LoRA

Way = Literal["flat", "rows"]
FULLER = 0.8  # rows of one call have at least this share of the longest row's length


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model; implements `posttrain.core.protocols.ModelShape`."""

    vocab: int
    hidden: int
    context: int


class Backed(nn.Module):
    """A model of transformers, created by `transformers_folder.load_backed`."""

    def __init__(self, inner: Any, context: int, way: Way = "rows", vision: Vision | None = None) -> None:
        super().__init__()
        self.inner = inner.eval()  # no dropout: log-probabilities are functions of weights and tokens
        self.way = way
        self.vision = vision  # None: text-only
        self.activation_room = math.inf  # bytes for activations kept for a backward pass; beyond, layers are recomputed
        self.kept_per_token = 0.0  # bytes of these activations per token
        self.recomputes = False  # whether layers are always recomputed
        self.rows_attention = "sdpa"  # attention in row mode, and for sampling with a cache
        self.eos_ids: tuple[int, ...] = ()
        self.lora: LoRA | None = None  # settings of the adapters, whose base weights are then frozen
        self.generation: dict[str, Any] = {}  # content of generation_config.json
        self.scale = 1.0  # scale of the head: see `Head`
        self.cap: float | None = None
        self.routers: Routers | None = None  # of mixture-of-experts layers
        self.peers: Peers | None = None  # the processes that divide the experts
        self.at_once = False  # whether rows of any lengths may share a call
        self.replays = False  # whether tokens use the experts that the layout gives, which an engine recorded
        weight = inner.get_output_embeddings().weight
        self.config = Sizes(weight.shape[0], weight.shape[1], context)

    @property
    def decoder(self) -> Self:
        return self

    @property
    def head(self) -> Head:
        output = self.inner.get_output_embeddings()
        bias = getattr(output, "bias", None)
        if self.vision is not None:  # the placeholder of a picture is never sampled and never trained
            bias = self.vision.forbidden if bias is None else bias + self.vision.forbidden
        return Head(output.weight, bias, self.scale, self.cap)

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding."""
        return self.inner.get_output_embeddings().weight is self.inner.get_input_embeddings().weight

    def hidden(self, layout: Layout, at: Tensor) -> Tensor:
        """See `posttrain.core.protocols.Model`."""
        if self.vision is None and layout.media:
            raise UserError(f"{type(self.inner).__name__} is text-only, and got a picture: use a vision-language model")
        graded = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        with self._computed_twice() if graded and self._recomputing(layout) else nullcontext():
            return self._flat(layout, at) if self.way == "flat" else self._rows(layout, at)

    def forward(self, **given: Any) -> Tensor:
        """Compute hidden states [B, longest, hidden] of the last layer. Sharded weights are gathered only during this
        call.
        """
        states: Tensor = self.inner.base_model(use_cache=False, **given).last_hidden_state
        return states

    @property
    def layers(self) -> list[nn.Module]:
        """Layers of the text model; empty if the model does not keep them in one list."""
        count = self.inner.config.get_text_config().num_hidden_layers
        lists = (m for m in self.inner.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
        tower = {id(p) for p in self.vision_weights()}
        return list(next((m for m in lists if not any(id(p) in tower for p in m.parameters())), ()))

    @property
    def family(self) -> str:
        family: str = self.inner.config.model_type
        return family

    @property
    def dtype(self) -> torch.dtype:
        return self.head.dtype

    def matrices(self) -> list[str]:
        """See `posttrain.models.backbone.Backbone`."""
        return [name for name, _ in products(self.inner)]

    def linears(self) -> Iterator[tuple[str, Linear, list[tuple[str, int]]]]:
        """See `posttrain.models.backbone.Backbone`."""
        for name, module in products(self.inner):
            if isinstance(module, Linear):
                yield f"inner.{name}", module, [(name, module.weight.shape[0])]

    def open_linears(self, wanted: Callable[[str], bool]) -> None:
        open_products(self.inner, wanted)

    def _recomputing(self, layout: Layout) -> bool:
        """Return whether the backward pass of a micro-batch recomputes layers."""
        alone = self.recomputes or self._too_much(layout)
        if self.peers is None:
            return alone
        # a layer that is recomputed exchanges its tokens again, with all other processes
        return bool(self.peers.total(torch.tensor([float(alone)], device=layout.tokens.device)).item())

    def _too_much(self, layout: Layout) -> bool:
        """Return whether the activations of a micro-batch take too much memory to be kept for the backward pass."""
        tokens = layout.tokens.shape[0]
        if self.way == "rows":  # shared prompts are repeated
            forest = Forest(layout)
            leaves = set(range(len(layout.length))) - set(forest.prefixes)
            tokens = sum(forest.before[k] + layout.length[k] for k in leaves)
        return tokens * self.kept_per_token > self.activation_room

    @contextmanager
    def _computed_twice(self) -> Iterator[None]:
        """Context in which layers keep only their inputs, and are recomputed in the backward pass."""
        layers = _that_can_compute_twice(self.inner)
        for layer in layers:
            layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, partial(_recompute, layer)
            layer.training = True  # checkpointing requires it; `_recompute` turns it off again: no dropout
        try:
            yield
        finally:
            for layer in layers:
                layer.gradient_checkpointing = layer.training = False

    def tower(self) -> set[str]:
        """Return the names of the modules that compute features of pictures."""
        own = {id(p) for p in self.vision_weights()}
        modules = self.inner.named_modules()
        return {name for name, module in modules if any(id(p) in own for p in module.parameters(recurse=False))}

    def vision_weights(self) -> Iterable[nn.Parameter]:
        """See `posttrain.models.backbone.Backbone`."""
        return self.vision.weights() if self.vision is not None else ()

    def save(self, folder: Path) -> None:
        """Save the model, see `posttrain.core.protocols.Model`; for an adapted model, only the adapters."""
        if self.lora is not None:
            return self.lora.save(self, folder)
        save_backed(self, folder)

    def classifier(self) -> str | None:
        return classifier_of(self)

    def save_headless(self, folder: Path, also: Mapping[str, Tensor], told: Mapping[str, Any]) -> None:
        save_headless(self, folder, also, told)

    def grow(self, vocab: int) -> None:
        grow(self, vocab)

    def find_routers(self) -> None:
        """Set `routers`, found by observing one forward pass; None if the model is not a mixture of experts."""
        ids = torch.tensor([probe_ids(self, (*BEGINNING, *PROBES[0]))], device=self.head.device)

        def run() -> None:
            with self.decoding():
                self.inner.base_model(input_ids=ids, use_cache=False)

        self.routers = find_routers(self.inner, run)
        if self.routers is not None:
            attach(self.inner, self.routers)

    def described(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.inner.config.to_json_string())
        return found

    @property
    def embedding_name(self) -> str:
        return stored_name(self, self.inner.get_input_embeddings().weight)

    @property
    def kept_numbers(self) -> int:
        text = self.inner.config.get_text_config()
        own = getattr(text, "per_layer_config", None)  # layers may differ (Gemma 4)
        return sum(map(_cache_numbers, own or [text] * text.num_hidden_layers))

    def stored_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return stored_tensors(self)

    def how_it_runs(self) -> dict[str, Any] | None:
        own = {"scale": self.scale, "cap": self.cap, "attention": self.rows_attention}
        return {**own, "replays": self.replays}

    def empty_like(self, products: torch.dtype | None = None) -> Backed:
        config, kind = copy.deepcopy(self.inner.config), type(self.inner)
        with quiet(), torch.random.fork_rng(devices=[]):  # its random initial values are not used
            inner = kind._from_config(config, dtype=self.head.dtype, attn_implementation="eager")
        vision = None if self.vision is None else Vision(inner, self.vision.processor, self.vision.placeholders)
        other = Backed(inner, self.config.context, self.way, vision)
        narrow_layers(other.layers, products)
        inner.to(self.head.device)
        other.eos_ids, other.generation, other.scale, other.cap = self.eos_ids, self.generation, self.scale, self.cap
        other.rows_attention, other.config = self.rows_attention, self.config
        other.attend(self.attention)
        other.find_routers()
        other.replays = self.replays
        return other

    def recompute_layers(self) -> None:
        if not _that_can_compute_twice(self.inner):
            raise UserError(
                f"--recompute layers needs layers that transformers can recompute (gradient checkpointing), and "
                f"{type(self.inner).__name__} has none: leave it out, and lower --tokens-per-microbatch"
            )
        self.recomputes = True

    def prepare_shards(self) -> None:
        """Prepare the layers for sharding. Raises UserError if layers share weights with each other or with other
        modules, or if the model has no list of layers or has scalar parameters.
        """
        kind, layers = type(self.inner).__name__, self.layers
        if not layers:
            raise UserError(f"--shard requires a decoder's layers, and none were found in {kind}: leave it out")
        if scalars := [name for name, p in self.named_parameters() if p.ndim == 0]:
            raise UserError(f"--shard splits rows, and {scalars[0]} of {kind} is a scalar: leave it out")
        place = {module: number for number, layer in enumerate(layers) for module in layer.modules()}
        owner: dict[Tensor, int] = {}
        for module in self.modules():
            for parameter in module._parameters.values():
                if parameter is not None and owner.setdefault(parameter, place.get(module, -1)) != place.get(
                    module, -1
                ):
                    raise UserError(f"--shard splits layers, and layers of {kind} share weights: leave it out")
        self.at_once = True  # every process then makes the same number of calls

    @property
    def apart(self) -> bool:
        return False

    def hidden_apart(self, layout: Layout, at: Tensor) -> Tensor:
        raise NotImplementedError("its bits depend on the company")

    @property
    def native(self) -> bool:
        return False

    @property
    def sees(self) -> bool:
        return self.vision is not None

    def attend(self, name: str) -> None:
        """Select an attention implementation of transformers by name, for the text model; the vision tower keeps
        its own.
        """
        self.inner.set_attn_implementation(name if self.vision is None else {"text_config": name})

    @property
    def attention(self) -> str:
        """Name of the attention implementation."""
        name: str = self.inner.config.get_text_config()._attn_implementation
        return name

    def new_cache(self) -> Any:
        """Return an empty cache of transformers for the kinds of layers of this model."""
        from transformers import DynamicCache

        return DynamicCache(config=self.inner.config)

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Context in which the model can be called on rows, with a cache."""
        if self.way == "rows":
            yield
            return
        self.attend(self.rows_attention)
        try:
            yield
        finally:
            self.attend(NAME)

    @contextmanager
    def shown(self, digests: Sequence[str], features: PictureFeatures | None) -> Iterator[dict[str, Any]]:
        """Context in which the base model reads these pictures, in the order of its tokens. Yields further arguments
        for the call.
        """
        if self.vision is None or features is None:
            yield {}
            return
        with self.vision.shown(features, digests) as more:
            yield more

    def features(self, media: Iterable[Media]) -> PictureFeatures | None:
        """Compute features of each distinct picture once; None if there are no pictures."""
        digests = [m.digest for m in media]
        return self.vision.features(digests) if self.vision is not None and digests else None

    def _flat(self, layout: Layout, at: Tensor) -> Tensor:
        pictures = sorted(layout.media, key=lambda m: m.start)
        features = self.features(pictures)
        place = layout.position[None] if layout.position.ndim == 1 else layout.position[:, None]
        with (
            mixing(LayoutMixing(layout)),
            calling(self, self.routers, self._experts(layout)) as matter,
            self.shown([m.digest for m in pictures], features) as more,
        ):
            states: Tensor = self(input_ids=layout.tokens[None], position_ids=place, **more)[0]
            matter(at)
        return states.index_select(0, at)

    def _rows(self, layout: Layout, at: Tensor) -> Tensor:
        if not at.numel():
            if self.at_once:  # other processes may have tokens to compute, and wait for this one
                return self._rows(layout, at.new_zeros(1))[:0]
            return self.head.weight.new_zeros(0, self.config.hidden)
        wanted = at.cpu().numpy()
        rows, place = _rows_of(layout, wanted)
        order = torch.from_numpy(place).to(at.device)
        experts, routed = self._experts(layout), watched(self)
        before, found = len(routed.taken) if routed else 0, []
        features, begins = self.features(layout.media), {m.start: m.digest for m in layout.media}
        for tokens, ends in _batches(rows, 0.0 if self.at_once else FULLER):
            index = torch.from_numpy(tokens).to(at.device)
            digests = [
                begins[token]
                for row, end in zip(tokens.tolist(), ends, strict=True)
                for token in row[:end]
                if token in begins
            ]
            kept = np.concatenate([np.arange(end) + k * tokens.shape[1] for k, end in enumerate(ends)])
            real = torch.from_numpy(kept).to(at.device)
            taken = None if experts is None else experts[index].flatten(0, 1)
            with calling(self, self.routers, taken) as matter, self.shown(digests, features) as more:
                if layout.position.ndim == 2:
                    more["position_ids"] = layout.position[:, index]
                states: Tensor = self(input_ids=self._padded(layout, index, ends), **more)
                matter(real)
            found.append(states.flatten(0, 1).index_select(0, real))
        if routed:
            routed.reorder(before, order)
        return torch.cat(found).index_select(0, order)

    def _experts(self, layout: Layout) -> Tensor | None:
        """Return the recorded experts of the tokens, [T, M, k]; None if there are none or routing is not replayed."""
        return layout.experts if self.replays else None

    def _padded(self, layout: Layout, index: Tensor, ends: Sequence[int]) -> Tensor:
        """Return the tokens of rows, [B, longest]; if there are pictures, padding is never a placeholder."""
        tokens = layout.tokens[index]
        if layout.media:
            column = torch.arange(tokens.shape[1], device=tokens.device)
            behind = column[None, :] >= torch.tensor(ends, device=tokens.device)[:, None]
            tokens = tokens.masked_fill(behind, self.filler)
        return tokens

    @property
    def filler(self) -> int:
        """Return a token id that is not a placeholder."""
        taken = self.vision.placeholders if self.vision is not None else ()
        return next(id for id in range(self.config.vocab) if id not in taken)


if TYPE_CHECKING:
    _proof: Callable[..., Backbone] = Backed


def _cache_numbers(layer: Any) -> int:
    """Return the count of numbers per token in the cache of a layer."""
    heads = getattr(layer, "num_attention_heads", 1)
    size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return int(2 * (getattr(layer, "num_key_value_heads", None) or heads) * size)


def _rows_of(layout: Layout, wanted: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Return (rows, the longest first, each the indices in [T] of its tokens; place of each wanted token in the
    concatenated rows).

    A row is a segment behind its ancestors, up to its last token that is wanted.
    """
    forest, total = Forest(layout), int(layout.tokens.shape[0])
    needed = np.zeros(total, dtype=bool)
    needed[wanted] = True
    continued = set(forest.prefixes)
    row_of, column = np.full(total, -1), np.zeros(total, dtype=np.int64)
    rows: list[np.ndarray] = []
    for leaf in sorted((k for k in range(len(layout.length)) if k not in continued), key=lambda k: -layout.length[k]):
        whole = np.concatenate((forest.path(leaf), forest.tokens([leaf])))
        own = np.flatnonzero(needed[whole] & (row_of[whole] < 0))
        if len(own):
            row_of[whole[own]], column[whole[own]] = len(rows), own
            rows.append(whole[: own[-1] + 1])
    order = sorted(range(len(rows)), key=lambda row: -len(rows[row]))
    start = np.zeros(len(rows), dtype=np.int64)
    start[order] = np.cumsum([0, *(len(rows[row]) for row in order)])[:-1]
    return [rows[row] for row in order], start[row_of[wanted]] + column[wanted]


def _batches(rows: Sequence[np.ndarray], share: float) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Yield batches of rows as (indices in [T], [B, longest]; lengths of the rows), padded with each row's first token.
    A row has at least this share of the longest row's length.
    """
    at = 0
    while at < len(rows):
        longest = len(rows[at])
        some = [row for row in rows[at:] if len(row) >= share * longest]
        tokens = np.stack([np.pad(row, (0, longest - len(row)), constant_values=row[0]) for row in some])
        yield tokens, [len(row) for row in some]
        at += len(some)


def _that_can_compute_twice(inner: nn.Module) -> list[Any]:
    """Return the innermost modules that support recomputation. Whole models support it too, but have dropout of their
    own.
    """
    able = [m for m in inner.modules() if hasattr(m, "gradient_checkpointing") and hasattr(m, "forward")]
    known = set(able)
    return [module for module in able if not any(m in known and m is not module for m in module.modules())]


def _recompute(layer: nn.Module, function: Callable[..., Any], *given: Any) -> Any:
    """Compute a layer, and recompute it in the backward pass with the attention and experts of the forward pass, in
    whichever thread that runs.
    """
    how, routed = current_mixing(), repeating()

    def computed(*given: Any) -> Any:
        before, layer.training = layer.training, False  # some use this flag for dropout (OPT)
        try:
            with routed(), mixing(how):
                return function(*given)
        finally:
            layer.training = before

    return checkpoint(computed, *given, use_reentrant=False, preserve_rng_state=False)
