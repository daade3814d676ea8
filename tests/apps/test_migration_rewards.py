"""Reward functions of a training script: copied, with what they use, where importing it would train."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.main import main
from posttrain.data.rows import load_rows
from posttrain.data.tasks import to_tasks
from posttrain.envs.play.load_env import load_env

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
    assert "wrote       to/recipe_rewards.py" in capsys.readouterr().out
    assert "trl:to/recipe_rewards.py:counts" in (tmp_path / "to" / "recipe.toml").read_text()
    module = runpy.run_path(str(tmp_path / "to" / "recipe_rewards.py"))
    assert module["counts"](["1 and 22", "none"]) == [4.0, 0.0]
    assert not {"UNUSED", "rows", "GRPOTrainer", "system"} & (module.keys() - {"system"})
    assert "# the numbers" in (tmp_path / "to" / "recipe_rewards.py").read_text() and not (tmp_path / "RAN").exists()


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
    module = runpy.run_path(str(tmp_path / "recipe_rewards.py"))
    assert module["graded"](["a", "bcd"]) == [2, 6], "BONUS is 11, factor 2"
    assert not {"texts", "rewards", "weight", "n", "other", "tokenizer", "END", "limit", "main"} & module.keys()
    told = " ".join(capsys.readouterr().out.split())
    for name in ("tokenizer", "END", "limit"):
        assert f"{name} in recipe_rewards.py, which uses it" in told
    assert told.count("which uses it") == 3


def test_a_script_that_only_defines_is_named_itself_and_no_file_of_rewards_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = SCRIPT.replace('rows = load_dataset("d")', "").replace("UNUSED", "# UNUSED")
    library = "from trl import GRPOConfig, GRPOTrainer\n"
    plain = plain.replace(library, "")
    call = "GRPOTrainer(model='u/m', reward_funcs=counts, args=GRPOConfig(), train_dataset=rows).train()"
    start = f"def main():\n    {library}    {call}"
    (tmp_path / "own.py").write_text(plain.format(trainer=start))
    assert main(["import", "own.py", "--out", "recipe.toml"]) == 0
    assert (
        "trl:own.py:counts" in (tmp_path / "recipe.toml").read_text() and not (tmp_path / "recipe_rewards.py").exists()
    )
    (tmp_path / "own.py").write_text(library + plain.format(trainer=f"def main():\n    {call}"))
    (tmp_path / "to").mkdir()
    assert main(["import", "own.py", "--out", "to/recipe.toml"]) == 0
    assert "trl" not in (tmp_path / "to" / "recipe_rewards.py").read_text(), "TRL need not be installed"
    (tmp_path / "second_rewards.py").write_text("mine = 1\n")
    (tmp_path / "own.py").write_text(plain.format(trainer=f"{start}\nSFTTrainer()"))
    capsys.readouterr()
    assert main(["import", "own.py", "--out", "second.toml"]) == 2
    assert "second_rewards.py is there already, with another content" in capsys.readouterr().err
    assert (tmp_path / "second_rewards.py").read_text() == "mine = 1\n" and not (tmp_path / "second.toml").exists()


def test_each_recipe_has_rewards_of_its_own_where_its_env_looks_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "to").mkdir()
    trainer = "GRPOTrainer(model='u/m', reward_funcs=[counts], args=GRPOConfig(), train_dataset=rows).train()"
    for number, out in enumerate(("one.toml", "other.toml", "to/one.toml")):
        (tmp_path / "own.py").write_text(SCRIPT.replace("2.0", f"{number}.0").format(trainer=trainer))
        assert main(["import", "own.py", "--out", out]) == 0
        env = tomllib.loads((tmp_path / out).read_text())["rl"]["env"]
        load_env(env)
        assert runpy.run_path(env.split(":")[1])["counts"](["11"]) == [number], "that of its own script, from here"
    told = capsys.readouterr().out
    assert told.count("it has copies of counts: own.py cannot be imported for them, as it trains or loads") == 3
    (tmp_path / "one.toml").unlink()
    (tmp_path / "own.py").write_text(SCRIPT.replace("2.0", "0.0").format(trainer=trainer))
    assert main(["import", "own.py", "--out", "one.toml"]) == 0 and "same content" in capsys.readouterr().out
    (tmp_path / "a b").mkdir()
    assert main(["import", "own.py", "--out", "a b/one.toml"]) == 2 and "env cannot name" in capsys.readouterr().err


def test_rewards_that_env_lacks_are_told_before_the_first_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = "[book.accuracy, counts, made(3)], args=GRPOConfig(reward_weights=[1.0, 0.2, 0.5])"
    trainer = f"book = Book()\nGRPOTrainer(model='u/m', reward_funcs={given}, train_dataset=rows).train()"
    (tmp_path / "own.py").write_text(SCRIPT.format(trainer=trainer))
    assert main(["import", "own.py", "--out", "recipe.toml"]) == 0
    told = (
        "reward_funcs: book.accuracy, made(3) are missing from env: write functions in recipe_rewards.py and add them"
    )
    assert f"first       {told}" in capsys.readouterr().out
    assert tomllib.loads((tmp_path / "recipe.toml").read_text())["rl"]["env"] == "trl:recipe_rewards.py:counts*0.2"


PARSED = """from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser
def accuracy(completions, **kwargs):
    return [float(len(c)) for c in completions]
def short(completions, **kwargs):
    return [1.0 for c in completions]
def main(script_args, training_args, model_args):
    training_args.model_init_kwargs = dict(dtype=model_args.dtype)
    rows = load_dataset("u/own", split="train")
    GRPOTrainer(model=model_args.model_name_or_path, args=training_args, reward_funcs=[accuracy, short],
                train_dataset=rows, peft_config=get_peft_config(model_args)).train()
