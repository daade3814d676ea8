"""The same numbers as other libraries give: the losses of TRL 1.16 (grpo_trainer.py) and verl (core_algos.py, August 2026),
written over rectangles of padded tokens as they are there. Advantages are the library's: theirs differ in small constants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from update_cases import ROWS

from posttrain.algorithms.credit import Baselined
from posttrain.algorithms.earned_rewards import per_token
from posttrain.algorithms.policy import Algorithm, PolicyObjective
from posttrain.algorithms.settings import change
from posttrain.core.batch import Batch, Outputs, Scores, Stats
from posttrain.core.types import UserError

LENGTHS = (5, 3, 7, 2, 6, 4)
BUDGET = 20  # as the rows of these tests have it
MASK = torch.stack([(torch.arange(max(LENGTHS)) < n).double() for n in LENGTHS])  # [B, T]
GENERATOR = torch.Generator().manual_seed(3)
LP, NEAR, FAR = (torch.randn(MASK.shape, generator=GENERATOR).double() for _ in range(3))
NOW, REF = -1.6 - 1.5 * LP.abs(), -1 - FAR.abs()  # [B, T]
DRIFT = torch.tensor([0.8, 0.8, 0.0, 0.0, 0.2, 0.0]).double()[:, None]  # of the first two replies: beyond any bound
OLD = (NOW + 0.4 * NEAR + DRIFT).clamp(max=-0.05)
SCORES = Scores(torch.tensor([1.0, 0.0, 0.5, 0.0, 0.0, 1.0]).double(), torch.tensor([0, 0, 0, 1, 1, 1]), MASK.sum(-1))
LENGTH = MASK.sum(-1, keepdim=True)

Loss = Callable[[Tensor, Tensor], Tensor]
"""From log-probabilities [B, T] and advantages [B, 1] to the loss."""


def clipped(ratio: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    return -torch.min(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


def trl_sapo(lp: Tensor, a: Tensor) -> Tensor:
    temperatures = torch.where(a > 0, 1.0, torch.full_like(a, 1.05))
    gain = torch.sigmoid(temperatures * ((lp - OLD).exp() - 1)) * 4 / temperatures * a
    return ((-gain * MASK).sum(-1) / MASK.sum(-1)).mean()


def trl_luspo(lp: Tensor, a: Tensor) -> Tensor:
    ratio = (((lp - OLD) * MASK).sum(-1, keepdim=True) / LENGTH).exp()
    return (clipped(ratio, a, 2e-3, 2.5e-3) * MASK).sum(-1).mean()


def trl_vespo(lp: Tensor, a: Tensor) -> Tensor:
    log_w = ((lp - OLD).clamp(-20, 20) * MASK).sum(-1, keepdim=True).clamp(-18.42, 20).detach()
    k = torch.where(a >= 0, 2.0, 3.0)
    decay = torch.where(a >= 0, 3.0, 2.0)
    phi = (decay + k * log_w - decay * log_w.exp()).exp()
    return (-phi * a * lp * MASK).sum() / MASK.sum()


def trl_deepseek(lp: Tensor, a: Tensor) -> Tensor:
    """off_policy_mask_threshold 0.5, use_bias_correction_kl, beta 0.04."""
    ratio, drift = (lp - OLD).exp(), ((OLD - lp.detach()) * MASK).sum(-1, keepdim=True) / LENGTH
    kept = (a >= 0) | (drift <= 0.5)
    kl = ((REF - lp).exp() - (REF - lp) - 1) * ratio
    return (((clipped(ratio, a, 0.2, 0.2) * kept + 0.04 * kl) * MASK).sum(-1) / MASK.sum(-1)).mean()


def verl_dppo(lp: Tensor, a: Tensor, inside: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """clip_ratio_c so large that it truncates nothing, as in verl's script; seq-mean-token-sum-norm."""
    above, below = inside(lp.exp(), OLD.exp())
    valid = torch.where(a > 0, above, below).detach()
    return (-a * (lp - OLD).exp().detach() * lp * valid * MASK).sum(-1).mean() / BUDGET


def verl_dppo_tv(lp: Tensor, a: Tensor) -> Tensor:
    return verl_dppo(lp, a, lambda p, old: (p - old <= 0.15, p - old >= -0.15))


