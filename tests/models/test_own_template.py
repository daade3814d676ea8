"""A chat template that a user gives is the model's from then on, and one that is missing costs nothing but a line."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import tiny
from environments import calculating

from posttrain.cli.main import main
from posttrain.core.types import Sampling, UserError
from posttrain.engines.scripted import ScriptedEngine
from posttrain.envs.check import check
from posttrain.envs.demonstration import demonstrate
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.episode import Episode
from posttrain.envs.play.player import Player
from posttrain.models.checkpoint_summary import Outline, outline
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.custom_template import CHATML, around, read_template
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.models.tokenizer.tokenizer_training import EOS
from posttrain.training.playground import viewer_of

TEXTS = ["what is it called", "it is 12", CHATML]
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is it"},
    {"role": "assistant", "content": "12"},
    {"role": "user", "content": "and that"},
    {"role": "assistant", "content": "it is 12"},
]


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TASK = {"id": "sum", "question": "1 plus 2", "answer": "3", "replies": [CALL, "it is 3"]}


@pytest.fixture
def chatml() -> Tokenizer:
    return Tokenizer.train(TEXTS, 600).templated(CHATML, "chatml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint without a template."""
    tokenizer = Tokenizer.train(TEXTS, 600)
    save_model(tiny(tokenizer, context=2048), tmp_path / "model", tokenizer)
    return tmp_path / "model"


