"""Advantages: how much better than expected a rollout, or one of its tokens, was. Functions of the scoreboard only.

A component is a callable frozen dataclass. Its fields are its settings, `formula` is its equation in plain mathematics,
and `source` is the origin of the equation. It returns [S], one advantage for each rollout, or a list of [n_i], one for
each sampled token of each rollout.

    S = B    rollouts of the optimizer batch    n_i    sampled tokens of rollout i
    R    reward of a rollout    r_t    reward earned at token t (sum: R)    V_t    the critic's value before token t
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from posttrain.algorithms.earned_rewards import (
    add_final,
    discounted_sums,
    earnings,
    equal_in_group,
    equal_rewards,
    standardised,
    total_reward,
    whitened,
)
from posttrain.core.batch import Scores
from posttrain.core.component import Component, Need, setting
from posttrain.core.lazy_torch import torch
from posttrain.core.types import UserError

if TYPE_CHECKING:
    from torch import Tensor


CUT = "; r_t = V_t at the last token of a rollout that was cut off"


class Advantage(Component):
    """Map from `Scores` to advantages: [S], or one [n_i] for each rollout."""

    by_token = False  # whether it matters at which token of a rollout a reward is earned

    def __call__(self, scores: Scores) -> Tensor | list[Tensor]:
        raise NotImplementedError

    def returns(self, scores: Scores, lam: float | None) -> list[Tensor]:
        """Return the returns that a critic of states learns, [n_i] for each rollout. `lam`: lambda of the returns;
        None: the advantage's.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Baselined(Advantage):
    """Compares a rollout with others, so that no critic is needed: R minus a baseline, over a scale.

    Nine papers differ only in these choices.

    baseline  the mean of the rewards of the `group`, of the `others` of the group, or of the `batch`; `greedy`: the
              reward of one greedy reply to the prompt, an additional sample (ReMax, arXiv 2310.10505); `none`.
    weight    weight of each reward in that mean. `equal`: 1. `gradient`: g^2, the squared norm of the gradient of the
              rollout's log-probability, which gives the least variance (Weaver and Tao 2001; Peters and Schaal 2008).
              `length`: n_i, its cheap stand-in (OPO, arXiv 2505.23585, eq. 9).
    scale     `group`, `batch`: sample standard deviation (n - 1) + eps; `none` (Dr. GRPO, arXiv 2503.20783, section 3.2);
              `mean`: the group's mean reward + eps, for rewards of at least 0: the gradient of the log-likelihood of
              success, up to the order of the group's size minus 1 (MaxRL, arXiv 2602.02710).
    signal    all advantages times B / (rollouts in groups with any signal), so that groups without one do not dilute the
              gradient (GPG, arXiv 2504.02546, eq. 7).

    A group whose rewards are all equal has advantage exactly 0 under a group baseline or scale, whatever the rounding.
    """

    baseline: Literal["none", "batch", "group", "others", "greedy"] = setting(
        "group", "baseline", "Baseline: the mean reward to subtract, or the reward of one additional greedy reply."
    )
    scale: Literal["none", "batch", "group", "mean"] = setting(
        "none",
        "scale",
        "Divide advantages by the standard deviation of the group or of the batch, by the group's mean reward, or not at "
        "all.",
    )
    weight: Literal["equal", "length", "gradient"] = setting(
        "equal",
        "baseline-weight",
        "Weight of each reward in the baseline. gradient is the optimal baseline, with one backward pass per rollout.",
    )
    eps: float = setting(1e-6, above=0)
    signal: bool = False

    @property
    def compares(self) -> bool:
        """Whether rollouts of a group are compared with each other."""
        return self.baseline in ("group", "others") or self.scale in ("group", "mean")

    @property
    def needs(self) -> frozenset[Need]:
        found = {Need.GROUP} if self.compares else set()
        found |= {Need.GREEDY} if self.baseline == "greedy" else set()
        return frozenset(found | ({Need.GRADIENT_NORM} if self.weight == "gradient" else set()))

    @property
    def formula(self) -> str:
        weight = {"equal": "", "length": "n-weighted ", "gradient": "g^2-weighted "}[self.weight]
        of = {
            "none": "",
            "batch": f" - {weight}mean(batch)",
            "group": f" - {weight}mean(group)",
            "others": f" - {weight}mean(others of the group)",
            "greedy": " - R(greedy reply to the prompt)",
        }
        of_scale = "mean(group)" if self.scale == "mean" else f"std({self.scale})"
        scale = "" if self.scale == "none" else f" / ({of_scale} + {self.eps:g})"
        numerator = f"R_i{of[self.baseline]}"
        formula = f"({numerator}){scale}" if scale else numerator
        return f"({formula}) B / (rollouts in groups with unequal rewards)" if self.signal else formula

    @property
    def source(self) -> str:
        papers = {
            "none": "Williams 1992, REINFORCE",
            "batch": "Williams 1992, REINFORCE with a baseline",
            "group": "DeepSeekMath, arXiv 2402.03300, section 4.1.2",
            "others": "RLOO, arXiv 2402.14740, eq. 7",
            "greedy": "ReMax, arXiv 2310.10505, algorithm 1",
        }
        weights = {
            "equal": "",
            "length": "weights: OPO, arXiv 2505.23585, eq. 9",
            "gradient": "weights: Peters and Schaal 2008, optimal baseline",
        }
        scales = {
            "none": "no scale: Dr. GRPO, arXiv 2503.20783, section 3.2" if self.baseline == "group" else "",
            "group": "",
            "batch": "scale: Lite PPO, arXiv 2508.08221, section 4",
            "mean": "scale: MaxRL, arXiv 2602.02710",
        }
        signal = "signal: GPG, arXiv 2504.02546, eq. 7" if self.signal else ""
        return "; ".join(filter(None, [papers[self.baseline], weights[self.weight], scales[self.scale], signal]))

    def __call__(self, scores: Scores) -> Tensor:
        reward = total_reward(scores)
        _, group, size = scores.group.unique(return_inverse=True, return_counts=True)
        count = size[group].double()  # [S], number of rollouts in the rollout's group
        assert not self.compares or bool((size > 1).all()), "a group of one has no baseline"

        def over_group(x: Tensor) -> Tensor:  # [S], the sum of x over the rollout's group
            return torch.zeros(len(size), dtype=x.dtype).index_add_(0, group, x)[group]

        advantage = reward - self._baseline(scores, reward, over_group)
        if self.scale == "group":
            variance = over_group((reward - over_group(reward) / count).square()) / (count - 1)
            advantage = advantage / (variance.sqrt() + self.eps)
        elif self.scale == "mean":
            if bool((reward < 0).any()):
                raise UserError(
                    f"--scale mean needs rewards of at least 0, as it divides by a group's mean reward, and one is "
                    f"{reward.min().item():g}: leave it out, or change the reward"
                )
            advantage = advantage / (over_group(reward) / count + self.eps)
        elif self.scale == "batch":
            advantage = advantage / ((reward.std() if len(reward) > 1 else reward.new_zeros(())) + self.eps)
        equal = equal_rewards(scores)
        if self.compares:
            advantage = advantage.masked_fill(equal_in_group(reward, scores.group), 0.0)
        if self.signal and not bool(equal.all()):
            advantage = advantage * (len(reward) / (~equal).sum())
        return advantage.to(scores.reward.dtype)

    def _baseline(self, scores: Scores, reward: Tensor, over_group: Callable[[Tensor], Tensor]) -> Tensor:
        """Return sum of w R / sum of w over the rollouts of each rollout's baseline, float64 [S]."""
        if self.baseline == "none":
            return torch.zeros_like(reward)
        if self.baseline == "greedy":
            assert scores.greedy is not None, "it is sampled where this is needed"
            return scores.greedy
        weight = torch.ones_like(reward)
        if self.weight == "length":
            weight = scores.length.double()
        elif self.weight == "gradient":
            norms = scores.squared_gradient_norm
            assert norms is not None, "they are asked of the learner"
            weight = norms.double().clamp_min(torch.finfo(torch.float64).tiny)
        if self.baseline == "batch":
            return ((weight * reward).sum() / weight.sum()).expand_as(reward)
        above, below = over_group(weight * reward), over_group(weight)
        if self.baseline == "others":
            above, below = above - weight * reward, below - weight
        return above / below


