"""The loss of given texts: within training of held-out responses of `sft`, and of the texts of `--forget`, which `eval`
measures too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.config.training import RewardModelling, Training
from posttrain.core.batch import Stats
from posttrain.core.intervals import ratio_interval, stated
from posttrain.core.protocols import Learner, Model
from posttrain.core.types import Task, UserError
from posttrain.data.rows import load_rows
from posttrain.data.tasks import Stream, Tasks, to_tasks
from posttrain.models.losses.likelihood import token_logp
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.run_folder import RunFolder
from posttrain.training.setup import microbatch_tokens, watch_lengths
from posttrain.training.sources.sft_source import Demonstrations, Transcripts

TEXT_LOSS = "text loss"
"""Name of the figure of an evaluation."""
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


def forget_texts(file: str) -> Tasks:
    """Read the rows of `--forget`. Raises UserError for rows without end too."""
    tasks = read_texts("--forget", file)
    if isinstance(tasks, Stream):
        raise UserError(
            f"--forget {file} has rows without end, and an evaluation reads all of them: give a finite file"
        )
    return tasks


@dataclass(frozen=True)
class TextLosses:
    """The negative log-likelihood of texts under one model. Texts that do not fit its context are left out."""

    nats: dict[int, float]  # place of the text -> sum over its scored tokens
    tokens: dict[int, int]  # place of the text -> number of these

    @property
    def figure(self) -> dict[str, Any]:
        """The loss in nats per token, with an interval over texts."""
        nats, tokens = ([*column.values()] for column in (self.nats, self.tokens))
        return stated(sum(nats) / sum(tokens), ratio_interval(nats, tokens, of="texts"), texts=len(nats))

    def minus(self, other: TextLosses) -> dict[str, Any] | None:
        """Return this loss less the other's, over the same texts; None if their tokens differ, as losses of other tokens
        cannot be compared.
        """
        if self.tokens != other.tokens:
            return None
        tokens = [*self.tokens.values()]
        own, others = [*self.nats.values()], [other.nats[place] for place in self.nats]
        gaps = [a - b for a, b in zip(own, others, strict=True)]
        return stated(sum(gaps) / sum(tokens), ratio_interval(gaps, tokens, of="texts"), texts=len(tokens))


def losses_of_texts(
    texts: Transcripts, model: Model, precision: str, tokens_per_microbatch: int = AT_ONCE
) -> TextLosses:
    """Return the loss of each text, at temperature 1. Raises UserError if none fits."""
    texts.check()
    device = model.head.device
    source = Demonstrations(texts, AT_ONCE, tokens_per_microbatch, 0, device)
    found = TextLosses({}, {})
    for first in range(0, len(texts), AT_ONCE):
        made = {place: texts[place] for place in range(first, min(first + AT_ONCE, len(texts)))}
        kept = {place: own for place, own in made.items() if own is not None}
        nats = torch.zeros(len(kept), dtype=torch.float64, device=device)
        for batch in source.batches([*kept.values()]) if kept else ():
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                logp = token_logp(model.hidden(batch.layout, batch.at), model.head, batch.target)
            nats.index_add_(0, batch.rollout, -logp.double())
        by_length = sorted(kept, key=lambda place: sum(map(len, kept[place])))  # the order of `batches`
        found.nats.update(sorted(zip(by_length, nats.tolist(), strict=True)))
        found.tokens.update({place: sum(t.n_scored for t in own) for place, own in kept.items()})
    return found


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
    tasks = forget_texts(config.forget)
    model = learner.weights()
    how = tuple(model.eos_ids), model.config.vocab, watch_lengths(config, model.config.context)
    texts = Transcripts(run.chat.of(tasks, answered=True), tokenizer, *how)
    texts.check()
    source = Demonstrations(texts, AT_ONCE, microbatch_tokens(config, model), config.seed, device)
    return text_loss(texts, source, learner, "forget/loss")
