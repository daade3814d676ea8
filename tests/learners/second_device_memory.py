"""The memory estimate is near the size of the tensors on a second device, and opening a model takes no more."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from second_device import bytes_held, peak, second_device
from sharded import micro_batches
from torch import Tensor

from posttrain.config.resolve import filled
from posttrain.config.training import SFT
from posttrain.core.batch import Batch, Outputs, Stats
from posttrain.core.transcripts import Transcript
from posttrain.learners import host_memory, optimizer_chunks
from posttrain.learners.devices import moved
from posttrain.learners.forward_pass import REFERENCE
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.adapters.lora import LoRA, attach, begin
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.critic import ActionValueModel, SoftStateValueModel, ValueModel
from posttrain.models.hf.transformers_folder import load_backed
from posttrain.models.json_files import read_json
from posttrain.models.native.attention import SegmentAttention
from posttrain.models.native.decoder import new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.native.float8 import float8_product
from posttrain.models.native.linear import Linear
from posttrain.models.native.quantized import KINDS, QuantizedLinear
from posttrain.models.reward_model import ScoreShape, new_reward_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training import memory_estimate
from posttrain.training.memory_estimate import MemoryEstimate, UpdateSize, estimate_memory, estimate_roles
from posttrain.training.memory_plan import shapes_of
from posttrain.training.sources.sft_source import Demonstrations

SECOND = second_device()
SHAPE = DecoderConfig(64, 64, 6, 4, 2, 16, 192, 64, family="llama")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(new_decoder(SHAPE, 0), tmp_path, Tokenizer.train(["abc 0123456789"], 64, "characters"))
    return tmp_path


def opened(folder: Path, of: str, packed: str) -> Any:
    if of == "policy":
        return load_model(folder, device=SECOND, packed=packed)
    return new_reward_model(folder, ScoreShape(), 0, SECOND, packed=packed)


@pytest.mark.parametrize("of", ["policy", "reward model"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_model_is_read_with_one_unpacked_matrix_at_a_time(kind: str, of: str, folder: Path) -> None:
    gc.collect()
    before = bytes_held()
    with peak() as most:
        model = opened(folder, of, kind)
    decoder = getattr(model, "backbone", model)
    layers = [m for m in decoder.modules() if isinstance(m, Linear)]
    assert len(layers) == 4 * SHAPE.layers and all(isinstance(m, QuantizedLinear) for m in layers)
    whole, largest = SHAPE.layer_numbers * 4, 2 * SHAPE.hidden * SHAPE.intermediate * 4
    held = bytes_held() - before
    assert most[0] - before < held + 3.5 * largest  # it, and what its quantization computes
    assert held < whole / 2 and held + 3.5 * largest < whole
    with peak() as most:
        attach(decoder, LoRA(2, 4.0, quantize=kind), lambda name: name.endswith("_proj"))
        begin(decoder, 0)
    assert most[0] - before < held + largest, "no weight is unpacked for its shape"


# -- updates -----------------------------------------------------------------------------------------------------------

LARGE = DecoderConfig(600, 96, 2, 2, 1, 48, 384, 64, qk_norm=True)
BATCHES = micro_batches(3)
TOKENS = max(batch.layout.tokens.numel() for batch in BATCHES)


class Loss:
    """Likelihood, and values where there is a critic."""

    def __init__(self, *wants: str) -> None:
        self.wants = frozenset(wants)

    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        loss = -(batch.weight * outputs.logp).sum()
        if outputs.q is not None and outputs.expected_q is not None:
            loss = loss + (batch.weight * ((outputs.q - 1) ** 2 - outputs.expected_q)).sum()
        return loss if outputs.value is None else loss + (batch.weight * (outputs.value - 1) ** 2).sum()


def peak_of(
    make: Callable[[], LocalLearner], wants: tuple[str, ...] = (), batches: Sequence[Batch] = BATCHES
) -> tuple[LocalLearner, int]:
    """Return a learner, and the most bytes of the second device that it has during an evaluation and an update."""
    gc.collect()
    before = bytes_held()
    ours = make()
    found = [moved(batch, ours.device) for batch in batches]
    ours.update(found, Loss(*wants))  # makes the moments
    with peak() as most:
        if REFERENCE in ours.others:
            ours.evaluate(found, of=REFERENCE)
        ours.update(found, Loss(*wants))
    return ours, most[0] - before


def near(estimate: MemoryEstimate | None, measured: int, within: float = 0.1) -> None:
    assert estimate is not None and abs(estimate.total - measured) < within * measured, (str(estimate.parts), measured)


@pytest.fixture(autouse=True)
def logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All logits of a micro-batch are computed at once."""
    monkeypatch.setattr(memory_estimate, "GPU_LOGITS", max(batch.target.numel() for batch in BATCHES) * LARGE.vocab)


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_counts_packed_weights_and_the_one_that_is_unpacked(kind: str) -> None:
    def packed() -> LocalLearner:
        model: Any = new_decoder(LARGE, 0).to(SECOND)
        attach(model, LoRA(2, 4.0, quantize=kind), lambda name: name.endswith("_proj"))
        begin(model, 0)
        return LocalLearner(model, Optimization(lr=1e-2))

    ours, measured = peak_of(packed)
    estimate = estimate_memory(ours, UpdateSize(TOKENS, False, None, 1e12))
    assert estimate is not None
    held = sum(x.nbytes for x in (*ours.model.parameters(), *ours.model.buffers()))  # type: ignore[attr-defined]
    assert abs(estimate.parts["weights"] - held) < 0.01 * held and estimate.parts["unpacked"] > 0
    if kind == "int8":  # on a processor, unpacking nf4 takes bitsandbytes a table of positions, on a GPU it does not
        near(estimate, measured)


