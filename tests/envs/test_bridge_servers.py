"""Tools of MCP servers and environments of OpenEnv servers: real ones, and servers that hang, die or answer rubbish."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from places import TESTS
from scripted import scripted, scripted_async
from websockets.asyncio.server import serve

from posttrain.core.types import Invalid, Reply, StopReason, Turn, UserError
from posttrain.envs.bridges import openenv
from posttrain.envs.bridges.bridge import BridgeError
from posttrain.envs.bridges.mcp_tools import Server, ToolAnswer, environment, read_call
from posttrain.envs.play.env_outputs import Done
from posttrain.envs.play.env_pool import EnvPool

HERE = TESTS / "helpers"
REAL = [sys.executable, str(HERE / "mcp_server.py")]
BAD = [sys.executable, "-S", str(HERE / "bad_mcp_server.py")]


def call(name: str, **arguments: Any) -> str:
    return f"<tool>{json.dumps({'name': name, 'arguments': arguments})}</tool>"


def exact(task: dict[str, Any], reply: str) -> float:
    return float(reply.strip() == task["answer"])


# -- MCP ---------------------------------------------------------------------------------------------------------------


def test_tools_of_a_real_server_answer_within_an_episode_and_a_dead_one_begins_anew() -> None:
    server = Server(REAL, timeout=30)
    env = environment(server, exact)

    async def episodes() -> None:
        found = await scripted_async(env, {"prompt": "2+3? ", "answer": "5"}, [call("add", a=2, b=3), "5"])
        assert found.reward == 1.0 and found.texts[1] == "<result>5</result>\n"
        assert found.texts[0].endswith("2+3? ")
        assert "- add(a: integer, b: integer): The sum of two whole numbers.\n" in found.texts[0]
        assert [turn.tool for turn in found.shown] == [False, True] and found.shown[1].stop == ("</tool>",)
        wrong = [call("add", a="x"), call("fail", reason="no luck"), call("subtract", a=1), "5"]
        told = await scripted_async(env, {"messages": [{"role": "user", "content": "?"}], "answer": "5"}, wrong)
        assert told.reward == 1.0 and told.shown[0].messages is not None
        assert [m["role"] for m in told.shown[0].messages] == ["system", "user"]
        assert "valid integer" in told.texts[1] and "error: " in told.texts[2]
        assert "there is no tool 'subtract'; there are: add, fail, die" in told.texts[3]
        with pytest.raises(BridgeError, match="ended during a call of die"):
            await server.call("die", {})
        assert await server.call("add", {"a": 1, "b": 1}) == ToolAnswer("2")
        assert [tool.name for tool in await server.tools()] == ["add", "fail", "die"]
        await server.close()

    asyncio.run(episodes())


@pytest.fixture(autouse=True)
def short_goodbyes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs is not given two seconds to end by itself."""
    monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 0.1)
    monkeypatch.setattr("mcp.client.stdio.FORCE_KILL_TIMEOUT", 0.1)


BROKEN = {
    "hang": "did not answer within 0.6 s", "die": "ended during a call of die", "rubbish": "did not answer",
    "no_result": "the answer of no_result is malformed", "wrong_id": "did not answer", "endless": "did not answer",
}  # fmt: skip
"""What a server does -> what is said of it."""


def test_a_server_that_misbehaves_costs_the_episode_what_was_declared() -> None:
    async def episodes(tool: str, reason: str) -> None:
        bad = Server(BAD, timeout=0.6)
        task, replies = {"prompt": "?", "answer": "5"}, [call(tool), call("echo", a=1), "5"]
        invalid = await scripted_async(environment(bad, exact), task, replies)
        assert isinstance(invalid.reward, Invalid) and reason in invalid.reason and len(invalid.shown) == 1
        bad.timeout = 6  # the next server may be slow to begin
        told = await scripted_async(environment(Slow(bad, tool), exact, failure="answer"), task, replies)
        assert told.reward == 1.0
        assert told.texts[1:] == ["<result>error: the tool cannot be used</result>\n", '<result>{"a": 1}</result>\n']
        ended = await scripted_async(environment(Slow(bad, tool), exact, failure="end"), task, replies)
        assert ended.reward == 0.0 and len(ended.shown) == 1
        await bad.close()

    async def all_at_once() -> None:
        await asyncio.gather(*(episodes(*case) for case in BROKEN.items()))

    began = time.perf_counter()
    asyncio.run(all_at_once())
    assert time.perf_counter() - began < 60


