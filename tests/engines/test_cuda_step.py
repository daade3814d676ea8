"""Decoding steps for CUDA sample what torch's operations sample, one by one: uncaptured here, captured where there is a
card.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import tiny
from layouts import normal
from sampled import complete, ragged
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from posttrain.core.types import Completion, Sampling, StopReason
from posttrain.engines.local import local_engine
from posttrain.engines.local.cuda_step import CudaStep
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.engines.local.step_cache import StepCache, row_bucket, token_bucket
from posttrain.models.adapters.lora import LoRA, attach, begin
from posttrain.models.native.decoder import Decoder, causal, new_decoder
from posttrain.models.native.kernels import build
from posttrain.models.tokenizer.tokenizer import Tokenizer

CONTEXT = 400
Asked = tuple[list[list[int]], list[Sampling]]


@pytest.fixture(autouse=True)
def _in_torchs_operations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Beside single operations of torch; copies and cache are kept while nothing runs, as on a card with room."""
    build.use(False)
    monkeypatch.setattr(CudaStep, "may_rest", lambda self, cache: True)
    yield
    build.use(True)


def plain(model: Decoder, tokenizer: Tokenizer, **how: Any) -> LocalEngine:
    """An engine that decodes by torch's operations one by one."""
    return engine_of(model, tokenizer, False, **how)


def stepping(model: Decoder, tokenizer: Tokenizer, **how: Any) -> LocalEngine:
    """An engine that decodes by these steps, captured on a card."""
    return engine_of(model, tokenizer, True, **how)


def engine_of(model: Decoder, tokenizer: Tokenizer, steps: bool, **how: Any) -> LocalEngine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_engine, "decodes_in_graphs", lambda model, dtype: steps)
        engine = LocalEngine(model, tokenizer, **{"slots": 8, **how})
    assert isinstance(engine._cache, StepCache) == steps
    return engine


def assert_same(ones: dict[int, Completion], others: dict[int, Completion], atol: float = 2e-5) -> None:
    assert ones.keys() == others.keys()
    for i, one in ones.items():
        other = others[i]
        assert (one.tokens, one.stop, one.text) == (other.tokens, other.stop, other.text), i
        assert torch.allclose(torch.tensor(one.logp), torch.tensor(other.logp), atol=atol), i


def errors(model: Decoder, prompts: list[list[int]], done: dict[int, Completion]) -> torch.Tensor:
    """How far log-probabilities are from those of the model in float32, of whole texts."""
    found = []
    for i, prompt in enumerate(prompts):
        tokens = torch.tensor([*prompt, *done[i].tokens])
        with torch.no_grad():
            logits = model(tokens, torch.arange(len(tokens)), causal) @ model.head.weight.T
        at = torch.arange(len(prompt), len(tokens))
        found.append(torch.tensor(done[i].logp) - logits.log_softmax(-1)[at - 1, tokens[at]])
    return torch.cat(found).abs()


def mixed(count: int) -> Asked:
    """Requests of all kinds: groups and single ones, and every way of sampling."""
    prompts, how = ragged(count)
    ways: list[dict[str, Any]] = [
        {}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_p": 0.8}, {"top_k": 5}, {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 0.7, "epsilon": 0.2},
    ]  # fmt: skip
    chance = random.Random(count)
    for i in range(0, count, 5):
        prompts[i] = [chance.randrange(5, 48) for _ in range(chance.randrange(1, 90))]
    return prompts, [replace(s, max_tokens=1 + 3 * s.max_tokens, **ways[i % 8 % 7]) for i, s in enumerate(how)]


SHAPES: tuple[dict[str, Any], ...] = (
    {}, {"qk_norm": True}, {"qkv_bias": True}, {"kv_heads": 1}, {"kv_heads": 4}, {"tied": False}
)  # fmt: skip
WIDE: tuple[dict[str, Any], ...] = (
    {"qk_norm": True, "tied": False},
    {"qkv_bias": True, "kv_heads": 1},
    {"kv_heads": 4},
)
"""All of these, for many replies at once."""


