"""Responses in columns or objects of other data sets become the same tasks as those in columns of ours."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.apps.data_report import report
from posttrain.core.types import Task, UserError
from posttrain.data.labels import to_labelled
from posttrain.data.preference_examples import to_compared, to_item
from posttrain.data.response_columns import gathered
from posttrain.data.rows import load_rows
from posttrain.data.tasks import to_tasks
from posttrain.runs.chat_choice import Chatting


def only(row: dict[str, Any]) -> Task:
    [task] = to_tasks([{"id": "a", **row}], convert=to_compared, left_out="ties")
    return task


@pytest.mark.parametrize("name", ["winner", "preference"])
@pytest.mark.parametrize(("first", "second"), [("response_a", "response_b"), ("A", "B"), ("model_a", "model_b")])
def test_winner_of_two_responses_is_chosen(name: str, first: str, second: str) -> None:
    row = {"prompt": "p", "response_a": "good", "response_b": "bad"}
    assert only({**row, name: first}) == only({"prompt": "p", "chosen": "good", "rejected": "bad"})
    task = only({**row, name: second})
    [[better, worse, share, _]] = task["comparisons"]
    assert (task["responses"][better], task["responses"][worse], share) == ("bad", "good", 1.0)
    assert to_item({**row, name: "tie (bothbad)"}) is None
    with pytest.raises(UserError, match=f"{name} is 1 .int.; it must be response_a, response_b or tie"):
        to_item({**row, name: 1})
    with pytest.raises(UserError, match="beside response_a and response_b, a winner"):
        to_item(row)


@pytest.mark.parametrize("column", ["completions", "responses"])
@pytest.mark.parametrize(("text", "score"), [("response", "overall_score"), ("text", "score")])
def test_objects_with_scores_are_responses_with_scores(column: str, text: str, score: str) -> None:
    given = [("b", 2.0), ("a", 4.5), ("c", 1.0)]
    row = {"instruction": "p", column: [{"model": "m", text: said, score: value} for said, value in given]}
    expected = only({"prompt": "p", "responses": ["b", "a", "c"], "scores": [2.0, 4.5, 1.0]})
    assert only(row) == expected and len(expected["comparisons"]) == 3
    assert max(expected["comparisons"], key=lambda c: c[3])[:2] == [1, 2], "the best and the worst"
    unscored = {"prompt": "p", column: [{text: "a", score: None}, {text: "b", score: 1}, {text: "c", score: 2}]}
    assert len(only(unscored)["comparisons"]) == 1
    assert to_labelled({"prompt": "p", **row})["scores"] == [2.0, 4.5, 1.0]
    with pytest.raises(UserError, match=f"{column}: entry 2 has model, and no text: name it response"):
        to_item({"prompt": "p", column: [{text: "a"}, {"model": "m"}]})
    with pytest.raises(UserError, match="responses without labels"):
        to_item({"prompt": "p", column: [{text: "a"}, {text: "b"}]})


def test_rejected_response_of_ms_swift_is_rejected() -> None:
    row = {"query": "p", "response": "good", "rejected_response": "bad", "history": [["q", "r"]]}
    turns = [{"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "r"), ("user", "p"))]
    assert only(row) == only({"prompt": turns, "chosen": "good", "rejected": "bad"})


@pytest.mark.parametrize(
    ("row", "shape"),
    [
        ({"prompt": "p", "response_a": "a", "response_b": "b", "winner": "A"}, "several responses with labels"),
        ({"instruction": "p", "completions": [{"response": "a", "score": 1}, {"response": "b", "score": 0}]},
         "several responses with labels"),
        ({"query": "p", "response": "a", "rejected_response": "b"}, "preference pairs"),
    ],
)  # fmt: skip
def test_report_names_them_preferences(row: dict[str, Any], shape: str) -> None:
    found = report(load_rows([row]), {"fields": {}, "prompt_template": None}, None, Chatting())
    assert (found.shape, found.verb, found.used, found.wrong) == (shape, "prefer, reward-model", 1, {})


def test_report_tells_the_row_whose_winner_is_unclear() -> None:
    row = {"prompt": "p", "response_a": "a", "response_b": "b", "winner": "nobody"}
    with pytest.raises(UserError, match="row 1: winner is 'nobody'"):
        report(load_rows([row]), {"fields": {}, "prompt_template": None}, None, Chatting())


def test_scores_may_be_text_as_in_ratings() -> None:
    entries = [{"response": "a", "rating": "4"}, {"response": "b", "rating": " N/A"}, {"response": "c", "rating": 2}]
    assert gathered({"prompt": "q", "completions": entries})["scores"] == [4.0, None, 2]