@pytest.mark.parametrize("shape", [LARGE, replace(LARGE, layers=1, hidden=32, intermediate=512)], ids=["wide", "long"])
def test_the_estimate_counts_what_rounding_to_float8_takes(
    shape: DecoderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix, or the gradient of a product that is larger; and no copies of matrices in bfloat16."""
    pytest.importorskip("torchao")
    batches = BATCHES if shape is LARGE else [long_batch(200)]
    tokens = max(batch.layout.tokens.numel() for batch in batches)
    monkeypatch.setattr(memory_estimate, "GPU_LOGITS", max(batch.target.numel() for batch in batches) * shape.vocab)
    how: dict[str, Any] = {"precision": "bfloat16", "product": float8_product(torch.device("cpu"))}
    ours, measured = peak_of(
        lambda: LocalLearner(new_decoder(shape, 0).to(SECOND), Optimization(), **how), batches=batches
    )
    estimate = estimate_memory(ours, UpdateSize(tokens, False, None, 1e12))
    near(estimate, measured)
    assert estimate is not None and estimate.parts["rounding to float8"] > 0.05 * measured


def long_batch(length: int) -> Batch:
    transcript = Transcript()
    transcript.observe([3])
    transcript.imitate([3 + place % 38 for place in range(length)])
    return Demonstrations([], 1, length + 1, 0, torch.device("cpu")).batches([[transcript]])[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["optimizer", "activations"])
def test_the_estimate_counts_what_offloading_leaves(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (optimizer_chunks, memory_estimate):
        monkeypatch.setattr(module, "CHUNK", 1)
    monkeypatch.setattr(host_memory, "LEAST", 1)
    ours, measured = peak_of(lambda: LocalLearner(new_decoder(LARGE, 0).to(SECOND), Optimization(), offload=[what]))
    near(estimate_memory(ours, UpdateSize(TOKENS, False, None, 1e12, offload=frozenset([what]))), measured)


@pytest.mark.parametrize("roles", [("critic",), ("reference",), ("reference", "critic")])
def test_the_estimate_of_another_gpu_counts_the_models_that_are_there(roles: tuple[str, ...]) -> None:
    def device(role: str) -> torch.device:
        return SECOND if role in roles else torch.device("cpu")

    def apart() -> LocalLearner:
        others: Any = {REFERENCE: new_decoder(LARGE, 1).to(device("reference")).requires_grad_(False)}
        critic = ValueModel(LARGE.hidden, new_decoder(LARGE, 5), 0).to(device("critic"))
        return LocalLearner(new_decoder(LARGE, 0), Optimization(), others=others, critic=critic)

    ours, measured = peak_of(apart, ("value",))
    size = UpdateSize(TOKENS, False, None, 1e12, elsewhere=dict.fromkeys(roles, "1"), wants=frozenset({"value"}))
    [(place, found)] = estimate_roles(ours, size).items()
    assert place == "1" and str(found).startswith(f"memory of GPU 1 ({', '.join(roles)}): about ")
    near(found, measured)


@pytest.mark.parametrize("kind", [ActionValueModel, SoftStateValueModel])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_estimate_counts_a_critic_of_actions_with_its_copies(kind: Any, elsewhere: bool) -> None:
    wants = ("q", "value") if kind is SoftStateValueModel else ("q",)

    def with_critic() -> LocalLearner:
        policy = new_decoder(LARGE, 0).to("cpu" if elsewhere else SECOND)
        return LocalLearner(
            policy, Optimization(), critic=kind(new_decoder(replace(LARGE, tied=True), 5), 0).to(SECOND)
        )

    ours, measured = peak_of(with_critic, wants)
    size = UpdateSize(TOKENS, False, None, 1e12, elsewhere={"critic": "1"} if elsewhere else {}, wants=frozenset(wants))
    near(estimate_roles(ours, size)["1"] if elsewhere else estimate_memory(ours, size), measured, within=0.05)


# -- models that transformers computes ---------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "moe_intermediate_size": 48, "vocab_size": 200,
}  # fmt: skip
LENGTH = 160  # tokens of the text
LAYERS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "qwen3_5_text": {"layer_types": [*["linear_attention"] * 3, "full_attention"]},
}


def test_opening_a_model_of_transformers_leaves_only_its_weights_on_the_device(tmp_path: Path) -> None:
    """Not what a pass over the probes kept, from which the model's activations are measured."""
    folder = tiny_models.make("phi3", tmp_path, **SIZES)
    gc.collect()
    before = bytes_held()
    model = load_backed(folder, read_json(folder / "config.json"), device=SECOND)
    gc.collect()
    held = [*model.parameters(), *model.buffers()]
    assert model.kept_per_token > 0 and bytes_held() - before <= sum(x.nbytes for x in held) + 64


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that keeps what a GPU's keeps."""
    before = SegmentAttention.__call__

    def attend(self: SegmentAttention, layer: int, q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        return before(self, layer, q, k, v, *how) if self._forest.prefixes else self.joined(q, k, v)

    monkeypatch.setattr(SegmentAttention, "__call__", attend)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("kind", "precision"),
    [("phi3", "float32"), ("qwen3_moe", "bfloat16"), ("gpt_oss", "float32"), ("qwen3_5_text", "float32")],
)
def test_the_estimate_from_a_config_alone_is_what_a_model_of_transformers_takes(
    kind: str, precision: Any, recompute: bool, tmp_path: Path, flash: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Dense, a mixture of experts, one with windows and sinks, and a hybrid with the gated delta rule in torch."""
    folder, batch = tiny_models.make(kind, tmp_path, **{**SIZES, **LAYERS.get(kind, {})}), long_batch(LENGTH)
    monkeypatch.setattr(memory_estimate, "GPU_LOGITS", batch.target.numel() * SIZES["vocab_size"])

    def backed() -> LocalLearner:
        model = load_backed(folder, read_json(folder / "config.json"), device=SECOND)
        model.recomputes, model.activation_room = recompute, 1e12
        return LocalLearner(model, Optimization(), precision=precision)

    _, measured = peak_of(backed, batches=[batch] * 3)
    ours = filled(SFT, {"tasks": "x", "precision": precision})
    shaped = shapes_of(ours, folder)
    near(estimate_memory(shaped, UpdateSize(LENGTH, recompute, None, 1e12, row=LENGTH)), measured)
