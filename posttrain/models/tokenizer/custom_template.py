"""Chat templates given by a user: a file, or ChatML by name.

The module defines the ChatML template for models that were not trained on it. A turn ends with the tokenizer's own
end-of-sequence token if there is one: the policy ends its replies with it, so that sampled and rendered replies agree.
Tool calls have the format of Qwen2.5 and Hermes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from posttrain.core import user_files
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
"""Messages that a template must render before it is used."""


CALLED = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer", "description": ""}}, "required": ["a"]}}}  # fmt: skip
SAID: Sequence[Sequence[Mapping[str, Any]]] = (
    [{"role": "system", "content": ""}, TRIED, {"role": "assistant", "content": ""}, {"role": "user", "content": ""}],
    [TRIED, {"role": "assistant", "content": "", "tool_calls": [CALLED]}, {"role": "tool", "content": ""}],
)
"""Conversations that reveal the text that a template puts around messages."""


def around(template: str) -> list[str]:
    """Return the texts that a template adds around messages, as training data of a tokenizer. Conversations that the
    template refuses are skipped.
    """
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
    """Return the template given by `--chat-template`, and its name for messages. Raises UserError if there is none."""
    if given == CHATML_NAME:
        return CHATML, "the chat template chatml"
    from posttrain.models.tokenizer.chat_template import render

    try:
        path = Path(given).expanduser()
        text = user_files.text(path)
    except (OSError, ValueError) as error:  # no such file, not UTF-8, an invalid name
        raise UserError(
            f"--chat-template {clip(given)} cannot be read ({one_line(error)}): give a file of Jinja, or {CHATML_NAME}"
        ) from None
    shown = render(text, {"messages": [TRIED], "add_generation_prompt": True, "eos_token": "", "bos_token": ""}, given)
    if TRIED["content"] not in shown:
        shown = render(text, {"messages": [{**TRIED, "content": [{"type": "text", "text": TRIED["content"]}]}]}, given)
    if TRIED["content"] not in shown:
        raise UserError(f"--chat-template {given} drops a user's message: give a chat template in Jinja")
    return text, given