class Slow(Server):
    """A server that is given little time for one tool alone."""

    def __init__(self, server: Server, tool: str) -> None:
        super().__init__(server.command)
        self.server, self.tool = server, tool

    async def tools(self) -> list[Any]:
        return await self.server.tools()

    async def call(self, name: str, arguments: Any) -> ToolAnswer:
        self.server.timeout = 0.6 if name == self.tool else 6.0
        return await self.server.call(name, arguments)


def test_answers_are_shown_as_text_of_bounded_length_whatever_they_are() -> None:
    bad = Server(BAD, timeout=6, longest=200)

    async def answers() -> dict[str, ToolAnswer]:
        found = {tool: await bad.call(tool, {}) for tool in ("odd", "many", "picture")}
        await bad.close()
        return found

    found = asyncio.run(answers())
    assert found["odd"] == ToolAnswer("not like that", failed=True) and found["picture"] == ToolAnswer("[image]")
    assert len(found["many"].text) < 210 and found["many"].text.endswith("end")


def test_a_slow_call_does_not_take_the_others_of_its_connection_with_it() -> None:
    """Where one tool hangs and others answer meanwhile, the server is kept."""
    server = Server(BAD, timeout=3)

    async def calls() -> None:
        await server.tools()
        connection = server._connections[asyncio.get_running_loop()]
        many = await asyncio.gather(*(server.call("echo", {"a": i}) for i in range(20)))
        assert many == [ToolAnswer(f'{{"a": {i}}}') for i in range(20)]
        hanging = asyncio.create_task(connection.within(0.3, "slow", asyncio.sleep(100)))
        await asyncio.sleep(0.05)
        await server.call("echo", {})
        with pytest.raises(BridgeError, match="slow did not answer"):
            await hanging
        assert server._connections[asyncio.get_running_loop()] is connection and not connection.stop.is_set()
        with pytest.raises(BridgeError):
            await connection.within(0.05, "slow", asyncio.sleep(100))
        assert connection.stop.is_set()  # nobody was answered meanwhile
        await server.close()

    asyncio.run(calls())


