"""Variables of a chat template reach every rendering of it, and stay with the run and its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny
from served import served
from template_families import needs_templates, tokenizer_of

import posttrain
from posttrain.cli.main import main, prepared
from posttrain.config.training import RL, SFT
from posttrain.core.coerce import read_variable
from posttrain.core.types import Task, UserError
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.custom_template import CHATML, around
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.runs.run_reading import read_run
from posttrain.services.reward_model_service import RewardModelService

ROWS = [{"prompt": f"what is {i}", "answer": str(i), "response": f"it is {i}"} for i in range(4)]
PAIRS = [{"prompt": row["prompt"], "chosen": row["response"], "rejected": "it is 9"} for row in ROWS]
MOOD = "{% if mood is defined %}{{ mood }}: {% endif %}" + CHATML
CALM = {"mood": "calm"}
PASS: dict[str, Any] = {"steps": 1, "rows": 2, "quiet": True}
TINY: dict[str, Any] = {"env_workers": 0, "steps": 1, "prompts": 2, "group": 2, "max_tokens": 2, "quiet": True}


def words() -> Tokenizer:
    trained = Tokenizer.train(["what is it calm angry : 0123456789", *around(CHATML)], 96, "characters")
    return trained.templated(MOOD, "its template")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("mood") / "model"
    save_model(tiny(words(), context=512), folder, words())
    return str(folder)


def right(task: Task, reply: str) -> float:
    return float(len(reply) % 2)


def shown(run: Path, step: int = 1) -> list[str]:
    return [words().decode(row["tokens"]) for row in read_rollouts(run, step, None)]


def opens(mood: str = "calm") -> str:
    return f"{mood}: <|im_start|>user\nwhat"


@pytest.mark.parametrize("verb", ["sft", "prefer", "reward_model"])
def test_training_on_rows_renders_with_them_and_saves_them(verb: str, model: str, tmp_path: Path) -> None:
    rows = ROWS if verb == "sft" else PAIRS
    run = getattr(posttrain, verb)(rows, model=model, out=str(tmp_path / "run"), chat_template_kwargs=CALM, **PASS)
    assert all(text.startswith(opens()) and "it is" in text for text in shown(run.path))
    assert read_run(run.path)["config"]["chat_template_kwargs"] == CALM
    assert run.checkpoint is not None and Tokenizer.load(run.checkpoint).chat_template_kwargs == CALM
    if verb == "reward_model":
        assert opens() in RewardModelService(run.checkpoint).tokenizer.render([{"role": "user", "content": "what"}])


def test_sampling_renders_with_them_and_who_goes_on_from_a_run_has_them(model: str, tmp_path: Path) -> None:
    out, how = str(tmp_path / "rl"), {**TINY, "save_every": 1, "kl": 0.0}
    run = posttrain.rl(ROWS, right, model=model, out=out, chat_template_kwargs=CALM, **how)
    assert all(opens() in text for text in shown(run.path))
    resumed = posttrain.rl(ROWS, right, model=model, out=out, resume=True, **{**how, "steps": 2})
    assert all(opens() in text for text in shown(resumed.path, 2))
    ways = [({}, "calm"), ({"chat_template_kwargs": {"mood": "angry"}}, "angry")]
    for options, mood in ways:
        found = posttrain.evaluate(ROWS, right, model=out, samples=1, max_tokens=2, env_workers=0, **options)
        tokens = [list(rollout.transcripts[0].tokens) for rollout in found.rollouts]
        assert all(opens(mood) in words().decode(text) for text in tokens)
    other = posttrain.sft(ROWS, model=out, out=str(tmp_path / "sft"), chat_template="chatml", chat=True, **PASS)
    assert other.checkpoint is not None and all("calm" not in text for text in shown(other.path))
    assert Tokenizer.load(other.checkpoint).chat_template_kwargs == {}, "they were of the template that was replaced"


def test_a_server_renders_with_its_own_and_with_those_of_a_request() -> None:
    tokenizer = words().with_kwargs(CALM)
    messages = [{"role": "user", "content": "what is it"}]
    asked = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    with served(LocalEngine(tiny(tokenizer, context=512), tokenizer, slots=2), tokenizer, 512) as server:
        for given, mood in (({}, "calm"), ({"chat_template_kwargs": {"mood": "angry"}}, "angry")):
            _, answer = server.ask("/v1/chat/completions", {**asked, **given})
            assert tokenizer.decode(answer["prompt_token_ids"]).startswith(opens(mood))
        status, refused = server.ask("/v1/chat/completions", {**asked, "chat_template_kwargs": {"moood": 1}})
        assert status == 400 and "does not read 'moood'" in refused["error"]["message"]


@pytest.mark.parametrize(("given", "read"), [
    (["--chat-template-kwargs", "a=1", "b=low", "--lr", "1"],
     ["--chat-template-kwargs.a=1", "--chat-template-kwargs.b=low", "--lr", "1"]),
    (["--chat-template-kwargs=a=b=c", "--chat-template-kwargs", "d="],
     ["--chat-template-kwargs.a=b=c", "--chat-template-kwargs.d="]),
    (["--chat_template_kwargs", '{"a": false}'], ['--chat-template-kwargs={"a": false}']),
    (["--chat-template-kwargs.a", "false"], ["--chat-template-kwargs.a", "false"]),
])  # fmt: skip
def test_the_command_line_has_them_by_name(given: list[str], read: list[str]) -> None:
    assert prepared(["sft", *given]) == ["sft", *read]


@pytest.mark.parametrize(("text", "value"), [
    ("false", False), ("True", True), ("3", 3), ("0.5", 0.5), ("low", "low"), ('["a"]', ["a"]), ("null", None), (2, 2),
    ('"3"', '"3"'), ("26 Jul 2024", "26 Jul 2024"),
])  # fmt: skip
def test_text_of_json_is_read_once(text: Any, value: Any) -> None:
    config = SFT(tasks="x", chat_template_kwargs={"a": text})
    assert config.chat_template_kwargs == {"a": value} and type(config.chat_template_kwargs["a"]) is type(value)
    assert read_variable(value) == value
    assert RL(reward_model=("folder",), chat_template_kwargs={"a": text}).chat_template_kwargs == {"a": value}


@pytest.mark.parametrize(("words_of", "told"), [
    (["--chat-template-kwargs", "moood=1"], "does not read 'moood'; did you mean 'mood'? (it reads: mood)"),
    (["--chat-template-kwargs", "messages=1"], "does not read 'messages' (it reads: mood)"),
    (["--chat-template-kwargs", "a=1", "--chat-template", "chatml"], "does not read 'a' (it has no variables)"),
    (["--chat-template-kwargs", "calm"], "--chat-template-kwargs calm: write --chat-template-kwargs KEY=VALUE"),
    (["--chat-template-kwargs", "--steps", "1"], "--chat-template-kwargs: write --chat-template-kwargs KEY=VALUE"),
])  # fmt: skip
def test_a_mistake_is_refused_in_one_line(
    words_of: list[str], told: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert main(["sft", "--tasks", "rows.jsonl", "--model", model, "--out", "run", *words_of]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert told in line and not Path("run").exists()


def test_a_model_without_a_template_has_none() -> None:
    with pytest.raises(UserError, match="needs a chat template, and this model has none"):
        Tokenizer.train(["a"], 300).with_kwargs(CALM)


def test_a_recipe_has_a_table_of_them(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("recipe.toml").write_text(
        f'[sft]\ntasks = "rows.jsonl"\nmodel = {json.dumps(model)}\nsteps = 1\nrows = 2\nout = "run"\nquiet = true\n'
        'mask = "last"\n[sft.chat_template_kwargs]\nmood = "calm"\n'
    )
    assert main(["sft", "--config", "recipe.toml"]) == 0
    config = read_run(Path("run"))["config"]
    assert config["chat_template_kwargs"] == CALM and config["mask"] == "last"


READ = {  # by reading the templates
    "qwen3": ["enable_thinking"], "qwen2_5": [], "llama3_2": ["custom_tools", "date_string", "tools_in_user_message"],
    "gptoss": ["builtin_tools", "model_identity", "reasoning_effort"], "deepseekv3": [],
    "qwen3_8": ["add_vision_id", "enable_thinking", "preserve_thinking", "reasoning_effort"],
    "gemma4_v5": ["enable_thinking", "preserve_thinking"],
}  # fmt: skip


@needs_templates
@pytest.mark.parametrize("family", READ)
def test_the_variables_that_a_template_reads_are_known(family: str) -> None:
    assert tokenizer_of(family)[0].template_variables == READ[family]
