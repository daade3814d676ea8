"""Expected gradients by enumeration: what is called exact is, and the document says what is found of the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from expected_gradients import (
    BEGINNINGS,
    DOCUMENT,
    EXACT,
    FORMS,
    POLICY,
    REPLIES,
    SHARES,
    configured,
    document,
    error,
    expected,
    formed,
    penalised,
    probabilities,
    reward_of,
    steps_of,
    true,
    weighed,
)

from posttrain.algorithms.policy_table import TABLE
from posttrain.algorithms.ratio import Correction
from posttrain.algorithms.redistribution import Redistribution

UNBIASED = {"reinforce": 1.0, "reinforce-baseline": 0.5, "off-policy-pg": 0.5, "rloo": 1.0, "dr-grpo": 0.125}
UNBIASED |= {"remax": 1.0}
UNBIASED |= {"dppo": 0.125, "dppo-kl": 0.125}
"""Rows whose expected gradient on policy is the true one times this: (B - 1) / B of a mean over all, 1 / L of a constant."""
PLAIN = [name for name in UNBIASED if name != "off-policy-pg"]


def test_the_replies_are_all_that_there_are() -> None:
    assert (len(REPLIES), len(set(REPLIES)), len(BEGINNINGS)) == (31, 31, 15)
    assert probabilities(POLICY).sum().item() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("name", UNBIASED)
def test_the_expected_gradient_on_policy_is_the_true_one(name: str) -> None:
    found, aim = expected(configured(name), "policy"), true(configured(name))
    assert (found - UNBIASED[name] * aim).norm() < EXACT * aim.norm()


def test_no_other_row_claims_to_be_exact() -> None:
    found = {name: error(expected(configured(name), "policy"), true(configured(name))) for name in TABLE}
    assert {name for name, share in found.items() if share < EXACT} == set(UNBIASED)
    assert max(found.values()) < 0.5, "whatever they do for less variance, they point the right way"


@pytest.mark.parametrize("form", FORMS)
def test_the_weight_of_rewards_or_of_replies_is_exact_whoever_sampled(form: str) -> None:
    """And the product up to a token for what is known at it: Q of the policy itself."""
    told = {by: formed(form, by) for by in ("`R_i - mean(batch)`", "rewards from t on", "an exact critic's")}
    exact = {by for by, share in told.items() if share is not None and share < EXACT}
    sums = {"`R_i - mean(batch)`", "rewards from t on"}
    of_token = {"`--ratio causal --weight-at token`": {"an exact critic's"}, "`--ratio token`": set()}
    assert exact == of_token.get(form, sums if "reward" in form else told.keys())
    assert all(share is None or share < EXACT or share > 0.2 for share in told.values())


@pytest.mark.parametrize("name", PLAIN)
def test_the_product_over_a_reply_is_exact_up_to_its_cap_and_a_weight_per_token_is_not(name: str) -> None:
    row = configured(name)
    errors = {
        kind: error(expected(replace(row, correction=Correction(kind, 1e6)), "older"), true(row))
        for kind in ("sequence-truncate", "truncate")
    }
    assert errors["sequence-truncate"] < EXACT
    assert 0.2 < errors["truncate"] < 0.4
    none, capped = weighed(name, "no weight"), weighed(name, "truncate")
    assert none is not None and capped is not None and capped < none


def test_k2_has_the_gradient_of_the_reverse_kl_per_token_and_k1_in_the_reward_that_of_a_reply() -> None:
    for estimator in ("k2", "exact"):
        reply, token = penalised(estimator, "loss") or (0, 1)
        assert token < EXACT and reply > 0.15
    assert penalised("k1", "loss") is None
    for estimator in ("k1", "k3"):
        reply, token = penalised(estimator, "loss", weighed=True) or (0, 1)
        assert token < EXACT and reply > 0.15
    reply, token = penalised("k1", "reward") or (1, 0)
    assert reply < EXACT and token > 0.15
    assert all(share > 0.05 for share in penalised("k3", "loss") or (0,))


def test_the_document_says_what_is_found() -> None:
    """Up to a hundredth: rounding is the machine's."""
    words, found = DOCUMENT.read_text(encoding="utf-8").split(), document().split()
    assert len(words) == len(found), "PYTHONPATH=tests/helpers python tools/expected_gradients.py writes it anew"
    for word, own in zip(words, found, strict=True):
        assert word == own or abs(float(word) - float(own)) < 0.011, (word, own)


@pytest.mark.parametrize("weight", ["even", "entropy"])
@pytest.mark.parametrize("share", SHARES)
def test_the_expected_gradient_of_a_redistributed_reward_is_that_of_every_reply_by_itself(
    weight: Any, share: float
) -> None:
    """Log-probability of each token times what it and later ones earn of the final reward, and of the steps behind it."""
    found = expected(replace(configured("reinforce"), redistribution=Redistribution(weight, share)), "policy")
    table = POLICY.clone().requires_grad_()
    logs, total = table.log_softmax(-1), torch.zeros((), dtype=torch.float64)
    for reply, chance in zip(REPLIES, probabilities(POLICY).tolist(), strict=True):
        places = [BEGINNINGS.index(reply[:t]) for t in range(len(reply))]
        entropy = [-(logs[p].detach().exp() * logs[p].detach()).sum().item() for p in places]
        weights = [1.0] * len(reply) if weight == "even" else entropy
        final = reward_of(reply) - sum(earned for _, earned in steps_of(reply))
        for t, (place, token) in enumerate(zip(places, reply, strict=True)):
            to_go = final * (1 - share + share * sum(weights[t:]) / sum(weights))
            to_go += sum(earned for end, earned in steps_of(reply) if end > t)
            total = total + chance * logs[place, token] * to_go
    (right,) = torch.autograd.grad(total, table)
    assert (found - right).norm() < EXACT * right.norm()
    assert error(found, true(configured("reinforce"))) > 0.05
