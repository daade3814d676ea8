"""Scores existing replies: environments run with them in place of a policy's."""

from __future__ import annotations

import time
from collections.abc import Sequence

from posttrain.core.types import Ask, Invalid, InvalidKind, Reply, Task, Turn, bare
from posttrain.envs.play.env_outputs import AwaitsGroup, Done
from posttrain.envs.play.env_pool import EnvPool
from posttrain.envs.play.service_client import Services

PAUSE = 0.001  # seconds between polls of services while nothing else is to be done
MOST_ASKS = 1024  # most requests to services for one reply


def score(pool: EnvPool, services: Services, replies: Sequence[tuple[Task, Reply]]) -> list[Done]:
    """Return the result of each (task, reply), in their order, from an environment of one turn.

    Replies to the same task object are a group.
    """
    found: dict[int, Done] = {}
    turns, asks = [0] * len(replies), [0] * len(replies)
    for place, (task, _) in enumerate(replies):
        pool.start(place, task, id(task))
    while len(found) < len(replies):
        for place, answer in services.poll() if services.pending else ():
            pool.send(place, bare(answer))
        for place, event in pool.poll(PAUSE if services.pending else None):
            if isinstance(event, Done):
                found[place] = event
            elif isinstance(event, Turn) and not turns[place]:
                turns[place] = 1
                pool.send(place, replies[place][1])
            elif isinstance(event, Ask) and asks[place] < MOST_ASKS:
                asks[place] += 1
                services.ask(place, event)
            elif not isinstance(event, AwaitsGroup):
                found[place] = Done(Invalid(_refused(event), InvalidKind.UNREADABLE))
                pool.drop(place)
    return [found[place] for place in range(len(replies))]


def compare(services: Services, name: str, pairs: Sequence[dict[str, object]]) -> list[object]:
    """Return the answers of a pairwise judge to these requests, in their order: 1, 0.5, 0, a dict, or Invalid."""
    answers: dict[int, object] = {}
    for place, content in enumerate(pairs):
        services.ask(place, Ask(name, content))
    while len(answers) < len(pairs):
        answers.update((place, bare(answer)) for place, answer in services.poll())
        if len(answers) < len(pairs):
            time.sleep(PAUSE)
    return [answers[place] for place in range(len(pairs))]


def _refused(event: object) -> str:
    if isinstance(event, Ask):
        return f"asked services {MOST_ASKS} times about one reply"
    return "asks for a second reply: only environments of one turn can score given replies"
