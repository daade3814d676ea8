"""Counts a policy's behaviours in episodes of search, from the texts: searches, refinements, decompositions, checks.

A fact is *sought* if it is the first one on the way to the answer that no passage has shown yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experiments.search import answer_of, query_of
from experiments.world import ENTITIES, RELATIONS, WORD, Fact

NAMES = frozenset(ENTITIES) | frozenset(RELATIONS)
Said = tuple[str, str]
"""The author (a `SpanKind`) and the text."""


@dataclass(frozen=True)
class Behaviour:
    """Of one episode. Numbers are counts; what is there or not is 0 or 1."""

    tried: float  # replies with an opened search tag
    valid: float  # searches that were carried out and name something of the world
    useful: float  # searches whose passages first showed the sought fact
    refined: float  # other queries for a sought fact that the search before did not find
    decomposed: float  # two hops: a search for each, the second one naming what the first one found
    verified: float  # a search after all facts had been shown
    invented: float  # replies with an information tag of the policy's own
    answered: float  # the episode ended with an answer


BEHAVIOURS = tuple(Behaviour.__dataclass_fields__)


def behaviour(path: Sequence[Fact], turns: Sequence[Said]) -> Behaviour:
    """`path`: the facts that lead to the answer, in order; `turns`: of the episode."""
    count = dict.fromkeys(BEHAVIOURS, 0.0)
    shown: set[Fact] = set()  # facts of the path
    missed: frozenset[str] | None = None  # words of the last search, if it asked for what is sought and did not find it
    searched: list[bool] = [False] * len(path)  # whether a query named subject and relation of each fact
    words: frozenset[str] = frozenset()
    near = False  # whether the last search names the subject or the relation of what is sought
    for (kind, text), (follower, _) in zip(turns, [*turns[1:], ("", "")], strict=True):
        if kind == "sampled":
            query = query_of(text) if follower else None  # the last reply is answered by nobody
            words = frozenset(WORD.findall(query or "")) & NAMES
            count["tried"] += "<search>" in text
            count["invented"] += "<information>" in text
            count["answered"] = float(answer_of(text) is not None)
            near = False
            if not words:
                continue
            sought = next((fact for fact in path if fact not in shown), None)
            count["valid"] += 1
            count["verified"] = max(count["verified"], float(sought is None))
            near = sought is not None and bool(words & {sought.subject, sought.relation})
            count["refined"] += near and missed is not None and words != missed
            for place, fact in enumerate(path):
                known = place == 0 or path[place - 1] in shown
                searched[place] |= known and {fact.subject, fact.relation} <= words
        elif kind in ("tool", "observation"):
            sought = next((fact for fact in path if fact not in shown), None)
            shown |= set(facts_of(text)) & set(path)
            found = sought is not None and sought in shown
            count["useful"] += found
            missed = words if near and not found else None
    count["decomposed"] = float(len(path) > 1 and all(searched))
    return Behaviour(**count)


def facts_of(text: str) -> list[Fact]:
    """The passages in a text that the policy was shown."""
    lines = [WORD.findall(line) for line in text.replace("<information>", "").splitlines()]
    return [Fact(*words) for words in lines if len(words) == 3 and words[1] in RELATIONS]


def said(rollout: Mapping[str, Any]) -> list[Said]:
    """The turns of a recorded rollout."""
    return [(turn["role"], turn["text"]) for turn in rollout["turns"]]


def means(found: Iterable[Behaviour]) -> dict[str, float]:
    """Of each count over the episodes, and the share of the tried searches that were valid."""
    rows = [asdict(each) for each in found]
    mean = {name: sum(row[name] for row in rows) / len(rows) for name in BEHAVIOURS}
    return {**mean, "valid share": mean["valid"] / mean["tried"] if mean["tried"] else 0.0}
