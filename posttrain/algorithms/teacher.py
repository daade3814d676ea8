"""On-policy distillation: the student samples, and a teacher scores each of its tokens.

N    scored tokens of a micro-batch    V    vocabulary    p    the policy    q    the teacher
lp   log-probability of a sampled token under the policy    tea    the same under the teacher
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from posttrain.algorithms.moving_models import moved
from posttrain.core.batch import Outputs
from posttrain.core.component import Component, Need, setting

if TYPE_CHECKING:
    from torch import Tensor

FIELDS = {"reverse-kl": "reverse_kl", "forward-kl": "forward_kl", "jensen-shannon": "jensen_shannon"}
"""Divergence -> its field of `Outputs`. The sampled one needs only log-probabilities."""


@dataclass(frozen=True)
class Distillation(Component):
    """Moves the policy towards a teacher, with a signal for every token where a reward has one for a reply.

    reverse-kl      KL(p || q), summed over the vocabulary at every sampled token: seeks what the teacher finds likely.
    forward-kl      KL(q || p): covers all that the teacher finds likely.
    jensen-shannon  (1 - beta) KL(p || m) + beta KL(q || m), m = (1 - beta) p + beta q (GKD, arXiv 2306.13649, eq. 1).
    sampled         tea - lp is the reward of each token, without a gradient and without a discount to come: it adds to the
                    token's advantage and to that of no other. It needs log-probabilities of the sampled tokens alone, so
                    the teacher may be an endpoint.

    An endpoint can name its `top_k` likeliest tokens too. The divergences are then over k + 2 cells: these tokens, the
    sampled one, and all others together. That is at most the divergence over the vocabulary, equal to it with all tokens.

    As in GKD, exact divergences are differentiated at the sampled contexts, not through their sampling. In the sampled form
    the surrogate does that for one token: its expectation is the gradient of the reverse KL at that token.
    """

    divergence: Literal["reverse-kl", "forward-kl", "jensen-shannon", "sampled"] = setting(
        "reverse-kl",
        "divergence",
        "Divergence of the student from its teacher. sampled uses only the sampled tokens.",
    )
    coefficient: float = setting(
        1.0, "distillation", "Weight of the teacher, in the loss or in each token's reward.", above=0
    )
    # TRL's and GKD's beta
    beta: float = setting(
        0.5, "jsd-beta", "Jensen-Shannon divergence: share of the teacher in the mixture.", above=0, below=1
    )
    temperature: float | None = setting(
        None,
        "teacher-temperature",
        "Temperature of the teacher's logits. Default: the sampling temperature of each token.",
        above=0,
    )
    every: int = setting(
        0,
        "teacher-every",
        "Steps between updates of the teacher to the policy, whose weights it starts from (0: never).",
        least=0,
    )
    rate: float = setting(
        1.0,
        "teacher-update-rate",
        "Share of the way to the policy's weights that an update of the teacher goes (1: it becomes the policy).",
        above=0,
        most=1,
    )

    top_k: int = setting(
        0,
        "teacher-top-k",
        "Likeliest tokens of which an endpoint gives log-probabilities, for the other divergences (0: none). A folder "
        "gives whole distributions.",
        least=0,
    )

    @property
    def sampled(self) -> bool:
        return self.divergence == "sampled"

    @property
    def whole(self) -> bool:
        """Whether the loss reads the teacher's whole distributions."""
        return not self.sampled and not self.top_k

    @property
    def formula(self) -> str:
        softened = "" if self.temperature is None else f", q at temperature {self.temperature:g}"
        top = f"; a over the teacher's {self.top_k} likeliest tokens, the sampled one, and all others together"
        return (
            {
                "reverse-kl": "sum_a p log(p / q)",
                "forward-kl": "sum_a q log(q / p)",
                "jensen-shannon": f"{1 - self.beta:g} sum_a p log(p / m) + {self.beta:g} sum_a q log(q / m), "
                f"m = {1 - self.beta:g} p + {self.beta:g} q",
                "sampled": f"{self.coefficient:g} (tea - old), without a gradient",
            }[self.divergence]
            + softened
            + (top if self.top_k else "")
            + (f"; {moved('teacher', self.every, self.rate)}" if self.every else "")
        )

    @property
    def source(self) -> str:
        return {
            "reverse-kl": "MiniLLM, arXiv 2306.08543, section 2, by token; GKD, arXiv 2306.13649",
            "forward-kl": "GKD, arXiv 2306.13649; Hinton et al. 2015, arXiv 1503.02531",
            "jensen-shannon": "GKD, arXiv 2306.13649, eq. 1",
            "sampled": "Thinking Machines 2025, On-Policy Distillation; Schulman 2020, k1",
        }[self.divergence]

    @property
    def wants(self) -> frozenset[str]:
        return frozenset() if self.sampled else frozenset({FIELDS[self.divergence]})

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.TEACHER} if self.sampled else {Need.TEACHER_TOP} if self.top_k else ())

    def distance(self, outputs: Outputs) -> Tensor:
        """Return the divergence per token, [N] in nats, differentiable in the policy. Not for `sampled`."""
        found: Tensor = getattr(outputs, FIELDS[self.divergence])
        return found

    def worth(self, teacher_logp: Tensor, logp: Tensor) -> Tensor:
        """Return the addition of `sampled` to each token's advantage, [N].

        `logp`: log-probabilities under the sampling policy, without a gradient.
        """
        return self.coefficient * (teacher_logp - logp)