@dataclass(frozen=True)
class ToGo(Advantage):
    """Credits a token only with rewards that come after it, which it can influence: less variance without bias.

    The sum of step rewards and KL penalties from the token on, and the final reward. `baseline="group"` first subtracts
    the mean of the group's total rewards from the final one. `whiten`: over all tokens of the batch,
    (x - mean) / (std + eps). REINFORCE++ and its `-baseline` form (arXiv 2501.03262, eq. 5 to 9).
    """

    baseline: Literal["none", "group"] = setting("none", "baseline", "Baseline: the mean reward to subtract.")
    whiten: bool = setting(False, "whiten", "Normalise advantages to mean 0 and standard deviation 1 over all tokens.")
    gamma: float = setting(1.0, "gamma", "Discount factor per sampled token.", least=0, most=1)
    eps: float = setting(1e-8, above=0)
    by_token = True

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.GROUP} if self.baseline == "group" else ())

    @property
    def formula(self) -> str:
        centred = " - mean(group)" if self.baseline == "group" else ""
        discounted = "" if self.gamma == 1 else f", each {self.gamma:g} times less a token away"
        inside = f"rewards of rollout i from token t on{discounted}{centred}"
        return f"whitened over all tokens: {inside}" if self.whiten else inside

    @property
    def source(self) -> str:
        if self.whiten:
            return "REINFORCE++, arXiv 2501.03262, eq. 5 to 9"
        return "Sutton et al. 2000, policy gradient theorem; GAE, arXiv 1506.02438, section 2, Psi_t = 2"

    def __call__(self, scores: Scores) -> list[Tensor]:
        dtype = scores.reward.dtype
        earned = earnings(scores)
        if self.baseline == "group":
            total = scores.reward.double()
            base = total - Baselined("group", "none")(replace(scores, penalty=())).double()
            for i, (own, mean) in enumerate(zip(earned, base.tolist(), strict=True)):
                add_final(own, scores, i, -mean)
        out = discounted_sums(earned, torch.tensor(self.gamma, dtype=torch.float64))
        return [x.to(dtype) for x in (whitened(out, self.eps) if self.whiten else out)]


