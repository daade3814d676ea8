"""The log-probabilities of several continuations of the same tokens, which are computed once.

N    tokens of all continuations
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from posttrain.core.batch import Layout
from posttrain.core.protocols import Model
from posttrain.models.losses.likelihood import token_logp


@torch.no_grad()
def continuation_logp(model: Model, before: Sequence[int], words: Sequence[Sequence[int]]) -> list[float]:
    """Return the log-probability of each of these continuations of `before`, at temperature 1."""
    length = [len(before), *map(len, words)]
    start = [sum(length[:place]) for place in range(len(length))]
    device = model.head.device
    position = [*range(len(before)), *(len(before) + i for word in words for i in range(len(word)))]
    layout = Layout(
        torch.tensor([*before, *(token for word in words for token in word)], device=device),
        torch.tensor(position, device=device),
        tuple(start),
        tuple(length),
        (-1, *(0 for _ in words)),
    )
    places = [[len(before) - 1, *range(s, s + n - 1)] for s, n in zip(start[1:], length[1:], strict=True)]
    at = torch.tensor([place for own in places for place in own], device=device)  # [N]
    target = torch.tensor([token for word in words for token in word], device=device)
    logp = token_logp(model.hidden(layout, at), model.head, target).double()
    return [own.sum().item() for own in logp.split(length[1:])]
