"""Environments behind a resources server of NeMo Gym: its tools, its follow-up messages, and its verifier's reward.

    posttrain rl --env nemo-gym,url=http://127.0.0.1:8001 --tasks example.jsonl ...

This module does over HTTP what the library's simple_agent and gymnasium_agent do (nemo_gym 0.5). The rows are those of the
library: "responses_create_params" holds the messages and the tools, and the server reads the other columns.

    /seed_session   begins an episode, whose cookies go with all further requests
    /TOOL           answers a call of the policy
    /verify         gives the reward of the whole conversation

A server without /seed_session is a GymnasiumServer: /reset begins, and /step answers each reply with a reward.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from posttrain.core.messages import clip, inline, short
from posttrain.core.thoughts import split_thoughts
from posttrain.core.types import Invalid, Reply, Task, Turn, UserError
from posttrain.engines.serving.openai_responses import read_input, read_tools, with_instructions
from posttrain.engines.serving.request_fields import RequestFields
from posttrain.engines.serving.requests import RequestRefused
from posttrain.envs.bridges.bridge import LONGEST, BridgeError, number_of, ran_out, shown

if TYPE_CHECKING:
    import aiohttp

ROW = "responses_create_params"
LARGEST = 1 << 22  # most bytes of an answer
FAILED = "_ng_failure_class"  # in an answer of /verify: the judge has failed, and its reward of 0 means nothing


async def play(
    task: Task, *, url: str = "", turns: int = 64, timeout: float = 8.0, longest: int = LONGEST
) -> AsyncGenerator[Any, Any]:
    """Run an episode. Its reward is the server's, with the parts that the server names.

    `url`: address of the resources server; default: the task's column "url"; `turns`: most replies of an episode;
    `timeout`: seconds for an answer of the server; `longest`: most characters shown of an answer.
    """
    url = url or task.get("url", "")
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise UserError("the address of the resources server is missing: --env nemo-gym,url=http://127.0.0.1:8001")
    async with _opened(url.rstrip("/"), timeout) as server:
        episode = await _begin(task, server, longest)
        try:
            turn = episode.first
            for _ in range(turns):
                episode.last_reward = 0.0  # the turn has the reward of the step before it
                reply: Reply = yield turn
                if ran_out(reply):
                    episode.conversation.cut = True
                    break
                following = await episode.after(reply)
                if following is None:
                    break
                turn = following
            earned = await episode.earned()
        finally:
            await episode.close()
    yield earned


def problem_of_row(task: Task) -> str | None:
    """Return why a row cannot be played, or None."""
    try:
        _conversation(task)
    except UserError as error:
        return str(error)
    return None


play.problem_of_row = problem_of_row  # type: ignore[attr-defined]


# -- episodes ----------------------------------------------------------------------------------------------------------


async def _begin(task: Task, server: _Server, longest: int) -> _Episode:
    """Begin an episode of the kind that the server has. Raises BridgeError, and UserError for an unreadable row."""
    conversation = _Conversation(task, longest)
    if await server.ask("/seed_session", conversation.row, missing=True) is not None:
        return _Episode(conversation, server, conversation.first())
    begun = await server.required("/reset", conversation.row)
    info = _info(begun, f"{server.url}/reset")
    return _GymnasiumEpisode(conversation, server, conversation.first(begun.get("observation")), info)


def _info(answer: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the info of an answer, with a list of objects as its tool_outputs. Raises BridgeError for another form."""
    info = answer.get("info") or {}
    outputs = (info.get("tool_outputs") or []) if isinstance(info, dict) else None
    if not isinstance(outputs, list) or not all(isinstance(output, dict) for output in outputs):
        expected = "info must be an object, and its tool_outputs a list of objects"
        raise BridgeError(f"the answer of {where} is malformed: {expected}, not {short(answer.get('info'))}")
    return {**info, "tool_outputs": outputs}


