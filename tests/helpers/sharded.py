"""Learners and runs of one process and of several, to be compared."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from sums import SUMS, nearness
from torch import Tensor

import posttrain
from posttrain.core.batch import Batch, Outputs, Stats
from posttrain.core.transcripts import Transcript
from posttrain.learners.local_learner import LocalLearner
from posttrain.models.row_shards import whole
from posttrain.runs.run_reading import read_metrics
from posttrain.training.sources.sft_source import Demonstrations

QUICK: dict[str, Any] = {"threads": 1, "quiet": True, "held_out": 0.2, "tokens_per_microbatch": 48}


def go_on(half: Path, out: Path, steps: int, **options: Any) -> None:
    """Copy a run that ended halfway, and resume it to the end, with options of its own."""
    if os.environ.get("RANK", "0") == "0":
        shutil.copytree(half, out)
    posttrain.rl(
        SUMS, nearness, str(out.parent / "start"), out=str(out), resume=True, steps=steps, env_workers=0, quiet=True,
        **options,
    )  # fmt: skip


def same_run(one: Path, other: Path) -> None:
    ours, theirs = read_metrics(one), read_metrics(other)
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    for mine, row in zip(ours, theirs, strict=True):
        for key, value in mine.items():
            assert row[key] == pytest.approx(value, rel=1e-3, abs=1e-4), (mine["step"], key)


def micro_batches(count: int) -> list[Batch]:
    """Of so many demonstrations, of ragged lengths."""
    generator = torch.Generator().manual_seed(count)
    rows = []
    for number in range(count):
        transcript = Transcript()
        transcript.observe(torch.randint(3, 41, (3,), generator=generator).tolist())
        transcript.imitate(torch.randint(3, 41, (3 + 5 * (number % 3),), generator=generator).tolist())
        rows.append([transcript])
    return Demonstrations([], 1, 12, 0, torch.device("cpu")).batches(rows)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Both:
    """A loss of policy and critic. `policy`, `critic`: the micro-batches whose gradients go to it."""

    policy: Callable[[Batch], bool] = lambda batch: True
    critic: Callable[[Batch], bool] = lambda batch: True
    wants: frozenset[str] = frozenset({"value", "entropy"})

    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        assert outputs.value is not None and outputs.entropy is not None
        logp = outputs.logp if self.policy(batch) else outputs.logp.detach()
        value = outputs.value if self.critic(batch) else outputs.value.detach()
        stats.add("tokens", len(logp), 0)
        weight = torch.linspace(0.5, 1.5, len(logp), dtype=logp.dtype)
        still = logp.sum() * 0 if not (logp.requires_grad or value.requires_grad) else 0
        return still - (weight * logp).sum() / 7 + ((value - 1) ** 2).sum() / 5


def long(batch: Batch) -> bool:
    return batch.layout.tokens.numel() > 10


def gradients(of: LocalLearner) -> dict[str, Tensor]:
    """Return a dict that the next optimizer step fills with its gradients."""
    found: dict[str, Tensor] = {}
    step = of.optimizer.step

    def noting() -> None:
        for part in of.parts:
            for name, parameter in part.parameters.items():
                if parameter.grad is not None:
                    found[f"{part.name}/{name}"] = whole(of._as_stored(parameter, parameter.grad)).clone()
        step()

    of.optimizer.step = noting  # type: ignore[method-assign]
    return found


def equal(mine: dict[str, Tensor], theirs: dict[str, Tensor], within: float) -> None:
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(
            tensor, theirs[name], atol=within, rtol=within, msg=lambda said, n=name: f"{n}: {said}"
        )  # type: ignore[misc]
