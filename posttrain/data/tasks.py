"""From rows to tasks. Decides what makes a row a task, and which tasks are held out.

`to_tasks` renames, converts, fills templates and checks the rows that `load_rows` read, `hold_out` splits the tasks,
`order` says in which order an epoch visits them. Whatever is wrong is a UserError of one line that names the row.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

from posttrain.data.rows import Row, Rows, load_rows, no_column, one_line
from posttrain.types import Task, UserError

Pattern = list[tuple[str, str | None]]  # a template: literal text, and the column to put after it

ROLES = ("system", "user", "assistant", "tool")


class Tasks(list[Task]):
    """The tasks that came of some rows, and how many rows gave none."""

    left_out: int = 0  # rows for which `convert` returned None
    merged: int = 0  # rows equal in every column to one before them, kept once


def to_tasks(
    rows: Rows | Iterable[Mapping[str, Any]],
    *,
    fields: Mapping[str, str] | None = None,
    prompt_template: str | None = None,
    response_template: str | None = None,
    convert: Callable[[Row], Task | None] | None = None,
    need: Sequence[str] = ("prompt",),
) -> Tasks:
    """Make each row a Task, in this order.

    1. `fields` renames: {"prompt": "question"} makes the column "question" the key "prompt", in place of a
       column already called so; other columns are kept.
    2. `convert` makes the row a task, or returns None to leave it out (counted in `.left_out`).
    3. Templates such as "Question: {question}\\nAnswer:" make "prompt" and "response" of the columns there are now.
       Only whole columns are filled in; braces inside the data are left alone.
    4. A "prompt" that is a list is a conversation and becomes "messages". Prompt, messages and response are checked.
    5. `need` names the keys this use cannot do without; a null or blank value counts as missing. "messages" serve as
       the prompt, and as prompt and response if they end with an assistant turn. Of a row that has both, the one that
       meets the need is kept, the prompt first; so a task never has two prompts.
    6. "id" is the row's own, as a string, and must be unique. A row without one gets a hash of all its columns, so rows
       that differ in anything (one prompt, two responses) stay apart, and exact repetitions are kept once (`.merged`).

    Raises UserError, in one line that names the row.
    """
    if not isinstance(rows, Rows):
        rows = load_rows(rows)
    patterns = {
        key: _parse_template(template, f"{key}_template")
        for key, template in (("prompt", prompt_template), ("response", response_template))
        if template is not None
    }
    tasks = Tasks()
    seen: dict[str, tuple[str, bool]] = {}  # id -> the place of its row, and whether the id is the row's own
    for index, row in enumerate(rows):
        where = rows.where(index)
        task = _rename(row, fields or {}, where)
        converted = task if convert is None else _convert(task, convert, where)
        if converted is None:
            tasks.left_out += 1
            continue
        task = _meet(_check(_fill(converted, patterns, where), where), need, where)
        task, own = _identify(task, where)
        if task["id"] not in seen:
            seen[task["id"]] = (where, own)
            tasks.append(task)
        elif own or seen[task["id"]][1]:
            first = seen[task["id"]][0]
            raise UserError(f"{where}: id {task['id']!r} is already that of {first}; give every row an id of its own")
        else:
            tasks.merged += 1
    if not tasks:
        raise UserError(f"no task is left: {tasks.left_out} of {len(rows)} rows were left out by convert")
    return tasks


def hold_out(tasks: Sequence[Task], fraction: float, seed: int = 0) -> tuple[list[Task], list[Task]]:
    """Split tasks into (train, held out); both keep the order of `tasks`.

    A task's side depends on the seed and the text of its prompt alone (of its conversation without the final assistant
    turn; of its id where it has neither). So the order of the rows does not matter, new rows never move old ones, equal
    prompts under different ids or with different responses fall on the same side, and a larger fraction holds out what
    a smaller one did and more. Each prompt is held out with probability `fraction`: the share is near it, not equal.

    Raises UserError if fraction is not between 0 and 1, or if one side would be empty.
    """
    if not 0 < fraction < 1:
        raise UserError(f"the held-out fraction is {fraction}; it must be between 0 and 1, for example 0.1")
    train: list[Task] = []
    held_out: list[Task] = []
    for task in tasks:
        draw = int(_hash([seed, _question(task)]), 16) / 2**64  # uniform in [0, 1)
        (held_out if draw < fraction else train).append(task)
    if not train or not held_out:
        side = "held out" if not held_out else "left to train on"
        raise UserError(f"with fraction {fraction} none of the {len(tasks)} tasks is {side}; change it, or add tasks")
    return train, held_out


def order(n: int, epoch: int, seed: int) -> Sequence[int]:
    """The order [n] in which epoch `epoch` (0, 1, ...) visits n tasks: a permutation, the same on every machine.

    It sorts the raw output of a Philox generator, which numpy keeps stable between releases; `permutation` is not.
    """
    assert n >= 0 and epoch >= 0
    keys = np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64)).random_raw(n)
    visits: list[int] = np.argsort(keys, kind="stable").tolist()
    return visits


# From a row to a task


def _rename(row: Row, fields: Mapping[str, str], where: str) -> Task:
    for column in fields.values():
        if column not in row:
            raise UserError(f"{where}: {no_column(column, row)}")
    moved = set(fields.values()) | set(fields)
    return {key: row[column] for key, column in fields.items()} | {
        key: value for key, value in row.items() if key not in moved
    }


def _convert(row: Row, convert: Callable[[Row], Task | None], where: str) -> Task | None:
    try:
        task = convert(row)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except Exception as error:  # the function may be the user's and fail in any way; what helps is to know the row
        problem = f"{type(error).__name__}: {one_line(error)}"
        if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str) and error.args[0] not in row:
            problem = no_column(error.args[0], row)
        raise UserError(f"{where}: {_name(convert)}: {problem}") from error
    if task is not None and not isinstance(task, dict):
        raise UserError(f"{where}: {_name(convert)} returned a {type(task).__name__}; it must return a dict or None")
    return None if task is None else dict(task)


def _parse_template(template: str, name: str) -> Pattern:
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UserError(f"{name}: {error}; write {{column}}, and {{{{ or }}}} for a brace") from error
    for _, column, form, conversion in parts:
        if column is not None and (form or conversion):
            raise UserError(f"{name}: a column takes no format or conversion; write {{{column}}}")
    return [(text, column) for text, column, _, _ in parts]


def _fill(task: Task, patterns: Mapping[str, Pattern], where: str) -> Task:
    """The task with the texts that templates make of it; a templated prompt takes the place of any conversation."""
    filled = {}
    for key, pattern in patterns.items():
        place = f"{where}: {key}_template"
        filled[key] = "".join(
            text + (_cell(task, column, place) if column is not None else "") for text, column in pattern
        )
    return {key: value for key, value in task.items() if key != "messages" or "prompt" not in filled} | filled


def _cell(task: Task, column: str, place: str) -> str:
    # The name is looked up as it stands: "a.b" and "a[0]" are columns of that name, never an access into a value.
    if column not in task:
        raise UserError(f"{place}: {no_column(column, task)}")
    if not isinstance(task[column], str | int | float):
        raise UserError(f"{place}: column {column!r} holds a {type(task[column]).__name__}, not text or a number")
    return str(task[column])


def _check(task: Task, where: str) -> Task:
    """The task without null prompt and messages, a list for a prompt taken as messages, and both of the right type."""
    task = {key: value for key, value in task.items() if value is not None or key not in ("prompt", "messages")}
    if isinstance(task.get("prompt"), list):
        task["messages"] = task.pop("prompt")
    if "prompt" in task and not _text(task["prompt"], "prompt", where).strip():
        raise UserError(f"{where}: the prompt is empty")
    if "messages" in task:
        task["messages"] = _messages(task["messages"], where)
    return task


def _messages(messages: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise UserError(f'{where}: messages must be a list of {{"role": ..., "content": ...}}, with at least one')
    checked = []
    for number, message in enumerate(messages, 1):
        place = f"{where}: message {number}"
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise UserError(f'{place} must be an object with "role" and "content"')
        if message["role"] not in ROLES:
            raise UserError(f"{place}: role {message['role']!r} is not one of {', '.join(ROLES)}")
        _text(message["content"], "content", place)
        # Table formats give every message the keys of all; templates ask whether a key is there, so nulls must go.
        checked.append({key: value for key, value in message.items() if value is not None})
    return checked


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: {name} must be text, and is a {type(value).__name__}")
    if not value.isascii() and re.search("[\ud800-\udfff]", value):
        raise UserError(f"{where}: {name} holds half a surrogate pair, which is not a character; remove it")
    return value


def _meet(task: Task, need: Sequence[str], where: str) -> Task:
    """The task with one prompt: "prompt" or "messages", whichever meets the need."""
    missing = [key for key in need if _blank(task.get(key))]
    plain = "prompt" in task and "messages" not in need and not missing
    if "messages" in task and not plain and set(missing) <= {"prompt", "response"}:
        last = task["messages"][-1]
        if "response" in need and (last["role"] != "assistant" or _blank(last["content"])):
            raise UserError(
                f"{where}: the messages must end with the assistant turn to imitate, and it must not be empty"
            )
        if "prompt" in need and "response" not in need and last["role"] == "assistant":
            raise UserError(f"{where}: the messages end with an assistant turn; drop it, the model is to write it")
        return {key: value for key, value in task.items() if key != "prompt"}
    if missing:
        has = ", ".join(key for key, value in task.items() if not _blank(value)) or "nothing"
        named = " ".join(f"--fields.{name} COLUMN" for name in missing)
        raise UserError(f"{where}: no {' and no '.join(missing)}; the row has: {has}; say which column it is: {named}")
    if "response" in need:
        _text(task["response"], "response", where)
    return {key: value for key, value in task.items() if key != "messages" or "prompt" not in task}


def _identify(task: Task, where: str) -> tuple[Task, bool]:
    """The task with its id, and whether the id is the row's own."""
    id = task.get("id")
    rest = {key: value for key, value in task.items() if key != "id"}
    if id is None or id == "":
        try:
            return {"id": _hash(rest), **rest}, False
        except TypeError as error:
            raise UserError(f"{where}: {error}; give the rows an id") from error
    if isinstance(id, bool) or not isinstance(id, str | int):
        raise UserError(f"{where}: the id must be text or a whole number, and is a {type(id).__name__}")
    return {"id": str(id), **rest}, True


def _question(task: Task) -> Any:
    """What the policy is asked, by which tasks are told apart when they are split."""
    if "prompt" in task:
        return task["prompt"]
    if "messages" not in task:
        return task["id"]
    messages = task["messages"]
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


def _hash(value: Any) -> str:
    """64 bits in hexadecimal, the same in every process and for every order of keys."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=_plain).encode(), digest_size=8).hexdigest()


def _plain(value: Any) -> Any:
    """What json cannot write, as it can; only for types whose text is the same in every process."""
    if hasattr(value, "tolist"):  # arrays
        return value.tolist()
    if isinstance(value, bytes | date | time | timedelta | Decimal):
        return repr(value)
    raise TypeError(f"a value of type {type(value).__name__} gives no stable id")


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())
