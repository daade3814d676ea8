"""Chat templates that a user gives: a file, or ChatML by its name.

Decided here: what ChatML is for a model that was not trained on it. A turn ends with the tokenizer's own end-of-sequence
token, where it has one: that is what a policy ends its replies with, so what it sampled and what the template puts behind it
agree. Calls of tools are shown as Qwen2.5 and Hermes show them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from posttrain.core.messages import clip, one_line
from posttrain.core.types import UserError

CHATML_NAME = "chatml"
CHATML = """\
{%- set end = (eos_token or '<|im_end|>') + '\\n' %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'You may call these functions:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nA call is a JSON object with its name and arguments:\\n' }}
    {{- '<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>' + end }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' + end }}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- end }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
TRIED = {"role": "user", "content": "a question"}
"""What a template is asked to show before anything else is done with it."""


CALLED = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer", "description": ""}}, "required": ["a"]}}}  # fmt: skip
SAID: Sequence[Sequence[Mapping[str, Any]]] = (
    [{"role": "system", "content": ""}, TRIED, {"role": "assistant", "content": ""}, {"role": "user", "content": ""}],
    [TRIED, {"role": "assistant", "content": "", "tool_calls": [CALLED]}, {"role": "tool", "content": ""}],
)
"""Conversations that show what a template puts around what is said."""


def around(template: str) -> list[str]:
    """Texts of what a template puts around what is said, for a tokenizer to be trained on; what it refuses is left out."""
    from posttrain.models.tokenizer.chat_template import render

    texts = []
    for messages, tools in product(SAID, (None, [TOOL])):
        variables = {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": True,
            "eos_token": "",
            "bos_token": "",
        }
        with suppress(UserError):
            texts.append(render(template, variables))
    return texts


def read_template(given: str) -> tuple[str, str]:
    """The template that `--chat-template` names, and what it is called in messages. Raises UserError."""
    if given == CHATML_NAME:
        return CHATML, "the chat template chatml"
    from posttrain.models.tokenizer.chat_template import render

    try:
        path = Path(given).expanduser()
        if path.exists() and not path.is_file():  # a pipe would be waited for, a device read without end
            raise UserError(f"--chat-template {clip(given)} is no file: give a file of Jinja, or {CHATML_NAME}")
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # no file, not UTF-8, a name that no system takes
        raise UserError(
            f"--chat-template {clip(given)} cannot be read ({one_line(error)}): give a file of Jinja, or {CHATML_NAME}"
        ) from None
    shown = render(text, {"messages": [TRIED], "add_generation_prompt": True, "eos_token": "", "bos_token": ""}, given)
    if TRIED["content"] not in shown:
        shown = render(text, {"messages": [{**TRIED, "content": [{"type": "text", "text": TRIED["content"]}]}]}, given)
    if TRIED["content"] not in shown:
        raise UserError(
            f"--chat-template {given} shows nothing of a user's message: it has to be a chat template in Jinja"
        )
    return text, given
