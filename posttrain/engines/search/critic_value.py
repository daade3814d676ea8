"""The value of a partial reply by the critic of the policy's run: the return that it expects from there on.

It is V of the state after the tokens so far, as PPO learns it, and guides a search in place of a process reward model
(value-guided decoding, arXiv 2309.15028). The state after a whole reply is none in which a token was ever chosen, so a
whole reply has the value of the state in which its last token was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from posttrain.core.batch import Layout
from posttrain.core.protocols import Model
from posttrain.models.critic import ValueModel


class CriticValue:
    """Computes V of states, each by itself, so that no value depends on another."""

    def __init__(self, critic: ValueModel, policy: Model) -> None:
        self.critic, self.backbone = critic, critic.backbone or policy

    @torch.no_grad()
    def __call__(self, tokens: Sequence[int], whole: bool) -> float:
        """Return the value of a prompt with a partial reply. `whole`: the reply ends with its last token."""
        read = tokens[: len(tokens) - whole]
        device = self.critic.weight.device
        layout = Layout(
            torch.tensor(read, device=device), torch.arange(len(read), device=device), (0,), (len(read),), (-1,)
        )
        return self.critic.of(self.backbone.hidden(layout, torch.tensor([len(read) - 1], device=device))).item()