@dataclass
class _Episode:
    """An episode with tools: it ends with a reply that calls none."""

    conversation: _Conversation
    server: _Server
    first: Turn
    last_reward: float = field(default=0.0, init=False)  # reward of the last step

    async def after(self, reply: Reply) -> Turn | None:
        """Return the turn with the answers to the calls of a reply; None at the end."""
        self.conversation.read(reply)
        if not reply.tool_calls or reply.stop.truncated:
            return None
        answers, failed = [], 0
        for id, call in zip(self.conversation.call_ids, reply.tool_calls, strict=True):
            problem = call.problem or (
                "" if call.name in self.conversation.tools else f"there is no tool {clip(call.name)!r}"
            )  # fmt: skip
            if problem:
                status, text = 400, json.dumps({"error": problem})
            else:
                status, text = await self.server.post(f"/{call.name}", dict(call.arguments))
            failed += status >= 400
            answers.append((id, text))
        return self.conversation.answered(answers, failed=failed)

    async def earned(self) -> Any:
        """Return the verifier's reward, with its components as parts."""
        asked = {**self.conversation.row, "response": self.conversation.response(self.conversation.outputs)}
        found = await self.server.required("/verify", asked)
        if found.get(FAILED):
            reason = inline(str(found.get("_ng_failure_judge_error", "")))
            return Invalid(f"{self.server.url}/verify: {found[FAILED]}: {reason}")
        reward, parts = number_of(found.get("reward"), "the server's reward"), found.get("reward_components")
        if not isinstance(parts, dict) or "reward" in parts:
            return reward
        return {"reward": reward, **{name: number_of(value, f"the part {name!r}") for name, value in parts.items()}}

    async def close(self) -> None:
        """End the episode. The server forgets it by itself."""


@dataclass
class _GymnasiumEpisode(_Episode):
    """An episode of a GymnasiumServer: /step answers each reply with a reward."""

    info: Mapping[str, Any]  # of the reset

    async def after(self, reply: Reply) -> Turn | None:
        before = len(self.conversation.outputs)
        self.conversation.read(reply)
        asked = {**self.conversation.row, "response": self.conversation.response(self.conversation.outputs[before:])}
        if self.info.get("supports_step_idempotency") is True:
            asked["_ng_step_request_id"] = uuid4().hex
        step = await self.server.required("/step", asked)
        self.last_reward = number_of(step.get("reward"), "the server's reward")
        if step.get("terminated") or step.get("truncated"):
            return None
        outputs = _info(step, f"{self.server.url}/step")["tool_outputs"]
        answers = [(str(output.get("call_id", "")), str(output.get("output", ""))) for output in outputs]
        return self.conversation.answered(answers, step.get("observation"), self.last_reward)

    async def earned(self) -> float:
        return self.last_reward

    async def close(self) -> None:
        if self.info.get("supports_explicit_close") is True:
            await self.server.post("/close", {})


# -- the conversation --------------------------------------------------------------------------------------------------


def _conversation(task: Task) -> tuple[list[dict[str, Any]], tuple[dict[str, Any], ...], int | None]:
    """Return the messages, the tools and the budget of a reply of a row. Raises UserError."""
    asked = task.get(ROW)
    if not isinstance(asked, dict):
        raise UserError(f'a row of NeMo Gym needs "{ROW}", an object with "input"; it has {", ".join(task)}')
    fields = RequestFields(asked, f"{ROW}.")
    try:
        messages = with_instructions(fields.text("instructions"), read_input(fields))
        tools, seen = read_tools(fields)
        return messages, tools if seen else (), fields.whole("max_output_tokens", 1)
    except RequestRefused as problem:
        raise UserError(str(problem)) from None


