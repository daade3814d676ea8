"""The memory of a training command is estimated from the model's config.json alone, as a run on a GPU estimates it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from posttrain.cli.main import main
from posttrain.config.resolve import filled
from posttrain.config.training import RL, SFT, Distill, Prefer, Training
from posttrain.core.types import UserError
from posttrain.training import memory_plan, training_run
from posttrain.training.memory_plan import plan_memory

QWEN = {
    **{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936, "hidden_size": 1536},
    **{"num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960},
    **{"max_position_embeddings": 4096, "rope_theta": 1e6, "tie_word_embeddings": True, "hidden_act": "silu"},
}
QWEN_7B = {
    **{**QWEN, "vocab_size": 152064, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4},
    **{"intermediate_size": 18944, "tie_word_embeddings": False},
}
MIXTURE = {  # Qwen3-30B-A3B
    **{**QWEN, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "tie_word_embeddings": False},
    **{"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4},
    **{"head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128},
    **{"num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1},
}
GIB = 2**30
BF16 = {"precision": "bfloat16"}
ADAPTED: dict[str, Any] = {"lora": 16, "frozen_weights": "bfloat16", "recompute": "layers"}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, config in {
        "1b": QWEN,
        "7b": QWEN_7B,
        "other": {**QWEN, "model_type": "gpt_neox"},
        "unheard": {**QWEN, "model_type": "unheard"},
        "mixture": MIXTURE,
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return tmp_path


def config(kind: type[Training], **options: Any) -> Any:
    return filled(kind, {"tasks": "x", **BF16, **options})


@pytest.mark.parametrize(
    ("options", "measured"),
    [
        # peaks that runs had on an H200 (tests/training/test_memory_estimate.py)
        ({"model": "1b", "kl": 0.0, "tokens_per_microbatch": 16_384, "prompts": 32, "max_tokens": 512}, 61.9e9),
        ({"model": "7b", **ADAPTED, "tokens_per_microbatch": 7_168, "prompts": 4, "max_tokens": 1024}, 36.1e9),
    ],
)
def test_the_estimate_is_within_a_tenth_of_the_peak_that_an_h200_had(
    models: Path, options: dict[str, Any], measured: float
) -> None:
    algorithm = "dr-grpo" if "kl" in options else "grpo"
    options = {name: value for name, value in options.items() if name != "kl"}
    found = plan_memory(config(RL, env="e", algorithm=algorithm, **options), 150.1e9)
    assert abs(found.found.total - measured) < 0.1 * measured, str(found.found)


def weights(models: Path, kind: type[Training], **options: Any) -> float:
    return plan_memory(config(kind, model="1b", **options), 80 * GIB).found.parts["weights"]


def test_models_beside_the_policy_are_counted_by_what_the_algorithm_needs(models: Path) -> None:
    alone = weights(models, SFT)
    assert weights(models, Prefer) == alone  # its reference is computed before, and kept as numbers
    rl = {"env": "e"}
    assert weights(models, RL, algorithm="dr-grpo", **rl) == alone
    assert weights(models, RL, algorithm="grpo", **rl) == pytest.approx(2 * alone)  # the reference
    assert weights(models, RL, algorithm="ppo", **rl) == pytest.approx(3 * alone, rel=1e-4)  # and the critic
    assert weights(models, RL, algorithm="ppo", critic="shared", **rl) == pytest.approx(2 * alone, rel=1e-4)
    untied = {"model": "7b", "env": "e", "algorithm": "ppo"}
    shared, own = (
        plan_memory(config(RL, **untied, critic=critic), 900 * GIB).found.parts for critic in ("shared", "separate")
    )
    trunk = shared["weights"] / 2 - 4 * 152_064 * 3584  # a critic has no output head
    assert own["weights"] - shared["weights"] == pytest.approx(trunk, rel=1e-3)
    adapted = weights(models, RL, algorithm="grpo", **rl, **ADAPTED)
    assert adapted == pytest.approx(alone / 2, rel=0.03)  # no reference of its own, and half as many bytes
    taught = weights(models, Distill, teacher="7b")
    assert taught > 4 * alone
    own = [weights(models, Distill, teacher=folder, **ADAPTED) for folder in ("1b", "1b/", str(models / "1b"))]
    assert own == pytest.approx([alone / 2] * 3, rel=0.03)  # the weights below the adapters are the teacher


def test_weights_in_bfloat16_take_half_and_keep_gradients_and_moments_in_float32(models: Path) -> None:
    ways: list[dict[str, str]] = [{}, {"weights": "bfloat16"}]
    wide, narrow = (
        plan_memory(config(RL, env="e", algorithm="ppo", kl=0.1, model="1b", **way), 80 * GIB).found.parts
        for way in ways
    )
    assert narrow["weights"] == pytest.approx(wide["weights"] / 2, rel=1e-3), "policy, critic and reference"
    assert (narrow["gradients"], narrow["moments"]) == (wide["gradients"], wide["moments"])
    assert narrow["copies in bfloat16"] < 1e-3 * wide["copies in bfloat16"]


def test_products_in_float8_need_no_copies_and_keep_their_inputs(models: Path) -> None:
    how: dict[str, Any] = {"model": "7b", "precision": "bfloat16", "tokens_per_microbatch": 8192}
    half, quarter = (plan_memory(config(SFT, **how, float8=own), 900 * GIB) for own in (False, True))
    shape = memory_plan.shape_of("7b")
    layers = 2.0 * shape.layer_numbers
    assert half.found.parts["copies in bfloat16"] - quarter.found.parts["copies in bfloat16"] == layers
    inputs = 2 * shape.layers * 8192 * (2 * shape.hidden + shape.intermediate)
    assert quarter.found.parts["activations"] - half.found.parts["activations"] == inputs
    assert quarter.found.parts["rounding to float8"] == 9 * 8192 * 2 * shape.intermediate - half.found.parts["logits"]
    [refused] = plan_memory(config(SFT, **how, float8=True), 80 * GIB).advice
    assert "--offload optimizer" in refused and "--lora" not in refused and "--shard" not in refused


def test_all_weights_of_7b_fit_one_gpu_in_bfloat16(models: Path) -> None:
    how: dict[str, Any] = {"model": "7b", "recompute": "layers", "algorithm": "dapo", "env": "e", "max_tokens": 1024}
    less = {"weights": "bfloat16", "optimizer": "sgd"}
    assert not plan_memory(config(RL, **how), 80 * GIB).fits
    assert plan_memory(config(RL, **how, **less), 80 * GIB).fits


def test_the_offer_of_adapters_is_what_they_take(models: Path) -> None:
    for algorithm in ("ppo", "grpo"):
        of: dict[str, Any] = {"model": "7b", "env": "e", "algorithm": algorithm}
        [refused] = plan_memory(config(RL, **of), 80 * GIB).advice
        taken = plan_memory(config(RL, **of, lora=16, frozen_weights="bfloat16"), 900 * GIB).found.parts
        found = re.search(r"--lora 16 with --frozen-weights bfloat16 \(([\d.]+) GiB\)", refused)
        lasting = sum(taken[name] for name in ("weights", "gradients", "moments")) / GIB
        assert found is not None and float(found[1]) == pytest.approx(lasting, rel=0.05)
    [refused] = plan_memory(config(RL, model="7b", env="e", lora=16), 24 * GIB).advice
    assert "--frozen-weights bfloat16 (14." in refused


def test_models_that_are_elsewhere_are_not_counted(models: Path) -> None:
    alone, rl = weights(models, SFT), {"env": "e", "algorithm": "ppo"}
    assert weights(models, RL, **rl, role_devices={"reference": "1"}) == pytest.approx(2 * alone, rel=1e-4)
    assert weights(models, RL, **rl, offload=("reference",)) == pytest.approx(2 * alone, rel=1e-4)
    apart = plan_memory(
        config(RL, model="1b", **rl, role_devices={"reference": "1", "critic": "2"}), 80 * GIB
    ).found.parts
    assert apart["weights"] == alone == apart["gradients"] and apart["moments"] == 2 * alone
    taught = weights(models, Distill, teacher="7b", role_devices={"teacher": "1"})
    assert taught == alone
    with pytest.raises(UserError, match="this run holds no critic"):
        weights(models, RL, env="e", algorithm="grpo", role_devices={"critic": "1"})


def test_a_loss_that_compares_the_policy_with_a_model_of_the_host_has_it_on_the_gpu(models: Path) -> None:
    def parts(algorithm: str, **options: Any) -> Any:
        return plan_memory(config(RL, model="1b", env="e", algorithm=algorithm, **options), 80 * GIB).found.parts

    exact = {"settings": {"kl.estimator": "exact"}}
    alone, here = parts("dr-grpo"), parts("grpo", **exact)
    there = parts("grpo", **exact, offload=("reference",))
    assert there["weights"] == here["weights"] == pytest.approx(2 * alone["weights"])
    assert there["copies in bfloat16"] == here["copies in bfloat16"] == pytest.approx(2 * alone["copies in bfloat16"])
    away = parts("grpo", **exact, role_devices={"reference": "1"})
    head = 151936 * 1536
    assert away["weights"] == alone["weights"] and away["compared models"] - here["compared models"] == (4 + 2) * head
    taught = plan_memory(
        config(Distill, model="1b", teacher="7b", offload=("reference",), algorithm="distill-k1", lora=16), 80 * GIB
    ).found
    teacher = weights_of(QWEN_7B)
    assert taught.total > teacher, "it is evaluated on the GPU"
    assert taught.parts["fetched models"] > 0


def weights_of(config: dict[str, Any]) -> float:
    """Bytes in float32 of the matrices of a model."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    size = hidden // config["num_attention_heads"]
    layer = hidden * size * 2 * (config["num_attention_heads"] + config["num_key_value_heads"]) + 3 * hidden * inner
    return 4.0 * (config["num_hidden_layers"] * layer + 2 * config["vocab_size"] * hidden)