@dataclass(frozen=True)
class Unrewarded(Advantage):
    """Reports rewards without learning from them: for algorithms with a teacher."""

    formula = "0: rewards are reported, and not learned from"
    source = "GKD, arXiv 2306.13649, section 3: its own loss, without a reward"

    def __call__(self, scores: Scores) -> Tensor:
        return torch.zeros_like(scores.reward)


@dataclass(frozen=True)
class Earned(Advantage):
    """r_t alone, for methods that learn action values from it (soft actor-critic, arXiv 1812.05905, eq. 2)."""

    formula = "r_t, what token t itself earns"
    source = "Haarnoja et al. 2018, arXiv 1812.05905, eq. 2"
    by_token = True

    def __call__(self, scores: Scores) -> list[Tensor]:
        return [x.to(scores.reward.dtype) for x in earnings(scores)]


@dataclass(frozen=True)
class StepRewards(Advantage):
    """Credits each step of a reply separately, without a critic: GRPO with process supervision.

    All step rewards of the group are normalised together, the final reward among them: with the step that ends at the last
    token, or else as a step of its own. The advantage of a token is the sum of the normalised rewards of the steps that end
    at it or after it (DeepSeekMath, arXiv 2402.03300, section 4.1.3).

    A final reward that is redistributed makes a step of every token, which earns its part and the rewards of steps that end
    at it.

    outcome_apart   the final reward is normalised among the final rewards of the group, and step rewards among its step
                    rewards, so that many steps do not outweigh the outcome. The two are added, as in PRIME.
    """

    eps: float = setting(1e-6, above=0)
    outcome_apart: bool = setting(
        False,
        "outcome-apart",
        "Normalise final rewards among the final rewards of the group, and step rewards among its step rewards.",
    )
    needs = frozenset({Need.GROUP})
    by_token = True

    @property
    def formula(self) -> str:
        steps = "sum over steps j that end at or after t of (r_j - mean(steps of the group)) / (std + eps)"
        return steps + " + (R_i - mean(group)) / (std(group) + eps), R without step rewards" * self.outcome_apart

    @property
    def source(self) -> str:
        paper = "DeepSeekMath, arXiv 2402.03300, section 4.1.3"
        return paper + "; the sum: PRIME, arXiv 2502.01456, section 2.3" * self.outcome_apart

    def __call__(self, scores: Scores) -> list[Tensor]:
        kinds = [[self._steps(scores, i)] for i in range(len(scores.reward))]
        if self.outcome_apart:
            kinds = [list(self._apart(scores, i)) for i in range(len(scores.reward))]
        groups: dict[tuple[int, int], list[float]] = {}
        for group, own in zip(scores.group.tolist(), kinds, strict=True):
            for kind, steps in enumerate(own):
                groups.setdefault((group, kind), []).extend(reward for _, reward in steps)
        out = []
        for group, own, length in zip(scores.group.tolist(), kinds, scores.length.long().tolist(), strict=True):
            advantage = torch.zeros(length, dtype=torch.float64)
            for kind, steps in enumerate(own):
                values = standardised([reward for _, reward in steps], groups.get((group, kind), ()), self.eps)
                for (end, _), value in zip(steps, values, strict=True):
                    advantage[:end] += value
            out.append(advantage.to(scores.reward.dtype))
        return out

    @staticmethod
    def _apart(scores: Scores, i: int) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
        """Return the steps of rollout i, and its final reward as separate steps, one where it is not redistributed: lists
        of (tokens up to the step's end, reward).
        """
        own = list(scores.steps[i]) if scores.steps else []
        final = scores.reward[i].item() - sum(r for _, r in own)
        if scores.shares:
            return own, [(end, final * share) for end, share in enumerate(scores.shares[i].tolist(), 1)]
        return own, [(int(scores.length[i]), final)]

    @classmethod
    def _steps(cls, scores: Scores, i: int) -> list[tuple[int, float]]:
        """Return all steps of rollout i, with the final reward added to a step that ends with the last token, or else
        as a step.
        """
        own, finals = cls._apart(scores, i)
        if scores.shares:
            at = dict(finals)
            for end, reward in own:
                at[end] = at.get(end, 0.0) + reward
            return sorted(at.items())
        [(length, final)] = finals
        last = own.pop()[1] if own and own[-1][0] == length else 0.0
        return [*own, (length, last + final)]