def shaped(tokenizer: Tokenizer, **shape: Any) -> Decoder:
    small = tiny(tokenizer, context=CONTEXT)
    model = new_decoder(replace(small.config, **shape), 1)
    model.eos_ids = small.eos_ids
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if "norm" in name:  # all different: none may take the place of another
                parameter.add_(normal(*parameter.shape, seed=number), alpha=0.3)
            elif parameter.ndim == 2:
                parameter.mul_(6)
            elif shape.get("qkv_bias") and not parameter.any():
                parameter.normal_(generator=torch.Generator().manual_seed(len(parameter)))
    return model


@pytest.mark.parametrize(
    ("shape", "slots"), [*((shape, 5) for shape in SHAPES), *((shape, 64) for shape in WIDE)], ids=str
)
def test_tokens_and_log_probabilities_are_those_of_single_operations(
    tokenizer: Tokenizer, shape: dict[str, Any], slots: int
) -> None:
    model, (prompts, how) = shaped(tokenizer, **shape), mixed(40)
    expected = complete(plain(model, tokenizer, slots=slots), prompts, how)
    done = complete(stepping(model, tokenizer, slots=slots), prompts, how)
    assert_same(expected, done)
    assert {c.stop for c in done.values()} == {StopReason.EOS, StopReason.LENGTH}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_log_probabilities_in_bfloat16_are_the_models_up_to_its_rounding(
    tokenizer: Tokenizer, shape: dict[str, Any]
) -> None:
    model, (prompts, how) = shaped(tokenizer, **shape), ragged(40)
    step, single = (
        errors(model, prompts, complete(new(model, tokenizer, precision="bfloat16"), prompts, how))
        for new in (stepping, plain)
    )
    assert step.median() < 1.5 * single.median() + 1e-3 and step.mean() < 1.5 * single.mean() + 1e-3
    assert step.median() < 0.02


@pytest.mark.parametrize(("precision", "look"), [("float32", 1), ("float32", 3), ("float32", 16), ("bfloat16", 3)])
def test_nothing_depends_on_how_often_the_host_looks(
    tokenizer: Tokenizer, precision: str, look: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (prompts, how) = tiny(tokenizer, context=CONTEXT), mixed(30)
    expected = complete(stepping(model, tokenizer, slots=64, precision=precision), prompts, how)
    monkeypatch.setattr(local_engine, "LOOK_STEPS", look)
    assert_same(expected, complete(stepping(model, tokenizer, slots=64, precision=precision), prompts, how), atol=1e-5)


def test_rows_that_have_ended_or_are_not_in_use_stay_as_they_are(tokenizer: Tokenizer) -> None:
    model, (prompts, how) = tiny(tokenizer, context=CONTEXT), mixed(11)
    engine = stepping(model, tokenizer, slots=16)
    for i, (prompt, sampling) in enumerate(zip(prompts, how, strict=True)):
        engine.submit(i, prompt, sampling)
    assert engine._cuda is not None and isinstance(engine._cache, StepCache)
    with torch.no_grad():
        engine._admit(16)
        rows, count = engine._rows, len(engine.running)
        assert len(rows.ended) == 16 and rows.ended[count:].all()
        rows.ended[3] = True
        before = [x.clone() for x in rows.tensors]
        engine._cuda(engine._cache, rows, count, rows.left(count))
    still = [3, *range(count, 16)]
    for one, other in zip(before, rows.tensors, strict=True):
        assert torch.equal(one[still], other[still])
    assert rows.ended.all() and (rows.count <= rows.budget)[:count].all()
    assert rows.left(count) == 0
    rows.ended[:] = False
    rows.keep(5, [], [])
    assert rows.ended.tolist() == [False] * 5 + [True] * 11


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_weights_of_the_next_batch_are_the_new_ones(tokenizer: Tokenizer, precision: str) -> None:
    changed_weights_are_used(tiny(tokenizer, context=CONTEXT), tokenizer, precision)


def changed_weights_are_used(model: Decoder, tokenizer: Tokenizer, precision: str) -> None:
    """After each way in which weights change, replies are those of an engine that has seen no others."""
    prompts, how = ragged(16)
    engine = stepping(model, tokenizer, precision=precision)
    other = new_decoder(model.config, 5).to(model.head.device)
    seen = [complete(engine, prompts, how)]
    for change in ("in place", "unseen", "elsewhere"):
        with torch.no_grad():
            for own, new in zip(model.parameters(), other.parameters(), strict=True):
                if change == "in place":
                    own.add_(new, alpha=9)
                elif change == "unseen":  # torch counts no version
                    own.data.mul_(0.8)
                else:
                    own.data = own.data + 3 * new
        engine.load(model, engine.version + 1)
        for _ in range(2):  # the second time a graph is captured
            seen.append(complete(engine, prompts, how))
            assert_same(complete(stepping(model, tokenizer, precision=precision), prompts, how), seen[-1], atol=2e-3)
    assert len({str([c.tokens for c in each.values()]) for each in seen}) == 4


def test_adapters_are_merged_and_seen_to_change(tokenizer: Tokenizer) -> None:
    model, (prompts, how) = tiny(tokenizer, context=CONTEXT), ragged(16)
    attach(model, LoRA(rank=4, alpha=8.0), lambda name: True)
    begin(model, 0)
    engine, found = stepping(model, tokenizer), []
    for seed in range(3):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("adapter.b"):
                    parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(seed))
        engine.load(model, seed)
        found.append(complete(engine, prompts, how))
        assert_same(complete(plain(model, tokenizer), prompts, how), found[-1])
    assert len({str([c.tokens for c in each.values()]) for each in found}) == 3


