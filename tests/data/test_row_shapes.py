"""Rows of other trainers become the same tasks as rows of ours with the same content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from posttrain.core.types import Task, UserError
from posttrain.data.row_shapes import reshaped, shape_of
from posttrain.data.rows import load_rows
from posttrain.data.tasks import to_tasks
from posttrain.training.row_warnings import warn_bad_responses

BOTH = ("prompt", "response")
ASK = ("user", "a")


def said(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def only(row: dict[str, Any], need: tuple[str, ...] = BOTH, **options: Any) -> Task:
    [task] = to_tasks([row], need=need, **options)
    return task


def test_conversation_of_sharegpt_is_that_of_messages() -> None:
    turns = [("human", "hi"), ("gpt", "yo"), ("user", "x"), ("chatgpt", "bye")]
    row = {"conversations": [{"from": who, "value": text} for who, text in turns], "system": "S"}
    expected = said(("system", "S"), ("user", "hi"), ("assistant", "yo"), ("user", "x"), ("assistant", "bye"))
    assert only(row)["messages"] == only({"messages": expected})["messages"] == expected
    assert only({"conversations": expected})["messages"] == expected  # some sets have roles under that name
    assert to_tasks([row], need=BOTH).taken() == "ShareGPT: messages from 'conversations'"


def test_calls_of_sharegpt_are_those_of_messages_with_tools() -> None:
    call = {"name": "f", "arguments": {"x": 1}}
    turns = [("human", "hi"), ("function_call", json.dumps(call)), ("observation", "3"), ("gpt", "3!")]
    row = {"conversations": [{"from": a, "value": b} for a, b in turns], "tools": json.dumps([{"name": "f"}])}
    task = only(row)
    assert task["tools"] == [{"name": "f"}] and [m["role"] for m in task["messages"]] == ["user", "assistant", "tool",
                                                                                         "assistant"]  # fmt: skip
    assert task["messages"][1]["tool_calls"] == [{"type": "function", "function": call}]


@pytest.mark.parametrize("role, content", [("role", "content"), ("from", "value")])
@pytest.mark.parametrize("alone", [True, False])
def test_one_message_or_turns_of_sharegpt_are_a_list_of_messages(role: str, content: str, alone: bool) -> None:
    """As in LLaMA-Factory's rows of preferences, whose chosen and rejected are one turn each."""

    def turns(who: str, text: str) -> Any:
        turn = {role: who, content: text}
        return turn if alone else [turn]

    user, assistant = ("user", "assistant") if role == "role" else ("human", "gpt")
    row = reshaped({"prompt": turns(user, "hi"), "chosen": turns(assistant, "yo"), "rejected": turns(assistant, "go")})
    assert row == {
        "prompt": said(("user", "hi")),
        "chosen": said(("assistant", "yo")),
        "rejected": said(("assistant", "go")),
    }
    assert only({"prompt": turns(user, "hi"), "completion": turns(assistant, "yo")})["messages"][-1]["content"] == "yo"
    row = reshaped({"conversations": [{"from": "human", "value": "hi"}], "chosen": turns(assistant, "yo")})
    assert (row["messages"], row["chosen"]) == (said(("user", "hi")), said(("assistant", "yo")))


def test_instruction_and_input_of_alpaca_are_the_prompt() -> None:
    task = only({"instruction": "Add", "input": "1 2", "output": "3"})
    assert (task["prompt"], task["response"]) == ("Add\n1 2", "3")
    assert only({"instruction": "Add", "input": "", "output": "3"})["prompt"] == "Add"
    assert only({"instruction": "Add"}, ("prompt",))["prompt"] == "Add"
    task = only({"instruction": "Add", "output": "3", "system": "S", "history": [["a", "b"]]})
    context = [*said(("system", "S"), ("user", "a")), {"role": "assistant", "content": "b", "weight": 0}]
    assert task["messages"] == [
        *context,
        *said(("user", "Add"), ("assistant", "3")),
    ]  # the last answer alone is imitated