def test_the_command_prints_parts_advice_and_whether_it_fits(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "-- rl --model 7b --precision bfloat16".split()
    assert main(["memory", *words]) == 1
    out = capsys.readouterr().out
    assert (
        "weights                56.7 GiB" in out and "this run needs 141.9 GiB (weights 56.7 + gradients 28.4 " in out
    )
    assert "--lora 16 with --frozen-weights bfloat16" in out
    assert main(["memory", "--gpu-memory", "90", *words, "--offload", "optimizer", "--recompute", "none"]) == 1
    assert "this may not fit into the GPU's 90.0 GiB: --recompute layers (" in capsys.readouterr().out
    small = "--lora 16 --frozen-weights bfloat16 --recompute layers".split()
    assert main(["memory", "--gpu-memory", "40", *words, *small]) == 0
    assert "it fits into 40.0 GiB: " in capsys.readouterr().out


def test_a_run_that_cannot_fit_is_refused_before_weights_are_read(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training_run, "prepare", lambda config: torch.device("cuda"))
    monkeypatch.setattr(memory_plan, "gpu_memory", lambda device: 80 * GIB)
    (models / "rows.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    (models / "my.py").write_text("def reward(task, reply):\n    return 0.0\n")
    words = "--tasks rows.jsonl --model 7b --precision bfloat16 --out run --threads 1 --quiet".split()
    for verb, needed in {"sft": "113.5", "rl": "141.9"}.items():
        assert main([verb, *words, *(["--env", "my.py:reward"] if verb == "rl" else [])]) == 2
        err = capsys.readouterr().err.strip()
        assert "\n" not in err and f"this run needs {needed} GiB (weights" in err and "the GPU has 80.0 GiB" in err
        assert not Path("run").exists()
    assert main(["sft", *words, "--lora", "8"]) == 2  # 7b has no weights here, which only a run that may fit misses
    assert "this run needs" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "how"),
    [("1b", {}), ("1b", {"shard": True}), ("1b", {"tensor_parallel": 2}), ("1b", {"context_parallel": 4}),
     ("other", {}), ("other", {"shard": True}), ("mixture", {"expert_parallel": 4})],
)  # fmt: skip
def test_a_run_says_the_memory_of_each_of_its_gpus(
    models: Path, model: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = torch.device("cuda")
    for module in (memory_plan, training_run):
        monkeypatch.setattr(module, "gpu_memory", lambda device: 600 * GIB)
    monkeypatch.setattr(training_run, "microbatch_tokens", lambda *given: 1024)
    ours = config(SFT, model=model, tokens_per_microbatch=1024, processes=4, **how)
    parts: Any = SimpleNamespace(
        learner=memory_plan.shapes_of(ours, memory_plan.shape_of(model)), objective=SimpleNamespace(wants=frozenset())
    )
    world = SimpleNamespace(size=4, gather=lambda given: [given] * 4)
    run: Any = SimpleNamespace(config=ours, start=models / model, world=world)
    [said, *_] = training_run._memory(run, parts, cuda)
    assert said == str(plan_memory(ours, 600 * GIB).found)
    assert training_run._memory(run, parts, torch.device("cpu")) == []


def test_layers_are_recomputed_where_they_may_not_fit_and_in_all_processes_alike(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (memory_plan, training_run):
        monkeypatch.setattr(module, "gpu_memory", lambda device: room)
    monkeypatch.setattr(training_run, "microbatch_tokens", lambda *given: 16_384)

    def told(room_there: bool, **how: Any) -> tuple[bool, list[str]]:
        """Whether this process recomputes, and what it says."""
        ours = config(SFT, model="1b", tokens_per_microbatch=16_384, **how)
        learner = memory_plan.shapes_of(ours, memory_plan.shape_of("1b"))
        parts: Any = SimpleNamespace(learner=learner, objective=SimpleNamespace(wants=frozenset()))
        world = SimpleNamespace(size=ours.processes, gather=lambda given: [given, not room_there])
        run: Any = SimpleNamespace(config=ours, start=models / "1b", world=world)
        lines = training_run._memory(run, parts, torch.device("cuda"))
        return learner.model.recomputes, lines  # type: ignore[attr-defined]

    kept, less = (plan_memory(config(SFT, model="1b", tokens_per_microbatch=16_384, recompute=how), 900 * GIB).found.total
                  for how in ("none", "layers"))  # fmt: skip
    room = 1.1 * kept
    assert told(True)[0] is False and plan_memory(config(SFT, model="1b", tokens_per_microbatch=16_384), room).fits
    room = (kept + less) / 2
    for how in ({}, {"shard": True, "processes": 2}, {"tensor_parallel": 2, "processes": 2}):
        divided = 0.3 if how else 1.0  # of the room: weights take less
        room = divided * (kept + less) / 2
        recomputes, lines = told(True, **how)
        assert recomputes and "--recompute auto" in lines[0] and not told(True, recompute="none", **how)[0], how
    room = 900 * GIB
    assert told(True, shard=True, processes=2)[0] is False and told(False, shard=True, processes=2)[0] is True
    found = plan_memory(config(SFT, model="1b", tokens_per_microbatch=16_384), (kept + less) / 2)
    assert found.found.total == less and found.fits and not found.advice and "--recompute auto" in found.notes[0]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("-- rl", "posttrain memory --gpu-memory 80 -- rl --model FOLDER; --lora, --tokens-per-microbatch"),
        ("-- rl --model nowhere", "nowhere"),
        ("-- rl --model unheard", 'model_type "unheard" is unknown to posttrain and to the installed transformers'),
        ("-- rl --model other --tensor-parallel 2 --processes 2", "transformers computes gpt_neox: leave it out"),
        ("-- rl --model other --context-parallel 2 --processes 2", "transformers computes gpt_neox: leave it out"),
        ("-- rl --model other --expert-parallel 2 --processes 2", "this model is dense: leave it out"),
        (
            "-- rl --model mixture --expert-parallel 3 --processes 3",
            "this model has 128 per layer: give a divisor of 128",
        ),
        ("-- sft --model other --float8 --precision bfloat16", "--float8 is for native decoders"),
        ("-- sft --model 7b --lora 8 --quantize nf4 --shard --processes 2", "--quantize nf4 packs whole matrices"),
        ("-- sft --model 7b --quantize nf4", "--quantize has no effect without --lora"),
        (
            "-- rl --model 7b --algorithm trpo --lora 4 --quantize int8",
            "the second derivatives of trpo for native decoders",
        ),
        ("", "a training command follows two dashes: posttrain memory -- sft --model FOLDER ..."),
        ("-- eval --model 7b", "a training command follows two dashes"),
        ("--gpu-memory 0 -- sft --model 7b", "--gpu-memory"),
        ("-- sft --model 7b --lora 0", "--lora must be above 0"),
        ("-- sft --model 7b --lora 1000000", "--lora must be above 0 and at most 65536"),
        ("-- sft --model 7b --dora", "--dora has no effect without --lora"),
        ("-- sft --model 7b --frozen-weights bfloat16", "--frozen-weights bfloat16 has no effect"),
        ("sft --model 7b", "a training command follows two dashes: posttrain memory -- sft"),
    ],
)
def test_mistakes_are_one_line(models: Path, capsys: pytest.CaptureFixture[str], words: str, told: str) -> None:
    assert main(["memory", *words.split()]) == 2
    err = capsys.readouterr().err.strip()
    assert told in err and "\n" not in err


