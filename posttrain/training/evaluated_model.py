"""The rollouts that an evaluation samples from each of its checkpoints: the same tasks with the same seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from posttrain.config.inference import Evaluation
from posttrain.core.intervals import mean_interval, stated
from posttrain.core.rollouts import Rollout
from posttrain.core.types import Invalid, UserError
from posttrain.data.tasks import Tasks
from posttrain.engines.engine_options import EngineOptions
from posttrain.engines.open_engine import open_engine
from posttrain.engines.search.search_engine import SearchEngine
from posttrain.envs.play.episode import Episode
from posttrain.models.checkpoint_folder import load_model
from posttrain.training.playground import Playground
from posttrain.training.rollout_figures import repeated
from posttrain.training.row_warnings import warn_unread
from posttrain.training.search_setup import searching
from posttrain.training.setup import end_tokens, fitting, reply_length_note
from posttrain.training.sources.length_filter import TooLong
from posttrain.training.sources.sft_source import Transcripts
from posttrain.training.text_loss import TextLosses, losses_of_texts

UNVALUED = "unvalued partial replies"  # figure of those that were too long for the scorer of a search


@dataclass
class EvaluatedModel:
    """A checkpoint of an evaluation."""

    name: str  # as the user gave it
    rollouts: list[Rollout]
    losses: TextLosses | None = None  # of the texts of --forget
    search: dict[str, Any] = field(default_factory=dict)  # figures of its searches

    @property
    def n_invalid(self) -> int:
        return sum(isinstance(rollout.reward, Invalid) for rollout in self.rollouts)


def sampled(
    config: Evaluation,
    place: int,
    path: Path,
    data: Tasks,
    ground: Playground,
    texts: Tasks | None,
    device: torch.device,
    say: Callable[[str], None],
) -> EvaluatedModel:
    """Return `samples` rollouts of every task that fits the context of a checkpoint, and its losses of `texts`.

    `place`: its place among the models of the playground. Raises UserError if no prompt fits, or no reward is valid.
    """
    name, known = (config.model, *config.against)[place], ground.models[place]
    model, tokenizer = load_model(path, device=device), known.tokenizer
    tasks, context = known.chat.of(data), model.config.context
    for line in known.lines:
        say(f"{name}: {line}" if config.against else line)
    end_tokens(model, tokenizer)
    warn_unread(tokenizer, tasks, say)
    for line in reply_length_note({"--max-tokens": config.max_tokens}, context):
        say(line)
    beyond: list[str] = []
    too_long = TooLong(config.too_long, context, beyond.append)
    some = fitting(tasks, ground.pool, tokenizer, too_long)
    if not some:
        raise UserError(f"no prompt fits into the context of {name}: {beyond[0]}")
    losses = None
    if texts is not None:
        read = Transcripts(known.chat.of(texts, answered=True), tokenizer, model.eos_ids, model.config.vocab, too_long)
        losses = losses_of_texts(read, model, config.precision)
    for line in beyond:
        say(line)
    episodes, figures = repeated(some, config.samples, config.seed), dict[str, Any]()
    options = EngineOptions(config.slots, config.precision, config.replicas)
    with closing(open_engine("local", model, tokenizer, options)) as engine:
        engine.load(model, 0)
        if config.search:
            search = searching(config, config.search[0], engine, path, model, tokenizer, ground.services)
            rollouts = ground.player(search, tokenizer, context).play(episodes)
            figures = _search_figures(search, episodes)
        else:
            rollouts = ground.player(engine, tokenizer, context).play(episodes)
    reasons = [r.reward.reason for r in rollouts if isinstance(r.reward, Invalid)]
    if len(reasons) == len(rollouts):
        raise UserError(f"no reward of {name} is valid: check --env {config.env}; the first: {reasons[0]}")
    return EvaluatedModel(name, rollouts, losses, figures)


def _search_figures(search: SearchEngine, episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return the mean number of tokens that a search sampled for a reply, of partial replies that were too long to
    value, if there are any, and of whole ones too long to verify, if it verifies. Each task counts once.
    """
    found: dict[str, dict[str, list[int]]] = {}  # figure -> task -> of each search
    for episode in episodes:
        record = search.record(episode.seed)
        if record is not None:
            own = {
                "search tokens": record.spent,
                UNVALUED: record.unvalued,
                "unverified replies": record.unverified,
            }
            for name, value in own.items():
                if value is not None:
                    found.setdefault(name, {}).setdefault(str(episode.task["id"]), []).append(value)
    means = {name: [sum(own) / len(own) for own in tasks.values()] for name, tasks in found.items()}
    if not any(means.get(UNVALUED, ())):
        means.pop(UNVALUED, None)
    return {name: stated(sum(own) / len(own), mean_interval(own), tasks=len(own)) for name, own in means.items()}


def invalid_notes(side: EvaluatedModel, figures: dict[str, Any]) -> tuple[str, ...]:
    """Return notes on the effect of a checkpoint's invalid rewards on its figures, if there are any."""
    reasons = [r.reward.reason for r in side.rollouts if isinstance(r.reward, Invalid)]
    if not reasons:
        return ()
    notes = [
        f"{side.name}: {len(reasons)} of {len(side.rollouts)} rewards were invalid, and its figures leave them out; the "
        f"first: {reasons[0]}"
    ]
    tasks = len({r.task["id"] for r in side.rollouts})
    fewer = [
        f"{n} over {f['tasks']}" for n, f in figures.items() if isinstance(f, dict) and f.get("tasks", tasks) < tasks
    ]
    if fewer:
        notes.append(f"{side.name}: {', '.join(fewer)} of {tasks} tasks: the others have too few valid rewards")
    return tuple(notes)