@pytest.mark.parametrize("fields", [None, {"prompt": "query"}])
@pytest.mark.parametrize("history", [[["a", "b"]], '[["a", "b"]]'])
def test_history_of_ms_swift_is_the_turns_before_its_query(fields: Any, history: Any) -> None:
    row = {"query": "Add", "response": "3", "history": history}
    context = [*said(("user", "a")), {"role": "assistant", "content": "b", "weight": 0}]
    task = only(row, fields=fields)
    assert task["messages"] == [*context, *said(("user", "Add"), ("assistant", "3"))]
    first = only({"system": "S", **row}, fields=fields)["messages"]
    assert first == [*said(("system", "S")), *task["messages"]]
    assert only(row, ("prompt",), fields=fields)["messages"] == [
        *said(("user", "a"), ("assistant", "b"), ("user", "Add"))
    ]
    alone = only({"query": "Add", "response": "3", "history": []}, fields=fields)
    assert (alone["prompt"], alone["response"]) == ("Add", "3")
    assert to_tasks([row], need=BOTH).taken().startswith("ms-swift: prompt from 'history' and 'query'")
    assert (
        to_tasks([{"prompt": "Add", "response": "3", "history": history}], need=BOTH).taken()
        == "messages from 'history' and 'prompt' and 'response'"
    )
    for empty in ([], None, ""):  # the system message does not depend on how a row has no history
        begun = only({"query": "Add", "response": "3", "history": empty, "system": "S"}, fields=fields)
        assert begun["messages"] == said(("system", "S"), ("user", "Add"), ("assistant", "3"))
    moves = only({"prompt": "Next", "history": [["e2", "e4"]]}, ("prompt",))
    assert moves["prompt"] == "Next", "a row without a response is for an environment, which reads its own columns"
    own = only({"prompt": "Add", "response": "3", "history": ["a", "b"]})
    assert (own["prompt"], own["history"]) == ("Add", ["a", "b"]), "a column of that name that is no list of pairs"


def test_row_of_verl_is_a_prompt_with_its_answer(tmp_path: Path) -> None:
    row = {
        "data_source": "openai/gsm8k", "prompt": said(("user", "1+6=")), "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "7"}, "extra_info": {"index": 3, "split": "train"},
    }  # fmt: skip
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    tasks = to_tasks(load_rows(tmp_path / "train.parquet"))
    [task] = tasks
    assert task["messages"] == row["prompt"] and task["answer"] == "7"
    assert {name: task[name] for name in ("reward_model", "extra_info", "data_source")} == {
        name: row[name] for name in ("reward_model", "extra_info", "data_source")
    }
    assert tasks.taken() == "verl: prompt from 'prompt', answer from 'reward_model.ground_truth'"
    assert only({**row, "answer": "own"}, ("prompt",))["answer"] == "own"


def test_shape_gives_way_to_what_the_user_names() -> None:
    row = {"instruction": "Add", "input": "1 2", "output": "3"}
    assert only(row, fields={"prompt": "input", "response": "output"})["prompt"] == "1 2"
    assert only(row, prompt_template="Q: {instruction}", response_template="{output}")["prompt"] == "Q: Add"
    task = only(row, ("prompt",), convert=lambda row: {"prompt": row["instruction"] + "!"})
    assert task["prompt"] == "Add!" and "response" not in task
    assert "prompt" not in only(row, ())  # of an environment that makes its own


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": "hi"}, "row 1: conversations must be a list of .*, and is 'hi'"),
        (
            {"conversations": [{"value": "hi"}]},
            'row 1: conversations: turn 1 must be an object with "from" and "value"',
        ),
        (
            {"conversations": [{"from": "alien", "value": "hi"}]},
            "turn 1: from is 'alien' .*; it must be one of human, user",
        ),
        ({"conversations": [{"from": "human", "value": 3}]}, "turn 1: value must be text, and is 3"),
        (
            {"conversations": [{"from": "function_call", "value": "f(1)"}]},
            "turn 1: a function_call must be JSON such as",
        ),
        ({"instruction": 3, "output": "x"}, "row 1: instruction must be text, and is 3"),
        ({"instruction": "a", "output": 3}, "row 1: output must be text, and is 3"),
        (
            {"instruction": "a", "output": "b", "history": [["a"]]},
            "history: entry 1 is .*; it must be .instruction, output.",
        ),
    ],
)
def test_row_that_is_none_of_its_shape_is_told_with_its_place(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        to_tasks([row], need=BOTH)


@pytest.mark.parametrize(
    "content", [{"prompt": "a", "response": "b"}, {"messages": [{"role": "user", "content": "a"}], "n": 1}, {"n": 1}]
)
def test_file_of_one_object_is_one_row(content: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(content, indent=2))
    assert list(load_rows(tmp_path / "one.json")) == [content]
    (tmp_path / "list.json").write_text(json.dumps({"version": 1, "data": [content]}))
    assert list(load_rows(tmp_path / "list.json")) == [content]


def test_messages_as_json_text_or_with_other_names_of_roles_are_messages() -> None:
    turns = said(("system", "S"), ("user", "hi"), ("assistant", "yo"))
    assert only({"messages": json.dumps(turns)})["messages"] == turns
    assert only({"conversations": json.dumps(turns)})["messages"] == turns
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    others = [{**turn, "role": names[turn["role"]]} for turn in turns]
    assert only({"messages": others})["messages"] == only({"conversations": others})["messages"] == turns
    pairs = [{"from": turn["role"], "value": turn["content"]} for turn in others]
    assert only({"messages": pairs})["messages"] == turns
    marked = only({"messages": [*others[:2], {**others[2], "train": False}, *said(("user", "a"), ("assistant", "b"))]})
    assert marked["messages"][2] == {**turns[2], "train": False}
    with pytest.raises(UserError, match="row 1: messages must be a list of"):
        only({"messages": "no list"})


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"question": "a", "answer": "b"}, "--fields.prompt question --fields.response answer"),
        ({"problem": "a", "solution": "b", "answer": "c"}, "--fields.prompt problem --fields.response solution"),
        ({"input": "a", "output": "b"}, "--fields.prompt input --fields.response output"),
        ({"query": "a", "answer": "b"}, "--fields.prompt query --fields.response answer"),
    ],
)
def test_columns_to_name_are_told(row: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=f"no prompt and no response; the row has: .*; name its column: {named}$"):
        only(row)
    with pytest.raises(UserError, match=f"name its column: {named.partition(' --fields.response')[0]}$"):
        only(row, ("prompt",))
    assert shape_of(row) == f"questions: {named} reads them as prompts and responses"
    words = named.split()
    assert only(row, fields={"prompt": words[1], "response": words[3]})["prompt"] == "a"
    assert shape_of({"question": "a"}) == "questions: --fields.prompt question reads them as prompts"


