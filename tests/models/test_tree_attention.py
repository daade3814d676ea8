"""Attention over a tree of segments, and its gradients, are those of its transcripts laid apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import ancestors, laid, normal, transcripts, trees
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from posttrain.core.batch import Layout
from posttrain.models.native import attention
from posttrain.models.native.attention import AttentionVariant, MaskedAttention, SegmentAttention, each_alone, filled
from posttrain.models.native.attention_flash import FlashAttention, Ragged
from posttrain.models.native.attention_flex import BLOCK, FlexAttention, blocks, sight
from posttrain.models.native.decoder import causal, new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.kernels import binder
from posttrain.models.native.segments import Forest
from posttrain.models.tokenizer.tokenizer import Tokenizer

needs_compiler = pytest.mark.skipif(binder.attention() is None, reason="needs a C compiler")


PLAIN = AttentionVariant()


def plain(q: Tensor, k: Tensor, v: Tensor, how: AttentionVariant = PLAIN) -> Tensor:
    """Causal softmax attention of one transcript: q [L, heads, size], k and v [L, kv_heads, size]."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    if how.cap is not None:
        scores = how.cap * torch.tanh(scores / how.cap)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    seen = seen if how.window is None else seen.triu(1 - how.window)
    weights = scores.exp() * seen
    total = weights.sum(-1, keepdim=True)
    if how.sinks is not None:
        total = total + how.sinks.exp()[:, None, None]
    return torch.einsum("hij,jhd->ihd", weights / total, v)


def apart(
    layout: Layout, x: Tensor, heads: tuple[int, int], how: AttentionVariant = PLAIN
) -> tuple[Tensor, Tensor, Tensor]:
    """Each transcript with weights of its own: (loss, outputs [T, ...], the sum of the weights of each output)."""
    many, few = heads
    loss, weights, out = x.new_zeros(()), x.new_zeros(len(x), many, x.shape[-1]), None
    out = torch.zeros_like(weights)
    for number, path in enumerate(transcripts(layout)):
        attended = plain(*x[path].split_with_sizes((many, few, few), 1), how)
        weight = normal(*attended.shape, seed=number)
        loss = loss + (attended * weight).sum()
        weights.index_add_(0, path, weight)
        out.index_copy_(0, path, attended.detach())
    return loss, out, weights


def close(found: Tensor, expected: Tensor, error: float) -> bool:
    return bool((found - expected).norm() <= error * max(expected.norm().item(), 1e-3))


