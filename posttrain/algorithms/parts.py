"""The parts that algorithms are made of, one idea each: advantages, surrogates, aggregations, KL penalties.

A part is a frozen dataclass that is called; its fields are its settings and `formula` says in plain mathematics what it
computes with them. Parts see the scoreboard or flat tensors of scored tokens, never a mask, a prompt or a world size.

    N    scored tokens of a micro-batch    S = B    rollouts of the optimizer batch    n_i    sampled tokens of rollout i
    lp   current log-probability           old      the learner's before the update    ref    the frozen reference's
    R    reward of a rollout               A        advantage                          r      exp(lp - old)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from posttrain.types import Scores, Stats

# -- advantage: Scores -> [S], or one [n_i] for each rollout ----------------------------------------------------------


@dataclass(frozen=True)
class Baselined:
    """R minus a baseline, over a scale. Seven papers differ only in these two choices.

    baseline  `group`: mean of the rollout's group (DeepSeekMath, arXiv 2402.03300, section 4.1.2); `others`: mean of the
              rest of its group (RLOO, arXiv 2402.14740, eq. 7); `batch`: mean of all rollouts (Williams 1992); `none`.
    scale     `group`, `batch`: sample standard deviation (n - 1) + eps; `none` (Dr. GRPO, arXiv 2503.20783, section 3.2).

    signal    all advantages times B / (rollouts in groups with any signal), so that groups without one do not dilute the
              gradient (GPG, arXiv 2504.02546, eq. 7).

    A group whose rewards are all equal has advantage exactly 0 under a group baseline, whatever the rounding.
    """

    baseline: Literal["none", "batch", "group", "others"] = "group"
    scale: Literal["none", "batch", "group"] = "none"
    eps: float = 1e-6
    signal: bool = False

    @property
    def needs_group(self) -> bool:
        return self.baseline in ("group", "others") or self.scale == "group"

    @property
    def formula(self) -> str:
        of = {
            "none": "",
            "batch": " - mean(batch)",
            "group": " - mean(group)",
            "others": " - mean(others of the group)",
        }
        scale = "" if self.scale == "none" else f" / (std({self.scale}) + {self.eps:g})"
        numerator = f"R_i{of[self.baseline]}"
        formula = f"({numerator}){scale}" if scale else numerator
        return f"({formula}) B / (rollouts in groups with unequal rewards)" if self.signal else formula

    def __call__(self, scores: Scores) -> Tensor:
        reward = total_reward(scores)
        _, group, size = scores.group.unique(return_inverse=True, return_counts=True)
        count = size[group].double()  # [S], rollouts in the own group
        assert not self.needs_group or bool((size > 1).all()), "a group of one has no baseline"

        def over_group(x: Tensor) -> Tensor:  # the own group's sum of x, for every rollout
            return torch.zeros(len(size), dtype=x.dtype).index_add_(0, group, x)[group]

        group_mean = over_group(reward) / count
        baseline = {
            "none": lambda: torch.zeros_like(reward),
            "batch": lambda: reward.mean().expand_as(reward),
            "group": lambda: group_mean,
            "others": lambda: (over_group(reward) - reward) / (count - 1),
        }[self.baseline]()
        advantage = reward - baseline
        if self.scale == "group":
            variance = over_group((reward - group_mean).square()) / (count - 1)
            advantage = advantage / (variance.sqrt() + self.eps)
        elif self.scale == "batch":
            advantage = advantage / ((reward.std() if len(reward) > 1 else reward.new_zeros(())) + self.eps)
        equal = equal_rewards(scores)
        if self.baseline in ("group", "others"):
            advantage = advantage.masked_fill(equal, 0.0)
        if self.signal and not bool(equal.all()):
            advantage = advantage * (len(reward) / (~equal).sum())
        return advantage.to(scores.reward.dtype)


@dataclass(frozen=True)
class ToGo:
    """What a token can still change: step rewards and KL penalties from it on, and the final reward (causality).

    `baseline="group"` first takes the mean of the group's total rewards off the final one. `whiten`: over all tokens of
    the batch, (x - mean) / (std + eps). REINFORCE++ and its `-baseline` form (arXiv 2501.03262, eq. 5 to 9).
    """

    baseline: Literal["none", "group"] = "none"
    whiten: bool = False
    eps: float = 1e-8

    @property
    def needs_group(self) -> bool:
        return self.baseline == "group"

    @property
    def formula(self) -> str:
        centred = " - mean(group)" if self.baseline == "group" else ""
        inside = f"rewards of rollout i from token t on{centred}"
        return f"whitened over all tokens: {inside}" if self.whiten else inside

    def __call__(self, scores: Scores) -> list[Tensor]:
        dtype = scores.reward.dtype
        base = torch.zeros_like(scores.reward, dtype=torch.float64)
        if self.baseline == "group":
            total = scores.reward.double()
            base = total - Baselined("group", "none")(replace(scores, penalty=())).double()
        out = []
        for i, length in enumerate(scores.length.long().tolist()):
            earned = token_rewards(scores, i, length)
            earned[-1] -= base[i]
            out.append(earned.flip(0).cumsum(0).flip(0))
        if self.whiten:
            every = torch.cat(out)
            spread = every.std() if len(every) > 1 else every.new_zeros(())
            out = [(x - every.mean()) / (spread + self.eps) for x in out]
        return [x.to(dtype) for x in out]


@dataclass(frozen=True)
class Process:
    """GRPO with process supervision (DeepSeekMath, arXiv 2402.03300, section 4.1.3).

    All step rewards of the group, the final reward among them as the last step, are normalised together; the advantage of
    a token is the sum of the normalised rewards of the steps that end at it or after it.
    """

    eps: float = 1e-6
    needs_group: ClassVar[bool] = True
    formula: ClassVar[str] = "sum over steps j that end at or after t of (r_j - mean(steps of the group)) / (std + eps)"

    def __call__(self, scores: Scores) -> list[Tensor]:
        steps = [self._steps(scores, i) for i in range(len(scores.reward))]
        groups: dict[int, list[float]] = {}
        for group, own in zip(scores.group.tolist(), steps, strict=True):
            groups.setdefault(group, []).extend(reward for _, reward in own)
        out = []
        for group, own, length in zip(scores.group.tolist(), steps, scores.length.long().tolist(), strict=True):
            every = torch.tensor(groups[group], dtype=torch.float64)
            advantage = torch.zeros(length, dtype=torch.float64)
            if every.max() - every.min() > 1e-8 * max(1.0, every.abs().max().item()):
                for end, reward in own:
                    advantage[:end] += (reward - every.mean()) / (every.std() + self.eps)
            out.append(advantage.to(scores.reward.dtype))
        return out

    @staticmethod
    def _steps(scores: Scores, i: int) -> list[tuple[int, float]]:
        """(tokens up to its end, reward) of each step of rollout i; the final reward is what the steps did not give."""
        own = list(scores.steps[i]) if scores.steps else []
        return [*own, (int(scores.length[i]), scores.reward[i].item() - sum(r for _, r in own))]


def total_reward(scores: Scores) -> Tensor:
    """float64 [S]: the rewards, with what a KL in the reward takes off."""
    reward = scores.reward.double()
    if not scores.penalty:
        return reward
    return reward - torch.stack([p.double().sum() for p in scores.penalty])


def token_rewards(scores: Scores, i: int, length: int) -> Tensor:
    """float64 [n_i]: what each token of rollout i earns. Adds up to its total reward.

    A step's reward is earned by the last token before it, the final reward by the last token.
    """
    earned = torch.zeros(length, dtype=torch.float64)
    steps = scores.steps[i] if scores.steps else ()
    for before, reward in steps:
        earned[max(before - 1, 0)] += reward
    earned[-1] += scores.reward[i].double() - sum(reward for _, reward in steps)
    if scores.penalty:
        earned -= scores.penalty[i].double()
    return earned


def equal_rewards(scores: Scores) -> Tensor:
    """bool [S]: whether all rewards of the rollout's group are equal, so that it tells nothing."""
    reward = total_reward(scores)
    _, group = scores.group.unique(return_inverse=True)
    groups = int(group.max()) + 1 if len(group) else 0
    high = torch.full((groups,), -torch.inf, dtype=torch.float64).scatter_reduce_(0, group, reward, "amax")
    low = torch.full((groups,), torch.inf, dtype=torch.float64).scatter_reduce_(0, group, reward, "amin")
    scale = torch.maximum(high.abs(), low.abs()).clamp_min(1.0)
    return (high - low <= 1e-8 * scale)[group]


