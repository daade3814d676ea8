r"""Finds the final answer in a reply: a closed \boxed{}, <answer>, `####`, or a sentence "the answer is ...".

A reply is untrusted text of any length, so every search over all of it reads each character a bounded number of times.
"""

from __future__ import annotations

import re

from posttrain.verify.format import between
from posttrain.verify.numeric import gsm8k_answer, read_number

SENTENCE = 10_000  # most characters read of a sentence with the answer

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_BARE = re.compile(r"[^\s$.,]+")
_BRACE = re.compile(r"\\[{}\\]|[{}]")
_STATED = re.compile(r"(?i)\b(?:answer|result|solution)\**\s*(?:is|was|:|=)[ \t*:]*")
_FORMULA = re.compile(r"(?s)\s*(?:\$\$?((?:[^$\\]|\\.)+)\$\$?(?![0-9])|\\\((.+?)\\\)|\\\[(.+?)\\\])")
_LAST_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$|\*)|\n|\s(?:because|since|which|so|as)\b")


def final_answer(reply: str) -> str | None:
    """Return the final answer of a reply, as written; None if there is none. Thoughts before </think> do not count."""
    reply = reply.rpartition("</think>")[2]
    boxed = last_boxed(reply)
    if boxed is not None:
        return boxed
    for found in (between(reply, "answer"), gsm8k_answer(reply), _stated(reply)):
        if found:
            return found
    alone = reply.strip()
    is_formula = len(alone) > 2 and alone[0] == alone[-1] == "$" and "$" not in alone[1:-1].strip("$")
    return alone if is_formula or read_number(alone) is not None else None


def voted_answer(reply: str) -> str:
    r"""Return the answer for which a reply votes: its final answer, else its last number, else the whole reply.

    Numbers that are written differently are one answer, and so are words in other capitals. Thoughts do not vote.

    >>> voted_answer("7+4=11\n11+9=20"), voted_answer("The answer is 1,250.50."), voted_answer("Paris")
    ('20', '2501/2', 'paris')
    """
    reply = reply.rpartition("</think>")[2]
    found = final_answer(reply)
    if found is None:
        numbers = _LAST_NUMBER.findall(reply.replace(",", ""))
        found = numbers[-1] if numbers else reply
    value = read_number(found)
    return " ".join(found.split()).casefold() if value is None else str(value)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{} whose braces are closed; None if there is none."""
    end = len(text)
    for box in reversed(list(_BOX.finditer(text))):
        if not text.startswith("{", box.end()):
            bare = _BARE.match(text, box.end()) if box[0].endswith(" ") else None
            if bare:
                return bare[0]
        else:
            close = closing_brace(text, box.end(), end)
            if close is not None:
                return text[box.end() + 1 : close]
        end = box.start()  # an unclosed box ends at the next one, so that no character is read twice
    return None


def closing_brace(text: str, start: int, end: int) -> int | None:
    """Return the index of the brace that closes the one at `start`, before `end`; None without one."""
    depth = 0
    for match in _BRACE.finditer(text, start, end):
        if match[0] == "{":
            depth += 1
        elif match[0] == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    return None


def _stated(reply: str) -> str | None:
    anchors = list(_STATED.finditer(reply))
    if not anchors:
        return None
    start = anchors[-1].end()
    rest = reply[start : start + SENTENCE]
    formula = _FORMULA.match(rest)
    if formula:
        return next(group for group in formula.groups() if group is not None)
    end = _SENTENCE_END.search(rest)
    return rest[: end.start()].rstrip(" \t,") if end else rest
