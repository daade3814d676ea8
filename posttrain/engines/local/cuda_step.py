"""Decoding steps on CUDA: each is one CUDA graph, which includes sampling and reads nothing from the host.

Launching the kernels of a step one by one takes several times as long as running them. A graph is launched at once; it
uses the tensors at the captured addresses, with the captured shapes. So shapes are rounded up, and rows beyond the
running requests count as ended: they are computed as any other row, but their results are never read.

The same code runs without capture on every device.

    B    rows    L    own tokens seen    G    prompts    W    requests of the most used prompt    P    tokens of a prompt
    H    key heads    R    query heads per key head    V    vocabulary
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from posttrain.engines.local.running_batch import RunningBatch, SamplingParts
from posttrain.engines.local.sampler import UniformTokens
from posttrain.engines.local.step_cache import StepCache, row_bucket, token_bucket
from posttrain.engines.local.step_weights import LayerWeights, StepWeights
from posttrain.models.free_memory import gpu_memory
from posttrain.models.native.decoder import Decoder
from posttrain.models.native.kernels import build
from posttrain.models.native.kernels.gpu_layer import compiled
from posttrain.models.native.linear import wide_product

LARGE_MODEL = 100_000_000
"""Number of parameters from which the work between products is compiled, which takes about ten seconds, once."""
GRAPHS = 64
"""Number of graphs kept; the least recently used one is dropped first."""
COPIED_SHARE = 1 / 4
"""Share of a card's memory. A model whose copies would take more is decoded without them."""
RESTING_SHARE = 1 / 8
"""Share of a card's memory. Copies and a cache that take less are kept while the engine is idle, as capturing again costs
more than an update gains from that memory.
"""


def decodes_in_graphs(model: Decoder, dtype: torch.dtype) -> bool:
    """Return whether this model, with products of `dtype`, is decoded by CUDA graphs."""
    if model.head.device.type != "cuda" or dtype not in (torch.float32, torch.bfloat16):
        return False
    return fits(model, dtype) and 2 * model.config.parameters < COPIED_SHARE * gpu_memory(model.head.device)


def fits(model: Decoder, dtype: torch.dtype) -> bool:
    """Return whether all weights are plain, in float32 or the type of products. Copies of quantized weights would take
    the memory that quantization saves.
    """
    return all(p.dtype in (torch.float32, dtype) for p in model.parameters()) and all(
        linear.parameter is not None for _, linear, _ in model.linears()
    )


class Shape(NamedTuple):
    """Key of a captured graph: the rounded sizes of a step, and the parts of sampling that it needs."""

    rows: int  # B
    own: int  # L
    prompts: int  # G
    widest: int  # W
    prompt: int  # P
    needs: SamplingParts


class _Seen(NamedTuple):
    """Inputs of attention for each row, the same for all layers."""

    rotation: Tensor  # float32 [B, 2, 1, size]: cos and sin
    slot: Tensor  # int64 [B]
    place: Tensor  # int64 [B], index of the new token among the row's own tokens
    queries: (
        Tensor  # int64 [B * H * R + G * H * W * R], index into heads [B * (H * R + 2 H)]: first by row, then by prompt
    )
    members: Tensor  # int64 [G * H * W], index into [B * H]
    seat: Tensor  # int64 [B * H], index into [G * H * W]
    mask: Tensor  # float32 [B, 1, L + P], added to the scores


