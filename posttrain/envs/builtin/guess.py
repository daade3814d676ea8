"""Guess the number: after each guess the policy learns whether the number is higher or lower.

    python -m posttrain.envs.builtin.guess --count 500 --limit 100 > rows.jsonl

Columns: "answer", the number; "limit", an exclusive upper bound; "guesses", most guesses (7).
"""

from __future__ import annotations

import random
import re
from collections.abc import Generator, Iterator

from posttrain.core.types import Reply, Task, Turn, UserError, Verdict
from posttrain.envs.builtin.generated import distinct, write

SUCCESS = 1.0  # the reward of finding the number
GUESSES = 7  # default of the task's column "guesses"
_WHOLE = re.compile("[0-9]{1,9}")


def guess(task: Task) -> Generator[Turn, Reply, Verdict]:
    """Run an episode; the reward is 1.0 if the number is found.

    A reply without a number gets an error and costs a guess.
    """
    text = f"A number below {task['limit']}: "
    for _ in range(int(task.get("guesses", GUESSES))):
        reply = yield Turn(text=text, stop=("\n",))
        if (hint := hint_at(reply, int(task["answer"]))) is None:
            return 1.0
        text = f"{hint}: "
    return 0.0


def hint_at(reply: str, answer: int) -> str | None:
    """Return the hint after a guess: "higher", "lower" or "no number"; None if the guess is correct.

    >>> hint_at("7", 12), hint_at(" 12\\n", 12), hint_at("12 13", 12)
    ('higher', None, 'no number')
    """
    if _WHOLE.fullmatch(reply.strip()) is None:
        return "no number"
    said = int(reply)
    return None if said == answer else "higher" if said < answer else "lower"


def tasks(count: int, seed: int, *, limit: int = 100, guesses: int = GUESSES, held_out: bool = False) -> list[Task]:
    """Distinct games whose limit is drawn from 2 to `limit`; each has the guesses of a search by halves as its replies.

    >>> tasks(1, seed=0)
    [{'id': '48 of 51', 'answer': '48', 'limit': 51, 'guesses': 7, 'replies': ['25', '38', '45', '48']}]
    """
    if limit < 2 or guesses < 1:
        raise UserError("games of guessing need limit >= 2 and guesses >= 1")
    return distinct(_draws(random.Random(seed), limit, guesses), count, held_out)


def _draws(rng: random.Random, most: int, guesses: int) -> Iterator[Task]:
    while True:
        limit = rng.randint(2, most)
        answer = rng.randrange(limit)
        replies = halves(answer, limit)[:guesses]
        yield {
            "id": f"{answer} of {limit}",
            "answer": str(answer),
            "limit": limit,
            "guesses": guesses,
            "replies": replies,
        }


def halves(answer: int, limit: int) -> list[str]:
    """Return the guesses of binary search."""
    low, high = 0, limit
    said: list[str] = []
    while not said or int(said[-1]) != answer:
        middle = (low + high) // 2
        said.append(str(middle))
        low, high = (middle + 1, high) if middle < answer else (low, middle)
    return said


if __name__ == "__main__":
    write(tasks)
