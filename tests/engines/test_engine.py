"""The embedded engine samples exactly what the learner scores, whatever else is in the batch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny
from sampled import complete, ragged
from tiny_models import make, opened
from trees import drawn
from update_cases import WORDS

from posttrain.core.transcripts import Transcript
from posttrain.core.types import Sampling, StopReason, UserError
from posttrain.engines.local.embedded import embedded
from posttrain.engines.local.engine_weights import own_copy
from posttrain.engines.local.local_engine import POLL_STEPS, LocalEngine
from posttrain.engines.local.prompt_layout import BLOCK, PromptBlocks
from posttrain.engines.local.running_batch import RunningBatch
from posttrain.engines.local.sampler import sample, uniform
from posttrain.engines.local.uncached_engine import UncachedEngine
from posttrain.engines.request import Request
from posttrain.engines.request import complete as ended
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.adapters.lora import LoRA, attach, begin, is_adapted
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.decoder import Decoder, causal
from posttrain.models.native.kernels import binder, build
from posttrain.models.native.merged_weights import copied_bytes
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.sources.packing import collate


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_engine_log_probabilities_equal_the_learners(model: Decoder, tokenizer: Tokenizer, temperature: float) -> None:
    prompts, how = ragged(30, temperature=temperature)
    done = complete(LocalEngine(model, tokenizer, slots=8), prompts, how)
    transcripts = []
    for i, prompt in enumerate(prompts):
        transcripts.append(Transcript())
        transcripts[i].observe(prompt)
        transcripts[i].sample(done[i])
    learner = LocalLearner(model, Optimization(), temperature=temperature)
    batch = collate([[t] for t in transcripts], range(len(prompts)), weight=torch.ones(len(prompts)))
    (outputs,) = learner.evaluate([batch])
    assert batch.sampler_logp is not None
    assert (outputs.logp - batch.sampler_logp).abs().max() < 1e-5
    assert len({len(c.tokens) for c in done.values()}) > 5, "lengths are to be ragged"


def test_engine_agrees_with_the_learner_on_a_pretrained_model(data) -> None:  # type: ignore[no-untyped-def]
    folder = data / "models" / "stories260K"
    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    prompt = tokenizer.encode("Once upon a time", start=True)
    done = complete(
        LocalEngine(model, tokenizer, slots=4), [prompt] * 6, [Sampling(seed=i, max_tokens=60) for i in range(6)]
    )
    for completion in done.values():
        tokens = torch.tensor([*prompt, *completion.tokens])
        hidden = model(tokens, torch.arange(len(tokens)), causal)
        logp = (hidden @ model.head.weight.T).log_softmax(-1)[len(prompt) - 1 : -1]
        own = logp.gather(-1, torch.tensor(completion.tokens)[:, None]).squeeze(-1)
        assert torch.allclose(own, torch.tensor(completion.logp), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slots", [1, 3, 64])
def test_rollout_does_not_depend_on_what_else_is_in_the_batch(model: Decoder, tokenizer: Tokenizer, slots: int) -> None:
    prompts, how = ragged(24)
    alone = [complete(LocalEngine(model, tokenizer), [p], [s])[0] for p, s in zip(prompts, how, strict=True)]
    together = complete(LocalEngine(model, tokenizer, slots=slots), prompts, how)
    backwards = complete(LocalEngine(model, tokenizer, slots=slots), prompts[::-1], how[::-1])
    for i, single in enumerate(alone):
        assert together[i].tokens == single.tokens == backwards[len(alone) - 1 - i].tokens
        assert together[i].stop == single.stop
        assert torch.allclose(torch.tensor(together[i].logp), torch.tensor(single.logp), atol=1e-5)


@pytest.mark.skipif(binder.decode() is None, reason="needs a C compiler")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_no_bit_of_a_compiled_reply_depends_on_its_company_or_when_it_arrives(
    tokenizer: Tokenizer, precision: str
) -> None:
    model = tiny(tokenizer, context=400)
    prompts, how = ragged(24)
    prompts = [prompt * (1 + 14 * (i % 5 == 0)) for i, prompt in enumerate(prompts)]  # some longer than a block
    beginning = [5 + i % 11 for i in range(2 * BLOCK + 7)]
    prompts = [beginning[: len(beginning) - i % 3] + p if i % 4 == 1 else p for i, p in enumerate(prompts)]
    prompts[2], prompts[6] = beginning[:BLOCK], beginning[: 2 * BLOCK]  # whole blocks
    ways: dict[int, dict[str, float]] = {0: {"top_p": 0.9}, 2: {"epsilon": 0.2}}
    how = [replace(s, **ways.get(i % 4, {})) for i, s in enumerate(how)]  # type: ignore[arg-type]

    def new(slots: int = 256) -> LocalEngine:
        return LocalEngine(model, tokenizer, slots, precision)

    if not new().batch_invariant:
        pytest.skip("this processor has no products in bfloat16")
    alone = [complete(new(), [p], [s])[0] for p, s in zip(prompts, how, strict=True)]
    late, arrived = new(7), {}
    for i, (prompt, sampling) in enumerate(zip(prompts, how, strict=True)):
        late.submit(i, prompt, sampling)
        for _ in range(i % 3):
            arrived |= {c.id: c for c in late.poll()}
    while late.running or late.waiting:
        arrived |= {c.id: c for c in late.poll()}
    together = complete(new(), prompts, how)
    for i, single in enumerate(alone):
        for other in (together[i], arrived[i]):
            assert other.tokens == single.tokens and other.logp == single.logp and other.stop == single.stop


def test_polling_returns_after_a_few_steps_though_nothing_has_finished(model: Decoder, tokenizer: Tokenizer) -> None:
    engine = LocalEngine(model, tokenizer)
    engine.submit(0, [5, 6, 7], Sampling(max_tokens=40, seed=next(_unending(model, tokenizer))))
    polls = [engine.poll() for _ in range(40 // POLL_STEPS + 1)]
    assert polls[0] == [] and sum(map(len, polls)) == 1


def _unending(model: Decoder, tokenizer: Tokenizer) -> Iterator[int]:
    """Seeds of replies of 40 tokens."""
    for seed in range(1000):
        if (
            len(complete(LocalEngine(model, tokenizer), [[5, 6, 7]], [Sampling(max_tokens=40, seed=seed)])[0].tokens)
            == 40
        ):
            yield seed


def test_prompt_of_a_group_is_computed_once(model: Decoder, tokenizer: Tokenizer) -> None:
    engine, fed = LocalEngine(model, tokenizer, slots=4), []
    forward = model.forward

    def counting(tokens, position, attend, at=None):  # type: ignore[no-untyped-def]
        fed.append(tokens.tolist())
        return forward(tokens, position, attend, at)

    model.forward = counting  # type: ignore[method-assign]
    prompt = list(range(5, 25))
    complete(engine, [prompt] * 12, [Sampling(seed=i, max_tokens=2 + i % 3) for i in range(12)])
    assert sum(tokens[: len(prompt)] == prompt for tokens in fed) == 1


def test_whole_blocks_that_prompts_begin_with_are_computed_once_whatever_their_number(tokenizer: Tokenizer) -> None:
    model = tiny(tokenizer, context=160)
    beginning = [5 + i % 11 for i in range(BLOCK + 3)]
    prompts = [[*beginning, 20 + i] for i in range(9)]
    engine = LocalEngine(model, tokenizer)
    complete(engine, prompts, [Sampling(seed=i, max_tokens=1) for i in range(9)])
    assert engine.computed == BLOCK + 9 * 4


@pytest.mark.parametrize("joined", [False, True])
def test_prompts_laid_as_a_tree_of_blocks_have_the_hidden_states_of_each_alone(joined: bool) -> None:
    model = tiny(WORDS, dtype=torch.float64, context=400)
    rng = random.Random(3)
    trunk = drawn(rng, 3 * BLOCK + 5)
    prompts = {tuple(trunk[: rng.randrange(1, len(trunk))] + drawn(rng, rng.randrange(1, 90))) for _ in range(7)}
    prompts |= {tuple(trunk), tuple(trunk[:BLOCK]), tuple(trunk[: 2 * BLOCK]), tuple(drawn(rng, 150))}
    blocks = PromptBlocks()
    for prompt in sorted(prompts):
        before, missing = blocks.tokens, blocks.missing(prompt)
        blocks.add(prompt)
        assert blocks.tokens == before + missing and blocks.missing(prompt) == 0
    laid = blocks.lay(torch.device("cpu"), joined)
    assert len(laid.layout.tokens) == blocks.tokens < sum(map(len, prompts))
    every = torch.arange(blocks.tokens)
    hidden = model.hidden(laid.layout, every)
    for i, prompt in enumerate(blocks.prompts):
        assert laid.layout.tokens[laid.places(i)].tolist() == list(prompt)
        alone = model(torch.tensor(prompt), torch.arange(len(prompt)), causal)
        assert (hidden[laid.places(i)] - alone).abs().max() < 1e-10
        assert torch.equal(hidden[laid.last(i)], hidden[laid.places(i)][-1])
    if joined:  # a prompt that shares nothing is one segment, of whatever length
        assert len(laid.paths[next(i for i, p in enumerate(blocks.prompts) if p[0] != trunk[0])]) == 1


def test_sampling_follows_the_distribution(model: Decoder, tokenizer: Tokenizer) -> None:
    count, prompt = 4000, [7, 9, 11]
    done = complete(
        LocalEngine(model, tokenizer, slots=512),
        [prompt] * count,
        [Sampling(seed=i, max_tokens=1) for i in range(count)],
    )
    hidden = model(torch.tensor(prompt), torch.arange(3), causal)[-1]
    expected = (hidden @ model.head.weight.T).softmax(-1)
    seen = torch.bincount(torch.tensor([c.tokens[0] for c in done.values()]), minlength=len(expected)) / count
    assert (seen - expected).abs().max() < 4 * (0.25 / count) ** 0.5


def test_truncated_sampling_reports_the_truncated_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).repeat(3, 1)
    temperature, draw = torch.tensor([1.0, 1.0, 0.5]), torch.tensor([0.99, 0.99, 0.0])
    token, logp = sample(logits, draw, temperature, torch.tensor([0.6, 1.0, 1.0]), torch.tensor([0, 2, 0]))
    assert token.tolist() == [0, 1, 0]
    assert logp[0] == 0.0  # the nucleus of 0.6 is one token
    assert torch.isclose(logp[1], torch.tensor([2.0, 1.0]).log_softmax(-1)[1])
    assert torch.isclose(logp[2], (logits[2] / 0.5).log_softmax(-1)[0])


def test_top_k_alone_leaves_the_k_likeliest_tokens() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(100, -1)
    draw = (torch.arange(100, dtype=torch.float32) + 0.5) / 100
    token, logp = sample(logits, draw, None, None, torch.tensor([2]).expand(100))
    assert token.bincount(minlength=4).tolist() == pytest.approx([0, 400 / 7, 0, 300 / 7], abs=1)
    expected = torch.tensor([0.0, 4 / 7, 0.0, 3 / 7])[token]
    assert torch.allclose(logp.exp(), expected, atol=1e-6)


def test_mass_of_top_p_is_counted_among_the_top_k() -> None:
    """Of 0.4, 0.3, 0.2, 0.1 the first three have shares 4/9, 3/9, 2/9: two of them make up 0.75, of all it takes three."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    draw = torch.tensor([1e-6])
    for top_k, kept in ((3, 0.7), (0, 0.9), (1, 0.4)):
        token, logp = sample(logits, draw, None, torch.tensor([0.75]), torch.tensor([top_k]))
        assert token.item() == 0 and logp.item() == pytest.approx(math.log(0.4 / kept), abs=1e-6)


