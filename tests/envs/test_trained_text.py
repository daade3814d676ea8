"""The trained text of chat rows under the chat templates of public models: the assistant's own text behind what sampling
shows, or a refusal in one line."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from template_families import FAMILIES, asked, needs_templates, tokenizer_of

from posttrain.core import run_date
from posttrain.core.conversation import Conversation
from posttrain.core.transcripts import Mask, Transcript
from posttrain.core.types import Completion, StopReason, Turn, UserError
from posttrain.data.preference_examples import to_compared
from posttrain.data.tasks import to_tasks
from posttrain.envs.demonstration import demonstrate, lost_reasoning
from posttrain.models.tokenizer.custom_template import CHATML
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.training.row_warnings import lost_reasoning_line, marks_line
from posttrain.training.sources.length_filter import TooLong
from posttrain.training.sources.preferences import PreferenceExamples

THOUGHT, LATER = "deep thoughts", "second thoughts"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(content: str, **marks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **marks}


TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "description": "c"}}, "required": ["city"]}}}  # fmt: skip
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
ANSWER = {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefgh1", "content": "sunny"}
ROWS: dict[str, dict[str, Any]] = {
    "prompt and completion": {"messages": [user("one"), said("an answer")]},
    "system": {"messages": [{"role": "system", "content": "be brief"}, user("one"), said("an answer")]},
    "several turns": {"messages": [user("one"), said("an answer"), user("two"), said("other words")]},
    "reasoning": {"messages": [user("one"), said("an answer", reasoning_content=THOUGHT)]},
    "reasoning of several turns": {"messages": [
        user("one"), said("an answer", reasoning=THOUGHT), user("two"), said("other words", thinking=LATER)
    ]},
    "reasoning in the content": {"messages": [user("one"), said(f"<think>\n{THOUGHT}\n</think>\n\nan answer")]},
    "tools": {"messages": [user("one"), said("", tool_calls=[CALL]), ANSWER, said("an answer")], "tools": [TOOL]},
}  # fmt: skip
WAYS = [(family, {}) for family in FAMILIES] + [
    (family, {"enable_thinking": on})
    for family in ("qwen3", "qwen3_5_think", "qwen3_5_nothink", "qwen3_8", "gemma4_v5")
    if family in FAMILIES
    for on in (True, False)
]
OPENS = {  # the template begins each reply with its thoughts, by enable_thinking
    "deepseek_r1_distill": (None,), "deepseekv3": (None,), "qwen3_5_think": (None, True), "qwen3_8": (None, True),
    "qwen3_5_nothink": (True,),
}  # fmt: skip
CLOSED = {"qwen3": (False,), "qwen3_5_nothink": (None, False), "qwen3_5_think": (False,), "qwen3_8": (False,)}
SHOW_TOOLS = ("gemma4", "gptoss", "llama3_1", "llama3_2", "mistral_nemo", "qwen")
pytestmark = needs_templates


@pytest.fixture(autouse=True)
def day() -> Iterator[None]:
    with run_date.fixed("2026-11-24"):
        yield


@cache
def loaded(family: str, on: bool | None) -> tuple[Tokenizer, list[int]]:
    tokenizer, end = tokenizer_of(family)
    ends = [tokenizer.encode(text)[0] for text in (end, "<|endoftext|>", "<|call|>", "<|tool_response>")]
    return tokenizer.with_kwargs({} if on is None else {"enable_thinking": on}), ends


def thoughts(family: str, on: bool | None, text: str) -> str:
    """The text of this reasoning before the content of a reply, in the form of each family's model card."""
    if on in OPENS.get(family, ()):
        return f"{text}\n</think>\n\n"
    if family.startswith("qwen3") and family not in ("qwen3_instruct_2507", "qwen3_vl"):
        return "" if on in CLOSED.get(family, ()) else f"<think>\n{text}\n</think>\n\n"
    if family == "gemma4_v5":
        return f"<|channel>thought\n{text}\n<channel|>"
    return f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant" if family == "gptoss" else ""


