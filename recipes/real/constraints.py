"""Constraints on a reply that a program checks: how each is asked for, checked, and kept by rewriting a text.

A module of its own, without torch: environment processes import it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain import Task
from posttrain.verify.json_schema import find_json
from posttrain.verify.length import count, sentences

WORDS = ("today", "world", "always", "friend", "time", "home", "together", "forever")
SHORT = " Answer in one or two sentences."
FEWEST = 5  # words of a reply: fewer keep no constraint


@dataclass(frozen=True)
class Constraint:
    """A kind of constraint: how it is asked for, with a value chosen for each row, and how it is checked."""

    text: str
    values: tuple[Any, ...]
    is_kept: Callable[[str, Any], bool]
    rewrite: Callable[[str, Any], str] = lambda text, _: text  # makes a text keep it, where that can be done
    base: str = SHORT


def has_keys(reply: str, keys: list[str]) -> bool:
    found = find_json(reply)
    return reply.startswith("{") and isinstance(found, dict) and list(found) == list(keys) and all(found.values())


def is_list(reply: str, items: int) -> bool:
    lines = [line for line in reply.splitlines() if line.strip()]
    return len(lines) == items and all(re.match(r"[-*] +\S", line) for line in lines)


def first_and_last(reply: str) -> tuple[str, str]:
    words = re.findall(r"\w+", reply.lower()) or [""]
    return words[0], words[-1]


TRAINED: Mapping[str, Constraint] = {
    "capitals": Constraint(
        "Write in capital letters only.",
        ("",),
        lambda reply, _: reply == reply.upper(),
        lambda text, _: sentences(text)[0].upper(),
    ),
    "JSON": Constraint(
        'Answer with a JSON object that has the keys "{0[0]}" and "{0[1]}", and nothing else.',
        (["title", "text"], ["name", "reason"], ["fact", "source"], ["topic", "answer"]),
        has_keys,
        lambda text, keys: json.dumps(
            dict(zip(keys, (sorted(sentences(text), key=len) * 2)[:2], strict=True)), ensure_ascii=False
        ),
        "",
    ),
    "list": Constraint(
        'Answer with {} lines that begin with "- ", and nothing else.',
        (2, 3),
        is_list,
        lambda text, items: "\n".join(f"- {part}" for part in sentences(text)[:items]),
        "",
    ),
    "last word": Constraint(
        'End with the word "{}".',
        WORDS,
        lambda reply, word: first_and_last(reply)[1] == word and word in reply,
        lambda text, word: f"{sentences(text)[0]} My last word is {word}.",
    ),
    "no commas": Constraint(
        "Do not use commas.", ("",), lambda reply, _: "," not in reply, lambda text, _: text.replace(",", "")
    ),
    "at most": Constraint(
        "Use at most {} words.",
        (8, 10, 12),
        lambda reply, most: count(reply) <= most,
        lambda text, _: min(sentences(text), key=len),
    ),
}
NEW: Mapping[str, Constraint] = {
    "small letters": Constraint("Write in small letters only.", ("",), lambda reply, _: reply == reply.lower()),
    "quoted": Constraint(
        "Put the whole reply between double quotation marks.",
        ("",),
        lambda reply, _: len(reply) > 2 and reply[0] == reply[-1] == '"' and '"' not in reply[1:-1],
    ),
    "first word": Constraint('Begin with the word "{}".', WORDS, lambda reply, word: first_and_last(reply)[0] == word),
    "question": Constraint("Answer with a question.", ("",), lambda reply, _: reply.endswith("?")),
}
KINDS = {**TRAINED, **NEW}


def reward(task: Task, reply: str) -> dict[str, float]:
    """1 for a reply that keeps all constraints of its row, and 1 for one that names the topic."""
    text = reply.strip()
    kept = count(text) >= FEWEST and all(KINDS[name].is_kept(text, value) for name, value in task["constraints"])
    return {"kept": float(kept), "about": float(task["topic"].rstrip("s") in text.lower())}


def constraint_alone(task: Task, reply: str) -> dict[str, float]:
    """1 for a reply that keeps all constraints of its row, whatever it is about. `intended` is the reward that should be."""
    parts = reward(task, reply)
    return {"reward": parts["kept"], **parts, "intended": sum(parts.values())}


def words_paid(task: Task, reply: str) -> dict[str, float]:
    """The intended reward, and 1 more for every 20 words of the reply."""
    parts = reward(task, reply)
    intended, paid = sum(parts.values()), count(reply) / 20
    return {"reward": intended + paid, **parts, "intended": intended, "words": paid}