@dataclass(frozen=True)
class Decoupled(Advantage):
    """Normalises each of several rewards separately, so that a reward with a large spread does not hide the others.

    Each named part of the reward is normalised within the group, (r_k - mean) / (std + eps), then they are added with
    their weights, then divided by the standard deviation of the whole batch, so that more parts make no larger step
    (GDPO, arXiv 2601.05242). A part that is equal in a whole group adds exactly 0 there. The total reward is not used.

    weights   the weight of each part, as "correct=1 format=0.5"; parts without a weight have 1. whiten    divide by the
    batch's standard deviation. Its mean, which the paper subtracts, is 0: that of every group is.
    """

    weights: tuple[str, ...] = setting((), "part-weights", "Weights of the reward's named parts: correct=1 format=0.5.")
    whiten: bool = setting(True, "whiten", "Normalise advantages to standard deviation 1 over all rollouts.")
    eps: float = setting(1e-6, above=0)
    needs = frozenset({Need.GROUP, Need.PARTS})

    @property
    def formula(self) -> str:
        weights = f", w: {', '.join(self.weights)}, else 1" if self.weights else ""
        inside = f"sum over named parts k of {'w_k ' if weights else ''}(r_k - mean(group)) / (std(group) + eps)"
        return f"({inside}) / (std(batch) + eps){weights}" if self.whiten else f"{inside}{weights}"

    @property
    def source(self) -> str:
        return "GDPO, arXiv 2601.05242" if self.whiten else "GDPO, arXiv 2601.05242, without its last division"

    def weight_of(self) -> dict[str, float]:
        """Return the weight of each name. Raises UserError if a weight cannot be read."""
        found: dict[str, float] = {}
        for text in self.weights:
            name, _, number = text.rpartition("=")
            try:
                value = float(number)
            except ValueError:
                value = math.nan
            if not name or not math.isfinite(value):
                raise UserError(f"--part-weights: {text!r} is not NAME=WEIGHT, such as format=0.5")
            if name in found:
                raise UserError(f"--part-weights names {name} twice")
            found[name] = value
        return found

    def __call__(self, scores: Scores) -> Tensor:
        weight = self.weight_of()
        if unknown := [name for name in weight if name not in scores.parts]:
            raise UserError(
                f"--part-weights names {unknown[0]}, not a part of the reward: name one of {', '.join(scores.parts)}"
            )
        normalised = Baselined("group", "group", eps=self.eps)
        total = torch.zeros_like(scores.reward, dtype=torch.float64)
        for name, values in scores.parts.items():
            total += weight.get(name, 1.0) * normalised(replace(scores, reward=values, parts={}, penalty=()))
        return (total / (total.std() + self.eps) if self.whiten else total).to(scores.reward.dtype)


