"""Linear attention over a tree of segments, and its gradients, are those of its transcripts laid apart."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import laid, normal, transcripts, trees
from tiny_models import KINDS, MIXED, SIZES, make, opened
from torch import Tensor
from torch.nn import functional

from posttrain.core.batch import Layout
from posttrain.models.hf import recurrence, transformers_folder
from posttrain.models.hf.recurrence import NORM, Recurrence
from posttrain.models.hf.token_mixing import (
    CONVOLUTION,
    RULE,
    LayoutMixing,
    NotFlatError,
    follow_layouts,
    layout_attention,
    mixing,
)
from posttrain.models.native.attention import AttentionVariant

transformers = pytest.importorskip("transformers")

KEYS, HEADS, SIZE, WIDTH = 2, 4, 5, 3


def inputs(layout: Layout, size: int = SIZE, width: int = WIDTH) -> list[Tensor]:
    """q, k, v, g, beta of a layout, [1, T, ...]."""
    total = len(layout.tokens)
    q, k = normal(2, 1, total, KEYS, size, seed=1)
    v, g, beta = (
        normal(1, total, HEADS, width, seed=2),
        normal(1, total, HEADS, seed=3),
        normal(1, total, HEADS, seed=4),
    )
    return [x.requires_grad_() for x in (q, k, v, -0.1 * g.exp(), beta.sigmoid())]


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None, normed: bool = True
) -> tuple[Tensor, Tensor]:
    """One transcript, a token at a time (Gated DeltaNet, arXiv 2412.06464, equation 10): S = a S (I - b k k^T) + b v k^T
    and o = S q, with S^T in place of S; of tensors without a batch."""
    if normed:
        q, k = (x / (x.square().sum(-1, keepdim=True) + NORM).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(HEADS // KEYS, 1) for x in (q * q.shape[-1] ** -0.5, k))
    state = v.new_zeros(HEADS, q.shape[-1], v.shape[-1]) if state is None else state
    found = []
    for t in range(len(q)):
        state = g[t].exp()[:, None, None] * state
        erased = torch.einsum("hk,hkv->hv", k[t], state)
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - erased))
        found.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(found), state


def same_as_apart(layout: Layout, given: list[Tensor], found: Tensor, alone: Callable[..., Tensor]) -> None:
    """`alone`: one transcript, of inputs without a batch."""
    together, apart = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for number, path in enumerate(transcripts(layout)):
        expected = alone(*(x[0, path] for x in given))
        assert torch.allclose(found[0, path], expected, rtol=1e-9, atol=1e-9)
        weight = normal(*expected.shape, seed=number)
        together, apart = together + (found[0, path] * weight).sum(), apart + (expected * weight).sum()
    both = [torch.autograd.grad(loss, given) for loss in (together, apart)]
    assert all(torch.allclose(*pair, rtol=1e-8, atol=1e-8) for pair in zip(*both, strict=True))


@pytest.mark.parametrize(("size", "width"), [(5, 3), (3, 5)])
@given(layout=trees(longest=90))
@settings(max_examples=6, deadline=None, derandomize=True)
def test_the_delta_rule_in_chunks_equals_its_transcripts_apart_token_by_token(
    size: int, width: int, layout: Layout
) -> None:
    given = inputs(layout, size, width)
    same_as_apart(layout, given, Recurrence(layout).attend(*given, True), lambda *x: one_by_one(*x)[0])


def slow_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, initial_state: Tensor | None, output_final_state: bool,
    cu_seqlens: Tensor, use_qk_l2norm_in_kernel: bool
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Twin of fla's `chunk_gated_delta_rule` for sequences that lie end to end."""
    assert q.shape[0] == 1 and cu_seqlens.dtype == torch.int64
    assert initial_state is None or len(initial_state) == len(cu_seqlens) - 1
    found = [
        one_by_one(
            *(x[0, begin:end] for x in (q, k, v, g, beta)),
            None if initial_state is None else initial_state[number],
            use_qk_l2norm_in_kernel,
        )
        for number, (begin, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True))
    ]
    out, states = zip(*found, strict=True)
    return torch.cat(out)[None], torch.stack(states) if output_final_state else None


