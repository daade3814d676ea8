"""A request goes on from where another one ended: only what is new is computed, and no bit tells whether it was kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from conftest import tiny
from environments import asking
from episodes import episodes, said

from posttrain.core.protocols import Engine
from posttrain.core.transcripts import Transcript
from posttrain.core.types import Completion, Sampling, UserError
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.engines.local.prefix_cache import KEPT_BYTES
from posttrain.engines.local.prompt_layout import BLOCK
from posttrain.engines.local.uncached_engine import UncachedEngine
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.player import Player
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.native.decoder import Decoder, new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.kernels import binder, build
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.sources.packing import collate

CONTEXT = 400
GROUPS = ((5, 6, 7), tuple(range(8, 40)))  # prompts, of two episodes each and one
MEMBERS = (2, 1)


@pytest.fixture(params=["compiled", "torch"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    build.use(request.param == "compiled")
    if request.param == "compiled" and binder.decode() is None:
        pytest.skip("needs a C compiler")
    yield request.param
    build.use(True)


@dataclass
class Talk:
    """Episodes of several turns: what was said of each, and all completions in order."""

    transcripts: list[Transcript]
    completions: list[list[Completion]]

    @property
    def bits(self) -> list[Any]:
        return [[(c.tokens, c.logp, c.stop) for c in own] for own in self.completions]


def talk(engine: Engine, only: int | None = None, keep: bool = True, turns: int = 4, **how: Any) -> Talk:
    """Three episodes, or one of them alone. What the tool says has from none to 300 tokens."""
    prompts = [list(prompt) for prompt, members in zip(GROUPS, MEMBERS, strict=True) for _ in range(members)]
    numbers = range(len(prompts)) if only is None else [only]
    found = Talk([Transcript() for _ in prompts], [[] for _ in prompts])
    for i in numbers:
        found.transcripts[i].observe(prompts[i])
    for turn in range(turns):
        for i in numbers:
            sampling = Sampling(**{"max_tokens": 4 + 3 * i + turn, "seed": 100 * i + turn, **how})
            engine.submit(i, found.transcripts[i].tokens, sampling, keep=keep)
        done: list[Completion] = []
        while len(done) < len(numbers):
            done += engine.poll()
        for completion in done:
            i = completion.id
            found.completions[i].append(completion)
            found.transcripts[i].sample(completion)
            draw = random.Random(f"{i} {turn}")
            size = [0, 1, 21, 300][(i + turn) % 4] if turn < 2 else 5
            found.transcripts[i].observe([draw.randrange(5, 48) for _ in range(size)])
    return found


def new(model: Decoder, tokenizer: Tokenizer, **how: Any) -> LocalEngine:
    return LocalEngine(model, tokenizer, **{"slots": 8, **how})


def shaped(tokenizer: Tokenizer, **shape: Any) -> Decoder:
    small = tiny(tokenizer, context=CONTEXT)
    model = new_decoder(replace(small.config, **shape), 1)
    model.eos_ids = small.eos_ids
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    return model


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_no_bit_of_a_compiled_reply_depends_on_what_was_kept(
    tokenizer: Tokenizer, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(tokenizer, context=CONTEXT)
    if not new(model, tokenizer, precision=precision).batch_invariant:
        pytest.skip("needs a C compiler, and for bfloat16 a processor that has such products")
    expected = talk(new(model, tokenizer, precision=precision)).bits
    for budget in (0, 3_000, 60_000):
        assert talk(new(model, tokenizer, precision=precision, kept_bytes=budget)).bits == expected
    assert talk(new(model, tokenizer, precision=precision, slots=1)).bits == expected
    for i, own in enumerate(expected):
        assert talk(new(model, tokenizer, precision=precision), only=i).bits[i] == own
    monkeypatch.setattr("posttrain.engines.local.compiled_step.FEED_ROWS", 7)
    assert talk(new(model, tokenizer, precision=precision)).bits == expected


class Moving:
    """Each request goes to a new engine, which is told where the episode's first prompt ended, or is not."""

    def __init__(self, new: Callable[[], LocalEngine], told: bool) -> None:
        self.new, self.told, self.engines, self.first = new, told, list[LocalEngine](), dict[int, int]()

    def submit(self, id: int, prompt: Sequence[int], sampling: Sampling, keep: bool = False) -> None:
        self.engines.append(self.new())
        first = self.first.setdefault(id, len(prompt))
        if self.told and first < len(prompt):
            self.engines[-1].take_over(id, prompt[:first])
        self.engines[-1].submit(id, prompt, sampling, keep)

    def poll(self) -> list[Completion]:
        return [done for engine in self.engines for done in engine.poll()]


