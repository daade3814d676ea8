"""Divergences from a teacher that names its likeliest tokens: against the exact ones, and a loop over the cells."""

from __future__ import annotations

import math

import pytest
import torch
from heads import KINDS, new_head, plain_logits, tensors
from torch import Tensor

from posttrain.models.losses.divergence import measured_divergence
from posttrain.models.losses.likelihood import Hidden, token_logp_entropy
from posttrain.models.losses.top_divergence import LEAST_REST, top_divergence

BETAS = (1.0, 0.0, 0.5, 0.1)
ROWS, VOCABULARY = 7, 150


def models(kind: str = "plain", dtype: torch.dtype = torch.float64) -> tuple[Hidden, Hidden, Tensor]:
    """A policy and a teacher of another width, and targets."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for width in (8, 5):
        states = torch.randn(ROWS, width, generator=draw, dtype=dtype).requires_grad_()
        made.append(Hidden(states, new_head(kind, VOCABULARY, width, draw, dtype)))
    return made[0], made[1], torch.randint(0, VOCABULARY, (ROWS,), generator=draw)


def log_probabilities(model: Hidden, temperature: float | Tensor = 1.0) -> Tensor:
    heat = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    return (plain_logits(model.states, model.head) / heat).log_softmax(-1)


def likeliest(teacher: Hidden, count: int) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        found = log_probabilities(teacher).topk(count)
    return found.indices, found.values


def small_blocks(block: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.models.losses.likelihood.BLOCK_LOGITS", block)
    monkeypatch.setattr("posttrain.models.losses.likelihood.KEPT_LOGITS", kept)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("block", "kept"), [(1 << 20, 1 << 23), (300, 1 << 23), (300, 0)])
@pytest.mark.parametrize("beta", BETAS)
def test_with_all_tokens_it_is_the_exact_divergence(
    beta: float, block: int, kept: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(block, kept, monkeypatch)
    policy, teacher, target = models(kind)
    exact_logp, exact, *_ = measured_divergence(policy, teacher, target, beta, (0.7, 1.0), False)
    logp, found, _ = top_divergence(policy, *likeliest(teacher, VOCABULARY), target, beta, 0.7)
    assert (found - exact).abs().max() < 1e-10 and (logp - exact_logp).abs().max() < 1e-12
    weight = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs = policy.states, *tensors(policy.head)
    got = torch.autograd.grad((weight[0] * found + weight[1] * logp).sum(), inputs)
    want = torch.autograd.grad((weight[0] * exact + weight[1] * exact_logp).sum(), inputs)
    assert all((a - b).abs().max() < 1e-10 for a, b in zip(got, want, strict=True))


def over_cells(log_p: Tensor, log_q: Tensor, named: list[int], beta: float) -> Tensor:
    """The divergence at one token, cell by cell, as the papers write it; `log_q` of the named tokens alone is read."""
    cells = [(log_p[i].exp(), log_q[i].exp()) for i in named]
    others = [i for i in range(len(log_p)) if i not in named]
    cells.append((log_p[others].exp().sum(), 1 - sum(q for _, q in cells)))
    total = torch.zeros((), dtype=torch.float64)
    for p, q in cells:
        m = (1 - beta) * p + beta * q
        if beta == 1.0:
            total = total + p * (p / q).log()
        elif beta == 0.0:
            total = total + q * (q / p).log()
        else:
            total = total + (1 - beta) * p * (p / m).log() + beta * q * (q / m).log()
    return total


@pytest.mark.parametrize("kind", ["plain", "all"])
@pytest.mark.parametrize(("block", "kept"), [(1 << 20, 1 << 23), (300, 0)])
@pytest.mark.parametrize("beta", BETAS)
def test_value_and_gradient_are_those_of_a_loop_over_the_cells(
    beta: float, block: int, kept: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another number of tokens in each row, in any order, and some that the policy does not have."""
    small_blocks(block, kept, monkeypatch)
    policy, teacher, target = models(kind)
    temperature = torch.linspace(0.6, 1.4, ROWS, dtype=torch.float64)
    log_q = log_probabilities(teacher).detach()
    ids, logq, wanted = torch.full((ROWS, 9), -1), torch.full((ROWS, 9), -math.inf, dtype=torch.float64), []
    log_p = log_probabilities(policy, temperature)
    for row in range(ROWS):
        named = log_q[row].topk(row + 1).indices.flip(0).tolist()
        ids[row, : row + 1], logq[row, : row + 1] = torch.tensor(named), log_q[row, named]
        ids[row, 8], logq[row, 8] = VOCABULARY + row, -9.0  # padding of the teacher's head, part of the rest
        wanted.append(over_cells(log_p[row], log_q[row], named, beta))
    logp, found, _ = top_divergence(policy, ids, logq, target, beta, temperature)
    expected, expected_logp = torch.stack(wanted), log_p[torch.arange(ROWS), target]
    assert (found - expected).abs().max() < 1e-12 and (logp - expected_logp).abs().max() < 1e-12
    weight = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs = policy.states, *tensors(policy.head)
    got = torch.autograd.grad((weight[0] * found + weight[1] * logp).sum(), inputs)
    want = torch.autograd.grad((weight[0] * expected + weight[1] * expected_logp).sum(), inputs)
    assert all((a - b).abs().max() < 1e-11 for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("beta", BETAS)
def test_it_grows_with_the_number_of_tokens_up_to_the_exact_one_and_is_zero_for_equal_models(beta: float) -> None:
    policy, teacher, target = models()
    before = torch.zeros(ROWS, dtype=torch.float64)
    for count in (1, 2, 5, 20, 150):  # in between the rest is smaller than the least one
        found = top_divergence(policy, *likeliest(teacher, count), target, beta)[1].detach()
        assert (found - before).min() > -1e-12
        assert top_divergence(policy, *likeliest(policy, count), target, beta)[1].abs().max() < 1e-12
        before = found
    assert (before - measured_divergence(policy, teacher, target, beta, (1.0, 1.0), False)[1]).abs().max() < 1e-12


@pytest.mark.parametrize("beta", BETAS)
def test_teacher_whose_tokens_add_up_to_more_than_1_leaves_a_least_rest(beta: float) -> None:
    policy, _, target = models(dtype=torch.float32)
    ids = torch.arange(2).expand(ROWS, 2)
    logq = torch.tensor([0.5, 0.5003]).log().expand(ROWS, 2)
    found = top_divergence(policy, ids, logq, target, beta)[1]
    (slope,) = torch.autograd.grad(found.sum(), policy.states)
    assert found.isfinite().all() and slope.isfinite().all()
    if beta == 1.0:
        p = log_probabilities(policy).detach().double().exp()
        rest = p[:, 2:].sum(-1)
        named = (p[:, :2] * (p[:, :2].log() - logq.double())).sum(-1)
        assert torch.allclose(found.double(), named + rest * (rest.log() - math.log(LEAST_REST)), atol=1e-5)


def test_measured_run_has_the_entropy_and_the_same_bits() -> None:
    policy, teacher, target = models(dtype=torch.float32)
    named = likeliest(teacher, 4)
    plain, measured = (top_divergence(policy, *named, target, 0.5, 0.7, told) for told in (False, True))
    assert torch.equal(plain[0], measured[0]) and torch.equal(plain[1], measured[1]) and not plain[2].numel()
    logp, entropy = token_logp_entropy(policy.states, policy.head, target, 0.7)
    assert torch.allclose(measured[2], entropy) and torch.allclose(measured[0], logp) and not measured[2].requires_grad


def test_a_policy_that_is_certain_has_an_exact_rest() -> None:
    """1 - p of a float32 would be 0 here."""
    policy = Hidden(
        torch.tensor([[60.0, 30.0, 30.0]], requires_grad=True),
        new_head("plain", 3, 3, torch.Generator(), torch.float32),
    )
    with torch.no_grad():
        policy.head.weight.copy_(torch.eye(3))
    ids, logq = torch.tensor([[0]]), torch.tensor([[math.log(0.5)]])
    found = top_divergence(policy, ids, logq, torch.tensor([0]), 0.0)[1]
    assert found.item() == pytest.approx(math.log(0.5) - 0.5 * (math.log(2) - 30), rel=1e-5)
    (slope,) = torch.autograd.grad(found.sum(), policy.states)
    assert torch.allclose(slope, torch.tensor([[0.5, -0.25, -0.25]]), atol=1e-6)
