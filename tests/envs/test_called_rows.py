"""Rows whose messages call tools: the template's own form of a call is trained and shown, whatever form the row has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from posttrain.core.conversation import Conversation
from posttrain.core.types import Turn, UserError
from posttrain.data.tasks import to_tasks
from posttrain.envs.demonstration import demonstrate
from posttrain.models.tokenizer.custom_template import CHATML
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.sources.length_filter import Prompts, TooLong

ASKED = {"role": "user", "content": "add"}
SILENT = (
    "{{ tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
AS_TEXT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name + ' ' + c.function.arguments }}</call>{% endfor %}|"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORMS: dict[str, Any] = {
    "object": {"function": {"name": "add", "arguments": {"a": 1}}},
    "text": {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
    "flat": {"name": "add", "arguments": {"a": 1}},
}


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return Tokenizer.train([CHATML + AS_TEXT + json.dumps(FORMS)], 400, "bpe")


def row(call: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [call], **more}]}


def only(row: dict[str, Any]) -> dict[str, Any]:
    [task] = to_tasks([row], need=("prompt", "response"))
    return task


def trained(tokenizer: Tokenizer, task: dict[str, Any]) -> str:
    """The text of the trained tokens."""
    transcript = demonstrate(task, tokenizer, [tokenizer.eos_id or 0])
    spans = [span for span in transcript.spans if span.learned]
    return "".join(tokenizer.decode(transcript.tokens[span.start : span.start + span.length]) for span in spans)


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (CHATML, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
        (AS_TEXT, '<call>add {"a": 1}</call>'),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_the_trained_call_is_that_of_the_template(template: str, written: str, form: str, plain: Tokenizer) -> None:
    tokenizer = plain.templated(template, "the template")
    assert trained(tokenizer, only(row(FORMS[form]))).startswith(written)


@pytest.mark.parametrize("form", FORMS)
def test_a_call_in_a_prompt_is_measured_and_shown_as_it_is_trained(form: str, plain: Tokenizer) -> None:
    tokenizer = plain.templated(CHATML, "chatml")
    messages = [*row(FORMS[form])["messages"], {"role": "tool", "content": "2"}, ASKED]
    tasks = to_tasks([{"messages": messages}], need=("prompt",))
    shown = tokenizer.decode(Conversation(tokenizer).show(Turn(messages=tasks[0]["messages"]), None))
    assert '{"name": "add", "arguments": {"a": 1}}' in shown
    assert Prompts(tasks, tokenizer, TooLong("refuse", 1000, print)).fits(0)


def test_reasoning_before_a_call_is_shown(plain: Tokenizer) -> None:
    thinking = AS_TEXT.replace("{{ m.content", "{{ m.reasoning_content or '' }}{{ m.content", 1)
    tokenizer = plain.templated(thinking, "the template")
    assert trained(tokenizer, only(row(FORMS["text"], reasoning_content="add both"))).startswith("add both<call>")


def test_a_template_that_shows_no_calls_is_refused(plain: Tokenizer) -> None:
    """Else the model would learn to reply nothing where the row calls."""
    tokenizer = plain.templated(SILENT, "the template")
    for more in ({}, {"tools": [{"type": "function", "function": {"name": "add"}}]}):  # the name alone is no call
        with pytest.raises(UserError, match="does not show the call of 'add': use one that does"):
            demonstrate({**only(row(FORMS["text"])), **more}, tokenizer, [0])


def test_a_row_without_a_trained_reply_is_refused_with_the_marks_that_say_so(plain: Tokenizer) -> None:
    tokenizer = plain.templated(SILENT, "the template")
    for mark in ({"train": False}, {"weight": 0}):
        with pytest.raises(UserError, match='are context \\("train": false, or "weight": 0\\): train one'):
            demonstrate({"messages": [ASKED, {"role": "assistant", "content": "2", **mark}]}, tokenizer, [0])


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ({}, "names no tool"),
        ({"function": "add"}, "names no tool"),
        ({"function": {"name": None}}, "names no tool"),
        ({"function": {"name": "add", "arguments": "{bad"}}, "are text and no JSON"),
        ({"function": {"name": "add", "arguments": [1]}}, "are no object"),
        ({"function": {"name": "add", "arguments": "[" * 5000}}, "no JSON|too deeply"),
        (3, "names no tool"),
    ],
)
def test_a_damaged_call_is_one_line_with_its_message(call: Any, told: str) -> None:
    with pytest.raises(UserError, match=f"message 2: tool_calls must be a list of .*{told}") as caught:
        only(row(call))
    assert "\n" not in str(caught.value)