@pytest.mark.parametrize(("size", "width", "normed"), [(5, 3, True), (3, 5, False)])
@given(layout=trees(longest=12))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_the_delta_rule_by_a_kernel_for_sequences_equals_its_transcripts_apart(
    size: int, width: int, normed: bool, layout: Layout
) -> None:
    q, k, *others = inputs(layout, size, width)
    given = [q, 0.3 * k, *others]  # short, since without norms long keys let the state grow
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrence, "fast_rule", lambda device: slow_rule)
        found = Recurrence(layout).attend(*given, normed)
    same_as_apart(layout, given, found, lambda *x: one_by_one(*x, normed=normed)[0])


@pytest.mark.gpu
def test_the_delta_rule_by_fla_equals_its_transcripts_apart() -> None:
    pytest.importorskip("fla")
    layout = laid([5, 70, 3, 40, 130, 9], [-1, 0, 0, 1, 0, -1])
    exact = inputs(layout, 32, 32)
    given = [x.detach().to("cuda", torch.float32 if x is exact[3] else torch.bfloat16).requires_grad_() for x in exact]
    expected = Recurrence(layout).attend(*exact, True)
    found = Recurrence(replace(layout, tokens=layout.tokens.cuda())).attend(*given, True)
    weight = normal(*expected.shape, seed=7)
    right = torch.autograd.grad((expected * weight).sum(), exact)
    gradients = torch.autograd.grad((found * weight.to(found)).sum(), given)
    for one, other in zip((found, *gradients), (expected, *right), strict=True):
        assert (one.cpu().double() - other).norm() < 2e-2 * other.norm()


@given(layout=trees(longest=9), width=st.integers(1, 5))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_a_convolution_equals_its_transcripts_apart(layout: Layout, width: int) -> None:
    x, weight = normal(1, len(layout.tokens), 6).requires_grad_(), normal(6, width, seed=1)

    def convolved(x: Tensor, weight: Tensor) -> Tensor:
        return functional.conv1d(functional.pad(x, (weight.shape[1] - 1, 0)), weight[:, None], groups=6)

    found = Recurrence(layout).convolve(convolved, x.transpose(1, 2), weight).transpose(1, 2)
    same_as_apart(layout, [x], found, lambda x: convolved(x.t()[None], weight)[0].t())


def test_chunks_are_short_where_all_segments_are_short() -> None:
    assert [Recurrence(laid([n, 3], [-1, 0]))._cut.size for n in (1, 16, 17, 40, 64, 500)] == [16, 16, 32, 64, 64, 64]


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text"])
def test_linear_attention_follows_a_layout_only_while_it_is_asked_to(kind: str, tmp_path: Path) -> None:
    model = opened(make(kind, tmp_path))
    [module] = {type(m).__module__ for m in model.inner.modules() if type(m).__name__.endswith("GatedDeltaNet")}
    own = vars(sys.modules[module])
    before = own[CONVOLUTION], own[RULE]
    follow_layouts(model.inner)
    assert (own[CONVOLUTION], own[RULE]) == before and all(f.follows_layouts for f in before)
    tokens, layout = torch.tensor([[5, 6, 7, 8, 9]]), laid([3, 2], [-1, -1])
    with model.decoding():
        plain = model.inner.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        with mixing(LayoutMixing(layout)):
            apart = model.inner.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    assert torch.allclose(plain[0, :3], apart[0, :3], atol=1e-5)
    assert not torch.allclose(plain[0, 3:], apart[0, 3:], atol=1e-2)


def test_a_cache_is_not_continued_over_a_layout(tmp_path: Path) -> None:
    model = opened(make("qwen3_5_text", tmp_path))
    with pytest.raises(NotFlatError, match="cache"), model.decoding(), mixing(LayoutMixing(laid([3], [-1]))):
        model.inner.base_model(input_ids=torch.tensor([[5, 6, 7]]), past_key_values=model.new_cache())