def test_a_given_template_is_saved_where_transformers_finds_it_and_shows_the_same(
    chatml: Tokenizer, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    chatml.save(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    called = [{"function": {"name": "add", "arguments": {"a": 1}}}]
    tool = [TALK[1], {"role": "assistant", "content": "", "tool_calls": called}, {"role": "tool", "content": "3"}]
    schema = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    for messages, tools in ((TALK[:2], None), (TALK, None), (TALK[:2], schema), (tool, schema)):
        for generation in (True, False):
            shown = theirs.apply_chat_template(messages, tools, add_generation_prompt=generation, tokenize=False)
            assert Tokenizer.load(tmp_path).render(messages, generation, tools) == shown
    assert (tmp_path / "chat_template.jinja").read_text() == CHATML


def test_a_demonstration_under_chatml_ends_its_replies_as_a_policy_does(chatml: Tokenizer) -> None:
    assert chatml.eos_id is not None
    transcript = demonstrate({"messages": TALK}, chatml, [chatml.eos_id])
    said = [transcript.tokens[span.start : span.start + span.length] for span in transcript.spans if span.learned]
    assert said == [[*chatml.encode(text), chatml.eos_id] for text in ("12", "it is 12")]
    whole = chatml.render(TALK, generation=False)
    assert chatml.decode(transcript.tokens) == whole.removesuffix("\n") and whole.count(EOS) == len(TALK)


def test_a_tokenizer_is_trained_on_what_a_template_writes_and_not_on_its_code() -> None:
    texts = around(CHATML)
    assert len(texts) == 4 and all("<|im_start|>assistant" in text and "{%" not in text for text in texts)
    assert any("<tools>" in text for text in texts) and any("<tool_response>" in text for text in texts)
    assert around("{{ raise_exception('never') }}") == []
    words = Tokenizer.train([*texts, "12"], 400, "characters").templated(CHATML, "chatml")
    assert words.unknown_id not in words.encode(words.render([{"role": "user", "content": "12"}]))


def test_calls_are_read_as_chatml_writes_them(chatml: Tokenizer) -> None:
    assert chatml.tool_format is not None
    [call] = chatml.tool_format.read(CALL)
    assert (call.name, call.arguments, call.problem) == ("add", {"a": 1, "b": 2}, None)


def test_check_sees_the_tokens_that_a_run_shows(chatml: Tokenizer) -> None:
    assert chatml.eos_id is not None
    own = {key: value for key, value in TASK.items() if key != "replies"}
    with EnvPool(calculating, 0) as pool:
        engine = ScriptedEngine(chatml, [chatml.eos_id], TASK["replies"])
        [played] = Player(pool, engine, chatml, Sampling(max_tokens=999), 2048).play([Episode(own, "", 0)])
    report = check(calculating, [TASK], viewer=viewer_of(Outline(chatml, 2048)))
    [case] = [case for case in report.cases if case.kind == "replies"]
    assert report.ok and case.seen is not None and case.seen.problem is None
    assert case.seen.longest == len(played.transcripts[0]) and case.seen.prompt == played.turns[0].length
    assert f"prompts of {case.seen.prompt} tokens, in a context of 2048" in "\n".join(report.lines())


def test_check_counts_own_replies_that_training_would_cut_off(chatml: Tokenizer) -> None:
    report = check(calculating, [TASK], viewer=viewer_of(Outline(chatml, 2048)))
    longest = 1 + max(len(chatml.encode(text)) for text in TASK["replies"])  # with its end
    for most, cut in ((longest, False), (longest - 1, True)):
        said = "\n".join(replace(report, most=most).lines())
        assert (f"1 of 1 of the tasks' own replies are longer than --max-tokens {most}: up to {longest}" in said) is cut
        assert "fill the context" not in said
    assert "replies end before --max-tokens 2047" in "\n".join(replace(report, most=2047).lines())


def test_check_finds_what_a_template_does_not_show_and_what_does_not_fit(chatml: Tokenizer) -> None:
    without = Tokenizer(chatml.backend, chatml.config)
    report = check(calculating, [TASK], viewer=viewer_of(Outline(without, 2048)))
    assert not report.ok and "--chat-template" in "\n".join(report.lines())
    report = check(calculating, [TASK], viewer=viewer_of(Outline(chatml, 20)))
    assert not report.ok and "the model's context holds 20" in "\n".join(report.lines())


def test_a_missing_template_is_told_with_the_option_before_a_folder_is_made(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, shown = tmp_path / "rows.jsonl", tmp_path / "shown.jsonl"
    rows.write_text(json.dumps({"messages": TALK[:2], "answer": "12"}) + "\n")
    shown.write_text(json.dumps({"messages": TALK}) + "\n")
    reward = tmp_path / "own.py"
    reward.write_text("def reward(task, reply):\n    return float(len(reply))\n")
    common = ["--tasks", str(rows), "--model", str(folder)]
    out = tmp_path / "run"
    imitated = ["sft", "--tasks", str(shown), "--model", str(folder)]
    for words in (imitated, ["rl", *common, "--env", f"{reward}:reward"]):
        assert main([*words, "--out", str(out)]) == 2
        assert "--chat-template chatml" in capsys.readouterr().err and not out.exists()
    assert main(["check", *common, "--env", f"{reward}:reward"]) == 2
    assert "--chat-template chatml" in capsys.readouterr().out
    assert main(["check", *common, "--env", f"{reward}:reward", "--chat-template", "chatml"]) == 0


def test_the_template_of_a_run_is_in_its_checkpoint(folder: Path, tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "run"
    rows.write_text(json.dumps({"messages": TALK}) + "\n")
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}")
    words = ["sft", "--tasks", str(rows), "--model", str(folder), "--out", str(out), "--steps", "1", "--quiet"]
    assert main([*words, "--chat-template", str(own)]) == 0
    [saved] = (out / "checkpoints").iterdir()
    assert outline(saved).tokenizer.chat_template == own.read_text() and outline(saved).context == 2048


@pytest.mark.parametrize(
    ("text", "told"), [(None, "cannot be read"), ("{% for %}", "line 1"), ("nothing of it", "drops a user's message")]
)
def test_what_is_no_template_is_refused(text: str | None, told: str, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=told):
        read_template(str(file))


def test_what_cannot_be_read_to_its_end_is_no_template(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(UserError, match="not a file.*give a file of Jinja"):
            read_template(str(path))
