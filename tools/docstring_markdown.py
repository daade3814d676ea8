"""Docstrings as Markdown: examples become code, and what would read as a tag is shown. An extension of griffe.

mkdocstrings reads docstrings as Markdown; those of this project are plain text that happens to be close to it.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_CODE = re.compile(r"(`[^`]+`)")


def as_markdown(text: str) -> str:
    """With each doctest in a fence, and angle brackets and stars outside of code escaped."""
    lines: list[str] = []
    fenced = False
    for line in text.splitlines():
        begins = line.lstrip().startswith(">>>")
        if begins and not fenced:
            lines += ["", "```pycon"]
            fenced = True
        elif fenced and not line.strip():
            lines += ["```"]
            fenced = False
        indented = line.startswith("    ")
        lines.append(line if fenced or indented else _escaped(line))
    return "\n".join([*lines, "```"] if fenced else lines)


def _escaped(line: str) -> str:
    parts = _CODE.split(line)
    plain = (re.sub(r"([*_\\[\]])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2])
    code = [*parts[1::2], ""]
    return "".join(text + quoted for text, quoted in zip(plain, code, strict=True))


class MarkdownDocstrings(griffe.Extension):
    """Applies `as_markdown` to every docstring that is loaded."""

    def on_object(self, *, obj: griffe.Object, loader: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