class CudaStep:
    """Decoding steps of one model. Copies of the weights, and graphs, are kept until `free`.

    `uniform_tokens`: returns the tokens among which epsilon-greedy sampling draws, always the same tensors. `capture`:
    whether steps are captured in graphs, which is possible only on CUDA; None: on CUDA.
    """

    def __init__(
        self,
        model: Decoder,
        dtype: torch.dtype,
        eos: Tensor,
        uniform_tokens: Callable[[], UniformTokens],
        capture: bool | None = None,
    ) -> None:
        self._decoder, self._dtype, self._eos, self._uniform = model, dtype, eos, uniform_tokens
        self.device = model.head.device
        self._weights: StepWeights | None = None
        self._changed = False
        self._rotary: Tensor | None = None  # float32 [positions, 2, 1, size]
        capture = self.device.type == "cuda" if capture is None else capture
        self.graphs = Graphs(self.device) if capture else None
        self._compiles = self.graphs is not None and build.used() and model.config.parameters >= LARGE_MODEL

    def changed(self) -> None:
        """Mark the weights as possibly changed."""
        self._changed = True

    def free(self) -> None:
        """Free copies and graphs."""
        self._weights = self._rotary = None
        if self.graphs is not None:
            self.graphs.clear()

    def may_rest(self, cache: StepCache) -> bool:
        """Return whether copies, cache and graphs are small enough to be kept while nothing runs."""
        copies = 0 if self._weights is None else self._weights.bytes
        return copies + cache.bytes <= RESTING_SHARE * gpu_memory(self.device)

    def __call__(self, cache: StepCache, rows: RunningBatch, count: int, steps: int) -> None:
        """Decode up to `steps` tokens of the first `count` requests; ended requests do not change."""
        if rows.needs.explores:  # computed before a capture, which allows no copies from the host
            self._uniform()
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            weights = self._current()
            cache.seat()
            self._rotate(cache.positions)
            if self.graphs is not None:
                self.graphs.check(self._addresses(cache, rows, weights))
            for _ in range(steps):
                shape = self.shape(cache, rows, count)
                if self.graphs is None:
                    self._step(shape, cache, rows, weights)
                else:
                    self.graphs.run(shape, lambda shape=shape: self._step(shape, cache, rows, weights))  # type: ignore[misc]
                rows.longest += 1

    def shape(self, cache: StepCache, rows: RunningBatch, count: int) -> Shape:
        """Return the key of the next step: rounded sizes, at most those of the cache."""
        return Shape(
            min(row_bucket(count), cache.own.shape[2]),
            min(token_bucket(rows.longest), cache.own.shape[4]),
            min(row_bucket(len(cache.row)), cache.shared.shape[2]),
            row_bucket(cache.widest),
            min(token_bucket(cache.prompt_tokens), cache.shared.shape[4]),
            rows.needs._replace(stop=False),  # stop strings are searched for outside of the step
        )

    def _current(self) -> StepWeights:
        if self._weights is None or not self._weights.same(self._changed):
            self._weights = StepWeights(self._decoder, self._dtype)
        else:
            self._weights.refresh(self._changed)
        self._changed = False
        return self._weights

    def _rotate(self, positions: int) -> None:
        """Compute the tables of the rotary embedding for at least `positions` positions."""
        if self._rotary is None or len(self._rotary) < positions:
            tables = self._decoder.rotary(torch.arange(positions, device=self.device), torch.float32)
            self._rotary = torch.stack(tables, 1)

    def _addresses(self, cache: StepCache, rows: RunningBatch, weights: StepWeights) -> tuple[object, ...]:
        """Return the further conditions of captured graphs: addresses and shapes of all tensors that they use."""
        assert self._rotary is not None
        tensors = (cache.own, cache.shared, cache.seats, self._rotary, *rows.tensors)
        return (id(weights), *((x.data_ptr(), x.shape) for x in tensors))

    # -- the step: without synchronisation; only tensors of the cache and of the rows outlive it ----------------------

    def _step(self, shape: Shape, cache: StepCache, rows: RunningBatch, weights: StepWeights) -> None:
        """Compute and sample the next token of every row that has not ended."""
        seen = self._see(shape, cache, rows)
        x = functional.embedding(rows.token[: shape.rows], weights.embedding).float()
        more = torch.zeros_like(x, dtype=self._dtype)
        for number, layer in enumerate(weights.layers):
            x, more = self._layer(number, layer, x, more, seen, shape, cache)
        _, hidden = self._entered(x, more, weights.norm)
        logits = wide_product(hidden, weights.head.t())
        token, logp = rows.sampled(logits, slice(0, shape.rows), self._uniform)
        rows.go_on(shape.rows, token, logp, (token[:, None] == self._eos).any(-1))

    def _see(self, shape: Shape, cache: StepCache, rows: RunningBatch) -> _Seen:
        assert self._rotary is not None
        count, (own, prompts, widest, prompt) = shape.rows, shape[1:5]
        config, device = self._decoder.config, self.device
        heads, kept = config.heads + 2 * config.kv_heads, config.kv_heads
        row, number, length = cache.seats[:, :count]
        slot = rows.slot[:count]
        # an unused row may have an old position, even of a larger cache
        place = (rows.before[:count] + rows.count[:count] - 1).clamp(0, cache.own.shape[4] - 1)
        position = rows.length[:count].clamp(0, len(self._rotary) - 1)
        # the slot in each seat; unused rows get the seat behind the last
        # (masked_fill passes the number to its kernel; torch.where would copy it from the host: no capture allows that)
        seat = (row * widest + number).masked_fill_(row < 0, prompts * widest)
        holder = torch.zeros(prompts * widest + 1, dtype=torch.int64, device=device).scatter_(0, seat, slot)
        holder = holder[:-1].view(prompts, 1, widest, 1)
        head = torch.arange(kept, device=device).view(1, kept, 1, 1)
        repeat = torch.arange(config.heads // kept, device=device)
        query = head * len(repeat) + repeat  # [1, H, 1, R]
        by_row = (slot.view(count, 1, 1, 1) * heads + query).flatten()
        by_prompt = (holder * heads + query).flatten()
        visible = torch.cat(
            (
                torch.arange(own, device=device) <= place[:, None],
                torch.arange(prompt, device=device) < length[:, None],
            ),
            1,
        )
        mask = torch.zeros(visible.shape, device=device).masked_fill_(~visible, float("-inf"))
        return _Seen(
            self._rotary.index_select(0, position),
            slot,
            place,
            torch.cat((by_row, by_prompt)),
            (holder * kept + head).flatten(),
            ((row.clamp_min(0)[:, None] * kept + head.flatten()) * widest + number[:, None]).flatten(),
            mask[:, None],
        )

    def _layer(
        self, number: int, layer: LayerWeights, x: Tensor, more: Tensor, seen: _Seen, shape: Shape, cache: StepCache
    ) -> tuple[Tensor, Tensor]:
        """Compute a layer: from the residual stream, float32 [B, hidden], and the output that is still to be added to
        it, to the same two after the layer.
        """
        config, kept, size = self._decoder.config, self._decoder.config.kv_heads, self._decoder.config.head_size
        x, normed = self._entered(x, more, layer.attention_norm)
        turn = self._fused(_turned)
        qkv = turn(layer.qkv(normed).view(len(x), -1, size), seen.rotation, kept, layer.qk_norm, config.norm_eps)
        keys_values = qkv[:, config.heads :].view(len(x), 2, kept, size)
        cache.own[:, number][:, seen.slot, :, seen.place] = keys_values
        x, normed = self._entered(x, layer.o(self._attend(number, qkv, seen, shape, cache)), layer.mlp_norm)
        return x, layer.down(self._fused(_swiglu)(layer.gate_up(normed)))

    def _fused(self, function: Callable[..., Any], any_size: bool = False) -> Callable[..., Any]:
        return compiled(function, any_size) if self._compiles else function

    def _entered(self, x: Tensor, more: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return (x + more in float32, its RMSNorm in the type of products)."""
        found: tuple[Tensor, Tensor] = self._fused(_added_normed)(x, more, weight, self._decoder.config.norm_eps)
        return found

    def _attend(self, number: int, qkv: Tensor, seen: _Seen, shape: Shape, cache: StepCache) -> Tensor:
        """Attend to each row's own tokens, and to each prompt once for all of its rows, with one softmax: qkv
        [B, H R + 2 H, size] -> [B, H R size].
        """
        config = self._decoder.config
        count, kept, size = shape.rows, config.kv_heads, config.head_size
        repeat, pairs = config.heads // kept, shape.prompts * kept
        own_keys, own_values = cache.own[:, number, :count, :, : shape.own].flatten(1, 2)  # [B H, L, size]
        keys, values = cache.shared[:, number, : shape.prompts, :, : shape.prompt].flatten(1, 2)  # [G H, P, size]
        # The R query heads that share a key head become R queries of that head: nothing is repeated.
        queries = qkv.view(-1, size).index_select(0, seen.queries)
        by_row, by_prompt = queries.split((count * kept * repeat, len(queries) - count * kept * repeat))
        to_own = wide_product(by_row.view(count * kept, repeat, size), own_keys.transpose(1, 2))
        to_prompt = wide_product(by_prompt.view(pairs, -1, size), keys.transpose(1, 2))
        to_prompt = to_prompt.view(-1, repeat, shape.prompt)
        scores = self._fused(_scores, any_size=True)(to_own, to_prompt, seen.seat, seen.mask, size**-0.5)
        share = scores.softmax(-1).to(self._dtype)  # torch's kernel reads them once
        to_own, to_prompt = share.split((shape.own, shape.prompt), -1)
        to_prompt = to_prompt.index_select(0, seen.members).view(pairs, -1, shape.prompt)
        from_own = wide_product(to_own, own_values)
        from_prompt = wide_product(to_prompt, values).view(-1, repeat, size)
        summed: Tensor = self._fused(_summed, any_size=True)(from_own, from_prompt, seen.seat, self._dtype)
        return summed.view(count, -1)


# -- operations between the products, each one kernel if compiled ------------------------------------------------------


def _added_normed(x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = x + more
    return x, (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).to(more.dtype)


def _turned(qkv: Tensor, rotation: Tensor, kept: int, qk_norm: Tensor | None, eps: float) -> Tensor:
    """Apply the norm, if there is one, and the rotary embedding to the heads of q and k: qkv [B, H R + 2 H, size]."""
    qk, v = qkv[:, :-kept].float(), qkv[:, -kept:]
    if qk_norm is not None:
        qk = qk * (qk.square().mean(-1, keepdim=True) + eps).rsqrt() * qk_norm
    cos, sin = rotation.unbind(1)
    turned = qk * cos + qk.roll(qk.shape[-1] // 2, -1) * sin
    return torch.cat((turned.to(qkv.dtype), v), 1)


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    return (functional.silu(gate) * up).to(x.dtype)


def _scores(to_own: Tensor, to_prompt: Tensor, seat: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Concatenate the scores of own tokens [B H, R, L] and of prompts' tokens [G H W, R, P] to [B H, R, L + P]."""
    scores = torch.cat((to_own, to_prompt.index_select(0, seat)), -1) * scale
    return (scores.view(len(mask), -1, scores.shape[-1]) + mask).view_as(scores)


def _summed(from_own: Tensor, from_prompt: Tensor, seat: Tensor, dtype: torch.dtype) -> Tensor:
    return (from_own + from_prompt.index_select(0, seat)).to(dtype)


class Graphs:
    """Captured graphs by shape. They share one memory pool, since they run one after the other, and none reads data
    that another left there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._known: OrderedDict[Shape, torch.cuda.CUDAGraph | None] = OrderedDict()  # None: ran once, uncaptured
        self._addresses: tuple[object, ...] = ()

    def __len__(self) -> int:
        return sum(graph is not None for graph in self._known.values())

    def clear(self) -> None:
        if self._known:
            torch.cuda.synchronize(self._device)  # no graph may be running
            self._known.clear()
            self._pool = torch.cuda.graph_pool_handle()

    def check(self, addresses: tuple[object, ...]) -> None:
        """Drop the graphs if the tensors that they use have moved."""
        if addresses != self._addresses:
            self.clear()
            self._addresses = addresses

    def run(self, shape: Shape, step: Callable[[], None]) -> None:
        """Run a step. The first step of a shape runs without capture, since libraries initialise themselves then."""
        if shape not in self._known:
            self._warm(step)
            self._known[shape] = None
        else:
            graph = self._known[shape]
            if graph is None:
                graph = self._known[shape] = self._captured(step)
            graph.replay()
        self._known.move_to_end(shape)
        if len(self._known) > GRAPHS:
            torch.cuda.synchronize(self._device)
            self._known.popitem(last=False)

    def _warm(self, step: Callable[[], None]) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()
        current.wait_stream(self._stream)

    def _captured(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture a step, without running it."""
        graph = torch.cuda.CUDAGraph()
        # other threads, such as a learner or environments, may use the GPU meanwhile
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            step()
        return graph
