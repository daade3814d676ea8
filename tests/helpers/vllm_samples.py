"""A decoder that vLLM can compute, what engines sample from it, and how far that is from what the learner scores."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch

from posttrain.core.protocols import Engine
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Completion, Sampling
from posttrain.engines.engine_options import EngineOptions
from posttrain.engines.pool.engine_pool import EnginePool
from posttrain.engines.servers.server_pool import open_servers
from posttrain.engines.vllm.vllm_setup import VLLMSetup
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.native.decoder import Decoder, new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.sources.packing import collate

INSTALLED = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed here: make test-vllm")
GAP = 1e-4  # nats; what different kernels make of float32, seen: 1e-5


def small(tokenizer: Tokenizer, tied: bool = True, context: int = 64) -> Decoder:
    """Heads of 32, the least vLLM has kernels for; far from uniform, so that mistakes show."""
    config = DecoderConfig(
        vocab=tokenizer.vocab_size, hidden=64, layers=2, heads=2, kv_heads=1, head_size=32, intermediate=96,
        context=context, tied=tied,
    )  # fmt: skip
    model = new_decoder(config, seed=0)
    assert tokenizer.eos_id is not None
    model.eos_ids = (tokenizer.eos_id, *tokenizer.encode("b"))  # a character is an end too, so that replies end
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    return model


def opened(
    model: Any,
    tokenizer: Tokenizer,
    slots: int = 16,
    precision: str = "float32",
    options: EngineOptions = EngineOptions(),  # noqa: B008  frozen
    seconds: float = 300.0,
) -> EnginePool:
    """A pool of vLLM servers that have the model's weights, as version 0."""
    how = replace(options, slots=slots, precision=precision, cache_gib=1.0, seconds=seconds, seeds=True)
    pool = open_servers(VLLMSetup, model, tokenizer, how)
    pool.load(model, 0)
    return pool


def complete(engine: Engine, prompts: list[list[int]], how: list[Sampling]) -> list[Completion]:
    for id, (prompt, sampling) in enumerate(zip(prompts, how, strict=True)):
        engine.submit(id, prompt, sampling)
    done: list[Completion] = []
    while len(done) < len(prompts):
        done += engine.poll()
    assert engine.poll() == []
    return sorted(done, key=lambda c: c.id)


def ragged(count: int, **how: Any) -> tuple[list[list[int]], list[Sampling]]:
    """Prompts of five groups, and budgets of all sizes."""
    prompts = [[5 + (i % 5) * 7 + j for j in range(2 + 3 * (i % 5))] for i in range(count)]
    return prompts, [Sampling(seed=2**62 + i, max_tokens=3 + i % 17, **how) for i in range(count)]


def gap(model: Decoder, prompts: list[list[int]], done: list[Completion], temperature: float) -> torch.Tensor:
    """float64 [N]: the learner's log-probability of each sampled token minus the engine's."""
    transcripts = []
    for prompt, completion in zip(prompts, done, strict=True):
        transcripts.append(Transcript())
        transcripts[-1].observe(prompt)
        transcripts[-1].sample(completion)
    batch = collate([[t] for t in transcripts], range(len(prompts)), weight=torch.ones(len(prompts)))
    (outputs,) = LocalLearner(model, Optimization(), temperature=temperature).evaluate([batch])
    assert batch.sampler_logp is not None
    return outputs.logp.double() - batch.sampler_logp
