"""The table of policy-gradient algorithms, and the one objective they all share.

An algorithm is a row of parts; a new paper is one row and, if it has a new idea, one part. Nothing anywhere asks for a
row's name.

    N    scored tokens of a micro-batch    S = B    rollouts of the optimizer batch
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from posttrain.algorithms.parts import (
    KL,
    Baselined,
    Clip,
    ConstantLength,
    ImportanceRatio,
    LogProbability,
    Process,
    SequenceMean,
    SequenceSum,
    Surrogate,
    ToGo,
    TokenMean,
    WeightedLogProbability,
)
from posttrain.algorithms.ratio import Causal, OverSequence, PessimisticClip, RatioStep, SequenceValueTokenGradient
from posttrain.types import Batch, Objective, Outputs, Scores, Stats, UserError


@dataclass(frozen=True)
class Algorithm:
    """A row of the table."""

    name: str
    paper: str
    advantage: Baselined | ToGo | Process
    surrogate: Surrogate
    aggregate: Callable[[Scores], Tensor]  # -> float32 [S], the weight of each token of a rollout
    ratio: tuple[RatioStep, ...] = ()  # applied left to right to the log ratio; they do not commute
    kl: KL | None = None
    epochs: int = 1  # passes over the rollouts of a step
    minibatches: int = 1  # optimizer updates per pass

    @property
    def on_policy(self) -> bool:
        """Whether the rollouts of a step serve one update only, so that old and current log-probabilities coincide."""
        return self.epochs * self.minibatches == 1

    @property
    def moves_every_token(self) -> bool:
        """Whether a token can have a gradient though its advantage is 0."""
        return self.kl is not None and self.kl.where == "loss"

    def describe(self) -> list[str]:
        """The objective in plain mathematics, one line each."""
        penalty = f" - {self.kl.beta:g} k" if self.kl and self.kl.where == "loss" else ""
        lines = [
            f"{self.name}: {self.paper}",
            f"  maximise  sum_i sum_t w_i [ {self.surrogate.formula}{penalty} ]",
            f"  A_i = {self.advantage.formula}",
            f"  w_i = {getattr(self.aggregate, 'formula', self.aggregate)}",
        ]
        if self.surrogate.uses_ratio:
            steps = " then ".join(step.formula for step in self.ratio) or "exp(lp - old)"
            lines.append(f"  r   = {steps}" + ("  (exactly 1: one update per step)" if self.on_policy else ""))
        if self.kl:
            lines.append(f"  k   = {self.kl.formula}")
            if self.kl.where == "reward":
                lines.append(f"  R_i = reward_i - {self.kl.beta:g} sum_t k   (each token's part to it)")
        lines.append(f"  {self.epochs} epoch(s) of {self.minibatches} update(s) per step")
        return lines


_ROWS = (
    Algorithm(
        "grpo",
        "Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300)",
        advantage=Baselined("group", "group"),
        surrogate=Clip(0.2, 0.2),
        aggregate=SequenceMean(),
        kl=KL("k3", 0.04),
    ),
    Algorithm(
        "dr-grpo",
        "GRPO done right: no length and no difficulty bias (arXiv 2503.20783)",
        advantage=Baselined("group", "none"),
        surrogate=Clip(0.2, 0.2),
        aggregate=ConstantLength(),
    ),
    Algorithm(
        "rloo",
        "REINFORCE leave-one-out (arXiv 2402.14740)",
        advantage=Baselined("others", "none"),
        surrogate=ImportanceRatio(),
        aggregate=SequenceSum(),
        kl=KL("k1", 0.05, "reward"),
    ),
    Algorithm(
        "reinforce",
        "REINFORCE without a baseline, on the reward to go (Williams 1992)",
        advantage=ToGo("none"),
        surrogate=LogProbability(),
        aggregate=SequenceSum(),
    ),
    Algorithm(
        "reinforce-baseline",
        "REINFORCE with the batch's mean as baseline (Williams 1992)",
        advantage=Baselined("batch", "none"),
        surrogate=LogProbability(),
        aggregate=SequenceSum(),
    ),
    Algorithm(
        "off-policy-pg",
        "Off-policy policy gradient with causal products of ratios (Precup et al. 2000; Degris et al. 2012)",
        advantage=Baselined("batch", "none"),
        ratio=(Causal(),),
        surrogate=WeightedLogProbability(),
        aggregate=SequenceSum(),
    ),
    Algorithm(
        "grpo-sequence",
        "GRPO with the ratio of the whole response (DeepSeek-R1, arXiv 2501.12948, eq. 1)",
        advantage=Baselined("group", "group"),
        ratio=(OverSequence("sum"),),
        surrogate=Clip(0.2, 0.2),
        aggregate=SequenceMean(),
        kl=KL("k3", 0.04),
    ),
    Algorithm(
        "grpo-process",
        "GRPO with process supervision: step rewards (DeepSeekMath, arXiv 2402.03300, section 4.1.3)",
        advantage=Process(),
        surrogate=Clip(0.2, 0.2),
        aggregate=SequenceMean(),
        kl=KL("k3", 0.04),
    ),
    Algorithm(
        "reinforce++",
        "REINFORCE++: whitened returns with the KL in the reward (arXiv 2501.03262)",
        advantage=ToGo("none", whiten=True),
        surrogate=Clip(0.2, 0.2),
        aggregate=TokenMean(),
        kl=KL("k1", 0.01, "reward"),
    ),
    Algorithm(
        "reinforce++-baseline",
        "REINFORCE++ on rewards centred by their group (arXiv 2501.03262, section 3)",
        advantage=ToGo("group", whiten=True),
        surrogate=Clip(0.2, 0.2),
        aggregate=TokenMean(),
        kl=KL("k2", 0.01),
    ),
    Algorithm(
        "gspo",
        "Group Sequence Policy Optimization (arXiv 2507.18071)",
        advantage=Baselined("group", "group"),
        ratio=(OverSequence("mean"),),
        surrogate=Clip(3e-4, 4e-4),
        aggregate=SequenceMean(),
    ),
    Algorithm(
        "gspo-token",
        "GSPO with token-level gradients (arXiv 2507.18071, section 4.3)",
        advantage=Baselined("group", "group"),
        ratio=(SequenceValueTokenGradient(),),
        surrogate=Clip(3e-4, 4e-4),
        aggregate=SequenceMean(),
    ),
    Algorithm(
        "gmpo",
        "Geometric-Mean Policy Optimization (arXiv 2507.20673)",
        advantage=Baselined("group", "group"),
        ratio=(PessimisticClip(0.4), OverSequence("mean")),
        surrogate=ImportanceRatio(),
        aggregate=SequenceMean(),
    ),
    Algorithm(
        "gpg",
        "Group Policy Gradient (arXiv 2504.02546)",
        advantage=Baselined("group", "none", signal=True),
        surrogate=LogProbability(),
        aggregate=TokenMean(),
    ),
    Algorithm(
        "lite-ppo",
        "Lite PPO: group mean, batch standard deviation, token mean (arXiv 2508.08221)",
        advantage=Baselined("group", "batch"),
        surrogate=Clip(0.2, 0.2),
        aggregate=TokenMean(),
    ),
    Algorithm(
        "cispo",
        "Clipped importance-sampling weights (MiniMax-M1, arXiv 2506.13585)",
        advantage=Baselined("group", "group"),
        surrogate=WeightedLogProbability(high=4.0),
        aggregate=TokenMean(),
    ),
)
TABLE: dict[str, Algorithm] = {row.name: row for row in _ROWS}


def find(name: str) -> Algorithm:
    """The row of that name. Raises UserError with the list of rows."""
    if name in TABLE:
        return TABLE[name]
    close = difflib.get_close_matches(name, TABLE, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise UserError(f"unknown algorithm {name!r}: {hint}there are {', '.join(TABLE)}")


def adjust(
    row: Algorithm,
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
    kl: float | None = None,
    epochs: int | None = None,
    minibatches: int | None = None,
    max_tokens: int,
    group: int,
) -> Algorithm:
    """The row with the recipe's settings in place of its defaults. Raises UserError where they contradict each other."""
    if row.advantage.needs_group and group < 2:
        raise UserError(f"{row.name} compares the rollouts of a group: --group must be at least 2, not {group}")
    if clip_low is not None or clip_high is not None:
        if not isinstance(row.surrogate, Clip):
            raise UserError(f"{row.name} has no clip: leave out --clip-low and --clip-high")
        low = row.surrogate.low if clip_low is None else clip_low
        high = row.surrogate.high if clip_high is None else clip_high
        row = replace(row, surrogate=Clip(low, high))
    if kl is not None:
        row = replace(row, kl=replace(row.kl or KL(), beta=kl) if kl > 0 else None)
    if isinstance(row.aggregate, ConstantLength) and row.aggregate.length is None:
        row = replace(row, aggregate=ConstantLength(max_tokens))
    return replace(row, epochs=epochs or row.epochs, minibatches=minibatches or row.minibatches)


