"""Every mistake of a user's is one line on stderr that says the fix, exit code 2, and nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny

import posttrain
from posttrain.algorithms.all_algorithms import find
from posttrain.cli.main import main
from posttrain.config.verbs import VERBS
from posttrain.core.option_aliases import suggestion
from posttrain.core.types import UserError
from posttrain.envs.builtin import arithmetic
from posttrain.learners.local_learner import LocalLearner
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.run_reading import read_run
from posttrain.runs.run_record import RunRecord

GOOD = """
def reward(task, reply):
    return sum(c.isdigit() for c in reply) / (len(reply) + 1)
"""
REWARDS = {
    "strict": "return 1.0 if reply == task['answer'] else Invalid('no number')",
    "raises": "raise KeyError('anwser')",
    "nan": "return float('nan')",
    "text": "return 'good'",
    "nothing": "pass",
    "endless": "while True: pass",
    "dies": "import os; os._exit(3)",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[Path]:
    """A folder with good and bad data, models, recipes and rewards; the current one for all tests here."""
    folder = tmp_path_factory.mktemp("bad-input")
    rows = arithmetic.tasks(20, seed=0, digits=1)
    write_rows(folder / "rows.jsonl", rows)
    write_rows(folder / "few.jsonl", rows[:3])
    heats: dict[str, Any] = {"heated": 0.5, "greedy": 0, "frozen": -1, "worded": "warm", "unheated": None}
    for name, heat in heats.items():
        write_rows(folder / f"{name}.jsonl", [{**row, "heat": heat} for row in rows[:3]])
    write_rows(folder / "long.jsonl", [*rows, {"prompt": "1+" * 40, "response": "1", "answer": "1"}])
    write_rows(folder / "pairs.jsonl", [{"prompt": f"{i}+1=", "chosen": "1", "rejected": "2"} for i in range(3)])
    write_rows(folder / "all-long.jsonl", [{"prompt": "1+" * 40, "answer": "1"}])
    (folder / "unfinished.jsonl").write_text('{"prompt": "1+1=\n')
    (folder / "empty.jsonl").touch()
    (folder / "broken.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": \n')
    (folder / "env.py").write_text(GOOD)
    for name, body in REWARDS.items():
        (folder / f"{name}.py").write_text(f"from posttrain import Invalid\ndef reward(task, reply):\n    {body}\n")
    (folder / "unfinished.py").write_text("def reward(task, reply:\n")
    (folder / "base.py").write_text("class Odd(BaseException): ...\nraise Odd('boo')\n")
    (folder / "hides.py").write_text("def __getattr__(name):\n    raise RuntimeError(name)\n")
    (folder / "data").mkdir()
    recipes = {
        "typo.toml": "[rl]\nstesp = 3\n",
        "table.toml": "[train]\nsteps = 3\n",
        "other.toml": "[sft]\nrows = 3\n",
        "type.toml": '[rl]\nsteps = "many"\n',
        "malformed.toml": "[rl\nsteps = 3\n",
        "dotted.toml": '[sft.mixture."a.b"]\ntasks = "rows.jsonl"\n[sft.mixture.c]\ntasks = "rows.jsonl"\n',
        "unquoted.toml": "[rl]\ntasks = rows.jsonl\n",
        "data/comma.jsonl": "prompt,answer\n1+1=,2\n",
        "data/none.csv": "prompt,answer\n",
        "data/unfinished.py": "def reward(task, reply)\n",
        "binary.toml": "\x00\x01",
        "huge.toml": f"[rl]\nsteps = 0x{'f' * 5000}\n",
    }
    for name, text in recipes.items():
        (folder / name).write_text(text)
    save_model(tiny(tokenizer), folder / "start", tokenizer)
    save_endless(folder / "no-eos", tokenizer)
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder
    torch.set_num_threads(threads)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def save_endless(folder: Path, tokenizer: Tokenizer) -> None:
    """A model whose checkpoint names no end-of-sequence token anywhere."""
    save_model(tiny(tokenizer), folder, tokenizer)
    for name, key in (
        ("generation_config", "eos_token_id"),
        ("config", "eos_token_id"),
        ("tokenizer_config", "eos_token"),
    ):
        content = json.loads((folder / f"{name}.json").read_text())
        content.pop(key, None)
        (folder / f"{name}.json").write_text(json.dumps(content))


def words(verb: str, **options: Any) -> list[str]:
    """A command that works, but for the options that are given here."""
    usual: dict[str, dict[str, Any]] = {
        "sft": {"tasks": "rows.jsonl", "tokenizer": "characters", "hidden": 16, "layers": 1, "rows": 8, "quiet": ""},
        "rl": {"tasks": "rows.jsonl", "model": "start", "env": "env.py:reward", "steps": 4, "prompts": 3, "group": 3,
               "max-tokens": 8, "lr": 1e-2, "env-workers": 1, "quiet": ""},
        "eval": {"tasks": "rows.jsonl", "model": "start", "env": "env.py:reward", "samples": 1, "max-tokens": 8,
                 "env-workers": 1},
        "check": {"tasks": "rows.jsonl", "env": "env.py:reward"},
        "prefer": {"tasks": "rows.jsonl", "model": "start", "quiet": ""},
    }  # fmt: skip
    threads = {"threads": 1, "out": "never"} if verb in ("sft", "rl", "prefer") else {}
    chosen = {**usual.get(verb, {}), **threads, **{name.replace("_", "-"): value for name, value in options.items()}}
    return [verb, *(part for name, value in chosen.items() for part in (f"--{name}", str(value)) if part)]


def refused(capfd: pytest.CaptureFixture[str], arguments: list[str], *parts: str) -> str:
    """The one line with which a command ends; the file descriptors are watched, so worker processes are heard too."""
    capfd.readouterr()
    code = main(arguments)
    said = capfd.readouterr().err
    assert code == 2, said
    assert said.count("\n") == 1 and said.startswith("posttrain: "), said
    assert "Traceback" not in said and len(said) < 500
    for part in parts:
        assert part in said, said
    return said


CASES: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "missing model": (words("rl", model="nowhere"), ("nowhere: no such folder", "give a")),
    "missing model in eval": (words("eval", model="nowhere"), ("nowhere: no such folder",)),
    "missing model in chat": (["chat", "nowhere"], ("nowhere: no such folder",)),
    "model by the address of its page": (
        words("rl", model="https://huggingface.co/Qwen/Qwen2.5-0.5B"), ("as its name alone, Qwen/Qwen2.5-0.5B",)
    ),
    "model with a prefix": (["chat", "hf:Qwen/Qwen2.5-0.5B"], ("as its name alone, Qwen/Qwen2.5-0.5B",)),
    "model behind an endpoint": (
        words("eval", model="http://127.0.0.1:9/v1"), ("is an address, and a model's weights are read from this machine",)
    ),
    "rows with a prefix": (words("rl", tasks="hf:openai/gsm8k"), ("as its name alone, openai/gsm8k",)),
    "rows by the address of their page": (
        words("sft", tasks="hf://datasets/openai/gsm8k"), ("as its name alone, openai/gsm8k",)
    ),
    "missing tasks": (words("rl", tasks="rosw.jsonl"), ("no file rosw.jsonl", "did you mean 'rows.jsonl'?")),
    "missing tasks in sft": (words("sft", tasks="rosw.jsonl"), ("did you mean 'rows.jsonl'?",)),
    "no tasks at all": (["rl", "--env", "env.py:reward"], ("--tasks is missing",)),
    "evaluations of nothing": (
        words("rl", eval_every=5), ("--eval-every 5 has nothing", "--held-out 0.1", "--eval-tasks FILE")
    ),
    "two lengths of a run": (
        [*words("sft"), "--steps", "3", "--epochs", "2"],
        ("--steps 3 and --epochs 2 both set the length of the run: leave out one of them",),
    ),
    "malformed row": (words("rl", tasks="broken.jsonl"), ("broken.jsonl:2: not valid JSON",)),
    "unfinished text in a row": (
        words("rl", tasks="unfinished.jsonl"), ("not valid JSON: Unterminated string starting at column 12",)
    ),
    "part with a dot": (["sft", "--config", "dotted.toml"], ("[sft.mixture] has the name 'a.b': write it without a dot",)),
    "empty dataset": (words("sft", tasks="empty.jsonl"), ("empty.jsonl has no rows",)),
    "unknown column": (
        [*words("sft"), "--fields.prompt", "promt"],
        ("rows.jsonl:1: no column 'promt'", "did you mean 'prompt'?"),
    ),
    "long prompt": (
        words("rl", tasks="long.jsonl", too_long="refuse"),
        ("long.jsonl:21: the prompt has 80 tokens", "context holds 64", "shorten it"),
    ),
    "long prompt in eval": (
        words("eval", tasks="long.jsonl", too_long="refuse"),
        ("long.jsonl:21: the prompt has 80 tokens", "context holds 64"),
    ),
    "long row": (
        words("sft", tasks="long.jsonl", context=32, too_long="refuse"),
        ("long.jsonl:21: the demonstration has 82 tokens", "context holds 32", "shorten it"),
    ),
    "nothing fits": (
        words("sft", context=3),
        ("none of 20 rows fits; the model's context holds 3 tokens", "(of a new model: --context)", "--too-long truncate"),
    ),
    "nothing fits although it is cut": (
        words("sft", context=3, too_long="truncate"),
        ("as each prompt alone is too long; the model's", "shorten them, or choose a model with a longer context"),
    ),
    "nothing fits into a limit": (
        words("sft", max_length=2), ("--max-length is 2 tokens: shorten them, raise --max-length, or cut them",)
    ),
    "no preference fits": (
        words("prefer", tasks="pairs.jsonl", max_length=2, too_long="truncate"),
        ("none of 3 rows fits, as each prompt alone", "shorten them, or raise --max-length"),
    ),
    "no prompt fits in eval": (words("eval", tasks="all-long.jsonl"), ("no prompt fits", "all-long.jsonl:1")),
    "no end of sequence": (words("rl", model="no-eos"), ("end-of-sequence", "set eos_token_id")),
    "no end of sequence in sft": (words("sft", model="no-eos"), ("end-of-sequence", "set eos_token_id")),
    "no end of sequence in eval": (words("eval", model="no-eos"), ("end-of-sequence", "set eos_token_id")),
    "unknown option": (words("rl", stesp=3), ("--stesp", "did you mean --steps?")),
    "two lines without an option": (["sft", "two\nlines"], ("such as --model two lines: posttrain",)),
    "rows without an option": (["sft", "rows.jsonl"], ("'rows.jsonl' has no option in front of it, such as --tasks",)),
    "several files of rows": (
        ["rl", "--tasks", "a/train.jsonl", "b/train.jsonl", "--model", "m"],
        ("--mixture.a.tasks a/train.jsonl --mixture.b.tasks b/train.jsonl;",),
    ),
    "several files in one word": (
        words("sft", tasks="one.jsonl,two.parquet"),
        ("--mixture.one.tasks one.jsonl --mixture.two.tasks two.parquet;",),
    ),
    "several files as a pattern": (
        words("sft", tasks="*long.jsonl"),
        ("--mixture.all-long.tasks all-long.jsonl --mixture.long.tasks long.jsonl;",),
    ),
    "a command of another trainer": (["trl", "grpo"], ("posttrain import run.sh",)),
    "unknown verb": (["trian"], ("trian", "sft, rl, prefer")),
    "unknown verb with a recipe": (["rll", "--config", "other.toml"], ("no command 'rll'; did you mean 'rl'?",)),
    "beginning of a verb": (["serve"], ("did you mean 'serve-policy'?",)),
    "mistyped option without a command": (["--verison"], ("no option --verison", "did you mean --version?")),
    "mistyped option without a command or a likeness": (["-q"], ("no option -q in front of a command", "--help")),
    "mistyped version of a verb": (words("eval", verison=""), ("--verison; did you mean --version?",)),
    "option of training in a command for rows": (
        ["data", "--tasks", "rows.jsonl"], ("--tasks: write posttrain data rows.jsonl",)
    ),
    "mistyped option of a command": (["data", "rows.jsonl", "--modl", "start"], ("--modl; did you mean --model?",)),
    "option like no other of a command": (
        ["rollouts", "run", "--where", "x"], ("--where: see posttrain rollouts --help-all",)
    ),
    "reference of another trainer": (words("rl", ref_model="m"), ("the reference is the starting model, --model;",)),
    "word for an option": (["version"], ("no command 'version'; did you mean '--version'?",)),
    "algorithm as a verb": (["dpo", "--beta", "0.1"], ("dpo is an algorithm: posttrain prefer --algorithm dpo",)),
    "options of another trainer": (
        words("rl", num_generations=4, learning_rate=1e-5), ("--num-generations; here it is --group", "here it is --lr")
    ),
    "option of another trainer for another verb": (words("sft", batch_size=4), ("here it is --rows\n",)),
    "query without a question": (["query", "start"], ("a question in SQL: posttrain query runs/rl \"select",)),
    "file without a function": (words("rl", env="env.py"), ("write env.py:reward",)),
    "wrong type": (words("rl", steps="many"), ("--steps is a whole number, not 'many'",)),
    "fraction of a step": (words("rl", steps=1.6), ("--steps is a whole number, not 1.6",)),
    "seed beyond all": (words("rl", seed=2**64), ("--seed must be at least",)),
    "more threads than a system has": ([*words("eval"), "--threads", "100000"], ("--threads 100000 is too many",)),
    "folder that cannot be": (words("sft", out="x" * 300), ("--out 'xxx", "File name too long")),
    "model with a name too long in eval": (words("eval", model="x" * 5000), ("xxx", "File name too long")),
    "model with a name too long in rl": (words("rl", model="x" * 5000), ("xxx", "File name too long")),
    "reward file with a name too long": (words("rl", env="x" * 300 + ".py:reward"), ("there is no file xxx",)),
    "stop that is no text": (words("rl", stop="\udc80"), ("--stop '\\udc80' is not valid text",)),
    "device without numbers": (words("eval", device="meta"), ("--device meta cannot be used",)),
    "reward file that raises no Exception": (words("rl", env="base.py:reward"), ("base.py does not import", "Odd")),
    "reward file that hides its reward": (words("rl", env="hides.py:reward"), ("does not give", "RuntimeError")),
    "columns in one word": (words("rl", fields="prompt=question"), ("--fields", "--fields.NAME VALUE")),
    "impossible number": (words("rl", steps=0), ("--steps must be above 0, not 0",)),
    "share above one": (words("sft", held_out=2), ("--held-out must be at least 0 and below 1, not 2",)),
    "unknown device": (words("sft", device="gpu"), ("--device gpu cannot be used",)),
    "unknown algorithm": (words("rl", algorithm="grop"), ("did you mean 'grpo'? posttrain algorithms lists all",)),
    "algorithm of another verb": (words("rl", algorithm="dpo"), ("an algorithm of another verb: run posttrain prefer",)),
    "unknown algorithm to list": (["algorithms", "ppoo"], ("did you mean 'ppo'? posttrain algorithms lists all",)),
    "group of one": (words("rl", algorithm="grpo", group=1), ("--group must be at least 2, not 1",)),
    "reward spread where it is compared whole": (
        words("rl", algorithm="grpo", redistribution="even"), ("leave out --redistribution, or choose --advantage to-go",)
    ),
    "one row to sort": (words("prefer", algorithm="aot", rows=1), ("aot: it sorts", "--rows must be at least 2")),
    "sorted without a reference": (words("prefer", algorithm="simpo", transport="paired"), ("needs --score log-ratio",)),
    "sorted by another divergence": (words("prefer", algorithm="aot", divergence="alpha"), ("and the reverse KL",)),
    "sorted and judged alone": (words("prefer", algorithm="kto", transport="unpaired"), ("choose --link sigmoid",)),
    "sorted with weights": ([*words("prefer", algorithm="aot"), "--policy-weight"], ("leave out --policy-weight",)),
    "sorted with margins": (words("prefer", algorithm="aot", row_margins=1), ("leave out --row-margins",)),
    "sorted in another way": (words("prefer", transport="pairs"), ("--transport is ", "unpaired")),
    "more prompts than tasks": (words("rl", prompts=50), ("--prompts 50", "20")),
    "truncated sampling": (words("rl", top_p=0.9), ("--top-p", "leave them at 1")),
    "column of temperatures that is none": (
        words("rl", temperature_column="haet", tasks="heated.jsonl"), ("no column 'haet'", "did you mean 'heat'?")
    ),
    "greedy task": (
        words("rl", temperature_column="heat", tasks="greedy.jsonl"), ("greedy.jsonl:1: --temperature-column heat is 0",)
    ),
    "temperature below 0 in a row": (
        words("eval", temperature_column="heat", tasks="frozen.jsonl"), ("frozen.jsonl:1", "heat is -1", "0 (greedy), or")
    ),
    "word for a temperature": (
        words("rl", temperature_column="heat", tasks="worded.jsonl"), ("worded.jsonl:1", "heat is 'warm'", "or null")
    ),
    "empty column of temperatures": (
        words("eval", temperature_column="heat", tasks="unheated.jsonl"), ("heat is empty in every row: leave it out",)
    ),
    "greedy part of a mixture": (
        ["rl", "--model", "start", "--mixture.a.tasks", "rows.jsonl", "--mixture.a.env", "env.py:reward",
         "--mixture.a.temperature", "0"],
        ("--mixture.a.temperature 0 is greedy",),
    ),
    "nothing but uniform tokens": (words("rl", epsilon_greedy=1), ("--epsilon-greedy must be at least 0 and below 1",)),
    "uniform tokens that nothing corrects": (
        words("rl", epsilon_greedy=0.1, old_policy="start"), ("rollouts of --epsilon-greedy", "give --correction truncate")
    ),
    "uniform tokens of another engine": (words("rl", epsilon_greedy=0.1, engine="vllm"), ("leave out --engine vllm",)),
    "servers of both kinds": (
        words("rl", engine="vllm", engine_url="http://a:1", replicas="2"), ("--engine-url and --replicas exclude",)
    ),
    "GPUs of a server that runs already": (
        words("rl", engine="vllm", engine_url="http://a:1", engine_tensor_parallel="2"),
        ("--engine-tensor-parallel has no effect on servers that run already",),
    ),
    "server of another engine": (
        words("rl", engine_url="http://a:1"), ("--engine-url requires --engine vllm or sglang: add it",)
    ),
    "weight sync of servers": (words("rl", weight_sync="ipc"), ("--weight-sync ipc requires --engine vllm: add it",)),
    "adapters of servers": (
        words("rl", weight_sync="adapter", lora=4), ("--weight-sync adapter requires --engine vllm or sglang: add it",),
    ),
    "GPUs of another engine": (words("rl", engine_tensor_parallel=2), ("--engine-tensor-parallel requires --engine vllm",)),
    "Ray without engines": (words("rl", launch="ray"), ("--launch ray has no effect without --replicas: add it",)),
    "GPU transfer to SGLang": (
        words("rl", engine="sglang", weight_sync="nccl"), ("--weight-sync nccl requires --engine vllm",)
    ),
    "Ray for vLLM": (words("rl", engine="vllm", launch="ray", replicas=1), ("--launch ray is for the local engine",)),
    "server that is no URL": (
        words("rl", engine="vllm", engine_url="a:1"), ("--engine-url a:1: give http://HOST:PORT",)
    ),
    "server given twice": (
        [*words("rl", engine="vllm"), "--engine-url", "http://a:1", "http://a:1/"], ("--engine-url has http://a:1 twice",)
    ),
    "no resume without a run": (words("rl", resume=""), ("never holds no run to resume", "leave out --resume")),
    "option given twice": ([*words("rl"), "--lr", "1", "--lr", "2"], ("--lr is given twice: leave one of them out",)),
    "an option and its opposite": ([*words("rl"), "--chat", "--no-chat"], ("--chat and --no-chat contradict each other",)),
    "a choice that there is not": (
        words("rl", schedule="cosin"), ("--schedule is constant, linear or cosine, not 'cosin'; did you mean 'cosine'?",)
    ),
    "float16": (words("rl", precision="fp16"), ("--precision is float32 or bfloat16, not 'fp16'", "--precision bfloat16")),
    "resume and overwrite": (words("rl", resume="", overwrite=""), ("give one of them",)),
    "missing recipe": (["rl", "--config", "nowhere.toml"], ("nowhere.toml", "no such file")),
    "recipe without a name": (["rl", "--config"], ("--config needs a file",)),
    "malformed recipe": (["rl", "--config", "malformed.toml"], ("malformed.toml: not valid TOML", "line 1")),
    "text without quotes in a recipe": (["rl", "--config", "unquoted.toml"], ("line 2", "put text in quotes")),
    "a table that is named as JSON": (words("sft", tasks="data/comma.jsonl"), ("a table: name the file .csv",)),
    "a file without rows in a folder": (words("sft", tasks="data/none.csv"), ("posttrain: data/none.csv has no rows",)),
    "a reward in a folder": (words("rl", env="data/unfinished.py:reward"), ("data/unfinished.py does not import",)),
    "recipe with a huge integer": (["rl", "--config", "huge.toml"], ("[rl] steps has an integer of more than 64 bits",)),
    "recipe of bytes": (["rl", "--config=binary.toml"], ("binary.toml: not valid TOML",)),
    "unknown option in a recipe": (["rl", "--config", "typo.toml"], ("[rl]", "'stesp'", "did you mean 'steps'?")),
    "wrong type in a recipe": (["rl", "--config", "type.toml"], ("steps", "many")),
    "unknown table": (["rl", "--config", "table.toml"], ("[train] is not a table", "[sft], [rl], [prefer], [reward-model]")),
    "recipe of another verb": (["rl", "--config", "other.toml"], ("no table [rl]", "it has [sft]")),
    "recipe of a verb without": (["chat", "start", "--config", "other.toml"], ("--config works only with",)),
    "unknown built-in reward": (words("rl", env="arithmetics"), ("did you mean 'arithmetic'?",)),
    "missing reward file": (words("rl", env="evn.py:reward"), ("no file evn.py", "did you mean 'env.py'?")),
    "missing function": (words("rl", env="env.py:rewrad"), ("has no 'rewrad'", "did you mean 'reward'?")),
    "reward file that does not import": (words("rl", env="unfinished.py:reward"), ("SyntaxError", "unfinished.py:1")),
    "reward that judges only right answers": (words("eval", env="strict.py:reward"), ("no number", "--env")),
    "empty stop text": ([*words("rl"), "--stop", ""], ("--stop has an empty string", "leave it out")),
    "endless step of an environment": (words("rl", env_timeout=1e300), ("--env-timeout must be", "at most 86400")),
    "pass@0": (words("eval", k=0), ("--k must be above 0, not 0",)),
    "more tasks than can be counted": (words("eval", limit=10**20), ("--limit must be", "at most 1e+12")),
    "more replies than can be held": (words("eval", samples=10**20), ("--samples must be", "at most 100000")),
    "more replies of a held-out task": (words("rl", eval_samples=10**20), ("--eval-samples must be", "at most 100000")),
    "eval file not writable": (words("eval", out="rows.jsonl/x.json"), ("cannot be written",)),
    "missing replies": (words("check", replies="nowhere.txt"), ("--replies nowhere.txt cannot be read",)),
    "system message without a template": (["chat", "start", "--system", "Be brief."], ("no chat template",)),
    "file in the place of the run": (words("sft", out="rows.jsonl"), ("rows.jsonl",)),
}  # fmt: skip


BROKEN: dict[str, tuple[str, str]] = {
    "raises": ("raises.py", "KeyError: 'anwser' (raises.py:3)"),
    "not a number": ("nan.py", "returned nan; expected a finite number"),
    "text": ("text.py", "returned 'good' (str); expected a finite number"),
    "nothing": ("nothing.py", "returned None (is a return missing?)"),
}


@pytest.mark.parametrize("verb", ["sft", "rl", "eval"])
def test_a_tokenizer_of_another_model_is_refused(
    place: Path, capfd: pytest.CaptureFixture[str], tokenizer: Tokenizer, verb: str
) -> None:
    """Where no text that is read has a token beyond the vocabulary too: each would be another word."""
    save_model(tiny(tokenizer), place / "another", tokenizer)
    known = "".join(token for token in tokenizer.vocabulary if len(token) == 1)
    many = "".join(chr(code) for code in range(0x4E00, 0x4E00 + tokenizer.vocab_size))
    Tokenizer.train([known * 9, many], 4096, "characters").save(place / "another")
    refused(capfd, words(verb, model="another"), "which do not match", "copy the model's own tokenizer.json")


@pytest.mark.parametrize("verb", ["rl", "eval"])
@pytest.mark.parametrize("case", BROKEN)
def test_reward_that_fails_with_every_reply_is_refused_before_the_run(
    capfd: pytest.CaptureFixture[str], place: Path, case: str, verb: str
) -> None:
    file, reason = BROKEN[case]
    refused(capfd, words(verb, env=f"{file}:reward"), "fails with every sample reply", reason)
    assert not (place / "never").exists()


@pytest.mark.parametrize("verb", ["rl", "eval"])
def test_reward_whose_process_dies_is_warned_of_and_then_ends_the_run_in_one_line(
    capfd: pytest.CaptureFixture[str], place: Path, verb: str
) -> None:
    said = "worker process died (exit code 3)"
    capfd.readouterr()
    few: dict[str, Any] = {"out": "dead", "prompts": 1, "group": 2} if verb == "rl" else {"tasks": "few.jsonl"}
    again = 2 if verb == "rl" else 1  # a run that ended before its first step is in nobody's way
    for _ in range(again):
        assert main(words(verb, env="dies.py:reward", **few)) == 2
        warning, error = capfd.readouterr().err.splitlines()
    assert "--overwrite" not in error
    assert warning.startswith("posttrain: warning: the environment scored no sample reply") and said in warning
    assert said in error and "Traceback" not in error


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    pages = []
    for asked in (["help", "rl"], ["rl", "--help"], ["help"], ["--help"]):
        assert main(asked) == 0
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1] != pages[2] == pages[3]


@pytest.mark.parametrize("case", CASES)
def test_mistake_is_one_line_with_the_fix_and_leaves_no_run_behind(
    place: Path, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    arguments, parts = CASES[case]
    refused(capfd, arguments, *parts)
    assert not (place / "never").exists(), "the next try needs no --overwrite"


def test_reward_that_never_returns_ends_within_its_limits(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    assert main(words("rl", env="endless.py:reward", env_timeout=0.2, out="endless", prompts=1, group=2)) == 2
    assert time.monotonic() - begin < 30
    warning, error = capfd.readouterr().err.splitlines()
    assert "did not return within 0.2 s" in warning and "did not return within 0.2 s" in error


def test_run_in_the_way_is_kept_until_overwriting_is_asked_for(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words("sft", out="there", epochs=1)) == 0
    (place / "there" / "notes.txt").write_text("mine")
    before = (place / "there" / "metrics.jsonl").read_bytes()
    refused(capfd, words("sft", out="there"), "--resume continues it, --overwrite deletes it, or choose another --out")
    refused(
        capfd, ["rl", "--out", "there"], "there already holds a run: --resume continues it"
    )  # --overwrite would lack tasks
    refused(capfd, words("rl", out="there", resume=""), "there is a run of posttrain sft")
    refused(capfd, words("rl", out="there", overwrite="", model="nowhere"), "no such folder")
    refused(capfd, words("rl", out="there", overwrite="", model="there"), "--overwrite would delete there")
    assert (place / "there" / "metrics.jsonl").read_bytes() == before
    metrics = place / "there" / "metrics.jsonl"
    metrics.unlink()
    metrics.symlink_to(metrics)
    assert main(words("sft", out="there", epochs=2, overwrite="")) == 0
    assert (place / "there" / "metrics.jsonl").read_bytes() != before
    assert (place / "there" / "notes.txt").read_text() == "mine", "only what a run makes is deleted"


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> dict[str, bytes]:
    assert main(words("rl", out="undisturbed", save_every=50, env_workers=0)) == 0
    return results(place / "undisturbed")


def results(run: Path, last: int = 4) -> dict[str, bytes]:
    files = [run / "metrics.jsonl", *run.glob("rollouts/*"), *run.glob(f"checkpoints/step-{last:06d}/**/*")]
    return {str(p.relative_to(run)): p.read_bytes() for p in files if p.is_file()}


def test_reward_that_breaks_in_the_middle_loses_no_step(
    place: Path, capfd: pytest.CaptureFixture[str], undisturbed: dict[str, bytes]
) -> None:
    """Steps 1 and 2 work, most of step 3 does not: step 2 is saved, and the corrected reward goes on from there."""
    breaking = f"calls = 0\n{GOOD}\n\nworks = reward\n\n\ndef reward(task, reply):\n"
    breaking += "    global calls\n    calls += 1\n    assert calls < 22, 'worn out'\n    return works(task, reply)\n"
    file = place / "breaking.py"
    file.write_text(breaking)
    said = refused(
        capfd,
        words("rl", env="breaking.py:reward", out="broken", env_workers=1, save_every=50),
        "worn out",
        "breaking.py:",
    )
    assert "continue after step 2 with posttrain rl --out broken --resume (and --accept-changes, if" in said
    assert [p.name for p in (place / "broken" / "checkpoints").iterdir()] == ["step-000002"]
    before = read_run("broken")["inputs"]["env"]
    file.write_text(GOOD)
    left = {path: path.read_bytes() for path in (place / "broken").rglob("*") if path.is_file()}
    assert main(["rl", "--out", "broken", "--resume", "--quiet"]) == 2
    (said,) = capfd.readouterr().err.splitlines()
    assert "--env breaking.py:reward changed since the run began" in said and "--accept-changes" in said
    for path, content in left.items():
        assert path.read_bytes() == content, "nothing is lost"
    assert main(["rl", "--out", "broken", "--resume", "--quiet", "--accept-changes"]) == 0
    assert results(place / "broken") == undisturbed
    assert "warning: --env breaking.py:reward changed since the run began" in capfd.readouterr().err
    run = read_run("broken")
    assert run["resumes"][0]["changed"] == {"env": before} and run["inputs"]["env"] != before


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "half of it": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "zeros at the end": lambda file: file.write_bytes(file.read_bytes()[:-9] + bytes(9)),
    "another object": lambda file: file.write_text("{}\n"),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
}
STEP = "checkpoints/step-000002"
RECORDED = ("run.json", "metrics.jsonl", "timing.jsonl", "rollouts/step-000002.parquet", "evals/step-000002.parquet",
            "index/000000-000049.parquet", f"{STEP}/manifest.json", f"{STEP}/model.safetensors")  # fmt: skip


@pytest.fixture(scope="module")
def recorded(place: Path) -> dict[str, bytes]:
    few = {"steps": 2, "prompts": 1, "group": 2, "max_tokens": 4, "save_every": 1, "eval_every": 1, "held_out": 0.3}
    assert main(words("rl", out="recorded", env_workers=0, **few)) == 0
    return results(place / "recorded", 2)


@pytest.mark.parametrize("file", RECORDED)
def test_damaged_file_of_a_run_is_one_line_or_changes_nothing(
    place: Path, capfd: pytest.CaptureFixture[str], recorded: dict[str, bytes], file: str
) -> None:
    run = place / "damaged"
    evaluates = [words("eval", tasks="few.jsonl", model="damaged", env_workers=0)] if STEP in file else []
    for how, damage in DAMAGE.items():
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(place / "recorded", run)
        damage(run / file)
        for command in (["rollouts", "damaged"], *evaluates, ["rl", "--out", "damaged", "--resume", "--quiet"]):
            code, said = main(command), capfd.readouterr().err
            warned = [line for line in said.splitlines() if line.startswith("posttrain: warning: checkpoint ")]
            assert said.count("\n") == len(warned) + (code == 2) and code in (0, 2), f"{how}: {command[0]}: {said}"
            assert len(warned) == (STEP in file and command[0] != "rollouts"), f"{how}: {command[0]}: {said}"
        same = {**results(run, 2), **({file: recorded[file]} if file in recorded and STEP not in file else {})}
        assert code == 2 or same == recorded, f"{how}: the resumed run ended elsewhere"


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def on_call(number: int, act: Callable[..., Any]) -> Callable[..., Any]:
    """`act`, but from the call of that number on the disk is full."""
    calls = iter(range(1, 10_000))
    return lambda *a, **k: (full if next(calls) >= number else act)(*a, **k)


@pytest.mark.parametrize(
    ("writer", "call", "kept"),
    [("rollouts", 3, 2), ("metrics", 4, 2), ("flush", 2, 2), ("save", 2, 2), ("save", 1, None), ("close", 1, 4)],
)
def test_full_disk_is_one_line_and_the_run_resumes_identically(
    place: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: dict[str, bytes],
    writer: str,
    call: int,
    kept: int | None,
) -> None:
    run = f"full-{writer}-{call}"
    with monkeypatch.context() as patch:
        if writer == "save":
            patch.setattr(LocalLearner, "save", on_call(call, LocalLearner.save))
        else:
            patch.setattr(RunRecord, writer, on_call(call, getattr(RunRecord, writer)))
        said = refused(capfd, words("rl", out=run, save_every=2, env_workers=0), "No space left on device")
    saved = sorted(p.name for p in (place / run / "checkpoints").iterdir())
    if kept is None:
        assert not saved and "no step was saved" in said and "--overwrite" in said
        assert main(words("rl", out=run, save_every=2, env_workers=0, overwrite="")) == 0
    else:
        assert saved[-1] == f"step-{kept:06d}" and not [name for name in saved if "draft" in name]
        assert f"continue after step {kept} with posttrain rl --out {run} --resume" in said or kept == 4
        assert main(["rl", "--out", run, "--resume", "--quiet"]) == 0
    assert results(place / run) == undisturbed


def test_disk_that_is_really_full_is_one_line(place: Path) -> None:
    """With a limit on the size of files as the disk: small files fit, the weights do not."""
    code = f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, {resource.RLIM_INFINITY})); "
    code += f"from posttrain.cli.main import main; sys.exit(main({words('rl', out='limited')!r}))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1, ran.stderr
    assert "could not save checkpoint" in ran.stderr and "File too large" in ran.stderr
    assert not list((place / "limited" / "checkpoints").iterdir()), "no half of a checkpoint stays"
    shutil.rmtree(place / "limited")


@pytest.mark.timeout(20)
def test_disk_that_is_full_for_tensorboard_alone_is_told_and_not_waited_for(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path, {"seed": 0}, "rl", {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))  # events take more bytes than the line of metrics
    try:
        with pytest.raises(OSError, match="File too large"):
            record.metrics(1, {f"m{number}": 0.5 for number in range(300)})
            record.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_own_crash_is_shown_as_such_and_the_record_is_closed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any) -> None:
        raise AssertionError("our own mistake")

    monkeypatch.setattr("posttrain.learners.local_learner.LocalLearner.update", crash)
    monkeypatch.setattr(RunRecord, "close", full)  # what fails while cleaning up hides nothing
    with pytest.raises(AssertionError, match="our own mistake"):
        main(words("rl", out="crashed"))


def test_names_of_other_trainers_and_of_another_case_are_understood() -> None:
    with pytest.raises(UserError, match="did you mean 'grpo'"):
        find("GRPO")
    with pytest.raises(UserError, match="unknown option 'reward'; here it is env"):
        posttrain.rl([{"prompt": "a"}], model="x", reward=len)  # type: ignore[call-arg]
    with pytest.raises(UserError, match="--env is missing"):
        posttrain.rl([{"prompt": "a"}], model="x")
    assert suggestion("warmup_ratio", ["warmup"]) == "; here it is warmup (a number of updates)"
    assert suggestion("--warmup-ratio", ["warmup"]) == "; here it is --warmup (a number of updates)"
    assert suggestion("--scale-rewards", ["scale", "group"]) == "; here it is --scale (none, batch or group)"
    assert suggestion("--beta", ["lr"]) == "", "an option that this verb does not have is no answer"
    assert suggestion("--num-generation", ["group"]) == "; --num-generations is --group here"
    assert suggestion("--num-generation", ["lr"]) == ""


ASKED = """num_generations max_completion_length steps_per_generation beta epsilon epsilon_high delta reward_weights
scale_rewards loss_type mask_truncated_completions sync_ref_model top_entropy_quantile use_liger_kernel use_vllm
log_completions packing padding_free completion_only_loss assistant_only_loss dataset_text_field
precompute_ref_log_probs label_smoothing f_divergence_type ld_alpha push_to_hub hub_model_id report_to run_name
logging_steps gradient_checkpointing optim per_device_train_batch_size gradient_accumulation_steps learning_rate
num_train_epochs max_steps bf16 use_peft lora_r load_in_4bit deepspeed fsdp remove_unused_columns
disable_dropout chat_template_path min_p generation_kwargs actor_rollout_ref.actor.use_kl_loss
actor_rollout_ref.actor.kl_loss_coef actor_rollout_ref.actor.kl_loss_type
actor_rollout_ref.actor.ppo_mini_batch_size actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
actor_rollout_ref.actor.clip_ratio_high actor_rollout_ref.actor.entropy_coeff
actor_rollout_ref.actor.loss_agg_mode actor_rollout_ref.rollout.n
actor_rollout_ref.rollout.gpu_memory_utilization actor_rollout_ref.rollout.tensor_model_parallel_size
actor_rollout_ref.model.use_remove_padding data.train_files data.val_files data.max_prompt_length
data.max_response_length data.train_batch_size data.filter_overlong_prompts algorithm.adv_estimator
algorithm.use_kl_in_reward algorithm.norm_adv_by_std_in_grpo algorithm.lam custom_reward_function trainer.logger
trainer.project_name trainer.total_epochs trainer.save_freq trainer.test_freq trainer.n_gpus_per_node
trainer.nnodes"""
"""Common options of TRL and verl."""


@pytest.mark.parametrize("name", ASKED.split())
def test_common_options_of_trl_and_verl_have_an_answer_that_names_options_which_there_are(name: str) -> None:
    kinds = [verb.options for verb in VERBS.values()]
    known = {option for kind in kinds for option in (*(f.name for f in fields(kind)), *kind.flags())}
    told = suggestion(f"--{name}", known - {"beta"})
    assert told and "did you mean" not in told and "not needed" not in told
    flags = re.findall(r"(?<![\w-])--([a-z][a-z-]*)", told.replace("--logdir", ""))
    assert {flag.replace("-", "_") for flag in flags} <= known


@pytest.mark.parametrize(
    "words", ["sample --search --model start", "sample --model start --stop", "push run org/x --eval"]
)
def test_an_option_of_several_values_without_one_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It would count as not given: a search would be none."""
    assert main(words.split()) == 2
    option = next(word for word in ("--search", "--stop", "--eval") if word in words)
    assert f"{option} needs a value: " in capsys.readouterr().err


@pytest.mark.parametrize("function", [posttrain.rl, posttrain.sft])
def test_rows_by_the_name_of_another_trainer_are_answered_with_ours(function: Any) -> None:
    with pytest.raises(UserError, match="unknown option 'train_dataset'; here it is tasks"):
        function(train_dataset=[{"prompt": "1", "answer": "2"}], model="m")
    with pytest.raises(TypeError, match="needs tasks"):
        function(model="m")


def test_an_option_as_hydra_has_it_is_answered_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rl", "actor_rollout_ref.rollout.n=8"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "options are written --name value" in told and "here it is --group" in told
