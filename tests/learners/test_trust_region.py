"""The natural step: conjugate gradient, Fisher-vector products of real models, the line search and its bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import make_rollouts
from torch import Tensor, nn
from update_cases import WORDS, Case, board, chosen_row, credit, feed, new_case

from posttrain.algorithms.all_algorithms import find
from posttrain.algorithms.policy import PolicyObjective
from posttrain.core.batch import Batch, Outputs, Stats
from posttrain.core.trust_region import TrustRegion
from posttrain.learners import natural_step
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.learners.natural_gradient import SearchResult, conjugate_gradient, search
from posttrain.models.native.decoder import causal, new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.training.sources.packing import pack


def spd(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A random symmetric positive definite matrix, and a right-hand side."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(size, size, generator=generator, dtype=torch.float64)
    return root @ root.T / size + 0.1 * torch.eye(size).double(), torch.randn(
        size, generator=generator, dtype=torch.float64
    )


def trpo_case(noise: float = 0.3, **settings: Any) -> Case:
    return new_case(chosen_row(find("trpo"), **settings), groups=2, size=2, noise=noise)


def batches_of(case: Case, cuts: list[list[int]] | None = None) -> list[Batch]:
    found = credit(case.row, board(case, case.rollouts))
    return feed(case, case.rollouts, found, cuts or [[0, 1, 2, 3]])


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def test_conjugate_gradient_solves_a_random_system() -> None:
    matrix, b = spd(12)
    x = conjugate_gradient(lambda v: matrix @ v, b, iterations=30, damping=0.0)
    assert torch.allclose(matrix @ x, b, atol=1e-4)
    damped = conjugate_gradient(lambda v: matrix @ v, b, iterations=30, damping=0.5)
    assert torch.allclose(damped, torch.linalg.solve(matrix + 0.5 * torch.eye(12).double(), b), atol=1e-4)
    few = conjugate_gradient(lambda v: matrix @ v, b, iterations=2, damping=0.0)
    assert (matrix @ few - b).norm() < b.norm()


def small_case() -> Case:
    """So few parameters that the whole Fisher matrix can be written down."""
    shape = DecoderConfig(
        vocab=WORDS.vocab_size, hidden=8, layers=1, heads=2, kv_heads=1, head_size=4, intermediate=8, context=64,
        tied=True,
    )  # fmt: skip
    model = new_decoder(shape, 0).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.ndim == 2 else 1)
    learner = LocalLearner(model, Optimization(trust_region=TrustRegion()), temperature=0.8)
    rollouts = make_rollouts(torch.Generator().manual_seed(0), 1, 3, WORDS.vocab_size)
    old = {id(r): learner.evaluate([pack([r.transcripts], [0])])[0].logp for r in rollouts}
    return Case(chosen_row(find("trpo")), learner, rollouts, [], old, {}, {})


def explicit_fisher(case: Case) -> Tensor:
    """Mean over tokens of J^T (diag p - p p^T) J, J the derivative of the logits after the parameters: [P, P]."""
    model, total, count = case.learner.model, torch.zeros(()).double(), 0
    parameters = list(model.parameters())
    for rollout in case.rollouts:
        (transcript,) = rollout.transcripts
        tokens = torch.tensor(transcript.tokens)
        logits = model(tokens, torch.arange(len(tokens)), causal) @ model.head.weight.T / case.learner.temperature
        for t in transcript.scored.tolist():
            rows = []
            for z in logits[t - 1]:
                found = torch.autograd.grad(z, parameters, retain_graph=True)
                rows.append(torch.cat([g.flatten() for g in found]))
            jacobian, p = torch.stack(rows), logits[t - 1].detach().softmax(0)
            total = total + jacobian.T @ (p.diag() - p.outer(p)) @ jacobian
            count += 1
    return total / count


def learner_product(case: Case, batches: list[Batch], monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], Tensor]:
    """The Fisher-vector product that the learner hands to the search."""
    caught: list[Callable[[Tensor], Tensor]] = []

    def catch(gradient: Tensor, product: Callable[[Tensor], Tensor], measure: Any, **settings: Any) -> SearchResult:
        caught.append(product)
        return SearchResult(torch.zeros_like(gradient), 0.0, 0.0, -1)

    monkeypatch.setattr(natural_step, "search", catch)
    case.learner.update(batches, PolicyObjective(case.row))
    return caught[0]


@pytest.mark.parametrize("chunked", [False, True])
def test_fisher_vector_product_equals_the_explicit_fisher_matrix(
    monkeypatch: pytest.MonkeyPatch, chunked: bool
) -> None:
    """Chunks of the vocabulary's logits are made again in the backward pass: that has a second derivative, too."""
    case = small_case()
    if chunked:
        monkeypatch.setattr("posttrain.models.losses.likelihood.CHUNK_LOGITS", 100)
        monkeypatch.setattr("posttrain.models.losses.likelihood.CHUNK_ROWS", 2)
    found = credit(case.row, board(case, case.rollouts))
    product = learner_product(case, feed(case, case.rollouts, found, [[0], [1, 2]]), monkeypatch)
    fisher = explicit_fisher(case)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        vector = torch.randn(len(fisher), generator=generator, dtype=torch.float64)
        expected = fisher @ vector
        assert (product(vector) - expected).abs().max() < 1e-9 * expected.abs().max()


