"""How an engine in the learner's process gets its weights: it shares the learner's, or has a copy that is written over."""

from __future__ import annotations

import copy

import torch

from posttrain.protocols import Model


def own_copy(model: Model) -> Model:
    """A copy that no update moves."""
    copied: Model = copy.deepcopy(model)
    return copied.requires_grad_(False)


def take_over(own: Model, weights: Model) -> None:
    """Write these weights over those of a copy, in place."""
    theirs = dict(weights.named_parameters())
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            parameter.copy_(theirs.pop(name))
    assert not theirs, f"weights that the copy has no place for: {', '.join(theirs)}"
