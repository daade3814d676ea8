"""Epsilon-greedy sampling: its tokens, their exact probabilities, and the draws of each request."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny
from sampled import complete, ragged
from tiny_models import make
from torch import Tensor

from posttrain.core.protocols import Engine, Model
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Completion, Sampling
from posttrain.engines.local.backed_engine import BackedEngine
from posttrain.engines.local.cuda_step import CudaStep
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.engines.local.sampler import Exploration, UniformTokens, sample, uniform
from posttrain.engines.local.uncached_engine import UncachedEngine
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.decoder import Decoder
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.sources.packing import pack


def among(ids: list[int], vocab: int) -> UniformTokens:
    inside = torch.zeros(vocab, dtype=torch.bool)
    inside[ids] = True
    return UniformTokens(torch.tensor(ids), inside)


def explored(count: int, epsilon: float, tokens: UniformTokens) -> Exploration:
    seed, index = torch.full((count,), 7), torch.arange(count)
    return Exploration.drawn(torch.full((count,), epsilon), seed, index, tokens)


@pytest.mark.parametrize("heat", [1.0, 0.5])
def test_tokens_are_drawn_with_the_probabilities_that_are_reported(heat: float) -> None:
    """b(a) = (1 - E) p(a) + E / A among A allowed tokens, and (1 - E) p(a) for others."""
    count, epsilon, allowed = 200_000, 0.3, [0, 2, 3, 5, 6]
    logits = torch.tensor([2.0, 1.0, -1.0, 0.5, 3.0, -8.0, -9.0])
    draw = uniform(torch.full((count,), 7), torch.arange(count))
    how = torch.full((count,), heat), None, None, None, explored(count, epsilon, among(allowed, 7))
    token, logp = sample(logits.expand(count, 7), draw, *how)
    wanted = (1 - epsilon) * (logits.double() / heat).softmax(-1)
    wanted[allowed] += epsilon / len(allowed)
    assert (logp.double() - wanted.log()[token]).abs().max() < 1e-6
    share = token.bincount(minlength=7) / count
    assert ((share - wanted).abs() < 4 * (wanted * (1 - wanted) / count).sqrt()).all()


def test_rows_without_epsilon_keep_their_bits_beside_rows_with_one() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, draw = torch.randn(50, 90, generator=generator) * 3, torch.rand(50, generator=generator)
    exploration = explored(50, 0.5, among(list(range(90)), 90))
    exploration.epsilon[::2] = 0.0
    plain, mixed = sample(logits, draw), sample(logits, draw, explore=exploration)
    for a, b in zip(plain, mixed, strict=True):
        assert torch.equal(a[::2], b[::2]) and not torch.equal(a[1::2], b[1::2])


def test_uniform_draws_are_of_text_and_ends_and_independent_of_the_policy_s(tokenizer: Tokenizer) -> None:
    special = tokenizer.special_ids
    assert tokenizer.eos_id in special and len(special) > 1
    found = UniformTokens.of(tokenizer, [tokenizer.eos_id or 0], tokenizer.vocab_size + 9, torch.device("cpu"), [20])
    ids = set(range(tokenizer.vocab_size)) - special - {20} | {tokenizer.eos_id}
    assert set(found.ids.tolist()) == ids == set(found.inside.nonzero().flatten().tolist())
    count = 20_000
    draws = explored(count, 0.5, found)
    policy = uniform(torch.full((count,), 7), torch.arange(count))
    together = torch.corrcoef(torch.stack([policy, draws.whether, draws.which]))
    assert (together - torch.eye(3)).abs().max() < 4 / math.sqrt(count)
    drawn = draws._replace(epsilon=torch.ones(count)).token(torch.zeros(count, dtype=torch.int64))
    assert set(drawn.tolist()) == ids


def stepping(model: Decoder, tokenizer: Tokenizer, **how: Any) -> LocalEngine:
    """An engine with the steps of a GPU."""
    engine = LocalEngine(model, tokenizer, **how)
    engine._compiled, engine._cuda = (
        None,
        CudaStep(model, engine.dtype, engine.eos, lambda: engine.uniform_tokens, capture=False),
    )
    engine._cache = engine._new_cache()
    return engine


def eager(model: Decoder, tokenizer: Tokenizer, **how: Any) -> LocalEngine:
    """An engine without compiled code."""
    engine = LocalEngine(model, tokenizer, **how)
    engine._compiled = None
    engine._cache = engine._new_cache()
    return engine


ENGINES: dict[str, Callable[..., Engine]] = {
    "compiled": LocalEngine, "eager": eager, "as on a GPU": stepping, "uncached": UncachedEngine, "backed": BackedEngine
}  # fmt: skip


def model_for(kind: str, tokenizer: Tokenizer, tmp_path: Path) -> Any:
    if kind != "backed":
        return tiny(tokenizer)
    pytest.importorskip("transformers")
    model = load_model(make("gemma2", tmp_path / "model", vocab_size=tokenizer.vocab_size))
    model.eos_ids = (tokenizer.eos_id or 0,)
    return model


def behaviour(model: Model, prompt: list[int], reply: Completion, heat: float, epsilon: float, engine: Any) -> Tensor:
    """log b of a reply's tokens, from the learner's log-probabilities."""
    made = Transcript()
    made.observe(prompt)
    made.sample(reply)
    [outputs] = LocalLearner(model, Optimization(), temperature=heat).evaluate([pack([[made]], [0])])
    allowed = engine.uniform_tokens
    share = torch.where(allowed.inside[torch.tensor(reply.tokens)], epsilon / len(allowed.ids), 0.0)
    return ((1 - epsilon) * outputs.logp.double().exp() + share).log()


@pytest.mark.parametrize("kind", ENGINES)
def test_every_engine_reports_the_exact_probability_of_its_tokens(
    kind: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = model_for(kind, tokenizer, tmp_path)
    engine = ENGINES[kind](model, tokenizer, slots=5)
    prompts, how = ragged(24, temperature=0.7, epsilon=0.25)
    found, plain = complete(engine, prompts, how), complete(engine, prompts, ragged(24, temperature=0.7)[1])
    for id, reply in found.items():
        wanted = behaviour(model, prompts[id], reply, 0.7, 0.25, engine)
        assert (torch.tensor(reply.logp, dtype=torch.float64) - wanted).abs().max() < 2e-5
    assert sum(list(found[id].tokens) != list(plain[id].tokens) for id in found) > 12


@pytest.mark.parametrize("kind", ["compiled", "as on a GPU"])
def test_reply_does_not_depend_on_its_company(kind: str, tokenizer: Tokenizer) -> None:
    model = tiny(tokenizer)
    prompts, how = ragged(12, epsilon=0.3)
    for place in range(0, 12, 3):
        how[place] = Sampling(seed=how[place].seed, max_tokens=how[place].max_tokens)
    together = complete(ENGINES[kind](model, tokenizer, slots=5), prompts, how)
    for id in (0, 1, 5):
        [alone] = complete(ENGINES[kind](model, tokenizer), prompts[id : id + 1], how[id : id + 1]).values()
        assert alone.tokens == together[id].tokens
        assert alone.logp == pytest.approx(together[id].logp, abs=0.0 if kind == "compiled" else 1e-5)