class SlowKernels:
    """Twins of the flash kernels of a GPU, a pair of sequences at a time: what they return, and take back."""

    @staticmethod
    def _pairs(ragged: Ragged) -> Iterator[tuple[slice, slice, Tensor]]:
        for i in range(len(ragged.ends) - 1):
            rows, keys = (slice(int(ends[i]), int(ends[i + 1])) for ends in (ragged.ends, ragged.key_ends))
            n, m = rows.stop - rows.start, keys.stop - keys.start
            assert 0 < n <= ragged.longest and 0 < m <= ragged.longest_keys
            distance = torch.arange(n)[:, None] + (m - n) - torch.arange(m)  # the last query's own key is the last one
            seen = (distance >= 0) | (not ragged.causal)
            yield rows, keys, seen & (distance <= ragged.left) if ragged.left >= 0 else seen

    @staticmethod
    def _scores(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        return (torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)

    @classmethod
    def forward(cls, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged) -> tuple[Tensor, ...]:
        out, logsumexp = torch.full_like(q, torch.nan), q.new_full(q.shape[1::-1], torch.nan)
        for rows, keys, seen in cls._pairs(ragged):
            scores = cls._scores(q[rows], k[keys], seen)
            values = v[keys].repeat_interleave(q.shape[1] // v.shape[1], 1)
            out[rows] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), values)
            logsumexp[:, rows] = scores.logsumexp(-1)
        return out, logsumexp, torch.tensor(1), torch.tensor(2)

    @classmethod
    def backward(
        cls,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        ragged: Ragged,
        *states: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert [int(state) for state in states] == [1, 2]
        repeat = q.shape[1] // k.shape[1]
        to_q, to_k, to_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows, keys, seen in cls._pairs(ragged):
            p = (cls._scores(q[rows], k[keys], seen) - logsumexp[:, rows, None]).exp()  # of all keys, also elsewhere
            key, value = (x[keys].repeat_interleave(repeat, 1) for x in (k, v))
            to_p = torch.einsum("ihd,jhd->hij", grad[rows], value)
            to_scores = p * (to_p - (grad[rows] * out[rows]).sum(-1).t()[:, :, None]) * q.shape[-1] ** -0.5
            to_q[rows] = torch.einsum("hij,jhd->ihd", to_scores, key)
            to_k[keys] = torch.einsum("hij,ihd->jhd", to_scores, q[rows]).unflatten(1, (-1, repeat)).sum(2)
            to_v[keys] = torch.einsum("hij,ihd->jhd", p, grad[rows]).unflatten(1, (-1, repeat)).sum(2)
        return to_q, to_k, to_v


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (7, 1)])
@given(layout=trees())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_tree_through_kernels_for_ragged_sequences_equals_its_transcripts_apart(
    heads: tuple[int, int], layout: Layout
) -> None:
    many, few = heads
    x = normal(len(layout.tokens), many + 2 * few, 8).requires_grad_()
    loss, expected, weights = apart(layout, x, heads)
    attend = FlashAttention(layout, Forest(layout), kernels=(SlowKernels.forward, SlowKernels.backward))
    found = attend(*x.split_with_sizes((many, few, few), 1))
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-10)
    (gradient,), (right,) = (torch.autograd.grad(total, x) for total in ((found * weights).sum(), loss))
    assert torch.allclose(gradient, right, rtol=1e-10, atol=1e-10)


def variant(window: int | None = None, cap: float | None = None, sinks: int = 0) -> AttentionVariant:
    """`sinks`: the count of heads, or 0."""
    return AttentionVariant(window, cap, normal(sinks, seed=5).requires_grad_() if sinks else None)


def same_as_apart(
    layout: Layout, heads: tuple[int, int], how: AttentionVariant, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> None:
    """Values, and gradients of q, k, v and the sinks, are those of the transcripts apart."""
    many, few = heads
    x = normal(len(layout.tokens), many + 2 * few, 8).requires_grad_()
    loss, expected, weights = apart(layout, x, heads, how)
    found = attend(*x.split_with_sizes((many, few, few), 1))
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-10)
    inputs = [x] if how.sinks is None else [x, how.sinks]
    both = [torch.autograd.grad(total, inputs) for total in ((found * weights).sum(), loss)]
    assert all(torch.allclose(*pair, rtol=1e-10, atol=1e-10) for pair in zip(*both, strict=True))


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (7, 1)])
@given(layout=trees(), window=st.none() | st.integers(1, 60), sinks=st.booleans())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_windows_and_sinks_through_kernels_for_ragged_sequences_equal_transcripts_apart(
    heads: tuple[int, int], layout: Layout, window: int | None, sinks: bool
) -> None:
    how = variant(window, sinks=heads[0] * sinks)
    attend = FlashAttention(layout, Forest(layout), window, (SlowKernels.forward, SlowKernels.backward))
    same_as_apart(layout, heads, how, lambda q, k, v: attend(q, k, v, how.sinks))


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (7, 1)])
@given(layout=trees(), window=st.none() | st.integers(1, 60), cap=st.sampled_from([None, 0.5]), sinks=st.booleans())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_windows_caps_and_sinks_in_torch_equal_transcripts_apart(
    heads: tuple[int, int], layout: Layout, window: int | None, cap: float | None, sinks: bool
) -> None:
    how = variant(window, cap, heads[0] * sinks)
    attend = SegmentAttention(layout)
    same_as_apart(layout, heads, how, lambda q, k, v: attend(0, q, k, v, how))


