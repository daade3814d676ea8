"""Nim for two players, both of them the policy: the player who takes the last stone wins.

    python -m posttrain.envs.builtin.nim --count 50 --stones 40 > rows.jsonl

The sides move in turn, and each sees the other's move. Each has a context, a rollout and a reward of its own: 1 for the
winner, -1 for the loser. An illegal move loses at once. Perfect play is known: leave a multiple of most + 1 stones, so
the first side wins unless the stones are such a multiple.

Columns: "stones"; "most", stones that may be taken at once (3); "against", the player of the second side: "self" (the
default), or "perfect" or "random", which are part of the environment; "seed", of the random numbers of these (default:
derived from the id). All rollouts of a task meet the same draws: rows with other seeds are other games from the same
start.
"""

from __future__ import annotations

import random
import re
from collections.abc import Generator, Iterator

from posttrain.core.seeds import seed_of
from posttrain.core.types import Reply, Sides, Task, Turn, UserError, Verdict
from posttrain.envs.builtin.generated import distinct, write

SUCCESS = 1.0  # the winner's reward
MOST = 3  # stones that may be taken at once: default of the column "most"
FIRST, SECOND = "first", "second"
AGAINST = ("self", "perfect", "random")
_WHOLE = re.compile("[0-9]{1,4}")


def nim(task: Task) -> Generator[Turn, Reply, Verdict]:
    """Run an episode; the reward is 1.0 for the side that takes the last stone, -1.0 for the other one."""
    stones, most = int(task["stones"]), int(task.get("most", MOST))
    against = task.get("against", "self")
    if against not in AGAINST:
        raise UserError(f"against is {against!r}: give one of {', '.join(AGAINST)}")
    rng = random.Random(seed_of("nim", task.get("seed", task.get("id")), stones, most))
    side, other, taken = FIRST, SECOND, ""
    while True:
        if side == SECOND and against != "self":
            took: int | None = best(stones, most, rng) if against == "perfect" else rng.randint(1, min(most, stones))
        else:
            took = move_of((yield Turn(f"{taken}{stones} left, 1 to {most}: ", stop=("\n",), side=side)), stones, most)
        if took is None or took == stones:
            winner, loser = (other, side) if took is None else (side, other)
            return Sides({winner: 1.0, loser: -1.0})
        stones -= took
        side, other, taken = other, side, f"{took} taken, "


def move_of(reply: str, stones: int, most: int) -> int | None:
    """Return the number of stones that a reply takes; None if the move is illegal.

    >>> move_of(" 2\\n", 5, 3), move_of("4", 5, 3), move_of("3", 2, 3), move_of("two", 5, 3)
    (2, None, None, None)
    """
    if _WHOLE.fullmatch(reply.strip()) is None:
        return None
    took = int(reply)
    return took if 1 <= took <= min(most, stones) else None


def best(stones: int, most: int, rng: random.Random) -> int:
    """Return the move of perfect play, or a random one where every move loses.

    >>> best(7, 3, random.Random(0)), best(5, 3, random.Random(0))
    (3, 1)
    """
    return stones % (most + 1) or rng.randint(1, min(most, stones))


def tasks(
    count: int, seed: int, *, stones: int = 30, most: int = 4, against: str = "self", held_out: bool = False
) -> list[Task]:
    """Distinct games of 2 to `stones` stones, of which up to 2 to `most` may be taken at once. Replies: perfect play.

    >>> tasks(1, seed=0, stones=9)
    [{'id': '8 stones, 1 to 3', 'stones': 8, 'most': 3, 'against': 'self', 'replies': ['1', '3', '2', '2']}]
    """
    if stones < 2 or most < 2 or against not in AGAINST:
        raise UserError(f"games of Nim need stones >= 2, most >= 2 and against one of {', '.join(AGAINST)}")
    return distinct(_draws(random.Random(seed), stones, most, against), count, held_out)


def _draws(rng: random.Random, largest: int, most: int, against: str) -> Iterator[Task]:
    while True:
        stones, taken = rng.randint(2, largest), rng.randint(2, most)
        task: Task = {"id": f"{stones} stones, 1 to {taken}", "stones": stones, "most": taken, "against": against}
        yield {**task, "replies": moves(task, rng)}


def moves(task: Task, rng: random.Random) -> list[str]:
    """Return the policy's replies in a game of perfect play."""
    playing, said = nim(task), list[str]()
    turn = next(playing)
    try:
        while True:
            stones = int(str(turn.text).split(" left")[0].split()[-1])
            said.append(str(best(stones, int(task["most"]), rng)))
            turn = playing.send(Reply(said[-1]))
    except StopIteration:
        return said


if __name__ == "__main__":
    write(tasks)
