"""The data types in which a run stores its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from posttrain.config.service_options import SCORERS
from posttrain.config.training import Training
from posttrain.core.protocols import Model
from posttrain.core.types import UserError
from posttrain.models.adapters.lora import is_adapted


def trained_type(config: Any) -> torch.dtype | None:
    """Return the type of the matrices that learn; None: that of all weights."""
    return torch.bfloat16 if getattr(config, "weights", "float32") == "bfloat16" else None


def frozen_type(config: Any, packed: str = "") -> torch.dtype | None:
    """Return the type of frozen matrices; None: that of all weights. With `--weights bfloat16` it is that of the policy,
    whose reference has then the same numbers.

    `packed`: quantization of the frozen weights of an adapter whose training continues. Raises UserError if
    `--frozen-weights` contradicts other options.
    """
    if getattr(config, "frozen_weights", "float32") == "float32":
        return trained_type(config)
    if packed := packed or config.quantize:
        raise UserError(
            f"--quantize {packed} already stores frozen weights in fewer bits than bfloat16: leave out --frozen-weights"
        )
    return torch.bfloat16


def refuse_rounded_moves(config: Any, option: str, rate: float) -> None:
    """Raise UserError if a frozen model moves in steps that bfloat16 would round away."""
    if rate < 1 and frozen_type(config) is not None:
        own = "--weights" if trained_type(config) is not None else "--frozen-weights"
        raise UserError(f"{option} {rate:g} makes changes too small for {own} bfloat16: leave one of them out")


def refuse_useless(config: Training, model: Model, others: Mapping[str, Model]) -> None:
    """Raise UserError if `--frozen-weights` is given, but no weights are frozen."""
    services = [name for kind in SCORERS for name in getattr(config, kind, ())]
    if config.frozen_weights != "float32" and not (is_adapted(model) or others or services):
        raise UserError(
            "--frozen-weights bfloat16 has no effect, as all weights are trained and there is no reference, teacher or "
            "reward model: leave it out, or train adapters with --lora RANK"
        )
