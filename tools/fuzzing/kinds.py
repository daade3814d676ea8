"""All kinds of cases, and what part of a run each gets."""

from __future__ import annotations

from fuzzing import checkpoints, commands, data, programs, runs
from fuzzing.case import Kind

KINDS: dict[str, Kind] = {
    "tokenizer": Kind(checkpoints.tokenizer, 14),
    "old-tokenizer": Kind(checkpoints.old_tokenizer, 1),
    "config": Kind(checkpoints.config, 12),
    "generation": Kind(checkpoints.generation, 3),
    "weights": Kind(checkpoints.stored_weights, 5),
    "index": Kind(checkpoints.index, 2),
    "critic": Kind(checkpoints.critic, 2),
    "template": Kind(checkpoints.template, 8),
    "real-template": Kind(checkpoints.real_template, 2),
    "rows": Kind(data.dataset, 16),
    "replies": Kind(data.replies, 1),
    "recipe": Kind(commands.recipe, 8),
    "words": Kind(commands.words, 12),
    "typed": Kind(commands.typed, 1),
    "reward": Kind(programs.reward, 3),
    "environment": Kind(programs.environment, 3),
    "module": Kind(programs.module, 1),
    "converter": Kind(programs.converter, 2),
    "algorithm": Kind(programs.algorithm, 1),
    "run": Kind(runs.run, 3),
    "special": Kind(runs.special, 6),
}


def counts(names: list[str], total: int) -> dict[str, int]:
    """How many cases of each kind make up a run: by share, at least one each."""
    whole = sum(KINDS[name].share for name in names)
    return {name: max(1, round(total * KINDS[name].share / whole)) for name in names}
