"""Losses of preference pairs, a chosen and a rejected response to the same prompt. No row uses them yet.

P    pairs
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.deferred import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BradleyTerry:
    """Turns comparisons into scores: what a reward model is trained with.

    -log sigma(r_w - r_l - margin) (Ouyang et al. 2022, arXiv 2203.02155, eq. 1). The margin is how much better the chosen
    response has to be (Touvron et al. 2023, arXiv 2307.09288, eq. 2).
    """

    margin: float = 0.0
    source = "InstructGPT, arXiv 2203.02155, eq. 1; margin: Llama 2, arXiv 2307.09288, eq. 2"

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Scores [P] of the chosen and of the rejected responses -> losses [P], in nats."""
        return -torch.nn.functional.logsigmoid(chosen - rejected - self.margin)


@dataclass(frozen=True)
class DirectPreference:
    """Learns from comparisons without a reward model and without sampling.

    -log sigma(beta (x_w - x_l)), x the sequence's log ratio to the reference (DPO, arXiv 2305.18290, eq. 7).
    `smoothing`: the share of pairs assumed to be labelled wrongly (conservative DPO, Mitchell 2023).
    """

    beta: float = 0.1
    smoothing: float = 0.0
    source = "DPO, arXiv 2305.18290, eq. 7; smoothing: Mitchell 2023, cDPO"

    def __call__(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Sums over the response's tokens of lp - ref, [P] each -> losses [P], in nats."""
        margin = self.beta * (chosen - rejected)
        return -(1 - self.smoothing) * torch.nn.functional.logsigmoid(
            margin
        ) - self.smoothing * torch.nn.functional.logsigmoid(-margin)
