"""Tools of an episode: shown as schemas, called as asked, answered or refused as declared, and never called twice."""

from __future__ import annotations

import asyncio
import enum
import os
import re
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any, Literal, Union

import pytest
from environments import one_of_many, one_of_many_waiting
from episodes import played

from posttrain import Tools, recorded
from posttrain.core.conversation import Conversation
from posttrain.core.types import (
    Completion,
    Graded,
    Invalid,
    InvalidKind,
    Reply,
    SpanReward,
    StopReason,
    ToolCall,
    Turn,
    UserError,
)
from posttrain.envs.play.call_recording import CURRENT, MOST_RECORDS, CallJournal
from posttrain.envs.play.env_outputs import Done, Event, read_turn
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.env_runner import AsyncEnvRunner, EnvRunner
from posttrain.envs.play.load_env import is_async
from posttrain.envs.play.tools import LONGEST_RESULT, ToolFailed
from posttrain.envs.play.worker_protocol import CallRecord, Garbled, read_answer, write_record
from posttrain.envs.tool_schemas import schema_of
from posttrain.models.tokenizer.tokenizer import Tokenizer


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
        (starred, "only with named parameters"),
        (odd, "not a type of JSON"),
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


def mixed(pair: tuple[int | None, str], level: Literal["auto", 3] = "auto") -> str:
    """Two of them.

    Args:
        pair: A number, perhaps, and a word.
        level: How much.
    """
    return "fine"


def test_null_and_choices_of_several_types_are_taken_where_they_stand_within_a_list() -> None:
    tools = Tools(mixed)
    given: list[dict[str, Any]] = [
        {"pair": [1, "a"]}, {"pair": [None, "a"]}, {"pair": [1, None]}, {"pair": [1, "a"], "level": "auto"},
        {"pair": [1, "a"], "level": 3}, {"pair": [1, "a"], "level": "3"},
    ]  # fmt: skip
    tools.answer(said(*(call("mixed", **arguments) for arguments in given)))
    assert [c.problem is None for c in tools.calls] == [True, True, False, True, True, False]


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
    from posttrain.core.types import Completion
    from posttrain.engines.local.local_engine import LocalEngine

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
    assert [turn.answered for turn in turns] == [(0, 0), (1, 0), (0, 0), (2, 1), (0, 0)], (
        "answers, and those that failed"
    )
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
    with pytest.raises(
        UserError, match=r"does not show the tool 'weather': use one that does \(--chat-template chatml\)"
    ):
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


@pytest.mark.parametrize("env", [drawing, pytest.param(drawing_beside, marks=pytest.mark.long)], ids=["plain", "async"])
def test_two_episodes_record_apart(env: Any) -> None:
    for workers in (0, 1):
        with EnvPool(env, workers=workers, seconds=10) as pool:
            for id in range(4):
                pool.start(id, {"id": str(id)})
            shown = [event.text for event in answers(pool).values() if isinstance(event, Turn)]
            assert len(set(shown)) == 4


def nesting(task: dict[str, Any]) -> Generator[str, Reply, Any]:
    """What it records records in turn."""

    def inner(word: str) -> str:
        return recorded(str.upper, word) + os.urandom(4).hex()

    found: list[str] = []
    while True:
        found += [recorded(inner, "a"), recorded(inner, "b")]
        yield " ".join(found)


async def nesting_beside(task: dict[str, Any]) -> AsyncGenerator[Any, Any]:
    async def inner(word: str) -> str:
        return await recorded(slow, word) + os.urandom(4).hex()

    found: list[str] = []
    while True:
        found += await asyncio.gather(recorded(inner, "a"), recorded(inner, "b"))
        yield " ".join(found)


def replayed(env: Any) -> tuple[str, str]:
    """What an episode shows in its first turn, and in its second where it was begun anew in between."""
    kept: dict[int, Any] = {}

    async def beside() -> list[Event]:
        stage = AsyncEnvRunner(env, records=lambda id, which, result: kept.__setitem__(which, result))
        first = await stage.start(0, {})
        await stage.start(1, {}, dict(kept))
        return [first, await stage.send(1, Reply("on"))]

    if is_async(env):
        shown = asyncio.run(beside())
    else:
        stage = EnvRunner(env, records=lambda id, which, result: kept.__setitem__(which, result))
        shown = [stage.start(0, {})]
        stage.start(1, {}, dict(kept))
        shown.append(stage.send(1, Reply("on")))
        stage.close()
    first, second = (event.text for event in shown if isinstance(event, Turn))
    return str(first), str(second)