def test_requests_may_come_and_be_cancelled_in_the_middle_and_the_cache_may_grow(tokenizer: Tokenizer) -> None:
    cache_grows_in_the_middle(tiny(tokenizer, context=CONTEXT), tokenizer)


def cache_grows_in_the_middle(model: Decoder, tokenizer: Tokenizer, **how: Any) -> None:
    chance = random.Random(4)
    prompts = [[chance.randrange(5, 48) for _ in range(1 + (37 * i) % 190)] for i in range(20)]
    sampling = [Sampling(seed=i, max_tokens=[3, 20, 90, 200][i % 4]) for i in range(20)]
    model.eos_ids = (10**6,)
    found: list[dict[int, Completion]] = []
    for engine in (plain(model, tokenizer, slots=12, **how), stepping(model, tokenizer, slots=12, **how)):
        done: dict[int, Completion] = {}
        sizes = set()
        for i in range(20):
            engine.submit(i, prompts[i], sampling[i])
            if i % 3 == 2:
                done |= {c.id: c for c in engine.poll()}
            if i in (5, 11):
                engine.cancel(i - 2)
            sizes.add(tuple(engine._cache.own.shape))
        while engine.running or engine.waiting:
            done |= {c.id: c for c in engine.poll()}
        found.append({i: c for i, c in done.items() if i not in (3, 9)})
        assert len(sizes) > 2, "it is to grow"
    assert_same(found[0], found[1], atol=1e-4)


def test_reply_ends_with_its_stop_string(tokenizer: Tokenizer) -> None:
    model = tiny(tokenizer, context=CONTEXT)
    prompts = [[7, 8]] * 20
    how = [Sampling(seed=i, max_tokens=50, stop=tuple("0123456789") if i % 3 else ()) for i in range(20)]
    expected = complete(plain(model, tokenizer, slots=5), prompts, how)
    assert StopReason.STOP in {c.stop for c in expected.values()}
    assert_same(expected, complete(stepping(model, tokenizer, slots=5), prompts, how))


def test_a_reply_that_fills_the_context_ends_there(tokenizer: Tokenizer) -> None:
    model = tiny(tokenizer, context=70)
    model.eos_ids = (10**6,)
    prompts, how = [[7] * 5, [7] * 5, [9] * 60], [Sampling(seed=i, max_tokens=400) for i in range(3)]
    done = complete(stepping(model, tokenizer), prompts, how)
    assert [len(done[i].tokens) for i in range(3)] == [65, 65, 10]
    assert_same(complete(plain(model, tokenizer), prompts, how), done)