def test_greedy_takes_the_likeliest_token() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    token, logp = sample(logits, torch.tensor([0.999]), torch.tensor([0.0]), greedy=torch.tensor([True]))
    assert token.item() == 1 and logp.item() == 0.0


def test_a_draw_never_gives_a_token_without_mass() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 0.0, float("-inf")]]).repeat(2, 1)
    token, _ = sample(logits, torch.tensor([0.5, 1.0]))
    assert token.tolist() == [2, 2]


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1000])
def test_sampling_inverts_the_cumulative_distribution(vocab: int) -> None:
    count = 3000
    logits = (4 * torch.randn(vocab, generator=torch.Generator().manual_seed(vocab))).masked_fill(
        torch.arange(vocab) % 3 == 1, float("-inf")
    )
    draw = uniform(torch.arange(count), torch.zeros(count, dtype=torch.int64))
    draw[:2] = torch.tensor([1.0, 1e-30])
    token, logp = sample(logits.repeat(count, 1), draw)
    probability = logits.double().softmax(-1)
    running = probability.cumsum(-1)
    assert torch.isfinite(logits[token]).all()
    assert torch.allclose(logp.double(), probability.log()[token], atol=1e-5)
    assert (draw < running[token] + 1e-6).all() and (draw > running[token] - probability[token] - 1e-6).all()


