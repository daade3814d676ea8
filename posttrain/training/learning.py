"""Which learner a run has, and how the models that it holds come into its processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from posttrain.config import Training
from posttrain.learners.dealing import DealingLearner
from posttrain.learners.local import Optimization
from posttrain.models.backed import Backed
from posttrain.models.decoder import Decoder
from posttrain.models.folder import load_model
from posttrain.models.reward import RewardModel
from posttrain.protocols import Model, World
from posttrain.types import UserError


def held_model(config: Training, folder: Path, device: torch.device, world: World) -> Model:
    """The model of a folder, for the learner: with `--shard`, this process's rows of it, and no more is ever read."""
    if not config.shard:
        model = load_model(folder, device=device)
        if isinstance(model, Backed) and not config.train_vision:
            model.freeze_vision()
        return model
    from posttrain.learners.sharding import shard  # it brings half of torch.distributed

    return load_model(folder, device=device, shard=partial(shard, size=world.size, device=device), shares=world.size)


def new_learner(
    config: Training, model: Model, optimization: Optimization, world: World, **options: Any
) -> DealingLearner:
    """`options`: what else a learner takes."""
    if not config.shard:
        return DealingLearner(model, optimization, precision=config.precision, world=world, **options)
    for held in (model, *options.get("others", {}).values()):
        if not isinstance(held, Decoder | RewardModel):
            raise UserError(
                f"--shard deals out the layers of a decoder, and a {type(held).__name__} is none: leave it out"
            )
    from posttrain.learners.sharding import ShardingLearner
    from posttrain.learners.world import Processes

    assert isinstance(world, Processes), "one process alone was refused"
    return ShardingLearner(model, optimization, precision=config.precision, world=world, **options)