def test_a_column_of_messages_under_another_name_is_told() -> None:
    turns = said(("system", "S"), ("user", "a"), ("assistant", "b"))
    row = {"id": "1", "tags": ["x"], "my chat": turns, "note": "c"}
    with pytest.raises(UserError, match="name its column: --fields.messages 'my chat'$"):
        only(row)
    with pytest.raises(UserError, match="name its column: --fields.messages 'my chat'$"):
        only({**row, "my chat": turns[:2]}, ("prompt",))
    assert only(row, fields={"messages": "my chat"})["messages"] == turns
    with pytest.raises(UserError, match="name its column: --fields.prompt COLUMN"):
        only({**row, "my chat": ["a", "b"]})


def test_shapes_are_named_by_their_columns() -> None:
    names = {
        "prompts": {"prompt": "a"},
        "prompt and completion": {"prompt": "a", "completion": "b"},
        "preference pairs": {"prompt": "a", "chosen": "b", "rejected": "c"},
        "labelled responses": {"prompt": "a", "completion": "b", "label": False},
        "labelled steps": {"prompt": "a", "completions": ["b"], "labels": [True]},
        "conversations": {"messages": []},
        "conversations with tools": {"messages": [], "tools": []},
        "ShareGPT": {"conversations": []},
        "Alpaca": {"instruction": "a", "input": "", "output": "b"},
        "verl": {"data_source": "d", "prompt": [], "reward_model": {}},
        "ms-swift": {"query": "a", "response": "b", "history": []},
        "language modeling": {"text": "a", "prompt": None},
        "unknown": {"title": "a", "prompt": None},
    }
    assert {shape_of(row): row for row in names.values()} == names
    assert shape_of({"messages": [], "label": False}) == "labelled responses"
    assert shape_of({"messages": [], "label": "history"}) == "conversations", "a topic"
    assert shape_of({"messages": [], "label": 3}) == "conversations", "the number of a topic"
    assert {shape_of({"messages": [], "label": one}) for one in (True, 0, -1, 0.5)} == {"labelled responses"}


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "response"),
        ({"prompt": said(ASK), "chosen": said(("assistant", "b")), "rejected": said(("assistant", "c"))}, "response"),
        ({"chosen": said(ASK, ("assistant", "b")), "rejected": said(ASK, ("assistant", "c"))}, "messages"),
        ({"chosen": "Human: a Assistant: b", "rejected": "Human: a Assistant: c"}, "text"),
    ],
)
def test_a_preference_pair_is_answered_with_its_verb_and_the_column_that_imitates_the_chosen_one(
    row: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=f"posttrain prefer learns from; --fields.{named} chosen imitates"):
        only(row)
    assert "b" in str({key: value for key, value in only(row, fields={named: "chosen"}).items() if key != "chosen"})


def test_imitating_responses_that_are_labelled_bad_is_warned_of() -> None:
    rows = [{"prompt": f"{i}", "response": "a", "label": i % 3 > 0} for i in range(6)]
    told: list[str] = []
    warn_bad_responses(to_tasks(rows, need=BOTH), told.append)
    assert len(told) == 1 and told[0].startswith("2 of 6 rows checked have the label false")
    warn_bad_responses(to_tasks([{**row, "label": int(row["label"])} for row in rows], need=BOTH), told.append)
    assert len(told) == 1, "a number may be that of a topic"
