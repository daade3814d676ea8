"""A vLLM server samples what the learner scores, with its newest weights, or it is replaced. See `make test-vllm`."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import descendants
from rl_sources import digits
from served import served
from tiny_models import make
from vllm_samples import GAP, complete, gap, needs_vllm, opened, ragged, small

import posttrain
from posttrain.core.types import Completion, Sampling, StopReason, Turn, UserError
from posttrain.engines.engine_options import EngineOptions
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.engines.pool.engine_pool import EnginePool
from posttrain.engines.pool.pool_member import MemberState
from posttrain.engines.servers.server_setup import BLOCK
from posttrain.engines.vllm.vllm_setup import PREFILL_TOKENS
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.episode import Episode
from posttrain.envs.play.player import Player
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.decoder import Decoder, causal
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(1800)  # vLLM takes half a minute to start, and minutes on a busy machine

KL = 1e-8  # nats per token


@pytest.fixture(scope="module")
def policy(tokenizer: Tokenizer) -> Decoder:
    return small(tokenizer)


@pytest.fixture(scope="module")
def engine(policy: Decoder, tokenizer: Tokenizer) -> Iterator[EnginePool]:
    with closing(opened(policy, tokenizer)) as started:
        yield started


@needs_vllm
def test_greedy_replies_equal_those_of_the_embedded_engine(
    engine: EnginePool, policy: Decoder, tokenizer: Tokenizer
) -> None:
    prompts, budgets = ragged(30)
    prompts += [[5 + i % 40 for i in range(n)] for n in (50, 63, 2, 3)]
    budgets += [Sampling(max_tokens=100)] * 4
    local = LocalEngine(policy, tokenizer, slots=8)
    plain = [Sampling(0.0, max_tokens=b.max_tokens) for b in budgets]
    texts = [c.text for c in complete(local, prompts, plain)]
    how = [
        Sampling(0.0, max_tokens=b.max_tokens, stop=(t[2:4],) if t[4:] else ())
        for b, t in zip(plain, texts, strict=True)
    ]
    reasons: set[StopReason] = set()
    for asked in (plain, how):
        ours, theirs = complete(local, prompts, asked), complete(engine, prompts, asked)
        assert theirs == ours  # tokens, log-probabilities (0), text, stop reason, version
        reasons |= {c.stop for c in theirs}
    assert reasons == {StopReason.EOS, StopReason.STOP, StopReason.LENGTH, StopReason.CONTEXT}  # all that engines give


@needs_vllm
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_equal_the_learners_within_bounds(
    engine: EnginePool, policy: Decoder, temperature: float
) -> None:
    prompts, how = ragged(60, temperature=temperature)
    found = gap(policy, prompts, complete(engine, prompts, how), temperature)
    assert len(found) > 300 and found.abs().max() < GAP and (found.expm1() - found).mean() < KL


@needs_vllm
def test_truncated_sampling_reports_the_truncated_distribution(engine: EnginePool, policy: Decoder) -> None:
    prompts, how = ragged(20, top_k=3, temperature=0.8)
    done = complete(engine, prompts, how)
    for prompt, completion in zip(prompts, done, strict=True):
        tokens = torch.tensor([*prompt, *completion.tokens])
        logits = policy(tokens, torch.arange(len(tokens)), causal) @ policy.head.weight.T / 0.8
        best, which = logits[len(prompt) - 1 : -1].topk(3)
        own = best.log_softmax(-1)[which == torch.tensor(completion.tokens)[:, None]]
        assert torch.allclose(own, torch.tensor(completion.logp), atol=GAP)


@needs_vllm
def test_reply_follows_its_seed_and_not_what_else_runs(engine: EnginePool) -> None:
    prompts, how = ragged(24)
    together, again = complete(engine, prompts, how), complete(engine, prompts, how)
    assert [c.tokens for c in together] == [c.tokens for c in again]  # bits depend on what is computed together
    alone = [complete(engine, [p], [s])[0] for p, s in zip(prompts[:6], how, strict=False)]
    assert [c.tokens for c in alone] == [c.tokens for c in together[:6]]
    other = complete(engine, prompts, [Sampling(seed=s.seed + 1, max_tokens=s.max_tokens) for s in how])
    assert sum(a.tokens != b.tokens for a, b in zip(together, other, strict=True)) > 20


@needs_vllm
def test_more_prompts_than_are_computed_at_once_are_sampled(policy: Decoder, tokenizer: Tokenizer) -> None:
    prompts = [[5 + (i + j) % 40 for j in range(45)] for i in range(64)]
    assert sum(map(len, prompts)) > PREFILL_TOKENS
    with closing(opened(policy, tokenizer, slots=64)) as engine:
        done = complete(engine, prompts, [Sampling(seed=i, max_tokens=3) for i in range(64)])
    assert gap(policy, prompts, done, 1.0).abs().max() < GAP


@needs_vllm
def test_sampling_follows_the_distribution(engine: EnginePool, policy: Decoder) -> None:
    count, prompt = 3000, [7, 9, 11]
    done = complete(engine, [prompt] * count, [Sampling(seed=i, max_tokens=1) for i in range(count)])
    expected = (policy(torch.tensor(prompt), torch.arange(3), causal)[-1] @ policy.head.weight.T).softmax(-1)
    seen = torch.bincount(torch.tensor([c.tokens[0] for c in done]), minlength=len(expected)) / count
    assert (seen - expected).abs().max() < 4 * (0.25 / count) ** 0.5


def echo(task: Any) -> Any:
    first = yield Turn(task["prompt"], max_tokens=5)
    second = yield Turn(f"<{task['id']}>", reward=0.5)
    return float(len(first) + len(second))


@needs_vllm
def test_episode_of_two_turns_is_played_as_with_the_embedded_engine(
    engine: EnginePool, policy: Decoder, tokenizer: Tokenizer
) -> None:
    episodes = [Episode({"id": str(i), "prompt": f"{i}+{i}="}, str(i), i) for i in range(7)]
    how = Sampling(0.0, max_tokens=9)
    rollouts = [
        [(r.transcripts[0].tokens, r.transcripts[0].spans, r.reward, r.stop, r.text) for r in played]
        for played in (
            Player(EnvPool(echo, 0), each, tokenizer, how, 64).play(episodes)
            for each in (engine, LocalEngine(policy, tokenizer))
        )
    ]
    assert rollouts[0] == rollouts[1]


@needs_vllm
def test_what_a_turn_continues_is_not_computed_again(tokenizer: Tokenizer) -> None:
    """vLLM keeps whole blocks: what an episode computes again is at most the rest of one in each turn."""
    context, shown, said = 8 * BLOCK, BLOCK, 30
    with closing(opened(small(tokenizer, context=context), tokenizer, slots=4)) as engine:

        def computed() -> float:
            client: Any = engine.members[0].link.wire
            content = asyncio.run_coroutine_threadsafe(client._call("GET", "/metrics"), client._loop).result().decode()
            counted = [line.split() for line in content.splitlines() if line.startswith("vllm:prefix_cache_")]
            total = {name.partition("{")[0]: float(value) for name, value in counted}
            return total["vllm:prefix_cache_queries_total"] - total["vllm:prefix_cache_hits_total"]

        def sampled(tokens: list[int], seed: int, count: int) -> Completion:
            engine.submit(0, tokens, Sampling(max_tokens=count, seed=seed), keep=True)
            done: list[Completion] = []
            while not done:
                done = engine.poll()
            return done[0]

        tokens, needed, known, began = [5 + n % 40 for n in range(2 * BLOCK)], 0, 0, computed()
        for turn in range(4):
            done = sampled(tokens, turn, said)
            needed, known = needed + len(tokens) - known, len(tokens) + len(done.tokens) - 1
            tokens = [*tokens, *done.tokens, *(5 + (n + turn) % 40 for n in range(shown))]
        assert needed <= computed() - began <= needed + 3 * BLOCK < needed * 1.9
        engine.load(small(tokenizer, context=context), 1)  # weights may have changed: nothing is kept over them
        anew = computed()
        sampled(tokens[: context // 2], 0, 2)
        assert computed() - anew >= context // 2


@needs_vllm
def test_prompts_and_temperatures_that_cannot_be_sampled_are_refused(engine: EnginePool) -> None:
    for prompt, message in (([], "empty prompt"), ([5] * 64, "no room"), ([5, 48], "token 48")):
        with pytest.raises(UserError, match=message):
            engine.submit(0, prompt, Sampling())
    with pytest.raises(UserError, match=r"at temperature 0 or 0\.01"):
        engine.submit(0, [5], Sampling(temperature=0.001))


@needs_vllm
@pytest.mark.parametrize("tied", [True, False])
def test_samples_with_the_weights_that_were_handed_over_last(tokenizer: Tokenizer, tied: bool) -> None:
    model = small(tokenizer, tied)
    prompts, how = ragged(40)
    generator = torch.Generator().manual_seed(0)
    with closing(opened(model, tokenizer)) as engine:
        for version in (0, 3, 4):
            if version:
                stale = complete(engine, prompts, how)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
                assert gap(model, prompts, stale, 1.0).abs().max() > 0.1  # the change is one that shows
                engine.load(model, version)
            done = complete(engine, prompts, how)
            assert {c.version for c in done} == {version}
            assert gap(model, prompts, done, 1.0).abs().max() < GAP


@needs_vllm
def test_hand_over_that_binds_nothing_stops_the_run(
    policy: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.mul_(1.2)
    with closing(opened(policy, tokenizer, slots=4, options=EngineOptions(restarts=0))) as engine:
        assert 0 < engine.counts()["probe_gap"] < GAP
        layout = engine.members[0].place.transport.weight_layout  # type: ignore[attr-defined]
        laid = layout.write
        monkeypatch.setattr(layout, "write", lambda weights, memory: laid(policy, memory))
        with pytest.raises(UserError, match="nats off the learner's log-probabilities.* after it loaded version 1"):
            engine.load(moved, 1)


@needs_vllm
def test_pretrained_model_says_the_same_in_both_engines(data: Path) -> None:
    folder = data / "models" / "gsm8k-5m"
    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    questions = ["Tom has 3 apples and buys 4 more.", "A train goes 60 miles in 2 hours.", "Question: 12 * 3 = "]
    prompts = [tokenizer.encode(q, start=True) for q in questions]
    greedy = [Sampling(0.0, max_tokens=40, stop=(".",)), Sampling(0.0, max_tokens=40), Sampling(0.0, max_tokens=40)]
    seeded = [Sampling(seed=i, max_tokens=80) for i in range(12)]
    with closing(opened(model, tokenizer, slots=12)) as engine:
        ours, theirs = complete(LocalEngine(model, tokenizer), prompts, greedy), complete(engine, prompts, greedy)
        assert [(c.text, c.stop) for c in theirs] == [(c.text, c.stop) for c in ours]
        found = gap(model, prompts * 4, complete(engine, prompts * 4, seeded), 1.0)
    assert found.abs().max() < GAP and (found.expm1() - found).mean() < KL
    with closing(opened(model, tokenizer, slots=12, precision="bfloat16")) as engine:
        found = gap(model, prompts * 4, complete(engine, prompts * 4, seeded), 1.0)
    assert GAP < found.abs().max() < 0.5 and (found.expm1() - found).mean() < 1e-3  # seen: 0.08 and 6e-5


@needs_vllm
def test_ten_steps_of_grpo_learn_and_log_the_mismatch(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = small(tokenizer)
    assert tokenizer.eos_id is not None
    model.eos_ids = (tokenizer.eos_id,)
    save_model(model, tmp_path / "start", tokenizer)
    tasks = [{"id": str(i), "prompt": f"{i}+1="} for i in range(6)]
    run = posttrain.rl(
        tasks, env=digits, model=str(tmp_path / "start"), out=str(tmp_path / "run"), engine="vllm", slots=64,
        algorithm="grpo", correction="truncate", kl=0.0, lr=2e-3, steps=10, prompts=6, group=16, max_tokens=8,
        quiet=True,
    )  # fmt: skip
    rows = run.metrics
    assert rows[0]["reward"] < 0.3 and rows[-1]["reward"] > 0.6
    for row in rows:
        assert row["ratio/first"] == 1.0 and row["sampler/gap/max"] < 1e-3
        assert 0.9999 < row["sampler/ess"] <= 1 + 1e-9 and row["sampler/kl"] < 1e-6


@needs_vllm
def test_through_our_server_it_samples_what_it_samples_here(engine: EnginePool, tokenizer: Tokenizer) -> None:
    prompts, how = ragged(6)
    own = [complete(engine, [prompt], [sampling])[0] for prompt, sampling in zip(prompts, how, strict=True)]
    with served(engine, tokenizer, 64) as server:
        for prompt, sampling, completion in zip(prompts, how, own, strict=True):
            choice = server.sampled(prompt, seed=sampling.seed, max_tokens=sampling.max_tokens)
            assert choice["token_ids"] == list(completion.tokens)
            said = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            assert said == pytest.approx(list(completion.logp), abs=GAP)
            assert choice["weight_versions"][0]["version"] == str(engine.version)


@needs_vllm
def test_a_cancelled_request_is_not_answered_and_leaves_the_engine_free(engine: EnginePool) -> None:
    for id in range(3):
        engine.submit(id, [5, 6 + id], Sampling(seed=1, max_tokens=40))
    engine.cancel(2)  # which no server has got yet
    engine.poll()
    engine.cancel(0)
    done: list[Completion] = []
    while not done:
        done = engine.poll()
    assert [completion.id for completion in done] == [1]
    again = Sampling(0.0, max_tokens=5)
    assert [c.id for c in complete(engine, [[5, 6]] * 4, [again] * 4)] == [0, 1, 2, 3]


@needs_vllm
def test_a_pool_of_two_of_which_one_is_killed_and_one_hangs_samples_what_the_learner_scores(
    policy: Decoder, tokenizer: Tokenizer
) -> None:
    prompts, how = ragged(60)
    said: list[str] = []
    with closing(opened(policy, tokenizer, options=EngineOptions(replicas=2, restarts=2), seconds=30.0)) as pool:
        pool.say = said.append
        pool.load(policy, 3)
        assert not pool.batch_invariant and pool.counts()["probe_gap"] < GAP
        for number, kind in enumerate((signal.SIGKILL, signal.SIGSTOP)):
            for id, (prompt, sampling) in enumerate(zip(prompts, how, strict=True)):
                pool.submit(id, prompt, sampling)
            done: list[Completion] = []
            while not done:
                done = pool.poll()
            victim = next(member for member in pool.members if member.requests)
            keeper = victim.link.process.child.process.pid  # type: ignore[attr-defined]
            os.kill(descendants(keeper)[-1 if number else 0], kind)  # the server, or the engine behind it
            while len(done) < len(prompts):
                done += pool.poll()
            done.sort(key=lambda completion: completion.id)
            assert [completion.id for completion in done] == list(range(60)) and {c.version for c in done} == {3}
            assert gap(policy, prompts, done, 1.0).abs().max() < GAP
            assert len(said) == number + 1 and pool.counts()["resubmitted"] > 0
            end = time.monotonic() + 1500
            while any(member.state is not MemberState.READY for member in pool.members):
                pool.poll()
                assert time.monotonic() < end
        assert "it sent nothing for 30 s" in said[1]
        greedy = [Sampling(0.0, max_tokens=9)] * 60
        alone = LocalEngine(policy, tokenizer, slots=8)
        assert [c.text for c in complete(pool, prompts, greedy)] == [c.text for c in complete(alone, prompts, greedy)]


@needs_vllm
@pytest.mark.parametrize("kind", ["qwen3_moe", "gemma3_text", "gpt2"])
def test_models_of_transformers_are_sampled_with_their_newest_weights(
    kind: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    sizes = {"vocab_size": tokenizer.vocab_size, "hidden_size": 64, "head_dim": 32, "max_position_embeddings": 64}
    heads = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "moe_intermediate_size": 32,
        "tie_word_embeddings": True,
    }
    model = load_model(make(kind, tmp_path, **sizes, **heads))
    prompts, how = ragged(12)
    with closing(opened(model, tokenizer)) as pool:
        for version in range(1, 6):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(
                        0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version))
                    )
            pool.load(model, version)
            assert pool.counts()["probe_gap"] < 0.01
        done = complete(pool, prompts, how)
        assert {c.version for c in done} == {5} and gap(model, prompts, done, 1.0).abs().max() < 1e-3
