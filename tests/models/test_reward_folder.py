"""The folder of a reward model: transformers reads the same numbers from it or refuses it, as do critics and services."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny
from heads import unread
from judged import FAMILIES, TOKENIZERS, decoder, own_pad, scores, spoken, theirs, trained, transcript
from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.core.types import UserError
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.critic import ValueModel, new_critic
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.reward_model import ScoreShape, load_reward_model, new_reward_model, settle
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.models.tokenizer.tokenizer_training import PAD
from posttrain.services.reward_model_service import RewardModelService as Service
from posttrain.training.sources.packing import pack

OURS = [ScoreShape("mean", "linear"), ScoreShape("last", "mlp"), ScoreShape("mean", "mlp")]


CASES = [(family, tied, "own pad") for family in FAMILIES for tied in (True, False)]
CASES += [("llama", False, name) for name in TOKENIZERS if name != "own pad"] + [("qwen2", True, "eos alone")]


@pytest.mark.parametrize(("family", "tied", "kind"), CASES)
def test_transformers_reads_the_same_raw_scores(tmp_path: Path, family: str, tied: bool, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = TOKENIZERS[kind]()
    start = decoder(tokenizer, family, tied)
    model = trained(tmp_path, tokenizer, start)
    model.offset = 2.5  # is no part of what transformers computes
    model.save(tmp_path / "reward")
    other, told = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "reward", output_loading_info=True
    )
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    [end] = start.eos_ids
    config = json.loads((tmp_path / "reward" / "config.json").read_text())
    assert config["pad_token_id"] not in (None, end) and config["eos_token_id"] == end
    texts = spoken(tokenizer, end)
    expected = scores(model, texts)
    assert expected.max() - expected.min() > 0.3
    for side in ("left", "right"):
        padded = theirs(other.eval(), texts, config["pad_token_id"], side)
        assert torch.allclose(padded, expected, atol=5e-5, rtol=5e-5), side
    assert torch.allclose(theirs(other, texts), expected, atol=5e-5, rtol=5e-5)
    assert torch.equal(scores(load_reward_model(tmp_path / "reward"), texts), expected)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_padding_token_never_ends_a_reply_and_both_are_always_written(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = TOKENIZERS[kind]()
    start = decoder(tokenizer)
    model = trained(tmp_path, tokenizer, start)
    folder = tmp_path / "reward"
    config, words = (json.loads((folder / name).read_text()) for name in ("config.json", "tokenizer_config.json"))
    read = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert words["pad_token"] and words["eos_token"] and words["pad_token"] != words["eos_token"]
    assert (read.pad_token_id, read.eos_token_id) == (config["pad_token_id"], config["eos_token_id"])
    assert config["vocab_size"] == model.backbone.embed.weight.shape[0] > config["pad_token_id"]
    grown = kind in ("eos alone", "no names")
    assert (config["vocab_size"] - start.config.vocab, words["pad_token"] == PAD) == (grown, grown or kind == "own pad")
    other = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    texts = [f"{a}{words['eos_token']}" for a in ("1+1=2", "what is the time half past nine")]
    expected = scores(model, [(tokenizer.encode(text)[:1], tokenizer.encode(text)[1:]) for text in texts])
    for side in ("left", "right"):
        batch = read(texts, padding=True, padding_side=side, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            found = other(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
        assert torch.allclose(found, expected, atol=2e-5)
    again = Tokenizer.load(folder)
    assert settle(load_reward_model(folder), again, start.eos_ids) is again, "a resumed run writes the same again"


def test_several_ends_are_all_kept_and_none_of_them_pads(tmp_path: Path, tokenizer: Tokenizer) -> None:
    start = tiny(tokenizer)
    assert tokenizer.pad_id is not None and tokenizer.eos_id is not None
    start.eos_ids = (tokenizer.eos_id, tokenizer.pad_id)
    model = trained(tmp_path, tokenizer, start)
    config = json.loads((tmp_path / "reward" / "config.json").read_text())
    assert config["eos_token_id"] == list(start.eos_ids) and model.pad == tokenizer.unknown_id


@pytest.mark.parametrize("shape", OURS, ids=str)
@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_what_transformers_has_no_form_for_it_refuses_and_we_read(tmp_path: Path, kind: str, shape: ScoreShape) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = own_pad()
    model = trained(tmp_path, tokenizer, kind, shape)
    for reader in (transformers.AutoModelForSequenceClassification, transformers.AutoModelForCausalLM):
        with pytest.raises(ValueError, match="posttrain_reward_model"):
            reader.from_pretrained(tmp_path / "reward")
    with pytest.raises(UserError, match="is a reward model .posttrain_reward_model., and a language model is required"):
        load_model(tmp_path / "reward")
    texts = spoken(tokenizer, model.eos_ids[0])
    again = load_reward_model(tmp_path / "reward")
    assert again.shape == shape and torch.equal(scores(again, texts), scores(model, texts))
    new_reward_model(tmp_path / "reward", ScoreShape(), seed=9).save(tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config["model_type"] == kind and not {"posttrain_head", "posttrain_pooling"} & config.keys()
    assert load_reward_model(tmp_path / "plain").shape == ScoreShape()


@pytest.mark.parametrize("shape", OURS, ids=str)
def test_forms_of_head_are_what_their_names_say(tmp_path: Path, tokenizer: Tokenizer, shape: ScoreShape) -> None:
    model = trained(tmp_path, tokenizer, tiny(tokenizer), shape)
    prompt, response = spoken(tokenizer, 1)[3]
    hidden = model.backbone.hidden(
        pack([[transcript(prompt, response)]], [0], read="each").layout,
        torch.arange(len(prompt), len(prompt) + len(response)),
    )
    read = hidden if shape.pooling == "mean" else hidden[-1:]
    assert (model.inner is not None) == (shape.head == "mlp")
    inner = read if model.inner is None else torch.tanh(read @ model.inner.T)
    expected = (inner @ model.score[0]).mean()
    assert scores(model, [(prompt, response)])[0].item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("shape", [ScoreShape(), *OURS], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_service_gives_the_scores_of_training_and_no_bit_depends_on_company(
    tmp_path: Path, kind: str, shape: ScoreShape
) -> None:
    tokenizer = own_pad()
    model = trained(tmp_path, tokenizer, kind, shape)
    service = Service(tmp_path / "reward")
    asked = [{"prompt": p, "response": r} for p, r in (("1+1=", "2"), ("1+1=", "3 or so"), ("a", "b"))]
    for id, text in enumerate(asked):
        service.submit(id, text)
    together = dict(service.poll())
    wanted = scores(model, spoken(tokenizer, model.eos_ids[0])[:3]).tolist()
    assert [together[id] for id in range(3)] == pytest.approx(wanted, abs=1e-5)
    for id, text in enumerate(asked):
        service.submit(id, text)
        assert service.poll() == [(id, together[id])]


def test_a_head_is_taken_over_by_one_of_the_same_shape_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for name, shape in (("linear", ScoreShape()), ("two", ScoreShape("last", "mlp"))):
        old = trained(tmp_path / name, tokenizer, tiny(tokenizer), shape)
        for other in (ScoreShape(), ScoreShape("last", "mlp")):
            new = new_reward_model(tmp_path / name / "reward", other, seed=9)
            assert torch.equal(new.score, old.score) == (other == shape)


def test_a_new_head_is_drawn_from_the_seed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    save_model(tiny(tokenizer), tmp_path, tokenizer)
    one, same, other = (new_reward_model(tmp_path, ScoreShape("last", "mlp"), seed) for seed in (4, 4, 5))
    assert torch.equal(one.score, same.score) and not torch.equal(one.score, other.score)
    drawn = torch.cat([new_reward_model(tmp_path, ScoreShape(), seed).score[0] for seed in range(60)])
    assert drawn.std().item() == pytest.approx(33**-0.5, rel=0.05) and one.inner is not None
    assert one.inner.std().item() == pytest.approx(32**-0.5, rel=0.1)


def edited(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def told(folder: Path, **entries: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **entries}))


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


def spoil(weights: dict[str, Tensor]) -> None:
    weights["score.weight"][0, 0] = torch.nan


Weights = Callable[[dict[str, Tensor]], object]


def with_weights(change: Weights) -> Callable[[Path], None]:
    return lambda folder: edited(folder, change)


def saying(**entries: Any) -> Callable[[Path], None]:
    return lambda folder: told(folder, **entries)


FINITE = "posttrain_score_offset in config.json is .*; it must be a finite number"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "several labels": (
        with_weights(lambda w: w.update({"score.weight": torch.ones(3, 32)})),
        r"score.weight has shape \[3, 32\]; a reward model has one label",
    ),
    "no head": (with_weights(lambda w: w.pop("score.weight")), "is not a reward model: it has no score.weight"),
    "bias": (with_weights(lambda w: w.update({"score.bias": torch.ones(1)})), "its head has a bias"),
    "another size": (with_weights(lambda w: w.update({"score.weight": torch.ones(1, 16)})), r"has shape \[1, 16\]"),
    "NaN in the head": (with_weights(spoil), "score.weight has numbers that are not finite"),
    "offset NaN": (saying(posttrain_score_offset=float("nan")), FINITE),
    "offset infinite": (saying(posttrain_score_offset=float("inf")), FINITE),
    "offset text": (saying(posttrain_score_offset="1"), FINITE),
    "offset true": (saying(posttrain_score_offset=True), FINITE),
    "unknown pooling": (saying(posttrain_pooling="max"), "unknown form of reward model"),
    "family": (saying(model_type="deberta-v2"), "deberta-v2"),
    "family no text": (saying(model_type={"value": "llama"}), "model_type"),
    "second layer missing": (saying(posttrain_head="mlp"), "score.inner.weight is not there"),
    "damaged": (cut, "is damaged"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds no model.safetensors"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_no_reward_model_is_refused_in_one_line(tmp_path: Path, tokenizer: Tokenizer, damage: str) -> None:
    trained(tmp_path, tokenizer, tiny(tokenizer))
    act, match = DAMAGES[damage]
    act(tmp_path / "reward")
    with pytest.raises(UserError, match=match) as error:
        load_reward_model(tmp_path / "reward")
    assert "\n" not in str(error.value)


def test_a_language_model_is_no_reward_model(tmp_path: Path, tokenizer: Tokenizer) -> None:
    save_model(tiny(tokenizer), tmp_path, tokenizer)
    with pytest.raises(UserError, match="train one with posttrain reward-model"):
        load_reward_model(tmp_path)


def test_a_reward_model_is_no_language_model(tmp_path: Path, tokenizer: Tokenizer) -> None:
    trained(tmp_path, tokenizer, tiny(tokenizer))
    with pytest.raises(UserError, match="is a reward model .*pass this as --reward-model"):
        load_model(tmp_path / "reward")


@pytest.mark.parametrize(("kind", "words"), [("llama", "own pad"), ("llama", "eos alone"), ("gemma3_text", "own pad")])
def test_a_critic_starts_from_the_reward_model_and_values_are_its_scores(tmp_path: Path, kind: str, words: str) -> None:
    tokenizer = TOKENIZERS[words]()
    model = trained(tmp_path, tokenizer, kind)
    critic = new_critic(ValueModel, tmp_path / "reward", load_model(tmp_path / "start"), seed=7)
    assert isinstance(critic, ValueModel)
    prompt, response = spoken(tokenizer, model.eos_ids[0])[1]
    packed = pack([[transcript(prompt, response)]], [0], read="last")
    value = critic(packed, unread(), 1.0)["value"]
    assert value.item() == pytest.approx(scores(model, [(prompt, response)]).item(), abs=1e-5)