@pytest.mark.parametrize("kept", [0, 20_000, 1 << 30])
def test_requests_that_go_on_are_those_of_single_operations(tokenizer: Tokenizer, kept: int) -> None:
    model = tiny(tokenizer, context=CONTEXT)

    def talk(engine: LocalEngine) -> dict[int, Completion]:
        texts, found = [[5, 6, 7], [5, 6, 7], list(range(8, 40)), [9, 9]], {}
        for turn in range(4):
            for i, text in enumerate(texts):
                engine.submit(i, text, Sampling(max_tokens=4 + 9 * i + turn, seed=100 * i + turn), keep=i < 3)
            done: list[Completion] = []
            while len(done) < len(texts):
                done += engine.poll()
            for c in done:
                found[10 * turn + c.id] = c
                texts[c.id] = [
                    *texts[c.id],
                    *c.tokens,
                    *[5 + (c.id + turn + k) % 40 for k in range([0, 1, 21][turn % 3])],
                ]
        return found

    expected = talk(plain(model, tokenizer, kept_bytes=kept))
    assert_same(expected, talk(stepping(model, tokenizer, kept_bytes=kept)), atol=5e-5)


@pytest.mark.parametrize("stays", [True, False])
def test_what_is_kept_while_nothing_runs_is_seen_by_no_reply(
    tokenizer: Tokenizer, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (prompts, how) = tiny(tokenizer, context=CONTEXT), mixed(20)
    model.eos_ids = (10**6,)
    expected = complete(stepping(model, tokenizer), prompts, how)
    few = complete(stepping(model, tokenizer), prompts[:3], how[:3])
    engine = stepping(model, tokenizer)
    monkeypatch.setattr(CudaStep, "may_rest", lambda self, cache: stays)
    long = [Sampling(seed=i, max_tokens=299) for i in range(8)]
    complete(engine, [[9] * 100] * 8, long)  # leaves all slots at places beyond a smaller cache
    assert_same(few, complete(engine, prompts[:3], how[:3]))  # of four rows, one of which is such a slot
    for _ in range(2):
        assert_same(expected, complete(engine, prompts, how))
        assert bool(engine._cache.own.numel()) == stays
    engine.close()
    assert not engine._cache.own.numel()


def test_copies_keep_their_addresses_when_weights_change(tokenizer: Tokenizer) -> None:
    model, (prompts, how) = tiny(tokenizer), ragged(4)
    engine, addresses = stepping(model, tokenizer, precision="bfloat16"), []
    for version in range(2):
        complete(engine, prompts, how)
        assert engine._cuda is not None and engine._cuda._weights is not None
        copies = [copy for copy, _ in engine._cuda._weights._copied]
        assert len(copies) == 4 * model.config.layers + 1 and all(x.dtype == torch.bfloat16 for x in copies)
        addresses.append([x.data_ptr() for x in copies])
        with torch.no_grad():
            model.layers[0].o.weight.mul_(2)
        engine.load(model, version)
    assert addresses[0] == addresses[1]


class Reads(TorchDispatchMode):
    """Addresses of the memory that operations read and did not make themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()
        self._made: dict[int, torch.Tensor] = {}  # held, so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        self.found |= {x.untyped_storage().data_ptr() for x in given} - self._made.keys()
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and (place := x.untyped_storage().data_ptr()) not in self.found:
                self._made[place] = x
        return out


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_graphs_are_checked_for_the_addresses_of_all_that_a_step_reads(tokenizer: Tokenizer, precision: str) -> None:
    """Those of weights have a check of their own; tokens that end a reply, or are drawn uniformly, stay where they are."""
    model, (prompts, how) = shaped(tokenizer, qk_norm=True, tied=False), mixed(8)
    engine = stepping(model, tokenizer, precision=precision)
    for i, (prompt, sampling) in enumerate(zip(prompts, how, strict=True)):
        engine.submit(i, prompt, sampling)
    step, cache, rows = engine._cuda, engine._cache, engine._rows
    assert step is not None and isinstance(cache, StepCache)
    with torch.no_grad():
        engine._admit(8)
        step(cache, rows, 8, 1)
        weights = step._weights
        assert weights is not None
        with Reads() as read:
            step._step(step.shape(cache, rows, 8), cache, rows, weights)
    checked = {place for place, _ in step._addresses(cache, rows, weights)[1:]}  # type: ignore[misc, attr-defined]
    others = (*model.parameters(), *(copy for copy, _ in weights._copied), engine.eos, *engine.uniform_tokens)
    assert len(read.found) > 20 and read.found <= checked | {x.untyped_storage().data_ptr() for x in others}


@pytest.mark.parametrize("look", [1, 8])
def test_each_step_and_token_is_counted_however_often_the_host_looks(
    tokenizer: Tokenizer, look: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_engine, "LOOK_STEPS", look)
    model = tiny(tokenizer, context=CONTEXT)
    model.eos_ids = (10**6,)
    engine = stepping(model, tokenizer)
    complete(engine, [[7, 8]] * 5, [Sampling(seed=i, max_tokens=21) for i in range(5)])
    pace = engine.pace()
    assert (pace["decoding/4/steps"], pace["decoding/4/rows"]) == (20, 5 * 20)  # prefill gives the first token
    assert engine.computed == 2 + 5 * 20


def test_buckets_are_no_smaller_and_at_most_twice_what_they_hold() -> None:
    for count in range(1, 3000):
        assert count <= row_bucket(count) < max(2 * count, count + 32)
        assert count <= token_bucket(count) <= max(2 * count, count + 511, 64)
    assert [row_bucket(n) for n in (1, 2, 3, 31, 33, 200)] == [1, 2, 4, 32, 64, 224]


# -- captured ----------------------------------------------------------------------------------------------------------


def on_a_card(tokenizer: Tokenizer) -> Decoder:
    return tiny(tokenizer, context=CONTEXT).to("cuda")


def uncaptured(engine: LocalEngine) -> LocalEngine:
    engine._cuda = CudaStep(engine.model, engine.dtype, engine.eos, lambda: engine.uniform_tokens, capture=False)
    return engine


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_captured_steps_are_the_uncaptured_ones(tokenizer: Tokenizer, precision: str) -> None:
    model, (prompts, how) = on_a_card(tokenizer), mixed(40)
    expected = complete(uncaptured(stepping(model, tokenizer, slots=16, precision=precision)), prompts, how)
    engine = stepping(model, tokenizer, slots=16, precision=precision)
    for _ in range(3):
        assert_same(expected, complete(engine, prompts, how))
    assert engine._cuda is not None and engine._cuda.graphs is not None and len(engine._cuda.graphs) > 3
    if precision == "float32":
        assert_same(complete(plain(model, tokenizer, slots=16), prompts, how), expected, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_no_graph_reads_weights_of_before(tokenizer: Tokenizer, precision: str) -> None:
    changed_weights_are_used(on_a_card(tokenizer), tokenizer, precision)


@pytest.mark.gpu
def test_no_graph_reads_a_cache_of_before(tokenizer: Tokenizer) -> None:
    cache_grows_in_the_middle(on_a_card(tokenizer), tokenizer)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_captured_steps_of_requests_that_had_to_wait_again_are_those_of_undisturbed_ones(
    tokenizer: Tokenizer, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_engine, "FIRST_TOKENS", 64)
    model = on_a_card(tokenizer)
    model.eos_ids = (10**6,)
    prompts, how = [[5, 6, 7]] * 8, [Sampling(seed=i, max_tokens=300) for i in range(8)]
    expected = complete(stepping(model, tokenizer), prompts, how)
    limit = 3 * stepping(model, tokenizer, precision=precision)._cache.size(300, 3)
    engine = stepping(model, tokenizer, cache_bytes=limit, precision=precision)
    done = complete(engine, prompts, how)
    assert engine.preempted and [len(c.tokens) for c in done.values()] == [300] * 8
    if precision == "float32":  # other numbers of rows round differently
        assert_same(expected, done, atol=1e-4)


@pytest.mark.gpu
def test_few_graphs_are_kept(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.engines.local.cuda_step.GRAPHS", 3)
    model, (prompts, how) = on_a_card(tokenizer), mixed(40)
    engine = stepping(model, tokenizer, slots=16)
    for _ in range(2):
        assert_same(
            complete(uncaptured(stepping(model, tokenizer, slots=16)), prompts, how), complete(engine, prompts, how)
        )
    assert engine._cuda is not None and engine._cuda.graphs is not None and len(engine._cuda.graphs) <= 3
