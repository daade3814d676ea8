"""The log of an evaluation opens in inspect-ai: every reply is a sample with its messages, scores, tokens and times."""

from __future__ import annotations

import json
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny

import posttrain
from posttrain.cli.main import main
from posttrain.config.inference import Evaluation
from posttrain.core.rollouts import PlayedTurn, Rollout
from posttrain.core.transcripts import SpanKind, Transcript
from posttrain.core.types import Invalid, StopReason, ToolCall
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.harness_figures import harness_log
from posttrain.training.inspect_log import LoggedModel, write_inspect_log, write_log

ENV = """
from posttrain import Graded, Invalid, Turn

SUCCESS = 1.0

def reward(task, reply):
    if task["id"] == "bad":
        return Invalid("no such unit")
    return {"even": float(len(reply) % 2 == 0), "long": float(len(reply) > 4)}

def asks_twice(task):
    reply = yield Turn(messages=task["messages"])
    reply = yield Turn(messages=[{"role": "tool", "content": "42"}])
    return float(len(reply) % 2)
"""
ROWS: list[dict[str, Any]] = [
    {"id": "one", "prompt": "one two", "answer": "3", "level": 2},
    {"id": "two", "prompt": "four", "answer": "4", "level": 1},
    {"id": "bad", "prompt": "five", "answer": "5", "level": 1},
]
CHAT = [{"role": "system", "content": "be short"}, {"role": "user", "content": "one two"}]
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }} {% endfor %}"
HOW: dict[str, Any] = {"samples": 2, "max_tokens": 5, "threads": 1, "env_workers": 0, "k": (1, 2), "temperature": 0.9}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, seed in (("model", 0), ("other", 1)):
        save_model(tiny(tokenizer, seed), tmp_path / name, tokenizer)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("my.py").write_text(ENV)
    return tmp_path


def unzipped(path: str) -> dict[str, Any]:
    """The log of an archive as one document."""
    with zipfile.ZipFile(path) as archive:
        log: dict[str, Any] = json.loads(archive.read("header.json"))
        names = [name for name in archive.namelist() if name.startswith("samples/")]
        log["samples"] = [json.loads(archive.read(name)) for name in names]
        assert [s["id"] for s in json.loads(archive.read("summaries.json"))] == [s["id"] for s in log["samples"]]
    return log


@pytest.mark.parametrize("path", ["log.json", "log.eval"])
def test_every_reply_is_a_sample_with_its_scores_tokens_and_figures(path: str) -> None:
    found = posttrain.evaluate("rows.jsonl", "my.py:reward", "model", inspect_log=path, scorer="my.py:reward", **HOW)
    log = json.loads(Path(path).read_text()) if path.endswith(".json") else unzipped(path)
    assert [(s["id"], s["epoch"]) for s in log["samples"]] == [(row["id"], n) for row in ROWS for n in (1, 2)]
    for sample, rollout in zip(log["samples"], found.rollouts, strict=True):
        row = next(row for row in ROWS if row["id"] == sample["id"])
        assert (sample["input"], sample["target"], sample["metadata"]["level"]) == (
            row["prompt"], row["answer"], row["level"])  # fmt: skip
        assert [(m["role"], m["content"]) for m in sample["messages"]] == [
            ("user", row["prompt"]), ("assistant", rollout.text)]  # fmt: skip
        sampled, total = rollout.n_sampled, len(rollout.transcripts[0].tokens)
        assert sample["model_usage"] == {"model": {
            "input_tokens": total - sampled, "output_tokens": sampled, "total_tokens": total}}  # fmt: skip
        assert sample["total_time"] == sum(turn.seconds for turn in rollout.turns) + rollout.seconds
        scores = {name: score["value"] for name, score in sample["scores"].items()}
        if isinstance(rollout.reward, Invalid):
            assert scores == {} and "no such unit" in sample["error"]["message"]
        else:
            even, long = float(len(rollout.text) % 2 == 0), float(len(rollout.text) > 4)
            assert scores == {
                "accuracy": int(even + long >= 1), "reward": even + long, "reward/even": even, "reward/long": long,
                "score": even + long}  # fmt: skip
    results = {one["name"]: {n: m["value"] for n, m in one["metrics"].items()} for one in log["results"]["scores"]}
    figure = found.figures["pass@2"]
    assert results["pass@2"] == {end: figure[end] for end in ("mean", "low", "high") if figure[end] is not None}
    assert results["reward"]["mean"] == found.figures["reward"]["mean"] and "reward/even" in results
    assert (log["results"]["total_samples"], log["results"]["completed_samples"]) == (6, 4)
    assert log["eval"]["model_generate_config"]["temperature"] == 0.9 and log["eval"]["config"] == {"epochs": 2}


