"""Programs that speak OpenAI's API: what tests of harnesses share. They run in workers, as users' own do.

The client is imported where it is used: that takes a worker longer than all that it does in a test.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp

from posttrain.core.types import Invalid, Reply, Task, Turn
from posttrain.envs.bridges.harness import PolicyEndpoint, harness

MORE = ("go on", "on")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def by_hand(task: Task) -> AsyncGenerator[Any, Reply]:
    """What the harnesses below do, as an environment."""
    reply = yield Turn(messages=[user(task["prompt"])], max_tokens=7)
    total = len(reply)
    for more in MORE:
        reply = yield Turn(messages=[user(more)], max_tokens=7)
        total += len(reply)
    yield float(total)


@harness(sampling="ignore")
async def agent(task: Task, endpoint: PolicyEndpoint) -> float:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key) as client:
        messages, total = [user(task["prompt"])], 0
        for more in (*MORE, ""):
            answer = await client.chat.completions.create(
                model="gpt-4o", messages=messages, max_completion_tokens=7, temperature=0.2, top_p=0.5
            )
            message = answer.choices[0].message
            messages += [message.model_dump(exclude_none=True), user(more)]
            total += len(message.content or "")
    return float(total)


@harness
def blocking(task: Task, endpoint: PolicyEndpoint) -> float:
    from openai import OpenAI

    with OpenAI(base_url=endpoint.url, api_key=endpoint.key) as client:
        messages, total = [user(task["prompt"])], 0
        for more in (*MORE, ""):
            answer = client.chat.completions.create(model=endpoint.model, messages=messages, max_tokens=7)
            said = answer.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": said}, user(more)]
            total += len(said)
    return float(total)


PROGRAM = """
import json, os, sys, urllib.request
messages, total = [{"role": "user", "content": sys.stdin.read()}], 0
for more in sys.argv[1:] + [""]:
    body = json.dumps({"model": "any", "messages": messages, "max_tokens": 7}).encode()
    address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    asked = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    said = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": more}]
    total += len(said)
print(total)
"""


@harness
async def program(task: Task, endpoint: PolicyEndpoint) -> float:
    ran = await endpoint.run(sys.executable, "-c", PROGRAM, *MORE, given=task["prompt"])
    return float(ran.output) if ran.code == 0 else -1.0


async def ask(endpoint: PolicyEndpoint, body: dict[str, Any], path: str = "/v1/chat/completions") -> tuple[int, Any]:
    address = endpoint.url.removesuffix("/v1") + path
    async with aiohttp.ClientSession() as session, session.post(address, json=body) as answer:
        return answer.status, await answer.json()


@harness
async def in_tokens(task: Task, endpoint: PolicyEndpoint) -> dict[str, float]:
    """As vLLM's clients do: what is rendered elsewhere goes over as token ids."""
    tokens, logp = list(task["ids"]), 0.0
    for more in ([40, 41], [42], []):
        params = {"max_tokens": 7, "logprobs": 1, "stop_token_ids": [1]}
        _, answer = await ask(endpoint, {"token_ids": tokens, "sampling_params": params}, "/inference/v1/generate")
        [choice] = answer["choices"]
        assert answer["usage"]["prompt_tokens"] == len(tokens)
        tokens += [*choice["token_ids"], *more]
        logp += sum(entry["logprob"] for entry in choice["logprobs"]["content"])
    return {"reward": 1.0, "tokens": float(len(tokens)), "logp": logp}


@harness(unfinished=0.25)
async def insatiable(task: Task, endpoint: PolicyEndpoint) -> float:
    """Asks until it gets nothing, and then does what its task says."""
    messages, count = [user(task["prompt"])], 0
    while True:
        _, answer = await ask(endpoint, {"messages": messages, "max_tokens": 5})
        [choice] = answer["choices"]
        if not answer["usage"]["completion_tokens"]:
            break
        count += 1
        messages += [choice["message"], user("on")]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] == ""
    if task["prompt"].startswith("say 1"):
        raise RuntimeError("there was no answer")
    return float(count)


