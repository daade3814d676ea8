"""The loss of given texts within training: of held-out responses of `sft`, and of the texts of `--forget`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from posttrain.config.training import RewardModelling, Training
from posttrain.core.batch import Stats
from posttrain.core.protocols import Learner
from posttrain.core.types import Task, UserError
from posttrain.data.rows import load_rows
from posttrain.data.tasks import Stream, Tasks, to_tasks
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.run_folder import RunFolder
from posttrain.training.setup import microbatch_tokens, watch_lengths
from posttrain.training.sources.sft_source import Demonstrations, Transcripts

AT_ONCE = 1000  # rows whose transcripts are in memory together


def read_texts(option: str, file: str) -> Tasks | Stream:
    """Read rows with `text`, which becomes a response without a prompt, or with prompt and response.

    Raises UserError.
    """

    def text_or_row(row: dict[str, Any]) -> Task:
        if "text" not in row and "response" not in row:
            raise UserError(
                f"{option} {file} needs rows with text, or with prompt and response; one has {', '.join(row)}"
            )
        return {"response": row["text"]} if "text" in row else row

    return to_tasks(load_rows(file), convert=text_or_row, need=("response",))


def text_loss(texts: Transcripts, source: Demonstrations, learner: Learner, metric: str) -> Callable[[Stats], None]:
    """Return a function that adds the mean negative log-likelihood of these texts' scored tokens as the metric
    `metric`.
    """

    def measure(stats: Stats) -> None:
        for first in range(0, len(texts), AT_ONCE):
            places = range(first, min(first + AT_ONCE, len(texts)))
            rows = [made for place in places if (made := texts[place]) is not None]
            for o in learner.evaluate(source.batches(rows)) if rows else ():
                stats.add(metric, -o.logp.sum().item(), o.logp.numel())

    return measure


def forgetting(
    run: RunFolder[Any], learner: Learner, tokenizer: Tokenizer, device: torch.device
) -> Callable[[Stats], None] | None:
    """Return a function that adds the loss of the texts of `--forget`; None without it.

    Raises UserError if that is not possible.
    """
    config: Training = run.config
    if config.forget is None:
        return None
    if isinstance(config, RewardModelling):
        raise UserError("--forget measures the likelihood of text, which a reward model does not have: leave it out")
    tasks = read_texts("--forget", config.forget)
    if isinstance(tasks, Stream):
        raise UserError(
            f"--forget {config.forget} has rows without end, and every evaluation reads all of them: give a finite file"
        )
    model = learner.weights()
    how = tuple(model.eos_ids), model.config.vocab, watch_lengths(config, model.config.context)
    texts = Transcripts(run.chat.of(tasks, answered=True), tokenizer, *how)
    texts.check()
    source = Demonstrations(texts, AT_ONCE, microbatch_tokens(config, model), config.seed, device)
    return text_loss(texts, source, learner, "forget/loss")
