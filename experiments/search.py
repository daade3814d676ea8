"""Question answering with a search engine, as Search-R1 plays it (arXiv 2503.09516, algorithm 1), over a generated world.

A reply ends with `</search>` or `</answer>`. A query is answered with passages between `<information>` tags, which the
policy is shown and did not write. An action that is neither is answered in words, as in the paper. After four actions
only an answer counts. The reward is the exact match of the answer, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from experiments.world import DIRECT, INVALID, WORD, Fact, World, ask, information
from posttrain.core.types import Env, Task, Turn

STOP = ("</search>", "</answer>")
ACTIONS = 4  # of an episode, before the last answer
AGAIN = "\n" + "".join(INVALID) + "\n"
Play = Generator[Turn, str, dict[str, float]]


def query_of(reply: str) -> str | None:
    """Return the query of a reply; None if it ends with no search, or with an empty one."""
    query = _closing(reply, "search")
    return query if query is not None and WORD.search(query) else None


def answer_of(reply: str) -> str | None:
    """Return the answer of a reply; None if it ends with none."""
    return _closing(reply, "answer")


def _closing(reply: str, tag: str) -> str | None:
    """Return the text in the tags that a reply ends with: in the last that was opened, and in no other kind."""
    if not reply.endswith(f"</{tag}>") or f"<{tag}>" not in reply:
        return None
    inside = reply.rpartition(f"<{tag}>")[2].removesuffix(f"</{tag}>")
    return None if "<" in inside else inside.strip()


def right(task: Task, reply: str) -> float:
    """Exact match."""
    return float(answer_of(reply) == task["answer"])


def searching(task: Task) -> Play:
    """The policy may search the task's own world."""
    world, searches = World(task["world"]), 0
    reply = yield Turn(text=task["prompt"], stop=STOP)
    for _ in range(ACTIONS):
        if answer_of(reply) is not None:
            break
        query = query_of(reply)
        searches += query is not None
        shown = AGAIN if query is None else information(world.find(query))
        reply = yield Turn(text=shown, tool=True, stop=STOP)
    return {"reward": right(task, reply), "searches": float(searches)}


def direct(task: Task) -> Play:
    """There is nothing to search, and the prompt is the question alone."""
    return (yield from given(task, []))


def retrieved(task: Task) -> Play:
    """Passages that the question itself finds are shown with it: retrieval-augmented generation."""
    return (yield from given(task, World(task["world"]).find(task["question"])))


def given(task: Task, passages: Sequence[Fact]) -> Play:
    """These passages are shown with the question, and there is nothing else to search."""
    shown = information(passages) if passages else ""
    reply = yield Turn(text=ask(task["question"], DIRECT) + shown, stop=STOP)
    return {"reward": right(task, reply), "searches": 0.0}


def played(env: Env, task: Task, policy: Callable[[str], str]) -> tuple[list[dict[str, Any]], float]:
    """The rows that imitate an episode of a scripted policy, one for each of its replies, and its reward.

    `policy` gets each text in turn.
    """
    episode = env(task)
    rows: list[dict[str, Any]] = []
    turn, text = next(episode), ""
    while True:
        assert isinstance(turn, Turn) and turn.text is not None
        text += turn.text
        reply = policy(turn.text)
        rows.append(imitation(text, reply))
        text += reply
        try:
            turn = episode.send(reply)
        except StopIteration as end:
            return rows, end.value["reward"]


def imitation(before: str, reply: str) -> dict[str, Any]:
    """A row for one reply of an episode. It ends with a stop string, so no end-of-sequence token follows it."""
    return {"prompt": before, "response": reply, "response_stop": "length"}
