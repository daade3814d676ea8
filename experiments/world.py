"""Generated worlds of facts, questions about them, and a search engine over their passages.

A fact is three words, "Ada capital Bonn": each relation of each entity is another entity, drawn anew in every world. So
nothing that was learned of one world helps in the next. Every word is one token. A question asks for one hop
("capital of Ada?") or for two ("mayor of capital of Ada?").
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from posttrain.core.types import Task
from posttrain.models.tokenizer.tokenizer import Tokenizer

RELATIONS = ("capital", "mayor", "river", "rival", "teacher", "neighbour", "founder", "heir")
ENTITIES = tuple(
    first + second
    for first in ("Ba", "De", "Fi", "Go", "Ku", "Me", "No", "Sa")
    for second in ("bel", "dor", "gan", "lin")
)
TAGS = tuple(f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/"))
DIRECT, SEARCH = "Answer:", "Search:"
"""The beginning of a prompt: whether there is a search engine."""

INVALID = (" invalid", " action", " try", " again")
OTHERS = (DIRECT, SEARCH, " of", "?", ".", "\n", *INVALID)
WORDS = (*TAGS, *OTHERS, *(f" {name}" for name in RELATIONS), *(f" {name}" for name in ENTITIES))
"""The vocabulary: what a text of this world is made of."""

TOP = 3  # passages that a search finds
WORD = re.compile(r"\w+")
PLACES = {name: place for place, name in enumerate(ENTITIES)}
KINDS = {name: place for place, name in enumerate(RELATIONS)}


@dataclass(frozen=True)
class Fact:
    """A subject, a relation, and the object of this relation."""

    subject: str
    relation: str
    object: str

    def __str__(self) -> str:
        return f" {self.subject} {self.relation} {self.object}"


@dataclass(frozen=True)
class Question:
    """Relations to follow from a subject, the first one first."""

    subject: str
    relations: tuple[str, ...]

    def __str__(self) -> str:
        return "".join(f" {relation} of" for relation in reversed(self.relations)) + f" {self.subject}?"


@dataclass(frozen=True)
class World:
    """All facts of one world, and the search engine over them."""

    seed: int
    objects: np.ndarray = field(init=False, repr=False, compare=False)  # [entities, relations], places of entities

    def __post_init__(self) -> None:
        draw = np.random.default_rng(np.random.SeedSequence([self.seed % 2**63, 1]))
        away = draw.integers(1, len(ENTITIES), (len(ENTITIES), len(RELATIONS)))  # nobody is related to itself
        own = np.arange(len(ENTITIES))[:, None]
        object.__setattr__(self, "objects", (own + away) % len(ENTITIES))

    def fact(self, subject: str, relation: str) -> Fact:
        return Fact(subject, relation, ENTITIES[self.objects[PLACES[subject], KINDS[relation]]])

    def path(self, question: Question) -> list[Fact]:
        """The facts that lead from the subject to the answer, which is the object of the last."""
        facts: list[Fact] = []
        for relation in question.relations:
            facts.append(self.fact(facts[-1].object if facts else question.subject, relation))
        return facts

    def find(self, query: str, count: int = TOP) -> list[Fact]:
        """The passages that hold most words of the query, a word in the subject's place counting twice.

        Among equal ones an order decides that is part of the world: the same query always finds the same.
        """
        words = set(WORD.findall(query))
        named = np.array([name in words for name in ENTITIES])
        kinds = np.array([name in words for name in RELATIONS])
        held = 2.0 * named[:, None] + kinds[None, :] + named[self.objects]
        score = (held + self._order).ravel()
        best = np.argpartition(-score, count)[:count]
        best = best[np.argsort(-score[best])]
        return [self.fact(ENTITIES[p // len(RELATIONS)], RELATIONS[p % len(RELATIONS)]) for p in best.tolist()]

    @cached_property
    def _order(self) -> np.ndarray:
        """Below 1, so that it decides between equal passages only."""
        draw = np.random.default_rng(np.random.SeedSequence([self.seed % 2**63, 2]))
        return draw.random(self.objects.shape) * 0.99

    def task(self, question: Question) -> Task:
        """The task of an environment."""
        return {
            "id": f"{self.seed}{question}",
            "world": self.seed,
            "question": str(question),
            "subject": question.subject,
            "relations": list(question.relations),
            "answer": self.path(question)[-1].object,
            "prompt": ask(question, SEARCH),
        }


def ask(question: Question | str, instruction: str) -> str:
    """The prompt."""
    return f"{instruction}{question}\n"


def drawn_question(hops: int, draw: random.Random) -> Question:
    return Question(draw.choice(ENTITIES), tuple(draw.choice(RELATIONS) for _ in range(hops)))


def asked(task: Task) -> Question:
    """The question of a task."""
    return Question(task["subject"], tuple(task["relations"]))


def path_of(task: Task) -> list[Fact]:
    """The facts that lead to the answer of a task, in its world."""
    return World(task["world"]).path(asked(task))


def information(facts: Sequence[Fact]) -> str:
    """Passages as the policy is shown them."""
    return "\n<information>" + "".join(f"{fact}\n" for fact in facts) + "</information>\n"


def vocabulary() -> Tokenizer:
    """One token for each word."""
    return Tokenizer.train([], len(WORDS) + 4, "characters", WORDS)  # three special ones, and room for a character