def expected(family: str, on: bool | None, kind: str) -> list[str]:
    opening = {"gptoss": "<|channel|>final<|message|>", "idefics3": " ", "smolvlm": " "}.get(family, "")
    before = [thoughts(family, on, text) if kind.startswith("reasoning") else "" for text in (THOUGHT, LATER)]
    if kind == "reasoning in the content" and not (before[0] or on in CLOSED.get(family, ())):
        before = [f"<think>\n{THOUGHT}\n</think>\n\n"] * 2  # text as any other
        opening, before = "", [opening + text for text in before]
    contents = ["an answer", "other words"][: 2 if "several" in kind else 1]
    return [f"{before[i]}{opening}{content}" for i, content in enumerate(contents)]


def refusal(family: str, on: bool | None, kind: str) -> str:
    """A part of the line that refuses such rows; "" where they are trained."""
    if (kind == "tools" and not family.startswith(SHOW_TOOLS)) or (kind, family) == ("tools", "qwen2_5_vl"):
        return "does not show the tool"
    if (kind, family) == ("system", "gemma"):
        return "System role not supported"
    if family == "mistral_nemo" and kind == "system":
        return "rewrites the beginning of a reply"
    if (kind, family, on) == ("tools", "gemma4_v5", True):
        return "rewrites the beginning of a reply"
    if on in OPENS.get(family, ()) and not kind.startswith("reasoning"):
        return "begins each reply with its thoughts"
    return ""


def replies(transcript: Transcript, tokenizer: Tokenizer) -> list[str]:
    spans = [span for span in transcript.spans if span.learned]
    return [tokenizer.decode(transcript.tokens[span.start : span.start + span.length]) for span in spans]


def check_sampled(transcript: Transcript, tokenizer: Tokenizer, row: dict[str, Any]) -> None:
    """Assert that each trained reply stands behind the tokens that a policy is given which has replied so before."""
    talk, tokens, last = Conversation(tokenizer), [], None
    spans = iter([span for span in transcript.spans if span.learned])
    new: list[dict[str, Any]] = []
    for message in row["messages"]:
        if message["role"] != "assistant":
            new.append(message)
            continue
        first = {"tools": row["tools"]} if "tools" in row and not tokens else {}
        tokens += talk.show(Turn(messages=new, **first), last)
        span, new = next(spans), []
        assert transcript.tokens[: span.start] == tokens
        own = transcript.tokens[span.start : span.start + span.length]
        text = tokenizer.decode(own[:-1])
        last = Completion(0, own, [0.0] * len(own), text, StopReason.EOS, 0)
        for call in talk.calls(text):
            assert (call.name, dict(call.arguments)) == ("get_weather", {"city": "Rome"})
        tokens += own


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize(("family", "given"), WAYS, ids=str)
def test_the_assistants_text_alone_is_trained_behind_what_sampling_shows(
    family: str, given: dict[str, bool], kind: str
) -> None:
    on = given.get("enable_thinking")
    (tokenizer, ends), row = loaded(family, on), {"id": "a", **ROWS[kind]}
    if why := refusal(family, on, kind):
        with pytest.raises(UserError) as error:
            demonstrate(row, tokenizer, ends)
        assert why in str(error.value) and "\n" not in str(error.value)
        return
    transcript = demonstrate(row, tokenizer, ends)
    check_sampled(transcript, tokenizer, ROWS[kind])
    found = replies(transcript, tokenizer)
    if kind == "tools":
        assert "get_weather" in found[0] and "Rome" in found[0] and "sunny" not in "".join(found)
        found = found[1:]
    closing = [text.removeprefix(own) for text, own in zip(found, expected(family, on, kind), strict=True)]
    assert closing == [tokenizer.decode(ends[:1])] * len(found)
    lost, trained = lost_reasoning(row, tokenizer)
    unseen = kind.startswith("reasoning") and THOUGHT not in found[0]
    assert bool(lost) == bool(trained) == unseen


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("family", sorted({"qwen3", "gptoss", "gemma4_v5", "deepseek_r1_distill"} & set(FAMILIES)))
def test_thoughts_have_any_of_three_names(family: str, name: str) -> None:
    tokenizer, ends = loaded(family, None)
    one, other = (
        demonstrate({"messages": [user("one"), said("an answer", **{key: THOUGHT})]}, tokenizer, ends).tokens
        for key in (name, "reasoning_content")
    )
    assert one == other and THOUGHT in tokenizer.decode(one)