def test_a_mixture_of_experts_is_counted_whole_and_divided(models: Path) -> None:
    given: dict[str, Any] = {"model": "mixture", "tokens_per_microbatch": 4096, "algorithm": "grpo", "env": "e"}
    whole = plan_memory(config(RL, **given), 1e15).found.parts
    parts = plan_memory(config(RL, **given, processes=8, expert_parallel=8), 1e15).found.parts
    experts, layer = 48 * 128 * 3 * 768 * 2048, 2048 * 128 * (2 * 32 + 2 * 4) + 128 * 2048 + 2 * 2048 + 2 * 128
    numbers = experts + 48 * layer + 2 * 151936 * 2048 + 2048
    assert whole["gradients"] == 4.0 * numbers == whole["weights"] / 2 == whole["moments"] / 2  # and its reference
    for name, sizes in {"weights": 2, "gradients": 1, "moments": 2}.items():
        assert parts[name] == 4.0 * sizes * (numbers - experts * 7 / 8), name
    attention = 48 * 2048 * 128 * (2 * 32 + 2 * 4)  # which the engine holds in bfloat16
    assert parts["engine's weights"] == 4.0 * numbers - 2.0 * attention and "engine's weights" not in whole
    least = 4 * 4096 * 8 * (2 * 2048 + 3 * 768)  # what goes into and out of the experts of a layer
    less = plan_memory(config(RL, **given, recompute="layers"), 1e15).found.parts
    assert whole["activations"] > 48 * least > less["activations"] > least