# -- surrogate: (r, lp, A) [N] -> what is maximised [N] ---------------------------------------------------------------


class Surrogate:
    """What is maximised for each token."""

    formula: str
    uses_ratio: ClassVar[bool] = True

    def __call__(self, ratio: Tensor, logp: Tensor, advantage: Tensor) -> Tensor:
        raise NotImplementedError

    def measure(self, ratio: Tensor, advantage: Tensor, stats: Stats) -> None:
        """Add what this part wants logged."""


@dataclass(frozen=True)
class LogProbability(Surrogate):
    """lp A: the score-function estimator (REINFORCE, Williams 1992, eq. 4)."""

    formula: ClassVar[str] = "lp A"  # type: ignore[misc]
    uses_ratio: ClassVar[bool] = False

    def __call__(self, ratio: Tensor, logp: Tensor, advantage: Tensor) -> Tensor:
        return logp * advantage


@dataclass(frozen=True)
class ImportanceRatio(Surrogate):
    """r A: importance sampling without a clip (TRPO's surrogate, arXiv 1502.05477, eq. 14)."""

    formula: ClassVar[str] = "r A"  # type: ignore[misc]

    def __call__(self, ratio: Tensor, logp: Tensor, advantage: Tensor) -> Tensor:
        return ratio * advantage