@pytest.mark.parametrize("how", [variant(9), variant(cap=0.5), variant(9, sinks=4)])
def test_windows_caps_and_sinks_in_torch_are_computed_in_float32_whatever_the_precision(how: AttentionVariant) -> None:
    q, k, v = normal(len(TREE.tokens), 8, 8).to(torch.bfloat16).split_with_sizes((4, 2, 2), 1)
    attend = SegmentAttention(TREE)
    expected = attend(0, q.double(), k.double(), v.double(), how).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        within = attend(0, q.float(), k.float(), v.float(), how).to(torch.bfloat16)
    narrow = attend(0, q, k, v, how)
    assert narrow.dtype == torch.bfloat16 and torch.equal(narrow, within)
    torch.testing.assert_close(narrow, expected, rtol=2**-7, atol=1e-6)  # one rounding to bfloat16


def test_layers_with_different_windows_share_a_layout() -> None:
    attend, longest = SegmentAttention(TREE), max(map(len, transcripts(TREE)))
    for window in (longest - 1, 3, longest, 9, longest - 1, None):
        how = variant(window)
        same_as_apart(TREE, (4, 2), how, lambda q, k, v, how=how: attend(0, q, k, v, how))  # type: ignore[misc]


@pytest.mark.parametrize(("heads", "window"), [((4, 2), 30), ((7, 1), None)])
def test_caps_through_flex_attention_equal_transcripts_apart(
    heads: tuple[int, int], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own reference of flex attention, which has gradients on a CPU as well once torch's check lets it."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None, raising=False)
    layout = laid([5, 70, 3, 40, 130, 9], [-1, 0, 0, 1, 0, -1])
    attend = FlexAttention(layout, Forest(layout), window)
    same_as_apart(layout, heads, variant(window, 0.5), lambda q, k, v: attend(q, k, v, 0.5))


@given(layout=trees(longest=300), window=st.none() | st.integers(1, 400))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_flex_attention_reads_each_block_with_a_token_that_is_seen(layout: Layout, window: int | None) -> None:
    """It computes the function of two tokens in all blocks but those of which each token sees all."""
    reads_what_is_seen(layout, window)


@pytest.mark.parametrize("window", [1, 2, 128, 129, 130, 256, 257, 258])
def test_flex_attention_reads_each_block_of_which_a_window_reaches_one_token(window: int) -> None:
    reads_what_is_seen(laid([256, 200, 56, 128], [-1, 0, 1, 0]), window)


def reads_what_is_seen(layout: Layout, window: int | None) -> None:
    expected = torch.zeros(len(layout.tokens), len(layout.tokens), dtype=torch.bool)
    for path in transcripts(layout):
        place = torch.arange(len(path))
        distance = place[:, None] - place
        seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        expected[path[:, None], path] = seen
    count = -(-len(expected) // BLOCK)
    every = torch.arange(count * BLOCK)
    see = sight(layout, Forest(layout), window)(every, every, every[:, None], every)
    assert torch.equal(see[: len(expected), : len(expected)], expected)
    assert not see[: len(expected), len(expected) :].any() and see.any(1).all()
    some, whole = (torch.from_numpy(x) for x in blocks(layout, Forest(layout), window))
    tiles = see.view(count, BLOCK, count, BLOCK).transpose(1, 2).flatten(2)
    assert torch.equal(some, tiles.any(-1)) and not (whole & ~tiles.all(-1)).any()
    mask = FlexAttention(layout, Forest(layout), window).mask
    for row in range(count):
        read = mask.kv_indices[0, 0, row, : mask.kv_num_blocks[0, 0, row]].tolist()
        assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
        full = mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]].tolist()
        assert sorted([*read, *full]) == some[row].nonzero().flatten().tolist()
        assert full == whole[row].nonzero().flatten().tolist()