@pytest.mark.parametrize("options", [{}, {"frozen_weights": "bfloat16"}, {"quantize": "int8"}])
def test_adapters_of_a_model_of_transformers_are_counted(models: Path, options: dict[str, Any]) -> None:
    whole, adapted = (
        plan_memory(config(SFT, model="other", **how), 1e12).found.parts for how in ({}, {"lora": 16, **options})
    )
    assert adapted["gradients"] < 0.05 * whole["gradients"] and adapted["moments"] == 2 * adapted["gradients"]
    layers = 4.0 * 28 * (4 * 1536 * 1536 + 2 * 1536 * 8960)
    left = {"": 1.0, "frozen_weights": 0.5, "quantize": 0.25}["".join(options)]
    held = whole["weights"] - (1 - left) * layers + adapted["gradients"]
    assert adapted["weights"] == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize("how", [{"shard": True, "processes": 4}, {"offload": ("activations",)}, {"async_steps": 1}])
def test_options_change_the_estimate_of_a_model_of_transformers(models: Path, how: dict[str, Any]) -> None:
    given: dict[str, Any] = {"model": "other", "algorithm": "ppo", "env": "e", "recompute": "none"}
    whole, other = (plan_memory(config(RL, **given, **more), 1e12).found.parts for more in ({}, how))
    if "shard" in how:
        assert other["weights"] == pytest.approx(whole["weights"] / 4, rel=0.01) and other["gathered"] > 0
    elif "offload" in how:
        assert other["activations"] < whole["activations"] / 5
    else:
        cache = 2 * 28 * 2 * 2 * 128  # bytes, layers, keys and values, heads, their size
        assert other["engine"] == cache * 128 * 256 and other["engine's weights"] > 0


