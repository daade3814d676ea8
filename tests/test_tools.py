"""Tools of an episode: shown as schemas, called as asked, answered or refused as declared, and never called twice."""

from __future__ import annotations

import asyncio
import enum
import os
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any, Literal, Union

import pytest
from environments import one_of_many, one_of_many_waiting
from episodes import played

from posttrain import Tools, recorded
from posttrain.envs.pool import Done, EnvPool, Event
from posttrain.envs.reading import read_turn
from posttrain.envs.schemas import schema_of
from posttrain.envs.tools import ToolFailed
from posttrain.models.tokenizer import Tokenizer
from posttrain.types import Graded, Invalid, InvalidKind, Reply, ToolCall, Turn, UserError


class Unit(enum.Enum):
    CELSIUS = "c"
    FAHRENHEIT = "f"


def weather(city: str, days: int = 1, unit: Literal["c", "f"] = "c", near: list[str] | None = None) -> dict[str, Any]:
    """The weather of a city.

    Args:
        city: Which city, as it is called
            in its own language.
        days: How many days ahead.
        unit: Of temperatures.
        near: Other cities.

    Returns:
        What is known.
    """
    return {"city": city, "days": days}


def broken(word: str) -> str:
    """Always fails.

    Args:
        word: Any.
    """
    raise ValueError(f"no {word}\nat all")


async def slow(word: str) -> str:
    """Waits.

    Args:
        word: What comes back.
    """
    await asyncio.sleep(0)
    return word.upper()


def many(
    a: float, b: bool, c: dict[str, int], d: Union[int, str], e: tuple[int, str], f: Any, g: str = "x", h: int | None = None  # noqa: UP007
) -> str:  # fmt: skip
    """Of many types.

    Args:
        a: first
        b: second
        c: third
        d: fourth
        e: fifth
        f: sixth
        g: seventh (choices: ["x", "y"])
        h: eighth
    """
    return ""


def said(*calls: ToolCall, number: int = 0) -> Reply:
    return Reply("...", tool_calls=calls, number=number)


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments, 3, id="abcdefghi")


def contents(turn: Turn | None) -> list[str]:
    assert turn is not None and turn.messages is not None
    assert all(message["role"] == "tool" and message["tool_call_id"] == "abcdefghi" for message in turn.messages)
    return [message["content"] for message in turn.messages]


@pytest.mark.parametrize("function", [weather, broken, many])
def test_a_schema_is_the_one_that_templates_are_trained_with(function: Any) -> None:
    transformers = pytest.importorskip("transformers")
    assert schema_of(function) == transformers.utils.get_json_schema(function)


def untold(city: str) -> None:
    """No line on it."""


def unhinted(city) -> None:  # type: ignore[no-untyped-def]
    """Lacks a hint.

    Args:
        city: x
    """


def starred(*cities: str) -> None:
    """Takes any number.

    Args:
        cities: x
    """


