"""Memory of the key-value cache: it is allocated as tokens are sampled, shared and limited, and changes no reply."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from conftest import tiny
from sampled import complete

from posttrain.core.types import Completion, Sampling, UserError
from posttrain.engines.local import cache_memory, local_engine
from posttrain.engines.local.cuda_step import CudaStep
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.engines.local.paged_cache import PagedCache
from posttrain.engines.local.prefix_cache import CachedPrefixes
from posttrain.engines.local.prompt_layout import BLOCK
from posttrain.engines.local.step_cache import StepCache
from posttrain.models.native.decoder import Decoder, new_decoder
from posttrain.models.native.kernels import binder, build
from posttrain.models.tokenizer.tokenizer import Tokenizer

CONTEXT = 1200
MODES = ["compiled", "torch", "steps"]
needs_compiler = pytest.mark.skipif(binder.decode() is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def _compiled_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(CudaStep, "may_rest", lambda self, cache: False)
    yield
    build.use(True)


def engine_of(mode: str, model: Decoder, tokenizer: Tokenizer, **how: Any) -> LocalEngine:
    """An engine that decodes by compiled code, by torch's operations, or by the steps of a GPU, uncaptured."""
    build.use(mode == "compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_engine, "decodes_in_graphs", lambda model, dtype: mode == "steps")
        engine = LocalEngine(model, tokenizer, **{"slots": 8, **how})
    if mode == "compiled" and engine._compiled is None:
        pytest.skip("needs a C compiler, and for bfloat16 a processor that has such products")
    assert isinstance(engine._cache, PagedCache) == (mode == "compiled")
    assert isinstance(engine._cache, StepCache) == (mode == "steps")
    return engine


def endless(tokenizer: Tokenizer, **shape: Any) -> Decoder:
    """A model whose replies are as long as they may be."""
    model = new_decoder(replace(tiny(tokenizer, context=CONTEXT).config, **shape), 1)
    model.eos_ids = (10**6,)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    return model


def drained(engine: LocalEngine, count: int) -> dict[int, Completion]:
    found: dict[int, Completion] = {}
    while len(found) < count:
        found |= {c.id: c for c in engine.poll()}
    return found


def assert_same(ones: dict[int, Completion], others: dict[int, Completion], bits: bool) -> None:
    assert ones.keys() == others.keys()
    for id, one in ones.items():
        other = others[id]
        assert (one.tokens, one.stop, one.text) == (other.tokens, other.stop, other.text), id
        assert one.logp == (other.logp if bits else pytest.approx(other.logp, abs=5e-5)), id


def asked(count: int = 10, tokens: int = 150) -> tuple[list[list[int]], list[Sampling]]:
    """Groups of requests, sampled in every way."""
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"top_p": 0.8}, {"temperature": 0.0}, {"epsilon": 0.2}]
    prompts = [[5 + ((i // 3) * 7 + j) % 40 for j in range(4 + 31 * (i // 3))] for i in range(count)]
    return prompts, [Sampling(seed=i, max_tokens=tokens - 7 * i, **ways[i % 5]) for i in range(count)]


@pytest.mark.parametrize(
    ("mode", "precision"), [*((mode, "float32") for mode in MODES), ("compiled", "bfloat16")], ids=str
)
def test_replies_of_preempted_requests_are_those_of_undisturbed_ones(
    tokenizer: Tokenizer, mode: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With compiled steps they are equal bit by bit. Some requests continue earlier ones, and one has a stop string."""
    monkeypatch.setattr(cache_memory, "FIRST_TOKENS", 64)
    model = endless(tokenizer)

    def talk(cache_bytes: int | None) -> tuple[dict[int, Completion], dict[int, Completion], LocalEngine]:
        engine = engine_of(mode, model, tokenizer, precision=precision, cache_bytes=cache_bytes)
        prompts, how = asked()
        for i, (prompt, sampling) in enumerate(zip(prompts, how, strict=True)):
            engine.submit(i, prompt, sampling, keep=i % 2 == 0)
        first = drained(engine, len(prompts))
        for i, prompt in enumerate(prompts):
            more = [*prompt, *first[i].tokens, *(5 + j % 40 for j in range(30 * (i % 3)))]
            engine.submit(i, more, Sampling(seed=50 + i, max_tokens=90, stop=("aa",) if i == 4 else ()), keep=i == 0)
        return first, drained(engine, len(prompts)), engine

    expected = talk(1 << 40)
    assert not expected[2].preempted
    least = engine_of(mode, model, tokenizer, precision=precision)._cache.size(300, 160)
    preempted = []
    for cache_bytes in (least, 2 * least):
        found = talk(cache_bytes)
        assert_same(expected[0], found[0], bits=mode == "compiled")
        assert_same(expected[1], found[1], bits=mode == "compiled")
        preempted.append(found[2].preempted)
    assert all(preempted), preempted


@pytest.mark.parametrize("mode", MODES)
def test_the_request_that_came_last_waits_and_those_that_run_are_never_more_than_fit(
    tokenizer: Tokenizer, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_memory, "FIRST_TOKENS", 64)
    model = endless(tokenizer)
    limit = 3 * engine_of(mode, model, tokenizer)._cache.size(640, 3)
    engine = engine_of(mode, model, tokenizer, cache_bytes=limit)
    for i in range(8):
        engine.submit(i, [5, 6, 7], Sampling(seed=i, max_tokens=600))
    began, ended = list[int](), list[int]()
    while engine.running or engine.waiting:
        ended += [c.id for c in engine.poll()]
        assert engine.memory.occupied <= limit
        running = [request.id for request in engine.running]
        if len(began) < len(running):
            began = running
        waiting = [request.id for request in engine.waiting]
        assert not running or not waiting or max(running) < min(waiting), "first come, first served"
    assert engine.preempted >= 3 and len(began) > 3 and sorted(ended) == list(range(8))
    assert not engine.waiting.begun and not engine._submitted and not engine.waiting._wanted


def test_the_reply_so_far_of_a_preempted_request_can_be_read_and_the_request_cancelled(tokenizer: Tokenizer) -> None:
    model = endless(tokenizer)
    engine = engine_of("torch", model, tokenizer)
    for i in range(3):
        engine.submit(i, [5, 6, 7], Sampling(seed=i, max_tokens=60))
    for _ in range(3):
        engine.poll()
    before = engine.so_far([2])
    assert len(before[2][0]) == 12
    engine._preempt(2)
    assert engine.so_far([2]) == before and [request.id for request in engine.waiting] == [2]
    engine.cancel(2)
    assert engine.so_far([2]) == {} and not engine.waiting
    assert len(drained(engine, 2)[1].tokens) == 60 and not engine._submitted


@needs_compiler
def test_pages_are_taken_as_tokens_are_sampled_and_freed_when_requests_end(tokenizer: Tokenizer) -> None:
    model = endless(tokenizer)
    engine = engine_of("compiled", model, tokenizer)
    pool = engine._cache.pool  # type: ignore[union-attr]
    for i in range(6):
        engine.submit(i, [5, 6, 7], Sampling(seed=i, max_tokens=70 if i < 3 else 200))
    while engine.running or engine.waiting:
        engine.poll()
        counts = engine._rows.count[: len(engine.running)].tolist()
        # the prompt is stored once; the last sampled token of each is not in the cache yet
        assert pool.used == (1 if counts else 0) + sum(-(-max(0, n - 1) // BLOCK) for n in counts)
    assert pool.used == 0 and len(pool.free) == pool.in_chunk, "of all chunks one is held when nothing runs"


@needs_compiler
def test_memory_of_a_chunk_stays_while_one_of_its_pages_is_in_use(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = engine_of("compiled", endless(tokenizer), tokenizer)._cache.pool  # type: ignore[union-attr]
    pool.in_chunk = 4
    pages = [pool.take() for _ in range(9)]
    addresses = {page.address for page in pages}
    assert len(addresses) == 9 and len(pool.free) == 3
    del pages[1:]
    pool.rest()
    assert pool.used == 1 and len(pool.free) == 3
    again = [pool.take() for _ in range(3)]
    assert {page.address for page in again} < addresses and pool.used == 4 and not pool.free
    again += [pool.take() for _ in range(4)]
    del again, pages
    pool.rest()
    assert pool.used == 0 and len(pool.free) == 4, "one chunk remains for the next requests"


@needs_compiler
def test_prompts_share_the_pages_of_their_common_blocks(tokenizer: Tokenizer) -> None:
    engine = engine_of("compiled", endless(tokenizer), tokenizer)
    beginning = [5 + i % 11 for i in range(2 * BLOCK)]
    for i in range(4):
        engine.submit(i, [*beginning, 20 + i], Sampling(seed=i, max_tokens=30))
    engine.poll()
    assert engine._cache.pool.used == 2 + 4 + 4  # type: ignore[union-attr]


@needs_compiler
def test_a_groups_prompt_is_counted_once_and_freed_when_the_last_request_is_cancelled(tokenizer: Tokenizer) -> None:
    engine = engine_of("compiled", endless(tokenizer), tokenizer)
    cache, prompt = engine._cache, tuple(5 + i % 11 for i in range(2 * BLOCK))
    assert isinstance(cache, PagedCache)
    assert cache.added([1] * 4, [len(prompt)]) == (4 + 2) * cache.pool.page_bytes
    engine.submit(0, prompt, Sampling(max_tokens=5), keep=True)
    done = drained(engine, 1)[0]
    engine.submit(0, [*prompt, *done.tokens, 6], Sampling(max_tokens=5), keep=True)
    engine.cancel(0)
    engine.forget(0)
    assert not engine.waiting.prefixes and cache.pool.used == 0


@needs_compiler
def test_continued_requests_share_full_pages_and_write_to_none_of_them(tokenizer: Tokenizer) -> None:
    """Branches that continue one reply at the same time attend to their own tokens only."""
    model = endless(tokenizer)
    engine = engine_of("compiled", model, tokenizer)
    engine.submit(0, [5, 6, 7], Sampling(seed=1, max_tokens=2 * BLOCK + 40), keep=True)
    reply = drained(engine, 1)[0].tokens
    pool, kept = engine._cache.pool, engine.kept.take(0)  # type: ignore[union-attr]
    assert kept is not None
    engine.kept.put(0, kept)
    before = [page.memory.clone() for page in kept.states]
    for i in range(1, 5):
        engine.copy(0, i, 3 + 2 * BLOCK + 5 * i)
    assert pool.used == 1 + 3
    texts = {i: [5, 6, 7, *reply[: 2 * BLOCK + 5 * i], 9 + i] for i in range(1, 5)}
    for i, text in texts.items():
        engine.submit(i, text, Sampling(seed=i, max_tokens=20))
    engine.poll()
    assert pool.used == 1 + 3 + 4, "two full pages are shared, the last one is copied"
    found = drained(engine, 4)
    assert all(torch.equal(page.memory, old) for page, old in zip(kept.states, before, strict=True))
    for i, text in texts.items():
        alone = engine_of("compiled", model, tokenizer)
        alone.take_over(i, [5, 6, 7])
        alone.submit(i, text, Sampling(seed=i, max_tokens=20))
        assert_same({i: found[i]}, drained(alone, 1), bits=True)
    del kept
    engine.forget(0)
    engine.close()
    assert pool.used == 0


@needs_compiler
def test_prefixes_of_requests_that_wait_are_dropped_for_those_before_them(tokenizer: Tokenizer) -> None:
    model = endless(tokenizer)
    page = engine_of("compiled", model, tokenizer)._cache.size(1, 0)
    engine = engine_of("compiled", model, tokenizer, cache_bytes=16 * page)
    cache = engine._cache
    assert isinstance(cache, PagedCache)
    replies = {}
    for i in range(4):
        engine.submit(i, [5 + i, *[6] * 64], Sampling(seed=i, max_tokens=100), keep=True)
        replies |= drained(engine, 1)
    assert cache.pool.used == 4 * (2 + 2)
    for i in range(10, 16):
        engine.submit(i, [i], Sampling(seed=i, max_tokens=70))
    for i in range(4):
        engine.submit(i, [5 + i, *[6] * 64, *replies[i].tokens, 9], Sampling(seed=i, max_tokens=9), keep=True)
    for _ in range(2):
        engine.poll()
    running = [request.id for request in engine.running]
    assert {*range(10, 16)} < {*running} and cache.pool.used <= 16


@needs_compiler
def test_a_computed_prompt_takes_memory_once_whoever_uses_it(tokenizer: Tokenizer) -> None:
    """Whether requests with it run, wait, or arrive later."""
    model, prompt = endless(tokenizer), [5 + i % 11 for i in range(4 * BLOCK)]
    page = engine_of("compiled", model, tokenizer)._cache.size(1, 0)
    engine = engine_of("compiled", model, tokenizer, slots=2, cache_bytes=7 * page)
    cache = engine._cache
    assert isinstance(cache, PagedCache)
    engine.submit(0, prompt, Sampling(seed=0, max_tokens=40))
    engine.poll()
    for i in range(1, 5):
        engine.submit(i, prompt, Sampling(seed=i, max_tokens=37 if i == 1 else 40))  # 0 and 1 end together
    engine.poll()
    assert [len(engine.running), cache.pool.used] == [2, 4 + 2], "it was computed again for its first logits only"
    drained(engine, 2)
    assert not engine.running and engine.waiting.prefixes and cache.pool.used == 4
    engine.poll()
    assert [len(engine.running), cache.pool.used] == [2, 4 + 2]


@pytest.mark.parametrize("mode", ["torch", "steps"])
def test_slots_of_torchs_steps_grow_with_the_longest_reply_and_become_fewer(tokenizer: Tokenizer, mode: str) -> None:
    engine = engine_of(mode, endless(tokenizer), tokenizer)
    sizes = []
    for i in range(8):
        engine.submit(i, [5, 6, 7], Sampling(seed=i, max_tokens=1100 if i == 5 else 100 + i))
    while engine.running or engine.waiting:
        engine.poll()
        assert isinstance(engine._cache.own, torch.Tensor)  # type: ignore[union-attr]
        sizes.append(engine._cache.own.shape[2:5:2])  # type: ignore[union-attr]
    assert [tuple(size) for size in dict.fromkeys(sizes)][:2] == [(8, 512), (1, 1024)]
    assert max(slots * tokens for slots, tokens in sizes) <= 8 * 512


def test_a_cache_that_does_not_fit_into_memory_twice_grows_through_the_hosts_memory(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, moved = endless(tokenizer), list[int]()
    prompts, how = [[5, 6, 7]], [Sampling(seed=3, max_tokens=1000)]
    expected = complete(engine_of("torch", model, tokenizer), prompts, how)
    to_host = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: (moved.append(x.nbytes), to_host(x))[1])
    engine = engine_of("torch", model, tokenizer)
    limit = engine._cache.size(1000, 3)
    limited = engine_of("torch", model, tokenizer, cache_bytes=limit + model.config.vocab * 4)
    limited.submit(9, [5, 6, 7], Sampling(seed=3, max_tokens=1000))
    monkeypatch.setattr(limited.memory, "room_limit", lambda running: float(limit))
    assert drained(limited, 1)[9].logp == expected[0].logp and moved


def test_a_request_that_can_never_fit_is_refused_with_the_remedy(tokenizer: Tokenizer) -> None:
    model = endless(tokenizer)
    for mode in MODES:
        engine = engine_of(mode, model, tokenizer)
        limit = engine._cache.size(1000, 3)
        limited = engine_of(mode, model, tokenizer, cache_bytes=limit)
        limited.submit(0, [5, 6, 7], Sampling(max_tokens=1000))
        assert len(drained(limited, 1)[0].tokens) == 1000
        with pytest.raises(UserError, match=r"needs .* GiB of KV cache, and --engine-cache is .*: raise it, or lower"):
            limited.submit(0, [5, 6, 7], Sampling(max_tokens=1180))


def test_a_request_that_runs_alone_has_no_limit_once_nothing_else_can_be_dropped(tokenizer: Tokenizer) -> None:
    engine = engine_of("torch", endless(tokenizer), tokenizer, cache_bytes=1 << 30)
    engine.submit(0, [5, 6, 7], Sampling(max_tokens=20))
    engine.poll()
    memory, resumed = engine.memory, engine.waiting.resumed
    assert memory.room_limit(1) == math.inf > memory.room_limit(2)
    resumed[1] = CachedPrefixes((5,), (6,))  # its keys and values were dropped before
    assert memory.room_limit(1) == math.inf
    resumed[1] = CachedPrefixes((5,), (6,), states=torch.zeros(4))
    assert memory.room_limit(1) < math.inf and memory.reclaim()
    assert memory.room_limit(1) == math.inf and not memory.reclaim()


def test_without_an_option_the_cache_takes_a_share_of_free_memory(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = endless(tokenizer)
    expected = complete(engine_of("torch", model, tokenizer), *asked())
    for mode, sharers in product(MODES, (1, 3)):
        engine = engine_of(mode, model, tokenizer)
        engine.memory.sharers = sharers
        room = sharers * engine._cache.size(600, 200) / cache_memory.CACHE_SHARE
        left: Any = lambda device, engine=engine, room=room: room - engine.memory.occupied  # noqa: E731
        monkeypatch.setattr(cache_memory, "free_memory", left)
        assert_same(expected, complete(engine, *asked()), bits=False)
        assert engine.memory.limit == pytest.approx(engine._cache.size(600, 200))


@needs_compiler
def test_the_default_limit_is_the_same_after_many_requests_as_before_them(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's pool keeps its memory, which is not free for others then."""
    engine = engine_of("compiled", endless(tokenizer), tokenizer, rests=False)
    cache, limits = engine._cache, list[float]()
    assert isinstance(cache, PagedCache)
    cache.pool.in_chunk = 4
    monkeypatch.setattr(cache_memory, "free_memory", lambda device: 100 * cache.pool.page_bytes - cache.held)
    for _ in range(2):
        for i in range(8):
            engine.submit(i, [5, 6, 7], Sampling(seed=i, max_tokens=200))
        drained(engine, 8)
        limits.append(engine.memory.limit)
    assert limits[1] == limits[0] == cache_memory.CACHE_SHARE * 100 * cache.pool.page_bytes and cache.held > cache.bytes