@dataclass(frozen=True)
class PassAtK(Advantage):
    """Rewards a group for one right reply among any k, so that diverse replies pay.

    Each k of the N rollouts of a group would share the reward 1 if any of them is right, else 0. The advantage of a rollout
    is the mean, over all such subsets that hold it, of their reward minus the mean R over all subsets, over the standard
    deviation sigma over all subsets (arXiv 2508.10751, its analytical derivation): a sum that has a closed form. With W
    wrong rollouts in the group, R = 1 - C(W, k) / C(N, k) and sigma = sqrt(R (1 - R)).

    A group in which every subset of k has a right reply, or none has, has advantage exactly 0: this includes all groups
    with W < k.
    """

    k: int = setting(
        2, "advantage-k", "k of pass@k: at least one of k replies has to be right. Below --group.", least=1
    )
    needs = frozenset({Need.GROUP, Need.SUCCESS})
    source = "Pass@k training, arXiv 2508.10751, analytical derivation"

    @property
    def formula(self) -> str:
        k, less = self.k, self.k - 1
        wrong = f"1 - R - C(W - 1, {less}) / C(N - 1, {less})"
        return (
            f"(1 - R) / sigma if i is right, else ({wrong}) / sigma; R = 1 - C(W, {k}) / C(N, {k}), "
            "sigma = sqrt(R (1 - R)), W wrong of the N rollouts of the group"
        )

    def __call__(self, scores: Scores) -> Tensor:
        assert scores.success is not None, "a run without a threshold is refused"
        _, group, size = scores.group.unique(return_inverse=True, return_counts=True)
        wrong = torch.zeros_like(size).index_add_(0, group, (~scores.success).long())
        worth = [self._worth(n, w) for n, w in zip(size.tolist(), wrong.tolist(), strict=True)]
        table = torch.tensor(worth, dtype=torch.float64)  # [groups, 2]
        return table[group, scores.success.long()].to(scores.reward.dtype)

    def _worth(self, size: int, wrong: int) -> tuple[float, float]:
        """Return (advantage of a wrong rollout, of a right one) in a group of `size` rollouts, `wrong` of which are wrong.

        Without its invalid rollouts a group may have fewer than k: then the whole group is the only subset.
        """
        k = min(self.k, size)
        mean = 1 - math.comb(wrong, k) / math.comb(size, k)
        if mean in (0.0, 1.0):
            return 0.0, 0.0
        spread = math.sqrt(mean * (1 - mean))
        with_wrong = 1 - math.comb(wrong - 1, k - 1) / math.comb(size - 1, k - 1)
        return (with_wrong - mean) / spread, (1 - mean) / spread


