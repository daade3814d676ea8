"""Programs that speak Anthropic's Messages or OpenAI's Responses: what tests of harnesses share.

The bodies are written by hand, so that these tests need no client; `anthropic_agent`, `responses_agent` and `sdk_agent` have
real ones.
"""

from __future__ import annotations

import json
from typing import Any

from harnesses import LOOK_UP, MORE, ask, user

from posttrain.core.types import Task
from posttrain.envs.bridges.harness import PolicyEndpoint, harness

TOOL = {"name": "look_up", "description": LOOK_UP["description"], "input_schema": LOOK_UP["parameters"]}
FUNCTION = {"type": "function", **LOOK_UP}


@harness
async def messages(task: Task, endpoint: PolicyEndpoint) -> float:
    """Do the same as `harnesses.by_hand`, over Messages."""
    said, total = [user(task["prompt"])], 0
    for more in (*MORE, ""):
        status, answer = await ask(endpoint, {"model": "m", "messages": said, "max_tokens": 7}, "/v1/messages")
        assert status == 200, answer
        total += sum(len(block["text"]) for block in answer["content"])
        said += [{"role": "assistant", "content": answer["content"]}, user([{"type": "text", "text": more}])]
    return float(total)


@harness
async def responses(task: Task, endpoint: PolicyEndpoint) -> float:
    """The same over Responses, all items each time."""
    return await _responses(task, endpoint, by_id=False)


@harness
async def responses_by_id(task: Task, endpoint: PolicyEndpoint) -> float:
    """The same over Responses, with the id of the one before."""
    return await _responses(task, endpoint, by_id=True)


async def _responses(task: Task, endpoint: PolicyEndpoint, by_id: bool) -> float:
    items, total, previous = [user(task["prompt"])], 0, None
    for more in (*MORE, ""):
        body = {"model": "m", "input": items, "max_output_tokens": 7, "previous_response_id": previous}
        status, answer = await ask(endpoint, body, "/v1/responses")
        assert status == 200, answer
        [message] = answer["output"]
        total += len(message["content"][0]["text"])
        if by_id:
            items, previous = [user(more)], answer["id"]
        else:
            items = [*items, message, user(more)]
    return float(total)


@harness
async def messages_with_tools(task: Task, endpoint: PolicyEndpoint) -> dict[str, float]:
    """Answers calls of a tool over Messages. Marks for a cache move with every request, as programs move them."""
    said: list[Any] = [user(task["prompt"])]
    calls, thoughts = 0, 0
    while True:
        marked = [*said[:-1], {**said[-1], "content": _marked(said[-1]["content"])}]
        body = {"model": "m", "max_tokens": 90, "system": "s", "messages": marked, "tools": [TOOL]}
        status, answer = await ask(endpoint, body, "/v1/messages")
        assert status == 200, answer
        said.append({"role": "assistant", "content": answer["content"]})
        thoughts += sum(block["type"] == "thinking" for block in answer["content"])
        used = [block for block in answer["content"] if block["type"] == "tool_use"]
        if not used:
            assert answer["stop_reason"] == "end_turn"
            return {"reward": float(calls), "thoughts": float(thoughts)}
        assert answer["stop_reason"] == "tool_use"
        said.append(user([_result(block["id"], block["input"]["word"]) for block in used]))
        calls += len(used)


def _marked(content: Any) -> list[dict[str, Any]]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    return [*blocks[:-1], {**blocks[-1], "cache_control": {"type": "ephemeral"}}]