@pytest.mark.parametrize("window", [3, 1000])
def test_a_mask_is_read_as_a_window(window: int) -> None:
    from transformers import masking_utils as masks

    def read(function: Callable[..., Any]) -> Tensor | None:
        return transformers_folder._recorded_mask(q_length=4, kv_length=4, mask_function=function, local_size=window)

    assert read(masks.causal_mask_function) is None
    found = read(masks.sliding_window_causal_mask_function(window))
    assert found is not None and found.shape == (1, 1, 4, 4) and found.eq(window).all()
    others = [
        masks.sliding_window_causal_mask_function(window + 1),
        masks.bidirectional_mask_function,
        masks.sliding_window_bidirectional_mask_function(window),
        masks.or_masks(masks.causal_mask_function, masks.bidirectional_mask_function),
        masks.chunked_causal_mask_function(window, torch.zeros(1, dtype=torch.int64)),
        masks.packed_sequence_mask_function(torch.zeros(1, 4, dtype=torch.int64)),
    ]
    for function in [*others, *seen_late_or_early(window)]:
        with pytest.raises(NotFlatError):
            read(function)


def seen_late_or_early(window: int) -> list[Callable[..., Any]]:
    """Masks that are windows except for a few queries."""
    from transformers import masking_utils as masks

    near = masks.sliding_window_causal_mask_function(window)
    prefix = masks.or_masks(near, lambda batch, head, query, key: (query < 1) & (key < 2))
    first = masks.or_masks(near, lambda batch, head, query, key: (key == 0) & (query >= window))
    only_then = masks.or_masks(near, lambda batch, head, query, key: (key == 0) & (query == window))
    chunk = lambda batch, head, query, key: query // (3 * window + 4) == key // (3 * window + 4)  # noqa: E731
    return [prefix, first, only_then, masks.and_masks(near, chunk)]


@pytest.mark.parametrize("name", ["position_bias", "indices", "block_indices", "unheard_of"])
def test_a_layer_that_gives_its_attention_what_ours_does_not_read_is_computed_in_rows(name: str) -> None:
    def attend(**more: Any) -> Tensor:
        q = torch.zeros(1, 2, 4, 8)
        with mixing(transformers_folder._Recording(True)):
            return layout_attention(torch.nn.Identity(), q, q, q, None, 1.0, **more)[0]

    assert attend(**{name: None}, dropout=0.0, position_ids=torch.arange(4)).shape == (1, 4, 2, 8)
    with pytest.raises(NotFlatError, match=name):
        attend(**{name: torch.ones(1, 1, 4, 4)})


def test_values_wider_than_their_keys_are_computed_in_rows() -> None:
    q, v = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 9)
    with pytest.raises(NotFlatError, match="wider"), mixing(transformers_folder._Recording(True)):
        layout_attention(torch.nn.Identity(), q, q, v, None, 1.0)


@pytest.mark.parametrize("kind", ["glm_moe_dsa", *MIXED, *KINDS])
def test_shapes_alone_show_which_models_are_padded_rows(kind: str, tmp_path: Path) -> None:
    """Among them those that select keys, of which texts of a few tokens have too few, and those with state spaces."""
    folder = make(kind, tmp_path)
    described = json.loads((folder / "config.json").read_text())
    way = KINDS[kind][0] if kind in KINDS else "rows"
    assert (opened(folder).way, transformers_folder.shaped_backed(folder, described).way) == (way, way)