@pytest.mark.parametrize(("family", "empty"), [
    ("qwen3", "<think>\n\n</think>\n\n"), ("qwen3_5_think", "\n</think>\n\n"), ("deepseek_r1_distill", "\n</think>\n\n"),
])  # fmt: skip
def test_an_empty_thought_is_trained_where_the_row_asks_for_it(family: str, empty: str) -> None:
    tokenizer, ends = loaded(family, None)
    transcript = demonstrate({"messages": [user("one"), said("an answer", reasoning_content="")]}, tokenizer, ends)
    assert replies(transcript, tokenizer) == [f"{empty}an answer{tokenizer.decode(ends[:1])}"]
    assert lost_reasoning({"messages": [user("one"), said("an answer", reasoning_content="")]}, tokenizer) == (0, 0)


TALK = [user("one"), said("an answer"), user("two"), said("other words"), user("three"), said("the end")]


def marked(place: int, **marks: Any) -> list[dict[str, Any]]:
    return [{**message, **marks} if number == place else message for number, message in enumerate(TALK)]


@pytest.mark.parametrize(("mask", "messages", "trained"), [
    ("assistant", TALK, ["an answer", "other words", "the end"]),
    ("last", TALK, ["the end"]),
    ("assistant", marked(1, train=False), ["other words", "the end"]),
    ("assistant", marked(3, weight=0), ["an answer", "the end"]),
    ("assistant", marked(3, weight=1, train=False), ["an answer", "the end"]),
    ("last", marked(1, train=False), ["the end"]),
])  # fmt: skip
def test_a_mask_chooses_messages_and_changes_no_token(
    mask: Mask, messages: list[dict[str, Any]], trained: list[str]
) -> None:
    tokenizer = Tokenizer.train(["hello there you"], 300).templated(CHATML, "chatml")
    assert tokenizer.eos_id is not None
    whole = demonstrate({"messages": TALK}, tokenizer, [tokenizer.eos_id])
    found = demonstrate({"messages": messages}, tokenizer, [tokenizer.eos_id], mask)
    assert replies(found, tokenizer) == [f"{text}<|eos|>" for text in trained]
    assert found.tokens == whole.tokens


def test_of_all_tokens_those_of_a_turn_that_the_row_leaves_out_are_context() -> None:
    tokenizer = Tokenizer.train(["hello there you"], 300).templated(CHATML, "chatml")
    assert tokenizer.eos_id is not None
    every, without = (
        demonstrate({"messages": messages}, tokenizer, [tokenizer.eos_id], "all")
        for messages in (TALK, marked(1, train=False))
    )
    assert every.tokens == without.tokens and every.scored.tolist() == list(range(1, len(every)))
    left = sorted(set(every.scored.tolist()) - set(without.scored.tolist()))
    assert tokenizer.decode([every.tokens[i] for i in left]) == "an answer<|eos|>"
    with pytest.raises(UserError, match="nothing to learn"):
        demonstrate({"messages": marked(5, weight=0)}, tokenizer, [tokenizer.eos_id], "last")


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_before_the_trained_one_are_a_prompt_as_sampling_renders_it(family: str) -> None:
    tokenizer, ends = loaded(family, None)
    thought = {"reasoning_content": LATER}
    messages = [
        *asked(family),
        said("an answer", reasoning_content=THOUGHT),
        user("two"),
        said("other words", **thought),
    ]
    if family == "mistral_nemo":  # it moves the system message into the last turn
        with pytest.raises(UserError, match="rewrites the beginning of a reply"):
            demonstrate({"messages": messages}, tokenizer, ends, "last")
        return
    transcript = demonstrate({"messages": messages}, tokenizer, ends, "last")
    [span] = [span for span in transcript.spans if span.learned]
    prompt = tokenizer.encode(tokenizer.render(messages[:-1]), start=True)
    assert transcript.tokens[: span.start] == prompt
    lost = int(THOUGHT not in tokenizer.decode(prompt)) + int(LATER not in tokenizer.decode(transcript.tokens))
    assert lost_reasoning({"messages": messages}, tokenizer, "last")[0] == lost


