"""Files and folders that options name are looked for before torch is loaded, in every command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from posttrain.config.resolve import as_dict
from posttrain.config.training import RL as RLOptions
from posttrain.models.tokenizer.tokenizer import Tokenizer

RL = "rl --tasks rows.jsonl --model model --env my.py:reward"
SAMPLE = "sample --tasks rows.jsonl --model model --search best-of-n"
DISTILL = "distill --tasks rows.jsonl --model model --teacher"
REFUSED = {
    f"{RL} --held-out 0.5 --eval-every 2 --forget texst.jsonl": "--forget: there is no file texst.jsonl",
    "eval --tasks rows.jsonl --model model --env my.py:reward --forget no.jsonl": "--forget: there is no file no.jsonl",
    f"{RL} --algorithm ppo-ptx --ptx no.jsonl": "--ptx: there is no file no.jsonl",
    f"{RL} --algorithm ppo --critic-model no/folder/there": "--critic-model: no/folder/there: no such folder",
    f"{RL} --reward-model rm": "--reward-model: rm: no such folder",
    "chat model --reward-model good=rm": "--reward-model: rm: no such folder",
    f"{RL} --judge judge.tmol": "the judge's recipe judge.tmol: there is no such file",
    f"{RL} --judge clear=typo.toml": "typo.toml: unknown setting 'modle'",
    "check --tasks rows.jsonl --judge own.toml": "the judge's recipe own.toml: nowhere: no such folder",
    "chat model --judge own.toml": "the judge's recipe own.toml: nowhere: no such folder",
    f"{DISTILL} nobody": "--teacher: nobody: no such folder",
    f"{DISTILL} model --teachers.maths nobody": "--teachers.maths: nobody: no such folder",
    "label --items rows.jsonl --with reward-model=rm": "--with: rm: no such folder",
    "label --items rows.jsonl --with no.py:reward": "there is no file no.py",
    "eval --tasks rows.jsonl --model model --env my.py:reward --scorer judge=no.toml": "the judge's recipe no.toml",
    "eval --suite broken.toml --model model": "--suite broken.toml is not valid TOML",
    "eval --suite unknown.toml --model model": "unknown option 'smaples'",
    "eval --suite absent.toml --model model": "[sums] there is no file no.jsonl",
    "eval --suite broken.toml --tasks rows.jsonl --model model": "--tasks does not go with --suite",
    "eval --harness other:sums --model model": "must name tasks of lm-evaluation-harness",
    "eval --tasks rows.jsonl --model model --env my.py:reward --out own.toml": "own.toml already exists: --overwrite",
    f"{SAMPLE} --search-value critic": "model has no critic",
    f"{SAMPLE} --choose verified": "lacks a token for part of 'Yes': give another --choose",
    "rl --out begun --resume --lr 0.5": "cannot resume begun with other options (lr was",
}
FOUND = [
    f"{RL} --algorithm ppo-ptx --ptx rows.jsonl --forget rows.jsonl --reward-model a=model b=org/name --judge own.toml",
    f"{DISTILL} http://127.0.0.1:1/v1 --algorithm distill-k1",
    f"{DISTILL} org/name --teachers.maths model",
    "label --items rows.jsonl --with judge=own.toml",
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "my.py").write_text("def reward(task, reply):\n    return 1.0\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "response": "2", "responses": ["2", "3"]}\n')
    (tmp_path / "typo.toml").write_text('modle = "m"\nendpoint = "http://127.0.0.1:1/v1"\n')
    (tmp_path / "own.toml").write_text('model = "nowhere"\ntemplate = "{response}"\n')
    (tmp_path / "broken.toml").write_text("samples = [")
    (tmp_path / "unknown.toml").write_text('[sums]\ntasks = "rows.jsonl"\nenv = "my.py:reward"\nsmaples = 2\n')
    (tmp_path / "absent.toml").write_text('[sums]\ntasks = "no.jsonl"\nenv = "my.py:reward"\n')
    Tokenizer.train(["no"], 8, "characters").save(tmp_path / "model")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "run.json").write_text(json.dumps({"verb": "rl", "config": as_dict(RLOptions(out="begun"))}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def outcomes(commands: Sequence[str], before: str = "") -> tuple[list[tuple[int, str]], bool]:
    """Run the commands in one new process. Return (exit code, printed errors) of each, and whether torch was
    loaded.
    """
    code = f"""import contextlib, io, json, sys
from posttrain.cli import main, named_files
{before}
found = []
for words in {list(commands)!r}:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main.main(words.split())
    found.append([code, said.getvalue()])
print(json.dumps([found, "torch" in sys.modules]))"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    found, loaded = json.loads(ran.stdout.splitlines()[-1])
    return found, loaded


def test_what_is_not_there_is_said_in_one_line_before_torch_is_loaded(place: Path) -> None:
    found, loaded = outcomes(list(REFUSED))
    for (command, part), (code, said) in zip(REFUSED.items(), found, strict=True):
        assert code == 2, (command, said)
        assert said.count("\n") == 1 and said.startswith("posttrain: ") and part in said, (command, said)
    assert not loaded and not (place / "runs").exists()


def test_what_is_there_or_may_be_on_the_hub_or_behind_an_address_passes(place: Path) -> None:
    (place / "own.toml").write_text('model = "model"\ntemplate = "{response}"\n')
    after = """
from posttrain.core.types import UserError
checked = named_files.check_files
def check(config):
    checked(config)
    raise UserError("passed")
named_files.check_files = check"""
    found, _ = outcomes(FOUND, after)
    assert [(code, said) for code, said in found] == [(2, "posttrain: passed\n")] * len(FOUND)