@pytest.mark.parametrize("env", [nesting, nesting_beside], ids=["plain", "async"])
def test_what_is_recorded_within_what_is_recorded_is_part_of_it(env: Any) -> None:
    first, second = replayed(env)
    assert second.startswith(f"{first} A") and len(second.split()) == 4


async def chained(task: dict[str, Any]) -> AsyncGenerator[Any, Any]:
    """Tasks that ask twice, of which the later begun goes on first."""

    async def ask(word: str, rounds: int) -> str:
        for _ in range(rounds):
            await asyncio.sleep(0)
        return word + os.urandom(4).hex()

    async def chain(word: str, rounds: int) -> list[str]:
        return [await recorded(ask, f"{word}{number}", rounds) for number in range(2)]

    while True:
        found = await asyncio.gather(*(chain(word, 20 - 3 * n) for n, word in enumerate("abc")))
        yield " ".join(word for words in found for word in words)


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_results_come_back_to_the_calls_they_are_of_whichever_task_was_first(lost: int) -> None:
    kept: dict[int, Any] = {}

    async def shown(known: dict[int, Any]) -> list[str]:
        stage = AsyncEnvRunner(chained, seconds=20, records=lambda id, which, result: kept.__setitem__(which, result))
        event = await stage.start(0, {}, known)
        stage.drop(0)
        assert isinstance(event, Turn)
        return str(event.text).split()

    first = asyncio.run(shown({}))
    known = dict(list(kept.items())[: len(kept) - lost])  # in the order in which they came
    again = asyncio.run(shown(known))
    assert [word[:2] for word in again] == [word[:2] for word in first] == ["a0", "a1", "b0", "b1", "c0", "c1"]
    assert sum(one == other for one, other in zip(first, again, strict=True)) == len(known)


def test_a_known_result_that_is_given_up_keeps_no_other_waiting() -> None:
    async def given_up() -> str:
        CURRENT.set(CallJournal(None, {1: "first", 2: "second"}))
        recorded(int)
        gone, stays = asyncio.create_task(recorded(slow, "a")), asyncio.create_task(recorded(slow, "b"))
        await asyncio.sleep(0)
        gone.cancel()
        return await asyncio.wait_for(stays, 5)

    assert asyncio.run(given_up()) == "second"


async def in_a_thread(task: dict[str, Any]) -> AsyncGenerator[Any, Any]:
    yield await recorded(asyncio.to_thread, str.upper, "a")
    yield await asyncio.to_thread(recorded, str.upper, "a")


def test_a_result_is_recorded_in_the_thread_of_its_episode() -> None:
    with EnvPool(in_a_thread, workers=0) as pool:
        pool.start(0, {"id": "0"})
        assert answers(pool) == {0: Turn("A")}
        pool.send(0, Reply("on"))
        [event] = answers(pool).values()
    assert (
        isinstance(event, Done)
        and isinstance(event.reward, Invalid)
        and "a thread that is not its episode's" in event.reward.reason
    )


def test_an_episode_records_a_bounded_number_of_plain_results() -> None:
    kept: dict[int, Any] = {}
    journal = CallJournal(kept.__setitem__, {0: "known", 2: "later"})
    token = CURRENT.set(journal)
    try:
        given = (1, 2)
        assert recorded(lambda: "new") == "known"
        assert recorded(lambda: given) == [1, 2] and kept == {1: [1, 2]}
        with pytest.raises(ZeroDivisionError):
            CURRENT.set(CallJournal(kept.__setitem__, {1: "known"}))
            recorded(lambda: 1 / 0)
        assert recorded(lambda: "new") == "known" and 0 not in kept  # what raised is none, and has its number
        CURRENT.set(journal)
        assert recorded(lambda: "new") == "later"
        for _ in range(MOST_RECORDS - 3):
            recorded(int)
        with pytest.raises(RuntimeError, match="may record"):
            recorded(int)
    finally:
        CURRENT.reset(token)
    with pytest.raises(Garbled, match="beyond"):
        read_answer(write_record(1, MOST_RECORDS, 0)[8:])
    assert read_answer(write_record(1, MOST_RECORDS - 1, 0)[8:]) == CallRecord(1, MOST_RECORDS - 1, 0)


