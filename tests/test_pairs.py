"""Losses of preference pairs: golden numbers, and stability where a plain logarithm has none."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.algorithms.pairs import BradleyTerry, DirectPreference


def of(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_golden_bradley_terry_at_difference_zero() -> None:
    assert BradleyTerry()(of(1.7), of(1.7)).item() == pytest.approx(0.693147, abs=1e-6)


def test_golden_dpo() -> None:
    """beta 0.1, log-ratios +2 and -1: -log sigma(0.3)."""
    assert DirectPreference(0.1)(of(2.0), of(-1.0)).item() == pytest.approx(0.554355, abs=1e-6)


@pytest.mark.parametrize(("chosen", "rejected"), [(2.0, -1.0), (-1.0, 2.0)])
def test_losses_are_those_of_their_equations_on_either_side(chosen: float, rejected: float) -> None:
    difference = chosen - rejected
    margin = BradleyTerry(0.5)(of(chosen), of(rejected)).item()
    assert margin == pytest.approx(math.log(1 + math.exp(-(difference - 0.5))))
    right, wrong = (math.log(1 + math.exp(-sign * 0.3 * difference)) for sign in (1, -1))
    smooth = DirectPreference(0.3, smoothing=0.2)(of(chosen), of(rejected)).item()
    assert smooth == pytest.approx(0.8 * right + 0.2 * wrong)
    assert (BradleyTerry(), DirectPreference()) == (BradleyTerry(0.0), DirectPreference(0.1, 0.0))


def test_margin_is_what_the_difference_must_exceed() -> None:
    assert BradleyTerry(0.5)(of(2.0), of(1.5)).item() == pytest.approx(math.log(2))


def test_smoothed_loss_is_least_where_the_model_says_what_share_of_labels_is_wrong() -> None:
    margin = of(math.log(0.9 / 0.1)).requires_grad_()  # says: wrong in one of ten
    DirectPreference(1.0, smoothing=0.1)(margin, of(0.0)).sum().backward()  # type: ignore[no-untyped-call]
    assert margin.grad is not None and margin.grad.abs().item() < 1e-12


@pytest.mark.parametrize("loss", [BradleyTerry(), DirectPreference(1.0), DirectPreference(1.0, 0.1)])
def test_losses_and_gradients_stay_finite_at_any_difference(loss: BradleyTerry | DirectPreference) -> None:
    chosen = torch.tensor([-1e4, 1e4], requires_grad=True)
    value = loss(chosen, torch.zeros(2))
    value.sum().backward()  # type: ignore[no-untyped-call]
    assert value.isfinite().all() and chosen.grad is not None and chosen.grad.isfinite().all()
