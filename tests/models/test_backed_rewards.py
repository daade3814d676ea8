"""Reward models on models of transformers: their scores are transformers' own, in training and in folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from judged import eos_alone, own_pad, scores, spoken, started, theirs, trained
from reward_rows import pairs
from tiny_models import KINDS, make_seeing

import posttrain
from posttrain.cli.main import main
from posttrain.core.protocols import TRAINING
from posttrain.core.types import UserError
from posttrain.models.adapters.lora import LoRA, attach, begin, merge
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.critic import ValueModel, new_critic
from posttrain.models.critic_file import STORED
from posttrain.models.hf.backed import Backed
from posttrain.models.reward_model import ScoreShape, load_reward_model, new_reward_model, settle
from posttrain.models.tensor_files import write_state

transformers = pytest.importorskip("transformers")
OTHERS = [kind for kind in KINDS if kind != "qwen3"]
WITHOUT_CLASS = {"olmo2", "granite", "cohere", "gemma4_text", "mamba2", "lfm2"}
"""Kinds for which the installed transformers may have no class of sequence classification."""


@pytest.mark.parametrize("kind", OTHERS)
def test_transformers_reads_the_same_scores_or_refuses(tmp_path: Path, kind: str) -> None:
    tokenizer = own_pad()
    model = trained(tmp_path, tokenizer, kind)
    assert isinstance(model.backbone, Backed)
    texts, folder = spoken(tokenizer, model.eos_ids[0]), tmp_path / "reward"
    expected = scores(model, texts)
    assert expected.max() - expected.min() > 0.05
    assert torch.allclose(scores(load_reward_model(folder), texts), expected, atol=1e-6)
    with pytest.raises(UserError, match="is a reward model .*, and a language model is required"):
        load_model(folder)
    if model.classifier is None:
        assert kind in WITHOUT_CLASS
        with pytest.raises(ValueError, match="posttrain_reward_model"):
            transformers.AutoModelForSequenceClassification.from_pretrained(folder)
        return
    # the default attention of transformers 5.17 leaves out the soft caps of Gemma 2
    how = {"output_loading_info": True, "attn_implementation": "eager"}
    other, told = transformers.AutoModelForSequenceClassification.from_pretrained(folder, **how)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    assert torch.allclose(theirs(other.eval(), texts), expected, atol=1e-4)
    assert torch.allclose(theirs(other, texts, model.pad), expected, atol=1e-4)


def test_one_that_sees_is_stored_in_a_form_of_ours_and_read_again(tmp_path: Path) -> None:
    tokenizer = own_pad()
    start = make_seeing("qwen2_5_vl", tmp_path / "start", vocab_size=tokenizer.vocab_size, eos_token_id=2)
    model = new_reward_model(start, ScoreShape(), 1)
    model.save(tmp_path / "reward")
    again, texts = load_reward_model(tmp_path / "reward"), spoken(tokenizer, 2)
    assert model.classifier is None and torch.allclose(scores(again, texts), scores(model, texts), atol=1e-6)


@pytest.mark.parametrize("kind", ["gemma3_text", "phi"])
def test_a_token_that_pads_is_added_where_there_is_none(tmp_path: Path, kind: str) -> None:
    tokenizer = eos_alone()
    model = trained(tmp_path, tokenizer, kind)
    assert model.pad == tokenizer.vocab_size == model.config.vocab - 1
    assert isinstance(model.backbone, Backed) and model.backbone.tied
    texts = spoken(tokenizer, model.eos_ids[0])
    other, told = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "reward", output_loading_info=True
    )
    assert not told["missing_keys"] and not told["mismatched_keys"]
    assert torch.allclose(theirs(other.eval(), texts, model.pad), scores(model, texts), atol=1e-4)


def test_the_output_head_takes_no_memory_and_is_not_stored(tmp_path: Path) -> None:
    model = trained(tmp_path, own_pad(), "phi")
    assert isinstance(model.backbone, Backed) and model.backbone.tied
    assert not any("lm_head" in name for name, _ in model.named_parameters())
    assert model.backbone.head.bias is None


def test_a_class_of_transformers_with_other_tensors_is_not_taken(tmp_path: Path) -> None:
    model = trained(tmp_path, own_pad(), "gemma3_text")
    assert isinstance(model.backbone, Backed) and model.classifier == "Gemma3TextForSequenceClassification"
    model.backbone.inner.model.layers[0].mlp.more = torch.nn.Parameter(torch.zeros(3))
    assert model.classifier is None


def test_an_adapter_of_a_reward_model_opens_in_peft_and_merges(tmp_path: Path) -> None:
    peft, tokenizer = pytest.importorskip("peft"), own_pad()
    start = started(tmp_path / "start", "gemma3_text", tokenizer)
    model = new_reward_model(start, ScoreShape(), 1)
    settle(model, tokenizer, model.eos_ids)
    attach(model.backbone, LoRA(3, 6.0, base=str(start)), lambda name: name.endswith(("q_proj", "down_proj")))
    begin(model.backbone, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("adapter.b"):
                parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    model.save(tmp_path / "adapter")
    tokenizer.save(tmp_path / "adapter")
    texts = spoken(tokenizer, model.eos_ids[0])
    expected = scores(model, texts)
    again = load_reward_model(tmp_path / "adapter")
    assert torch.allclose(scores(again, texts), expected, atol=1e-6)
    base = transformers.AutoModelForSequenceClassification.from_pretrained(start, num_labels=1)
    other = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    assert torch.allclose(theirs(other, texts), expected, atol=1e-4)
    merge(again.backbone)
    again.save(tmp_path / "merged")
    assert torch.allclose(scores(load_reward_model(tmp_path / "merged"), texts), expected, atol=1e-4)
    assert load_reward_model(tmp_path / "merged").backbone.lora is None


def test_a_critic_that_a_run_left_goes_on_as_it_was(tmp_path: Path) -> None:
    folder = started(tmp_path / "start", "gemma3_text", own_pad())  # its output head is its embedding
    policy = load_model(folder)
    critic = new_critic(ValueModel, folder, policy, seed=7)
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.add_(0.1)
    (folder / TRAINING).mkdir()
    write_state(folder / TRAINING / STORED, dict(critic.named_parameters()))
    again = dict(new_critic(ValueModel, folder, policy, seed=8).named_parameters())
    assert all(torch.equal(again[name], parameter) for name, parameter in critic.named_parameters())


@pytest.mark.parametrize("more", [{}, {"lora": 2}], ids=["whole", "adapter"])
def test_a_run_learns_goes_on_exactly_and_judges_another(tmp_path: Path, more: dict[str, Any]) -> None:
    tokenizer = own_pad()
    start = started(tmp_path / "start", "gemma3_text", tokenizer)
    rows, how = pairs(9), {"lr": 1e-2, "rows": 4, "threads": 1, "quiet": True, "schedule": "constant", **more}
    whole = posttrain.reward_model(rows, str(start), out=str(tmp_path / "whole"), steps=4, **how)
    posttrain.reward_model(rows, str(start), out=str(tmp_path / "parts"), steps=2, **how)
    rest = posttrain.reward_model(rows, str(start), out=str(tmp_path / "parts"), resume=True, steps=4)
    assert rest.metrics[3:] == whole.metrics[3:]
    losses = [row["loss"] for row in whole.metrics if "loss" in row]
    assert len(losses) == 4 and losses[-1] < losses[0]
    tasks = [{"prompt": f"{i} ="} for i in range(6)]
    run = posttrain.rl(
        tasks, model=str(start), reward_model=(str(tmp_path / "whole"),), out=str(tmp_path / "rl"), steps=1, prompts=2,
        group=2, max_tokens=4, threads=1, env_workers=0, quiet=True,
    )  # fmt: skip
    assert len(run.metrics) == 1 and run.metrics[0]["reward"] != 0.0
    if more:
        assert main(["merge", str(tmp_path / "whole"), "--out", str(tmp_path / "merged")]) == 0
        texts = spoken(tokenizer, 2)
        one, other = (load_reward_model(tmp_path / name) for name in ("whole/checkpoints/step-000004", "merged"))
        assert torch.allclose(scores(one, texts), scores(other, texts), atol=1e-5)