# -- what tools return, and what is asked of them ----------------------------------------------------------------------


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


ODD: dict[str, Any] = {
    "nan": float("nan"), "bytes": b"\xff", "none": None, "half": "a\ud800b", "halves": ["\udc00"], "keys": {(1, 2): 3},
    "huge": "x" * (LONGEST_RESULT + 1), "listed": ["x"] * LONGEST_RESULT, "set": {1}, "object": object,
}  # fmt: skip
ODD["itself"] = ODD["self"] = []
ODD["self"].append(ODD["self"])


def returning(which: str) -> Any:
    """Returns odd things.

    Args:
        which: one of them
    """
    if which == "raise":
        raise Unspeakable
    return ODD[which]


@pytest.mark.parametrize("which", [*ODD, "raise"])
def test_whatever_a_tool_returns_is_told_or_is_a_call_that_failed(which: str) -> None:
    tools = Tools(returning, raising="answer")
    turn = tools.answer(said(call("returning", which=which)))
    assert isinstance(read_turn(turn), Turn)
    failed = which in ("keys", "huge", "listed", "itself", "self", "raise")
    assert [c.problem is not None for c in tools.calls] == [failed]


def test_a_longest_result_can_be_told() -> None:
    ODD["longest"] = "x" * LONGEST_RESULT
    assert contents(Tools(returning).answer(said(call("returning", which="longest")))) == [ODD["longest"]]


def returning_what_waits(word: str) -> Any:
    """Is no coroutine function, and returns what a coroutine function does.

    Args:
        word: Any.
    """
    return slow(word)


def optional(nullable: str, other: int | None = None) -> str:
    """Has a parameter whose name is a word of schemas.

    Args:
        nullable: Any.
        other: Any.
    """
    return nullable


def test_a_parameter_may_have_a_name_that_schemas_use() -> None:
    tools = Tools(optional)
    assert contents(tools.answer(said(call("optional", nullable="a", other=None)))) == ["a"]
    tools.answer(said(call("optional", nullable=3), call("optional", nullable="a", more=1)))
    assert [c.problem is None for c in tools.calls] == [True, False, False]


def test_what_a_tool_returns_is_awaited_if_it_waits() -> None:
    tools = Tools(returning_what_waits)
    assert contents(asyncio.run(tools.answer_async(said(call("returning_what_waits", word="a"))))) == ["A"]


def test_a_call_that_ends_the_episode_is_the_last_that_is_made_and_is_not_answered() -> None:
    tools = Tools(weather, broken, raising="end")
    right = call("weather", city="R")
    assert tools.answer(said(right, call("broken", word="x"), right, number=2)) is None
    assert [c.problem is None for c in tools.calls] == [True, False] and "ValueError" in str(tools.ended)
    assert tools.answer(said()) is None
    assert tools.calls[0].earns(0.5) == SpanReward(3, 0.5, 2)
    waiting = Tools(slow, broken, raising="end")
    assert asyncio.run(waiting.answer_async(said(call("broken", word="x"), call("slow", word="a")))) is None


# -- conversations with calls ------------------------------------------------------------------------------------------


def completed(tokenizer: Tokenizer, text: str, stop: StopReason = StopReason.EOS) -> Completion:
    tokens = tokenizer.encode(text)
    return Completion(0, tokens, [0.0] * len(tokens), text, stop, 0)


def talking(tokenizer: Tokenizer) -> Conversation:
    talk = Conversation(tokenizer)
    talk.show(Turn(messages=[{"role": "user", "content": "w?"}]), None)
    return talk


def called(id: str) -> str:
    return f'<call>{{"name": "weather", "arguments": {{}}, "id": "{id}"}}</call>'


def test_no_two_calls_of_a_conversation_have_one_id(speaker: Tokenizer) -> None:
    talk = talking(speaker)
    own = "abcdefghi"
    replies = [called(own) * 2, called("call00002") + called("odd id"), called(own), called("call00001") + "<call>"]
    ids = [found.id for reply in replies for found in talk.calls(reply)]
    assert len(set(ids)) == len(ids) == 7 and ids[0] == own
    assert all(re.fullmatch("[A-Za-z0-9]{9}", id) for id in ids)
    assert talk.calls("no call") == () and talk.before_calls("no call") is None