def test_processes_that_divide_weights_or_tokens_take_their_parts(models: Path) -> None:
    given = {"model": "7b", "tokens_per_microbatch": 8_192, "processes": 4}
    one, tensor, context = (
        plan_memory(config(SFT, **given, **how), 1e12).found.parts
        for how in ({}, {"tensor_parallel": 4}, {"context_parallel": 4})
    )
    for name in ("weights", "gradients", "moments"):
        assert tensor[name] == pytest.approx(one[name] / 4, rel=1e-3) and context[name] == one[name], name
    assert context["activations"] == one["activations"] / 4 < tensor["activations"] < one["activations"] / 2
    with pytest.raises(
        UserError, match="--tensor-parallel 3 needs 3 processes for each micro-batch, and the run has 4"
    ):
        plan_memory(config(SFT, **given, tensor_parallel=3), 1e12)
    with pytest.raises(UserError, match="--tensor-parallel 8 divides key-value heads, and this model has 4"):
        plan_memory(config(SFT, **{**given, "processes": 8}, tensor_parallel=8), 1e12)
    with pytest.raises(UserError, match="--tensor-parallel has divided them already: leave out one of them"):
        plan_memory(config(SFT, **given, tensor_parallel=2, shard=True), 1e12)
    beside: list[dict[str, Any]] = [{"offload": ("optimizer",)}, {"role_devices": {"reference": "1"}}]
    for how in beside:
        with pytest.raises(
            UserError, match="is for whole models and micro-batches, and --tensor-parallel divides them"
        ):
            plan_memory(config(SFT, **given, **how, tensor_parallel=2), 1e12)