@pytest.mark.parametrize("slots", [3, 5, 64])
def test_requests_of_few_and_many_prompts_see_their_own_prompt_and_tokens(
    model: Decoder, tokenizer: Tokenizer, slots: int
) -> None:
    chance = random.Random(slots)
    prompts = [[chance.randrange(3, model.config.vocab) for _ in range(2 + 5 * n)] for n in range(6)]
    asked = [prompts[chance.choice([0, 0, 0, 1, 2, 3, 4, 5])] for _ in range(40)]
    engine = LocalEngine(model, tokenizer, slots=slots)
    done = complete(engine, asked, [Sampling(seed=i, max_tokens=1 + i * 7 % 19) for i in range(len(asked))])
    for number, prompt in enumerate(asked):
        tokens = torch.tensor([*prompt, *done[number].tokens])
        with torch.no_grad():
            logits = model(tokens, torch.arange(len(tokens)), causal) @ model.head.weight.T
        at = torch.arange(len(prompt), len(tokens))
        expected = logits.log_softmax(-1)[at - 1, tokens[at]]
        assert torch.allclose(torch.tensor(done[number].logp), expected, atol=1e-5)


def test_uniform_numbers_are_uniform_and_independent() -> None:
    seed = torch.arange(20000) * 7919
    first, second = (
        uniform(seed, torch.zeros(20000, dtype=torch.int64)),
        uniform(seed, torch.ones(20000, dtype=torch.int64)),
    )
    assert first.min() > 0 and first.max() <= 1
    assert abs(first.mean() - 0.5) < 0.01 and abs(first.var() - 1 / 12) < 0.003
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.03
    assert abs(torch.corrcoef(torch.stack([first[:-1], first[1:]]))[0, 1]) < 0.03


