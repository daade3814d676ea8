"""Tools of an MCP server inside an environment.

    # my.py
    server = Server(["python", "tools.py"])                     # or Server("http://127.0.0.1:8000/mcp")
    agent = environment(server, reward=lambda task, reply: float(reply.strip() == task["answer"]))

The policy calls by writing <tool>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool>, and gets <result>5</result>.
An environment of another form uses the server itself: `await server.tools()`, `await server.call("add", {...})`.

A worker process has one connection to a server, opened when first needed and shared by its episodes. If a server ends,
hangs or breaks the protocol, the connection is dropped with the calls in progress, and opened anew for the next call.
No call is made twice. Servers with state from earlier calls need one connection for each episode: `async with
Server(...)`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from posttrain.core.messages import clip, inline, short
from posttrain.core.types import Reply, Task, Turn, UserError
from posttrain.envs.bridges.bridge import LONGEST, BridgeError, check_choices, made, need, shown
from posttrain.envs.play.load_env import opening

need("mcp", "mcp")

OPEN, CLOSE = "<tool>", "</tool>"
MOST_PAGES = 100  # most pages of a list of tools


@dataclass(frozen=True)
class Tool:
    """Description of one tool of a server."""

    name: str
    description: str
    parameters: dict[str, Any]  # a JSON schema


@dataclass(frozen=True)
class ToolAnswer:
    """Result of a tool call; `failed`: the tool reported an error."""

    text: str
    failed: bool = False


class Server:
    """An MCP server: a command that speaks over standard input and output, or an address.

    `environment`: variables of the command, besides a few of ours (PATH, HOME ...); `folder`: its working directory;
    `timeout`: seconds for a call; `start_timeout`: seconds for its start; `longest`: most characters shown of an
    answer.
    """

    def __init__(
        self,
        command: Sequence[str] | str,
        *,
        environment: Mapping[str, str] | None = None,
        folder: str | Path | None = None,
        timeout: float = 6.0,
        start_timeout: float = 30.0,
        longest: int = LONGEST,
    ) -> None:
        if isinstance(command, str) and not command.startswith(("http://", "https://")):
            raise UserError(
                f'a server must be an address or a list of words, ["python", "tools.py"], not {short(command)}'
            )
        self.command = command if isinstance(command, str) else list(command)
        self.environment, self.folder = dict(environment or {}), folder
        self.timeout, self.start_timeout, self.longest = timeout, start_timeout, longest
        self._connections: WeakKeyDictionary[asyncio.AbstractEventLoop, _Connection] = WeakKeyDictionary()

    async def tools(self) -> list[Tool]:
        """Return the tools of the server. Raises BridgeError if it does not answer."""
        return list((await self._connection().opened())[1].values())

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Call a tool and return its answer; for an unknown or failing tool, an error text.

        Raises BridgeError if the server fails.
        """
        connection = self._connection()
        client, tools = await connection.opened()
        if name not in tools:
            return ToolAnswer(f"there is no tool {clip(name)!r}; there are: {', '.join(tools)}", True)
        found = await connection.within(self.timeout, name, client.call_tool(name, dict(arguments)))
        return (
            found
            if isinstance(found, ToolAnswer)
            else ToolAnswer(shown(_text(found), self.longest), bool(found.is_error))
        )

    async def close(self) -> None:
        """Close the connection of this event loop, and with it the process of a command."""
        connection = self._connections.pop(asyncio.get_running_loop(), None)
        if connection is not None:
            connection.stop.set()
            await asyncio.wait({connection.task})

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without connections: a copy in another process has its own."""
        return {name: value for name, value in vars(self).items() if name != "_connections"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._connections = WeakKeyDictionary()

    def __str__(self) -> str:
        command = self.command if isinstance(self.command, str) else " ".join(self.command)
        return f"the server {clip(command, 100)!r}"

    def _connection(self) -> _Connection:
        loop = asyncio.get_running_loop()
        connection = self._connections.get(loop)
        if connection is None or connection.stop.is_set():
            connection = self._connections[loop] = _Connection(self)
        return connection


class _Connection:
    """A connection and the task that opens and closes it, as the library requires one task for both."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.stop = asyncio.Event()
        self.answers = 0  # number of answers received
        self._ready: asyncio.Future[tuple[Any, dict[str, Tool]]] = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())  # in case nothing awaits it
        self.task = asyncio.get_running_loop().create_task(self._hold())

    async def opened(self) -> tuple[Any, dict[str, Tool]]:
        """Return the library's client, and the tools by name. Raises BridgeError."""
        try:
            async with asyncio.timeout(self.server.start_timeout):
                return await asyncio.shield(self._ready)
        except TimeoutError:
            self.stop.set()
            raise BridgeError(f"{self.server} did not start within {self.server.start_timeout:g} s") from None

    async def within(self, timeout: float, name: str, call: Any) -> Any:
        """Return the result of a call, or the server's error as a ToolAnswer. Raises BridgeError."""
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED

        before = self.answers
        task = asyncio.get_running_loop().create_task(call)
        try:
            done, _ = await asyncio.wait({task}, timeout=timeout)
        finally:
            task.cancel()  # not awaited: a server that does not read may delay the cancellation
        if not done:
            if self.answers == before:  # no other call was answered either
                self.stop.set()
            raise BridgeError(f"the tool {name} did not answer within {timeout:g} s")
        try:
            found = task.result()
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                self.stop.set()
                raise BridgeError(f"the server ended during a call of {name}") from error
            found = ToolAnswer(shown(error.message, self.server.longest), True)
        except Exception as error:  # the library has many exceptions for invalid results
            raise BridgeError(f"the answer of {name} is malformed: {inline(str(error))}") from error
        self.answers += 1
        return found

    async def _hold(self) -> None:
        reason = "it was closed"
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self.server.start_timeout):
                    client = await stack.enter_async_context(_client(self.server))
                    tools = await _listed(client)
                self._ready.set_result((client, tools))
                await self.stop.wait()
        except Exception as error:  # callers that wait have timeouts of their own
            reason = inline(f"{type(error).__name__}: {error}")
        finally:
            self.stop.set()
            if not self._ready.done():
                self._ready.set_exception(BridgeError(f"{self.server} cannot be used: {reason}"))