def test_packed_weights_take_their_bytes_and_a_product_unpacks_one(models: Path) -> None:
    def parts(**options: Any) -> Any:
        return plan_memory(config(SFT, model="7b", lora=16, recompute="layers", **options), 80 * GIB).found.parts

    half, four = parts(frozen_weights="bfloat16"), parts(quantize="nf4")
    ends, of_layers = 2 * 152_064 * 3584, weights_of(QWEN_7B) / 4 - 2 * 152_064 * 3584
    adapters = half["gradients"]
    assert half["gradients"] == four["gradients"] and half["moments"] == four["moments"]
    assert four["weights"] == pytest.approx(4 * ends + (0.5 + 4 / 64) * of_layers + adapters, rel=0.01)
    assert four["unpacked"] == (4 + 2) * 2 * 3584 * 18_944 and half["unpacked"] == 0, "gate and up"
    assert parts(quantize="int8")["unpacked"] == (8 + 2) * 2 * 3584 * 18_944


def test_a_critic_keeps_activations_beside_the_policy(models: Path) -> None:
    def parts(**options: Any) -> Any:
        how = {"tokens_per_microbatch": 4096, "algorithm": "ppo", **options}
        return plan_memory(config(RL, model="1b", env="e", **how), 80 * GIB).found.parts["activations"]

    alone = parts(critic="shared")
    assert parts() == 2 * alone == 2 * parts(algorithm="grpo") and parts(role_devices={"critic": "1"}) == alone


