"""The bound of a natural gradient step: a component of algorithms, which learners carry out."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.core.component import Component, setting


@dataclass(frozen=True)
class TrustRegion(Component):
    """Bounds how far one update moves the policy's distribution, whatever its parameters do, instead of using an optimizer.

    A natural gradient step within KL(old || new) <= delta (TRPO, arXiv 1502.05477, appendix C). The direction
    solves F x = g by conjugate gradient on Fisher-vector products; the step is then halved until the surrogate has grown and
    the KL, exact over the vocabulary, is within bounds.
    """

    delta: float = setting(
        0.01,
        "trust-region",
        "Natural gradient steps within this KL, in nats per token, instead of an optimizer's (0: --optimizer).",
        above=0,
        absent=0,
    )
    iterations: int = setting(10, above=0)  # of conjugate gradient
    damping: float = setting(0.01, least=0)
    halvings: int = setting(10, least=0)
    source = "TRPO, arXiv 1502.05477, appendix C"

    @property
    def formula(self) -> str:
        return f"natural gradient within mean KL(old || new) <= {self.delta:g}, then a backtracking line search"