def test_every_end_id_ends_a_reply_and_stays_in_it(model: Decoder, tokenizer: Tokenizer) -> None:
    model.eos_ids = (20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30)
    done = complete(LocalEngine(model, tokenizer), [[7, 8]] * 40, [Sampling(seed=i, max_tokens=40) for i in range(40)])
    ended = [c for c in done.values() if c.stop is StopReason.EOS]
    assert len({c.tokens[-1] for c in ended}) > 3
    assert all(c.tokens[-1] in model.eos_ids for c in ended)
    assert all(not set(c.tokens[:-1]) & set(model.eos_ids) for c in done.values())
    assert all(tokenizer.decode(c.tokens[:-1]) == c.text for c in ended)


def test_reply_ends_with_its_stop_string_and_says_so(model: Decoder, tokenizer: Tokenizer) -> None:
    model.eos_ids = (1,)
    stops = tuple("0123456789")
    done = complete(
        LocalEngine(model, tokenizer, slots=5),
        [[7, 8]] * 20,
        [Sampling(seed=i, max_tokens=50, stop=stops) for i in range(20)],
    )
    stopped = [c for c in done.values() if c.stop is StopReason.STOP]
    assert stopped
    for completion in stopped:
        assert completion.text.endswith(stops) and sum(completion.text.count(s) for s in stops) == 1


