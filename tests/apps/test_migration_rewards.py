"""Reward functions of a training script: copied, with what they use, where importing it would train."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from posttrain.cli.main import main

SCRIPT = """from __future__ import annotations
import re, sys as system
from functools import lru_cache
from trl import GRPOConfig, GRPOTrainer
PATTERN = re.compile("[0-9]+")
SCALE: float = 2.0
UNUSED = open("RAN", "w")
rows = load_dataset("d")
def found(text):  # the numbers
    return PATTERN.findall(text)
@lru_cache
def cached(text):
    return len(found(text)) * SCALE
def counts(completions, **kwargs):
    return [cached(text) for text in completions]
{trainer}
"""


@pytest.mark.parametrize("guarded", [False, True])
def test_rewards_are_copied_with_what_they_use_and_nothing_else(
    guarded: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = "GRPOTrainer(model='u/m', reward_funcs=[counts], args=GRPOConfig(), train_dataset=rows).train()"
    trainer = f"if __name__ == '__main__':\n    {trainer}" if guarded else trainer
    (tmp_path / "own.py").write_text(SCRIPT.format(trainer=trainer))
    (tmp_path / "to").mkdir()
    assert main(["import", "own.py", "--out", "to/recipe.toml"]) == 0
    assert "wrote       to/rewards.py" in capsys.readouterr().out
    assert "trl:rewards.py:counts" in (tmp_path / "to" / "recipe.toml").read_text()
    module = runpy.run_path(str(tmp_path / "to" / "rewards.py"))
    assert module["counts"](["1 and 22", "none"]) == [4.0, 0.0]
    assert not {"UNUSED", "rows", "GRPOTrainer", "system"} & (module.keys() - {"system"})
    assert "# the numbers" in (tmp_path / "to" / "rewards.py").read_text() and not (tmp_path / "RAN").exists()


NAMES = """import contextlib
from string import *
from trl import GRPOConfig, GRPOTrainer
def texts(x):
    return ["wrong"]
with contextlib.suppress(KeyError):
    BONUS = 1
    BONUS += len(digits)
try:
    from quick import length
except ImportError:
    length = len
tokenizer = AutoTokenizer.from_pretrained("u/m")
END = tokenizer.eos_token
def other(completions, n):
    texts = [strip(c) for c in completions]
    rewards = [1 for c in texts]
    weight = texts[0]
    return rewards
def main(limit):
    factor = BONUS - 9
    def graded(completions, answer=(), **kwargs):
        texts = [length(c) for c in completions]
        for weight in texts:
            weight += factor
        with contextlib.suppress(TypeError) as n:
            rewards = [n * factor for n in texts]
        return rewards
    def limited(completions, **kwargs):
        return [limit if END in c else len(tokenizer(c)) for c in completions]
    {call}
{last}
"""
CALL = "GRPOTrainer(model='u/m', reward_funcs=[graded, limited], args=GRPOConfig(), train_dataset=rows).train()"


def test_names_that_a_reward_binds_itself_are_not_followed_and_names_that_are_loaded_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(NAMES.format(call=CALL, last="main(3)"))
    assert main(["import", "own.py", "--out", "recipe.toml"]) == 0
    module = runpy.run_path(str(tmp_path / "rewards.py"))
    assert module["graded"](["a", "bcd"]) == [2, 6], "BONUS is 11, factor 2"
    assert not {"texts", "rewards", "weight", "n", "other", "tokenizer", "END", "limit", "main"} & module.keys()
    told = " ".join(capsys.readouterr().out.split())
    for name in ("tokenizer", "END", "limit"):
        assert f"{name} in rewards.py, which uses it" in told
    assert told.count("which uses it") == 3


def test_a_script_that_only_defines_is_named_itself_and_a_file_of_rewards_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = SCRIPT.replace('rows = load_dataset("d")', "").replace("UNUSED", "# UNUSED")
    start = (
        "def main():\n    GRPOTrainer(model='u/m', reward_funcs=counts, args=GRPOConfig(), train_dataset=rows).train()"
    )
    (tmp_path / "own.py").write_text(plain.format(trainer=start))
    assert main(["import", "own.py", "--out", "recipe.toml"]) == 0
    assert "trl:own.py:counts" in (tmp_path / "recipe.toml").read_text() and not (tmp_path / "rewards.py").exists()
    (tmp_path / "rewards.py").write_text("mine = 1\n")
    (tmp_path / "own.py").write_text(plain.format(trainer=f"{start}\nSFTTrainer()"))
    capsys.readouterr()
    assert main(["import", "own.py", "--out", "second.toml"]) == 0
    assert "kept        rewards.py" in capsys.readouterr().out and (tmp_path / "rewards.py").read_text() == "mine = 1\n"
