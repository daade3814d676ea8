"""Weights of tokens in a likelihood term, as functions of the tokens' probability under the policy.

N    scored tokens of a micro-batch    p    exp(lp), the policy's probability of a token
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

TokenWeight = Literal["equal", "probability", "uncertainty"]
"""equal         1, the likelihood itself.
probability   p: the loss is then minus the probability, up to a constant, and unlikely tokens no longer dominate it (Dynamic
              Fine-Tuning, arXiv 2508.05629).
uncertainty   p (1 - p): tokens that are certain, and tokens that are unlikely under the policy, count little (CHORD-phi,
              arXiv 2508.11408)."""
FORMULAS: dict[TokenWeight, str] = {"equal": "", "probability": "sg(p) ", "uncertainty": "sg(p (1 - p)) "}
SOURCES: dict[TokenWeight, str] = {
    "equal": "",
    "probability": "DFT, arXiv 2508.05629",
    "uncertainty": "CHORD-phi, arXiv 2508.11408",
}


def weighed_likelihood(logp: Tensor, weight: TokenWeight) -> Tensor:
    """Return log-probability times the token's weight, [N]; the weight has no gradient."""
    if weight == "equal":
        return logp
    p = logp.detach().exp()
    return logp * (p if weight == "probability" else p * (1 - p))