@pytest.mark.parametrize(("kind", "name"), [("qwen3", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager")])
def test_a_packed_model_samples_with_the_attention_that_gives_its_own_numbers(
    kind: str, name: str, tmp_path: Path
) -> None:
    model = opened(make(kind, tmp_path))
    assert (model.way, model.rows_attention) == ("flat", name)


def test_fused_attention_that_gives_other_numbers_is_not_sampled_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = transformers.AttentionInterface._global_mapping["sdpa"]

    def other(*args: Any, **named: Any) -> tuple[Tensor, None]:
        return fused(*args, **named)[0] * 1.1, None

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "sdpa", other)
    model = opened(make("qwen3", tmp_path))
    assert (model.way, model.rows_attention) == ("flat", "eager")


@pytest.mark.parametrize(("windows", "flat"), [((7, 7), True), ((None, None), True), ((7, 8), False), ((None, 7), False),
                                               ((7, None), False)])  # fmt: skip
def test_a_layer_whose_window_is_not_that_of_its_mask_is_computed_in_rows(
    windows: tuple[int | None, int | None], flat: bool
) -> None:
    own, masked = windows
    q, mask = torch.zeros(4, 2, 8), None if masked is None else torch.full((1, 1, 4, 4), float(masked))
    found = transformers_folder._Recording(True)
    if flat:
        found.attention(q, q, q, AttentionVariant(own), mask)
        assert found.attentions == 1
    else:
        with pytest.raises(NotFlatError):
            found.attention(q, q, q, AttentionVariant(own), mask)


def test_the_delta_rule_is_computed_in_float32_whatever_the_precision() -> None:
    layout = laid([5, 70, 3, 40, 9], [-1, 0, 0, 1, -1])
    exact = [x.detach().to(torch.bfloat16) for x in inputs(layout)]
    expected = Recurrence(layout).attend(*(x.double() for x in exact), True).to(torch.bfloat16)
    narrow = Recurrence(layout).attend(*exact, True)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow, expected, rtol=2**-7, atol=1e-6)  # one rounding to bfloat16
    wide = [x.float() for x in exact]
    with torch.autocast("cpu", torch.bfloat16):
        within = Recurrence(layout).attend(*wide, True)
    assert torch.equal(within, Recurrence(layout).attend(*wide, True))


@pytest.mark.parametrize("decay", [50.0, 1e4])
def test_what_decays_to_nothing_is_forgotten_and_has_finite_gradients(decay: float) -> None:
    """exp(-decay) is 0, or its inverse infinite, so that quotients of products of decays would not be numbers."""
    layout = laid([5, 70, 1, 64], [-1, 0, 1, 1])
    q, k, v, g, beta = (x.detach().float().requires_grad_() for x in inputs(layout))
    found = Recurrence(layout).attend(q, k, v, g * decay, beta, True)
    exact = [x.detach().double() for x in (q, k, v, g * decay, beta)]
    for path in transcripts(layout):
        expected, _ = one_by_one(*(x[0, path] for x in exact))
        assert torch.allclose(found[0, path].double(), expected, atol=1e-5)
    gradients = torch.autograd.grad(found.square().sum(), (q, k, v, g, beta))
    assert all(x.isfinite().all() for x in gradients)


def test_q_and_k_are_divided_by_their_norms_only_where_that_is_asked_for() -> None:
    layout = laid([5, 20, 3], [-1, 0, 0])
    q, k, v, g, beta = inputs(layout)
    normed = [x / (x.square().sum(-1, keepdim=True) + NORM).sqrt() for x in (q, k)]
    expected = Recurrence(layout).attend(q, k, v, g, beta, True)
    assert torch.allclose(Recurrence(layout).attend(*normed, v, g, beta, False), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["mamba2", "mamba", "qwen3_next", "lfm2", "gemma2", "gpt_oss"])
def test_what_else_mixes_tokens_is_found_whatever_the_precision(kind: str, tmp_path: Path) -> None:
    """A model that is not trained yet mixes tokens by less than a difference that bfloat16 excuses."""
    own = {"state_size": 8, "expand": 2} if kind == "mamba" else KINDS[kind][1]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **own})
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert opened(tmp_path, torch.bfloat16).way == ("rows" if kind.startswith("mamba") else "flat")
