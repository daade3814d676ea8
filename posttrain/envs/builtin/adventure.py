"""A text adventure with a score: find the treasures of a small world and bring them home, to the first room.

    python -m posttrain.envs.builtin.adventure --count 500 --rooms 6 > rows.jsonl

Columns: "world" (see `Game`), "turns": most commands (20). A treasure earns half of its share of 1 when it is first
taken, and half when it is first left at home; each is a reward of that step.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Generator, Iterator
from hashlib import sha256
from typing import Any

from posttrain.core.types import Invalid, Reply, Task, Turn, UserError, Verdict
from posttrain.envs.builtin.generated import distinct, write

SUCCESS = 1.0  # the reward with all treasures at home
TURNS = 20  # default of the task's column "turns"
WAYS = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
ROOMS = (
    "hall",
    "kitchen",
    "cellar",
    "garden",
    "library",
    "attic",
    "stable",
    "chapel",
    "tower",
    "cave",
    "well",
    "study",
)
TREASURES = ("gold ring", "ruby", "silver cup", "pearl", "crown")
KEYS = ("brass key", "iron key")
HELP = "Commands: go north, take lamp, drop lamp, look, inventory."

World = dict[str, Any]
State = tuple[str, frozenset[str], frozenset[str]]  # current room, things carried, treasures brought home


def adventure(task: Task) -> Generator[Turn, Reply, Verdict]:
    """Run an episode; the reward is the share of the score that is reached.

    An invalid command gets an error and costs a turn.
    """
    try:
        game, turns = Game(task["world"]), int(task.get("turns", TURNS))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return Invalid(f"the task's world is invalid: {type(error).__name__}: {error}")
    said, earned = f"{HELP} Bring all treasures to the {game.home}. {game.room_text()}", 0.0
    for _ in range(turns):
        reply = yield Turn(text=f"{said}\n> ", stop=("\n",), reward=earned)
        said, points = game.do(reply)
        earned = points / game.most
        if game.score == game.most:
            break
    return earned


class Game:
    """A world in play.

    {"home": "hall", "treasures": ["ruby"], "rooms": [{"name": "hall", "things": ["brass key"], "exits": [{"way":
    "north", "to": "cave", "key": "brass key"}]}, ...]}. A way with a key is locked unless the player carries that key.
    Raises KeyError, TypeError or ValueError for an invalid world.
    """

    def __init__(self, world: World) -> None:
        self.home: str = world["home"]
        self.treasures = frozenset(world["treasures"])
        self.things = {room["name"]: list(room["things"]) for room in world["rooms"]}
        self.exits = {room["name"]: {exit["way"]: exit for exit in room["exits"]} for room in world["rooms"]}
        leads_to = {exit["to"] for exits in self.exits.values() for exit in exits.values()}
        if missing := ({self.home} | leads_to) - self.things.keys():
            raise ValueError(f"there is no room {min(map(str, missing))}")
        if not self.treasures or self.treasures - {thing for things in self.things.values() for thing in things}:
            raise ValueError("it has no treasure, or a treasure without a place")
        self.here = self.home
        self.held: list[str] = []
        self.scored: set[tuple[str, str]] = set()  # (treasure, "taken" or "home")
        self.most = 2 * len(self.treasures)

    @property
    def score(self) -> int:
        return len(self.scored)

    def do(self, command: str) -> tuple[str, int]:
        """Carry out a command; return the answer, and the points earned by it."""
        before = self.score
        words = command.lower().split()
        verb, thing = (words[0], " ".join(words[1:])) if words else ("", "")
        if verb in WAYS and not thing:
            verb, thing = "go", verb
        if verb == "look" and not thing:
            said = self.room_text()
        elif verb == "inventory" and not thing:
            said = f"You carry: {', '.join(self.held) or 'nothing'}."
        elif verb in ("go", "take", "drop"):
            said = {"go": self._go, "take": self._take, "drop": self._drop}[verb](thing)
        else:
            said = "That is no command."
        points = self.score - before
        return said + (f" Score {self.score} of {self.most}." if points else ""), points

    def room_text(self) -> str:
        ways = [way + (" (locked)" if self._locked(exit) else "") for way, exit in self.exits[self.here].items()]
        seen = f" You see: {', '.join(self.things[self.here])}." if self.things[self.here] else ""
        return f"You are in the {self.here}. Ways: {', '.join(ways)}.{seen}"

    def _locked(self, exit: dict[str, str]) -> bool:
        return exit.get("key") is not None and exit["key"] not in self.held

    def _go(self, way: str) -> str:
        exit = self.exits[self.here].get(way)
        if exit is None:
            return "There is no such way."
        if self._locked(exit):
            return "That way is locked."
        self.here = exit["to"]
        return self.room_text()

    def _take(self, thing: str) -> str:
        if thing not in self.things[self.here]:
            return "There is no such thing here."
        self.things[self.here].remove(thing)
        self.held.append(thing)
        if thing in self.treasures:
            self.scored.add((thing, "taken"))
        return "Taken."

    def _drop(self, thing: str) -> str:
        if thing not in self.held:
            return "You do not carry that."
        self.held.remove(thing)
        self.things[self.here].append(thing)
        if thing in self.treasures and self.here == self.home:
            self.scored.add((thing, "home"))
        return "Dropped."


# -- worlds that are made ----------------------------------------------------------------------------------------------


def tasks(count: int, seed: int, *, rooms: int = 5, treasures: int = 2, held_out: bool = False) -> list[Task]:
    """Distinct worlds of `rooms` rooms, one of them locked; each with a shortest solution as its replies.

    There are twice as many turns as that needs.
    """
    if not 3 <= rooms <= len(ROOMS) or not 1 <= treasures <= min(len(TREASURES), rooms - 1):
        raise UserError(
            f"worlds have 3 to {len(ROOMS)} rooms, and 1 to {len(TREASURES)} treasures, fewer than they have rooms"
        )
    return distinct(_draws(random.Random(seed), rooms, treasures), count, held_out)


def _draws(rng: random.Random, rooms: int, treasures: int) -> Iterator[Task]:
    while True:
        world = _made(rng, rooms, treasures)
        replies = solution(world)
        digest = sha256(json.dumps(world).encode()).hexdigest()[:12]
        yield {"id": f"world-{digest}", "world": world, "turns": 2 * len(replies), "replies": replies}


def _made(rng: random.Random, count: int, treasures: int) -> World:
    """Return a random world: a tree of rooms on a grid. One edge is locked, and the key is on the near side of it."""
    names = rng.sample(ROOMS, count)
    places = {(0, 0): 0}
    parents: list[tuple[int, str]] = [(0, "")]  # of each room: (room before it, way from there)
    while len(places) < count:
        x, y = rng.choice(list(places))
        way = rng.choice(list(WAYS))
        place = (x + WAYS[way][0], y + WAYS[way][1])
        if place not in places:
            parents.append((places[x, y], way))
            places[place] = len(places)
    made: list[World] = [{"name": name, "things": [], "exits": []} for name in names]
    locked = rng.randrange(1, count)
    behind = {locked}
    for room in range(locked + 1, count):
        if parents[room][0] in behind:
            behind.add(room)
    key = rng.choice(KEYS)
    for room in range(1, count):
        parent, way = parents[room]
        lock = {"key": key} if room == locked else {}
        made[parent]["exits"].append({"way": way, "to": names[room], **lock})
        back = {"north": "south", "south": "north", "east": "west", "west": "east"}[way]
        made[room]["exits"].append({"way": back, "to": names[parent]})
    made[rng.choice([room for room in range(count) if room not in behind])]["things"].append(key)
    found = rng.sample(TREASURES, treasures)
    hiding = [rng.choice(sorted(behind))]
    hiding += rng.sample([room for room in range(1, count) if room not in hiding], treasures - 1)
    for thing, room in zip(found, hiding, strict=True):
        made[room]["things"].append(thing)
    return {"home": names[0], "treasures": found, "rooms": made}


def solution(world: World) -> list[str]:
    """Return a shortest list of commands that brings all treasures home. Raises ValueError if there is none."""
    game = Game(world)
    lies = {thing: room for room, things in game.things.items() for thing in things}
    keys = {exit["key"] for exits in game.exits.values() for exit in exits.values() if exit.get("key")}
    start: State = (game.home, frozenset(), frozenset())
    before: dict[State, tuple[State, str]] = {}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        here, held, done = state
        if done >= game.treasures:
            break
        steps = [
            (f"go {way}", (exit["to"], held, done))
            for way, exit in game.exits[here].items()
            if exit.get("key") is None or exit["key"] in held
        ]
        near = [t for t in sorted((game.treasures | keys) - held - done) if lies.get(t) == here]
        steps += [(f"take {thing}", (here, held | {thing}, done)) for thing in near]
        if here == game.home:
            steps += [(f"drop {t}", (here, held - {t}, done | {t})) for t in sorted(held & game.treasures)]
        for command, after in steps:
            if after not in before and after != start:
                before[after] = state, command
                queue.append(after)
    else:
        raise ValueError("not all treasures can be brought home")
    commands = []
    while state != start:
        state, command = before[state]
        commands.append(command)
    return commands[::-1]


if __name__ == "__main__":
    write(tasks)
