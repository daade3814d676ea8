"""Tasks of rows: which rows become tasks, which tasks are held out, and in which order they are visited.

`to_tasks` reads all rows once, to check them and to find repetitions. It stores a few numbers per row, which are cached
on disk (see `arrow_store.py`); a task itself is made from its row when it is needed. Every error is a UserError of one
line that names the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from posttrain.core.messages import clip
from posttrain.core.types import Task, UserError
from posttrain.data.arrow_store import Arrays, digest, keep_arrays
from posttrain.data.chat_prompts import AsMessages
from posttrain.data.row_files import Row, check_row
from posttrain.data.rows import Listed, Rows, load_rows
from posttrain.data.tasks_from_rows import Conversion, identified, key_of, own_id, question, quoted
from posttrain.system.user_code import describe_error

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
ENDLESS = 2**62  # length reported by an endless source
HELD_OUT = 500  # expected number of tasks held out of an endless source
LARGE = 10_000  # orders of at least this many tasks are cached


@dataclass(frozen=True, eq=False)
class Tasks(Sequence[Task]):
    """The tasks of rows, each made from its row when it is read."""

    rows: Rows
    conversion: Conversion
    at: Integers  # [n], the index of each task's row: ascending
    left_out: int = 0  # rows for which `convert` returned None
    merged: int = 0  # rows equal in every column to an earlier one, and merged with it
    draws: tuple[int, Floats] | None = None  # (seed, [n] numbers that decide which tasks are held out), if computed
    chat: AsMessages | None = None  # converts plain prompts to messages

    def __len__(self) -> int:
        return len(self.at)

    @overload
    def __getitem__(self, place: int) -> Task: ...
    @overload
    def __getitem__(self, place: slice) -> Tasks: ...
    def __getitem__(self, place: int | slice) -> Task | Tasks:
        if isinstance(place, slice):
            return self.some(np.arange(len(self))[place])
        row = int(self.at[place])
        return self._shown(self._make(row, self.rows[row]))

    def __iter__(self) -> Iterator[Task]:
        if 10 * len(self) < len(self.rows):
            return (self[place] for place in range(len(self)))
        return self._all()

    def where(self, place: int) -> str:
        """Return the place of a task's row: "train.jsonl:17"."""
        return self.rows.where(int(self.at[place]))

    def row(self, place: int) -> Row:
        """Return a task's row, with the columns of its file."""
        return self.rows[int(self.at[place])]

    def some(self, places: Integers) -> Tasks:
        """Return the tasks at these indices, which must be ascending."""
        draws = self.draws and (self.draws[0], self.draws[1][places])
        return replace(self, at=self.at[places], draws=draws)

    def shown(self, chat: AsMessages | None) -> Tasks:
        """Return the tasks with plain prompts converted to messages by `chat`; unconverted if it is None."""
        return replace(self, chat=chat)

    def first(self, count: int) -> Tasks:
        return self[:count]

    def examples(self, count: int = 3) -> list[Task]:
        """Return `count` tasks, spread over all, or fewer if there are not enough."""
        last, gaps = len(self) - 1, max(1, count - 1)
        return [self[place] for place in sorted({i * last // gaps for i in range(count)})]

    def taken(self) -> str:
        """Describe the columns in use: "prompt from 'question', response from 'answer'"."""
        row = int(self.at[0])
        return self.conversion.taken(self.rows[row], self._make(row, self.rows[row]))

    def _all(self) -> Iterator[Task]:
        first, done = 0, 0
        for block in self.rows.blocks():
            upto = int(np.searchsorted(self.at, first + len(block)))
            for row in self.at[done:upto].tolist():
                yield self._shown(self._make(row, block[row - first]))
            first, done = first + len(block), upto

    def _shown(self, task: Task) -> Task:
        return task if self.chat is None else self.chat(task)

    def _make(self, number: int, row: Row) -> Task:
        try:
            task = self.conversion(row)
            if task is None:
                raise UserError("this row made a task before: row_to_task must depend only on the row")
            return identified(task, self.conversion.kept)
        except UserError as error:
            raise UserError(f"{self.rows.where(number)}: {error}") from error


class TaskSequence(Sequence[Task]):
    """Tasks that `_task` makes, one at a time; a slice of them is a list."""

    @overload
    def __getitem__(self, place: int) -> Task: ...
    @overload
    def __getitem__(self, place: slice) -> list[Task]: ...
    def __getitem__(self, place: int | slice) -> Task | list[Task]:
        if isinstance(place, slice):
            return [self[each] for each in range(len(self))[place]]
        return self._task(place)

    def _task(self, place: int) -> Task:
        raise NotImplementedError


class Stream(TaskSequence):
    """Endless tasks: a function generates their rows, which are read in order, as far as needed.

    It is a sequence of `ENDLESS` tasks, so code that visits tasks by index (see `order`) needs no special case. The
    function is called again when it ends, for an index before the last one read, and when a run is resumed: it must
    generate the same rows each time. Repetitions are not detected.
    """

    def __init__(
        self,
        make: Callable[[], Iterable[Mapping[str, Any]]],
        conversion: Conversion,
        keep: Callable[[Task], bool] = lambda task: True,
        chat: AsMessages | None = None,
    ) -> None:
        self.make, self.conversion, self.keep, self.chat = make, conversion, keep, chat
        self._begin()

    def __len__(self) -> int:
        return ENDLESS

    def _task(self, place: int) -> Task:
        assert place >= 0, "an endless stream has no last task to count from"
        if place < self._count - 1:
            self._begin()
        while place >= self._count:
            self._last = next(self._made)
            self._count += 1
        return self._last[2] if self.chat is None else self.chat(self._last[2])

    def shown(self, chat: AsMessages | None) -> Stream:
        """Return the stream with plain prompts converted to messages, or unconverted."""
        return Stream(self.make, self.conversion, self.keep, chat)

    def where(self, place: int) -> str:
        self[place]
        return f"row {self._last[0]}"

    def examples(self, count: int = 3) -> list[Task]:
        """Return the first `count` tasks."""
        return self[:count]

    def taken(self) -> str:
        self[0]
        return self.conversion.taken(self._last[1], self._last[2])

    def first(self, count: int) -> Tasks:
        read = list(islice(self._read(), count))
        listed = Listed([row for _, row, _ in read], "row ", [number for number, _, _ in read])
        return Tasks(Rows([listed]), self.conversion, np.arange(len(read)), chat=self.chat)

    def _begin(self) -> None:
        self._made, self._count, self._last = self._read(), 0, (0, Row(), Task())

    def _read(self) -> Iterator[tuple[int, Row, Task]]:
        """Yield (row number, row, task)."""
        number = kept = 0
        while True:
            before = kept
            try:
                for given in self.make():
                    number += 1
                    row = check_row(given, "it")
                    task = self.conversion(row)
                    if task is not None and self.keep(task := identified(task, self.conversion.kept)):
                        kept += 1
                        yield number, row, task
            except UserError as error:
                raise UserError(f"row {number}: {error}") from error
            except (KeyboardInterrupt, GeneratorExit):
                raise
            except BaseException as error:  # the user's function may raise anything, or call exit()
                raise UserError(f"the row generator failed after {number}: {describe_error(error, None)}") from error
            if kept == before:
                raise UserError(
                    f"the row generator ended after {number} rows, and none of them makes a task"
                    if number
                    else "the row generator gives no rows"
                )


def to_tasks(
    rows: Rows | Iterable[Mapping[str, Any]],
    *,
    fields: Mapping[str, str] | None = None,
    prompt_template: str | None = None,
    response_template: str | None = None,
    teacher_prompt_template: str | None = None,
    convert: Callable[[Row], Task | None] | None = None,
    need: Sequence[str] = ("prompt",),
    split_seed: int | None = None,
    left_out: str = "",
    whole: bool = False,
) -> Tasks:
    """Convert each row to a Task, in these steps.

    1. `fields` renames: {"prompt": "question"} makes the column "question" the key "prompt", in place of a
       column of that name. The column keeps its old name too, except where that name is read here
       ("id", "prompt", "messages", "response", "completion", "stop"). Other columns are kept.
       Then rows of ShareGPT, Alpaca and verl are converted, unless a `convert` of the user reads them: see
       `row_shapes.py`.
    2. `convert` converts the row to a task, or returns None to leave it out (counted in `.left_out`). Where a response is
       needed, tasks without one are left out too: a problem without a worked solution is not a demonstration.
    3. Templates such as "Question: {question}\nAnswer:" make "prompt" and "response" from the columns of step 2.
       Only whole columns are filled in; braces inside the data are left alone.
    4. Where a response is needed, "completion" serves as well. A "prompt" that is a list is a conversation and becomes
       "messages", with the response as its last turn, the only one imitated. In a row of "messages" all assistant turns
       are imitated, except those with "weight": 0. Prompt, messages and response are checked.
       A "text" without prompt and reply is imitated as a whole: it becomes a response without a prompt.
    5. `need` names the required keys; a null or blank value counts as missing. "messages" serve as
       the prompt, and as prompt and response if they end with an assistant turn. If a row has both, the one that
       meets the requirement is kept, by preference the prompt; so a task never has two prompts.
    6. "id" is the row's own, as a string, and must be unique. A row without one gets a hash of all its columns, so rows
       that differ in any column (one prompt, two responses) have different ids, and equal rows are merged (`.merged`).

    All rows are checked here; their tasks are made later, one by one, by the same steps. So `convert` is called again
    for a row, and must return the same each time. `split_seed`: seed of a later `hold_out`, whose numbers are then computed
    in the same pass. `left_out` describes the rows that `convert` leaves out. `whole`: assistant turns of a prompt are
    imitated too.

    Raises UserError, in one line that names the row.
    """
    if not isinstance(rows, Rows):
        rows = load_rows(rows)
    templates = prompt_template, response_template, teacher_prompt_template
    conversion = Conversion(fields or {}, *templates, convert, tuple(need), left_out, whole)
    code = conversion.key() if rows.key else None
    name = code and digest("tasks", rows.key, code, split_seed)
    found = keep_arrays(name, lambda: _survey(rows, conversion, split_seed))
    missing, merged = len(rows) - int(found["made"]), int(found["made"]) - len(found["at"])
    if not len(found["at"]):
        raise UserError(
            f"no task is left: {missing} of {len(rows)} rows were left out{f', {left_out}' if left_out else ' by convert'}"
        )
    draws = None if split_seed is None else (split_seed, found["draws"])
    return Tasks(rows, conversion, found["at"], missing, merged, draws)


@overload
def hold_out(tasks: Tasks, fraction: float, seed: int = 0) -> tuple[Tasks, Tasks]: ...
@overload
def hold_out(tasks: Stream, fraction: float, seed: int = 0) -> tuple[Stream, Tasks]: ...
def hold_out(tasks: Tasks | Stream, fraction: float, seed: int = 0) -> tuple[Tasks | Stream, Tasks]:
    """Split tasks into (train, held out); both keep the order of `tasks`.

    A task's side depends only on the seed and the text of its prompt (or its conversation without the final assistant
    turn; its id if it has neither because the environment makes the prompt, or if all tasks have the same prompt). So
    the order of the rows does not matter, new rows never move old ones, equal prompts with different ids or responses
    are on the same side, and a larger fraction holds out the tasks of a smaller one and more. Each prompt is held out
    with probability `fraction`: the share is near it, not equal. Of a stream, tasks at its beginning are held out,
    `HELD_OUT` on average.

    Raises UserError if fraction is not between 0 and 1, or if one side would be empty.
    """
    if not 0 < fraction < 1:
        raise UserError(f"the held-out fraction is {fraction}; it must be between 0 and 1, for example 0.1")
    some = tasks.first(round(HELD_OUT / fraction)) if isinstance(tasks, Stream) else tasks
    known = some.draws is not None and some.draws[0] == seed
    draws = some.draws[1] if known and some.draws else _draws(seed, map(_asked, some.shown(None)))
    if len(draws) > 1 and (draws == draws[0]).all() and not isinstance(tasks, Stream):  # all tasks have the same prompt
        draws = _draws(seed, (quoted(task["id"]) for task in some))
    held_out = draws < fraction
    if held_out.all() or not held_out.any():
        side = "held out" if not held_out.any() else "left to train on"
        raise UserError(f"with fraction {fraction} none of the {len(some)} tasks is {side}; change it, or add tasks")
    if isinstance(tasks, Stream):

        def kept(task: Task) -> bool:
            return bool(_draws(seed, [_asked(task)])[0] >= fraction)

        left = Stream(tasks.make, tasks.conversion, kept, tasks.chat)
        return left, some.some(np.flatnonzero(held_out))
    return tasks.some(np.flatnonzero(~held_out)), tasks.some(np.flatnonzero(held_out))


def in_both(tasks: Tasks, others: Tasks, seed: int) -> int:
    """Return how many of `others` have a prompt that one of `tasks` has too.

    It is 0 where all of `tasks` have the same prompt, and where the environment makes the prompts: these do not
    distinguish tasks. `tasks` are not read again if they have `draws` of that seed.
    """
    known = tasks.draws is not None and tasks.draws[0] == seed
    draws = tasks.draws[1] if known and tasks.draws else _draws(seed, map(_asked, tasks.shown(None)))
    asked = [found for task in others.shown(None) if (found := question(task)) is not None]
    if len(draws) > 1 and (draws == draws[0]).all():
        return 0
    return int(np.isin(_draws(seed, asked), draws).sum())


def order(n: int, epoch: int, seed: int) -> Sequence[int]:
    """Return the order [n] in which epoch `epoch` (0, 1, ...) visits n tasks: a permutation, equal on every machine.

    It sorts the raw output of a Philox generator, which numpy keeps stable between releases, unlike `permutation`.
    Endless tasks are visited in their own order.
    """
    assert n >= 0 and epoch >= 0
    if n == ENDLESS:
        return range(n)
    return (_remembered if n > LARGE else _permutation)(n, epoch, seed)


def draw(
    n: int, first: int, count: int, seed: int, fits: Callable[[int], bool] = lambda place: True
) -> tuple[list[tuple[int, int]], int]:
    """Return the next `count` of n tasks that fit, as (visit, index), in the endless sequence of the epochs' orders.

    `first` is the number in that sequence to begin with, and the second result the number to continue with, so the
    state of drawing is one number. Visits distinguish equal indices: they are epochs or, for endless tasks, numbers of
    tasks. Raises UserError if no task fits.
    """
    drawn: list[tuple[int, int]] = []
    orders: dict[int, Sequence[int]] = {}
    number, missed = first, 0
    while len(drawn) < count:
        epoch, at = divmod(number, n)
        if epoch not in orders:
            orders[epoch] = order(n, epoch, seed)
        place = int(orders[epoch][at])
        if fits(place):
            drawn.append((number if n == ENDLESS else epoch, place))
            missed = 0
        else:
            missed += 1
        if missed >= min(n, LARGE):
            fix = "shorten them, or cut them with --too-long truncate"
            raise UserError(f"none of {missed:,} rows fits into the model's context: {fix}")
        number += 1
    return drawn, number


def _permutation(n: int, epoch: int, seed: int) -> Sequence[int]:
    keys = np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64)).random_raw(n)
    visits: Sequence[int] = np.argsort(keys, kind="stable")  # type: ignore[assignment]
    return visits


_remembered = lru_cache(maxsize=2)(_permutation)  # one step may need two epochs


# Going through all rows


class _SurveyedRows(NamedTuple):
    """Results of surveying rows, for each row that makes a task."""

    at: Integers  # indices of the rows
    keys: Integers  # see `key_of`
    own: NDArray[np.bool_]  # whether the id is the row's own
    draws: Floats  # see `hold_out`; empty if they were not requested


def _survey(rows: Rows, conversion: Conversion, split_seed: int | None) -> Arrays:
    """Return the rows that make a task ("at", without repetitions), their number with repetitions ("made"), and
    "draws".
    """
    found: list[_SurveyedRows] = []
    first = 0
    for block in rows.blocks():
        found.append(_plain(conversion, block, first, split_seed) or _each(rows, conversion, block, first, split_seed))
        first += len(block)
    at, keys, own, draws = (np.concatenate(column) for column in zip(*found, strict=True))
    kept = _without_repetitions(Tasks(rows, conversion, at), keys, own)
    return {"made": np.array(len(at)), "at": at[kept], "draws": draws[kept] if len(draws) else draws}


def _plain(conversion: Conversion, block: Sequence[Row], first: int, split_seed: int | None) -> _SurveyedRows | None:
    """Survey rows that are tasks without conversion, all at once; None if some may need one."""
    plain = conversion.plain(block)
    if plain is None or (split_seed is not None and plain.prompts is None):
        return None
    draws = np.empty(0) if split_seed is None else _draws(split_seed, map(quoted, plain.prompts or ()))
    count = len(block)
    return _SurveyedRows(first + np.arange(count), np.array(plain.keys, np.int64), np.full(count, plain.own), draws)


def _each(
    rows: Rows, conversion: Conversion, block: Sequence[Row], first: int, split_seed: int | None
) -> _SurveyedRows:
    at, keys, own, asked = [], [], [], []
    for number, row in enumerate(block, first):
        try:
            task = conversion(row)
            if task is None:
                continue
            keys.append(key_of(task, conversion.kept))
            own.append(own_id(task) is not None)
            if split_seed is not None:
                asked.append(question(task) or quoted(identified(task, conversion.kept)["id"]))
        except UserError as error:
            raise UserError(f"{rows.where(number)}: {error}") from error
        at.append(number)
    draws = np.empty(0) if split_seed is None else _draws(split_seed, asked)
    return _SurveyedRows(np.array(at, np.int64), np.array(keys, np.int64), np.array(own, bool), draws)


def _without_repetitions(tasks: Tasks, keys: Integers, own: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which tasks are kept, [n]. Raises UserError if a task has its row's own id and another task has it too."""
    if own.any() and not own.all():  # an own id may be equal to a hash
        keys[~own] = [hash(tasks[place]["id"]) for place in np.flatnonzero(~own).tolist()]
    ordered = np.argsort(keys, kind="stable")
    same = keys[ordered][1:] == keys[ordered][:-1]
    kept = np.ones(len(keys), dtype=bool)
    first: dict[str, int] = {}
    for place in np.union1d(ordered[1:][same], ordered[:-1][same]).tolist():
        id = tasks[place]["id"]
        if id not in first:
            first[id] = place
        elif own[place] or own[first[id]]:
            other = tasks.where(first[id])
            raise UserError(
                f"{tasks.where(place)}: id {clip(repr(id))} is already that of {other}; give every row an id of its own"
            )
        else:
            kept[place] = False
    return kept


def _asked(task: Task) -> str:
    return question(task) or quoted(task["id"])


def _draws(seed: int, asked: Iterable[str]) -> Floats:
    """Return a number in [0, 1) for each question: a hash, uniformly distributed."""
    digests = b"".join(blake2b(f"[{seed}, {question}]".encode(), digest_size=8).digest() for question in asked)
    return np.frombuffer(digests, ">u8") / 2**64
