"""Tasks of several sources in one sequence: the parts of a mixture, one after the other.

The id of a task begins with the name of its part, as in "maths/17". So ids are unique and always show the part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate

from posttrain.core.types import PART_SEPARATOR, Task
from posttrain.data.chat_prompts import AsMessages
from posttrain.data.tasks import Stream, Tasks, TaskSequence


def part_of(task: Task) -> str:
    """Return the name of the part to which a task of a mixture belongs."""
    return str(task["id"]).partition(PART_SEPARATOR)[0]


class MixedTasks(TaskSequence):
    """The tasks of all parts of a mixture."""

    def __init__(self, parts: Mapping[str, Tasks], shares: Mapping[str, float] | None = None) -> None:
        """Join `parts`, by names without the separator. `shares`: the share of each part in training; their sum is
        1.
        """
        self.parts = dict(parts)
        self.shares = dict(shares or {})
        self._names = list(parts)
        self.ends = list(accumulate(map(len, parts.values())))  # index after the last task of each part

    @property
    def sizes(self) -> dict[str, int]:
        """The number of tasks of each part."""
        return {name: len(tasks) for name, tasks in self.parts.items()}

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def _task(self, place: int) -> Task:
        name, own = self._find(place)
        return _named(name, self.parts[name][own])

    def __iter__(self) -> Iterator[Task]:
        return (_named(name, task) for name, tasks in self.parts.items() for task in tasks)

    def where(self, place: int) -> str:
        name, own = self._find(place)
        return self.parts[name].where(own)

    def shown(self, chat: AsMessages | None) -> MixedTasks:
        """Return the tasks with plain prompts converted to messages, or unconverted."""
        return self.shown_by(dict.fromkeys(self.parts, chat))

    def shown_by(self, chats: Mapping[str, AsMessages | None]) -> MixedTasks:
        """Return the tasks with plain prompts converted to messages, or unconverted, in each part by its own way."""
        return MixedTasks({name: tasks.shown(chats[name]) for name, tasks in self.parts.items()}, self.shares)

    def first(self, count: int) -> MixedTasks:
        """Return the first `count` tasks of each part."""
        return MixedTasks({name: tasks.first(count) for name, tasks in self.parts.items()})

    def each(self) -> list[MixedTasks]:
        """Return each part as a mixture of its own, with its name in the ids."""
        return [MixedTasks({name: tasks}) for name, tasks in self.parts.items()]

    def examples(self, count: int = 3) -> list[Task]:
        """Return about `count` tasks from all parts: at least one of each."""
        share = max(1, count // max(1, len(self.parts)))
        return [_named(name, task) for name, tasks in self.parts.items() for task in tasks.examples(share)]

    def taken(self) -> str:
        """Return a description of the columns in use."""
        return "; ".join(f"{name}: {tasks.taken()}" for name, tasks in self.parts.items())

    def _find(self, place: int) -> tuple[str, int]:
        place = range(len(self))[place]
        number = bisect_right(self.ends, place)
        return self._names[number], place - (self.ends[number - 1] if number else 0)


def _named(name: str, task: Task) -> Task:
    return {**task, "id": f"{name}{PART_SEPARATOR}{task['id']}"}


AnyTasks = Tasks | Stream | MixedTasks
"""Tasks to train on."""