@dataclass
class _Conversation:
    """An episode's messages to the policy, and the same as the output of a response for the server."""

    task: Task
    longest: int  # most characters shown of an answer
    outputs: list[dict[str, Any]] = field(default_factory=list)
    replies: int = 0
    cut: bool = False
    call_ids: dict[str, str] = field(default_factory=dict)
    """Of the last reply's calls: the server's id -> the policy's, which some formats of calls use again and again."""

    def __post_init__(self) -> None:
        self.messages, self._shown, self._budget = _conversation(self.task)
        self.tools = {tool["function"]["name"] for tool in self._shown}
        self.row = {name: value for name, value in self.task.items() if name != "url"}

    def first(self, observation: Any = None) -> Turn:
        messages = [*self.messages, *self._said(observation)]
        return Turn(messages=messages, tools=list(self._shown) or None, max_tokens=self._budget)

    def answered(
        self,
        answers: Sequence[tuple[str, str]],
        observation: Any = None,
        reward: float = 0.0,
        failed: int | None = None,
    ) -> Turn:
        """Return the turn with these answers of tools, each with the server's id of its call, and this observation."""
        texts = [(id, shown(text, self.longest)) for id, text in answers]
        self.outputs += [{"type": "function_call_output", "call_id": id, "output": text} for id, text in texts]
        said = self._said(observation)
        self.outputs += [{"type": "message", **message} for message in said]
        messages = [{"role": "tool", "tool_call_id": self.call_ids.get(id, id), "content": text} for id, text in texts]
        return Turn(messages=[*messages, *said], max_tokens=self._budget, reward=reward, failed=failed)

    def _said(self, observation: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": shown(str(observation), self.longest)}] if observation else []

    def read(self, reply: Reply) -> None:
        """Add a reply to the output of the response: thoughts, text, calls."""
        thoughts, text = split_thoughts(reply[: reply.before_calls] if reply.tool_calls else str(reply))
        if thoughts:
            summary = [{"type": "summary_text", "text": thoughts}]
            self.outputs.append({"id": f"rs_{self.replies}", "type": "reasoning", "summary": summary})
        if text or not reply.tool_calls:
            part = {"type": "output_text", "text": text, "annotations": []}
            self.outputs.append({"id": f"msg_{self.replies}", "type": "message", "role": "assistant",
                                 "status": "completed", "content": [part]})  # fmt: skip
        self.call_ids = {f"call_{self.replies}_{place}": call.id for place, call in enumerate(reply.tool_calls)}
        for id, call in zip(self.call_ids, reply.tool_calls, strict=True):
            arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
            self.outputs.append({"id": f"f{id}", "type": "function_call", "call_id": id, "name": call.name,
                                 "arguments": arguments, "status": "completed"})  # fmt: skip
        self.replies += 1
        self.cut = reply.stop.truncated

    def response(self, output: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        asked = self.task[ROW]
        return {
            "id": f"resp_{self.replies}", "object": "response", "created_at": 0, "model": "policy", "output": list(output),
            "parallel_tool_calls": True, "tool_choice": "auto", "tools": asked.get("tools") or [],
            "incomplete_details": {"reason": "max_output_tokens"} if self.cut else None,
        }  # fmt: skip


# -- the server --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _opened(url: str, timeout: float) -> AsyncIterator[_Server]:
    """Open a session with a server. The server recognises the episode by the cookies of the session."""
    import aiohttp

    jar = aiohttp.CookieJar(unsafe=True)  # also from an address without a name
    async with aiohttp.ClientSession(cookie_jar=jar, timeout=aiohttp.ClientTimeout(timeout)) as session:
        yield _Server(session, url, timeout)


@dataclass
class _Server:
    session: aiohttp.ClientSession
    url: str
    timeout: float

    async def post(self, path: str, content: Any) -> tuple[int, str]:
        """Return the status and the text of an answer. Raises BridgeError if there is none."""
        import aiohttp

        try:
            async with self.session.post(self.url + path, json=content) as answer:
                found = bytearray()
                async for chunk in answer.content.iter_any():
                    found += chunk
                    if len(found) > LARGEST:
                        raise BridgeError(f"{self.url}{path} answers more than {LARGEST:,} bytes")
                return answer.status, found.decode("utf-8", "replace")
        except TimeoutError as error:
            raise BridgeError(f"{self.url}{path} did not answer within {self.timeout:g} s") from error
        except aiohttp.ClientError as error:
            raise BridgeError(f"there is no resources server at {self.url}: {inline(str(error))}") from error

    async def ask(self, path: str, content: Any, missing: bool = False) -> dict[str, Any] | None:
        """Return an object; None where the server has no such path and `missing` allows it. Raises BridgeError."""
        status, text = await self.post(path, content)
        if status == 404 and missing:
            return None
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if status >= 400 or not isinstance(found, dict):
            raise BridgeError(f"{self.url}{path} answered {status}: {inline(text)[:200]}")
        return found

    async def required(self, path: str, content: Any) -> dict[str, Any]:
        found = await self.ask(path, content)
        assert found is not None
        return found
