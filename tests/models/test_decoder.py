"""The native decoder and checkpoint folders, held against transformers."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import tiny
from places import DATA

from posttrain.core.types import UserError
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.checkpoint_location import find_checkpoint
from posttrain.models.native.decoder import Decoder, causal, new_decoder
from posttrain.models.native.decoder_shape import DecoderConfig
from posttrain.models.native.decoder_writer import checkpoint_tensors, save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer

DATA = DATA / "models"
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"num_key_value_heads": 4}),
    "llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama with all biases": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LINEAR_ROPE}),
    "smollm": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"head_dim": 16, "sliding_window": 200}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16, "rms_norm_eps": 1e-5}),
    "qwen3 with bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
}


def tiny_checkpoint(folder: Path, family: str, **save: Any) -> transformers.PreTrainedModel:
    """A checkpoint that transformers wrote, with every parameter random: norms and biases too."""
    kind, changes = FAMILIES[family]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, **save)
    return model


def edit(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@torch.no_grad()
def logits(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens, torch.arange(len(tokens)), causal) @ model.head.weight.T


@torch.no_grad()
def their_logits(model: transformers.PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens[None]).logits[0].float()


def some_tokens(vocab: int, length: int = 150) -> torch.Tensor:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(1))


def tiny_config(**changes: Any) -> DecoderConfig:
    sizes: dict[str, Any] = {
        "vocab": 31,
        "hidden": 16,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_size": 8,
        "intermediate": 24,
    }
    return DecoderConfig(**{**sizes, "context": 64, **changes})


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_transformers_before_and_after_our_save(family: str, tmp_path: Path) -> None:
    theirs = tiny_checkpoint(tmp_path / "theirs", family)
    tokens = some_tokens(97)
    expected = their_logits(theirs, tokens)
    ours = load_model(tmp_path / "theirs")
    torch.testing.assert_close(logits(ours, tokens), expected, atol=1e-5, rtol=1e-5)

    save_model(ours, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(again) is type(theirs)
    torch.testing.assert_close(their_logits(again, tokens), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["stories260K", "gsm8k-5m"])
def test_trained_checkpoints_agree_with_transformers(name: str) -> None:
    if not (DATA / name).exists():
        pytest.skip(f"{DATA / name} is absent")
    ours = load_model(DATA / name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(DATA / name, dtype=torch.float32)
    tokens = some_tokens(ours.config.vocab)
    torch.testing.assert_close(logits(ours, tokens), their_logits(theirs, tokens), atol=1e-4, rtol=1e-5)
    assert ours.eos_ids == ({"stories260K": 2, "gsm8k-5m": 1}[name],)


def test_old_rope_keys_mean_the_same_as_new_ones(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama3")
    new = load_model(tmp_path)
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    edit(tmp_path, rope_parameters=None, rope_scaling=scaling, rope_theta=LLAMA3_ROPE["rope_theta"])
    assert load_model(tmp_path).config == new.config


def test_a_sequence_does_not_see_the_one_laid_beside_it() -> None:
    model = new_decoder(tiny_config(), seed=0)
    first, second = some_tokens(31, 7), some_tokens(31, 12)

    def beside(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = zip(q.split([7, 12]), k.split([7, 12]), v.split([7, 12]), strict=True)
        return torch.cat([causal(layer, *part) for part in parts])

    position = torch.cat([torch.arange(7), torch.arange(12)])
    both = model(torch.cat([first, second]), position, beside) @ model.head.weight.T
    torch.testing.assert_close(both, torch.cat([logits(model, first), logits(model, second)]), atol=1e-6, rtol=1e-5)


def test_only_differences_of_positions_matter() -> None:
    model = new_decoder(tiny_config(qk_norm=True), seed=0).double()
    tokens = some_tokens(31, 20)
    with torch.no_grad():
        near, far = (model(tokens, torch.arange(20) + shift, causal) for shift in (0, 40))
    torch.testing.assert_close(near, far, atol=1e-5, rtol=1e-5)  # angles are float32


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"qkv_bias": True, "tied": True}])
def test_gradients_agree_with_finite_differences_in_float64(changes: dict) -> None:
    model = new_decoder(tiny_config(**changes), seed=0).double()
    tokens, position = some_tokens(31, 9), torch.arange(9)

    def loss() -> torch.Tensor:
        return (model(tokens, position, causal) @ model.head.weight.T).log_softmax(-1)[:, 3].sum()

    parameters: list[torch.Tensor] = list(model.parameters())
    directions = [torch.randn_like(parameter) for parameter in parameters]
    gradients = torch.autograd.grad(loss(), parameters)
    slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
    with torch.no_grad():
        ends = []
        for step in (1e-6, -2e-6):
            torch._foreach_add_(parameters, directions, alpha=step)
            ends.append(loss())
    torch.testing.assert_close(slope, (ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}])
def test_autocast_hands_attention_one_type_and_trains(changes: dict) -> None:
    model = new_decoder(tiny_config(tied=True, **changes), seed=0)
    seen: set[torch.dtype] = set()

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.update((q.dtype, k.dtype, v.dtype))
        return causal(layer, q, k, v)

    tokens = some_tokens(31, 9)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model(tokens, torch.arange(9), attend)
    hidden.sum().backward()
    assert seen == {torch.bfloat16}
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_bfloat16_model_keeps_exact_rotary_angles() -> None:
    narrow = new_decoder(tiny_config(), seed=0).bfloat16()
    exact = new_decoder(tiny_config(), seed=0)
    position = torch.tensor([0, 1, 1001, 4095])
    for ours, theirs in zip(narrow.rotary(position, torch.float32), exact.rotary(position, torch.float32), strict=True):
        assert torch.equal(ours, theirs)


def test_new_decoder_is_its_seed_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    one, same, other = (new_decoder(tiny_config(qkv_bias=True, layers=8), seed) for seed in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.head.weight, other.head.weight)
    weights = dict(one.named_parameters())
    assert weights["layers.0.qkv.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert weights["layers.0.down.weight"].std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.2)
    assert not weights["layers.0.qkv.bias"].any() and bool((weights["norm.weight"] == 1).all())


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "llama"),
        ({"rope_scaling": {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}}, "llama"),
        ({"qkv_bias": True, "head_size": 6}, "qwen2"),
        ({"qk_norm": True, "tied": True}, "qwen3"),
    ],
)
def test_a_model_from_scratch_is_readable_by_transformers(changes: dict, family: str, tmp_path: Path) -> None:
    model = new_decoder(tiny_config(**changes), seed=0)
    model.eos_ids = (1, 5)
    save_model(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = some_tokens(31, 60)
    assert theirs.config.model_type == family
    assert theirs.generation_config.eos_token_id == [1, 5]
    torch.testing.assert_close(their_logits(theirs, tokens), logits(model, tokens), atol=1e-5, rtol=1e-5)
    again = load_model(tmp_path)
    assert again.config == model.config and again.eos_ids == (1, 5)


def test_a_mix_no_family_stores_is_refused() -> None:
    with pytest.raises(UserError, match="no Hugging Face family"):
        new_decoder(tiny_config(qkv_bias=True, mlp_bias=True), seed=0)


def test_shards_round_trip_and_leave_no_stale_file(tmp_path: Path) -> None:
    theirs = tiny_checkpoint(tmp_path / "theirs", "qwen3", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    ours = load_model(tmp_path / "theirs")
    tokens = some_tokens(97)
    torch.testing.assert_close(logits(ours, tokens), their_logits(theirs, tokens), atol=1e-5, rtol=1e-5)

    save_model(ours, tmp_path / "ours", shard_bytes=20_000)
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 2
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(their_logits(again, tokens), their_logits(theirs, tokens))
    assert torch.equal(logits(load_model(tmp_path / "ours"), tokens), logits(ours, tokens))

    save_model(ours, tmp_path / "ours")
    assert [path.name for path in (tmp_path / "ours").glob("model*")] == ["model.safetensors"]


def test_a_save_keeps_config_keys_it_does_not_know_and_casts_weights(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "theirs", "llama2")
    edit(tmp_path / "theirs", house_note="kept", torch_dtype="float32")
    model = load_model(tmp_path / "theirs", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    save_model(model, tmp_path / "ours", dtype=torch.float16)
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["house_note"] == "kept" and config["dtype"] == "float16" and "torch_dtype" not in config
    assert {p.dtype for p in transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").parameters()} == {
        torch.float16
    }


def test_exported_names_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    theirs = tiny_checkpoint(tmp_path, "qwen3 with bias").state_dict()
    exported = dict(checkpoint_tensors(load_model(tmp_path)))
    assert exported.keys() == theirs.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in theirs.items())


def test_every_end_of_sequence_id_is_known(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama3")
    generation = tmp_path / "generation_config.json"
    edit(tmp_path, eos_token_id=9)
    generation.write_text(json.dumps({"eos_token_id": [7, 8, 11], "temperature": 0.6, "do_sample": True}))
    model = load_model(tmp_path)
    assert model.eos_ids == (7, 8, 11) and model.generation["temperature"] == 0.6
    save_model(model, tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "generation_config.json").read_text()) == model.generation
    generation.unlink()
    assert load_model(tmp_path).eos_ids == (9,)


def test_context_ends_with_the_sliding_window(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "mistral", "mistral")
    assert load_model(tmp_path / "mistral").config.context == 200
    tiny_checkpoint(tmp_path / "qwen2", "qwen2")
    edit(tmp_path / "qwen2", sliding_window=100)
    assert load_model(tmp_path / "qwen2").config.context == 256
    edit(tmp_path / "qwen2", use_sliding_window=True, max_window_layers=1)
    assert load_model(tmp_path / "qwen2").config.context == 100


def remove_index_part(folder: Path) -> None:
    config = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config.save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    min(folder.glob("model-*.safetensors")).unlink()


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


BROKEN = {
    "lacks tensors transformer.h.0": lambda f: edit(f, model_type="gpt2"),  # transformers would know it
    'rope_type "nobody\'s" is not supported': lambda f: edit(
        f, rope_parameters={"rope_type": "nobody's", "factor": 2.0}
    ),
    'hidden_act "nobody\'s" is not supported': lambda f: edit(f, hidden_act="nobody's"),
    "lacks tensors model.layers.2": lambda f: edit(f, num_hidden_layers=3),
    "holds unknown tensors model.layers.1": lambda f: edit(f, num_hidden_layers=1),
    "has shape": lambda f: edit(f, intermediate_size=40),
    "config.json lacks vocab_size": lambda f: edit(f, vocab_size=None),
    "config.json is missing": lambda f: (f / "config.json").unlink(),
    "config.json is damaged": lambda f: (f / "config.json").write_text("{"),
    "holds no model.safetensors": lambda f: (f / "model.safetensors").unlink(),
    "model.safetensors is damaged": truncate,
    "lacks model-00001-of": remove_index_part,
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_checkpoint_that_is_not_whole_is_refused_in_one_line(message: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama2")
    BROKEN[message](tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_no_model_imports_the_compiler_of_torch_for_its_memory(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes half a second of each process: of commands, replicas and launched runs."""
    monkeypatch.setitem(sys.modules, "torch.fx.experimental.symbolic_shapes", None)
    save_model(tiny(tokenizer), tmp_path, tokenizer)
    for precision in (torch.float32, torch.bfloat16):
        assert load_model(tmp_path, precision).empty_like().dtype == precision  # type: ignore[union-attr]


