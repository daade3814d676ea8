"""Penalties and bonuses: KL penalties, the entropy bonus, and controls of their coefficients.

N    scored tokens of a micro-batch    lp   current log-probability    ref, old   the reference's, the old policy's
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from posttrain.core.batch import Stats
from posttrain.core.component import Component, Need, setting

if TYPE_CHECKING:
    from torch import Tensor


class Control(Component):
    """Control of a coefficient from step to step: a function of the last coefficient, which is training state."""

    def __call__(self, coefficient: float, measured: float, rollouts: int) -> float:
        """Return the next coefficient. `measured`: KL in nats per token over the step's `rollouts` rollouts."""
        raise NotImplementedError


@dataclass(frozen=True)
class Adaptive(Control):
    """Holds a target KL by small proportional changes of the coefficient.

    beta *= 1 + clip(kl / target - 1, -0.2, 0.2) rollouts / horizon (Ziegler et al. 2019, arXiv 1909.08593).
    """

    target: float = setting(0.05, "kl-target", "Target KL of the controller, in nats per token.", above=0)
    horizon: float = setting(
        10_000.0,
        "kl-horizon",
        "Horizon of the adaptive KL controller, in rollouts: the coefficient changes by a fifth at most.",
        above=0,
    )
    source = "Ziegler et al. 2019, arXiv 1909.08593, section 2.2"

    @property
    def formula(self) -> str:
        return f"beta *= 1 + clip(kl / {self.target:g} - 1, -0.2, 0.2) rollouts / {self.horizon:g}"

    def __call__(self, coefficient: float, measured: float, rollouts: int) -> float:
        error = min(max(measured / self.target - 1, -0.2), 0.2)
        return coefficient * (1 + error * rollouts / self.horizon)


@dataclass(frozen=True)
class HalvingDoubling(Control):
    """Finds the size of the coefficient fast: a few steps correct a start that is wrong by orders of magnitude.

    beta / 2 if kl < target / 1.5, beta x 2 if kl > 1.5 target (PPO, arXiv 1707.06347, section 4).
    """

    target: float = setting(0.01, "kl-target", "Target KL of the controller, in nats per token.", above=0)
    source = "PPO, arXiv 1707.06347, section 4"

    @property
    def formula(self) -> str:
        return f"beta / 2 if kl < {self.target:g} / 1.5, beta x 2 if kl > 1.5 x {self.target:g}"

    def __call__(self, coefficient: float, measured: float, rollouts: int) -> float:
        if measured < self.target / 1.5:
            return coefficient / 2
        return coefficient * 2 if measured > self.target * 1.5 else coefficient


@dataclass(frozen=True)
class EarlyStop(Component):
    """Ends a step's updates early, once they have moved the policy by the target KL.

    After an update whose tokens have a mean of r - 1 - log r above `kl`, r = exp(lp - old), no further update of the step
    is made. The mean is over the tokens that the update computes: rollouts that cannot move the policy (advantage 0 without
    a KL or an entropy bonus) are not among them. It estimates KL(old || policy) in nats per token, as it was before the
    update (the early stopping of PPO's implementations: Spinning Up 2018, which stops at 1.5 x its target; Huang et al.
    2022, "The 37 implementation details of PPO", which stop after an epoch). Groups of skipped updates are not used. The
    learning rate's schedule counts the updates that are made.
    """

    kl: float = setting(
        0.02,
        "target-kl",
        "End a step's updates after one whose KL to the policy before them is above this, in nats per token (0: never).",
        above=0,
        absent=0,
    )
    source = "Spinning Up 2018; Huang et al. 2022, The 37 implementation details of PPO"

    @property
    def formula(self) -> str:
        return f"no further update of a step after one with a mean of r - 1 - log r above {self.kl:g}"

    def __call__(self, stats: Stats) -> bool:
        """Return whether the step ends after the update with these metrics."""
        total, count = stats.get("kl/step", (0.0, 0.0))
        return bool(count) and total / count > self.kl


CONTROLS: dict[str, Control | None] = {"fixed": None, "adaptive": Adaptive(), "halving-doubling": HalvingDoubling()}
"""Choices of --kl-control."""