def policy_objective(row: Algorithm) -> Objective:
    """The loss of one micro-batch: minus the weighted sum of the surrogate, plus the KL penalty."""

    def loss(outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        logp, advantage = outputs.logp, batch.advantage
        assert advantage is not None
        current = logp.detach()
        old = current if batch.old_logp is None else batch.old_logp
        log_ratio = logp - old
        for step in row.ratio:
            log_ratio = step(log_ratio, batch)
        ratio = log_ratio.exp()
        gain = row.surrogate(ratio, logp, advantage)
        count = logp.numel()
        if row.kl is not None:
            assert batch.ref_logp is not None
            penalty = row.kl(logp, batch.ref_logp)
            if row.kl.where == "loss":
                gain = gain - row.kl.beta * penalty
            # Reported with one estimator whatever the row uses: k3 has no bias and little variance.
            stats.add("kl", KL("k3")(current, batch.ref_logp).sum().item(), count)
        with torch.no_grad():
            if batch.old_logp is None:
                exact = (ratio == 1) | ~current.isfinite()
                assert bool(exact.all()), "on policy the ratio is exactly 1"
                stats.add("ratio/first", ratio.double().sum().item(), count)
            stats.add("ratio", ratio.double().sum().item(), count)
            row.surrogate.measure(ratio, advantage, stats)
            if batch.sampler_logp is not None:
                # How far the engine's numbers are from the learner's: estimates KL(sampler || learner), unclipped.
                gap = old - batch.sampler_logp
                stats.add("sampler/kl", (gap.exp() - 1 - gap).sum().item(), count)
                stats.add("sampler/gap", gap.abs().sum().item(), count)
        return -(batch.weight * gain).sum()

    return loss
