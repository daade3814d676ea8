"""Texts of this machine as others may read them: without folders, passwords and tokens."""

from __future__ import annotations

import os
import re
from typing import Any

HIDDEN = "***"
LOCAL = ("_name_or_path", "name_or_path", "tokenizer_file", "vocab_file", "merges_file")
"""Entries of a checkpoint's JSON files in which libraries write the path of the base model."""

_ABOVE = re.compile(r"\A(?:~|\.\.|/)[^=,:+*]*/|(?<![\w:/.])(?:~|\.\.|/)[^\s=,:]*/")
_NAME = r"[\w.-]*(?:api[-_]?key|secret|passw(?:or)?d|(?<![A-Za-z])token)"
_SECRETS = {
    r"(?<=://)[^/\s@'\"`]+(?=@)": HIDDEN,  # name and password of an address
    rf"((?<![\w.-]){_NAME}=|--{_NAME} +)[^\s,;&'\"`]+": rf"\1{HIDDEN}",
    rf'("{_NAME}": *")[^"]*': rf"\1{HIDDEN}",
    r"\b(?:hf_[A-Za-z0-9]{20,}|(?:sk-|gh[opsru]_|github_pat_|xox[abp]-|AKIA|AIza)[\w-]{12,})": HIDDEN,  # by their form
}
_VARIABLE = re.compile(r"(?i)(?:key|token|secret|passw(?:or)?d)$")
_SHORTEST = 8  # characters of a variable's value that is taken for a secret


def without_folders(value: Any) -> Any:
    """Return an option's value with the folders of this machine cut off: /home/me/rows.jsonl is rows.jsonl."""
    if isinstance(value, str):
        return _ABOVE.sub("", value.removeprefix("file://"))
    if isinstance(value, list):
        return [without_folders(one) for one in value]
    if isinstance(value, dict):
        return {name: without_folders(one) for name, one in value.items()}
    return value


def without_secrets(text: str) -> str:
    """Return a text in which passwords, tokens and the values of secret environment variables are ***.

    >>> without_secrets("http://me:word@host/v1 judge,api_key=abc")
    'http://***@host/v1 judge,api_key=***'
    """
    for name, value in os.environ.items():
        if _VARIABLE.search(name) and len(value) >= _SHORTEST:
            text = text.replace(value, HIDDEN)
    for secret, shown in _SECRETS.items():
        text = re.sub(secret, shown, text, flags=re.IGNORECASE)
    return text


def without_places(content: Any) -> Any:
    """Return the content of a JSON file without the entries that name a folder of this machine."""
    if isinstance(content, list):
        return [without_places(one) for one in content]
    if not isinstance(content, dict):
        return content
    return {
        name: without_places(value)
        for name, value in content.items()
        if not (name in LOCAL and isinstance(value, str) and _ABOVE.match(value))
    }


def code(text: str) -> str:
    """Return a text as code within a line of Markdown, whatever it holds."""
    shown = " ".join(text.split())
    around = "`" * (1 + _longest_run(shown))
    return f"{around} {shown} {around}" if "`" in shown else f"{around}{shown}{around}"


def fenced(text: str, language: str) -> str:
    """Return a text as a block of code in Markdown, whatever it holds."""
    around = "`" * max(3, 1 + _longest_run(text))
    return f"{around}{language}\n{text}\n{around}"


def plain(text: str) -> str:
    """Return a text within a line or a cell of Markdown in which nothing of it is markup."""
    return re.sub(r"([\\`\[\]<>|*])", r"\\\1", " ".join(text.split()))


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