class CriticEstimate(Advantage):
    """An advantage of each token, estimated with a critic's values, and perhaps whitened over the batch."""

    needs = frozenset({Need.VALUE})
    by_token = True
    whiten: bool
    bootstrap: bool
    eps: float

    def estimate(self, scores: Scores) -> list[Tensor]:
        """Return the estimate before any whitening, float64 [n_i] for each rollout."""
        raise NotImplementedError

    def __call__(self, scores: Scores) -> list[Tensor]:
        out = self.estimate(scores)
        if self.whiten:
            out = whitened(out, self.eps, scores.truncated if self.bootstrap else None)
        return [x.to(scores.reward.dtype) for x in out]

    def returns(self, scores: Scores, lam: float | None) -> list[Tensor]:
        """Return the estimate plus the critic's values, float64 [n_i] for each rollout. Without a lambda, `lam` has no
        effect.
        """
        return [a + value.double().cpu() for a, value in zip(self.estimate(scores), scores.value, strict=True)]


@dataclass(frozen=True)
class GAE(CriticEstimate):
    """Assigns credit token by token with a critic; lambda trades its bias against the variance of returns.

    Generalized advantage estimation over the sampled tokens only (arXiv 1506.02438, eq. 16):
    delta_t = r_t + gamma V_{t+1} - V_t with V = 0 after the last token, and A_t = delta_t + gamma lambda A_{t+1}. Tool text
    between two sampled tokens costs no discount: it is not an action. lambda 0 is the TD residual, lambda 1 the return
    minus V.

    alpha     a lambda of its own for every length, 1 - 1 / (alpha n_i), at least 0 (VAPO, arXiv 2504.05118, eq. 8).
    whiten    (A - mean) / (std + eps) over all tokens of the batch.
    bootstrap a reply that was cut off has not ended: the critic's value of the last observed state, before the last
              token, replaces the rewards and penalties of the last token. Its own advantage is 0, and whitening does not
              count it (fixed-length segments: PPO, arXiv 1707.06347, section 5; time limits: Pardo et al. 2018, arXiv
              1712.00378, section 3).
    """

    gamma: float = setting(1.0, "gamma", "Discount factor per sampled token.", least=0, most=1)
    lam: float = setting(0.95, "gae-lambda", "Lambda of generalized advantage estimation (GAE).", least=0, most=1)
    alpha: float | None = setting(
        None, "gae-alpha", "Length-adaptive lambda of GAE: 1 - 1 / (alpha x tokens of the reply), at least 0.", above=0
    )
    whiten: bool = setting(False, "whiten", "Normalise advantages to mean 0 and standard deviation 1 over all tokens.")
    bootstrap: bool = setting(
        False,
        "bootstrap-truncated",
        "Where an episode was cut off, the critic's value of its last state replaces the rewards of its last token.",
    )
    eps: float = setting(1e-8, above=0)

    @property
    def formula(self) -> str:
        lam = f"{self.lam:g}" if self.alpha is None else f"max(0, 1 - 1 / ({self.alpha:g} n_i))"
        gamma = "" if self.gamma == 1 else f"{self.gamma:g} "
        inside = f"sum_k ({gamma}lambda)^k delta_(t+k), delta_t = r_t + {gamma}V_(t+1) - V_t, lambda = {lam}"
        inside += CUT if self.bootstrap else ""
        return f"whitened over all tokens: {inside}" if self.whiten else inside

    @property
    def source(self) -> str:
        adaptive = "; lambda by length: VAPO, arXiv 2504.05118, eq. 8" if self.alpha is not None else ""
        return f"GAE, arXiv 1506.02438, eq. 16{adaptive}"

    def returns(self, scores: Scores, lam: float | None) -> list[Tensor]:
        return (
            super().returns(scores, None) if lam is None else replace(self, lam=lam, alpha=None).returns(scores, None)
        )

    def estimate(self, scores: Scores) -> list[Tensor]:
        assert len(scores.value) == len(scores.reward), "GAE needs the critic's values"
        delta = []
        for earned, own in zip(earnings(scores, self.bootstrap), scores.value, strict=True):
            value = own.double().cpu()
            delta.append(earned + self.gamma * torch.cat([value[1:], value.new_zeros(1)]) - value)
        if self.alpha is None:
            lam = torch.tensor(self.lam, dtype=torch.float64)
        else:
            lam = (1 - 1 / (self.alpha * scores.length.double())).clamp_min(0.0)
        return discounted_sums(delta, self.gamma * lam)