@dataclass(frozen=True)
class KL(Component):
    """Keeps the policy near another one, so that its language does not degrade as the reward rises.

    Estimated per token, with x = ref - lp (Schulman 2020, "Approximating KL divergence"):

    k1 = -x: unbiased, high variance. k2 = x^2 / 2: biased, low variance; in the loss its gradient is that of the reverse KL
    per token, on policy. k3 = exp(x) - 1 - x: unbiased, low variance; but in the loss its *gradient* is not that of the
    reverse KL. `exact` sums over the vocabulary at every sampled token; `forward` = exp(x) x - (exp(x) - 1) estimates the
    other direction, KL(ref || policy).

    `loss`: beta k is subtracted from the objective, token by token. The tokens before each token are held fixed: `k2` and
    `exact` have the gradient of the KL at each token, and no estimator has that of the KL of a reply, which includes a
    token's effect on later tokens. `reward`: beta times the sum of k over the response is subtracted from the rollout's
    reward, before advantages. There `k1` has the gradient of the KL of a reply; the others, whose own gradient is then
    missing, do not have the gradient of any KL (docs/algorithms/expected-gradients.md).

    All this holds for tokens that the policy itself sampled. In a step's later updates, and in rollouts of older weights
    (`ahead`, `tokens_per_step`, `replay`), other weights sampled them, and the loss does not correct for that: ratio and
    correction apply only to the surrogate. `exact` is then still the true KL at each token, but at contexts of the older
    weights. The KL that a `control` reads weighs each token by the algorithm's correction (truncate, where it has none).

    unit      `token`: k of each token. `response`: k of the whole response's ratio, x = sum_t (ref_t - lp_t), at each of its
              tokens, so that a mean over them counts it once (DeepSeek-R1, arXiv 2501.12948, eq. 2). With k3 its
              variance grows with length.
    weighed   the estimate times the ratio exp(lp - old), with its gradient: tokens that other weights sampled then
              estimate the KL of the policy, and on policy k1 and k3 in the loss have the gradient of the KL per token
              (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
    against   `reference`: the frozen starting model. `old`: the policy before the step's updates, from which the tokens
              were sampled, so that the estimators estimate KL(old || policy) (PPO's penalty, arXiv 1707.06347, eq. 8).
              For rollouts of older weights, this is true only with --old-policy sampler.
    control   control of beta from step to step; None: it is fixed.
    """

    estimator: Literal["k1", "k2", "k3", "exact", "forward"] = setting(
        "k3",
        "kl-estimator",
        "Estimator of the KL; exact sums over the whole vocabulary. In the loss k2 and exact have the gradient of the KL "
        "per token, in the reward k1 that of a reply.",
    )
    beta: float = setting(
        0.04,
        "kl",
        "Coefficient of the KL penalty to the reference, the starting model (0: no penalty and no reference).",
        least=0,
        absent=0,
        first_hour=True,
    )
    where: Literal["loss", "reward"] = setting(
        "loss", "kl-where", "Place of the KL: in the loss, or subtracted from the reward."
    )
    unit: Literal["token", "response"] = setting(
        "token", "kl-unit", "Unit of the KL in the loss: each token, or the ratio of the whole response."
    )
    weighed: bool = setting(
        False,
        "kl-weighed",
        "Multiply the KL estimate by the ratio to the old policy, which gives it the gradient of the KL per token.",
    )
    against: Literal["reference", "old"] = "reference"
    control: Control | None = setting(
        None, "kl-control", "Control of the KL coefficient from step to step.", choices=CONTROLS
    )

    @property
    def formula(self) -> str:
        lp, ref = ("lp", "ref") if self.against == "reference" else ("old", "lp")
        if self.unit == "response":
            lp, ref = f"sum_t {lp}_t", f"sum_t {ref}_t"
        weight = "exp(lp - old) " if self.weighed else ""
        return (
            weight
            + {
                "k1": f"({lp} - {ref})",
                "k2": f"({ref} - {lp})^2 / 2",
                "k3": f"(exp({ref} - {lp}) - 1 - ({ref} - {lp}))",
                "exact": "sum_a pi(a) (log pi(a) - log ref(a))",
                "forward": f"(q log q - (q - 1)), q = exp({ref} - {lp})",
            }[self.estimator]
        )

    @property
    def source(self) -> str:
        against = "; against the old policy: PPO, arXiv 1707.06347, eq. 8" if self.against == "old" else ""
        weighed = "; times the ratio: DeepSeek-V3.2, arXiv 2512.02556, section 3.1" if self.weighed else ""
        control = f"; control: {self.control.source}" if self.control else ""
        whole = "; of a response: DeepSeek-R1, arXiv 2501.12948, eq. 2" if self.unit == "response" else ""
        return f"Schulman 2020, Approximating KL divergence{whole}{weighed}{against}{control}"

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"kl"}) if self.estimator == "exact" and self.where == "loss" else frozenset()

    @property
    def needs(self) -> frozenset[Need]:
        found = {Need.REFERENCE} if self.against == "reference" else set()
        if self.where == "reward":
            found.add(Need.KL if self.estimator == "exact" else Need.OLD)
        if self.control is not None:
            found.add(Need.OLD)  # the measured KL is that of the step's rollouts
        return frozenset(found)

    def __call__(self, logp: Tensor, ref_logp: Tensor) -> Tensor:
        """Estimate the KL per token, [N] in nats, from log-probabilities [N] of the sampling policy and the reference.

        Not for `exact`, and without the weight of `weighed`.
        """
        x = ref_logp - logp
        if self.estimator == "k1":
            return -x
        if self.estimator == "k2":
            return x.square() / 2
        if self.estimator == "forward":
            return x.exp() * x - (x.exp() - 1)
        assert self.estimator == "k3", "the exact KL needs whole distributions: the learner computes it"
        return x.exp() - 1 - x


