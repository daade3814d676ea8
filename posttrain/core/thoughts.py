"""The thoughts of a reply in the format of reasoning models: <think>, thoughts, </think>, and the text for the reader.

Many chat templates open <think> themselves, so a reply may begin within its thoughts. A message of a row may also hold
the thoughts separately from its content, under one of the names in `REASONING`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OPENS, CLOSES = "<think>", "</think>"
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message's thoughts: of DeepSeek's API, Qwen's and GLM's templates; of vLLM and OpenRouter; of GPT-OSS."""


def split_thoughts(reply: str) -> tuple[str, str]:
    """Return (thoughts, text) of a reply, the thoughts without the white space around them. Without thoughts, the text
    is the whole reply.

    >>> split_thoughts("<think>hm</think> yes")
    ('hm', 'yes')
    >>> split_thoughts("yes")
    ('', 'yes')
    """
    before, closed, text = reply.rpartition(CLOSES)
    if not closed:
        if not text.lstrip().startswith(OPENS):
            return "", text
        before, text = text, ""  # the reply was cut off within its thoughts
    return before.strip().removeprefix(OPENS).strip(), text.lstrip()


def with_thoughts(thoughts: str, text: str) -> str:
    """Return the reply of these thoughts and this text, in the form that chat templates expect.

    >>> with_thoughts("hm", "yes")
    '<think>\\nhm\\n</think>\\n\\nyes'
    """
    return f"{OPENS}\n{thoughts}\n{CLOSES}\n\n{text}" if thoughts else text


def same_reply(one: str, other: str) -> bool:
    """Return whether two replies are equal but for white space around their thoughts and their text.

    >>> same_reply("hm\\n</think>\\n\\nyes", "<think>hm</think>yes")
    True
    """
    return _words(one) == _words(other)


def _words(reply: str) -> tuple[str, str]:
    thoughts, text = split_thoughts(reply)
    return thoughts, text.strip()


def reasoning_of(message: Mapping[str, Any]) -> str | None:
    """Return the thoughts that a message holds separately from its content; None if it has none."""
    return next((message[name] for name in REASONING if isinstance(message.get(name), str)), None)


def without_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message without its separate thoughts."""
    return {name: value for name, value in message.items() if name not in REASONING}


def taken_apart(content: str) -> tuple[str | None, str]:
    """Return (thoughts, rest) of a message's content; thoughts are None where the content begins with none.

    As in the templates of Qwen3, only line ends around the two are dropped.

    >>> taken_apart("<think>\\nhm\\n</think>\\n\\nyes")
    ('hm', 'yes')
    >>> taken_apart("yes")
    (None, 'yes')
    """
    before, closed, text = content.partition(CLOSES)
    if not closed:
        return None, content
    return before.rpartition(OPENS)[2].strip("\n"), text.lstrip("\n")