def verl_dppo_kl(lp: Tensor, a: Tensor) -> Tensor:
    def inside(p: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        kl = old * (old.log() - p.log()) + (1 - old) * ((1 - old) / (1 - p)).log()
        return (kl <= 0.05) | (p <= old), (kl <= 0.05) | (p >= old)

    return verl_dppo(lp, a, inside)


def covariances(lp: Tensor, a: Tensor) -> Tensor:
    there = MASK.bool()
    return (lp.detach() - lp.detach()[there].mean()) * (a - a.expand_as(MASK)[there].mean())


def verl_clip_cov(lp: Tensor, a: Tensor) -> Tensor:
    """clip_cov_ratio 1, so that all tokens within the bounds are drawn; a clip of the ratio that is never met."""
    cov = covariances(lp, a)
    return (-a * (lp - OLD).exp() * ~((cov > 1) & (cov < 5)) * MASK).sum() / MASK.sum()


def verl_kl_cov(lp: Tensor, a: Tensor) -> Tensor:
    """kl_cov_ratio 0.1, so of 27 tokens the two with the highest covariance; ppo_kl_coef 1."""
    cov = covariances(lp, a).masked_fill(MASK == 0, -torch.inf).flatten()
    chosen = torch.zeros_like(cov).index_fill(0, cov.topk(2).indices, 1.0).view_as(MASK)
    return ((-a * (lp - OLD).exp() + chosen * (lp - OLD).abs()) * MASK).sum() / MASK.sum()


PEERS: dict[str, tuple[Loss, bool]] = {
    "clip-cov": (verl_clip_cov, True),
    "kl-cov": (verl_kl_cov, True),
    "sapo": (trl_sapo, True),
    "luspo": (trl_luspo, True),
    "vespo": (trl_vespo, True),
    "deepseek-v3.2": (trl_deepseek, True),
    "dppo": (verl_dppo_tv, False),
    "dppo-kl": (verl_dppo_kl, False),
}
"""Row: its peer, and whether values are the same too, not gradients alone."""
OF_NAME = {row.name: row for row in ROWS}
OF_NAME["clip-cov"] = change(OF_NAME["clip-cov"], {"clip_cov": 1.0})
OF_NAME["kl-cov"] = change(OF_NAME["kl-cov"], {"kl_cov": 0.1})


def of_library(row: Algorithm, lp: Tensor) -> Tensor:
    """The loss of one micro-batch that holds all of them."""
    there, rollout = MASK.bool(), torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    credited, own = per_token(row.advantage(SCORES), SCORES), {"logp": list(lp.detach()[there].split(list(LENGTHS)))}
    held = torch.cat(row.covariance(own, credited)) if row.covariance else None
    for select in row.select:
        credited = [a * keep for a, keep in zip(credited, select(own, credited), strict=True)]
    none = torch.zeros(len(rollout), dtype=torch.int64)
    batch = Batch(
        None, none, none, rollout, none, weight=row.aggregate(SCORES)[rollout], advantage=torch.cat(credited),  # type: ignore[arg-type]
        sampler_logp=OLD[there], old_logp=OLD[there], ref_logp=REF[there], held=held,
    )  # fmt: skip
    return PolicyObjective(replace(row, correction=None))(Outputs(lp[there]), batch, Stats())


@pytest.mark.parametrize("name", PEERS)
def test_loss_and_gradient_are_those_of_the_peer(name: str) -> None:
    row, (peer, same_value) = OF_NAME[name], PEERS[name]
    lp = NOW.clone().requires_grad_()
    advantage = row.advantage(SCORES)
    assert isinstance(advantage, Tensor)
    ours, theirs = of_library(row, lp), peer(lp, advantage[:, None])
    (own,), (other,) = torch.autograd.grad(ours, lp), torch.autograd.grad(theirs, lp)
    assert other.abs().max() > 1e-3 and (own - other).abs().max() < 1e-12
    assert not same_value or abs(ours.item() - theirs.item()) < 1e-12


def test_max_rl_has_the_advantages_of_its_authors_code() -> None:
    mean = torch.tensor([0.5, 0.5, 0.5, 1 / 3, 1 / 3, 1 / 3]).double()
    assert torch.allclose(OF_NAME["maxrl"].advantage(SCORES), (SCORES.reward - mean) / (mean + 1e-6), atol=1e-12)


def test_mean_of_a_group_scales_no_reward_below_0_and_leaves_a_group_without_any_at_exactly_0() -> None:
    advantage = Baselined("group", "mean")
    none = replace(SCORES, reward=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0]).double())
    assert (advantage(none)[:3] == 0).all() and (advantage(none)[3:] != 0).all()
    with pytest.raises(UserError, match="--scale mean needs rewards of at least 0, .* and one is -0.5: leave it out"):
        advantage(replace(SCORES, reward=SCORES.reward - 0.5))
