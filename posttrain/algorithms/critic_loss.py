"""Losses of critics: values of states (PPO and its kin), or soft values of actions (soft actor-critic).

N    scored tokens of a micro-batch    n_i    sampled tokens of rollout i
V_t    value of the state in which token t is chosen    R_t    return from there, A_t + V_t of the rollout's time
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.algorithms.credit import Advantage
from posttrain.core.batch import Batch, Outputs, Scores, Stats
from posttrain.core.component import Component, Need, setting
from posttrain.core.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


class CriticLoss(Component):
    """Loss of a critic per token, before its coefficient."""

    coefficient: float
    warmup: int  # steps at the start in which the critic learns and the policy does not

    @property
    def follow(self) -> float:
        """Share of the difference by which target copies follow the critic after each update; 0: there are none."""
        return 0.0

    def targets(self, advantage: Advantage, scores: Scores) -> list[Tensor] | None:
        """Return the returns to learn, [n_i] for each rollout; None: targets are computed in the loss."""
        return None

    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        """Return the loss per token, [N]."""
        raise NotImplementedError


@dataclass(frozen=True)
class Value(CriticLoss):
    """Predicts the return of each state, so that credit can be assigned token by token and without a group.

    1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), the clipped value loss of PPO's reference code (Huang et al.
    2022, "The 37 implementation details of PPO", detail 9). The returns R are A + V_old of rollout time, with `lam` for
    lambda; None: the advantage's own.
    """

    clip: float | None = setting(
        0.2, "value-clip", "Clip range of the value function (0: no clipping).", above=0, off=0
    )
    coefficient: float = setting(0.1, "value-coefficient", "Coefficient of the value loss.", least=0)
    lam: float | None = setting(None, least=0, most=1)
    warmup: int = setting(0, "critic-warmup", "Number of first steps in which only the critic learns.", least=0)
    needs = frozenset({Need.VALUE})
    wants = frozenset({"value"})

    @property
    def formula(self) -> str:
        lam = "" if self.lam is None else f", R with lambda {self.lam:g}"
        warmup = f"; alone for the first {self.warmup} steps" if self.warmup else ""
        if self.clip is None:
            return f"{self.coefficient:g} x (V - R)^2 / 2{lam}{warmup}"
        moved = f"clip(V, V_old - {self.clip:g}, V_old + {self.clip:g})"
        return f"{self.coefficient:g} x max((V - R)^2, ({moved} - R)^2) / 2{lam}{warmup}"

    @property
    def source(self) -> str:
        own = "; lambda and warm-up of its own: VAPO, arXiv 2504.05118, section 4.1" if self.lam is not None else ""
        return f"PPO, arXiv 1707.06347, eq. 9; clip: Huang et al. 2022, detail 9{own}"

    def targets(self, advantage: Advantage, scores: Scores) -> list[Tensor]:
        return advantage.returns(scores, self.lam)

    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        assert outputs.value is not None and batch.returns is not None
        error = (outputs.value - batch.returns).square()
        if self.clip is not None:
            assert batch.value is not None
            # clamp keeps a value within the range exactly; old value + difference would be rounded: counted as clipped
            moved = outputs.value.clamp(batch.value - self.clip, batch.value + self.clip)
            bounded = (moved - batch.returns).square()
            stats.add("value/clipped", (bounded > error).sum().item(), error.numel())
            error = torch.maximum(error, bounded)
        loss = error / 2
        stats.add("value/loss", loss.detach().sum().item(), loss.numel())
        return loss


@dataclass(frozen=True)
class SoftQ(CriticLoss):
    """Values every token of the vocabulary in each state, which allows learning from old rollouts.

    1/2 sum_k (Q_k(s_t, a_t) - y_t)^2 with twin Q heads over the vocabulary (arXiv 1910.07207, eq. 3 and 10).

    y_t = r_t + gamma (sum_a pi(a) (min_k Q'_k(s_(t+1), a) - alpha log pi(a))), exact over the vocabulary and 0 after the
    last token; Q' are copies that move by `tau` towards Q after every update, alpha is the entropy coefficient.

    state_value   a network of state values V learns that soft value of Q beside it, 1/2 (V - sum_a pi(a) (min_k Q_k(a) -
                  alpha log pi(a)))^2, and its slow copy V' alone gives targets, y_t = r_t + gamma V'(s_(t+1)) (the first
                  form, arXiv 1801.01290, eq. 3, 5 and 8; its expectation is exact here too).
    """

    gamma: float = setting(1.0, "gamma", "Discount factor per sampled token.", least=0, most=1)
    tau: float = setting(
        0.05, "critic-tau", "Target networks of action values: rate at which they follow each update.", least=0, most=1
    )
    coefficient: float = setting(1.0, "value-coefficient", "Coefficient of the value loss.", least=0)
    warmup: int = setting(20, "critic-warmup", "Number of first steps in which only the critic learns.", least=0)
    state_value: bool = setting(
        False,
        "value-network",
        "Learn a network of state values too, whose target copy gives the targets of the action values.",
    )

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.ACTION_VALUE, *([Need.SOFT_STATE_VALUE] if self.state_value else [])})

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"q", "entropy", *(("value", "target_value") if self.state_value else ("target_q",))})

    @property
    def source(self) -> str:
        first = "soft actor-critic, arXiv 1801.01290, eq. 3, 5 and 8; over a vocabulary: " if self.state_value else ""
        return f"{first}discrete soft actor-critic, arXiv 1910.07207, eq. 3 and 10"

    @property
    def formula(self) -> str:
        gamma = "" if self.gamma == 1 else f"{self.gamma:g} "
        error = f"{self.coefficient:g} x sum_k (Q_k - y)^2 / 2"
        if self.state_value:
            state = "(V - sum_a pi(a) (min_k Q_k(s, a) - alpha log pi(a)))^2 / 2"
            return f"{error} + {self.coefficient:g} x {state}, y = r_t + {gamma}V'(s'); V' follows V by {self.tau:g}"
        soft = "sum_a pi(a) (min_k Q'_k(s', a) - alpha log pi(a))"
        return f"{error}, y = r_t + {gamma}{soft}; Q' follows Q by {self.tau:g}"

    @property
    def follow(self) -> float:
        return self.tau

    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        assert outputs.q is not None and batch.advantage is not None, "what each token earns"
        value = outputs.target_value if self.state_value else self._soft(outputs.target_q, outputs, batch)
        assert value is not None
        last = torch.ones_like(batch.rollout, dtype=torch.bool)
        last[:-1] = batch.rollout[1:] != batch.rollout[:-1]
        after = torch.cat([value[1:], value[:1]]).masked_fill(last, 0.0)  # the tokens of a rollout are contiguous
        target = batch.advantage + self.gamma * after
        loss = (outputs.q - target).square().sum(0) / 2
        stats.add("q/loss", loss.detach().sum().item(), loss.numel())
        stats.add("q", outputs.q.detach().mean(0).sum().item(), loss.numel())
        if not self.state_value:
            return loss
        assert outputs.value is not None
        of_state = (outputs.value - self._soft(outputs.expected_q, outputs, batch)).square() / 2
        stats.add("value/loss", of_state.detach().sum().item(), of_state.numel())
        stats.add("value", outputs.value.detach().sum().item(), of_state.numel())
        return loss + of_state

    @staticmethod
    def _soft(expected: Tensor | None, outputs: Outputs, batch: Batch) -> Tensor:
        """Return expected action values plus the entropy bonus, [N], without a gradient."""
        assert expected is not None and outputs.entropy is not None
        return (expected + batch.coefficients["entropy"] * outputs.entropy).detach()