def test_step_stays_within_delta_and_the_surrogate_grows() -> None:
    for delta in (1e-4, 1e-2):
        case = trpo_case(noise=0.0, trust_region=delta)
        batches = batches_of(case)
        objective = PolicyObjective(case.row)
        before = flat(case.learner.model)
        (held,) = (case.learner.evaluate(batches)[0].logp,)
        value = objective(case.learner.evaluate(batches)[0], batches[0], Stats()).item()
        stats = case.learner.update(batches, objective)
        moved = objective(case.learner.evaluate(batches)[0], batches[0], Stats()).item()
        assert 0.2 * delta < stats["trust_region/kl"][0] <= delta
        assert value - moved == pytest.approx(stats["trust_region/gain"][0], rel=1e-6) and moved < value
        assert stats["trust_region/no_step"] == (0.0, 1.0)
        assert not torch.equal(before, flat(case.learner.model))
        assert not torch.equal(held, case.learner.evaluate(batches)[0].logp)


def test_distance_of_a_step_is_the_kl_from_the_old_policy_to_the_new_at_the_learner_s_temperature() -> None:
    case = trpo_case(noise=0.0, trust_region=0.5)  # so far that the two directions differ
    learner = case.learner
    learner.temperature = 0.7

    def logs() -> Tensor:
        rows = []
        for rollout in case.rollouts:
            (transcript,) = rollout.transcripts
            tokens = torch.tensor(transcript.tokens)
            with torch.no_grad():
                hidden = learner.model(tokens, torch.arange(len(tokens)), causal)
                rows.append((hidden @ learner.model.head.weight.T / 0.7).log_softmax(-1)[transcript.scored - 1])
        return torch.cat(rows)

    old = logs()
    told = learner.update(batches_of(case, [[0, 1], [2, 3]]), PolicyObjective(case.row))["trust_region/kl"][0]
    new = logs()
    kl, other = ((a.exp() * (a - b)).sum(-1).mean().item() for a, b in ((old, new), (new, old)))
    assert told == pytest.approx(kl, rel=1e-9) and abs(kl - other) > 0.01 * kl > 0


def test_step_does_not_depend_on_the_cut_into_micro_batches() -> None:
    ends = []
    for cuts in ([[0, 1, 2, 3]], [[0], [1, 2], [3]]):
        case = trpo_case()
        case.learner.update(batches_of(case, cuts), PolicyObjective(case.row))
        ends.append(flat(case.learner.model))
    assert (ends[0] - ends[1]).abs().max() < 1e-9


def test_step_that_does_not_improve_is_not_taken() -> None:
    """The search halves a step as often as it may; if nothing grows, or all is too far, it takes none."""
    matrix, b = spd(6)
    tried: list[Tensor] = []

    def worse(step: Tensor) -> tuple[float, float]:
        tried.append(step)
        return -1e-9, 0.0

    def far(step: Tensor) -> tuple[float, float]:
        return 1.0, 1.0

    settings: dict[str, Any] = {"delta": 0.01, "iterations": 10, "damping": 0.0, "halvings": 3}
    for measure in (worse, far, lambda step: (float("nan"), 0.0)):
        found = search(b, lambda v: matrix @ v, measure, **settings)
        assert found.halvings == -1 and not found.step.any()
    assert [round((tried[0].norm() / t.norm()).item()) for t in tried] == [1, 2, 4, 8]
    full = search(b, lambda v: matrix @ v, lambda step: (1.0, 0.0), **settings)
    assert (full.step @ matrix @ full.step / 2).item() == pytest.approx(0.01)  # the quadratic KL is delta
    assert full.halvings == 0 and torch.nn.functional.cosine_similarity(full.step, matrix.inverse() @ b, 0) > 0.999


def test_direction_without_curvature_or_gradient_is_no_step() -> None:
    settings: dict[str, Any] = {"delta": 0.01, "iterations": 3, "damping": 0.0, "halvings": 3}
    for gradient, product in ((torch.ones(4), lambda v: -v), (torch.zeros(4), lambda v: v)):
        found = search(gradient, product, lambda step: (1.0, 0.0), **settings)
        assert (found.gain, found.kl, found.halvings) == (0.0, 0.0, -1) and not found.step.any()


def test_learner_leaves_the_weights_bit_for_bit_when_no_step_is_good() -> None:
    case = trpo_case()

    class Deceiving(PolicyObjective):
        """Grows in the direction of its gradient, but the search, which takes no gradient, sees it shrink."""

        def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
            return super().__call__(outputs, batch, stats) * (1 if torch.is_grad_enabled() else -1)

    before = flat(case.learner.model)
    stats = case.learner.update(batches_of(case), Deceiving(case.row))
    assert stats["trust_region/no_step"] == (1.0, 1.0) and torch.equal(before, flat(case.learner.model))


def test_rollouts_without_any_advantage_are_no_step() -> None:
    case = trpo_case()
    for rollout in case.rollouts:
        rollout.reward = 1.0
    stats = case.learner.update(batches_of(case), PolicyObjective(case.row))
    assert stats["trust_region/no_step"] == (1.0, 1.0)
    assert case.learner.update([], PolicyObjective(case.row))["trust_region/no_step"] == (1.0, 1.0)


def test_critic_beside_a_trust_region_learns_by_itself_even_while_the_policy_stands_still() -> None:
    """A critic's warm-up has no gradient for the policy at all."""
    case = new_case(chosen_row(find("trpo"), advantage="gae"), groups=2, size=2)
    assert case.learner.critic is not None
    for warm in (0.0, 1.0):
        policy, critic = flat(case.learner.model), flat(case.learner.critic)
        batches = [replace(b, coefficients={"policy": warm}) for b in batches_of(case)]
        case.learner.update(batches, PolicyObjective(case.row))
        assert torch.equal(policy, flat(case.learner.model)) is (warm == 0.0)
        assert not torch.equal(critic, flat(case.learner.critic))