def _result(id: str, word: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": f"{word} is a word"}


@harness
async def responses_with_tools(task: Task, endpoint: PolicyEndpoint) -> dict[str, float]:
    """Answers calls of a tool over Responses, as programs do that keep everything themselves."""
    items: list[Any] = [user(task["prompt"])]
    calls, thoughts = 0, 0
    while True:
        body = {"model": "m", "instructions": "s", "input": items, "tools": [FUNCTION], "store": False}
        status, answer = await ask(endpoint, body, "/v1/responses")
        assert status == 200, answer
        items += answer["output"]
        thoughts += sum(item["type"] == "reasoning" for item in answer["output"])
        used = [item for item in answer["output"] if item["type"] == "function_call"]
        if not used:
            return {"reward": float(calls), "thoughts": float(thoughts)}
        for item in used:
            word = json.loads(item["arguments"])["word"]
            items.append({"type": "function_call_output", "call_id": item["call_id"], "output": f"{word} is a word"})
        calls += len(used)


@harness
async def anthropic_agent(task: Task, endpoint: PolicyEndpoint) -> dict[str, float]:
    """Answers calls of a tool with Anthropic's own client, in streams."""
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url=endpoint.anthropic_url, api_key=endpoint.key, max_retries=0) as client:
        said: list[Any] = [user(task["prompt"])]
        calls, thoughts = 0, 0
        while True:
            asked: Any = {"model": "claude", "max_tokens": 90, "system": "s", "messages": said, "tools": [TOOL]}
            async with client.messages.stream(**asked) as stream:
                answer = await stream.get_final_message()
            said.append({"role": "assistant", "content": answer.content})
            thoughts += sum(block.type == "thinking" for block in answer.content)
            used = [block for block in answer.content if block.type == "tool_use"]
            if not used:
                return {"reward": float(calls), "thoughts": float(thoughts)}
            said.append(user([_result(block.id, str(block.input["word"])) for block in used]))
            calls += len(used)


