"""Outputs of the models on whole rollouts: packed into micro-batches, evaluated, and split by rollout.

n_i    scored tokens of rollout i    N    scored tokens of a micro-batch
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.core.batch import Packed
from posttrain.core.protocols import Learner
from posttrain.core.rollouts import Rollout
from posttrain.core.transcripts import Transcript
from posttrain.training.sources.packing import Taught, pack, split_microbatches


def evaluate_rollouts(
    learner: Learner,
    rollouts: Sequence[Rollout],
    tokens_per_microbatch: int,
    of: str = "policy",
    want: frozenset[str] = frozenset(),
    taught: Sequence[Taught] = (),
) -> dict[str, list[Tensor]]:
    """Return the fields "logp" and `want` of `Outputs`, [n_i] for each rollout.

    `taught`: the rollouts as teachers read them.
    """
    packed = pack_microbatches([r.transcripts for r in rollouts], tokens_per_microbatch, learner.device, taught)
    outputs = learner.evaluate(packed, of, want)

    def field(name: str) -> list[Tensor]:
        pairs = [(p.rollout, getattr(o, name)) for p, o in zip(packed, outputs, strict=True)]
        return by_rollout(pairs, len(rollouts))

    return {name: field(name) for name in ("logp", *want)}


def pack_microbatches(
    rollouts: Sequence[Sequence[Transcript]],
    tokens_per_microbatch: int,
    device: torch.device,
    taught: Sequence[Taught] = (),
) -> list[Packed]:
    """Pack the rollouts into micro-batches."""
    return [
        pack([rollouts[i] for i in index], index, device, [taught[i] for i in index] if taught else ())
        for index in split_microbatches(rollouts, tokens_per_microbatch)
    ]


def by_rollout(parts: Sequence[tuple[Tensor, Tensor]], count: int) -> list[Tensor]:
    """Return one tensor [n_i] per rollout from per-token values of micro-batches [(rollout [N], value [N])]."""
    out: list[Tensor] = [torch.zeros(0)] * count
    for rollout, value in parts:
        rows, sizes = rollout.unique_consecutive(return_counts=True)
        for row, piece in zip(rows.tolist(), value.split(sizes.tolist()), strict=True):
            out[row] = piece
    return out
