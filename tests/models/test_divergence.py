"""Divergences from a teacher, exact over the vocabulary: values and gradients against closed forms, whatever the blocks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from heads import KINDS, new_head, plain_logits, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.models.losses.divergence import measured_divergence
from posttrain.models.losses.likelihood import Hidden, token_logp
from posttrain.models.native.head import Head
from posttrain.models.native.linear import accumulating

BETAS = (1.0, 0.0, 0.5, 0.1, 0.97)


def token_logp_divergence(
    policy: Hidden, teacher: Hidden, target: torch.Tensor, beta: float, *temperatures: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logp, found, *_ = measured_divergence(policy, teacher, target, beta, temperatures or (1.0, 1.0), False)  # type: ignore[arg-type]
    return logp, found


def models(
    rows: int,
    vocabulary: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    widths: tuple[int, int] = (8, 5),
    kind: str = "plain",
) -> tuple[Hidden, Hidden, Tensor]:
    """A policy and a teacher of another width, and targets."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for width in widths:
        states = torch.randn(rows, width, generator=draw, dtype=dtype).requires_grad_()
        made.append(Hidden(states, new_head(kind, vocabulary, width, draw, dtype)))
    return made[0], made[1], torch.randint(0, vocabulary, (rows,), generator=draw)


def closed_form(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """[N] of probabilities [N, V], as the papers write it."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum(-1)

    if beta in (0.0, 1.0):
        return kl(p, q) if beta == 1.0 else kl(q, p)
    m = (1 - beta) * p + beta * q
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


def probabilities(model: Hidden, temperature: float) -> Tensor:
    return (plain_logits(model.states, model.head) / temperature).softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [1 << 20, 300])
@pytest.mark.parametrize("kept", [1 << 23, 0])
@pytest.mark.parametrize("beta", BETAS)
def test_value_and_gradient_are_those_of_the_closed_form_whatever_the_blocks(
    beta: float, kept: int, block: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.models.losses.likelihood.BLOCK_LOGITS", block)
    monkeypatch.setattr("posttrain.models.losses.likelihood.KEPT_LOGITS", kept)
    policy, teacher, target = models(7, 150, kind=kind)
    weight = torch.randn(2, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logp, found = token_logp_divergence(policy, teacher, target, beta, 0.7, 1.3)
    p, q = probabilities(policy, 0.7), probabilities(teacher, 1.3)
    wanted = closed_form(p, q, beta)
    expected_logp = p[torch.arange(7), target].log()
    assert (found - wanted).abs().max() < 1e-12 and (logp - expected_logp).abs().max() < 1e-12
    inputs = policy.states, *tensors(policy.head)
    got = torch.autograd.grad((weight[0] * found + weight[1] * logp).sum(), inputs)
    plain = (weight[0] * wanted + weight[1] * expected_logp).sum()
    want = torch.autograd.grad(plain, inputs)
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("beta", BETAS)
def test_teacher_gets_no_gradient_and_each_output_may_go_unused(beta: float) -> None:
    policy, teacher, target = models(5, 30)
    logp, found = token_logp_divergence(policy, teacher, target, beta)
    found.sum().backward()
    assert teacher.states.grad is None and teacher.head.weight.grad is None
    assert policy.states.grad is not None and policy.states.grad.abs().max() > 1e-3
    logp, _ = token_logp_divergence(policy, teacher, target, beta)
    (own,) = torch.autograd.grad(logp.sum(), policy.states)
    (alone,) = torch.autograd.grad(token_logp(policy.states, policy.head, target).sum(), policy.states)
    assert (own - alone).abs().max() < 1e-12


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), beta=st.floats(0, 1), scale=st.floats(0.01, 30))
def test_is_never_below_zero_and_zero_for_equal_models(seed: int, beta: float, scale: float) -> None:
    policy, teacher, target = models(4, 12, seed)
    far = Hidden(teacher.states * scale, teacher.head)
    assert token_logp_divergence(policy, far, target, beta)[1].min() > -1e-11
    assert token_logp_divergence(policy, policy, target, beta)[1].abs().max() < 1e-12


def test_ends_of_jensen_shannon_are_the_two_kullback_leibler_divergences() -> None:
    policy, teacher, target = models(6, 20)
    for near, end in ((1e-10, 0.0), (1 - 1e-10, 1.0)):
        value = token_logp_divergence(policy, teacher, target, near)[1] / min(near, 1 - near)
        assert torch.allclose(value, token_logp_divergence(policy, teacher, target, end)[1], rtol=1e-3)


def test_golden_two_words() -> None:
    """p = (.8, .2), q = (.5, .5): the values follow from a pocket calculator."""
    eye = torch.eye(2, dtype=torch.float64)
    p, q = (torch.tensor([pair], dtype=torch.float64).log() for pair in ((0.8, 0.2), (0.5, 0.5)))
    target = torch.tensor([1])
    expected = {1.0: 0.8 * math.log(1.6) + 0.2 * math.log(0.4), 0.0: 0.5 * math.log(0.625) + 0.5 * math.log(2.5)}
    m = (0.65, 0.35)
    expected[0.5] = 0.5 * (0.8 * math.log(0.8 / m[0]) + 0.2 * math.log(0.2 / m[1]))
    expected[0.5] += 0.5 * (0.5 * math.log(0.5 / m[0]) + 0.5 * math.log(0.5 / m[1]))
    for beta, value in expected.items():
        logp, found = token_logp_divergence(Hidden(p, Head(eye)), Hidden(q, Head(eye)), target, beta)
        assert found.item() == pytest.approx(value, abs=1e-12) and logp.item() == pytest.approx(math.log(0.2))


def test_float32_is_as_exact_as_a_plain_softmax_over_a_large_vocabulary() -> None:
    wide, narrow = models(64, 5000, widths=(64, 48)), models(64, 5000, dtype=torch.float32, widths=(64, 48))
    with torch.no_grad():
        for one, other in zip(wide[:2], narrow[:2], strict=True):
            other.states.copy_(one.states / 4), other.head.weight.copy_(one.head.weight)
            one.states.copy_(other.states), one.head.weight.copy_(other.head.weight)
    for beta in BETAS:
        exact = token_logp_divergence(*wide, beta)[1]
        assert (token_logp_divergence(*narrow, beta)[1] - exact).abs().max() < 1e-5


def test_ids_that_only_one_head_has_are_left_out() -> None:
    policy, teacher, target = models(5, 30, kind="all")
    weight, bias = tensors(teacher.head)
    more = torch.full((4, 5), 9.0, dtype=torch.float64)
    longer = replace(teacher.head, weight=torch.cat([weight, more]), bias=torch.cat([bias, more[:, 0]]))
    padded = Hidden(teacher.states, longer)
    for pair in ((policy, padded), (padded, policy)):
        found = token_logp_divergence(*pair, target % 30, 0.5)[1]
        own = [Hidden(m.states, m.head.first(30)) for m in pair]
        assert torch.equal(found, token_logp_divergence(own[0], own[1], target % 30, 0.5)[1])


def test_log_probabilities_are_over_all_ids_of_a_policy_that_has_more_than_the_teacher() -> None:
    policy, teacher, target = models(5, 30, kind="all")
    logp, _ = token_logp_divergence(policy, Hidden(teacher.states, teacher.head.first(20)), target, 0.5, 0.7, 1.3)
    expected = probabilities(policy, 0.7)[torch.arange(5), target].log()
    assert (logp - expected).abs().max() < 1e-12


def test_gradient_of_the_head_is_added_where_it_lies() -> None:
    policy, teacher, target = models(6, 40)
    head = torch.nn.Parameter(policy.head.weight.detach().clone())
    for scope in range(2):
        _, found = token_logp_divergence(Hidden(policy.states.detach(), Head(head)), teacher, target, 0.5)
        if scope:
            with accumulating():
                found.sum().backward()
        else:
            found.sum().backward()
    (alone,) = torch.autograd.grad(
        closed_form(probabilities(policy, 1.0), probabilities(teacher, 1.0), 0.5).sum(), policy.head.weight
    )
    assert head.grad is not None and (head.grad - 2 * alone).abs().max() < 1e-12
