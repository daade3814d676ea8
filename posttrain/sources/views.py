"""What the models say of whole rollouts: packed into micro-batches, evaluated, and given back rollout by rollout.

n_i    scored tokens of rollout i    N    scored tokens of a micro-batch
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from posttrain.batch import Packed
from posttrain.protocols import Learner
from posttrain.sources.packing import pack, split_microbatches
from posttrain.types import Rollout


def view(
    learner: Learner,
    rollouts: Sequence[Rollout],
    tokens_per_microbatch: int,
    of: Literal["policy", "reference"] = "policy",
    want: frozenset[str] = frozenset(),
) -> dict[str, list[Tensor]]:
    """Field of `Outputs`, "logp" and those of `want` -> [n_i] for each rollout."""
    packed = packs(rollouts, tokens_per_microbatch, learner.device)
    outputs = learner.evaluate(packed, of, want)

    def field(name: str) -> list[Tensor]:
        pairs = [(p.rollout, getattr(o, name)) for p, o in zip(packed, outputs, strict=True)]
        return by_rollout(pairs, len(rollouts))

    return {name: field(name) for name in ("logp", *want)}


def packs(rollouts: Sequence[Rollout], tokens_per_microbatch: int, device: torch.device) -> list[Packed]:
    """The rollouts as micro-batches."""
    parts = [r.transcripts for r in rollouts]
    return [
        pack([parts[i] for i in index], index, device) for index in split_microbatches(parts, tokens_per_microbatch)
    ]


def by_rollout(parts: Sequence[tuple[Tensor, Tensor]], count: int) -> list[Tensor]:
    """Per-token values of micro-batches [(rollout [N], value [N])] -> one tensor [n_i] per rollout."""
    out: list[Tensor] = [torch.zeros(0)] * count
    for rollout, value in parts:
        rows, sizes = rollout.unique_consecutive(return_counts=True)
        for row, piece in zip(rows.tolist(), value.split(sizes.tolist()), strict=True):
            out[row] = piece
    return out