if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    main(script_args, training_args, model_args)
"""


def test_a_script_whose_options_its_command_gives_has_rewards_and_rows_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grpo_args.py").write_text(PARSED)
    command = "python grpo_args.py --model_name_or_path u/m --beta 0.1 --reward_weights 1.0 0.5"
    (tmp_path / "run.sh").write_text(command)
    assert main(["import", "run.sh", "--out", "recipe.toml"]) == 0
    table = tomllib.loads((tmp_path / "recipe.toml").read_text())["rl"]
    assert table["env"] == "trl:recipe_rewards.py:accuracy + trl:recipe_rewards.py:short*0.5"
    assert (table["model"], table["tasks"], table["split"], table["kl"]) == ("u/m", "u/own", "train", 0.1)
    told = capsys.readouterr().out
    assert "model_init_kwargs = [" in (tmp_path / "recipe.toml").read_text(), "which the script sets later"
    assert runpy.run_path("recipe_rewards.py")["accuracy"](["abc"]) == [3.0] and "decides too" not in told
    assert main(["import", "grpo_args.py"]) == 2, "the command has the options"


AGENT = """from trl import GRPOConfig, GRPOTrainer
from helpers_of_mine import search
LIMIT = 6
def twice(n: int) -> int:
    \"\"\"Doubles.

    Args:
        n: What.
    \"\"\"
    return 2 * n
class Count:
    def reset(self, **kwargs):
        self.seed = kwargs["seed"]
        return f"to {LIMIT}"
    def get_reward(self):
        return float(self.seed)
both = {"count": Count}
def calls(completions, **kwargs):
    return [float(len(c)) for c in completions]
"""
CALLED = "GRPOTrainer(model='u/m', args=GRPOConfig(max_steps=8{}), {}).train()"


def imported(folder: Path, trainer: str, **options: Any) -> dict[str, Any]:
    (folder / "helpers_of_mine.py").write_text(AGENT.partition("LIMIT = 6\n")[2].replace("twice", "search"))
    (folder / "agent.py").write_text(AGENT + trainer + "\n")
    assert main(["import", "agent.py", "--devices", "1", "--out", "recipe.toml"]) == 0
    found: dict[str, Any] = tomllib.loads((folder / "recipe.toml").read_text())["rl"]
    return found


@pytest.mark.parametrize(
    ("how", "given", "env", "turns"),
    [
        ("", "reward_funcs=calls, tools=[twice, search]", "trl:recipe_rewards.py:calls,tools=twice+search", 1000),
        (", max_tool_calling_iterations=5", "reward_funcs=[calls], tools=[twice], environment_factory=Count",
         "trl:recipe_rewards.py:calls,tools=twice,environment_factory=Count,max_tool_calling_iterations=5", None),
        (", max_tool_calling_iterations=99, reward_weights=[2.0]", "reward_funcs=calls, tools=[twice]",
         "trl:recipe_rewards.py:calls*2 + trl:recipe_rewards.py:tools=twice,max_tool_calling_iterations=99", 100),
        ("", "environment_factory=both", "trl:recipe_rewards.py:environment_factory=both", 1000),
    ],
)  # fmt: skip
def test_tools_and_environments_of_a_script_are_copied_and_played(
    how: str, given: str, env: str, turns: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = imported(tmp_path, CALLED.format(how, given))
    assert (found["env"], found.get("max_turns"), found["max_episode_tokens"]) == (env, turns, 512)
    played = load_env(found["env"])
    assert "GRPOTrainer" not in (tmp_path / "recipe_rewards.py").read_text()
    if "environment_factory" in given:
        tasks = to_tasks(load_rows(found["tasks"]), need=("prompt",))
        assert len(tasks) == 256
        turn = next(played({**tasks[1], "environment": "count"}))
        assert turn.messages == [{"role": "user", "content": "to 6"}] and not played._free


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("tools=[lambda n: n]", "tools = [lambda n: n]: give it a name in a file and add it to env"),
        ("environment_factory={'a': Count}", "environment_factory = {'a': Count}: give it a name in a file"),
    ],
)
def test_a_tool_without_a_name_is_told(given: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = imported(tmp_path, CALLED.format("", f"reward_funcs=calls, {given}"))
    assert told in (tmp_path / "recipe.toml").read_text() and found["env"] == "trl:recipe_rewards.py:calls"


def test_an_environment_that_a_function_defines_is_copied_with_what_its_place_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = AGENT.split("LIMIT = 6\n")[1].splitlines()
    inner = "\n".join(f"    {line}" for line in lines)
    script = f"from trl import GRPOConfig, GRPOTrainer\ndef main():\n    args = parse_args()\n    LIMIT = 3\n{inner}\n"
    script = script.replace("float(self.seed)", "float(self.seed) * args.scale")
    trainer = CALLED.format("", "environment_factory=Count")
    (tmp_path / "agent.py").write_text(f"{script}    {trainer}\nif __name__ == '__main__':\n    main()\n")
    assert main(["import", "agent.py", "--devices", "1", "--out", "recipe.toml"]) == 0
    found = tomllib.loads((tmp_path / "recipe.toml").read_text())["rl"]
    assert found["env"] == "trl:recipe_rewards.py:environment_factory=Count"
    assert next(load_env(found["env"])({"id": "a", "seed": 1})).messages[0]["content"] == "to 3"
    assert "args in recipe_rewards.py, which uses it" in " ".join(capsys.readouterr().out.split())