def test_a_misspelt_model_is_told_the_folder_or_gguf_file_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "small.gguf").touch()
    (tmp_path / "small.json").touch()
    for name, meant in {"small.ggu": "small.gguf", "smal.gguf": "small.gguf", "./runs/fist": "runs/first"}.items():
        with pytest.raises(UserError, match=f"no such .*; did you mean '{meant}'"):
            find_checkpoint(name)
    with pytest.raises(UserError, match="no such GGUF file: correct the path"):
        find_checkpoint(tmp_path / "runs" / "small.gguf")  # whatever the folders before it


def test_a_missing_folder_is_named_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no such folder"):
        load_model(tmp_path / "nowhere")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set, and nobody/nothing was not downloaded") as caught:
        load_model("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_hidden_states_at_some_tokens_are_those_of_all() -> None:
    model = new_decoder(
        DecoderConfig(vocab=40, hidden=16, layers=2, heads=4, kv_heads=2, head_size=4, intermediate=24, context=16), 0
    ).double()
    tokens, place, at = torch.randint(0, 40, (9,)), torch.arange(9), torch.tensor([8, 2, 2])
    assert torch.allclose(model(tokens, place, causal, at), model(tokens, place, causal)[at], atol=1e-12)


@pytest.mark.parametrize("name", ["qwen2", "llama3"])
def test_a_saved_model_has_its_rotary_settings_under_the_names_of_transformers_4_too(tmp_path: Path, name: str) -> None:
    """A program that reads these alone, such as a converter to GGUF, would else compute another model, without an error."""
    tiny_checkpoint(tmp_path / "theirs", name)
    edit(tmp_path / "theirs", rope_parameters={**(LLAMA3_ROPE if name == "llama3" else {}), "rope_theta": 70_000.0})
    ours = load_model(tmp_path / "theirs")
    made = new_decoder(ours.config, seed=0)
    for place, model in (("read", ours), ("made", made)):
        model.save(tmp_path / place)
        edit(tmp_path / place, rope_parameters=None)
        assert load_model(tmp_path / place).config == ours.config and ours.config.rope_theta == 70_000.0
