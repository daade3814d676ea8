"""Each part of the memory estimate is what it names, to the byte where it can be counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from torch import nn

from posttrain.config.resolve import filled
from posttrain.config.training import RL, SFT, Distill
from posttrain.learners.forward_pass import REFERENCE
from posttrain.learners.local_learner import LocalLearner, Optimization
from posttrain.models.critic import ValueModel
from posttrain.models.hf import pass_memory
from posttrain.models.hf.backed import Backed
from posttrain.models.hf.pass_memory import pass_bytes
from posttrain.models.hf.transformers_folder import ACTIVATIONS
from posttrain.models.native.decoder import Decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.training.memory_advice import roles_too_large
from posttrain.training.memory_estimate import GPU_LOGITS, MemoryEstimate, UpdateSize, estimate_memory, estimate_roles
from posttrain.training.memory_plan import plan_memory, shapes_of
from posttrain.training.setup import ACTIVATION_SHARE

SHAPE = DecoderConfig(600, 96, 3, 2, 1, 48, 384, 64, qk_norm=True)
ENDS = 4.0 * SHAPE.vocab * SHAPE.hidden  # bytes of the embedding, or of the output head
SIZE = UpdateSize(64, False, None, 1e12)
DEEP: dict[str, Any] = {
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 3},
    "qwen3_5_text": {"layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2},
}


def learner(shape: DecoderConfig = SHAPE, precision: Any = "float32", **held: Any) -> LocalLearner:
    with torch.device("meta"):
        return LocalLearner(Decoder(shape), Optimization(), precision=precision, **held)


def parts(learner: LocalLearner, size: UpdateSize = SIZE) -> Any:
    found = estimate_memory(learner, size)
    assert isinstance(found, MemoryEstimate)
    return found.parts


def shaped(kind: str, folder: Path, precision: str = "float32", **changed: Any) -> LocalLearner:
    tiny_models.make(kind, folder, **changed)
    return shapes_of(filled(SFT, {"tasks": "x", "precision": precision}), folder)


def inner(learner: LocalLearner) -> Backed:
    assert isinstance(learner.model, Backed)
    return learner.model


@pytest.mark.parametrize("kind", DEEP)
@pytest.mark.parametrize("recompute", [False, True])
def test_layers_that_are_left_out_are_counted_like_those_of_their_kind(
    kind: str, recompute: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = inner(shaped(kind, tmp_path, num_hidden_layers=6, **DEEP[kind]))
    found = pass_bytes(model, 2, 64, False, recompute)
    monkeypatch.setattr(pass_memory, "_kinds", lambda model: list(range(len(model.layers))))
    pass_bytes.cache_clear()
    assert found == pytest.approx(pass_bytes(model, 2, 64, False, recompute), rel=1e-3)
    pass_bytes.cache_clear()


@pytest.mark.parametrize("narrow", [False, True])
def test_a_pass_does_not_count_weights_their_copies_and_gradients(narrow: bool, tmp_path: Path) -> None:
    model = inner(shaped("phi3", tmp_path, hidden_size=256, intermediate_size=512))
    largest = max(p.nbytes for p in model.layers[0].parameters())
    assert pass_bytes(model, 1, 2, narrow, False) < 1.6 * largest, "the gradient of a matrix, and its sum"


def test_flash_attention_keeps_one_normaliser_of_a_query_and_head() -> None:
    q = torch.empty(7, 4, 8, requires_grad=True)
    held: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x.nbytes) or x, lambda x: x):  # type: ignore[func-returns-value]
        pass_memory._Attention.apply(q, q, q)
    assert held == [q.nbytes] * 4 + [4 * 7 * 4]


def test_copies_of_a_model_of_transformers_are_those_of_linear_layers(tmp_path: Path) -> None:
    ours = shaped("phi3", tmp_path, "bfloat16")
    linear = sum(m.weight.numel() for m in inner(ours).modules() if isinstance(m, nn.Linear))
    assert parts(ours)["copies in bfloat16"] == 2.0 * linear


def test_a_model_of_transformers_recomputes_of_itself_what_half_of_the_free_memory_does_not_hold(
    tmp_path: Path,
) -> None:
    ours = shaped("phi3", tmp_path)
    weights, kept = sum(p.nbytes for p in inner(ours).parameters()), parts(ours)["activations"]
    again = parts(ours, replace(SIZE, recompute=True))["activations"]
    for share, expected in {1.001: kept, 0.999: again}.items():
        assert parts(ours, replace(SIZE, room=weights + share * kept / ACTIVATIONS))["activations"] == expected


def test_tokens_beyond_whole_rows_are_counted_in_proportion(tmp_path: Path) -> None:
    ours = shaped("mamba2", tmp_path)
    assert inner(ours).way == "rows"
    one, more = (parts(ours, replace(SIZE, tokens=tokens, row=32))["activations"] for tokens in (64, 80))
    assert more == pytest.approx(1.25 * one)


def test_a_compared_model_keeps_the_states_of_a_processs_own_tokens() -> None:
    with torch.device("meta"):
        ours = learner(others={REFERENCE: Decoder(SHAPE).requires_grad_(False)})
    size = replace(SIZE, wants=frozenset({"kl"}))
    assert parts(ours, size)["compared models"] == 4.0 * 64 * SHAPE.hidden
    assert parts(ours, replace(size, context=4))["compared models"] == 4.0 * 16 * SHAPE.hidden


def test_the_exact_kl_takes_five_copies_of_a_chunk_of_logits_and_other_losses_two() -> None:
    ours = learner()
    two, five = (parts(ours, replace(SIZE, wants=frozenset(wants)))["logits"] for wants in (("entropy",), ("kl",)))
    assert (two, five) == (2 * 4.0 * GPU_LOGITS, 5 * 4.0 * GPU_LOGITS)


def test_the_process_with_most_rows_is_counted() -> None:
    ours = learner(replace(SHAPE, vocab=601, layers=1))
    rows = [(-(-p.shape[0] // 4), p[:1].nbytes) for p in ours.model.parameters()]  # type: ignore[attr-defined]
    assert any(p.shape[0] % 4 for p in ours.model.parameters())  # type: ignore[attr-defined]
    assert parts(ours, replace(SIZE, shares=4))["weights"] == sum(count * size for count, size in rows)


@pytest.mark.parametrize("narrow", [False, True])
def test_a_sharded_update_gathers_both_ends_with_gradients_and_two_layers_with_those_of_one(narrow: bool) -> None:
    ours = learner(precision="bfloat16" if narrow else "float32")
    [layer, *_] = ours.model.decoder.layers  # type: ignore[union-attr]
    read = sum(p.nbytes // (2 if narrow and p.ndim == 2 else 1) for p in layer.parameters())
    expected = 4 * ENDS + 2 * 4 * SHAPE.hidden + 2 * read + sum(p.nbytes for p in layer.parameters())
    assert not SHAPE.tied and parts(ours, replace(SIZE, shares=4))["gathered"] == expected


def test_a_gpu_of_roles_is_too_small_for_what_lasts_alone() -> None:
    """Fewer tokens would take less of the rest."""
    with torch.device("meta"):
        ours = learner(critic=ValueModel(SHAPE.hidden, Decoder(SHAPE), 0))
    size = replace(SIZE, tokens=1 << 20, elsewhere={"critic": "1"})
    [found] = estimate_roles(ours, size).values()
    lasts = sum(found.parts[name] for name in ("weights", "gradients", "moments"))
    assert found.total > 10 * lasts
    assert not list(roles_too_large(ours, replace(size, room=lasts)))
    assert list(roles_too_large(ours, replace(size, room=lasts / 1.2)))


# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> str:
    config = {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 50_000, "hidden_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1024,
        "max_position_embeddings": 4096, "rope_theta": 1e6, "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_a_critics_backbone_has_no_output_head(folder: str) -> None:
    def weights(algorithm: str) -> float:
        options = {"tasks": "x", "env": "e", "model": folder, "algorithm": algorithm}
        return plan_memory(filled(RL, options), 1e12).found.parts["weights"]

    policy, head = weights("dapo"), 4.0 * 50_000 * 512
    assert weights("ppo") - policy in (policy - head + 4 * 513, 2 * policy - head + 4 * 513)  # and its reference
    assert weights("sac") == policy + 2 * (policy - head + 2 * head), "a target copy of the whole critic"
    assert weights("sac-v") == policy + 3 * (policy - head) + 2 * head + 2 * 4 * 513, "one of the values of states"


def test_micro_batches_take_a_share_of_the_gpu(folder: str) -> None:
    room = 4e9
    plan = plan_memory(filled(SFT, {"tasks": "x", "model": folder, "precision": "bfloat16"}), room)
    share = plan.found.parts["activations"] / room
    assert plan.tokens < 32_768 and 0.8 * ACTIVATION_SHARE < share <= ACTIVATION_SHARE


@pytest.mark.parametrize("room", [40e9, 80e9])
def test_micro_batches_of_a_natural_step_leave_room_for_its_second_derivatives(folder: str, room: float) -> None:
    options = {"tasks": "x", "env": "e", "model": folder, "algorithm": "trpo", "precision": "bfloat16"}
    plan = plan_memory(filled(RL, options), room)
    share = plan.found.parts["second derivatives"] / room
    assert share < 0.4 and (plan.tokens == 1024 or share > 0.05), (plan.tokens, share)
    assert plan.tokens < plan_memory(filled(RL, options | {"algorithm": "grpo"}), room).tokens


def test_a_teacher_that_adapters_leave_as_it_is_is_held_once(folder: str) -> None:
    def weights(**teacher: str) -> float:
        options = {"tasks": "x", "model": folder, "lora": 4, **teacher}
        return plan_memory(filled(Distill, options), 1e12).found.parts["weights"]

    other = Path(folder) / "other"
    other.mkdir()
    (other / "config.json").write_text((Path(folder) / "config.json").read_text())
    assert weights(teacher=str(other)) > 1.9 * weights(teacher=folder)
