"""A shop with functions to look up and order items: several calls, some of which fail.

    python -m posttrain.envs.builtin.functions --count 1000 > rows.jsonl

The model must have a chat template that shows tools. A task is solved if the last reply has the correct answer in
<answer> tags and the orders are exactly the right ones. Columns: "question", "shelves" (item -> [count, price]),
"answer", "orders" (item -> count).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Generator, Iterator
from hashlib import sha256
from typing import Any

from posttrain.core.types import Graded, Reply, Task, Turn, UserError, Verdict
from posttrain.envs.builtin.generated import distinct, write
from posttrain.envs.play.tools import Tools
from posttrain.verify.format import between

SUCCESS = 1.0  # the reward of a task that is solved
ITEMS = ("apple", "bulb", "candle", "drum", "envelope", "fork", "glove", "hammer", "jar", "kite", "lamp", "mirror")
ASKED = " Look at the shelves first. Put the answer into <answer> tags at the end."

Shelves = dict[str, list[int]]


def functions(task: Task, *, mistake: float = 0.0) -> Generator[Turn, Reply, Verdict]:
    """Run an episode; the reward is 1.0 for the correct answer and orders.

    `mistake`: reward of each invalid call, 0 or less.
    """
    if not -1.0 <= mistake <= 0.0:
        raise UserError(f"functions,mistake={mistake:g}: give a mistake from -1 to 0")
    shelves: Shelves = {item: list(held) for item, held in task["shelves"].items()}
    orders: dict[str, int] = {}
    tools = Tools(*_tools(shelves, orders), once=False)
    question = str(task["question"]) + ASKED
    reply = yield Turn(messages=[{"role": "user", "content": question}], tools=tools)
    while turn := tools.answer(reply):
        reply = yield turn
    said = between(reply, "answer")
    right = said is not None and said.strip() == str(task["answer"]) and orders == (task.get("orders") or {})
    wrong = [called.earns(mistake) for called in tools.calls if called.problem] if mistake else []
    return Graded(float(right), wrong[:256])


def _tools(shelves: Shelves, orders: dict[str, int]) -> list[Callable[..., Any]]:
    """Return the functions of one shop. They change `shelves` and `orders`."""

    def held(item: str) -> list[int]:
        if item not in shelves:
            raise LookupError(f"there is no {item!r} here; there are {', '.join(sorted(shelves))}")
        return shelves[item]

    def look_up(item: str) -> dict[str, int]:
        """How many of an item the shop has, and what one of them costs.

        Args:
            item: The item, in the singular.
        """
        count, price = held(item)
        return {"count": count, "price": price}

    def order(item: str, count: int) -> str:
        """Order some of an item. An order cannot be returned.

        Args:
            item: The item, in the singular.
            count: How many.
        """
        left = held(item)[0]
        if not 0 < count <= left:
            raise ValueError(f"{count} cannot be ordered: the shop has {left}")
        shelves[item][0] -= count
        orders[item] = orders.get(item, 0) + count
        return f"ordered {count}"

    return [look_up, order]


# -- tasks -------------------------------------------------------------------------------------------------------------


def tasks(count: int, seed: int, *, items: int = 4, held_out: bool = False) -> list[Task]:
    """Distinct errands in shops of `items` items, each with calls that run them as its replies.

    >>> task = tasks(1, seed=1)[0]
    >>> task["question"], task["answer"], task["orders"]
    ('What do 5 kites and 1 candle cost together?', '48', {})
    """
    if not 2 <= items <= len(ITEMS):
        raise UserError(f"a shop has 2 to {len(ITEMS)} items")
    return distinct(_draws(random.Random(seed), items), count, held_out)


def _draws(rng: random.Random, items: int) -> Iterator[Task]:
    while True:
        names = rng.sample(ITEMS, items)
        prices = rng.sample(range(2, 12 + items), items)  # all prices differ
        shelves: Shelves = {name: [rng.randint(1, 9), price] for name, price in zip(names, prices, strict=True)}
        yield rng.choice((_cost, _purchase, _cheaper))(rng, shelves)


def _cost(rng: random.Random, shelves: Shelves) -> Task:
    """Make a task that looks up two items and orders nothing."""
    (a, b), (m, n) = rng.sample(sorted(shelves), 2), (rng.randint(1, 5), rng.randint(1, 5))
    question = f"What do {_so_many(m, a)} and {_so_many(n, b)} cost together?"
    return _task(question, shelves, m * shelves[a][1] + n * shelves[b][1], {}, [[_look(a), _look(b)]])


def _purchase(rng: random.Random, shelves: Shelves) -> Task:
    """Make a task that orders one item, if there are enough."""
    item, wanted = rng.choice(sorted(shelves)), rng.randint(1, 9)
    question = (
        f"Order {_so_many(wanted, item)} and say what that costs. If there are too few, order nothing and say no."
    )
    count, price = shelves[item]
    if wanted > count:
        return _task(question, shelves, "no", {}, [[_look(item)]])
    return _task(question, shelves, wanted * price, {item: wanted}, [[_look(item)], [_order(item, wanted)]])


def _cheaper(rng: random.Random, shelves: Shelves) -> Task:
    """Make a task that looks up two items and orders the cheaper one."""
    a, b = rng.sample(sorted(shelves), 2)
    item = min(a, b, key=lambda name: shelves[name][1])
    question = f"Which costs less, one {a} or one {b}? Order one of it, and say which."
    return _task(question, shelves, item, {item: 1}, [[_look(a), _look(b)], [_order(item, 1)]])


def _task(question: str, shelves: Shelves, answer: Any, orders: dict[str, int], steps: list[list[str]]) -> Task:
    """Return a task. `steps`: the calls of each reply before the answer."""
    replies = [*("\n".join(calls) for calls in steps), f"<answer>{answer}</answer>"]
    return {
        "id": sha256(json.dumps([question, shelves], sort_keys=True).encode()).hexdigest()[:12],
        "question": question,
        "shelves": shelves,
        "answer": str(answer),
        "orders": orders,
        "replies": replies,
    }


def _so_many(count: int, item: str) -> str:
    return f"{count} {item}{'s' if count > 1 else ''}"


def _look(item: str) -> str:
    return _call("look_up", {"item": item})


def _order(item: str, count: int) -> str:
    return _call("order", {"item": item, "count": count})


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


if __name__ == "__main__":
    write(tasks)
