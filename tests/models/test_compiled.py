"""Compiled code samples and learns what torch's operations would, for every shape of model."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from layouts import normal, segments
from places import TESTS
from sampled import complete, ragged
from torch.nn.attention import SDPBackend, sdpa_kernel

from posttrain.core.types import Completion, Sampling, UserError
from posttrain.engines.local.compiled_step import interleaved, panels
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.models.losses.likelihood import token_logp
from posttrain.models.native.attention import SegmentAttention
from posttrain.models.native.decoder import Decoder, causal, new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.kernels import binder, build
from posttrain.models.native.linear import accumulating
from posttrain.models.tokenizer.tokenizer import Tokenizer

needs_compiler = pytest.mark.skipif(binder.decode() is None, reason="needs a C compiler")

EMULATED = TESTS / "emulated"

PLAIN = DecoderConfig(
    vocab=64, hidden=48, layers=2, heads=4, kv_heads=2, head_size=16, intermediate=80, context=256, tied=True
)
SHAPES = {
    "plain": PLAIN,
    "own output head": replace(PLAIN, tied=False),
    "every bias": replace(PLAIN, qkv_bias=True, o_bias=True, mlp_bias=True),
    "norms of heads": replace(PLAIN, qk_norm=True),
    "one query head a key head": replace(PLAIN, kv_heads=4),
    "seven query heads a key head": replace(PLAIN, heads=7, kv_heads=1),
    "small heads": replace(PLAIN, head_size=8),
    "heads of whole panels": replace(PLAIN, head_size=32),
    "heads of five vectors": replace(PLAIN, head_size=80),
    "no whole vectors": replace(PLAIN, hidden=45, heads=3, kv_heads=1, head_size=10, intermediate=51, vocab=67),
    "slowed rotation": replace(PLAIN, rope_scaling={"rope_type": "linear", "factor": 4.0}),
}


def decoder(config: DecoderConfig) -> Decoder:
    model = new_decoder(config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # far from uniform, so that mistakes show
        for parameter in model.parameters():
            parameter.mul_(6) if parameter.ndim == 2 else parameter.add_(
                torch.randn(parameter.shape, generator=generator) / 3
            )
    model.eos_ids = (3,)
    return model


def in_torch(model: Decoder, tokenizer: Tokenizer, slots: int = 256) -> LocalEngine:
    """An engine that decodes in torch's operations."""
    build.use(False)
    engine = LocalEngine(model, tokenizer, slots)
    build.use(True)
    return engine


def both(model: Decoder, tokenizer: Tokenizer, prompts: list[list[int]], how: list[Sampling], slots: int = 11):  # type: ignore[no-untyped-def]
    """Completions by torch's operations and by compiled code."""
    engines = [in_torch(model, tokenizer, slots=slots), LocalEngine(model, tokenizer, slots=slots)]
    assert [e.backend for e in engines] == ["torch's operations", "compiled code"]
    return [complete(engine, prompts, how) for engine in engines]


def assert_same(one: dict[int, Completion], other: dict[int, Completion], tolerance: float = 2e-5) -> None:
    assert one.keys() == other.keys()
    for id, completion in one.items():
        assert completion.tokens == other[id].tokens and completion.stop == other[id].stop
        assert torch.allclose(torch.tensor(completion.logp), torch.tensor(other[id].logp), atol=tolerance)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_model_samples_what_torch_samples(tokenizer: Tokenizer, threads: int, shape: str) -> None:
    prompts, how = ragged(30)
    assert_same(*both(decoder(SHAPES[shape]), tokenizer, prompts, how))


@needs_compiler
def test_long_prompts_and_replies_cross_every_block_of_the_cache(tokenizer: Tokenizer, threads: int) -> None:
    model = decoder(PLAIN)
    model.eos_ids = (64,)  # none: replies have the lengths that are asked for
    prompts = [[5 + i % 50 for i in range(length)] for length in (1, 15, 16, 17, 63, 64, 65, 120)]
    how = [Sampling(seed=i, max_tokens=n) for i, n in enumerate((130, 1, 15, 16, 17, 64, 65, 129))]
    assert_same(*both(model, tokenizer, prompts, how, slots=5))