@pytest.mark.parametrize("command", [["/no/such/program"], [sys.executable, "-c", "print('hello')"], [*BAD, "silent"]])
def test_a_server_that_does_not_start_is_told_with_its_command(command: list[str]) -> None:
    async def fails() -> str:
        server = Server(command, start_timeout=1.0)
        with pytest.raises(BridgeError) as raised:
            await server.tools()
        await server.close()
        return str(raised.value)

    told = asyncio.run(fails())
    assert ("cannot be used" in told or "did not start within 1 s" in told) and command[0][:30] in told


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("</tool>", "not opened"), ("<tool></tool>", "not JSON"), ("<tool>add(2, 3)</tool>", "not JSON"),
        ("<tool>[1]</tool>", "names no tool"), ('<tool>{"name": 5}</tool>', "names no tool"),
        ("<tool>5</tool>", "names no"),
        ('<tool>{"name": "add", "arguments": [2, 3]}</tool>', "by their names"),
        ("<tool>" + "[" * 5000 + "</tool>", "not JSON"),
        ('<tool>{"name": "add", "x": 1}</tool>', "by their names"),
        ('<tool>{"name": "a", "arguments": {"b": NaN}}</tool>', "JSON"),
    ],
)  # fmt: skip
def test_a_malformed_call_is_answered_or_ends_the_episode(reply: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_call(reply)
    assert read_call('<tool>{"name": "x"}</tool> and <tool>{"name": "add", "arguments": {}}</tool>') == ("add", {})
    env = environment(Listing(), exact)
    told = scripted(env, {"prompt": "?", "answer": "5"}, [reply, "5"])
    assert told.reward == 1.0 and told.texts[1].startswith("<result>error: this call") and reason in told.texts[1]
    ends = environment(Listing(), exact, malformed="end")
    assert scripted(ends, {"prompt": "?", "answer": "5"}, [reply, "5"]).reward == 0.0


class Listing(Server):
    """Has no tools: nothing is ever asked of it."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")

    async def tools(self) -> list[Any]:
        return []


def test_calls_are_bounded_and_the_reply_after_the_last_answer_is_scored() -> None:
    env = environment(Listing(), exact, calls=2)
    assert len(scripted(env, {"prompt": "?", "answer": "5"}, [], then="<tool></tool>").shown) == 3
    assert len(scripted(env, {"prompt": "?", "answer": "5", "calls": 0}, [], then="<tool></tool>").shown) == 1

    async def waits(task: Any, reply: str) -> float:
        await asyncio.sleep(0)
        return 0.25

    assert scripted(environment(Listing(), waits), {"prompt": "?"}, ["x"]).reward == 0.25
    for wrong in ({"failure": "no"}, {"malformed": "no"}, {"colour": 1}):
        with pytest.raises(UserError):
            environment(Listing(), exact, **wrong)
    with pytest.raises(UserError, match="list of words"):
        Server("python server.py")


def test_in_a_worker_the_server_is_shared_by_episodes_and_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(
        "from posttrain.envs.bridges.mcp_tools import Server, environment\n"
        f"server = Server({BAD!r}, timeout=5)\n"
        "agent = environment(server, lambda task, reply: float(reply == '5'))\n"
    )
    pids: set[int] = set()
    with EnvPool(f"{tmp_path / 'my.py'}:agent", workers=1, seconds=30) as pool:
        for id in range(3):
            pool.start(id, {"prompt": "?"})
        for reply in (call("echo", a=1), "5"):
            for id in received(pool):
                pool.send(id, Reply(reply))
            pids |= processes(BAD[-1])
        while pool.pending:
            assert all(event == Done(1.0) for _, event in pool.poll(20))
    assert len(pids) == 1
    end = time.monotonic() + 10
    while processes(BAD[-1]) & pids:
        assert time.monotonic() < end, "the server outlives its worker"
        time.sleep(0.05)


def received(pool: EnvPool) -> list[int]:
    found: dict[int, Any] = {}
    while pool.pending:
        found |= dict(pool.poll(20))
    assert all(isinstance(event, Turn) for event in found.values()), found
    return list(found)


def processes(script: str) -> set[int]:
    """Of this machine, those that run this script."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                if script.encode() in Path("/proc", entry, "cmdline").read_bytes().split(b"\0"):
                    found.add(int(entry))
    return found


# -- OpenEnv -----------------------------------------------------------------------------------------------------------


def python_of_openenv() -> str | None:
    """An interpreter that has the library: the one of `make test-openenv`, or one that is named."""
    named = os.environ.get("POSTTRAIN_OPENENV_PYTHON", str(HERE.parent / ".venv-openenv" / "bin" / "python"))
    return named if Path(named).exists() else None


@pytest.fixture(scope="module")
def real() -> Iterator[str]:
    """The address of a real server."""
    python = python_of_openenv()
    if python is None:
        pytest.skip("needs an environment with openenv-core: make test-openenv")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    server = subprocess.Popen([python, str(HERE / "openenv_server.py"), str(port)], env=environment)
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end and server.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def number(reply: str) -> dict[str, int] | None:
    return {"number": int(reply)} if reply.strip().lstrip("-").isdecimal() else None


@pytest.mark.long
def test_a_game_of_a_real_server_is_played_with_the_tasks_seed(real: str) -> None:
    env = openenv.environment(real, action=number, invalid_reward=-0.125)
    played = scripted(env, {"seed": 7}, ["3", "x", "-4", "9", "7"])
    assert played.reward == 0.75
    assert [text.strip() for text in played.texts][:3] == ["A number below 10.", "higher", "That is no action."]
    assert "greater than or equal to 0" in played.texts[3] and played.texts[4] == "\nlower\n"
    assert scripted(env, {"seed": 27, "reset": {"most": 30}}, ["27"]).reward == 1.0
    text = openenv.environment(real, action="number", observe="hint")
    assert scripted(text, {"seed": 7}, ["7 apples", "7"]).reward == 1.0
    ends = openenv.environment(real, action="number", invalid="end", invalid_reward=-1.0)
    assert scripted(ends, {"seed": 7}, ["7 apples", "7"]).reward == -1.0
    assert scripted(openenv.play, {"url": real, "action": "number", "seed": 3}, ["3"]).reward == 1.0


@pytest.mark.long
def test_a_real_server_that_fails_or_is_full_is_told(real: str) -> None:
    env = openenv.environment(real, action=number)
    assert "the game breaks" in scripted(env, {"seed": 7}, ["99"]).reason
    assert scripted(openenv.environment(real, action=number, failure="end"), {"seed": 7}, ["99"]).reward == 0.0
    assert "no 'sound'; it has hint" in scripted(openenv.environment(real, observe="sound"), {"seed": 1}, []).reason

    async def many() -> list[Any]:
        games = [scripted_async(env, {"seed": seed}, [str(seed)]) for seed in range(6)]
        return [game.reward for game in await asyncio.gather(*games)]

    assert asyncio.run(many()) == [1.0] * 6  # two at once: the others wait

    async def full() -> str:
        held = [openenv._Session(env) for _ in range(2)]
        for session in held:
            await session.begin({"seed": 1})
        waits = openenv.environment(real, action=number, timeout=0.5)
        found = await scripted_async(waits, {"seed": 1}, ["1"])
        for session in held:
            await session.close()
        return found.reason

    assert "refused the reset" in asyncio.run(full())


GOOD = json.dumps({"type": "observation", "data": {"observation": {"text": "hello"}, "reward": 0.5, "done": False}})
LAST = json.dumps({"type": "observation", "data": {"observation": {"a": 1, "b": [2]}, "reward": 1, "done": True}})


def observation(**data: Any) -> str:
    return json.dumps({"type": "observation", "data": {"observation": {"text": "x"}, "done": True, **data}})


@asynccontextmanager
async def saying(*answers: str | bytes | None) -> AsyncIterator[str]:
    """A server that gives these answers in turn: None closes the connection, "hang" says nothing more."""

    async def handle(connection: Any) -> None:
        for answer in answers:
            await connection.recv()
            if answer is None:
                return
            if answer == "hang":
                await connection.wait_closed()
            await connection.send(answer)
        with suppress(Exception):
            await connection.recv()

    async with serve(handle, "127.0.0.1", 0) as server:
        yield f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("hang", "did not answer within 0.5 s"), (None, "closed the connection"), ("}{", "not a message of OpenEnv"),
        ("[]", "not a message"),
        (b"\xff\xfe", "not a message"), ('{"type": "state", "data": {}}', "not a message"),
        ('{"type": "observation"}', "not a message"),
        ('{"type": "observation", "data": {}}', "a malformed observation"),
        (observation(observation=5), "a malformed observation"),
        (observation(done="yes"), "a malformed observation"),
        (observation(reward="much"), "not a finite number"),
        (observation(reward=float("nan")), "not a finite number"),
        ("[" * 100_000, "not a message"), ("x" * 5_000_000, "closed the connection"),
        ('{"type": "error", "data": {"message": "no", "code": 5}}', "failed: no"),
        ('{"type": "error", "data": {"code": []}}', "no reason"),
    ],
)  # fmt: skip
def test_a_server_that_answers_rubbish_is_invalid_or_ends_the_episode(answer: Any, reason: str) -> None:
    seconds = 0.5 if answer == "hang" else 20  # a busy machine may answer late; only what hangs is waited for

    async def episodes() -> None:
        async with saying(GOOD, answer) as url:
            found = await scripted_async(openenv.environment(url, timeout=seconds), {"seed": 1}, ["a", "b"])
            assert isinstance(found.reward, Invalid) and reason in found.reason, found.reason
            assert found.texts == ["hello\n"]
            ends = openenv.environment(url, timeout=seconds, failure="end", invalid_reward=-0.25)
            assert (await scripted_async(ends, {"seed": 1}, ["a", "b"])).reward == -0.25
        async with saying(answer) as url:
            begins = await scripted_async(openenv.environment(url, timeout=seconds), {"seed": 1}, ["a"])
            assert isinstance(begins.reward, Invalid) and not begins.shown

    asyncio.run(episodes())


