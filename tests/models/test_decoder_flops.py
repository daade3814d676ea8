"""The arithmetic of updates is counted from shapes, and is that of the matrices and of the pairs that attention sees."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from layouts import segments

from posttrain.config.resolve import filled
from posttrain.config.training import RL, SFT
from posttrain.core.trust_region import TrustRegion
from posttrain.learners.local_learner import LocalLearner
from posttrain.models.critic import ActionValueModel
from posttrain.models.gpu_speed import dense_peak
from posttrain.models.hf.backed import Sizes
from posttrain.models.native.decoder import Decoder
from posttrain.models.native.decoder_flops import forward_flop, trunk
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.training import gpu_use
from posttrain.training.gpu_use import speed
from posttrain.training.memory_plan import shapes_of
from posttrain.training.update_work import UpdateWork, attended_pairs

SHAPE = DecoderConfig(
    vocab=1000, hidden=64, layers=3, heads=4, kv_heads=2, head_size=24, intermediate=160, context=512, qkv_bias=True
)


@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, kv_heads=4, qk_norm=True, tied=True, layers=1)])
def test_the_trunk_is_the_matrices_of_the_layers(shape: DecoderConfig) -> None:
    with torch.device("meta"):
        layers = Decoder(shape).layers
    assert trunk(shape) == sum(p.numel() for name, p in layers.named_parameters() if p.ndim == 2 and "norm" not in name)


def test_pairs_are_those_that_each_token_sees() -> None:
    random = Random("trees")
    for _ in range(50):
        count = random.randint(1, 6)
        layout = segments(*[(random.randint(1, 5), random.randint(-1, k - 1)) for k in range(count)])
        seen = 0
        for k in range(count):
            for place in range(layout.length[k]):
                seen += place + 1
                at = layout.prefix[k]
                while at >= 0:
                    seen, at = seen + layout.length[at], layout.prefix[at]
        assert attended_pairs(layout) == seen


def test_a_forward_pass_is_counted_product_by_product() -> None:
    tokens, scored = 5, 2
    flop = 0
    for rows, inputs, outputs in [
        *[(tokens, 64, (4 + 2 + 2) * 24), (tokens, 4 * 24, 64), (tokens, 64, 2 * 160), (tokens, 160, 64)] * 3,
        (scored, 64, 1000),
    ]:
        flop += 2 * rows * inputs * outputs
    for token in range(tokens):  # scores of the keys that it sees, and the sum of their values
        flop += 3 * 4 * 2 * (2 * 24 * (token + 1))
    assert forward_flop(SHAPE, tokens, scored, 15) == flop


def learner_of(kind: type[Any] = SFT, **options: Any) -> LocalLearner:
    return shapes_of(filled(kind, {"tasks": "x", "precision": "bfloat16", **options}), replace(SHAPE, family="qwen2"))


def test_speed_is_the_arithmetic_of_all_learned_models_over_seconds_processes_and_the_peak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = UpdateWork(1000, 400, 9000)
    once = forward_flop(SHAPE, 1000, 400, 9000)

    def told(learner: LocalLearner, **how: Any) -> Any:
        return pytest.approx(speed(learner, work, 2.0, 4, **how)["update/tflops"] * 1e12 * 2 * 4)

    assert told(learner_of()) == 3 * once
    assert told(learner_of(lora=8)) == 2 * once
    assert told(learner_of(), scores=True) == 3 * forward_flop(SHAPE, 1000, 0, 9000)
    ppo = {"env": "e", "algorithm": "ppo", "model": "x"}
    assert told(learner_of(RL, **ppo, critic="shared")) == 3 * once
    assert told(learner_of(RL, **ppo)) == 3 * once + 3 * forward_flop(SHAPE, 1000, 0, 9000)
    soft = learner_of()
    headless = forward_flop(SHAPE, 1000, 0, 9000)
    soft.critic = ActionValueModel(learner_of().model, 0)  # its target copy runs forwards alone
    assert told(soft) == 3 * once + (3 + 1) * headless
    soft.critic.backbone.config = Sizes(1000, 64, 512)  # type: ignore[assignment]
    assert speed(soft, work, 2.0, 4) == {}, "a critic that transformers computes is not counted"
    assert "mfu" not in speed(learner_of(), work, 2.0, 4), "the peak of a processor is not known"
    monkeypatch.setattr(gpu_use, "dense_peak", lambda device: 1e12)
    assert speed(learner_of(), work, 2.0, 4)["mfu"] == pytest.approx(3 * once / 2 / 4 / 1e12)
    assert speed(learner_of(), UpdateWork(), 2.0, 4) == {}
    natural = learner_of()
    natural.trust_region = TrustRegion()
    assert speed(natural, work, 2.0, 4) == {}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", None),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Some Other Card", None),
    ],
)
def test_the_peak_is_that_of_the_card_by_its_name(
    name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name)
    assert dense_peak(torch.device("cuda", 0)) == peak
    assert dense_peak(torch.device("cpu")) is None