def test_a_stop_string_is_looked_for_in_what_was_said_and_in_no_token_twice(tokenizer: Tokenizer) -> None:
    model = tiny(tokenizer)
    model.eos_ids = (10**6,)  # never sampled
    free = complete(LocalEngine(model, tokenizer), [[7, 8]] * 30, [Sampling(seed=i, max_tokens=6) for i in range(30)])
    doubled = {i: tokenizer.decode(c.tokens[:1]) * 2 for i, c in free.items()}
    seen = [i for i, c in free.items() if doubled[i] and doubled[i] not in c.text and doubled[i].isprintable()]
    sampling = [Sampling(seed=i, max_tokens=6, stop=(doubled[i],)) for i in seen]
    done = complete(LocalEngine(model, tokenizer), [[7, 8]] * len(seen), sampling)
    assert len(seen) > 10
    assert [done[n].tokens for n in range(len(seen))] == [free[i].tokens for i in seen]


def test_truncation_is_told_apart_by_budget_and_context(tokenizer: Tokenizer) -> None:
    model = tiny(tokenizer, context=12)
    model.eos_ids = (10**6,)  # never sampled
    sampling = [Sampling(seed=1, max_tokens=4), Sampling(seed=1, max_tokens=400)]
    done = complete(LocalEngine(model, tokenizer), [[7] * 5, [7] * 5], sampling)
    assert [done[0].stop, len(done[0].tokens)] == [StopReason.LENGTH, 4]
    assert [done[1].stop, len(done[1].tokens)] == [StopReason.CONTEXT, 7]


def test_prompt_longer_than_the_context_is_refused_in_one_line(model: Decoder, tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="64") as error:
        LocalEngine(model, tokenizer).submit(0, [5] * 64, Sampling())
    assert "\n" not in str(error.value)


def test_completion_echoes_the_version_of_its_weights(model: Decoder, tokenizer: Tokenizer) -> None:
    engine = LocalEngine(model, tokenizer)
    engine.load(model, 7)
    assert complete(engine, [[5, 6]], [Sampling(max_tokens=2)])[0].version == 7
    with pytest.raises(AssertionError):
        engine.load(tiny(tokenizer), 8)


@pytest.mark.parametrize("kind", [LocalEngine, UncachedEngine])
def test_an_engine_with_weights_of_its_own_samples_with_those_that_were_loaded_last(
    model: Decoder, tokenizer: Tokenizer, kind: type[LocalEngine] | type[UncachedEngine]
) -> None:
    how = [Sampling(seed=3, max_tokens=12)]
    engine = embedded(model, tokenizer, own=True) if kind is LocalEngine else kind(own_copy(model), tokenizer, own=True)
    before = complete(kind(model, tokenizer), [[5, 6, 7]], how)[0]
    with torch.no_grad():
        model.layers[0].down.weight.mul_(3)
    assert complete(engine, [[5, 6, 7]], how)[0].logp == before.logp
    engine.load(model, 1)
    kept = model.layers[0].down.weight.clone()
    after = complete(engine, [[5, 6, 7]], how)[0]
    assert (
        after.logp == complete(kind(model, tokenizer), [[5, 6, 7]], how)[0].logp != before.logp and after.version == 1
    )
    assert torch.equal(model.layers[0].down.weight, kept)


