"""Finds the code or data in a reply: the last fenced block, else the whole reply. Thoughts are left out."""

from __future__ import annotations

import re
from collections.abc import Sequence

_FENCE = re.compile(r"^[ \t]{0,3}(`{3,}+|~{3,}+)[ \t]*+([^\s`]*+)[^\n`]*+$", re.MULTILINE)


def without_thoughts(reply: str) -> str:
    """Return the reply after its last </think>.

    >>> without_thoughts("<think>hm</think>yes")
    'yes'
    """
    return reply.rpartition("</think>")[2]


def fenced(reply: str, languages: Sequence[str] = ()) -> str | None:
    """Return the content of the last closed fenced block (CommonMark 0.31, section 4.5); None if there is none.

    With `languages`, only blocks in one of these, in any case, or without a language count.

    >>> fenced("so:\\n```python\\nx = 1\\n```\\n", ["python"])
    'x = 1\\n'
    """
    wanted = {language.lower() for language in languages}
    found, opened = None, None
    for fence in _FENCE.finditer(without_thoughts(reply)):
        marks, language = fence[1], fence[2].lower()
        if opened is None:
            opened = (marks, language, fence.end() + 1)
        elif marks[0] == opened[0][0] and len(marks) >= len(opened[0]) and not language:
            if not wanted or opened[1] in wanted or not opened[1]:
                found = fence.string[opened[2] : fence.start()]
            opened = None
    return found


def code_in(reply: str, languages: Sequence[str] = ("python", "py", "python3")) -> str:
    """Return the code of a reply: its last fenced block in one of these languages, else the whole reply after its
    thoughts.
    """
    found = fenced(reply, languages)
    return without_thoughts(reply) if found is None else found
