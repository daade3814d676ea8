"""Prefill: computes the prompts of requests, and stores them in the key-value cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.engines.local.compiled_step import logits_in_blocks
from posttrain.engines.local.kv_cache import KVCache, Prompt, PromptPrefix
from posttrain.engines.local.paged_cache import PagedCache
from posttrain.engines.local.prompt_layout import PromptBlocks
from posttrain.models.native.attention import SegmentAttention, each_alone, filled
from posttrain.models.native.decoder import Decoder
from posttrain.models.native.linear import ROUND, in_blocks, rounds

PREFILL_TOKENS = 8192  # prompts are computed in batches of about this many tokens


def prefilled(
    model: Decoder, prompts: Sequence[Prompt], cache: KVCache | PagedCache, batch_invariant: bool
) -> tuple[dict[Prompt, PromptPrefix], int]:
    """Return these prompts, computed, and the number of tokens that the model has processed. `batch_invariant`: whether
    the bits of a prompt may not depend on the others.
    """
    batches = [PromptBlocks()]
    for prompt in prompts:
        if batches[-1].tokens and batches[-1].tokens + batches[-1].missing(prompt) > PREFILL_TOKENS:
            batches.append(PromptBlocks())
        batches[-1].add(prompt)
    found: dict[Prompt, PromptPrefix] = {}
    for blocks in batches if prompts else ():
        found |= _batch(model, blocks, cache, batch_invariant)
    return found, sum(blocks.tokens for blocks in batches)


def _batch(
    model: Decoder, blocks: PromptBlocks, cache: KVCache | PagedCache, batch_invariant: bool
) -> dict[Prompt, PromptPrefix]:
    """Compute and store prompts in one pass through the model."""
    device = model.head.device
    laid, prompts = blocks.lay(device, joined=not batch_invariant), blocks.prompts
    segments = len(laid.layout.length)
    layout = filled(laid.layout, ROUND) if batch_invariant or rounds(device) else laid.layout
    last = torch.tensor([laid.last(i) for i in range(len(prompts))], device=device)
    attention = SegmentAttention(layout) if not batch_invariant else each_alone(layout, segments)
    keys, values = [], []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys.append(k)
        values.append(v)
        return attention(layer, q, k, v)

    if batch_invariant:
        asked = torch.cat((last, last[:1].expand(-len(last) % ROUND)))
        with in_blocks(ROUND):
            hidden = model(layout.tokens, layout.position, attend, asked)[: len(last)]
    else:
        hidden = model(layout.tokens, layout.position, attend, last)
    logits = logits_in_blocks(model, hidden) if batch_invariant else model.logits(hidden)
    k, v = torch.stack(keys).transpose(1, 2), torch.stack(values).transpose(1, 2)  # [layers, kv_heads, T, size]
    made: dict[int, Any] = {}
    stored = [cache.store(p, k, v, laid.places(i), blocks.paths[i], made) for i, p in enumerate(prompts)]
    return {p: PromptPrefix(x, logits[i].clone()) for i, (p, x) in enumerate(zip(prompts, stored, strict=True))}