def test_the_gpus_of_roles_have_an_estimate_of_their_own(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "-- rl --model 1b --precision bfloat16 --algorithm ppo --recompute layers --role-devices".split()
    assert main(["memory", "--gpu-memory", "60", *words, "reference=1", "critic=2"]) == 0
    out = capsys.readouterr().out
    assert "memory of GPU 1 (reference): about " in out and "memory of GPU 2 (critic): about " in out
    assert main(["memory", "--gpu-memory", "30", *words, "reference=1", "critic=1"]) == 1
    assert "; it may not fit: give the roles GPUs of their own" in capsys.readouterr().out
    assert main(["memory", "--gpu-memory", "24", *words, "reference=1", "critic=1"]) == 1
    out = capsys.readouterr().out
    assert "GPU 1 (reference, critic) would need " in out and "--offload optimizer takes less" in out


@pytest.mark.parametrize("how", [{"tensor_parallel": 2}, {"context_parallel": 2}, {"shard": True}])
def test_advice_names_no_option_that_is_refused_beside_others(models: Path, how: dict[str, Any]) -> None:
    room = 24 if "context_parallel" in how else 12  # in which the weights fit, and activations do not
    kept: dict[str, Any] = {"model": "1b", "recompute": "none"}
    (whole,) = plan_memory(config(SFT, **kept), 24 * GIB).advice
    (divided,) = plan_memory(config(SFT, processes=2, **kept, **how), room * GIB).advice
    assert "--offload" in whole and "--recompute layers" in divided and "--offload" not in divided


def test_servers_that_share_a_gpu_have_weights_and_caches_beside_what_lasts(models: Path) -> None:
    given: dict[str, Any] = {"model": "7b", "env": "e", **ADAPTED}
    alone = plan_memory(config(RL, **given), 80 * GIB)
    assert (
        alone.servers is None
        and plan_memory(config(RL, **given, engine="vllm", engine_devices=(1,)), 1e11).servers is None
    )
    weights = 2 * 7_615_616_512.0  # Qwen2.5 7B in bfloat16
    last = sum(alone.found.parts[name] for name in ("weights", "gradients", "moments"))
    asked: dict[str, tuple[dict[str, Any], float, float]] = {
        "asleep in updates": ({}, last, 16 * GIB),
        "a cache of a given size": ({"engine_cache": 30.0}, last, 30 * GIB),
        "two": ({"engine_cache": 30.0, "replicas": 2}, last + weights, 60 * GIB),
        # each of two processes starts one, and both have a part on both GPUs
        "divided": ({"engine_cache": 10.0, "engine_tensor_parallel": 2, "processes": 2}, last, 20 * GIB),
    }
    for name, (options, learner, caches) in asked.items():
        found = plan_memory(config(RL, **given, engine="vllm", **options), 80 * GIB)
        assert found.servers is not None, name
        assert found.servers.total == pytest.approx(learner + weights + caches, rel=1e-3), name
        assert found.lines and ("may not fit" in [*found.lines][-1]) == (found.servers.total > 76 * GIB), name
    beside = plan_memory(config(RL, **given, engine="vllm", async_steps=1), 80 * GIB)
    assert beside.servers is not None
    assert beside.servers.total == pytest.approx(beside.found.total + weights + 4 * GIB, rel=1e-3)


def test_an_engine_with_whole_weights_beside_shards_is_offered_other_gpus(models: Path) -> None:
    given: dict[str, Any] = {"model": "7b", "env": "e", "processes": 8, "shard": True}
    found = plan_memory(config(RL, **given), 24 * GIB)
    served = plan_memory(config(RL, **given, engine="vllm", recompute="layers"), 24 * GIB).found
    assert f"--engine vllm --engine-tensor-parallel 2 on other GPUs ({served.total / GIB:.1f} GiB)" in found.advice[0]
