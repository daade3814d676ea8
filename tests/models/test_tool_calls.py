"""Calls of tools: their format is read off the checkpoint's template, and what a policy writes is read as it stands."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from posttrain.core.types import Reply, ToolCall, UserError
from posttrain.models.tokenizer.tool_format import format_of
from posttrain.models.tokenizer.tool_parser import HERMES, LONGEST_CODE, MOST_CALLS, ToolFormat

Write = Callable[[Sequence[Mapping[str, Any]]], str]


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _functions(message: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    return [(c["function"]["name"], c["function"]["arguments"], c["id"]) for c in message["tool_calls"]]


def _many(write: Callable[[str, Any, str], str], around: tuple[str, str] = ("", ""), between: str = "") -> Any:
    return lambda m: around[0] + between.join(write(*call) for call in _functions(m)) + around[1]


def _one(write: Callable[[str, Any, str], str]) -> Any:
    def written(message: Mapping[str, Any]) -> str:
        if len(message["tool_calls"]) > 1:
            raise UserError("one call a turn")
        return write(*_functions(message)[0])

    return written


def _dict(arguments: Any) -> dict[str, Any]:
    if not isinstance(arguments, dict):
        raise UserError("not a mapping")
    return arguments


def _keyed(key: str, between: str, end: str) -> Callable[[Any], str]:
    return lambda a: "".join(
        f"{key}{k}{between}{v if isinstance(v, str) else json.dumps(v)}{end}" for k, v in _dict(a).items()
    )


def _brace(value: Any) -> str:
    if isinstance(value, str):
        return f"<escape>{value}<escape>"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_brace(v)}" for k, v in sorted(value.items())) + "}"
    return "[" + ",".join(map(_brace, value)) + "]" if isinstance(value, list) else json.dumps(value)


def _python(name: str, arguments: Any, id: str) -> str:
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in _dict(arguments).items())})"


def _named(key: str, given: str) -> Callable[[str, Any, str], str]:
    return lambda n, a, i: json.dumps({key: n, given: a if isinstance(a, dict) else json.loads(a)}, ensure_ascii=False)


FORMATS: dict[str, Any] = {  # how public families write calls, each in a few words of our own
    "hermes": _many(lambda n, a, i: f"<tool_call>\n{_named('name', 'arguments')(n, a, i)}\n</tool_call>", between="\n"),
    "llama 3": _one(_named("name", "parameters")),
    "list": _many(_named("name", "arguments"), ("<|tool_call|>[", "]"), ", "),
    "closed list": _many(_named("name", "arguments"), ("<TOOLCALL>[", "]</TOOLCALL>"), ", "),
    "list of numbered": _many(
        lambda n, a, i: json.dumps({"tool_call_id": i, "tool_name": n, "parameters": _dict(a)}, ensure_ascii=False),
        ("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"), ",\n    ",
    ),
    "name and id": _many(lambda n, a, i: f"[TOOL_CALLS]{n}[CALL_ID]{i}[ARGS]{_json(a)}"),
    "name": _many(lambda n, a, i: f"[TOOL_CALLS]{n}[ARGS]{_json(a)}"),
    "name between marks": _many(
        lambda n, a, i: f"<|call_begin|>{n}<|sep|>{_json(a)}<|call_end|>", ("<|calls_begin|>", "<|calls_end|>")
    ),
    "id that names": _many(
        lambda n, a, i: f"<|call_begin|>{i}<|arguments|>{_json(a)}<|call_end|>", ("<|section_begin|>", "<|section_end|>")
    ),
    "coder": _many(
        lambda n, a, i: f"<tool_call>\n<function={n}>\n"
        + _keyed("<parameter=", ">\n", "\n</parameter>\n")(a) + "</function>\n</tool_call>", between="\n",
    ),
    "keys and values": _many(
        lambda n, a, i: f"<tool_call>{n}\n"
        + _keyed("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")(a) + "</tool_call>", between="\n",
    ),
    "invoke": _many(
        lambda n, a, i: f'<invoke name="{n}">\n' + _keyed('<parameter name="', '">', "</parameter>\n")(a) + "</invoke>\n",
        ("<m:tool_call>\n", "</m:tool_call>"),
    ),
    "name before its mark": _many(
        lambda n, a, i: f' to={n}<|message|><m:invoke name="{n}">\n'
        + _keyed('<m:parameter name="', '">', "</m:parameter>\n")(a) + "</m:invoke>",
        between="<|eom|><|start|>assistant",
    ),
    "braces": _many(lambda n, a, i: f"<start_call>call:{n}{_brace(_dict(a))}<end_call>"),
    "python list": _many(_python, ("[", "]"), ", "),
    "python between marks": _many(_python, ("<|call_start|>[", "]<|call_end|>"), ", "),
}  # fmt: skip
CALLS = [
    ToolCall("get_weather", {"city": 'Zo"\u00eb {x} [y] <b>\nline', "days": 3}, id="a1b2c3d4e"),
    ToolCall("find.it-now_2", {"where": {"deep": [1, None, True, "s"]}, "what": "3", "none": None}, id="f6g7h8i9j"),
]
TOOLS = [
    {"function": {"name": name, "parameters": {"properties": {key: {"type": kind} for key, kind in types.items()}}}}
    for name, types in {
        "get_weather": {"city": "string", "days": "integer"},
        "find.it-now_2": {"what": "string", "where": "object"},
    }.items()
]


def rendering(family: str) -> Write:
    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        text = ""
        for message in messages:
            said = FORMATS[family](message) if message.get("tool_calls") else message["content"]
            text += f"<|{message['role']}|>\n{said}<|end|>\n"
        return text

    return render


def said(family: str, calls: Sequence[ToolCall]) -> tuple[ToolFormat, str]:
    render = rendering(family)
    found = format_of(render)
    assert found is not None
    return found, render([found.message(calls)]).removeprefix("<|assistant|>\n").removesuffix("<|end|>\n")


def plain(calls: Sequence[ToolCall]) -> list[tuple[str, Any, str | None]]:
    return [(call.name, dict(call.arguments), call.problem) for call in calls]


def asked(family: str) -> list[ToolCall]:
    """Calls that this family can make: a name in Python has no hyphen, and of some one call a turn."""
    calls = [ToolCall(c.name.replace("-", "_"), c.arguments, id=c.id) for c in CALLS] if "python" in family else CALLS
    return calls[:1] if family == "llama 3" else calls


@pytest.mark.parametrize("family", FORMATS)
def test_calls_are_read_as_the_template_writes_them(family: str) -> None:
    calls = asked(family)
    for count in range(1, len(calls) + 1):
        form, text = said(family, calls[:count])
        found = form.read(text, TOOLS)
        assert plain(found) == plain(calls[:count])
        assert [call.end for call in found] == sorted(call.end for call in found) and found[-1].end <= len(text)
        thought = "<think>I could say " + text + "</think>\n\n"
        assert plain(form.read(thought + text, TOOLS)) == plain(calls[:count])
        if form.opening:
            assert plain(form.read("Let me see. " + text, TOOLS)) == plain(calls[:count])


def test_a_message_of_calls_alone_shows_no_word_for_its_empty_content() -> None:
    """Templates of GLM 4.5 write None where the content is null, as Jinja does."""

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        hermes = rendering("hermes")
        return "".join(
            f"{message['content']}\n" * (message["content"] != "") + hermes([message]) for message in messages
        )

    form = format_of(render)
    assert form is not None and form.message(CALLS)["content"] == "" and "None" not in render([form.message(CALLS[:1])])


@pytest.mark.parametrize("family", FORMATS)
def test_a_call_ends_where_the_next_may_begin(family: str) -> None:
    calls = asked(family)
    form, text = said(family, calls)
    found = form.read(text, TOOLS)
    if len(calls) == 2 and found[0].end < found[1].end:  # not those that stand in one list
        assert calls[0].name in text[: found[0].end] and calls[1].name not in text[: found[0].end]
        assert text[: found[0].end].endswith(form.closing)
        assert plain(form.read(text[: found[0].end], TOOLS)) == plain(calls[:1])


@pytest.mark.parametrize("family", FORMATS)
def test_a_reply_without_a_call_makes_none(family: str) -> None:
    form, _ = said(family, asked(family))
    for text in (
        "",
        "The answer is 7.",
        '{"answer": 7}',
        "[1, 2]",
        "f(x) = 2",
        "a < b and {c}",
        "<think>hm</think> so",
    ):
        assert form.read(text, TOOLS) == []


@pytest.mark.parametrize("family", FORMATS)
def test_a_call_cut_anywhere_is_malformed_or_none_and_never_another_call(family: str) -> None:
    calls = asked(family)[:1]
    form, text = said(family, calls)
    for end in range(len(text)):
        for found in form.read(text[:end], TOOLS):
            assert found.problem is not None or plain([found]) == plain(calls)


@pytest.mark.parametrize("family", FORMATS)
def test_reading_hostile_text_takes_time_in_proportion_and_raises_nothing(family: str) -> None:
    form, text = said(family, asked(family)[:1])
    opening = form.opening or text[:8]
    began = time.monotonic()
    for hostile in (
        opening * 5000, text * 2000, "{" * 50_000, opening + "[" * 50_000, opening + '{"name":' * 5000, "<" * 50_000,
        opening + "9" * 50_000, opening + "-" * 50_000, opening + "f(" * 5000, opening + "\x00\ud7ff\u2028" * 5000,
        opening + '{"name": "a", "arguments": NaN}', opening + " " * 50_000, (opening + " ") * 5000 + form.closing,
        opening + "x" * 300 + form.gap, text.replace("get_weather", "rm -rf /; x"), text.replace("get_weather", ""),
    ):  # fmt: skip
        for call in form.read(hostile, TOOLS):
            json.dumps(dict(call.arguments), allow_nan=False)
            assert isinstance(call.name, str) and (call.problem is None or call.problem.isprintable())
            assert 0 < call.end <= len(hostile)
            assert " " not in call.name
    assert time.monotonic() - began < 20  # quadratic time would take minutes


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>{'name': 'f'}</tool_call>", "not JSON"),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', "does not end with </tool_call>"),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "the name of the tool is 3"),
        ('<tool_call>{"arguments": {}}</tool_call>', "names no tool"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "not an object"),
        ('<tool_call>{"name": "f", "arguments": "{1"}</tool_call>', "not JSON"),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is no JSON"),
        ("<tool_call></tool_call>", "not JSON"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(text: str, problem: str) -> None:
    found = HERMES.read(text + " and then")
    assert len(found) == 1 and problem in str(found[0].problem)


def test_arguments_given_as_text_are_read_and_a_call_without_any_has_none() -> None:
    found = HERMES.read(
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call><tool_call>{"name":"g"}</tool_call>'
    )
    assert plain(found) == [("f", {"a": 1}, None), ("g", {}, None)]


def test_a_keyed_value_is_text_where_the_schema_says_so() -> None:
    form, text = said("coder", [ToolCall("get_weather", {"city": "12", "days": "12", "other": "12", "word": "x"})])
    tools = [{"function": {"name": "get_weather", "parameters": TOOLS[0]["function"]["parameters"]}}]
    assert dict(form.read(text, tools)[0].arguments) == {"city": "12", "days": 12, "other": 12, "word": "x"}


def test_a_template_that_shows_no_calls_has_no_format() -> None:
    assert format_of(lambda messages: "".join(f"{m['role']}: {m['content']}\n" for m in messages)) is None


@pytest.mark.parametrize("family", FORMATS)
@pytest.mark.parametrize("levels", [30, 200, 600])
def test_arguments_that_are_nested_too_deeply_make_a_malformed_call(family: str, levels: int) -> None:
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    form, text = said(family, [ToolCall("get_weather", {"days": deep}, id="a1b2c3d4e")])
    text = text.replace("[" * 40, "[" * levels).replace("]" * 40, "]" * levels)
    [call] = form.read(text, TOOLS)
    assert (call.problem is None) == (levels == 30)
    pickle.loads(pickle.dumps([Reply(text, tool_calls=[call])]))  # as it goes to workers
    json.dumps(dict(call.arguments))  # and into the record
    if call.problem is not None:
        assert not call.arguments


@pytest.mark.parametrize("value", ["1e999", "-1e999", r'"\ud800"', r'{"\udc00": 1}', "9" * 5000])
def test_what_json_can_spell_and_no_data_can_hold_makes_a_malformed_call(value: str) -> None:
    for arguments in (f'{{"a": {value}}}', json.dumps(f'{{"a": {value}}}')):
        [call] = HERMES.read(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>')
        assert call.problem is not None and not call.arguments


@pytest.mark.parametrize("value", ["{1, 2}", "b'a'", "1e999", "2j", "{1: 2}", "{(1, 2): 3}", r"'\ud800'", "x", "f()"])
def test_an_argument_in_python_that_is_no_json_makes_a_malformed_call(value: str) -> None:
    form, _ = said("python list", asked("python list"))
    [call] = form.read(f"[get_weather(city={value})]", TOOLS)
    assert call.problem is not None and not call.arguments


def test_code_that_is_too_long_is_not_compiled() -> None:
    form, _ = said("python list", asked("python list"))
    found = [form.read(f"[get_weather(city='{'x' * length}')]", TOOLS)[0] for length in (10_000, LONGEST_CODE)]
    assert [call.problem is None for call in found] == [True, False]


@pytest.mark.parametrize("family", FORMATS)
def test_a_reply_makes_so_many_calls_at_most(family: str) -> None:
    form, text = said(family, asked(family)[:1])
    found = form.read((text + "\n") * (MOST_CALLS + 9), TOOLS)
    assert len(found) <= MOST_CALLS
    if form.closing:
        assert len(found) == MOST_CALLS


@pytest.mark.parametrize("family", ["hermes", "coder", "keys and values", "invoke"])
def test_a_malformed_call_that_is_closed_takes_no_other_with_it(family: str) -> None:
    form, right = said(family, asked(family)[:1])
    wrong = f"{form.opening}?{form.closing}"
    for text, problems in ((wrong + right, [True, False]), (right + wrong, [False, True])):
        found = form.read(text, TOOLS)
        assert [call.problem is not None for call in found] == problems
        assert (wrong in text[: found[0].end]) == problems[0] and found[0].end < found[1].end


def test_a_harmony_call_that_is_malformed_takes_no_other_with_it() -> None:
    head = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    found = ToolFormat("harmony").read(f'{head}{{1<|call|>{head}{{"a": 1}}<|call|>')
    assert [(call.problem is None, dict(call.arguments)) for call in found] == [(False, {}), (True, {"a": 1})]


@pytest.mark.parametrize("family", FORMATS)
def test_calls_begin_behind_what_was_thought_and_said(family: str) -> None:
    form, text = said(family, asked(family)[:1])
    thought = f"<think>perhaps {text}</think>or {text}</think>\n"
    assert form.read(thought, TOOLS) == []
    assert plain(form.read(thought + text, TOOLS)) == plain(asked(family)[:1])
    around = text.partition(form.opening)[0] if form.opening else ""  # what stands before all calls
    assert form.start(thought + text) == len((thought + around).rstrip())
    if form.opening:
        assert form.start(f"{thought}Let me see.  \n{text}") == len(f"{thought}Let me see.  \n{around}".rstrip())


@pytest.mark.parametrize("id", ["", "a b", "x" * 65, 7, None, ["a"]])
def test_an_id_that_is_none_is_left_out(id: Any) -> None:
    text = json.dumps({"name": "f", "arguments": {}, "id": id})
    assert [call.id for call in HERMES.read(f"<tool_call>{text}</tool_call>")] == [""]


def test_a_keyed_value_keeps_its_spaces_and_is_read_as_a_whole_or_stays_text() -> None:
    values = {"days": "3 days", "city": "  two\n\n", "when": "2024-01-05", "many": "007", "name": "5"}
    form, text = said("coder", [ToolCall("get_weather", values)])
    properties = {"days": {"type": "integer"}, "city": {"type": "string"}, "name": {"type": ["integer", "string"]}}
    tools = [{"function": {"name": "get_weather", "parameters": {"properties": properties}}}]
    assert dict(form.read(text, tools)[0].arguments) == values


def test_arguments_given_as_text_are_that_text_and_no_more() -> None:
    [call] = HERMES.read('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1} and b"}</tool_call>')
    assert "behind it stands 'and b'" in str(call.problem) and not call.arguments


def test_calls_in_python_end_with_their_mark_whatever_the_model_says_next() -> None:
    """As LFM2 does, which tells what it is about to do behind its calls."""
    form, _ = said("python between marks", asked("python between marks"))
    calls = "<|call_start|>[find(text='a)<|b|> c', n=3), find(text='d')]<|call_end|>"
    for behind in ("", "Looking for it.", "\n<|im_end|>\n"):
        found = form.read(calls + behind)
        assert [(call.name, dict(call.arguments), call.problem) for call in found] == [
            ("find", {"text": "a)<|b|> c", "n": 3}, None),
            ("find", {"text": "d"}, None),
        ]
        assert {call.end for call in found} == {len(calls)}
