"""Conversations under the chat templates of public models: what was said is never rewritten, and nothing is lost unsaid."""

from __future__ import annotations

import json
from typing import Any

import pytest
from template_families import FAMILIES, NO_TOOL, asked, needs_templates, tokenizer_of

from posttrain.core.conversation import Conversation
from posttrain.core.types import Completion, StopReason, ToolCall, Turn, UserError
from posttrain.envs.demonstration import demonstrate
from posttrain.models.tokenizer.tokenizer import Tokenizer

pytestmark = needs_templates


def said(tokenizer: Tokenizer, text: str, end: str) -> Completion:
    tokens = tokenizer.encode(text) + tokenizer.encode(end)
    return Completion(0, tokens, [0.0] * len(tokens), text, StopReason.EOS, 0)


REPLIES = ["first answer", "<think>\nso it is\n</think>\n\nsecond answer", "third {answer}"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_grows_by_what_is_new_and_keeps_what_was_sampled(family: str) -> None:
    tokenizer, end = tokenizer_of(family)
    talk = Conversation(tokenizer)
    tokens = talk.show(Turn(messages=asked(family)), None)
    text = tokenizer.decode(tokens)
    assert text == tokenizer.render(asked(family)) or text == tokenizer.special["bos_token"] + tokenizer.render(
        asked(family)
    )
    assert all(message["content"] in text for message in asked(family))
    for number, reply in enumerate(REPLIES):
        completion = said(tokenizer, reply, end)
        question = f"question {number} on it"
        before = len(tokens)
        tokens += completion.tokens
        more = talk.show(Turn(messages=[{"role": "user", "content": question}]), completion)
        tokens += more
        assert tokens[before : before + len(completion.tokens)] == completion.tokens
        behind = tokenizer.decode(more)
        assert behind.count(question) == 1 and end + end not in tokenizer.decode(tokens)
        # where the model is to speak, it is asked as in a conversation that begins
        opening = tokenizer.render([{"role": "user", "content": question}])
        assert behind[behind.index(question) :] == opening[opening.index(question) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tools_answer_is_shown_or_refused_and_never_lost(family: str) -> None:
    tokenizer, end = tokenizer_of(family)
    talk = Conversation(tokenizer)
    talk.show(Turn(messages=asked(family)), None)
    answer = {"role": "tool", "name": "find", "tool_call_id": "abcdefghi", "content": 'the "answer"\nis 7'}
    turn = Turn(messages=[answer])
    completion = said(tokenizer, "let me look", end)
    if family in NO_TOOL:
        with pytest.raises(UserError):
            talk.show(turn, completion)
        return
    shown = tokenizer.decode(talk.show(turn, completion))
    assert answer["content"] in shown or json.dumps(answer["content"])[1:-1] in shown


CALLERS = {"deepseek_r1_distill": False, "deepseekv3": False, "gemma4_v5": True, "gptoss": True, "llama3_1": True,
           "llama3_2": True, "mistral_nemo": True, "qwen2_5": True, "qwen3": True, "qwen3_5_nothink": True,
           "qwen3_5_think": True, "qwen3_8": True, "qwen3_instruct_2507": True, "qwen3_vl": True}  # fmt: skip
"""Families whose templates show calls -> whether they show the tools as well."""
ONE_CALL = {"llama3_1", "llama3_2", "gptoss"}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "c"}, "days": {"type": "integer", "description": "d"}},
        "required": ["city"],
    },
}
TOOLS = [{"type": "function", "function": WEATHER}]


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_are_read_and_answered_as_the_template_shows_them(family: str) -> None:
    tokenizer, end = tokenizer_of(family)
    form = tokenizer.tool_format
    assert (form is not None) == (family in CALLERS)
    if form is None:
        return
    calls = [ToolCall("get_weather", {"city": "Pa\"ris", "days": 3}, id="abcdefgh1"),
             ToolCall("get_weather", {"city": "Rome"}, id="abcdefgh2")][: 1 if family in ONE_CALL else 2]  # fmt: skip
    talk = Conversation(tokenizer)
    tools = TOOLS if CALLERS[family] else None
    shown = tokenizer.decode(talk.show(Turn(messages=asked(family), tools=tools), None))
    assert "get_weather" in shown or not tools
    opening = tokenizer.render(asked(family), True, tools)
    whole = tokenizer.render([*asked(family), form.message(calls)], False, tools)
    if not whole.startswith(opening):  # it opens a reply with what it does not show, or moves the tools
        mark = "[/INST]" if family == "mistral_nemo" else "<｜Assistant｜>"
        opening = whole[: whole.index(mark) + len(mark)]
    reply = whole[len(opening) :]
    read = talk.calls(reply)
    assert [(c.name, dict(c.arguments), c.problem) for c in read] == [(c.name, dict(c.arguments), None) for c in calls]
    reply = reply.split(end)[0].rstrip("\n") + ("<|call|>" if family == "gptoss" and end in reply else "")
    if family == "gemma4_v5":
        reply = reply.removesuffix("<|tool_response>")
    ids = tokenizer.encode(reply) + ([] if family == "gptoss" else tokenizer.encode(end))
    completion = Completion(0, ids, [0.0] * len(ids), reply, StopReason.EOS, 0)
    talk.calls(reply)
    messages = [
        {"role": "tool", "name": c.name, "tool_call_id": c.id, "content": f"sunny in {c.arguments['city'][0]}"}
        for c in read
    ]
    after = tokenizer.decode(talk.show(Turn(messages=messages), completion))
    assert [after.count(f"sunny in {c.arguments['city'][0]}") for c in calls] == [1] * len(calls)
    # what a fresh rendering of all of it shows behind the calls, and nothing twice
    again = tokenizer.render([*asked(family), form.message(calls), *messages], True, tools)
    assert again.endswith(after) or family == "mistral_nemo"
    assert not after.startswith(end) and "Paris" not in after and "arguments" not in after
    # the next reply and question are laid as ever
    tokens = tokenizer.encode("so sunny") + tokenizer.encode(end)
    talk.calls("so sunny")
    answered = Completion(0, tokens, [0.0] * len(tokens), "so sunny", StopReason.EOS, 0)
    on = tokenizer.decode(talk.show(Turn(messages=[{"role": "user", "content": "and then?"}]), answered))
    assert on.count("and then?") == 1 and "sunny" not in on


