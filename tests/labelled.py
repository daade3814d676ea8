"""A third source with its objective, as a user would add them: replies that are labelled good or bad, without rollouts.

Likelihood of the good ones, unlikelihood of the bad ones (Welleck et al. 2019, arXiv 1908.04319, eq. 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.config.training import SFT
from posttrain.core.batch import Batch, Outputs, Stats, TrainingStep
from posttrain.core.seeds import seed_of
from posttrain.core.types import Task, Transcript
from posttrain.envs.demonstration import demonstrate
from posttrain.learners.local_learner import LocalLearner
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.run_folder import begin
from posttrain.training.setup import optimization, prepare
from posttrain.training.sources.packing import collate
from posttrain.training.trainer import Run, Trainer


class Unlikelihood:
    wants: frozenset[str] = frozenset()

    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        assert batch.advantage is not None  # 1 for good replies, -1 for bad ones
        loss = torch.where(batch.advantage > 0, -outputs.logp, -torch.log1p(-outputs.logp.exp().clamp_max(0.9999)))
        stats.add("unlikelihood", loss.detach().sum().item(), loss.numel())
        return (batch.weight * loss).sum()


@dataclass(frozen=True)
class Labelled:
    rows: Sequence[tuple[Transcript, bool]]
    per_step: int
    seed: int

    def produce(self, number: int) -> TrainingStep:
        shuffled = torch.randperm(
            len(self.rows), generator=torch.Generator().manual_seed(seed_of(self.seed, "labelled", number))
        )
        rows = [self.rows[i] for i in shuffled[: self.per_step].tolist()]
        tokens = sum(t.n_scored for t, _ in rows)
        labels = [torch.full((t.n_scored,), 1.0 if good else -1.0) for t, good in rows]
        share = torch.full((len(rows),), 1 / tokens)
        batch = collate([[t] for t, _ in rows], range(len(rows)), weight=share, fields={"advantage": labels})
        return TrainingStep(number, [lambda: [batch]], Stats(), tokens)

    def learned(self, step: TrainingStep, stats: Stats) -> None: ...
    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...


def train_on_labels(tasks: Sequence[Task], config: SFT) -> Run:
    with begin(config, tasks) as run:
        device, folder = prepare(run.config), run.checkpoint or Path(str(config.model))
        model, tokenizer = load_model(folder, device=device), Tokenizer.load(folder)
        rows = [(demonstrate(t, tokenizer, model.eos_ids), bool(t["good"])) for t in tasks]
        steps = config.steps or 1
        learner = LocalLearner(model, optimization(config, steps))
        trainer = Trainer(run, learner, Labelled(rows, config.rows, config.seed), tokenizer, None, steps)
        return trainer.run(Unlikelihood(), [f"{len(rows)} labelled replies"], ["minimise  -log p, or -log(1 - p)"])