def test_an_engine_that_takes_over_an_episode_computes_the_same_bits(tokenizer: Tokenizer) -> None:
    model = tiny(tokenizer, context=CONTEXT)
    if not new(model, tokenizer).batch_invariant:
        pytest.skip("needs a C compiler")
    expected = talk(new(model, tokenizer)).bits
    moved = {told: talk(cast(Engine, Moving(lambda: new(model, tokenizer), told))).bits for told in (True, False)}
    assert moved[True] == expected != moved[False]


@pytest.mark.parametrize(
    "shape", [{}, {"qk_norm": True}, {"qkv_bias": True}, {"kv_heads": 1}, {"kv_heads": 4}, {"layers": 1}], ids=str
)
def test_replies_that_go_on_are_what_the_learner_scores(
    tokenizer: Tokenizer, backend: str, shape: dict[str, Any]
) -> None:
    model = shaped(tokenizer, **shape)
    talked = talk(new(model, tokenizer, kept_bytes=20_000))
    batch = collate([[t] for t in talked.transcripts], range(3), weight=torch.ones(3))
    (outputs,) = LocalLearner(model, Optimization()).evaluate([batch])
    assert batch.sampler_logp is not None and len(batch.sampler_logp) > 60
    assert (outputs.logp - batch.sampler_logp).abs().max() < 1e-4  # float32: up to 4e-5 on some processors


def test_tokens_are_those_of_requests_that_are_computed_anew(tokenizer: Tokenizer, backend: str) -> None:
    model = tiny(tokenizer, context=CONTEXT)
    plain = talk(UncachedEngine(model, tokenizer))
    for keep in (True, False):
        talked = talk(new(model, tokenizer), keep=keep)
        assert [t.tokens for t in talked.transcripts] == [t.tokens for t in plain.transcripts]
        for own, other in zip(talked.completions, plain.completions, strict=True):
            for one, two in zip(own, other, strict=True):
                assert torch.allclose(torch.tensor(one.logp), torch.tensor(two.logp), atol=1e-5)