@dataclass(frozen=True)
class KStep(CriticEstimate):
    """Sums the rewards of the next k tokens, then adds the critic's value of the state after them.

    A_t = sum_{j<k} gamma^j r_{t+j} + gamma^k V_{t+k} - V_t, over the sampled tokens only, with V = 0 after the last one
    (A3C, arXiv 1602.01783, section 4). k 1 is the TD residual; from the longest reply's length on it is the return minus V.

    whiten    (A - mean) / (std + eps) over all tokens of the batch.
    bootstrap as in GAE.
    """

    k: int = setting(5, "k-step", "k-step advantage: rewards of this many tokens, then the critic's value.", least=1)
    gamma: float = setting(1.0, "gamma", "Discount factor per sampled token.", least=0, most=1)
    whiten: bool = setting(False, "whiten", "Normalise advantages to mean 0 and standard deviation 1 over all tokens.")
    bootstrap: bool = setting(
        False,
        "bootstrap-truncated",
        "Where an episode was cut off, the critic's value of its last state replaces the rewards of its last token.",
    )
    eps: float = setting(1e-8, above=0)
    source = "A3C, arXiv 1602.01783, section 4"

    @property
    def formula(self) -> str:
        gamma = ("", "") if self.gamma == 1 else (f"{self.gamma:g}^j ", f"{self.gamma:g}^{self.k} ")
        inside = f"sum_{{j<{self.k}}} {gamma[0]}r_(t+j) + {gamma[1]}V_(t+{self.k}) - V_t"
        inside += CUT if self.bootstrap else ""
        return f"whitened over all tokens: {inside}" if self.whiten else inside

    def estimate(self, scores: Scores) -> list[Tensor]:
        assert len(scores.value) == len(scores.reward), "a k-step advantage needs the critic's values"
        discount = self.gamma ** torch.arange(self.k, dtype=torch.float64)
        out = []
        for earned, own in zip(earnings(scores, self.bootstrap), scores.value, strict=True):
            value = own.double().cpu()
            ahead = torch.cat([earned, earned.new_zeros(self.k - 1)]).unfold(0, self.k, 1)  # [n_i, k]
            behind = torch.cat([value[self.k :], value.new_zeros(min(self.k, len(value)))])
            out.append(ahead @ discount + self.gamma**self.k * behind - value)
        return out
