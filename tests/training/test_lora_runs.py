"""Runs that train adapters, by every verb: what they leave, how they go on, and what samples with them."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny
from safetensors.torch import load_file

from posttrain.cli.main import main
from posttrain.config.training import SFT as SFT_OPTIONS
from posttrain.models.adapters.adapter_config import is_adapter
from posttrain.models.adapters.adapter_writer import adapters
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.decoder import Decoder, causal
from posttrain.models.native.linear import Linear
from posttrain.models.reward_model import load_reward_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.checkpoint import newest, resolve
from posttrain.training import open_learner

ENVIRONMENT = '''
"""A reward that differs between the replies of a model that knows nothing."""


def reward(task, reply):
    return sum(c.isdigit() for c in reply) / (len(reply) + 1)
'''
LORA = "--lora 4 --lora-alpha 8 --lr 1e-2 --threads 1 --quiet --save-every 2".split()
LORA += ["--schedule", "constant"]
SFT = "sft --tasks rows.jsonl --model start --rows 4 --steps 4".split()
RL = "rl --tasks rows.jsonl --env env.py:reward --model start --prompts 2 --group 3 --max-tokens 8 --steps 4".split()
RL += "--env-workers 0".split()
PREFER = "prefer --tasks pairs.jsonl --model start --rows 4 --steps 4".split()
REWARD = "reward-model --tasks pairs.jsonl --model start --rows 4 --steps 4".split()
DISTILL = "distill --tasks rows.jsonl --model start --teacher teacher --prompts 2 --max-tokens 8 --steps 4".split()
DISTILL += "--env-workers 0".split()
VERBS = {"sft": SFT, "rl": [*RL, "--kl", "0.05"], "prefer": PREFER, "reward-model": REWARD, "distill": DISTILL}


@pytest.fixture
def place(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("env.py").write_text(ENVIRONMENT)
    rows = [{"prompt": f"{i}+{i}=", "response": str(2 * i), "answer": str(2 * i)} for i in range(12)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": f"a{i}"} for i in range(12)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    for name, seed in (("start", 0), ("teacher", 1)):
        tiny(tokenizer, seed).save(Path(name))
        tokenizer.save(Path(name))
    return tmp_path


def ran(words: list[str], out: str, *more: str) -> Path:
    assert main([*words, *LORA, "--out", out, *more]) == 0
    return last(out)


def again(verb: str, out: str) -> Path:
    """The last checkpoint of the same run, resumed after its step 2."""
    other = f"{out} again"
    shutil.copytree(out, other)
    shutil.rmtree(last(other))
    assert main([verb, "--out", other, "--resume", "--quiet"]) == 0
    return last(other)


def last(out: str) -> Path:
    found = newest(Path(out))
    assert found is not None
    return found


def without(words: list[str], option: str) -> list[str]:
    place = words.index(option)
    return [*words[:place], *words[place + 2 :]]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(list(words)) == 2
    told = capsys.readouterr().err
    assert told.startswith("posttrain: ")
    return " ".join(told.split())


def metrics(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def logits(folder: str | Path) -> torch.Tensor:
    model = load_model(folder)
    assert isinstance(model, Decoder)
    tokens = torch.tensor([3, 7, 11, 5, 9])
    with torch.no_grad():
        return model.logits(model(tokens, torch.arange(5), causal))


def content(folder: Path) -> dict[str, str]:
    return {
        str(f.relative_to(folder)): sha256(f.read_bytes()).hexdigest()
        for f in sorted(folder.rglob("*"))
        if f.suffix == ".safetensors"
    }


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_learns_an_adapter_and_resumes_it_exactly(place: Path, verb: str) -> None:
    words = VERBS[verb]
    checkpoint = ran(words, "whole")
    assert is_adapter(checkpoint) and not (checkpoint / "model.safetensors").exists()
    assert not (checkpoint / "config.json").exists() and (checkpoint / "tokenizer.json").exists()
    moments = load_file(checkpoint / "training" / "optimizer.safetensors")
    learned = {name.rpartition("/")[0] for name in moments}
    assert learned and all(".adapter." in name or name == "policy/score" for name in learned)
    stored = load_file(checkpoint / "adapter_model.safetensors")
    assert any(stored[name].any() for name in stored if name.endswith("lora_B.weight")), "it has learned"
    assert content(again(verb, "whole")) == content(checkpoint)


MORE = ["", "--no-compiled", "--lora-targets q_proj,v_proj", "--rslora"]


@pytest.mark.parametrize("more", [*MORE, pytest.param("--replicas 1", marks=pytest.mark.long)])
def test_the_first_ratio_is_one_and_the_sampler_agrees_with_the_learner(place: Path, more: str) -> None:
    ran([*RL, *more.split()], "run")
    for step in metrics("run"):
        assert step["ratio/first"] == 1.0
        assert step["sampler/gap/max"] < 1e-5


def test_a_merge_that_binds_nothing_is_seen_by_the_weight_probe_and_ends_the_run(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Linear, "merged", lambda linear: linear.weight.detach())
    assert main([*RL, *LORA, "--out", "run", "--replicas", "1", "--engine-restarts", "0"]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "no engine is left" in told and "off the learner's log-probabilities" in told and "version 1" in told


@pytest.mark.parametrize("more", ["--async-steps 1", "--tokens-per-step 4"])
def test_rollouts_of_older_adapters_are_played_again_when_a_run_resumes(place: Path, more: str) -> None:
    ran([*RL, *more.split()], "run")
    assert content(last("run")) == content(again("rl", "run"))


def test_a_reference_that_follows_is_a_copy_of_the_adapter_and_is_resumed(place: Path) -> None:
    words = [*RL, "--kl", "0.05", "--reference-every", "3"]
    checkpoint = ran(words, "run")
    moved = load_file(checkpoint / "training" / "reference.safetensors")
    assert moved and all(".adapter." in name for name in moved)
    assert metrics("run")[3]["kl"] < metrics("run")[2]["kl"]
    assert content(again("rl", "run")) == content(checkpoint)


@pytest.mark.parametrize("row", ["ppo", "trpo"])
def test_rows_with_a_critic_or_a_trust_region_move_the_adapter_alone(place: Path, row: str) -> None:
    more = ["--advantage", "gae"] if row == "ppo" else []
    checkpoint = ran([*RL, "--algorithm", row, *more, "--lora-targets", "q_proj,v_proj"], "run")
    stored = load_file(checkpoint / "adapter_model.safetensors")
    assert any(stored[name].any() for name in stored if name.endswith("lora_B.weight"))
    if row == "ppo":
        critic = load_file(checkpoint / "training" / "critic.safetensors")
        assert any(name.startswith("backbone.") for name in critic) and not any("adapter" in name for name in critic)


def test_merged_checkpoint_opens_in_transformers_with_equal_logits(
    place: Path, capsys: pytest.CaptureFixture[str], tokenizer: Tokenizer
) -> None:
    transformers = pytest.importorskip("transformers")
    ran(SFT, "run")
    assert main(["merge", "run", "--out", "merged"]) == 0
    assert "in float32\n" in (said := capsys.readouterr().out) and "vllm serve merged" in said
    assert " 0 MB" not in said and f"{(Path('merged') / 'model.safetensors').stat().st_size / 1e3:.1f} kB" in said
    assert main(["merge", "run", "--out", "small", "--dtype", "bfloat16"]) == 0
    whole, small = (load_file(f"{name}/model.safetensors") for name in ("merged", "small"))
    assert small.keys() == whole.keys()
    assert all(torch.equal(small[name], whole[name].bfloat16()) for name in whole)
    theirs = transformers.AutoModelForCausalLM.from_pretrained("merged", dtype=torch.float32)
    tokens = torch.tensor([[3, 7, 11, 5, 9]])
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits[0], logits(last("run")), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits("merged"), logits(last("run")), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits("merged"), logits("start"), atol=1e-2)
    assert "there already" in refused(capsys, "merge", "run", "--out", "merged")
    assert "a whole model, not an adapter" in refused(capsys, "merge", "start", "--out", "other")
    assert "give a new folder" in refused(capsys, "merge", "run", "--out", ".")
    assert "File name too long" in refused(capsys, "merge", "run", "--out", "x" * 300)
    shutil.copytree(last("run"), "bare")
    Path("bare/adapter_config.json").unlink()
    assert "holds no adapter_config.json" in refused(capsys, "merge", "bare", "--out", "other")
    tiny(tokenizer, 3).save(place / "start")
    assert "other weights" in refused(capsys, "merge", "run", "--out", "other")
    assert not Path("other").exists()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), Exception("No space left (os error 28)")]
)
def test_a_merge_that_the_disk_has_no_room_for_leaves_nothing(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(tokenizer: Tokenizer, folder: Path) -> None:
        raise error

    ran(SFT, "run")
    before = set(place.iterdir())
    monkeypatch.setattr(Tokenizer, "save", full)
    assert "cannot write merged: No space left" in refused(capsys, "merge", "run", "--out", "merged")
    assert set(place.iterdir()) == before


def test_run_from_an_adapter_goes_on_with_it_and_is_held_near_it(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = ran(SFT, "first")
    rl = without(RL, "--model")
    assert main([*rl, "--model", "first", "--lr", "1e-9", "--kl", "0.05", "--out", "second", "--quiet"]) == 0
    config = json.loads((last("second") / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert config["base_model_name_or_path"] == str(place / "start")
    torch.testing.assert_close(logits(last("second")), logits(first), rtol=1e-4, atol=1e-4)
    assert all(step["kl"] < 1e-6 for step in metrics("second") if "kl" in step), "near its own start, not the base"
    words = [*rl, "--model", "first", "--out", "third"]
    assert "--lora 4" in refused(capsys, *words, "--lora", "8")
    assert "--lora-targets" in refused(capsys, *words, "--lora", "4", "--lora-targets", "q_proj")
    for option in ("--rslora", "--quantize int8"):
        assert f"is an adapter without {option.split()[0]}, which training continues" in refused(
            capsys, *words, *option.split()
        )
    assert (
        main(["eval", "--model", "first", "--tasks", "rows.jsonl", "--env", "env.py:reward", "--max-tokens", "4"]) == 0
    )


def test_reward_model_with_an_adapter_scores_the_same_when_it_is_opened_and_merged(place: Path) -> None:
    checkpoint = ran(REWARD, "run")
    model = load_reward_model(checkpoint)
    assert model.backbone.lora is not None and model.offset != 0
    assert main(["merge", "run", "--out", "merged"]) == 0
    merged = load_reward_model("merged")
    assert merged.backbone.lora is None and merged.offset == model.offset
    assert torch.equal(merged.score, model.score)
    tokens = torch.tensor([3, 7, 11, 5, 9])
    with torch.no_grad():
        scores = [m.backbone(tokens, torch.arange(5), causal) @ m.score.t() for m in (model, merged)]
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-4)
    assert main([*without(RL, "--env"), "--reward-model", "run", "--out", "rl", "--quiet"]) == 0
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    if model.config.vocab == load_model("start").config.vocab:
        base = transformers.AutoModelForSequenceClassification.from_pretrained("start", num_labels=1, pad_token_id=0)
        theirs = peft.PeftModel.from_pretrained(base, checkpoint)
        with torch.no_grad():
            found = theirs(tokens[None]).logits[0, 0]
        torch.testing.assert_close(found, scores[0][-1, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--lora-alpha 3", "without --lora"),
        ("--rslora", "without --lora"),
        ("--lora 4 --lora-targets all-linear --lora-targets q_proj", "leave out all-linear, or the others"),
        ("--lora 4 --lora-targets lm_head", "lm_head is unknown"),
        ("--lora 0", "--lora"),
    ],
)
def test_what_makes_no_adapter_is_refused_in_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], words: str, told: str
) -> None:
    assert told in refused(capsys, *SFT, "--out", "run", *words.split())


@pytest.mark.parametrize(("more", "alpha"), [({}, 6.0), ({"lora_alpha": 5.0}, 5.0)])
def test_alpha_is_twice_the_rank_unless_it_is_given(place: Path, more: dict[str, float], alpha: float) -> None:
    model = load_model("start")
    assert isinstance(model, Decoder)
    open_learner.adapt(SFT_OPTIONS(model="start", lora=3, **more), model, place / "start")  # type: ignore[arg-type]
    assert model.lora is not None and (model.lora.alpha, model.lora.scale) == (alpha, alpha / 3)
    assert {adapter.scale for adapter in adapters(model)} == {alpha / 3}


def test_a_model_from_scratch_has_nothing_to_adapt(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "give --model" in refused(capsys, "sft", "--tasks", "rows.jsonl", "--out", "run", "--lora", "4")


def test_a_base_that_is_gone_is_told_in_one_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran(SFT, "run")
    Path("start").rename("elsewhere")
    assert "does not exist" in refused(capsys, *without(RL, "--model"), "--model", "run", "--out", "next")
    assert resolve("run") == last("run")


@pytest.mark.long
def test_two_processes_learn_the_adapter_of_one(place: Path) -> None:
    words = [*RL, "--kl", "0.05"]
    one = ran(words, "one")
    command = [sys.executable, "-m", "posttrain", "rl", *words[1:], *LORA, "--out", "two", "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    stored, other = (load_file(folder / "adapter_model.safetensors") for folder in (one, last("two")))
    assert stored.keys() == other.keys()
    for name, tensor in stored.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-4)
    assert is_adapter(last("two"))


def test_training_the_tower_of_a_model_that_reads_text_alone_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in ("sft", "rl", "prefer"):
        told = refused(capsys, *VERBS[verb], "--threads", "1", "--out", verb, "--train-vision")
        assert "--train-vision has no effect, as the model in" in told