def test_calls_of_a_branch_have_ids_of_their_own_conversation_alone(speaker: Tokenizer) -> None:
    talk, alone = talking(speaker), talking(speaker)
    first = [[call.id for call in one.calls(called("") * 2)] for one in (talk, alone)]
    branch = talk.branch()
    ids = [[call.id for call in one.calls(called("") * 2)] for one in (branch, talk, alone)]
    assert first[0] == first[1] and ids[0] == ids[1] == ids[2] and not set(ids[0]) & set(first[0])
    assert branch.messages == talk.messages


@pytest.mark.parametrize("content", ["\u2063reply\u2063", "\u2063\u2063reply\u2063\u2063 \u2063reply\u2063", "Xyzzy"])
def test_what_stands_for_a_reply_in_a_template_may_be_said_by_anyone(speaker: Tokenizer, content: str) -> None:
    for calls in ("", called("")):
        talk = talking(speaker)
        for role in ("tool" if calls else "user", "user"):
            talk.calls(calls or "hm")
            more = talk.show(Turn(messages=[{"role": role, "content": content}]), completed(speaker, calls or "hm"))
            assert speaker.decode(more) == f"|<{role}>{content}|<assistant>"


def test_messages_with_calls_are_taken_as_programs_write_them(speaker: Tokenizer) -> None:
    def asking(arguments: Any) -> list[dict[str, Any]]:
        function = {"name": "weather", "arguments": arguments}
        calls = [{"id": "abcdefghi", "type": "function", "function": function}]
        return [{"role": "assistant", "content": "so", "tool_calls": calls}, {"role": "user", "content": "and?"}]

    shown = set()
    for given in ({"city": "R"}, '{"city": "R"}'):
        for first in (True, False):
            turn = read_turn(Turn(messages=[{"role": "user", "content": "a"}, *asking(given)]))
            assert isinstance(turn, Turn) and read_turn(turn) == turn
            talk = Conversation(speaker) if first else talking(speaker)
            talk.calls("hm")
            tokens = talk.show(turn, None if first else completed(speaker, "hm"))
            shown.add(speaker.decode(tokens).removeprefix("|"))
    written = '<call>{"name": "weather", "arguments": {"city": "R"}}</call>'
    assert shown == {f"<user>a|<assistant>so{written}|<user>and?|<assistant>"}
    for wrong in ("{", "[1]", 7, [1], "[" * 5000, "1e999"):
        found = read_turn(Turn(messages=asking(wrong)))
        assert isinstance(found, Invalid) and "tool_calls" in found.reason
    for odd in (7, [1], [{}], [{"function": {"name": 3}}], [{"function": {"name": "f"}, "id": 3}]):
        found = read_turn(Turn(messages=[{"role": "assistant", "content": None, "tool_calls": odd}]))
        assert isinstance(found, Invalid) and "tool_calls" in found.reason


def test_what_a_reply_ends_with_is_not_shown_again(speaker: Tokenizer) -> None:
    stopped = Tokenizer(speaker.backend, speaker.config, TEMPLATE.replace("|{% endfor %}", "|-|-{% endfor %}", 1))
    for reply, more in (("hm|-|-", ""), ("hm|-", "|-"), ("hm", "|-|-"), ("hm|", "-|-")):
        talk = talking(stopped)
        shown = talk.show(Turn(messages=[{"role": "user", "content": "on"}]), completed(stopped, reply))
        assert stopped.decode(shown) == f"{more}<user>on|-|-<assistant>"
    cut = talking(stopped)
    last = completed(stopped, "hm|-", StopReason.LENGTH)
    assert stopped.decode(cut.show(Turn(messages=[{"role": "user", "content": "on"}]), last)).startswith("|-|-<user>")


def test_tools_that_change_within_a_context_are_refused(speaker: Tokenizer) -> None:
    user = [{"role": "user", "content": "w?"}]
    schemas = [schema_of(function) for function in (weather, broken)]
    talk = Conversation(speaker)
    talk.show(Turn(messages=user, tools=schemas[:1]), None)
    talk.show(Turn(messages=user, tools=schemas[:1]), completed(speaker, "hm"))
    with pytest.raises(UserError, match="where a context begins"):
        talk.show(Turn(messages=user, tools=schemas), completed(speaker, "hm"))