def _client(server: Server) -> Any:
    from mcp import Client, StdioServerParameters

    logging.getLogger("mcp").setLevel(logging.CRITICAL)  # it would log a page for each invalid line of a server
    if isinstance(server.command, str):
        return Client(server.command)
    program, *arguments = server.command
    return Client(
        StdioServerParameters(command=program, args=arguments, env=server.environment or None, cwd=server.folder)
    )


async def _listed(client: Any) -> dict[str, Tool]:
    tools: dict[str, Tool] = {}
    cursor = None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools |= {tool.name: Tool(tool.name, tool.description or "", dict(tool.input_schema)) for tool in page.tools}
        cursor = page.next_cursor
        if cursor is None:
            break
    return tools


def _text(result: Any) -> str:
    """Return the text of a result, with the type of each content block that is not text."""
    parts = [block.text if block.type == "text" else f"[{block.type}]" for block in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


# -- an environment ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agent:
    """An environment in which the policy calls a server's tools, and whose last reply is scored."""

    server: Server
    reward: Callable[[Task, str], Any]  # scores the first reply without a call; may be async
    calls: int = 8  # most calls that are answered; the next reply is the last
    malformed: Literal["answer", "end"] = "answer"  # an invalid call gets an error text, or ends the episode with 0
    failure: Literal["invalid", "answer", "end"] = "invalid"
    """If the server fails: an invalid reward, "error" as the answer, or the end with 0."""

    def __post_init__(self) -> None:
        check_choices(self, malformed=("answer", "end"), failure=("invalid", "answer", "end"))

    async def __call__(self, task: Task) -> AsyncGenerator[Any, Any]:
        turn = _with_tools(opening(task), await self.server.tools())
        reply: Reply = yield turn
        for _ in range(int(task.get("calls", self.calls))):
            if not reply.endswith(CLOSE):
                break
            answer = await self._answer(reply)
            if answer is None:
                yield 0.0
                return
            reply = yield Turn(text=f"<result>{answer}</result>\n", tool=True, stop=turn.stop)
        verdict = self.reward(task, reply)
        yield (await verdict) if inspect.isawaitable(verdict) else verdict

    async def _answer(self, reply: str) -> str | None:
        """Return the tool's answer to the policy; None ends the episode.

        Raises BridgeError if a failure makes it invalid.
        """
        try:
            name, arguments = read_call(reply)
        except ValueError as error:
            return None if self.malformed == "end" else f"error: {error}"
        try:
            answer = await self.server.call(name, arguments)
        except BridgeError:
            if self.failure == "invalid":
                raise
            return None if self.failure == "end" else "error: the tool cannot be used"
        return f"error: {answer.text}" if answer.failed else answer.text


def environment(server: Server, reward: Callable[[Task, str], Any], **settings: Any) -> Agent:
    """Return the environment of a server's tools. `settings`: fields of `Agent`."""
    return made(Agent, "...", server=server, reward=reward, **settings)


def read_call(reply: str) -> tuple[str, dict[str, Any]]:
    """Parse the call at the end of a reply: (tool's name, arguments). Raises ValueError with a text for the policy.

    >>> read_call('I add. <tool>{"name": "add", "arguments": {"a": 2}}</tool>')
    ('add', {'a': 2})
    """
    _, opened, text = reply.removesuffix(CLOSE).rpartition(OPEN)
    form = f'write {OPEN}{{"name": "...", "arguments": {{...}}}}{CLOSE}'
    if not opened:
        raise ValueError(f"this call was not opened; {form}")
    try:
        call = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise ValueError(f"this call is not JSON; {form}") from None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError(f"this call names no tool; {form}")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict) or set(call) - {"name", "arguments"}:
        raise ValueError(f"this call has no arguments by their names; {form}")
    return call["name"], arguments


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


def _with_tools(turn: Turn, tools: Sequence[Tool]) -> Turn:
    """Return the first turn with the description of the tools before it."""
    text = "Tools:\n" + "\n".join(f"- {_signature(tool)}: {tool.description}" for tool in tools)
    text += f'\nCall one with {OPEN}{{"name": "...", "arguments": {{...}}}}{CLOSE}.\n'
    stop = (*turn.stop, CLOSE)
    if turn.messages is None:
        return replace(turn, text=f"{text}{turn.text}", stop=stop)
    return replace(turn, messages=[{"role": "system", "content": text}, *turn.messages], stop=stop)


def _signature(tool: Tool) -> str:
    """Describe a tool and its parameters in a line.

    A parameter has its type where that is complete, else its schema.
    """
    properties, needed = tool.parameters.get("properties") or {}, tool.parameters.get("required") or ()
    parts = []
    for name, schema in properties.items():
        said = {key: value for key, value in schema.items() if key != "title"} if isinstance(schema, dict) else {}
        kind = said["type"] if said.keys() == {"type"} else json.dumps(said, ensure_ascii=False)
        parts.append(f"{name}{'' if name in needed else '?'}: {kind}")
    return f"{tool.name}({', '.join(parts)})"
