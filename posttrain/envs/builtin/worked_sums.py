"""Sums with the working written out: a line for each addition, and a verifier for each line.

    python -m posttrain.envs.builtin.worked_sums --count 1000 --numbers 6 > rows.jsonl

The numbers of the prompt `7 4 9 2:` are added line by line:

    7+9=16
    16+2+4=22

A line adds two or more of the numbers that are left, and its result takes their place. So there are many right replies, and
a reply may be short (more numbers to a line) or safe (two at a time). The answer is the last number of the reply.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from posttrain.core.types import OUTCOME, Graded, Invalid, SpanReward, Task, UserError
from posttrain.envs.builtin.generated import distinct, write

SUCCESS = 1.0  # the reward of a correct answer
FEWEST, MOST = 2, 30  # numbers of a generated task

_LINE = re.compile(r"(\d{1,9}(?:\+\d{1,9})+)=(\d{1,9})", re.ASCII)


@dataclass(frozen=True)
class Line:
    """A line of a reply."""

    end: int  # characters of the reply up to the line's end, without the line break
    joined: int  # by how many it reduces the numbers left; 0 if it is no addition of such numbers
    right: bool


def tasks(count: int, seed: int, *, numbers: int = 6, largest: int = 9, held_out: bool = False) -> list[Task]:
    """Tasks of `numbers` numbers from 1 to `largest`, with a right working as the response. Distinct; the same for the same
    arguments.

    >>> tasks(1, seed=0, numbers=3)
    [{'id': '7 7 1', 'prompt': '7 7 1:', 'numbers': [7, 7, 1], 'answer': 15, 'response': '7+7=14\\n14+1=15'}]
    """
    if not FEWEST <= numbers <= MOST or largest < 1:
        raise UserError(f"worked sums need {FEWEST} to {MOST} numbers, and largest >= 1")
    return distinct(_draws(random.Random(seed), numbers, largest), count, held_out)


def reward(task: Task, reply: str, *, lines: float = 0.0) -> dict[str, float] | Graded | Invalid:
    """Return 1 for a correct answer, the last number of the reply; correct lines earn `lines` in all, each at its end.

    A line earns by how much it reduces the count of numbers: a whole correct working has all of `lines`, long or short.
    >>> reward({"numbers": [7, 4, 9]}, "7+9=16\\n16+4=20")
    {'outcome': 1.0}
    """
    numbers = task.get("numbers")
    if not isinstance(numbers, list) or len(numbers) < FEWEST or not all(type(n) is int and n >= 0 for n in numbers):
        return Invalid(f'"numbers" must be a list of two or more whole numbers, and is {numbers!r:.60}')
    last = re.search(r"(\d{1,9})\s*\Z", reply, re.ASCII)
    answer = {OUTCOME: float(last is not None and int(last[1]) == sum(numbers))}
    if not lines:
        return answer
    each = lines / (len(numbers) - 1)
    found = [line for line in checked(numbers, reply) if line.end]  # an empty first line has no token that earns
    return Graded(answer, [SpanReward(line.end, line.right * each * line.joined) for line in found])


def check_options(*, lines: float) -> None:
    """Raise UserError if the reward of all lines would outweigh the answer."""
    if not 0 <= lines <= 1:
        raise UserError(f"lines is {lines:g}: give a reward from 0 to 1 for all right lines, as a right answer has 1")


def checked(numbers: Sequence[int], reply: str) -> list[Line]:
    """Return the lines of a reply. A line is right if it adds numbers that are left, correctly.

    Later lines start from the result that it wrote, right or wrong.
    >>> [line.right for line in checked([7, 4, 9], "7+9=15\\n15+4=19\\n4+1=5")]
    [False, True, False]
    """
    left, found, end = Counter(numbers), [], 0
    for text in reply.split("\n"):
        end += len(text) + 1
        match = _LINE.fullmatch(text)
        added = Counter(map(int, match[1].split("+"))) if match else Counter()
        if match is None or added - left:
            found.append(Line(end - 1, 0, False))
            continue
        result, total = int(match[2]), sum(number * times for number, times in added.items())
        left = left - added + Counter([result])
        found.append(Line(end - 1, added.total() - 1, result == total))
    return found


def working(
    rng: random.Random, numbers: Sequence[int], longest: float = 0.0, slips: float = 0.0, modulus: int = 0
) -> str:
    """Return a working in random order.

    Lines add three numbers with probability `longest`, else two; each result is wrong by one with probability `slips`.
    With a `modulus` a line's result is what remains of it.
    """
    left, lines = list(numbers), []
    while len(left) > 1:
        size = min(len(left), 3 if rng.random() < longest else 2)
        added = [left.pop(rng.randrange(len(left))) for _ in range(size)]
        found = sum(added) + (rng.choice((-1, 1)) if rng.random() < slips else 0)
        result = found % modulus if modulus else max(0, found)
        lines.append(f"{'+'.join(map(str, added))}={result}")
        left.append(result)
    return "\n".join(lines)


def _draws(rng: random.Random, numbers: int, largest: int) -> Iterator[Task]:
    """Yield random tasks without end. The response adds the numbers from left to right."""
    while True:
        drawn = [rng.randint(1, largest) for _ in range(numbers)]
        total, lines = drawn[0], []
        for number in drawn[1:]:
            lines.append(f"{total}+{number}={total + number}")
            total += number
        name = " ".join(map(str, drawn))
        row = {"prompt": f"{name}:", "numbers": drawn, "answer": total, "response": "\n".join(lines)}
        yield {"id": name, **row}


if __name__ == "__main__":
    write(tasks)
