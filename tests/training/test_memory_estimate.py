"""The memory that a run takes of a GPU is known before its first step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import tiny
from layouts import segments
from torch import nn

from posttrain.config.resolve import filled
from posttrain.config.training import RL, SFT
from posttrain.core.trust_region import TrustRegion
from posttrain.core.types import UserError
from posttrain.engines.local.engine_weights import own_copy
from posttrain.engines.local.step_cache import row_bucket, token_bucket
from posttrain.learners.gradient_sums import BUCKET
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.adapters.lora import LoRA, attach, begin
from posttrain.models.native.decoder import Decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.float8 import float8_product
from posttrain.models.native.kernels import build
from posttrain.models.native.linear import accumulating, multiplying
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.memory_advice import advice, memory_lines
from posttrain.training.memory_advice import refuse_too_large as refuse
from posttrain.training.memory_estimate import SamplingSize, UpdateSize, estimate_memory
from posttrain.training.memory_plan import shapes_of

QWEN = DecoderConfig(
    vocab=151936, hidden=896, layers=24, heads=14, kv_heads=2, head_size=64, intermediate=4864, context=4096,
    rope_theta=1e6, qkv_bias=True, tied=True,
)  # fmt: skip
QWEN_1B = replace(QWEN, hidden=1536, layers=28, heads=12, head_size=128, intermediate=8960)
QWEN_7B = replace(
    QWEN, vocab=152064, hidden=3584, layers=28, heads=28, kv_heads=4, head_size=128, intermediate=18944, tied=False
)
H200 = 150.1e9
REPLIES = SamplingSize(256, 512)


def learner_of(shape: DecoderConfig, adapted: bool = False) -> LocalLearner:
    """A learner without memory: of shapes alone."""
    how: dict[str, Any] = {"lora": 16, "frozen_weights": "bfloat16"} if adapted else {}
    return shapes_of(filled(SFT, {"tasks": "x", "precision": "bfloat16", **how}), replace(shape, family="qwen2"))


@pytest.mark.parametrize(
    ("shape", "tokens", "sampling", "adapted", "measured"),
    [
        (QWEN, 32_768, REPLIES, False, 37.9e9),  # GRPO
        (QWEN_1B, 16_384, REPLIES, False, 61.9e9),  # GRPO
        (QWEN_1B, 16_384, None, False, 54.8e9),  # SFT
        (QWEN_7B, 7_168, SamplingSize(32, 1024), True, 36.1e9),  # GRPO, --lora 16 --frozen-weights bfloat16 --recompute
    ],
)
def test_the_estimate_is_within_a_tenth_of_the_peak_that_an_h200_had(
    shape: DecoderConfig, tokens: int, sampling: SamplingSize | None, adapted: bool, measured: float
) -> None:
    found = estimate_memory(learner_of(shape, adapted), UpdateSize(tokens, adapted, sampling, H200))
    assert found is not None and abs(found.total - measured) < 0.1 * measured, str(found)


def test_what_is_on_the_host_or_elsewhere_takes_no_memory_of_the_gpu() -> None:
    learner = learner_of(QWEN_1B)
    size = UpdateSize(16_384, False, None, H200)
    parts = {
        what: estimate_memory(learner, replace(size, offload=frozenset([what]))).parts  # type: ignore[union-attr]
        for what in ("", "optimizer", "activations")
    }
    whole, largest = parts[""], 4 * QWEN_1B.vocab * QWEN_1B.hidden
    changed = {what: {name for name in whole if own[name] != whole[name]} for what, own in parts.items()}
    assert changed == {"": set(), "optimizer": {"moments"}, "activations": {"activations"}}
    assert parts["optimizer"]["moments"] == 2 * largest < whole["moments"] / 5
    assert parts["activations"]["activations"] == whole["activations"] / QWEN_1B.layers * 2


@pytest.mark.parametrize("how", ["plain", "frozen", "int8"])
def test_copies_for_engines_that_sample_during_updates_are_counted(how: str, tokenizer: Tokenizer) -> None:
    model = tiny(tokenizer)
    if how != "plain":
        attach(model, LoRA(2, 4.0, quantize="int8" if how == "int8" else ""), lambda name: name.endswith("o_proj"))
        begin(model, 0)
    for parameter in model.parameters():
        if how == "frozen" and not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    copied: Any = own_copy(model)
    held = sum({p.data_ptr(): p.nbytes for p in copied.parameters()}.values())
    learner, size = LocalLearner(model, Optimization()), UpdateSize(64, False, None, H200)
    once, often = (estimate_memory(learner, replace(size, copies=copies)) for copies in (0, 3))
    assert once is not None and often is not None and often.total - once.total == 3 * held


@pytest.mark.parametrize(("shares", "copies"), [(2, 0), (1, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("adapted", [False, True])
def test_an_engine_here_holds_its_own_matrices_in_bfloat16_and_copies_that_wait_are_whole(
    shares: int, copies: int, adapted: bool, tokenizer: Tokenizer
) -> None:
    model = tiny(tokenizer)
    if adapted and shares == 1:
        attach(model, LoRA(2, 4.0), lambda name: name.endswith("o_proj"))
        begin(model, 0)
    whole, narrow = (own_copy(model, products).parameters() for products in (None, torch.bfloat16))  # type: ignore[attr-defined]
    one, other = (sum(p.nbytes for p in own) for own in (whole, narrow))
    learner = LocalLearner(model, Optimization(), precision="bfloat16")
    size = UpdateSize(64, False, SamplingSize(8, 16, copies > 0), H200, shares, copies=copies)
    found = estimate_memory(learner, size)
    assert found is not None and other < 0.9 * one
    assert found.parts["engine's weights"] == other + max(0, copies - 1) * one
    cache = 2 * 2 * model.config.layers * model.config.kv_heads * model.config.head_size
    head = 2 * model.config.vocab * model.config.hidden
    assert found.parts["engine"] == head + cache * row_bucket(8) * token_bucket(16)


def test_an_engine_that_samples_during_updates_never_rests() -> None:
    learner, size = learner_of(QWEN), UpdateSize(1024, False, SamplingSize(256, 4096), 24e9)
    ahead = replace(size, sampling=replace(SamplingSize(256, 4096), asynchronous=True))
    for room, rests in ((24e9, True), (200e9, False)):
        found, awake = (estimate_memory(learner, replace(one, room=room)) for one in (size, ahead))
        assert found is not None and awake is not None
        assert ("engine" not in found.parts) == rests and awake.parts["engine"] > 0


@pytest.mark.parametrize(
    ("options", "copies", "ahead"),
    [({}, 0, False), ({"async_steps": 1}, 1, True), ({"async_steps": 3}, 3, True),
     ({"async_steps": 1, "engine": "vllm"}, 1, None)],
)  # fmt: skip
def test_the_engine_has_a_copy_and_each_step_that_waits(
    options: dict[str, Any], copies: int, ahead: bool | None
) -> None:
    config = filled(RL, {"tasks": "x", "env": "x", "model": "x", **options})
    size = UpdateSize.of(config, 64, H200)
    assert size.copies == copies and (None if size.sampling is None else size.sampling.asynchronous) == ahead


def test_what_processes_sum_at_once_is_less_than_what_the_backward_pass_had() -> None:
    found = estimate_memory(learner_of(QWEN), UpdateSize(1, True, None, H200))
    assert found is not None and found.parts["logits"] > 2 * BUCKET


@pytest.fixture
def compiled() -> Iterator[None]:
    """With compiled operations, as on a GPU, also where an earlier test's run had none."""
    before = build.used()
    build.use(True)
    yield
    build.use(before)


