"""Rollouts that branch behind a tool's result, and the credit of tokens that several rollouts share."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from posttrain.core.batch import Scores
from posttrain.core.component import Component, Need, setting
from posttrain.core.lazy_torch import torch
from posttrain.envs.play.branch_plan import BranchPlan

if TYPE_CHECKING:
    from torch import Tensor

PAPER = "ARPO, arXiv 2507.19849"


@dataclass(frozen=True)
class Branching(Component):
    """Branches rollouts where a tool result makes the policy uncertain, instead of starting all at the prompt.

    `first` x M rollouts of a group begin with the prompt. After each tool result, the entropy H_t of the reply's first
    `tokens` tokens is compared with H_0, that of the episode's first ones. Where alpha + beta (H_t - H_0) / log V exceeds
    the threshold, `branches` further rollouts of the group begin right after the result. The remaining members of the
    group begin with the prompt (ARPO, arXiv 2507.19849, section 3.1).

    credit   credit of tokens that d rollouts share. `soft`: in each rollout that rollout's own. `hard`: in each the mean
             over the d rollouts.
    """

    branches: int = setting(
        1, "branches", "Rollouts that branch at a tool result that raised the entropy (0: none).", above=0, absent=0
    )
    first: float = setting(
        0.5, "branch-first", "Share of a group that starts at the prompt, with --branches.", above=0, below=1
    )
    tokens: int = setting(
        20, "branch-tokens", "Tokens at the start of a reply from which --branches estimates entropy.", above=0
    )
    alpha: float = setting(0.5, least=0, most=1)
    beta: float = setting(0.2, above=0)
    threshold: float = setting(
        0.5, "branch-threshold", "Branch where alpha + beta x the rise in entropy is above this."
    )
    credit: Literal["soft", "hard"] = setting(
        "soft",
        "branch-credit",
        "Advantage of tokens that branches share: the advantage of each rollout (soft), or the mean over them (hard).",
    )
    needs = frozenset({Need.GROUP})
    source = f"{PAPER}, section 3.1"

    @property
    def formula(self) -> str:
        what = "one further" if self.branches == 1 else f"{self.branches} further"
        rise = f"{self.alpha:g} + {self.beta:g} (H_t - H_0) / log V > {self.threshold:g}"
        return (
            f"{self.first:g} of a group begin with the prompt; behind a tool's answer {what} where {rise}; "
            f"H: entropy of {self.tokens} tokens, behind the answer (t) and first of the episode (0); V: vocabulary"
        )

    @property
    def sharing(self) -> str:
        """Credit of shared tokens, in plain mathematics."""
        return "mean of A over the rollouts that share them" if self.credit == "hard" else "A of each rollout in turn"

    def plan(self, vocab: int) -> BranchPlan:
        """Return the plan for running the episodes. `vocab`: V, the size of the policy's vocabulary."""
        settings = self.first, self.tokens, self.alpha, self.beta, self.threshold, self.branches
        return BranchPlan(*settings, largest=math.log(vocab))

    def shared(self, advantage: Sequence[Tensor], scores: Scores) -> list[Tensor]:
        """Return the advantages, [n_i] for each rollout, with credit assigned to tokens that several rollouts share."""
        if self.credit == "soft":
            return list(advantage)
        sharing: dict[tuple[int, int, int], list[tuple[int, slice]]] = defaultdict(list)
        for i, (group, pieces) in enumerate(zip(scores.group.tolist(), scores.pieces, strict=True)):
            start = 0
            for piece in pieces:
                sharing[group, piece.member, piece.reply].append((i, slice(start, start + piece.length)))
                start += piece.length
            assert start in (0, len(advantage[i])), "pieces are all scored tokens"
        out = [own.clone() for own in advantage]
        for places in sharing.values():
            if len(places) > 1:
                mean = torch.stack([advantage[i][where].double() for i, where in places]).mean(0)
                for i, where in places:
                    out[i][where] = mean.to(out[i].dtype)
        return out
