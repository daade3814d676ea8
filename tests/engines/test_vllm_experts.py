"""vLLM returns the experts of its tokens, and a run replays them. See `make test-vllm`.

On a processor its second model runner works in Triton's interpreter (`interpreted_triton`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interpreted_triton import install
from rl_sources import digits
from tiny_models import make
from vllm_samples import complete, gap, needs_vllm, opened, ragged

import posttrain
from posttrain.core.batch import Layout
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Completion, Sampling, UserError
from posttrain.engines.engine_options import EngineOptions
from posttrain.engines.pool.engine_pool import EnginePool
from posttrain.engines.servers.server_setup import BLOCK
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.hf.backed import Backed
from posttrain.models.hf.experts import watching
from posttrain.models.hf.transformers_folder import replay_routing
from posttrain.models.tokenizer.tokenizer import Tokenizer

pytestmark = [pytest.mark.timeout(1800), needs_vllm]

CONTEXT = 4 * BLOCK
SIZES: dict[str, Any] = {
    "hidden_size": 64, "head_dim": 32, "max_position_embeddings": CONTEXT, "num_attention_heads": 2,
    "num_key_value_heads": 1, "moe_intermediate_size": 32, "num_hidden_layers": 3, "mlp_only_layers": [0],
}  # fmt: skip
"""The first layer has no router."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    made = make("qwen3_moe", tmp_path_factory.mktemp("mixture"), vocab_size=tokenizer.vocab_size, **SIZES)
    tokenizer.save(made)
    return made


@pytest.fixture(scope="module", autouse=True)
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        install(tmp_path_factory.mktemp("triton"), patch)
        yield


@pytest.fixture(scope="module")
def policy(folder: Path) -> Backed:
    model: Any = load_model(folder)
    replay_routing(model)
    return model  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def engine(policy: Backed, tokenizer: Tokenizer) -> Iterator[EnginePool]:
    with closing(opened(policy, tokenizer)) as started:
        yield started


def routed(model: Backed, transcript: Transcript) -> np.ndarray:
    """The experts [L, M, k] of a transcript's tokens that the learner's routers choose."""
    replays, model.replays = model.replays, False
    place = torch.arange(len(transcript))
    layout = Layout(torch.tensor(transcript.tokens), place, (0,), (len(transcript),), (-1,))
    with torch.no_grad(), watching(model) as found:
        model.hidden(layout, place)
    model.replays = replays
    return found.taken[0].numpy()


def returned(transcript: Transcript) -> np.ndarray:
    """Return the experts [L, M, k] that the engine returned for a transcript's tokens."""
    return np.concatenate([span.experts for span in transcript.spans if span.experts is not None])


def test_experts_of_prompts_and_replies_are_those_that_the_learner_computes(engine: EnginePool, policy: Backed) -> None:
    prompts, how = ragged(40)
    done = complete(engine, prompts, how)
    assert gap(policy, prompts, done, 1.0).abs().max() < 1e-3  # type: ignore[arg-type]
    same = total = 0
    for prompt, completion in zip(prompts, done, strict=True):
        transcript = Transcript()
        transcript.observe(prompt)
        transcript.sample(completion)
        own, theirs = np.sort(routed(policy, transcript), -1), np.sort(returned(transcript), -1)
        assert own.shape == theirs.shape == (len(transcript), 2, 2)
        assert (theirs[-1] == -1).all(), "nothing was sampled behind the last token"
        same += int((own[:-1] == theirs[:-1]).all(-1).sum())
        total += 2 * (len(transcript) - 1)
    print(f"{same} of {total} experts")
    assert total > 1000 and same > 0.999 * total, f"{same} of {total}"


def test_a_later_turn_has_the_experts_of_tokens_whose_keys_and_values_are_cached(
    engine: EnginePool, policy: Backed
) -> None:
    transcript = Transcript()
    transcript.observe([5 + n % 40 for n in range(BLOCK + 30)])
    for turn in range(2):
        engine.submit(0, transcript.tokens, Sampling(max_tokens=9, seed=turn), keep=True)
        done: list[Completion] = []
        while not done:
            done = engine.poll()
        transcript.sample(done[0])
        transcript.observe([5 + (n + turn) % 40 for n in range(40)] if not turn else ())
    client: Any = engine.members[0].link.wire
    metrics = asyncio.run_coroutine_threadsafe(client._call("GET", "/metrics"), client._loop).result().decode()
    [hits] = [line for line in metrics.splitlines() if line.startswith("vllm:prefix_cache_hits_total")]
    assert float(hits.split()[-1]) >= BLOCK, "the second turn does not compute the first block of its prompt again"
    own, theirs = np.sort(routed(policy, transcript), -1), np.sort(returned(transcript), -1)
    assert (theirs[:-1] >= 0).all() and (own[:-1] == theirs[:-1]).mean() > 0.999


def test_a_server_of_a_processor_that_cannot_return_experts_is_refused(
    policy: Backed, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    with pytest.raises(UserError, match="vLLM returns experts only on GPUs: leave out --routing-replay"):
        opened(policy, tokenizer, options=EngineOptions(restarts=0))


def test_grpo_replays_the_experts_that_vllm_returns(folder: Path, tmp_path: Path) -> None:
    tasks = [{"id": str(i), "prompt": f"{i}+1="} for i in range(6)]
    run = posttrain.rl(
        tasks, env=digits, model=str(folder), out=str(tmp_path / "run"), engine="vllm", slots=16, routing_replay=True,
        algorithm="grpo", kl=0.0, lr=5e-3, steps=2, prompts=3, group=4, max_tokens=8, minibatches=2, quiet=True,
    )  # fmt: skip
    for row in run.metrics:
        assert row["sampler/gap/max"] < 1e-3 and row["routing/moved"] < 0.5
    assert any(row["routing/moved"] > 0 for row in run.metrics), (
        "in the second update the routers would choose other experts than the engine recorded"
    )