def test_a_reward_before_an_episode_runs_out_counts_once() -> None:
    async def handle(connection: Any) -> None:
        for answer in (GOOD, GOOD):
            await connection.recv()
            await connection.send(answer)
        await connection.recv()

    async def episode() -> Any:
        async with serve(handle, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
            return await scripted_async(openenv.environment(url), {"seed": 5}, ["one", Reply("", StopReason.TURNS)])

    played = asyncio.run(episode())
    assert [turn.reward for turn in played.shown] == [0.0, 0.5] and played.reward == 0.5


@pytest.mark.parametrize(("code", "tries"), [("FACTORY_ERROR", range(1, 2)), ("CAPACITY_REACHED", range(2, 9))])
def test_only_a_server_that_is_full_is_asked_again(code: str, tries: range) -> None:
    connections: list[Any] = []

    async def handle(connection: Any) -> None:
        connections.append(connection)
        await connection.send(json.dumps({"type": "error", "data": {"message": "no", "code": code}}))

    async def episode() -> Any:
        async with serve(handle, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
            return await scripted_async(openenv.environment(url, timeout=0.5), {"seed": 5}, ["one"])

    assert "refused the reset: no" in asyncio.run(episode()).reason
    assert len(connections) in tries


def test_what_is_asked_is_the_protocol_and_what_is_shown_the_observation() -> None:
    asked: list[Any] = []

    async def handle(connection: Any) -> None:
        for answer in (GOOD, GOOD, LAST):  # what the first says of a reward is not counted
            asked.append(json.loads(await connection.recv()))
            await connection.send(answer)
        asked.append(json.loads(await connection.recv()))

    async def episode() -> Any:
        async with serve(handle, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}/"
            env = openenv.environment(url, reset={"level": 2}, stop=("\n",), prompt="Play.")
            return await scripted_async(env, {"seed": 5}, ["one", "two"])

    played = asyncio.run(episode())
    assert asked == [
        {"type": "reset", "data": {"seed": 5, "level": 2}},
        {"type": "step", "data": {"message": "one"}},
        {"type": "step", "data": {"message": "two"}},
        {"type": "close"},
    ]
    assert played.texts == ["Play.\nhello\n", "\nhello\n"] and played.shown[1].reward == 0.5 and played.reward == 1.5


def test_observations_are_shown_by_field_function_or_whole() -> None:
    session = openenv._Session(openenv.environment("http://x", observe=lambda seen: "/".join(seen)))
    assert session._text({"a": 1, "b": 2}) == "a/b"
    whole = openenv._Session(openenv.environment("http://x"))
    assert whole._text({"a": 1}) == '{"a": 1}' and whole._text({"a": "only"}) == "only"
    assert openenv._Session(openenv.environment("http://x", observe="b"))._text({"a": 1, "b": [2]}) == "[2]"


def test_without_a_server_or_an_address_it_is_told() -> None:
    assert (
        "there is no OpenEnv server at http://127.0.0.1:1"
        in scripted(openenv.play, {"url": "http://127.0.0.1:1"}, []).reason
    )
    assert 'column "url"' in scripted(openenv.play, {}, []).reason
    for wrong in ({"url": "127.0.0.1:8000"}, {"url": "http://x", "turns": 0}, {"url": "http://x", "level": 1}):
        with pytest.raises(UserError):
            openenv.environment(**wrong)
