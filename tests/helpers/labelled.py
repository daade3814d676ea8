"""A verb, a source and an objective as a user would add them: replies labelled good or bad, learned without rollouts.

Likelihood of the good ones, unlikelihood of the bad ones (Welleck et al. 2019, arXiv 1908.04319, eq. 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.config.shared_options import option
from posttrain.config.training import Passes
from posttrain.config.verbs import CHAT, Verb
from posttrain.core.batch import Batch, Outputs, Stats, TrainingStep
from posttrain.core.seeds import seed_of
from posttrain.core.transcripts import Transcript
from posttrain.envs.demonstration import demonstrate
from posttrain.models.checkpoint_summary import outline
from posttrain.training.open_learner import new_learner, policy
from posttrain.training.setup import end_tokens, optimization, split_tasks
from posttrain.training.sources.packing import collate
from posttrain.training.training_run import RunContext, RunParts


class Unlikelihood:
    wants: frozenset[str] = frozenset()

    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        assert batch.advantage is not None  # 1 for good replies, -1 for bad ones
        loss = torch.where(batch.advantage > 0, -outputs.logp, -torch.log1p(-outputs.logp.exp().clamp_max(0.9999)))
        stats.add("unlikelihood", loss.detach().sum().item(), loss.numel())
        return (batch.weight * loss).sum()


@dataclass(frozen=True)
class LabelledReplies:
    rows: Sequence[tuple[Transcript, bool]]
    per_step: int
    seed: int
    device: torch.device

    def produce(self, number: int) -> TrainingStep:
        shuffled = torch.randperm(
            len(self.rows), generator=torch.Generator().manual_seed(seed_of(self.seed, "labelled", number))
        )
        rows = [self.rows[i] for i in shuffled[: self.per_step].tolist()]
        tokens = sum(t.n_scored for t, _ in rows)
        labels = [torch.full((t.n_scored,), 1.0 if good else -1.0) for t, good in rows]
        share = torch.full((len(rows),), 1 / tokens)
        chosen, fields = [[t] for t, _ in rows], {"advantage": labels}
        batch = collate(chosen, range(len(rows)), weight=share, fields=fields, device=self.device)
        return TrainingStep(number, [lambda: [batch]], Stats(), tokens)

    def learned(self, step: TrainingStep, stats: Stats) -> None: ...
    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Labelled(Passes):
    """Learn from replies labelled good or bad."""

    out: str = "runs/unlikelihood"
    good: str = option("good", group="data", first_hour=True)
    """Column that says whether a reply is good."""


def build(context: RunContext[Labelled]) -> RunParts:
    config, run = context.config, context.run
    tasks, _ = split_tasks(config, context.rows, need=("prompt", "response"))
    folder = run.checkpoint or run.start
    assert folder
    tokenizer, _, _ = outline(folder, config.chat_template)
    model = policy(config, folder, context.device, run.world)
    eos = end_tokens(model, tokenizer)
    rows = [(demonstrate(task, tokenizer, eos), bool(task[config.good])) for task in tasks.first(10_000)]
    steps = config.steps or 1
    learner = new_learner(config, model, optimization(config, steps), run.world)
    source = LabelledReplies(rows, config.rows, config.seed, learner.device)
    told = ["minimise  -log p, or -log(1 - p)"]
    return RunParts(source, Unlikelihood(), learner, tokenizer, steps, [f"{len(rows)} labelled replies"], told)


VERB = Verb(
    config="labelled:Labelled",
    function="labelled:build",
    heading="train",
    help="Learn from replies labelled good or bad.",
    example="--tasks labelled.jsonl --model runs/sft",
    given=("tasks", "model"),
    learns="demonstrations",
    use=CHAT,
)