class Keeping(torch.autograd.Function):
    """A product that keeps both of its factors, as torchao's does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t().to(x.dtype)


def torchaos(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return float8_product(torch.device("cpu"))(x, weight)


PRODUCTS: dict[str, Any] = {"bfloat16": None, "keeping": Keeping.apply, "float8": torchaos}


@pytest.mark.parametrize("kind", ["float32", *PRODUCTS])
@pytest.mark.parametrize("recompute", [True, False])
def test_activations_are_those_that_an_update_keeps(
    kind: str, recompute: bool, tokenizer: Tokenizer, compiled: None
) -> None:
    if kind == "float8":
        pytest.importorskip("torchao")
    narrow, product = kind != "float32", PRODUCTS.get(kind)
    model = tiny(tokenizer)
    shape = replace(model.config, hidden=256, layers=6, heads=4, kv_heads=2, head_size=64, intermediate=768, vocab=64)
    model = Decoder(shape)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.1)
    model.recomputes = recompute
    layout, sizes = segments(*[(64, -1)] * 8), dict[int, int]()
    own = {p.data_ptr() for p in model.parameters()}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.ndim >= 2 and x.data_ptr() not in own and x.untyped_storage().data_ptr() not in own:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with (
        accumulating(),
        multiplying(product),
        torch.autocast("cpu", torch.bfloat16, enabled=narrow),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
    ):
        kept = model.hidden(layout, torch.arange(512))
    expected = 512 * shape.activation_bytes(narrow, recompute, float8=product is not None)
    of_layer = shape.activation_bytes(narrow, float8=product is not None) // shape.layers
    found = sum(sizes.values()) + (512 * of_layer if recompute else 0)
    assert kept.requires_grad and 0.85 * expected < found < 1.15 * expected, (found, expected)


def test_a_run_that_may_not_fit_is_shown_what_would_take_less() -> None:
    learner = learner_of(QWEN_1B)
    size = UpdateSize(16_384, False, REPLIES, 48e9)
    found = estimate_memory(learner, size)
    assert found is not None
    [line] = advice(found, learner, size)
    assert all(f"{way} (" in line for way in ("--recompute layers", "--tokens-per-microbatch 4096", "--lora 16 with "
                                               "--frozen-weights bfloat16"))  # fmt: skip
    assert "--offload optimizer (" in line and "--offload activations (" in line and "--offload reference" not in line
    less = replace(size, offload=frozenset(["optimizer"]), room=14e9)
    [line] = advice(estimate_memory(learner, less), learner, less)  # type: ignore[arg-type]
    assert "--offload activations optimizer (" in line and "--offload optimizer (" not in line
    assert advice(found, learner, replace(size, room=H200)) == []
    learner.optimization = replace(learner.optimization, optimizer="lion")  # which --offload optimizer refuses
    [line] = advice(found, learner, size)
    assert "--offload activations (" in line and "--offload optimizer" not in line
    assert str(found).startswith("memory of the GPU: about ") and "activations 2" in str(found)


def test_a_run_is_refused_from_a_tenth_beyond_the_gpu_on_whatever_its_micro_batches_are() -> None:
    learner, size = learner_of(QWEN_7B), UpdateSize(1024, False, None, 80 * 2.0**30)
    needed = 4.0 * 4 * QWEN_7B.parameters  # weights, gradients, two moments
    with pytest.raises(UserError) as told:
        refuse(learner, size)
    assert str(told.value) == (
        "this run needs 113.5 GiB (weights 28.4 + gradients 28.4 + moments 56.7) beside its activations, and the GPU has "
        "80.0 GiB: --offload optimizer (60.8 GiB), --lora 16 with --frozen-weights bfloat16 (14.2 GiB), --weights bfloat16 "
        "with --optimizer adamw8bit (56.7 GiB), --shard --processes 2 on as many GPUs (56.7 GiB each) would take less"
    )
    assert memory_lines(learner, size)[1:] == [str(told.value)]
    for tokens in (1, 100_000):
        refuse(learner, replace(size, tokens=tokens, room=needed / 1.1 + 1))
        with pytest.raises(UserError):
            refuse(learner, replace(size, tokens=tokens, room=needed / 1.1 - 1))
    refuse(learner, replace(size, offload=frozenset(["optimizer"])))
    refuse(learner_of(QWEN_7B, adapted=True), size)
    refuse(learner, replace(size, shares=2))


@pytest.mark.parametrize(
    ("processes", "shares", "room", "offer", "gib"),
    [
        (4, 1, 80, "--shard --shard-size 2", 113.46 / 2),  # four GPUs, each with a copy
        (4, 1, 40, "--shard", 113.46 / 4),
        (8, 2, 40, "--shard-size 4", 113.46 / 4),
        (8, 2, 20, "--shard without --shard-size", 113.46 / 8),
        (12, 4, 20, "--shard-size 6", 113.46 / 6),
        (8, 2, 10, "--shard --processes 16 without --shard-size on as many GPUs", 113.46 / 16),
        (8, 8, 10, "--shard --processes 16 on as many GPUs", 113.46 / 16),
    ],
)
def test_a_refusal_shards_over_the_gpus_of_the_run_before_more(
    processes: int, shares: int, room: int, offer: str, gib: float
) -> None:
    size = UpdateSize(1024, False, None, room * 2.0**30, shares=shares, processes=processes)
    with pytest.raises(UserError) as told:
        refuse(learner_of(QWEN_7B), size)
    said = str(told.value).partition(": ")[2].removesuffix(" would take less").split("), ")[-1]
    assert said == f"{offer} ({gib:.1f} GiB each)"


def test_a_refusal_names_nothing_that_other_options_exclude() -> None:
    learner, size = learner_of(QWEN_7B, adapted=True), UpdateSize(1, False, None, 8 * 2.0**30)
    with pytest.raises(UserError, match="--shard --processes 4 on as many GPUs") as told:
        refuse(learner, size)
    assert "--lora" not in str(told.value) and "--offload" not in str(told.value)
    with pytest.raises(UserError, match="use a smaller model") as told:
        refuse(learner, replace(size, offload=frozenset(["activations"])))
    assert "--shard" not in str(told.value)
    learner.optimization = replace(learner.optimization, optimizer="lion")  # which --shard refuses
    with pytest.raises(UserError, match="use a smaller model"):
        refuse(learner, size)
    whole = learner_of(QWEN_7B)
    whole.trust_region = TrustRegion()  # without moments
    refuse(whole, replace(size, room=60 * 2.0**30))
