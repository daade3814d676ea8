"""The thoughts of a reply, as reasoning models write them: <think>, thoughts, </think>, and the text for the reader.

Many chat templates open <think> themselves, so a reply may begin within its thoughts.
"""

from __future__ import annotations

OPENS, CLOSES = "<think>", "</think>"


def split_thoughts(reply: str) -> tuple[str, str]:
    """Return the thoughts of a reply without the white space around them, and its text; a reply without thoughts as it is.

    >>> split_thoughts("<think>hm</think> yes")
    ('hm', 'yes')
    >>> split_thoughts("yes")
    ('', 'yes')
    """
    before, closed, text = reply.rpartition(CLOSES)
    if not closed:
        if not text.lstrip().startswith(OPENS):
            return "", text
        before, text = text, ""  # it was cut off within its thoughts
    return before.strip().removeprefix(OPENS).strip(), text.lstrip()


def with_thoughts(thoughts: str, text: str) -> str:
    """Return a reply with these thoughts and this text, in the form that chat templates expect.

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