def test_rows_that_lose_their_reasoning_are_counted_in_one_line() -> None:
    plain, thinking = {"messages": TALK[:2]}, {"messages": [user("one"), said("an answer", reasoning=THOUGHT)]}
    earlier = {"messages": [*thinking["messages"], user("two"), said("other words")]}
    tokenizer, _ = loaded("qwen3", None)
    assert lost_reasoning_line(tokenizer, [plain, thinking, earlier]) == ""
    line = "1 of 3 rows have reasoning that the model does not see, 0 of them in a trained reply: "
    assert lost_reasoning_line(tokenizer, [plain, thinking, earlier], "last") == line + (
        "the chat template drops the reasoning of earlier turns"
    )
    off = lost_reasoning_line(loaded("qwen3", False)[0], [plain, thinking, earlier])
    assert off.startswith("2 of 3 rows have reasoning that the model does not see, 2 of them in a trained reply")
    assert "--chat-template-kwargs enable_thinking=true" in off
    unread = lost_reasoning_line(loaded("llama3_1", None)[0], [plain, thinking])
    assert unread.startswith("1 of 2 rows") and unread.endswith(
        "1 of them in a trained reply: the chat template reads none"
    )


@pytest.mark.parametrize(("family", "mark"), [("qwen3", "<|im_end|>"), ("llama3_1", "<|eot_id|>")])
def test_rows_with_marks_of_the_chat_template_in_their_text_are_counted_in_one_line(family: str, mark: str) -> None:
    tokenizer, _ = loaded(family, None)
    clean = {"messages": [user("What does <|mark|> mean, and <think>?"), said(f"{THOUGHT}")]}
    marked = {"messages": [user(f"What does {mark} mean?")]}
    assert marks_line(tokenizer, [clean, {"prompt": mark}]) == "", "a plain prompt is written by who knows the template"
    assert marks_line(tokenizer, [clean, marked, clean]).startswith(
        f"1 of 3 rows have {mark!r} in the text of a message"
    )


def test_a_reply_cut_off_within_its_thoughts_is_trained_as_it_stands() -> None:
    tokenizer, ends = loaded("qwen3_5_think", None)
    row = {"messages": [user("one"), said("let me think ab")], "response_stop": "length"}
    assert replies(demonstrate(row, tokenizer, ends, "last"), tokenizer) == ["let me think ab"]


def test_responses_of_a_pair_have_their_reasoning_behind_the_prompt_of_sampling() -> None:
    tokenizer, ends = loaded("qwen3", None)
    prompt = [user("one"), said("earlier", reasoning=LATER), user("two")]
    row = {"prompt": prompt, "chosen": [said("an answer", thinking=THOUGHT)], "rejected": [said("other words")]}
    tasks = to_tasks([row], convert=to_compared, need=())
    [example] = PreferenceExamples(tasks, tokenizer, ends, tokenizer.vocab_size, TooLong("skip", 4096, print))
    assert example is not None
    texts = [replies(transcript, tokenizer) for transcript in example.responses]
    assert texts == [[f"<think>\n{THOUGHT}\n</think>\n\nan answer<|im_end|>"], ["other words<|im_end|>"]]
    sampled = tokenizer.encode(tokenizer.render(prompt), start=True)
    assert all(transcript.tokens[: len(sampled)] == sampled for transcript in example.responses)