@dataclass(frozen=True)
class Clip(Surrogate):
    """min(r A, clip(r, 1 - low, 1 + high) A): the pessimistic bound (PPO, arXiv 1707.06347, eq. 7)."""

    low: float = 0.2
    high: float = 0.2

    @property
    def formula(self) -> str:  # type: ignore[override]
        return f"min(r A, clip(r, {1 - self.low:g}, {1 + self.high:g}) A)"

    def __call__(self, ratio: Tensor, logp: Tensor, advantage: Tensor) -> Tensor:
        return torch.minimum(ratio * advantage, ratio.clamp(1 - self.low, 1 + self.high) * advantage)

    def measure(self, ratio: Tensor, advantage: Tensor, stats: Stats) -> None:
        """Shares of the tokens that the clip leaves without a gradient."""
        low = ((ratio < 1 - self.low) & (advantage < 0)).sum().item()
        high = ((ratio > 1 + self.high) & (advantage > 0)).sum().item()
        stats.add("ratio/clipped_low", low, ratio.numel())
        stats.add("ratio/clipped_high", high, ratio.numel())


@dataclass(frozen=True)
class WeightedLogProbability(Surrogate):
    """sg(r) lp A: the off-policy policy gradient, its importance weight without a gradient (Precup et al. 2000).

    With `high`, the weight is capped at 1 + high (CISPO, arXiv 2506.13585, eq. 4): every token keeps a gradient, unlike
    under PPO's clip. The cap is on the weight and so always above 1.
    """

    high: float | None = None

    def __post_init__(self) -> None:
        if self.high is not None and self.high < 0:
            raise ValueError(f"the weight is capped at 1 + high, which must not be below 1: high = {self.high}")

    @property
    def formula(self) -> str:  # type: ignore[override]
        return "sg(r) lp A" if self.high is None else f"sg(min(r, {1 + self.high:g})) lp A"

    def __call__(self, ratio: Tensor, logp: Tensor, advantage: Tensor) -> Tensor:
        weight = ratio.detach()
        return (weight if self.high is None else weight.clamp(max=1 + self.high)) * logp * advantage

    def measure(self, ratio: Tensor, advantage: Tensor, stats: Stats) -> None:
        if self.high is not None:
            stats.add("ratio/clipped_high", (ratio > 1 + self.high).sum().item(), ratio.numel())


# -- aggregation: Scores -> the weight of each token of a rollout [S] -------------------------------------------------


@dataclass(frozen=True)
class SequenceMean:
    """Every rollout counts the same, its tokens share (DeepSeekMath, arXiv 2402.03300, eq. 3)."""

    formula: ClassVar[str] = "1 / (B n_i)"

    def __call__(self, scores: Scores) -> Tensor:
        return 1.0 / (len(scores.length) * scores.length)


@dataclass(frozen=True)
class TokenMean:
    """Every token counts the same (DAPO, arXiv 2503.14476, eq. 12)."""

    formula: ClassVar[str] = "1 / sum_j n_j"

    def __call__(self, scores: Scores) -> Tensor:
        return (1.0 / scores.length.sum()).expand_as(scores.length)


@dataclass(frozen=True)
class SequenceSum:
    """The log-probability of the whole response, averaged over rollouts (REINFORCE, RLOO)."""

    formula: ClassVar[str] = "1 / B"

    def __call__(self, scores: Scores) -> Tensor:
        return torch.full_like(scores.length, 1.0 / len(scores.length))


@dataclass(frozen=True)
class ConstantLength:
    """Like the sequence sum, over a fixed length: the recipe's token budget, never the padded width.

    Dr. GRPO (arXiv 2503.20783, section 3.2 and listing 1, MAX_TOKENS).
    """

    length: int | None = None  # None: the run's max_tokens, filled in when the run is configured

    @property
    def formula(self) -> str:
        return f"1 / (B {self.length or 'max_tokens'})"

    def __call__(self, scores: Scores) -> Tensor:
        assert self.length, "the length is filled in when the run is configured"
        return torch.full_like(scores.length, 1.0 / (len(scores.length) * self.length))


# -- KL to the reference ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KL:
    """A penalty on leaving the reference, per token, with x = ref - lp (Schulman 2020, "Approximating KL divergence").

    k1 = -x: unbiased, high variance. k2 = x^2 / 2: biased, low variance; its gradient is that of the reverse KL on policy.
    k3 = exp(x) - 1 - x: unbiased, low variance; but in the loss its *gradient* is not that of the reverse KL.

    `loss`: beta k is subtracted from what is maximised, token by token. `reward`: beta times the sum of k over the
    response is subtracted from the rollout's reward, before advantages.
    """

    estimator: Literal["k1", "k2", "k3"] = "k3"
    beta: float = 0.04
    where: Literal["loss", "reward"] = "loss"

    @property
    def formula(self) -> str:
        return {"k1": "(lp - ref)", "k2": "(ref - lp)^2 / 2", "k3": "(exp(ref - lp) - 1 - (ref - lp))"}[self.estimator]

    def __call__(self, logp: Tensor, ref_logp: Tensor) -> Tensor:
        """[N], [N] -> [N], in nats."""
        x = ref_logp - logp
        if self.estimator == "k1":
            return -x
        if self.estimator == "k2":
            return x.square() / 2
        return x.exp() - 1 - x
