"""The report on rows counts what a run would use, and marks exactly the tokens that a run trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import CHATML, tiny

from posttrain.apps.data_report import percentiles, report
from posttrain.cli.data_command import data, lines
from posttrain.cli.main import main
from posttrain.core.transcripts import Mask
from posttrain.data.rows import load_rows
from posttrain.data.tasks import to_tasks
from posttrain.envs.demonstration import demonstrate
from posttrain.models.checkpoint_summary import outline
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.chat_choice import Chatting

NONE: dict[str, Any] = {"fields": {}, "prompt_template": None}


@pytest.fixture
def model(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    save_model(tiny(tokenizer, context=64), tmp_path / "model", tokenizer.templated(CHATML, "its own"))
    return tmp_path / "model"


def test_what_is_marked_is_what_a_run_trains(model: Path) -> None:
    rows = [{"messages": [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"),
                                                                 ("assistant", "d"))]}]  # fmt: skip
    known = outline(model)
    found = report(load_rows(rows), NONE, known, Chatting())
    [task] = to_tasks(rows, need=("prompt", "response"))
    transcript = demonstrate(task, known.tokenizer, known.ends)
    [example] = found.examples
    [pieces] = example.texts
    assert "".join(piece.text for piece in pieces) == known.tokenizer.decode(transcript.tokens)
    trained = [transcript.tokens[s.start : s.start + s.length] for s in transcript.spans if s.learned]
    assert [piece.text for piece in pieces if piece.trained] == [known.tokenizer.decode(tokens) for tokens in trained]
    assert (example.tokens, example.trained) == (len(transcript), transcript.n_scored)
    assert found.lengths["trained"] == [transcript.n_scored] and found.lengths["whole"] == [len(transcript)]


@pytest.mark.parametrize(("mask", "trained"), [("assistant", ["b", "d"]), ("last", ["d"]), ("all", None)])
@pytest.mark.parametrize("modelled", [True, False])
def test_marks_are_those_of_the_mask(modelled: bool, mask: Mask, trained: list[str] | None, model: Path) -> None:
    rows = [{"messages": [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"),
                                                                 ("assistant", "d"))]}]  # fmt: skip
    known = outline(model) if modelled else None
    [pieces] = report(load_rows(rows), NONE, known, Chatting(), mask=mask).examples[0].texts
    marked = [piece.text if mask == "all" else piece.text.partition("<")[0] for piece in pieces if piece.trained]
    assert marked == trained if trained else {"a", "b", "c", "d"} <= set("".join(marked))


def test_reasoning_that_the_template_drops_is_reported(model: Path) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "12"}]
    rows = load_rows([{"messages": said}, {"messages": [said[0], {"role": "assistant", "content": "b"}]}])
    found = report(rows, NONE, outline(model), Chatting())
    assert found.lost.startswith("1 of 2 rows have reasoning that the model does not see, 1 of them in a trained reply")
    assert f"reasoning   {found.lost}" in list(lines(found))
    assert "12" in report(rows, NONE, None, Chatting()).examples[0].texts[0][-2].text


def test_plain_prompts_are_shown_in_the_template_where_a_run_wraps_them(model: Path) -> None:
    rows = load_rows([{"prompt": "a", "response": "b"}])
    known = outline(model)
    bare, wrapped = (report(rows, NONE, known, Chatting(on)).examples[0].texts[0] for on in (False, True))
    assert bare[0].text == "a" and "user" in wrapped[0].text
    assert bare[-1].trained and wrapped[-1].trained and wrapped[-1].text.startswith("b")


def test_rows_are_counted_by_what_becomes_of_them(model: Path) -> None:
    rows = [
        {"prompt": "a", "response": "b"}, {"prompt": "a", "response": "b"}, {"prompt": "a", "response": "c"},
        {"prompt": "", "response": "b"}, {"prompt": "1" * 70, "response": "b"}, {"prompt": "", "response": "c"},
    ]  # fmt: skip
    found = report(load_rows(rows), NONE, outline(model), Chatting())
    assert (found.shape, found.rows, found.used, found.merged, found.prompts) == ("prompt and completion", 6, 3, 1, 2)
    assert found.too_long == ["row 5"] and found.wrong == {"the prompt is empty": ["row 4", "row 6"]} and not found.ok
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b", "rejected": "b"}]
    found = report(load_rows(pairs), NONE, outline(model), Chatting())
    assert (found.verb, found.used, list(found.left_out.values())) == ("prefer, reward-model", 1, [1]) and found.ok
    assert [[piece.text[:1] for piece in text] for text in found.examples[0].texts] == [["a", "b"], ["a", "c"]]


def test_each_side_of_a_preference_is_shown_under_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked, reply = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    for row, names in (
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, ["chosen b", "rejected c"]),
        ({"prompt": "a", "responses": ["b", "c"], "scores": [0, 1]}, ["rejected b", "chosen c"]),
        (
            {"prompt": "a", "responses": ["b", "c", "d"], "ranks": [1, 2, 3]},
            ["response 1 b", "response 2 c", "response 3 d"],
        ),
        ({"prompt": "a", "response": "b", "label": False}, ["label 0 b"]),
        ({"prompt": [asked], "completion": [reply], "label": True}, ["label 1 b"]),
        ({"messages": [asked, reply], "label": True}, ["label 1 b"]),
        ({"prompt": "a", "steps": ["b", "c"], "mistake_index": 1}, ["label 1, 0 b"]),
    ):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        assert data(str(tmp_path / "rows.jsonl")) == 0
        shown = capsys.readouterr().out.partition(".jsonl:1")[2]
        parts = [part.partition("\n") for part in shown.split("\n-- ")[1:]]
        texts = [f"{name} {text.partition('[[')[2][0]}" for name, _, text in parts]
        assert texts == names


def test_percentiles_are_those_of_the_nearest_rank() -> None:
    assert percentiles(list(range(1, 101))) == [1, 50, 90, 99, 100]
    assert percentiles([7]) == [7] * 5


def test_trained_text_is_in_brackets_where_there_are_no_colours(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"instruction": "a", "input": "", "output": "b"}))
    assert data(str(tmp_path / "rows.jsonl"), model=str(model), chat=False) == 0
    shown = capsys.readouterr().out
    assert "plain       prompts are bare text; --chat wraps them" in shown
    assert "shape       Alpaca (posttrain sft)" in shown and "a[[b" in shown and "2 of them trained" in shown
    assert data(str(tmp_path / "rows.jsonl"), model=str(model), chat=True) == 0
    assert "prompts are user messages in the model's chat template" in capsys.readouterr().out
    assert data(str(tmp_path / "rows.jsonl")) == 0
    assert "a[[b]]" in capsys.readouterr().out


def test_without_a_model_calls_are_shown_and_no_empty_text_is_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    called = {"name": "add", "arguments": {"a": 1}}
    turns = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": called}]},  # as in TRL's documentation
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    for name, row, shown in (
        (
            "tools",
            {"messages": turns},
            'user: 1+1=\nassistant: [[{"name":"add","arguments":{"a":1}}]]\ntool: 2\nassistant: [[two]]',
        ),
        ("prompts", {"prompt": "1+1="}, "1+1="),
        ("chat", {"prompt": [{"role": "user", "content": "1+1="}]}, "user: 1+1="),
    ):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
        assert data(str(tmp_path / f"{name}.jsonl")) == 0
        assert capsys.readouterr().out.strip().partition(".jsonl:1\n")[2] == shown


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["data", "nowhere.jsonl"], "there is no file nowhere.jsonl"),
        (["data", "rows.jsonl", "--chat"], "--chat, --system, --chat-template and --chat-template-kwargs need --model"),
        (["data", "rows.jsonl", "--number", "-1"], "--number -1 must be at least 0"),
        (["data", "rows.jsonl", "--fields.prompt", "qestion"], "wrong       rows.jsonl:1: no column 'qestion'"),
        (["data", "rows.jsonl", "--model", "nowhere"], "nowhere"),
    ],
)
def test_mistake_ends_with_2_and_one_line(
    words: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    assert main(words) == 2
    told = capsys.readouterr()
    assert reason in told.out + told.err and len(told.err.splitlines()) <= 1


def test_a_column_that_is_mapped_counts_under_its_new_name_alone() -> None:
    rows = load_rows([{"question": "where?", "label": "refund"}])
    imitated = report(rows, {**NONE, "fields": {"prompt": "question", "response": "label"}}, None, Chatting())
    assert (imitated.shape, imitated.verb, imitated.used) == ("prompt and completion", "sft, rl", 1)
    played = report(rows, {**NONE, "fields": {"prompt": "question"}}, None, Chatting())
    assert (played.shape, played.verb, played.used) == ("prompts", "rl", 1)


def test_lines_of_the_report_fit_a_page_and_a_near_name_is_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = {f"a_column_of_a_support_system_{i}": "text" for i in range(9)}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "why?", **columns}) + "\n")
    assert main(["data", str(tmp_path / "rows.jsonl"), "--fields.promt", "question"]) == 2
    said = capsys.readouterr()
    assert max(map(len, said.out.splitlines())) <= 100 and "a_column_of_a_support_system_8: text" in said.out
    assert "did you mean --fields.prompt?" in said.err