def test_every_token_is_computed_once_and_a_groups_prompt_once_for_all(tokenizer: Tokenizer, backend: str) -> None:
    model = tiny(tokenizer, context=CONTEXT)
    engine = new(model, tokenizer)
    talked = talk(engine)
    computed = sum(map(len, GROUPS))
    for number, transcript in enumerate(talked.transcripts):
        last = talked.completions[number][-1]
        place = max(s.start for s in transcript.spans if s.learned)  # of the last reply
        computed += place + len(last.tokens) - 1 - len(GROUPS[number // 2])
    assert engine.computed == computed


@pytest.mark.parametrize("kept_bytes", [0, KEPT_BYTES])
def test_equal_turns_of_a_group_are_computed_once_and_answered_as_if_each_were_alone(
    tokenizer: Tokenizer, backend: str, kept_bytes: int
) -> None:
    """Four say the same at first, and read the same passage, the last one while the others already answer. The fourth
    reads another passage of the same length.
    """
    model, passages = tiny(tokenizer, context=CONTEXT), [[7 + i % 30 for i in range(60)], [8] + [9] * 59]

    def answers(numbers: Sequence[int]) -> tuple[LocalEngine, dict[int, Completion]]:
        engine, found = new(model, tokenizer, kept_bytes=kept_bytes), dict[int, Completion]()

        def poll_until(count: int) -> None:
            while len(found) < count:
                found.update({c.id: c for c in engine.poll()})

        for i in numbers:
            engine.submit(i, GROUPS[0], Sampling(max_tokens=6, seed=1), keep=True)
        poll_until(len(numbers))
        first, found = found, {}
        for number, i in enumerate(numbers):
            text = [*GROUPS[0], *first[i].tokens, *passages[i == 3]]
            if number and i == 4:
                found.update({c.id: c for c in engine.poll()})  # the others run when this one begins
            engine.submit(i, text, Sampling(max_tokens=12, seed=10 + i))
        poll_until(len(numbers))
        return engine, found

    engine, together = answers(range(5))
    said = 5  # of the first reply of 6 tokens all but the last are computed by each
    once = len(GROUPS[0]) + 5 * said + (0 if kept_bytes else len(GROUPS[0]) + 2 * said) + 2 * len(passages[0])
    assert engine.computed == once + sum(len(c.tokens) for c in together.values())
    for i, own in together.items():
        alone = answers([i])[1][i]
        assert own.tokens == alone.tokens
        assert own.logp == alone.logp or not engine.batch_invariant
        assert own.logp == pytest.approx(alone.logp, abs=1e-5)


def test_equal_turns_behind_different_prompts_are_not_taken_for_each_other(tokenizer: Tokenizer, backend: str) -> None:
    model, how = tiny(tokenizer, context=CONTEXT), Sampling(max_tokens=9, seed=1)
    engine, plain = new(model, tokenizer), UncachedEngine(model, tokenizer)
    prompts, found = [[5, 6, 7], [8, 9, 10]], list[dict[int, list[float]]]()
    for one in (engine, plain):
        for i, prompt in enumerate(prompts):
            engine.take_over(i, prompt)  # what follows the first prompt is the request's own
            one.submit(i, [*prompt, *range(11, 15)], how)
        done: list[Completion] = []
        while len(done) < len(prompts):
            done += one.poll()
        found.append({c.id: c.logp for c in done})
    for i in range(2):
        assert found[0][i] == pytest.approx(found[1][i], abs=1e-5)
    assert found[0][0] != pytest.approx(found[0][1], abs=1e-3)


def test_what_is_kept_takes_the_memory_of_its_tokens(tokenizer: Tokenizer, backend: str) -> None:
    model = tiny(tokenizer, context=CONTEXT)
    engine = new(model, tokenizer)
    talked = talk(engine)
    spans = [max(s.start + s.length for s in t.spans if s.learned) for t in talked.transcripts]
    own = sum(end - 1 for end in spans) - MEMBERS[0] * len(GROUPS[0]) - MEMBERS[1] * len(GROUPS[1])
    assert engine.kept.tokens == own + sum(map(len, GROUPS))
    config = model.config
    each = 2 * config.layers * config.kv_heads * config.head_size * 4
    padded = -(-config.head_size // 16) * 2  # heads of 8 numbers fill vectors of up to 16
    logits = 2 * config.vocab * 4
    parts = len(GROUPS) + sum(MEMBERS)  # each of them has a page that is not full
    assert engine.kept.bytes <= padded * each * (engine.kept.tokens + parts * (BLOCK - 1)) + logits
    for i in range(3):
        engine.forget(i)
    assert engine.kept.bytes == engine.kept.tokens == 0


def test_a_budget_lets_go_of_what_was_answered_first(tokenizer: Tokenizer) -> None:
    model = tiny(tokenizer, context=CONTEXT)
    whole = new(model, tokenizer)
    talk(whole, turns=1)
    engine = new(model, tokenizer, kept_bytes=whole.kept.bytes - 1)
    talk(engine, turns=1)
    assert 0 < engine.kept.bytes < whole.kept.bytes
    first = engine.kept.take(0)
    assert first is not None and first.states is None and first.prefix is None
    last = engine.kept.take(2)
    assert last is not None and last.states is not None


def test_another_context_is_computed_anew(tokenizer: Tokenizer, backend: str) -> None:
    model = tiny(tokenizer, context=CONTEXT)
    engine, other = new(model, tokenizer), new(model, tokenizer)
    talk(engine)
    sampling = Sampling(max_tokens=9, seed=1)
    changed = [*GROUPS[0][:-1], 33, 34, 35]
    for one in (engine, other):
        one.submit(0, changed, sampling, keep=True)
    ours, theirs = ([c for _ in range(9) for c in one.poll()] for one in (engine, other))
    assert [(c.tokens, c.logp) for c in ours] == [(c.tokens, c.logp) for c in theirs]


def test_two_may_go_on_from_one(tokenizer: Tokenizer) -> None:
    model = tiny(tokenizer, context=CONTEXT)
    engine, alone = new(model, tokenizer), new(model, tokenizer)
    talked, _ = talk(engine, turns=2), talk(alone, turns=2)
    before = engine.kept.bytes
    engine.copy(0, 9, max(s.start + s.length for s in talked.transcripts[0].spans if s.learned))
    assert engine.kept.bytes == before, "what is shared is counted once"
    tokens, found = talked.transcripts[0].tokens, {}
    for one, ids in ((engine, (0, 9)), (alone, (0,))):
        for id in ids:
            one.submit(id, tokens, Sampling(max_tokens=9, seed=5), keep=True)
        done: list[Completion] = []
        while len(done) < len(ids):
            done += one.poll()
        found |= {(one is engine, c.id): (c.tokens, c.logp) for c in done}
    assert found[True, 0] == found[True, 9] == found[False, 0]


def test_a_request_may_go_on_from_any_beginning_of_a_kept_reply(tokenizer: Tokenizer, backend: str) -> None:
    model, prompt = tiny(tokenizer, context=CONTEXT), GROUPS[0]
    engine, other = new(model, tokenizer), new(model, tokenizer)
    engine.submit(0, prompt, Sampling(max_tokens=40, seed=3), keep=True)
    [reply] = [c for _ in range(40) for c in engine.poll()]
    assert len(reply.tokens) > 20, "it fills more than a unit of the cache"
    found: list[dict[int, Any]] = []
    for one in (engine, other):
        for count in range(1, len(reply.tokens)):
            if one is engine:
                one.copy(0, count, len(prompt) + count)
            else:  # computes all tokens again, in the same parts
                one.take_over(count, prompt)
            one.submit(count, [*prompt, *reply.tokens[:count]], Sampling(max_tokens=3, seed=count))
        done = [c for _ in range(40) for c in one.poll()]
        found.append({c.id: (c.tokens, c.logp) for c in done})
    assert found[0].keys() == found[1].keys() == {*range(1, len(reply.tokens))}
    for count, (tokens, logp) in found[0].items():
        assert (tokens, logp) == (found[1][count][0], pytest.approx(found[1][count][1], abs=1e-5))


def test_new_weights_forget_what_the_old_ones_computed(tokenizer: Tokenizer) -> None:
    model = tiny(tokenizer, context=CONTEXT)
    engine = new(model, tokenizer)
    talk(engine)
    engine.load(model, 1)
    assert engine.kept.bytes == 0 and engine.kept.take(0) is None


def test_a_turn_beyond_the_context_is_refused(tokenizer: Tokenizer) -> None:
    model = tiny(tokenizer, context=64)
    engine = new(model, tokenizer)
    engine.submit(0, GROUPS[0], Sampling(max_tokens=4), keep=True)
    [done] = [c for _ in range(9) for c in engine.poll()]
    with pytest.raises(UserError, match="leaves no room in the model's context of 64"):
        engine.submit(0, [*GROUPS[0], *done.tokens, *range(5, 63)], Sampling())


def test_a_token_that_the_model_lacks_is_refused_in_a_later_turn_too(tokenizer: Tokenizer) -> None:
    engine = new(tiny(tokenizer, context=64), tokenizer)
    engine.submit(0, GROUPS[0], Sampling(max_tokens=4), keep=True)
    [done] = [c for _ in range(9) for c in engine.poll()]
    with pytest.raises(UserError, match=f"gives token {tokenizer.vocab_size}"):
        engine.submit(0, [*GROUPS[0], *done.tokens, tokenizer.vocab_size], Sampling())


@pytest.mark.parametrize("budget", [0, KEPT_BYTES])
def test_episodes_leave_nothing_behind_and_no_bit_depends_on_the_budget(tokenizer: Tokenizer, budget: int) -> None:
    model = tiny(tokenizer, context=256)
    if not new(model, tokenizer).batch_invariant:
        pytest.skip("needs a C compiler")

    def played(kept_bytes: int) -> list[Any]:
        engine = new(model, tokenizer, slots=5, kept_bytes=kept_bytes)
        with EnvPool(asking, 0) as pool:
            rollouts = Player(pool, engine, tokenizer, Sampling(max_tokens=9), 256).play(episodes(12))
        assert engine.kept.bytes == 0 and engine.kept.take(0) is None
        return said(rollouts)

    assert played(budget) == played(10_000)


def test_the_turns_of_an_episode_are_computed_once(tokenizer: Tokenizer) -> None:
    engine = new(tiny(tokenizer, context=256), tokenizer, slots=32)
    with EnvPool(asking, 0) as pool:
        rollouts = Player(pool, engine, tokenizer, Sampling(max_tokens=9), 256).play(episodes(12))
    prompts = {r.group: r.transcripts[0].spans[0].length for r in rollouts}
    own = sum(len(t) - t.spans[0].length - 1 for r in rollouts for t in r.transcripts)
    assert engine.computed == sum(prompts.values()) + own


def test_a_model_whose_vocabulary_is_read_in_blocks_goes_on_too(tokenizer: Tokenizer) -> None:
    config = DecoderConfig(
        vocab=tokenizer.vocab_size, hidden=40, layers=3, heads=6, kv_heads=3, head_size=10, intermediate=56,
        context=CONTEXT,
    )  # fmt: skip
    model = new_decoder(config, 2)
    model.eos_ids = (1,)
    talked = talk(new(model, tokenizer))
    batch = collate([[t] for t in talked.transcripts], range(3), weight=torch.ones(3))
    (outputs,) = LocalLearner(model, Optimization()).evaluate([batch])
    assert batch.sampler_logp is not None
    assert (outputs.logp - batch.sampler_logp).abs().max() < 1e-4  # float32: up to 4e-5 on some processors