@needs_compiler
@pytest.mark.parametrize(
    "asked",
    [{"temperature": 0.0}, {"temperature": 0.6}, {"top_p": 0.8}, {"top_k": 5}, {"stop": ("1", "a")}],
    ids=lambda asked: next(iter(asked)) + " " + str(next(iter(asked.values()))),
)
def test_every_way_of_sampling_is_that_of_torch(tokenizer: Tokenizer, asked: dict[str, object]) -> None:
    prompts, how = ragged(20, **asked)
    assert_same(*both(decoder(PLAIN), tokenizer, prompts, how))


@needs_compiler
def test_a_rollout_is_the_same_bits_whatever_runs_beside_it(tokenizer: Tokenizer) -> None:
    model, prompt = decoder(PLAIN), [7, 8, 9, 10]
    how = [Sampling(seed=i, max_tokens=5 + 3 * i) for i in range(40)]
    together = complete(LocalEngine(model, tokenizer), [prompt] * 40, how)
    for i in (0, 13, 39):
        alone = complete(LocalEngine(model, tokenizer), [prompt], [how[i]])[0]
        assert alone.logp == together[i].logp and alone.tokens == together[i].tokens


@needs_compiler
@pytest.mark.parametrize("filter", [{"top_p": 0.7}, {"top_k": 4}])
def test_a_rollout_is_the_same_bits_beside_and_after_requests_with_top_p_or_top_k(
    tokenizer: Tokenizer, filter: dict[str, object]
) -> None:
    prompts, how = ragged(12)
    expected = complete(LocalEngine(decoder(PLAIN), tokenizer), prompts, how)
    engine = LocalEngine(decoder(PLAIN), tokenizer)
    mixed = [replace(s, **filter) if i % 3 == 0 else s for i, s in enumerate(how)]  # type: ignore[arg-type]
    beside, after = complete(engine, prompts, mixed), complete(engine, prompts, how)
    assert after == expected
    assert all((beside[i] == expected[i]) == (i % 3 != 0) for i in expected)


@needs_compiler
def test_bits_do_not_depend_on_the_number_of_threads(tokenizer: Tokenizer) -> None:
    model, before = decoder(PLAIN), torch.get_num_threads()
    found = []
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(complete(LocalEngine(model, tokenizer), [[5, 6]] * 20, ragged(20)[1]))
    torch.set_num_threads(before)
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def emulated() -> ctypes.CDLL | None:
    """decode.c with matrix tiles in plain C."""
    flags = build.FLAGS
    build.FLAGS = (*flags, "-O1", "-I", str(EMULATED), "-D__AMX_BF16__=1", "-D__AVX512F__=1")
    try:
        return build._loaded.__wrapped__("decode.c")  # type: ignore[no-any-return]
    finally:
        build.FLAGS = flags