@harness
async def responses_agent(task: Task, endpoint: PolicyEndpoint) -> dict[str, float]:
    """Answers calls of a tool with OpenAI's own client, by the id of the response before."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0) as client:
        items: Any = task["prompt"]
        previous, calls, thoughts = None, 0, 0
        while True:
            tools: Any = [FUNCTION]
            answer = await client.responses.create(
                model="gpt", instructions="s", input=items, tools=tools, previous_response_id=previous
            )
            previous, items = answer.id, []
            for item in answer.output:
                thoughts += item.type == "reasoning"
                if item.type == "function_call":
                    word = json.loads(item.arguments)["word"]
                    items.append(
                        {"type": "function_call_output", "call_id": item.call_id, "output": f"{word} is a word"}
                    )
            if not items:
                return {"reward": float(calls), "thoughts": float(thoughts)}
            calls += len(items)


def sdk_agent(api: str) -> Any:
    """A harness whose agent is one of OpenAI's Agents SDK, with a function as its tool; it speaks "Responses" or
    "ChatCompletions".
    """

    @harness
    async def agent(task: Task, endpoint: PolicyEndpoint) -> dict[str, float]:
        import agents
        from openai import AsyncOpenAI

        @agents.function_tool
        def look_up(word: str) -> str:
            """Look a word up."""
            return f"{word} is a word"

        async with AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0) as client:
            model = getattr(agents, f"OpenAI{api}Model")("gpt", openai_client=client)
            seeker = agents.Agent(name="seeker", instructions="s", tools=[look_up], model=model)
            ran = await agents.Runner.run(seeker, task["prompt"], run_config=agents.RunConfig(tracing_disabled=True))
        assert ran.final_output.endswith("done"), ran.final_output
        results = [item for item in ran.new_items if item.type == "tool_call_output_item"]
        thoughts = [item for item in ran.new_items if item.type == "reasoning_item" or "<think>" in str(item.raw_item)]
        return {"reward": float(len(results)), "thoughts": float(len(thoughts))}

    return agent


@harness
async def messages_branches(task: Task, endpoint: PolicyEndpoint) -> float:
    """Two turns, a helper with a conversation of its own, a third turn, and a summary that replaces them all."""

    async def tell(*said: Any, system: str = "s") -> Any:
        body = {"model": "m", "max_tokens": 9, "system": system, "messages": list(said)}
        status, answer = await ask(endpoint, body, "/v1/messages")
        assert status == 200, answer
        return {"role": "assistant", "content": answer["content"]}

    said = [user("a")]
    said += [await tell(*said), user("go")]
    said += [await tell(*said), user("on")]
    await tell(user("b"), system="helper")
    said += [await tell(*said), user("go on")]
    await tell(user("say go"), user("go on"))
    return 1.0


@harness
async def responses_branches(task: Task, endpoint: PolicyEndpoint) -> float:
    """The same over Responses."""

    async def tell(*said: Any, instructions: str = "s") -> Any:
        body = {"model": "m", "max_output_tokens": 9, "instructions": instructions, "input": list(said)}
        status, answer = await ask(endpoint, body, "/v1/responses")
        assert status == 200, answer
        return answer["output"][0]

    said = [user("a")]
    said += [await tell(*said), user("go")]
    said += [await tell(*said), user("on")]
    await tell(user("b"), instructions="helper")
    said += [await tell(*said), user("go on")]
    await tell(user("say go\ngo on"))
    return 1.0


@harness
async def chat_branches(task: Task, endpoint: PolicyEndpoint) -> float:
    """The same over Chat Completions."""

    async def tell(*said: Any, system: str = "s") -> Any:
        body = {"model": "m", "max_tokens": 9, "messages": [{"role": "system", "content": system}, *said]}
        status, answer = await ask(endpoint, body)
        assert status == 200, answer
        return answer["choices"][0]["message"]

    said = [user("a")]
    said += [await tell(*said), user("go")]
    said += [await tell(*said), user("on")]
    await tell(user("b"), system="helper")
    said += [await tell(*said), user("go on")]
    await tell(user("say go\ngo on"))
    return 1.0


@harness(overflow="error")
async def messages_refusals(task: Task, endpoint: PolicyEndpoint) -> dict[str, float]:
    """Asks for what is refused, by the run or for want of room."""
    body = {"model": "m", "max_tokens": 5, "messages": [user("a")]}
    status, sampled = await ask(endpoint, {**body, "temperature": 0.2}, "/v1/messages")
    assert status == 400 and "the run sets the sampling of replies" in sampled["error"]["message"]
    status, answer = await ask(endpoint, body, "/v1/messages")
    assert status == 200, answer
    status, full = await ask(endpoint, {**body, "messages": [user("on " * 900)]}, "/v1/messages")
    assert status == 400 and full["error"]["message"].startswith("prompt is too long") and full["type"] == "error"
    status, other = await ask(endpoint, {"input": "on " * 900}, "/v1/responses")
    assert status == 400 and other["error"]["code"] == "context_length_exceeded" and other["error"]["param"] == "input"
    return {"reward": 1.0, "tokens": float(answer["usage"]["output_tokens"])}


@harness
async def insatiable_messages(task: Task, endpoint: PolicyEndpoint) -> float:
    """Asks until it gets nothing."""
    said: list[Any] = [user(task["prompt"])]
    count = 0
    while True:
        _, answer = await ask(endpoint, {"model": "m", "max_tokens": 5, "messages": said}, "/v1/messages")
        if not answer["usage"]["output_tokens"]:
            assert answer["content"] == [] and answer["stop_reason"] == "max_tokens"
            return float(count)
        count += 1
        said += [{"role": "assistant", "content": answer["content"]}, user("on")]


@harness
async def counting(task: Task, endpoint: PolicyEndpoint) -> dict[str, float]:
    """Counts the tokens of a prompt, asks it, and counts one that cannot be rendered."""
    prompt = {"model": "m", "messages": [user(task["prompt"])], "tools": [TOOL]}
    status, counted = await ask(endpoint, prompt, "/v1/messages/count_tokens")
    assert status == 200, counted
    _, answer = await ask(endpoint, {**prompt, "max_tokens": 90}, "/v1/messages")
    status, refused = await ask(endpoint, {**prompt, "system": "unfit"}, "/v1/messages/count_tokens")
    assert status == 400 and refused["type"] == "error" and "tokens cannot be counted" in refused["error"]["message"]
    return {"reward": 1.0, "counted": counted["input_tokens"], "read": answer["usage"]["input_tokens"]}


@harness
async def only_counting(task: Task, endpoint: PolicyEndpoint) -> float:
    """Counts the tokens of a prompt and asks it."""
    prompt = {"model": "m", "messages": [user(task["prompt"])]}
    status, counted = await ask(endpoint, prompt, "/v1/messages/count_tokens")
    await ask(endpoint, {**prompt, "max_tokens": 5}, "/v1/messages")
    return float(status == 200 and type(counted["input_tokens"]) is int)


def thinking(api: str, keep: bool) -> Any:
    """A harness of two turns, which returns the thoughts of a reply with the conversation, or leaves them out."""

    @harness
    async def agent(task: Task, endpoint: PolicyEndpoint) -> float:
        said: list[Any] = [user("a")]
        for _ in range(2):
            if api == "messages":
                _, answer = await ask(endpoint, {"model": "m", "max_tokens": 90, "messages": said}, "/v1/messages")
                content = [block for block in answer["content"] if keep or block["type"] != "thinking"]
                said.append({"role": "assistant", "content": content})
            else:
                _, answer = await ask(endpoint, {"input": said}, "/v1/responses")
                said += [item for item in answer["output"] if keep or item["type"] != "reasoning"]
            said.append(user("b"))
        return 1.0

    return agent