@pytest.mark.parametrize("kind", ["native", "adapted", "quantized", "granite", "qwen3_moe"])
def test_an_engines_own_matrices_are_held_as_products_read_them_and_give_the_same_bits(
    kind: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model: Any = tiny(tokenizer)
    if kind in ("adapted", "quantized"):
        attach(model, LoRA(2, 4.0, quantize="int8" if kind == "quantized" else ""), lambda name: True)
        begin(model, 0)
    elif kind != "native":
        model = opened(make(kind, tmp_path, vocab_size=tokenizer.vocab_size))
    prompts, how = ragged(6)
    wide: Any = embedded(own_copy(model), tokenizer, precision="bfloat16", filled=True)
    narrow: Any = embedded(model, tokenizer, precision="bfloat16", own=True)
    engines = wide, narrow, *([] if is_adapted(model) else [embedded(model, tokenizer, precision="bfloat16")])
    for version in range(2):
        first, *others = (complete(engine, prompts, how) for engine in engines)
        assert all(other == first for other in others)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.1)
        for engine in engines:
            engine.load(model, version)
    layers = {p: p.dtype for p in narrow.model.decoder.layers.parameters()} if kind == "native" else {}
    assert {p.dtype for p in layers if p.shape[0] > 2 and p.ndim == 2} <= {torch.bfloat16}
    sizes = [sum(p.nbytes for p in engine.model.parameters()) for engine in (wide, narrow)]
    assert sizes == [copied_bytes(model), copied_bytes(model, narrow=True)] and sizes[1] < 0.9 * sizes[0]
    assert narrow.model.head.dtype == torch.float32


def test_engine_uses_the_weights_of_the_learner_at_once(model: Decoder, tokenizer: Tokenizer) -> None:
    engine = LocalEngine(model, tokenizer)
    before = complete(engine, [[5, 6, 7]], [Sampling(seed=3, max_tokens=12)])[0]
    with torch.no_grad():
        model.layers[0].down.weight.mul_(3)
    engine.load(model, 1)
    after = complete(engine, [[5, 6, 7]], [Sampling(seed=3, max_tokens=12)])[0]
    fresh = complete(LocalEngine(model, tokenizer), [[5, 6, 7]], [Sampling(seed=3, max_tokens=12)])[0]
    assert after.tokens != before.tokens and replace(after, version=0) == fresh


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_engine_runs_in_every_precision(model: Decoder, tokenizer: Tokenizer, precision: str) -> None:
    prompts, how = ragged(6)
    assert len(complete(LocalEngine(model, tokenizer, precision=precision), prompts, how)) == 6