@pytest.mark.parametrize("family", FAMILIES)
def test_demonstrations_of_several_turns_are_what_a_policy_would_see(family: str) -> None:
    tokenizer, end = tokenizer_of(family)
    messages: list[dict[str, Any]] = asked(family)
    for number, reply in enumerate(("first answer", "second answer")):
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": f"question {number}"}]
    ends = [tokenizer.encode(text)[0] for text in (end, "<|endoftext|>")]
    try:
        demonstration = demonstrate({"id": "a", "messages": messages[:-1]}, tokenizer, ends)
    except UserError as error:
        rewritten = "rewrites the beginning of a reply" in str(error) and family == "mistral_nemo"
        assert rewritten or "begins each reply with its thoughts" in str(error)
        assert rewritten or family.startswith(("deepseek", "qwen3_5_think", "qwen3_8"))
        return
    talk = Conversation(tokenizer)
    tokens = talk.show(Turn(messages=asked(family)), None)
    learned = [s for s in demonstration.spans if s.learned]
    assert len(learned) == 2
    for span, question in zip(learned, ("question 0", None), strict=True):
        own = demonstration.tokens[span.start : span.start + span.length]
        assert demonstration.tokens[: span.start] == tokens
        assert tokenizer.decode(own).endswith(f"answer{end}")
        completion = Completion(0, own, [0.0] * len(own), tokenizer.decode(own[:-1]), StopReason.EOS, 0)
        tokens = tokens + own
        if question is not None:
            tokens += talk.show(Turn(messages=[{"role": "user", "content": question}]), completion)