def test_messages_keep_their_roles_and_tools_answer_as_tools() -> None:
    Path("chat.jsonl").write_text(json.dumps({"id": "a/b", "messages": CHAT}) + "\n")
    Path("template.jinja").write_text(TEMPLATE)
    posttrain.evaluate(
        "chat.jsonl", "my.py:asks_twice", "model", inspect_log="log.eval", chat_template="template.jinja", **HOW
    )
    sample = unzipped("log.eval")["samples"][0]
    assert [m["role"] for m in sample["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert [m["content"] for m in sample["input"]] == ["be short", "one two"]
    assert (
        sample["messages"][3]["content"] == "42" and sample["output"]["choices"][0]["message"] == sample["messages"][4]
    )


def test_tool_calls_are_read_as_calls_and_their_answers_name_them() -> None:
    calls = (ToolCall("add", {"a": 1}, id="c1"), ToolCall("", {}, problem="no JSON"))
    said = [
        (SpanKind.PROMPT, "1+1?", ()),
        (SpanKind.SAMPLED, "<call>", calls),
        (SpanKind.TOOL, "2", ()),
        (SpanKind.SAMPLED, "2", ()),
    ]
    turns = [
        PlayedTurn(kind, text, 0, place, 1, calls=own, seconds=0.5) for place, (kind, text, own) in enumerate(said)
    ]
    rollout = Rollout(
        {"id": "t", "prompt": "1+1?"}, "t", [Transcript()], 1.0, stop=StopReason.LENGTH, turns=turns, prompt="1+1?"
    )
    config = Evaluation(tasks="rows.jsonl", model="model")
    write_inspect_log(Path("a.json"), config, LoggedModel("model", [rollout], {}), None, datetime.now(UTC))
    [sample] = json.loads(Path("a.json").read_text())["samples"]
    user, calling, tool, last = sample["messages"]
    assert [(c["id"], c["function"], c["arguments"]) for c in calling["tool_calls"]] == [
        ("c1", "add", {"a": 1}), ("call-1-1", "", {})]  # fmt: skip
    assert calling["tool_calls"][1]["parse_error"] == "no JSON" and "parse_error" not in calling["tool_calls"][0]
    assert (tool["role"], tool["tool_call_id"], tool["function"], tool["content"]) == ("tool", "c1", "add", "2")
    assert (user["role"], last["content"], sample["total_time"]) == ("user", "2", 2.0)
    assert sample["output"]["choices"][0]["stop_reason"] == "max_tokens" and list(sample["scores"]) == ["reward"]


def test_each_side_of_a_task_is_a_sample_of_its_own_in_every_epoch() -> None:
    task, figures = {"id": "a", "prompt": "play"}, {"reward": {"mean": 0.5, "tasks": 2}}
    rollouts = [Rollout(task, "a", [], 1.0, side=side) for _ in range(2) for side in ("white", "black")]
    side = LoggedModel("model", rollouts, figures)
    write_inspect_log(Path("sides.json"), Evaluation(model="model", tasks="rows.jsonl"), side, None, datetime.now(UTC))
    log = json.loads(Path("sides.json").read_text())
    names = [("a as white", 1), ("a as black", 1), ("a as white", 2), ("a as black", 2)]
    assert [(sample["id"], sample["epoch"]) for sample in log["samples"]] == names
    assert log["eval"]["config"]["epochs"] == 2 and log["eval"]["dataset"]["samples"] == 2


def test_a_document_of_a_harness_is_a_sample_with_the_scores_of_all_filters() -> None:
    choice = {"doc_id": 7, "doc": {"q": "1+1="}, "target": 0, "arguments": [["1+1=", " 2"], ["1+1=", " 3"]],
              "resps": [[[-4.0, False]], [[-3.0, False]]], "filter": "none", "metrics": ["acc"], "acc": 0.0}  # fmt: skip
    strict = {"doc_id": 7, "doc": {}, "target": "2", "arguments": [["1+1=", {"until": ["x"]}]],
              "resps": [["it is 2"]], "filter": "strict", "metrics": ["match"], "match": 0.0}  # fmt: skip
    figures = {
        "sums": {"acc": {"mean": 0.0, "stderr": 0.1}},
        "said": {"match (flexible)": {"mean": 1.0, "stderr": None}},
    }
    flexible = {**strict, "filter": "flexible", "match": 1.0}
    content = harness_log("m", "lm-eval:sums,said", figures, {"sums": [choice], "said": [strict, flexible]})
    sums, said = content.samples
    assert (sums["id"], sums["target"], sums["output"]["completion"]) == ("sums/7", " 2", " 3"), "the likeliest choice"
    assert sums["scores"] == {"sums/acc": {"value": 0.0}} and sums["choices"] == [" 2", " 3"]
    assert (said["id"], said["target"], said["output"]["completion"]) == ("said/7", "2", "it is 2")
    assert said["scores"] == {"said/match (strict)": {"value": 0.0}, "said/match (flexible)": {"value": 1.0}}
    assert [(one["name"], list(one["metrics"])) for one in content.results] == [
        ("sums/acc", ["mean", "stderr"]), ("said/match (flexible)", ["mean"])]  # fmt: skip
    write_log(Path("h.json"), Evaluation(model="m"), content, datetime.now(UTC))
    log = json.loads(Path("h.json").read_text())
    assert (log["eval"]["task"], log["stats"]["model_usage"]) == ("lm-eval:sums,said", {})


def test_other_models_and_parts_of_a_suite_have_logs_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    Path("suite.toml").write_text(
        '[one]\ntasks = "rows.jsonl"\nenv = "my.py:reward"\nmax_tokens = 5\nenv_workers = 0\nsamples = 2\nlimit = 2\n'
    )
    run = ["eval", "--suite", "suite.toml", "--model", "model", "--against", "other"]
    assert main([*run, "--inspect-log", "logs/all.eval"]) == 0
    models = [unzipped(f"logs/all.one{side}.eval")["eval"]["model"] for side in ("", ".against")]
    assert models == ["model", "other"]
    Path("suite.toml").write_text('[one]\ninspect_log = "a.eval"\n')
    for options, why in (
        (["--inspect-log", "all.txt"], "must end in .eval or .json"),
        (["--inspect-log", "a.json", "--out", "a.json"], "name two files"),
        ([], "give --inspect-log on the command line"),
    ):
        capsys.readouterr()
        assert main([*run, *options]) == 2 and why in capsys.readouterr().err


@pytest.mark.parametrize("path", ["log.json", "log.eval"])
def test_inspect_ai_reads_the_log(path: str) -> None:
    read = pytest.importorskip("inspect_ai.log").read_eval_log
    found = posttrain.evaluate("rows.jsonl", "my.py:reward", "model", inspect_log=path, **HOW)
    log = read(path)
    assert (log.status, log.eval.model, len(log.samples)) == ("success", "model", 6)
    assert all(sample.messages[-1].role == "assistant" for sample in log.samples)
    first, rollout = next(s for s in log.samples if s.id == "one" and s.epoch == 1), found.rollouts[0]
    assert (first.output.completion, first.scores["reward"].value) == (rollout.text, rollout.reward)
    assert log.results.scores[0].metrics["mean"].value == found.figures["accuracy"]["mean"]
