"""Decides how transcripts become micro-batches: which go together, and how their tokens lie.

Tokens are laid end to end without padding. A prompt that several transcripts begin with is laid once, and the others
name it as their prefix. What no scored token depends on (the last token, trailing tool text) is not laid at all.

    T    tokens of a micro-batch    N    scored tokens    S    rollouts of the optimizer batch
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from posttrain.types import Batch, Layout, Transcript

if TYPE_CHECKING:
    import torch


def prompt_length(transcript: Transcript) -> int:
    """How many tokens come before the first sampled one."""
    return transcript.sampled.index(True)


def needed_length(transcript: Transcript) -> int:
    """How many tokens must be fed so that every sampled token is predicted: all before the last sampled one."""
    return len(transcript) - 1 - transcript.sampled[::-1].index(True)


def split_microbatches(transcripts: Sequence[Sequence[Transcript]], tokens_per_microbatch: int) -> list[list[int]]:
    """Indices of the rollouts of each micro-batch. Rollouts stay whole and in order; a shared prompt counts once.

    A micro-batch holds at most `tokens_per_microbatch` fed tokens beside the prompt of its first rollout, or a single
    rollout that is longer than that: so a long prompt does not drive the rollouts that share it apart.
    """
    batches: list[list[int]] = []
    used, prompts = 0, set[tuple[int, ...]]()
    for index, rollout in enumerate(transcripts):
        own = {tuple(t.tokens[: prompt_length(t)]) for t in rollout}
        replies = sum(needed_length(t) - prompt_length(t) for t in rollout)
        cost = replies + sum(len(p) for p in own - prompts)
        if not batches or used + cost > tokens_per_microbatch:
            batches.append([])
            used, prompts = 0, own
            cost = replies
        batches[-1].append(index)
        used, prompts = used + cost, prompts | own
    return batches


def collate(
    rollouts: Sequence[Sequence[Transcript]], index: Sequence[int], device: torch.device | str = "cpu"
) -> Batch:
    """One micro-batch of these rollouts, `index[i]` being the place of rollout i in the scoreboard [S].

    Scored tokens keep the order of rollouts, and within one the order of its tokens. Weights are 0: the caller sets them.
    """
    import torch

    users: dict[tuple[int, ...], int] = {}
    for transcript in (t for rollout in rollouts for t in rollout):
        prompt = tuple(transcript.tokens[: prompt_length(transcript)])
        users[prompt] = users.get(prompt, 0) + 1

    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    start, length, prefix = [], [], []
    shared: dict[tuple[int, ...], int] = {}
    at, target, owner, logp = [], [], [], []
    total = 0

    def segment(ids: Sequence[int], first: int, before: int) -> int:
        nonlocal total
        tokens.append(np.asarray(ids, dtype=np.int64))
        positions.append(np.arange(first, first + len(ids), dtype=np.int64))
        start.append(total)
        length.append(len(ids))
        prefix.append(before)
        total += len(ids)
        return len(start) - 1

    for place, rollout in zip(index, rollouts, strict=True):
        for transcript in rollout:
            head, end = prompt_length(transcript), needed_length(transcript)
            assert head > 0, "a sampled token needs a token before it"
            prompt = tuple(transcript.tokens[:head])
            if users[prompt] > 1 and prompt not in shared:
                shared[prompt] = segment(prompt, 0, -1)
            scored = np.flatnonzero(np.asarray(transcript.sampled))
            if prompt in shared:
                root = shared[prompt]
                # A reply of one token is predicted by the prompt alone: there is nothing more to feed.
                body = segment(transcript.tokens[head:end], head, root) if end > head else root
                before = np.where(scored - 1 < head, start[root], start[body] - head) + scored - 1
            else:
                before = start[segment(transcript.tokens[:end], 0, -1)] + scored - 1
            at.append(before)
            target.append(np.asarray(transcript.tokens, dtype=np.int64)[scored])
            owner.append(np.full(len(scored), place, dtype=np.int64))
            logp.append(np.asarray(transcript.logp, dtype=np.float32))

    def tensor(parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    scored_at = tensor(at)
    return Batch(
        layout=Layout(tensor(tokens), tensor(positions), tuple(start), tuple(length), tuple(prefix)),
        at=scored_at,
        target=tensor(target),
        rollout=tensor(owner),
        weight=torch.zeros(scored_at.shape, dtype=torch.float32, device=device),
        sampler_logp=tensor(logp),
    )