def test_stop_string_behind_bytes_that_are_no_character_still_ends_the_reply(data, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    folder = data / "models" / "stories260K"
    model, tokenizer = load_model(folder), Tokenizer.load(folder)
    script = [5] * 2 + [0xE2 + 3, *[0x41 + 3] * 6, 0x0A + 3]  # byte tokens stand at 3 + byte
    assert tokenizer.decode(script[-1:]) == "\n" and not tokenizer.decode(script).endswith("A\n")
    drawn = iter(script)
    monkeypatch.setattr(
        "posttrain.engines.local.running_batch.sample", lambda *_: (torch.tensor([next(drawn)]), torch.tensor([0.0]))
    )
    build.use(False)  # the draws are scripted
    engine = LocalEngine(model, tokenizer)
    build.use(True)
    (done,) = complete(engine, [[1, 2]], [Sampling(max_tokens=50, stop=("\n",))]).values()
    assert list(done.tokens) == script and done.stop is StopReason.STOP


def test_prompt_of_another_vocabulary_is_refused_in_one_line(model: Decoder, tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=f"token 999, the model's vocabulary has {tokenizer.vocab_size}"):
        LocalEngine(model, tokenizer).submit(0, [5, 999], Sampling())


def test_prompt_may_come_up_to_the_borders_of_vocabulary_and_context() -> None:
    sampling = Sampling(max_tokens=9)
    fits = Request(0, (5, 63), sampling)
    assert fits.check(3, 64) is fits and fits.budget(3) == 1 and fits.budget(100) == 9
    for prompt, context, told in (((5, 64), 3, "token 64"), ((5, 63), 2, "2 tokens"), ((), 3, "empty prompt")):
        with pytest.raises(UserError, match=told):
            Request(0, prompt, sampling).check(context, 64)


def test_reply_is_cut_behind_the_stop_string_that_ends_first(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("12ab3")
    for stop, text in ((("b3", "ab"), "12ab"), (("ab", "2a"), "12a"), (("z",), "12ab3"), (("3", "2"), "12")):
        request = Request(0, (5,), Sampling(max_tokens=9, stop=stop))
        done = ended(request, tokens, [0.0] * 5, stopped=True, eos_ids=[0], tokenizer=tokenizer, version=3)
        assert done.text == text and done.stop is StopReason.STOP and done.version == 3


def test_draws_are_never_zero() -> None:
    assert uniform(torch.arange(200_000), torch.zeros(200_000, dtype=torch.int64)).min() > 0


def test_what_requests_ask_of_sampling_is_forgotten_when_they_end() -> None:
    rows = RunningBatch(torch.device("cpu"))
    asked = [{}, {"top_p": 0.9}, {"top_k": 3, "temperature": 0.0}, {"temperature": 0.5}, {}]
    rows.append([Request(i, (5,), Sampling(**how)) for i, how in enumerate(asked)], 64, {})

    def noted() -> tuple[object, ...]:
        slots = None if rows.filtered_slots is None else rows.filtered_slots.tolist()
        return *rows.needs[:4], slots

    assert noted() == (True, True, True, True, [1, 2]) and rows.filtered.tolist() == [False, True, True, False, False]
    rows.keep(4, [4], [2])  # slot 2 ends, slot 4 takes its place
    assert noted() == (True, False, True, False, [1]) and rows.filtered[:4].tolist() == [False, True, False, False]
    rows.keep(3, [3], [1])
    assert noted() == (True, False, False, False, None)
    rows.keep(1, [], [])
    assert noted() == (False, False, False, False, None)
    rows.append([Request(9, (5,), Sampling(top_k=2))], 64, {})
    assert noted() == (False, False, False, True, [1])


def test_greedy_requests_take_the_first_of_equal_tokens_whatever_they_draw() -> None:
    rows = RunningBatch(torch.device("cpu"))
    rows.append([Request(i, (5,), Sampling(temperature=0.0 if i < 9 else 1.0, seed=i)) for i in range(18)], 64, {})
    token, logp = rows.sampled(torch.zeros(18, 4), slice(0, 18), lambda: pytest.fail("none explores"))
    assert token[:9].tolist() == [0] * 9 and logp[:9].tolist() == [0.0] * 9
    assert len(set(token[9:].tolist())) > 1 and torch.allclose(logp[9:], torch.tensor(0.25).log())


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_probabilities_that_are_no_numbers_are_told_in_one_line(tokenizer: Tokenizer, weight: float) -> None:
    model = tiny(tokenizer)
    with torch.no_grad():
        model.head.weight.mul_(weight)
    for sampling in (Sampling(max_tokens=3), Sampling(max_tokens=3, top_k=5), Sampling(temperature=0.7, max_tokens=3)):
        engine = LocalEngine(model, tokenizer)
        engine.submit(0, tokenizer.encode("1+2="), sampling)
        with pytest.raises(UserError, match="probabilities are not finite"):
            for _ in range(4):
                engine.poll()


def test_every_setting_of_a_request_moves_with_it() -> None:
    rows = RunningBatch(torch.device("cpu"))
    asked: list[dict[str, Any]] = [{}, {"top_k": 7, "top_p": 0.5, "temperature": 0.3, "seed": 9, "max_tokens": 5}]
    rows.append([Request(i, (5,) * (i + 1), Sampling(**how)) for i, how in enumerate(asked)], 64, {})
    columns = {name: value for name, value in vars(rows).items() if isinstance(value, torch.Tensor) and name != "slot"}
    names = [name for name, value in columns.items() if value.shape[:1] == (2,)]
    assert {"top_k", "top_p", "temperature", "seed", "count"} <= set(names)
    moved = {name: getattr(rows, name)[1].tolist() for name in names}
    rows.keep(1, [1], [0])
    assert {name: getattr(rows, name)[0].tolist() for name in names} == moved and rows.top_k[0] == 7


def test_tokens_of_a_reply_that_goes_on_take_their_share_of_the_context() -> None:
    request = Request(0, (1, 2, 3), Sampling(max_tokens=50), own=(4, 5))
    assert request.given == 5 and request.budget(12) == 7
    with pytest.raises(UserError, match="a prompt of 5 tokens"):
        request.check(5, 10)
