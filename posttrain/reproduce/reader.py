"""A reader of passages, pre-trained on worlds that are never seen twice, and the policy that reinforcement starts from.

The reader is shown a question with passages of a fresh world and writes down the facts that lead to the answer, and the
answer. It cannot know any fact by heart: each row has a world of its own. A gate says whether it reads well enough.

The policy that reinforcement starts from is the reader after a little imitation of a careless searcher: one that often
answers without a search, asks vague questions, and does not ask again. So it knows the form of a search, and not when it
pays, nor what to ask.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.config import SFT, Evaluation
from posttrain.reproduce.experiment import Numbers, Say, Settings
from posttrain.reproduce.harness import QUIET, checkpoint_of
from posttrain.reproduce.world import (
    DIRECT,
    ENTITIES,
    RELATIONS,
    SEARCH,
    TOP,
    Fact,
    Question,
    World,
    ask,
    information,
    vocabulary,
    worlds,
)
from posttrain.training import evaluation, imitating
from posttrain.types import Task, Turn, UserError

GATE = {1: 0.9, 2: 0.8}
"""Hops -> accuracy with gold passages given, below which nothing can be learned about searching."""

CUT = "length"  # a reply that another turn follows does not end with the end-of-sequence token
Row = dict[str, Any]


# -- reading -----------------------------------------------------------------------------------------------------------


def thought(facts: list[Fact]) -> str:
    """What was read, in the order in which it leads on."""
    return "<think>" + ".".join(map(str, facts)) + "</think>"


def answered(answer: str) -> str:
    return f"<answer> {answer}</answer>"


def drawn_question(hops: int, draw: random.Random) -> Question:
    return Question(draw.choice(ENTITIES), tuple(draw.choice(RELATIONS) for _ in range(hops)))


def gold(world: World, question: Question, draw: random.Random) -> list[Fact]:
    """The facts that lead to the answer among others that have words of the question, in any order."""
    path = world.path(question)
    others = [world.fact(fact.subject, draw.choice(RELATIONS)) for fact in path]
    others += [world.fact(draw.choice(ENTITIES), fact.relation) for fact in path]
    others += world.find(f"{path[-1].subject} {path[-1].relation}")
    others = [fact for fact in dict.fromkeys(others) if fact not in path]
    shown = [*path, *draw.sample(others, draw.randint(1, min(4, len(others))))]
    shown = list(dict.fromkeys(shown))
    draw.shuffle(shown)
    return shown


def reading_row(world: World, draw: random.Random, hops: int) -> Row:
    """A question with passages that answer it, and what is read there."""
    question = drawn_question(hops, draw)
    path = world.path(question)
    prompt = ask(question, DIRECT) + information(gold(world, question, draw))
    return {"prompt": prompt, "response": thought(path) + answered(path[-1].object), "response_stop": CUT}


def reading_rows(seed: int) -> Iterator[Row]:
    """Without end; each has a world of its own."""
    draw = random.Random(f"reading {seed}")
    for world in worlds(seed):
        yield reading_row(world, draw, 1 + draw.randrange(2))
