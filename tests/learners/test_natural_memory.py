"""The memory estimate of a natural step (TRPO) is near the bytes of the tensors that one has.

They are counted on a processor without compiled code, in tensors with numbers, over a whole update: gradients, conjugate
gradient with its products, and line search. On the second device wrapped tensors outlive some that autograd frees.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.config.resolve import filled
from posttrain.config.training import RL
from posttrain.core.batch import Batch, Outputs, Stats
from posttrain.core.transcripts import Transcript
from posttrain.core.trust_region import TrustRegion
from posttrain.core.types import UserError
from posttrain.learners import natural_memory
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.adapters.lora import LoRA, attach, begin
from posttrain.models.critic import ValueModel
from posttrain.models.hf.pass_memory import ByteCount
from posttrain.models.native.decoder import new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.kernels import build
from posttrain.training import memory_estimate
from posttrain.training.memory_advice import advice, memory_lines, refuse_too_large
from posttrain.training.memory_estimate import MemoryEstimate, UpdateSize, estimate_memory
from posttrain.training.memory_plan import shapes_of
from posttrain.training.sources.sft_source import Demonstrations

SHAPE = DecoderConfig(600, 96, 2, 2, 1, 48, 384, 256, qk_norm=True)
WIDE = replace(SHAPE, layers=6, hidden=192, head_size=96, intermediate=768, tied=True)
REGION = TrustRegion(iterations=2, halvings=1)


class Loss:
    """Likelihood, and values where there is a critic."""

    def __init__(self, critic: bool) -> None:
        self.wants = frozenset({"value"} if critic else ())

    def __call__(self, outputs: Outputs, batch: Batch, stats: Stats) -> Tensor:
        loss = -(batch.weight * outputs.logp).sum()
        return loss if outputs.value is None else loss + (batch.weight * (outputs.value - 1) ** 2).sum()


def batch_of(rows: int, length: int) -> Batch:
    found = []
    for row in range(rows):
        transcript = Transcript()
        transcript.observe([3 + row])  # others would share a prefix
        transcript.imitate([3 + (row + place) % 38 for place in range(length)])
        found.append([transcript])
    return Demonstrations([], 1, rows * (length + 1), 0, torch.device("cpu")).batches(found)[0]  # type: ignore[arg-type]


def learner(shape: DecoderConfig, adapted: bool = False, critic: bool = False) -> LocalLearner:
    model: Any = new_decoder(shape, 0)
    if adapted:
        attach(model, LoRA(4, 8.0), lambda name: name.endswith("_proj"))
        begin(model, 0)
    values = ValueModel(shape.hidden, new_decoder(replace(shape, layers=1), 5), 0) if critic else None
    return LocalLearner(model, Optimization(trust_region=REGION), critic=values)


@pytest.fixture(autouse=True)
def in_torch() -> Any:
    before = build.used()
    build.use(False)
    yield
    build.use(before)


@pytest.mark.parametrize(
    ("shape", "rows", "length", "how"),
    [
        (SHAPE, 1, 160, {}),
        (SHAPE, 4, 40, {}),  # scores grow with the square of a row's tokens
        (SHAPE, 1, 160, {"critic": True}),  # whose gradients and moments are there
        (WIDE, 1, 24, {}),  # mostly vectors
        (WIDE, 2, 64, {"adapted": True}),  # activations alone, of more layers than are counted
    ],
)
def test_the_estimate_is_within_a_tenth_of_the_bytes_of_an_update(
    shape: DecoderConfig, rows: int, length: int, how: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_estimate, "GPU_LOGITS", rows * length * shape.vocab)
    ours, batches = learner(shape, **how), [batch_of(rows, length)] * 2
    assert batches[0].layout.length == (length,) * rows
    ours.update(batches, Loss(bool(how.get("critic"))))  # makes the critic's moments
    held = sum(p.nbytes for m in (ours.model, ours.critic) if m is not None for p in m.parameters())  # type: ignore[attr-defined]
    held += sum(x.nbytes for state in ours.optimizer.state.values() for x in state.values() if x.ndim)
    with ByteCount(ours.model) as count:  # type: ignore[arg-type]
        stats = ours.update(batches, Loss(bool(how.get("critic"))))
    assert stats.means()["trust_region/kl"] > 0
    found = estimate_memory(ours, UpdateSize(rows * length, False, None, 1e12, row=length))
    assert found is not None and found.parts["second derivatives"] > 0
    within = 0.03 if length == 24 else 0.1  # a vector too many is a fourteenth
    assert abs(found.total - held - count.most) < within * (held + count.most), (str(found.parts), held, count.most)


def test_layers_that_are_left_out_are_counted_like_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    few, all_layers = learner(WIDE).model, learner(WIDE).model
    found = natural_memory.product_bytes(few, 2, 32)  # type: ignore[arg-type]
    monkeypatch.setattr(natural_memory, "FEW", (1, WIDE.layers))
    assert abs(natural_memory.product_bytes(all_layers, 2, 32) / found - 1) < 0.01  # type: ignore[arg-type]


def shaped(shape: DecoderConfig, **options: Any) -> LocalLearner:
    return shapes_of(filled(RL, {"tasks": "x", "env": "x", "model": "x", "algorithm": "trpo", **options}), shape)


def test_a_run_shows_and_plans_the_memory_of_its_natural_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without options that its second derivatives refuse, and without moments, which it has not."""
    monkeypatch.setattr(memory_estimate, "GPU_LOGITS", 128 * 2_000)
    large = replace(SHAPE, vocab=2_000, hidden=512, layers=3, intermediate=2048, family="qwen2")
    ours, size = shaped(large), UpdateSize(128, False, None, 1e9, row=64)
    found = estimate_memory(ours, size)
    assert isinstance(found, MemoryEstimate) and found.parts["moments"] == found.parts["gradients"] == 0
    weights = sum(p.nbytes for p in ours.model.parameters())  # type: ignore[attr-defined]
    assert found.parts["weights"] == 2 * weights and found.parts["vectors"] == 5 * weights
    assert memory_lines(ours, size)[0] == str(found) and "second derivatives" in str(found)
    [line] = advice(found, ours, replace(size, room=0.9 * found.total))
    assert "--lora 16" in line and not any(f"--{way}" in line for way in ("recompute", "offload activations", "shard"))
    with pytest.raises(UserError, match="this run needs .* beside its activations") as told:
        refuse_too_large(ours, replace(size, room=weights))
    assert "--shard" not in str(told.value) and "moments" not in str(told.value)


def test_quantized_policies_are_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match="knows the second derivatives of trpo for native decoders without --quantize"):
        shaped(replace(SHAPE, family="qwen2"), lora=4, quantize="int8")
