"""Tasks made on demand: a function `tasks(seed, level)` makes new ones of each level of difficulty."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any

from posttrain.core.seeds import seed_of
from posttrain.core.types import Task, UserError
from posttrain.data.chat_prompts import AsMessages
from posttrain.data.tasks import Stream
from posttrain.data.tasks_from_rows import Conversion
from posttrain.system.user_code import describe_error

SPAN = 2**24  # places of a level: more tasks than a run visits
MOST_LEVELS = 2**31 // SPAN - 1  # as a place is recorded in 32 bits
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
MakeRows = Callable[[int, int], Iterable[Mapping[str, Any]] | None]
"""(seed, level from 1 on) -> rows; none beyond the last level."""


def makes_levels(function: Callable[..., Any]) -> bool:
    """Whether a function makes rows by level: it needs a seed and a level."""
    try:
        parameters = inspect.signature(function).parameters.values()
        return {"seed", "level"} == {p.name for p in parameters if p.default is p.empty and p.kind not in VARIADIC}
    except (TypeError, ValueError):  # no signature, as of some functions in C
        return False


class Levels(Stream):
    """Endless tasks of each level. The one at place `level * SPAN + number` is task `number` of `level` (0, 1, ...).

    Whenever the function's rows end it is called again with another seed, so that one which returns a few rows makes
    new ones all the time. Tasks that are shown before the run (see `examples`) are of the first level.
    """

    def __init__(self, of_level: MakeRows, conversion: Conversion, seed: int, chat: AsMessages | None = None) -> None:
        self.of_level, self.seed = of_level, seed
        self._others: dict[int, Stream] = {}
        super().__init__(partial(self._rows, 0), conversion, chat=chat)

    def _task(self, place: int) -> Task:
        level, number = divmod(place, SPAN)
        return self._of(level)[number] if level else super()._task(number)

    def shown(self, chat: AsMessages | None) -> Levels:
        return Levels(self.of_level, self.conversion, self.seed, chat)

    def where(self, place: int) -> str:
        level, number = divmod(place, SPAN)
        return f"{self._of(level).where(number) if level else super().where(number)} of level {level + 1}"

    def has(self, level: int) -> bool:
        """Whether there are tasks of a level: rows, and no IndexError of a list of levels that has ended.

        Raises UserError if the function fails otherwise.
        """
        try:
            return level < MOST_LEVELS and next(self._rows(level), None) is not None
        except (IndexError, KeyError):
            return False
        except (Exception, SystemExit) as error:  # the user's function may raise anything
            raise UserError(f"making rows of level {level + 1} failed: {describe_error(error, None)}") from error

    def _of(self, level: int) -> Stream:
        if level not in self._others:
            self._others[level] = Stream(partial(self._rows, level), self.conversion, chat=self.chat)
        return self._others[level]

    def _rows(self, level: int) -> Iterator[Mapping[str, Any]]:
        for batch in count():
            some = False
            for row in self.of_level(seed_of(self.seed, "level", level, batch), level + 1) or ():
                some = True
                yield row
            if not some:
                return