@pytest.fixture(params=["this processor's", "emulated"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in bfloat16: those of this processor (AMX or AVX-512), or matrix tiles in plain C."""
    if request.param == "emulated":
        emulated, loaded = request.getfixturevalue("emulated"), build._loaded
        monkeypatch.setattr(build, "_loaded", lambda source: emulated if source == "decode.c" else loaded(source))
    elif not (library := binder.decode()) or not library.bf16:
        pytest.skip("needs a processor with products in bfloat16")


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_float32_nearly(tokenizer: Tokenizer, threads: int, shape: str, tiles: None) -> None:
    model = new_decoder(SHAPES[shape], seed=1)
    engine = LocalEngine(model, tokenizer, precision="bfloat16")
    assert engine.backend == "compiled code"
    prompts = [[5, 6, 7]] * 40
    how = [Sampling(seed=i, max_tokens=4) for i in range(40)]
    exact, rounded = complete(in_torch(model, tokenizer), prompts, how), complete(engine, prompts, how)
    same = [i for i in exact if exact[i].tokens == rounded[i].tokens]
    gaps = torch.tensor([exact[i].logp for i in same if len(exact[i].tokens) == 4])
    gaps = (gaps - torch.tensor([rounded[i].logp for i in same if len(exact[i].tokens) == 4])).abs()
    assert len(gaps) > 30 and 0 < gaps[:, 1:].max() < 0.02
    assert complete(engine, prompts[:3], how[:3])[2].logp == rounded[2].logp, "whatever runs beside it"


@needs_compiler
def test_weights_that_change_in_place_are_seen(tokenizer: Tokenizer) -> None:
    model = decoder(PLAIN)
    engine = LocalEngine(model, tokenizer, slots=2)
    prompts, how = ragged(6)
    before = complete(engine, prompts, how)
    with torch.no_grad():
        model.layers[0].down.weight.mul_(3)
    after = complete(engine, prompts, how)
    assert after != before
    assert_same(complete(in_torch(model, tokenizer), prompts, how), after)


@needs_compiler
def test_nothing_is_held_when_nothing_runs(tokenizer: Tokenizer) -> None:
    engine = LocalEngine(decoder(PLAIN), tokenizer)
    complete(engine, *ragged(6))
    step = engine._compiled
    assert step is not None and step._packed is None and not step._buffers and step._rotary is None


@needs_compiler
def test_weights_that_are_no_numbers_are_not_sampled_from_in_silence(tokenizer: Tokenizer) -> None:
    model = decoder(PLAIN)
    with torch.no_grad():
        model.embed.weight[7:] = torch.nan  # the prompt's own are sound: it is noticed while decoding
    with pytest.raises(UserError, match="probabilities are not finite"):
        complete(LocalEngine(model, tokenizer), [[5, 6]], [Sampling(seed=1, max_tokens=8)])


def test_without_a_compiler_torch_decodes(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, how = ragged(6)
    expected = complete(in_torch(decoder(PLAIN), tokenizer), prompts, how)
    monkeypatch.setattr(binder, "decode", lambda: None)
    engine = LocalEngine(decoder(PLAIN), tokenizer)
    assert engine.backend == "torch's operations" and complete(engine, prompts, how) == expected


def test_panels_hold_a_weight_in_the_order_in_which_it_is_read() -> None:
    weight = torch.arange(40 * 6).view(40, 6).float()
    wide, narrow = (panels(weight, dtype, lanes=16) for dtype in (torch.float32, torch.bfloat16))
    assert wide.shape == (2, 6, 32) and narrow.shape == (2, 16, 32, 2)
    assert torch.equal(wide[0, :, 5], weight[5]) and torch.equal(wide[1, :, 7], weight[39]) and not wide[1, :, 8:].any()
    assert torch.equal(narrow[1, :3, 7].flatten(), weight[39]) and not narrow[:, 3:].any()
    rows = interleaved(torch.arange(40).float(), lanes=16)  # 20 of gate, 20 of up
    assert rows[:16].tolist() == list(range(16)) and rows[16:32].tolist() == list(range(20, 36))
    assert rows[32:36].tolist() == [16, 17, 18, 19] and rows[48:52].tolist() == [36, 37, 38, 39] and len(rows) == 64


# -- training ----------------------------------------------------------------------------------------------------------


def gradients(model: Decoder, used: bool, precision: str = "float32") -> list[torch.Tensor]:
    """Of all weights after two passes, as an update makes them; with compiled code or without."""
    build.use(used)
    model.zero_grad()
    for number in (0, 1):
        tokens = torch.arange(60 + number) % 37
        with accumulating(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            hidden = model(tokens, torch.arange(len(tokens)), causal)
            token_logp(hidden, model.head, tokens).sum().backward()
    build.use(True)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@needs_compiler
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_every_shape_of_model_are_those_of_torch(threads: int, shape: str, precision: str) -> None:
    model = decoder(SHAPES[shape]) if precision == "float32" else new_decoder(SHAPES[shape], seed=1)
    ours, theirs = gradients(model, True, precision), gradients(model, False, precision)
    exact = gradients(copy.deepcopy(model).double(), False)  # what both come near
    assert len(ours) == len(theirs) == len(exact) == len(list(model.parameters()))
    assert any(not torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), "compiled code is to be used"
    for mine, other, right in zip(ours, theirs, exact, strict=True):
        limit = 1e-6 * right.norm() + (3 if precision == "float32" else 1.5) * (other - right).norm()
        assert (mine - right).norm() < limit


@needs_compiler
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_evaluation_and_an_update_compute_the_same_bits(model: Decoder, precision: str) -> None:
    """So that a ratio of probabilities before any update is 1."""
    tokens, place = torch.arange(40) % 17, torch.arange(40)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        with torch.no_grad():
            evaluated = model(tokens, place, causal)
        with accumulating():
            trained = model(tokens, place, causal)
    assert torch.equal(evaluated, trained)


@needs_compiler
def test_frozen_weights_get_no_gradient(model: Decoder) -> None:
    frozen = model.layers[0].down.weight.requires_grad_(False)
    found = gradients(model, True)
    assert frozen.grad is None and len(found) == len(list(model.parameters())) - 1
    for mine, other in zip(found, gradients(model, False), strict=True):
        assert torch.allclose(mine, other, rtol=1e-3, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("size", [8, 20, 32, 64, 96])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (7, 1)])
def test_attention_and_its_gradients_are_those_of_torch(threads: int, size: int, heads: tuple[int, int]) -> None:
    """Of segments of all lengths, alone, behind a prefix, and as a prefix; q, k and v lie in one tensor or apart."""
    layout = segments(
        (9, -1), (30, 0), (3, 0), (131, 0), (1, 0), (14, -1), (12, 5), (2, -1), (29, 5), (30, 0), (200, -1)
    )
    total, (many, few) = len(layout.tokens), heads
    exact = normal(total, many + 2 * few, size).requires_grad_()
    weight = normal(total, many, size, seed=5)
    attend = SegmentAttention(layout)
    assert attend.compiled.covers(few)
    expected = attend.masked(*exact.split_with_sizes((many, few, few), 1))
    (right,) = torch.autograd.grad((expected * weight).sum(), exact)
    for apart in (False, True):
        x = exact.detach().float().requires_grad_()
        q, k, v = x.split_with_sizes((many, few, few), 1)
        if apart:
            q, k, v = (part.transpose(0, 1).contiguous().transpose(0, 1) for part in (q, k, v))
        found = attend(0, q, k, v)
        (gradient,) = torch.autograd.grad((found * weight).sum(), x)
        assert (found - expected).norm() < 1e-6 * expected.norm()
        assert (gradient - right).norm() < 1e-6 * right.norm()
        assert torch.equal(attend(0, q.detach(), k.detach(), v.detach()), found)


@needs_compiler
def test_attention_in_bfloat16_is_that_of_float32_rounded(threads: int) -> None:
    layout = segments((9, -1), (30, 0), (3, 0), (14, -1))
    x = normal(56, 6, 32).bfloat16().requires_grad_()
    wide = x.detach().float().requires_grad_()
    (found, to_narrow), (expected, to_wide) = (
        (out, torch.autograd.grad(out.float().sum(), y)[0])
        for y in (x, wide)
        for out in [SegmentAttention(layout)(0, *y.split_with_sizes((2, 2, 2), 1))]
    )
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected.bfloat16())
    assert (to_narrow - to_wide).norm() < 2e-2 * to_wide.norm()


@needs_compiler
def test_what_compiled_attention_does_not_cover_goes_through_torch() -> None:
    layout = segments((9, -1), (30, 0))
    attend = SegmentAttention(layout)
    assert attend.compiled.covers(2)
    wide = normal(39, 6, 64).split_with_sizes((2, 2, 2), 1)
    assert not attend.compiled.covers(2, wide[0].dtype), "float64"
    assert torch.allclose(attend(0, *wide), attend.masked(*wide), rtol=1e-12)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    assert not attend.compiled.covers(2), "a thread without work"
    torch.set_num_threads(before)
    x = normal(39, 6, 64).requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):  # where second derivatives are wanted
        out = SegmentAttention(layout)(0, *x.split_with_sizes((2, 2, 2), 1))
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        assert torch.autograd.grad(first.square().sum(), x)[0].abs().sum() > 0