def test_blocks_within_a_long_segment_and_its_prefix_are_whole() -> None:
    layout = laid([256, 512], [-1, 0])
    _, whole = blocks(layout, Forest(layout), None)
    assert (whole == np.tril(np.ones((6, 6), dtype=bool), -1)).all()
    _, whole = blocks(layout, Forest(layout), 300)
    assert [*zip(*whole.nonzero(), strict=True)] == [(k, k - 1) for k in range(1, 6)]


@pytest.mark.parametrize(("how", "kind"), [(variant(9, sinks=4), FlashAttention), (variant(9, 0.5), FlexAttention),
                                           (variant(9, 0.5, 4), MaskedAttention), (variant(500), None)])  # fmt: skip
def test_on_a_gpu_windows_and_sinks_use_flash_kernels_and_caps_flex_attention(
    how: AttentionVariant, kind: type | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window over the longest transcript is none."""
    used: list[tuple[type, int | None]] = []

    def way(self: SegmentAttention, kind: type, window: int | None = None) -> Callable[..., Tensor]:
        used.append((kind, window))
        return lambda q, *_: q

    monkeypatch.setattr(attention, "flash_covers", lambda q: True)
    monkeypatch.setattr(SegmentAttention, "_way", way)
    q, k, v = normal(len(TREE.tokens), 8, 8).split_with_sizes((4, 2, 2), 1)
    SegmentAttention(TREE)(0, q, k, v, how)
    assert used == [(kind, 9)] if kind is not None else all(window is None for _, window in used)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (8, 1)])
@pytest.mark.parametrize("how", [variant(30), variant(sinks=1), variant(30, sinks=1), variant(30, 2.0)])
def test_windows_caps_and_sinks_on_a_gpu_equal_transcripts_apart(heads: tuple[int, int], how: AttentionVariant) -> None:
    many, few = heads
    layout = laid([5, 70, 3, 40, 130, 9], [-1, 0, 0, 1, 0, -1])
    exact = normal(len(layout.tokens), many + 2 * few, 64).to(torch.bfloat16).double().requires_grad_()
    sinks = None if how.sinks is None else normal(many, seed=5).requires_grad_()
    loss, expected, weights = apart(layout, exact, heads, replace(how, sinks=sinks))
    inputs = [exact] if sinks is None else [exact, sinks]
    right = torch.autograd.grad(loss, inputs)
    given = [x.detach().to("cuda", torch.bfloat16 if x is exact else torch.float32).requires_grad_() for x in inputs]
    attend = SegmentAttention(replace(layout, tokens=layout.tokens.cuda()))
    found = attend(
        0, *given[0].split_with_sizes((many, few, few), 1), replace(how, sinks=None if sinks is None else given[1])
    )
    gradients = torch.autograd.grad((found * weights.to(found)).sum(), given)
    assert close(found.cpu().double(), expected, 1e-2)
    assert all(close(a.cpu().double(), b, 2e-2) for a, b in zip(gradients, right, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (7, 1)])
@pytest.mark.parametrize("size", [8, 64, 128])
def test_a_tree_through_flash_kernels_equals_its_transcripts_apart(heads: tuple[int, int], size: int) -> None:
    many, few = heads
    layout = laid([5, 70, 3, 40, 130, 9], [-1, 0, 0, 1, 0, -1])
    exact = normal(len(layout.tokens), many + 2 * few, size).to(torch.bfloat16).double().requires_grad_()
    loss, expected, weights = apart(layout, exact, heads)
    (right,) = torch.autograd.grad(loss, exact)
    x = exact.detach().to("cuda", torch.bfloat16).requires_grad_()
    found = SegmentAttention(replace(layout, tokens=layout.tokens.cuda())).flash(
        *x.split_with_sizes((many, few, few), 1)
    )
    (gradient,) = torch.autograd.grad((found * weights.to(found)).sum(), x)
    assert close(found.cpu().double(), expected, 1e-2) and close(gradient.cpu().double(), right, 1e-2)


@pytest.mark.parametrize("path", ["joined", "masked"])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (7, 1)])
@given(layout=trees())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_tree_in_torch_equals_its_transcripts_apart(path: str, heads: tuple[int, int], layout: Layout) -> None:
    many, few = heads
    x = normal(len(layout.tokens), many + 2 * few, 8).requires_grad_()
    loss, expected, weights = apart(layout, x, heads)
    found = getattr(SegmentAttention(layout), path)(*x.split_with_sizes((many, few, few), 1))
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-10)
    (gradient,), (right,) = (torch.autograd.grad(total, x) for total in ((found * weights).sum(), loss))
    assert torch.allclose(gradient, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("is_compiled", [True, False])
@given(layout=trees())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_segments_attended_to_one_by_one_have_the_same_bits_in_any_company(is_compiled: bool, layout: Layout) -> None:
    def attended(layout: Layout, x: Tensor) -> Tensor:
        return each_alone(layout, len(layout.length))(0, *x.split_with_sizes((4, 2, 2), 1))

    x = normal(len(layout.tokens), 8, 16)
    _, expected, _ = apart(layout, x, (4, 2))
    x = x.float()
    with pytest.MonkeyPatch.context() as patch:
        if not is_compiled:
            patch.setattr(attention, "compiled_covers", lambda *_: False)
        found = attended(layout, x)
        assert close(found, expected, 1e-6)
        for k in range(len(layout.length)):
            line = [*ancestors(layout.prefix, k), k]
            places = torch.cat([torch.arange(layout.length[s]) + layout.start[s] for s in line])
            alone = laid([layout.length[s] for s in line], range(-1, len(line) - 1))
            assert torch.equal(attended(alone, x[places]), found[places])


@needs_compiler
@pytest.mark.parametrize(("threads", "heads"), [(1, (4, 2)), (2, (3, 3)), (1, (8, 2))])
@given(layout=trees(longest=150))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_tree_in_compiled_code_equals_its_transcripts_apart(
    threads: int, heads: tuple[int, int], layout: Layout
) -> None:
    many, few = heads
    exact = normal(len(layout.tokens), many + 2 * few, 32).requires_grad_()
    loss, expected, weights = apart(layout, exact, heads)
    (right,) = torch.autograd.grad(loss, exact)
    x = exact.detach().float().requires_grad_()
    attend, before = SegmentAttention(layout), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert attend.compiled.covers(few)
        found = attend(0, *x.split_with_sizes((many, few, few), 1))
        (gradient,) = torch.autograd.grad((found * weights).sum(), x)
    finally:
        torch.set_num_threads(before)
    assert close(found, expected, 1e-6) and close(gradient, right, 2e-6)


@given(layout=trees(longest=9))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_second_derivatives_of_a_tree_are_those_of_its_transcripts_apart(layout: Layout) -> None:
    x = normal(len(layout.tokens), 4, 4).requires_grad_()
    loss, _, weights = apart(layout, x, (2, 1))
    with sdpa_kernel(SDPBackend.MATH):
        found = SegmentAttention(layout)(0, *x.split_with_sizes((2, 1, 1), 1))
        twice = []
        for total in ((found * weights).sum(), loss):
            (gradient,) = torch.autograd.grad(total, x, create_graph=True)
            twice.append(torch.autograd.grad((gradient * normal(*x.shape, seed=9)).sum(), x)[0])
    assert torch.allclose(*twice, rtol=1e-9, atol=1e-9)


@needs_compiler
@given(layout=trees(), cut=st.integers(1, 38))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_where_a_segment_is_cut_in_two_changes_nothing(layout: Layout, cut: int) -> None:
    """Nor do its bits: a number is summed in the order of the tokens that a query sees."""
    if layout.length[0] <= cut:
        return
    first = len(layout.length)  # the number of what comes before the cut; what comes behind keeps the segment's
    split = Layout(
        layout.tokens,
        layout.position,
        (layout.start[0] + cut, *layout.start[1:], layout.start[0]),
        (layout.length[0] - cut, *layout.length[1:], cut),
        (first, *layout.prefix[1:], layout.prefix[0]),
    )
    q, k, v = normal(len(layout.tokens), 8, 32).float().split_with_sizes((4, 2, 2), 1)
    one, other = (SegmentAttention(x)(0, q, k, v) for x in (layout, split))
    assert torch.equal(one, other)


TREE = laid((5, 7, 1, 3, 30, 2, 6, 9), (-1, 0, 1, 1, 3, 0, -1, 4))
"""Two roots, one of them with five generations; a leaf of one token."""


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_compiler), False])
def test_a_model_learns_from_a_tree_what_it_learns_from_its_transcripts_apart(
    tokenizer: Tokenizer, compiled: bool
) -> None:
    """Scored tokens lie anywhere: in a prefix that several transcripts share they are scored for each of them."""
    config = DecoderConfig(64, 48, 2, 4, 2, 32, 64, 128, tied=True)
    model = new_decoder(config, 0) if compiled else tiny(tokenizer, dtype=torch.float64)
    assert compiled == (SegmentAttention(TREE).compiled.covers(2, model.head.dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3) if parameter.ndim == 2 and compiled else None
    paths = transcripts(TREE)
    assert len(paths) == 4 and max(map(len, paths)) == 5 + 7 + 3 + 30 + 9
    weight = [
        normal(len(path), model.config.hidden, seed=number).to(model.head.dtype) for number, path in enumerate(paths)
    ]
    together = model.hidden(TREE, torch.cat(paths))
    hidden = [model(TREE.tokens[path], torch.arange(len(path)), causal) for path in paths]
    assert close(together, torch.cat(hidden), 2e-6 if compiled else 1e-12)
    losses = (together * torch.cat(weight)).sum(), sum((h * w).sum() for h, w in zip(hidden, weight, strict=True))
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]  # type: ignore[arg-type]
    assert all(close(a, b, 1e-5 if compiled else 1e-10) for a, b in zip(*gradients, strict=True))


def test_a_forest_knows_who_sees_whom() -> None:
    forest = Forest(TREE)
    assert forest.trees == [[0, 1, 2, 3, 4, 7, 5], [6]] and forest.prefixes == [0, 1, 3, 4]
    assert forest.before == [0, 5, 12, 12, 15, 5, 0, 45] and forest.subtree(3) == [3, 4, 7]
    assert forest.path(5).tolist() == [0, 1, 2, 3, 4] and forest.path(6).tolist() == []
    assert forest.path(7).tolist() == [*range(12), 13, 14, 15, *range(16, 46)]
    assert forest.tokens([2, 5]).tolist() == [12, 46, 47]


@pytest.mark.parametrize("lengths", [(0,), (3, 0), (0, 3)])
def test_an_empty_segment_is_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="a segment has tokens"):
        Forest(laid(lengths, [-1, 0][: len(lengths)]))


def test_a_segment_that_continues_itself_is_refused() -> None:
    with pytest.raises(AssertionError, match="its own ancestor"):
        Forest(Layout(TREE.tokens, TREE.position, (0, 2, 4), (2, 2, 2), (-1, 2, 1)))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_layout_is_filled_whatever_its_positions(rows: int) -> None:
    position = TREE.position if rows == 1 else TREE.position.expand(rows, -1)
    full = filled(Layout(TREE.tokens, position, TREE.start, TREE.length, TREE.prefix), 64)
    assert full.tokens.shape == (64,) and full.position.shape == (*position.shape[:-1], 64)
    assert full.length[-1] == 1 and full.prefix[-1] == -1 and full.position[..., -1].eq(0).all()