@dataclass(frozen=True)
class Entropy(Component):
    """Keeps the policy exploring: coefficient x H is added to the objective.

    `loss`: H of each token is added to its objective, which keeps the token's own distribution wide. `reward`: -lp of
    every sampled token is added to its reward, before advantages, so that a token is also credited with the entropy of
    later tokens (the soft return of maximum-entropy reinforcement learning, Haarnoja et al. 2018, arXiv 1812.05905, eq.
    1).

    In the loss, H is the entropy of the whole distribution at each sampled token. With a `target`, in nats per token, the
    coefficient is tuned: after each step it grows by rate (target - H), and is never below 0 (Haarnoja et al. 2018, arXiv
    1812.05905, eq. 18; for language models Skywork-OR1, arXiv 2505.22312). That H is estimated from the step's samples;
    where older weights sampled them (`ahead`, `tokens_per_step`), it is the policy's entropy at their tokens.
    """

    coefficient: float = setting(
        0.0,
        "entropy",
        "Coefficient of the entropy bonus (0: none). With --entropy-target, its initial value.",
        least=0,
        absent=0,
    )
    target: float | None = setting(
        None,
        "entropy-target",
        "Target entropy in nats per token; the coefficient is tuned to hold it.",
        above=0,
        creates=True,
    )
    rate: float = setting(0.01, above=0)  # change of the coefficient per step and nat
    where: Literal["loss", "reward"] = setting(
        "loss", "entropy-where", "Place of the entropy: in the loss, or as -log pi of each token in the reward."
    )

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"entropy"} if self.where == "loss" else ())

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.OLD} if self.where == "reward" else ())

    @property
    def formula(self) -> str:
        tuned = "" if self.target is None else f", +{self.rate:g} ({self.target:g} - H) each step, at least 0"
        return f"{self.coefficient:g}{tuned}"

    @property
    def source(self) -> str:
        if self.where == "reward":
            return "soft actor-critic, arXiv 1812.05905, eq. 1"
        if self.target is None:
            return "A3C, arXiv 1602.01783, section 4; PPO, arXiv 1707.06347, eq. 9"
        return "soft actor-critic, arXiv 1812.05905, eq. 18; Skywork-OR1, arXiv 2505.22312"

    def next(self, coefficient: float, measured: float) -> float:
        """Return the coefficient after a step in which the policy's entropy was `measured`, in nats per token."""
        if self.target is None:
            return coefficient
        return max(0.0, coefficient + self.rate * (self.target - measured))