@harness(overflow="error")
async def compacting(task: Task, endpoint: PolicyEndpoint) -> dict[str, float]:
    """Begins anew where its conversation no longer fits."""
    from openai import AsyncOpenAI, BadRequestError

    async with AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0) as client:
        messages, refusals, turns = [user(task["prompt"])], 0, 0
        while turns < 6:
            try:
                answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=9)
            except BadRequestError as error:
                assert error.code == "context_length_exceeded"
                messages, refusals = [user("so far")], refusals + 1
                continue
            turns += 1
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}, user("on and on and on")]
    return {"reward": 1.0, "refusals": float(refusals)}


@harness
async def failing(task: Task, endpoint: PolicyEndpoint) -> Any:
    await ask(endpoint, {"messages": [user("a")], "max_tokens": 2})
    if task["id"] == "0":
        raise ValueError("bad thing")
    if task["id"] == "1":
        await asyncio.sleep(1000)
    if task["id"] == "2":
        await endpoint.run("sleep", "1000")
    return Invalid("no verdict") if task["id"] == "3" else None


@harness
async def impatient(task: Task, endpoint: PolicyEndpoint) -> dict[str, float]:
    """Gives up its first request once the policy has it, and asks it again. Nothing is sampled before that."""
    sampling, given_up = Path(task["folder"], "sampling"), Path(task["folder"], "given up")
    body = {"messages": [user(task["prompt"])], "max_tokens": 9}
    first = asyncio.ensure_future(ask(endpoint, body))
    while not sampling.exists():
        await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.sleep(0.05)
    given_up.touch()
    _, answer = await ask(endpoint, body)
    _, other = await ask(endpoint, body)
    choices = [one["choices"][0]["message"]["content"] for one in (answer, other)]
    return {"reward": 0.0, "same": float(choices[0] == choices[1])}


@harness
async def late(task: Task, endpoint: PolicyEndpoint) -> dict[str, float]:
    """Asks at the address of an episode that there is not, and tells its own to nobody."""
    key = endpoint.url.split("/")[3]
    status, _ = await ask(PolicyEndpoint(endpoint.url.replace(key, "A" * len(key))), {"messages": [user("a")]})
    _, models = await _get(endpoint.url + "/models")
    return {"reward": 0.0, "status": float(status), "key": float(len(key)), "models": float(len(models["data"]))}


_left: set[Any] = set()


@harness
async def leaving(task: Task, endpoint: PolicyEndpoint) -> float:
    """Is over while two requests of it are under way, and makes a third one when it is told to."""
    folder = Path(task["folder"])

    async def stray(number: int) -> None:
        while number == 2 and not (folder / "over").exists():
            await asyncio.sleep(0.01)
        try:
            status, _ = await asyncio.wait_for(ask(endpoint, {"messages": [user("a")]}), 10)
        except aiohttp.ClientConnectionError:  # the server is gone altogether
            status = 410
        (folder / f"{number}.new").write_text(str(status))
        (folder / f"{number}.new").rename(folder / str(number))

    _left.update(map(asyncio.ensure_future, map(stray, range(3))))
    await asyncio.sleep(0.2)
    (folder / "left").touch()
    return 1.0


async def _get(address: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(address) as answer:
        return answer.status, await answer.json()


LOOK_UP = {
    "name": "look_up",
    "description": "Looks a word up.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
}


@harness
async def with_tools(task: Task, endpoint: PolicyEndpoint) -> dict[str, float]:
    """Answers calls of a tool, as OpenAI's clients do."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key) as client:
        messages: list[Any] = [user(task["prompt"])]
        tools: Any = [{"type": "function", "function": LOOK_UP}]
        calls, contents = 0, ""
        for _ in range(3):
            answer = await client.chat.completions.create(model="m", messages=messages, tools=tools, max_tokens=60)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            contents += message.content or ""
            if not message.tool_calls:
                break
            assert answer.choices[0].finish_reason == "tool_calls"
            for call in message.tool_calls:
                word = json.loads(call.function.arguments)["word"]  # type: ignore[union-attr]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{word} is a word"})
                calls += 1
    return {"reward": float(calls), "contents": float(len(contents))}  # "I look." and "done"