def odd(city: Unit, when: set[int], what: bytes) -> None:
    """A type that JSON lacks.

    Args:
        city: x
        when: x
        what: x
    """


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (untold, "needs a line on 'city' under \"Args:\""),
        (unhinted, "needs a type hint"),
        (starred, "named parameters alone"),
        (odd, "no type that JSON has"),
        (lambda x: x, "has no name"),
        (print, "Args|type hint|named parameters"),
    ],
)
def test_a_function_that_cannot_be_shown_is_refused_with_the_reason(function: Any, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        schema_of(function)
    found = read_turn(Turn(messages=[{"role": "user", "content": "x"}], tools=[function]))
    assert isinstance(found, Invalid) and "cannot be shown" in found.reason


def test_calls_are_made_and_answered_in_order() -> None:
    tools = Tools(weather, broken)
    turn = tools.answer(said(call("weather", city="Paris"), call("weather", city="Rome", days=3)))
    assert contents(turn) == ['{"city": "Paris", "days": 1}', '{"city": "Rome", "days": 3}']
    assert [c.problem for c in tools.calls] == [None, None]
    assert tools.answer(said()) is None and tools.ended is None


PROBLEMS = [
    (call("weather", city=3), "3 is not of type 'string'"),
    (call("weather", city="x", days=True), "True is not of type 'integer'"),
    (call("weather", city="x", unit="k"), "'k' is not one of ['c', 'f']"),
    (call("weather"), "'city' is a required property"),
    (call("weather", city="x", when="now"), "'when' was unexpected"),
    (call("wheather", city="x"), "did you mean 'weather'?"),
    (ToolCall("", {}, 3, "the call is not JSON", "abcdefghi"), "not JSON"),
    (call("broken", word="luck"), "ValueError: no luck at all"),
]


@pytest.mark.parametrize(("wrong", "problem"), PROBLEMS)
def test_a_call_that_fails_is_answered_ends_the_episode_or_makes_it_invalid(wrong: ToolCall, problem: str) -> None:
    which: Any = "raising" if wrong.name == "broken" else "malformed"
    other: Any = "malformed" if wrong.name == "broken" else "raising"
    tools = Tools(weather, broken, **{which: "answer", other: "invalid"})
    right = call("weather", city="Rome")
    answers = contents(tools.answer(said(wrong, right)))
    assert answers[0].startswith("Error: ") and problem in answers[0] and "Rome" in answers[1]
    ending = Tools(weather, broken, **{which: "end", other: "invalid"})
    assert ending.answer(said(wrong, right)) is None and problem in str(ending.ended)
    assert [c.problem is None for c in ending.calls] == [False]
    with pytest.raises(ToolFailed, match=r"\w"):
        Tools(weather, broken, **{which: "invalid", other: "answer"}).answer(said(wrong, right))


def test_null_is_taken_where_a_parameter_may_be_none() -> None:
    tools = Tools(weather)
    tools.answer(
        said(call("weather", city="x", near=None), call("weather", city="x", near=["a"]), call("weather", city=None))
    )
    assert [c.problem is None for c in tools.calls] == [True, True, False]


def test_tools_that_wait_are_called_together() -> None:
    tools = Tools(slow, weather, broken)
    reply = said(call("slow", word="a"), call("broken", word="b"), call("weather", city="c"), call("slow", word="d"))
    answers = contents(asyncio.run(tools.answer_async(reply)))
    assert answers == ["A", "Error: ValueError: no b at all", '{"city": "c", "days": 1}', "D"]
    with pytest.raises(UserError, match="answer_async"):
        Tools(slow).answer(said(call("slow", word="a")))


def test_an_odd_declaration_is_refused() -> None:
    for wrong in ({"malformed": "ignore"}, {"raising": "no"}):
        with pytest.raises(UserError, match="answer, end, invalid"):
            Tools(weather, **wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="one name"):
        Tools(weather, weather)


# -- in episodes -------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<call>{\"name\": {{ c.function.name | tojson }}, \"arguments\": "
    "{{ c.function.arguments | tojson }}}</call>{% endfor %}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)  # fmt: skip


def assistant(task: dict[str, Any]) -> Generator[Turn, Reply, Any]:
    tools = Tools(weather, malformed="answer")
    reply = yield Turn(messages=[{"role": "user", "content": "w?"}], tools=tools)
    spoken = [reply]
    while turn := tools.answer(reply):
        reply = yield turn
        spoken.append(reply)
    assert [r.number for r in spoken] == list(range(len(spoken)))
    return Graded(len(spoken), [called.earns(0.5) for called in tools.calls if called.problem is None])


@pytest.fixture
def speaker() -> Tokenizer:
    backend = Tokenizer.train(["hello"], 300, special=("<call>", "</call>", "<tool>", "<user>", "<assistant>"))
    return Tokenizer(backend.backend, backend.config, TEMPLATE)


def test_a_policy_is_told_of_tools_and_its_calls_are_answered_and_paid(
    speaker: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posttrain.engines.local import LocalEngine
    from posttrain.types import Completion

    right = '<call>{"name": "weather", "arguments": {"city": "R"}}</call>'
    script = [right, "<call>{}</call>" + right, "done"]
    given: dict[int, int] = {}
    poll = LocalEngine.poll

    def scripted(self: LocalEngine) -> list[Completion]:
        found = []
        for done in poll(self):
            text = script[given.setdefault(done.id, 0)]
            given[done.id] += 1
            tokens = [*speaker.encode(text), speaker.eos_id or 0]
            found.append(Completion(done.id, tokens, [0.0] * len(tokens), text, done.stop.__class__.EOS, 0))
        return found

    monkeypatch.setattr(LocalEngine, "poll", scripted)
    rollout = played(assistant, speaker, count=1, context=2048, max_tokens=200)[0]
    assert rollout.reward == 3 + 0.5 * 2, rollout.reward
    told, *turns = rollout.turns
    shown = speaker.decode(rollout.transcripts[0].tokens[: told.length])
    assert '<tools>{"type": "function", "function": {"name": "weather"' in shown and shown.endswith(
        "<user>w?|<assistant>"
    )
    assert [turn.kind.value for turn in turns] == ["sampled", "tool", "sampled", "tool", "sampled"]
    tokens = rollout.transcripts[0].tokens
    texts = [speaker.decode(tokens[turn.start : turn.start + turn.length]) for turn in turns]
    assert texts[1] == '|<tool>{"city": "R", "days": 1}|<assistant>'
    assert texts[3].startswith("|<tool>Error: the call is {} (dict): it names no tool|<tool>{") and texts[3].endswith(
        "|<assistant>"
    )
    assert [[c.problem is None for c in turn.calls] for turn in turns] == [[True], [], [False, True], [], []]
    # each call is paid at its last token
    places = rollout.transcripts[0].scored
    ends = [int(places[place - 1]) for place, reward in rollout.steps if reward]
    assert [speaker.decode(tokens[: end + 1]).endswith("</call>") for end in ends] == [True, True]


def test_tools_belong_to_the_beginning_of_a_context_and_to_a_template_that_shows_them(
    tokenizer: Tokenizer, speaker: Tokenizer
) -> None:
    def late(task: dict[str, Any]) -> Generator[Turn, Reply, float]:
        message = [{"role": "user", "content": "w?"}]
        yield Turn(messages=message)
        yield Turn(messages=message, tools=[weather])
        return 0.0

    with pytest.raises(UserError, match="where a context begins"):
        played(late, speaker, count=1, context=2048)
    blind = Tokenizer(tokenizer.backend, tokenizer.config, "{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(UserError, match="does not show the tool 'weather'"):
        played(assistant, blind, count=1, context=2048)
    found = read_turn(Turn("text", tools=[weather]))
    assert isinstance(found, Invalid) and "need messages" in found.reason


# -- once --------------------------------------------------------------------------------------------------------------


def answers(pool: EnvPool) -> dict[int, Event]:
    found: dict[int, Event] = {}
    while pool.pending:
        found |= dict(pool.poll(20))
    return found


@pytest.mark.parametrize("env", [one_of_many, one_of_many_waiting], ids=["plain", "async"])
def test_a_lost_worker_calls_no_tool_twice(env: Any, tmp_path: Path) -> None:
    with EnvPool(env, workers=1, seconds=10) as pool:
        for id in range(3):
            pool.start(id, {"prompt": "p", "id": str(id), "folder": str(tmp_path)})
        answers(pool)
        for id in range(3):
            pool.send(id, Reply("look"))
        answers(pool)
        assert sorted(os.listdir(tmp_path)) == ["0-1", "0-2", "1-1", "1-2", "2-1", "2-2"]
        pool.send(2, Reply("die"))
        [event] = answers(pool).values()
        assert isinstance(event, Done) and isinstance(event.reward, Invalid) and event.reward.kind is InvalidKind.DIED
        for id in range(2):
            pool.send(id, Reply("look"))
        answers(pool)
        for id in range(2):
            pool.send(id, Reply("end"))
        found = answers(pool)
        # four results each, of which two were recorded before the worker was lost: all of one process, but these
        assert {id: event.rewards["calls"] for id, event in found.items() if isinstance(event, Done)} == {0: 4, 1: 4}
        assert len(os.listdir(tmp_path)) == 6 + 2 * 2


def test_what_is_recorded_has_to_be_data_and_outside_an_environment_it_is_a_call() -> None:
    assert recorded(max, 1, 2) == 2
    assert asyncio.run(recorded(slow, "a")) == "A"
    with pytest.raises(TypeError, match="JSON"):
        recorded(object)


def drawing(task: dict[str, Any]) -> Generator[str, Reply, float]:
    first = recorded(lambda: os.urandom(4).hex())
    yield first
    return 1.0


async def drawing_beside(task: dict[str, Any]) -> AsyncGenerator[Any, Any]:
    async def draw(word: str) -> str:
        return word + os.urandom(4).hex()

    yield " ".join(await asyncio.gather(*(recorded(draw, word) for word in "ab")))
    yield 1.0


@pytest.mark.parametrize("env", [drawing, drawing_beside], ids=["plain", "async"])
def test_two_episodes_record_apart(env: Any) -> None:
    for workers in (0, 1):
        with EnvPool(env, workers=workers, seconds=10) as pool:
            for id in range(4):
                pool.start(id, {"id": str(id)})
            shown = [event.text for event in answers(pool).values() if isinstance(event, Turn)]
            assert len(set(shown)) == 4
