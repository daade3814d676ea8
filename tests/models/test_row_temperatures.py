"""A temperature for each row of hidden states: values and gradients are those of logits that are divided row by row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from heads import KINDS, new_head, plain_logits, tensors
from torch import Tensor

from posttrain.models.losses.divergence import FORWARD, REVERSE, measured_divergence
from posttrain.models.losses.likelihood import (
    Hidden,
    exact_kl,
    log_collision,
    soft_values,
    token_logp,
    token_logp_entropy,
)

ROWS, VOCABULARY = 7, 150
HEATS = torch.tensor([0.3, 1.0, 0.7, 2.5, 1.0, 0.11, 1.3], dtype=torch.float64)


def drawn(kind: str, seed: int = 0, width: int = 8) -> tuple[Hidden, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    states = torch.randn(ROWS, width, generator=draw, dtype=torch.float64).requires_grad_()
    head = new_head(kind, VOCABULARY, width, draw)
    return Hidden(states, head), torch.randint(0, VOCABULARY, (ROWS,), generator=draw)


def logs(of: Hidden) -> Tensor:
    return (plain_logits(of.states, of.head) / HEATS[:, None]).log_softmax(-1)


def at(x: Tensor, target: Tensor) -> Tensor:
    return x[torch.arange(ROWS), target]


def same(found: list[Tensor], wanted: list[Tensor], of: Hidden) -> None:
    """Compare values, and the gradients of a weighted sum of them."""
    weight = torch.randn(ROWS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs = of.states, *tensors(of.head)
    for got, want in zip(found, wanted, strict=True):
        assert (got - want).abs().max() < 1e-11
        if want.requires_grad and got.requires_grad:
            pairs = zip(
                *(torch.autograd.grad((weight * x).sum(), inputs, retain_graph=True) for x in (got, want)), strict=True
            )
            assert all((a - b).abs().max() < 1e-11 for a, b in pairs)


@pytest.fixture(params=[(1 << 20, 1 << 23), (300, 1 << 23), (300, 0)])
def blocked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits in one block or in several, which are kept or computed again."""
    for name, value in zip(("BLOCK_LOGITS", "KEPT_LOGITS"), request.param, strict=True):
        monkeypatch.setattr(f"posttrain.models.losses.likelihood.{name}", value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("blocked")
def test_log_probabilities_and_entropies_are_those_of_each_row_s_temperature(kind: str) -> None:
    policy, target = drawn(kind)
    plain = logs(policy)
    logp, entropy = token_logp_entropy(policy.states, policy.head, target, HEATS)
    same([logp, entropy], [at(plain, target), -(plain.exp() * plain).sum(-1)], policy)
    same([token_logp(policy.states, policy.head, target, HEATS)], [at(plain, target)], policy)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("blocked")
def test_divergences_are_those_of_each_row_s_temperature_on_both_sides(kind: str) -> None:
    policy, target = drawn(kind)
    teacher = drawn(kind, 1, 5)[0]
    p, q = logs(policy), logs(teacher).detach()
    for beta, wanted in ((REVERSE, (p.exp() * (p - q)).sum(-1)), (FORWARD, (q.exp() * (q - p)).sum(-1))):
        logp, found, theirs, _ = measured_divergence(policy, teacher, target, beta, (HEATS, HEATS), True)
        same([logp, found, theirs], [at(p, target), wanted, at(q, target)], policy)


@pytest.mark.parametrize("chunk", [512, 2])
def test_what_is_computed_in_chunks_of_rows_takes_the_temperatures_of_its_rows(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.models.losses.likelihood.CHUNK_ROWS", chunk)
    monkeypatch.setattr("posttrain.models.losses.likelihood.CHUNK_LOGITS", 1)
    policy, other = drawn("all")[0], drawn("all", 1)[0]
    p, q = logs(policy), logs(other)
    same([exact_kl(policy, other, HEATS)], [(p.exp() * (p - q)).sum(-1)], policy)
    same([log_collision(policy, HEATS)], [p.exp().square().sum(-1).log()], policy)
    values: Callable[[], Tensor] = lambda: (p.exp() * plain_logits(other.states, other.head).detach()).sum(-1)  # noqa: E731
    same([soft_values(policy, (other, other), (other, other), HEATS)[0]], [values()], policy)


def test_equal_temperatures_of_rows_are_the_temperature_of_all() -> None:
    policy, target = drawn("all")
    each = token_logp(policy.states, policy.head, target, torch.full((ROWS,), 0.7, dtype=torch.float64))
    assert torch.equal(each, token_logp(policy.states, policy.head, target, 0.7))
