"""Losses and metrics of the routers of a mixture of experts during an update.

Both are means over the tokens from which scored tokens are predicted, each as often as it is scored, of the whole
optimizer batch over all micro-batches and processes. Neither padding nor shared prompts affect them, so they do not
depend on the split of rollouts into micro-batches.

N    these tokens of the optimizer batch    M    layers with a router    E    experts of each    k    experts per token
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.core.batch import Packed, Stats
from posttrain.core.protocols import World
from posttrain.models.hf.backed import Backed
from posttrain.models.hf.experts import UNKNOWN, Routed, watching


@dataclass(frozen=True)
class RouterLosses:
    """Coefficients of the terms that are added to the loss of an update; each is a mean over layers.

    balance   E sum_e f_e P_e with f_e the share of all choices that fell on expert e, P_e the mean probability that the
    router gives it; 1 where the load is equal (Switch Transformers, arXiv 2101.03961, eq. 4 to 6; there k = 1). f is a
    count and has no gradient.
    z         mean of (log sum_e exp x_e)^2 over the router's logits x (ST-MoE, arXiv 2202.08906, eq. 5).
    """

    balance: float = 0.0
    z: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.balance or self.z)


class Routing:
    """Losses and metrics of the routers during one update, in one process."""

    def __init__(self, model: Backed, losses: RouterLosses, world: World, batches: Sequence[Packed]) -> None:
        assert model.routers is not None
        self.model, self.losses, self.world = model, losses, world
        size = len(model.routers), model.routers.experts
        self.counts = torch.zeros(size, dtype=torch.float64, device=model.head.device)  # [M, E], choices so far
        self.moved = self.chosen = 0.0  # choices that differ from the router's own; all choices
        self.sums = dict.fromkeys(("balance", "z"), 0.0)  # this process's share of the two terms
        # before the first gradient: numbers of micro-batches and tokens, and whether the load is unknown
        known, told = self._given_choices(batches)
        own = [float(len(batches)), float(sum(b.at.numel() for b in batches)), float(told)]
        *about, rest = world.sum(torch.cat([known.new_tensor(own), known.flatten()])).split([1, 1, 1, known.numel()])
        many, self.tokens, unknown = (x.item() for x in about)
        self.alone = many == 1  # with a single micro-batch the load is known when it is computed
        self.load: Tensor | None = None if unknown else self._share(rest.view(size))  # f, [M, E]

    def count(self, batches: Sequence[Packed], first: int, within: AbstractContextManager[object]) -> None:
        """Compute the load of the whole batch by a forward pass of each micro-batch, if the balance loss needs it and
        it is unknown. Only the `first` micro-batches are counted.
        """
        if not self.losses.balance or self.load is not None or self.alone:
            return
        counts = torch.zeros_like(self.counts)
        with torch.no_grad(), within:
            for place, batch in enumerate(batches):
                with watching(self.model) as routed:
                    self.model.hidden(batch.layout, batch.at)
                if place < first:
                    counts += self._counted(routed.taken)
        self.load = self._share(self.world.sum(counts))

    def loss(self, routed: Routed) -> Tensor | None:
        """Return this micro-batch's share of the loss terms, whose sum over the micro-batches is the batch's; None:
        there are none.
        """
        taken = routed.taken
        counts = self._counted(taken)
        self.counts += counts
        self.chosen += sum(x.numel() for x in taken)
        for own, forced in zip(routed.own, taken, strict=True):
            self.moved += float((own[..., None] != forced[..., None, :]).all(-1).sum())
        if not self.losses or not taken:
            return None
        scores, shares = torch.cat(routed.scores), torch.cat(routed.shares)
        if not len(scores):
            return None
        load = self.load if self.load is not None else self._share(counts)
        each = self.counts.shape[0] * self.tokens  # layers times tokens: both terms are means over them
        balance = self.counts.shape[1] * (shares * load.to(shares.dtype)).sum() / each
        z = scores.logsumexp(-1).square().sum() / each
        self.sums["balance"] += balance.item()
        self.sums["z"] += z.item()
        return self.losses.balance * balance + self.losses.z * z

    def measure(self, stats: Stats) -> None:
        """Add the metrics of the routers after an update."""
        numbers = [self.moved, self.chosen, self.sums["balance"], self.sums["z"]]
        found = self.world.sum(torch.cat([self.counts.new_tensor(numbers), self.counts.flatten()]))
        moved, chosen, balance, z = found[:4].tolist()
        if not chosen:
            return
        load = self._share(found[4:].view_as(self.counts))
        for name, value in measured(load, self._taken).items():
            stats.add(f"routing/{name}", value)
        if self.model.replays:
            stats.add("routing/moved", moved / chosen)
        if self.losses:
            stats.add("routing/balance", balance)
            stats.add("routing/z", z)

    @property
    def _taken(self) -> int:
        assert self.model.routers is not None
        return self.model.routers.taken

    def _given_choices(self, batches: Sequence[Packed]) -> tuple[Tensor, bool]:
        """Return (counts of the choices given in layouts, [M, E]; whether any choice is missing)."""
        counts = torch.zeros_like(self.counts)
        for batch in batches:
            given = batch.layout.experts if self.model.replays else None
            if given is None or bool((own := given[batch.at].long()).eq(UNKNOWN).any()):
                return counts, True
            counts += self._counted([own])
        return counts, False

    def _counted(self, taken: Sequence[Tensor]) -> Tensor:
        """Return the counts of choices, [M, E], in a sequence of experts [n, M, k]."""
        layers, experts = self.counts.shape
        found = torch.zeros_like(self.counts)
        for one in taken:
            place = one + experts * torch.arange(layers, device=one.device)[:, None]
            found += torch.bincount(place.flatten(), minlength=layers * experts).view(layers, experts)
        return found

    @staticmethod
    def _share(counts: Tensor) -> Tensor:
        return counts / counts.sum(-1, keepdim=True).clamp_min(1)


def measured(load: Tensor, taken: int) -> dict[str, float]:
    """Compute metrics of a load [M, E], for k = `taken`. The load is the share of each expert in a layer's choices.

    entropy   of the load, mean over layers, between 0 (all tokens use the same k experts) and 1 (an equal load)
    busiest   share of the tokens that use the busiest expert of any layer
    dead      share of the experts that no token uses
    """
    experts = load.shape[-1]
    entropy = torch.special.entr(load).sum(-1)
    least, most = math.log(taken), math.log(experts)
    return {
        "entropy": float(((entropy - least) / (most - least)).mean()) if experts > taken else 1.0,
        "busiest": float(load.max()) * taken,
        "dead": float((load == 0).double().mean()),
    }
