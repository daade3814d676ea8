"""Converts a row to a task: the requirements, and the task's id.

Every error in a row is a UserError of one line, to which `tasks.py` adds the row's place.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import string
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import repeat
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.core import user_files
from posttrain.core.conversation import ROW_VARIABLES
from posttrain.core.json_text import known
from posttrain.core.messages import one_line, short
from posttrain.core.pictures import PictureError, parts
from posttrain.core.tool_calls import CALLS, read_calls
from posttrain.core.types import ROLES, Task, UserError
from posttrain.data.arrow_store import digest
from posttrain.data.chat_prompts import unlearned, without_marks
from posttrain.data.row_files import Row
from posttrain.data.row_shapes import CONVERTED, LIKE, WHOLE, column_of_messages, reshaped, shape_of
from posttrain.data.rows import no_column, quoted_names, value_in

Pattern = list[tuple[str, str | None]]  # a template: pairs of literal text and the column after it
Convert = Callable[[Row], Task | None]

READ = ("id", "prompt", "messages", "response", "completion", "stop")  # columns that are read under their own names
REPLIES = ("response", "completion")  # columns with the text to imitate; the second is TRL's
_SLOW = {"messages", "stop", ROW_VARIABLES}  # columns that are always converted
SCALARS = {str, int, float, bool, type(None)}
OWN = str(Path(__file__).parents[1]) + os.sep  # the package
quoted: Callable[[str], str] = json.encoder.encode_basestring_ascii  # a text as JSON


class Plain(NamedTuple):
    """Keys of rows that are tasks without conversion."""

    keys: list[int]  # see `key_of`
    own: bool  # whether these are the rows' own ids
    prompts: Sequence[str] | None


@dataclass(frozen=True)
class Conversion:
    """Converts rows to tasks: see `to_tasks` for its steps and their order."""

    fields: Mapping[str, str] = field(default_factory=dict)
    prompt_template: str | None = None
    response_template: str | None = None
    teacher_prompt_template: str | None = None
    convert: Convert | None = None
    need: Sequence[str] = ("prompt",)
    left_out: str = ""  # a description of the rows that `convert` leaves out
    whole: bool = False  # whether assistant turns of a prompt of messages are imitated too

    @cached_property
    def kept(self) -> frozenset[str]:
        """Return the renamed columns that a task keeps under their old names too, for the user's code. They are no part
        of its identity.
        """
        return frozenset() if self.convert else frozenset(self.fields.values()) - {*self.fields, *READ}

    @property
    def reshapes(self) -> bool:
        """Return whether rows in other trainers' shapes are converted: not if the user's own function reads them."""
        return "prompt" in self.need and (self.convert is None or bool(self.left_out))

    @cached_property
    def patterns(self) -> dict[str, Pattern]:
        templates = {
            "prompt": self.prompt_template,
            "response": self.response_template,
            "teacher_prompt": self.teacher_prompt_template,
        }
        return {key: parse_template(text, f"{key}_template") for key, text in templates.items() if text is not None}

    def __call__(self, row: Row) -> Task | None:
        """Convert a row to a task without its id; None if `convert` leaves it out."""
        task = self._renamed(row) if self.fields else row
        if self.reshapes:
            task = reshaped(task)
        if self.convert is not None:
            converted = _converted(dict(task), self.convert)
            unanswered = "response" in self.need and not {"messages", "replies", *REPLIES} & (converted or {}).keys()
            if converted is None or (unanswered and not self._is_whole(converted)):
                return None
            task = converted
        if self.patterns:
            task = _filled(task, self.patterns)
        if {"prompt", "response"} <= {*self.need} and self._is_whole(task):
            return _of_text(task)
        if "response" in self.need:
            task = _with_reply(task, self.whole)
        named = row if self.convert is None or self.left_out else None  # the user's own function names its own
        task = _met(_checked(task), self.need, named)
        if "prompt" in self.need and "response" not in self.need:  # for environments of one turn, which show it
            _check_stop(task.get("stop"))
        return task

    def _is_whole(self, task: Task) -> bool:
        """Return whether a row has a text to imitate as a whole: no prompt and reply, or a text that `fields` names."""
        if _blank(task.get("text")):
            return False
        named = "text" in self.fields and "prompt" not in {*self.fields, *self.patterns}
        return named or shape_of(task) == WHOLE

    def plain(self, rows: Sequence[Row]) -> Plain | None:
        """Return the keys of rows that are tasks without conversion; None if some may need it.

        It reads columns instead of rows, which is ten times as fast. It accepts only clear cases: rows with the same
        columns of text and numbers, whose required columns are all nonblank text.
        """
        columns = self._columns(rows)
        if columns is None or self.convert is not None or self.patterns or _SLOW & columns.keys():
            return None
        if self.reshapes and {"conversations", "instruction", "reward_model", "history"} & columns.keys():
            return None
        kinds = {name: set(map(type, values)) for name, values in columns.items()}
        texts = {name for name, kind in kinds.items() if kind == {str}}
        checked = {*self.need, *({"prompt", "id"} & columns.keys())}
        if not checked <= texts or not all(kind <= SCALARS for kind in kinds.values()):
            return None
        for values in map(columns.__getitem__, checked):
            if not all(values) or any(map(str.isspace, values)) or not all(map(_is_text, values)):
                return None
        prompts = columns.get("prompt")
        if "id" in columns:
            return Plain(list(map(hash, columns["id"])), True, prompts)
        names = sorted(columns)
        written = (columns[name] if name in texts else map(_written, columns[name]) for name in names)
        return Plain(list(map(hash, zip(repeat(tuple(names), len(rows)), *written, strict=True))), False, prompts)

    def _columns(self, rows: Sequence[Row]) -> dict[str, list[Any]] | None:
        """Return the columns of rows under the names of `fields`; None if the rows have different ones."""
        width = len(rows[0])
        if any(len(row) != width for row in rows):
            return None
        try:
            columns = {name: list(map(itemgetter(name), rows)) for name in rows[0]}
            renamed = {key: columns[column] for key, column in self.fields.items()}
        except KeyError:
            return None
        return {name: columns[name] for name in columns.keys() - set(self.fields.values())} | renamed

    def taken(self, row: Row, task: Task) -> str:
        """Describe the columns in use, for a row and its task."""

        if self.reshapes and (shape := shape_of(row)) in CONVERTED and reshaped(row) is not row:
            return f"{shape}: {CONVERTED[shape]}"

        def columns(*names: str) -> list[str]:
            return [column for name in names if not _blank(row.get(column := self.fields.get(name, name)))]

        if self.convert is not None and self.left_out:  # our own, for comparisons: it reads any columns
            named = [f"{key} from {column!r}" for key, column in self.fields.items()]
            there = [name for name, value in row.items() if not _blank(value) and name not in self.fields.values()]
            others = [f"{'other ' if named else 'of '}columns {', '.join(map(repr, there[:8]))}"] if there else []
            return ", ".join([*named, *others])
        if self.convert is not None:
            return f"{_name(self.convert)} makes the tasks"
        if "response" in task and not {"prompt", "messages"} & task.keys():
            return f"all of the text from {self.fields.get('text', 'text')!r}"
        prompts, replies = columns("prompt"), columns(*REPLIES)[:1] if "response" in self.need else []
        said: dict[str, list[str]] = {"prompt": prompts, "response": replies}
        if "messages" in task:
            before = [] if columns("messages") else columns("history")
            apart = before or (prompts and isinstance(row[prompts[0]], list))
            said = {"messages": [*before, *prompts, *replies] if apart else columns("messages")}
        said |= {key: [f"{key}_template"] for key in self.patterns}
        words = ", ".join(f"{key} from {' and '.join(map(repr, names))}" for key, names in said.items() if names)
        return words or "the environment makes the prompts"

    def _renamed(self, row: Row) -> Row:
        """Return the row with columns renamed by `fields`. The old names are kept too: see `kept`."""
        renamed = {key: _named_by(row, key, column) for key, column in self.fields.items()}
        moved = set(self.fields) if self.convert else {*self.fields, *self.fields.values()} - self.kept
        return renamed | {name: value for name, value in row.items() if name not in moved}

    def key(self) -> str | None:
        """Return a name for this conversion that changes with the code and the options; None if the code cannot be
        hashed.
        """
        code = _code(self.convert)
        templates = self.prompt_template, self.response_template, self.teacher_prompt_template
        options = (sorted(self.fields.items()), *templates, list(self.need), *(["whole"] if self.whole else []))
        return code and digest(code, *options)


def identified(task: Task, copies: Set[str] = frozenset()) -> Task:
    """Return the task with its id: the row's own as text, or a hash of all its columns except `copies` of others."""
    id, rest = own_id(task), {key: value for key, value in task.items() if key != "id"}
    if id is None:
        id = _hash({key: value for key, value in rest.items() if key not in copies} if copies else rest)
    return {"id": id, **rest}


def own_id(task: Task) -> str | None:
    """Return the row's own id, or None."""
    id = task.get("id")
    if id is None or id == "":
        return None
    if isinstance(id, bool) or not isinstance(id, str | int):
        raise UserError(f"the id must be text or a whole number, and is {short(id)}")
    try:
        return _text(id if isinstance(id, str) else str(id), "the id")
    except UserError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise UserError("the id is a number with too many digits: write it as text") from error


def key_of(task: Task, copies: Set[str] = frozenset()) -> int:
    """Return a number, cheaper than an id, that is equal for tasks with equal ids, unless one of the ids is a row's
    own.
    """
    id = own_id(task)
    if id is not None:
        return hash(id)
    try:
        names = sorted(name for name in task if name != "id" and name not in copies)
        return hash((tuple(names), *(_written(task[name]) for name in names)))
    except TypeError as error:
        raise UserError(f"{error}; give the rows an id") from error


def question(task: Task) -> str | None:
    """Return the prompt, or a text without one, as JSON, by which tasks are split; None: the id is used instead."""
    if "prompt" in task:
        return quoted(task["prompt"])
    if "messages" not in task:
        return quoted(task["text"]) if "response" in task and task.get("text") == task["response"] else None
    messages = without_marks(task["messages"])
    return _dumps(messages[:-1] if messages[-1]["role"] == "assistant" else messages)


# The steps of a conversion


def _named_by(row: Row, key: str, column: str) -> Any:
    try:
        return value_in(row, column)
    except UserError as error:
        raise UserError(f"{error}; name it with --fields.{key} COLUMN") from None


def _converted(row: Row, convert: Convert) -> Task | None:
    try:
        task = convert(row)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the user's function may fail in any way; the row helps to find the error
        problem = f"{type(error).__name__}: {one_line(error)}"
        if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str) and error.args[0] not in row:
            problem = no_column(error.args[0], row)
        raise UserError(f"{_name(convert)}: {problem}") from error
    if task is not None and not isinstance(task, dict):
        raise UserError(f"{_name(convert)} returned a {type(task).__name__}; it must return a dict or None")
    return dict.copy(task) if task is not None else None  # a plain dict: a subclass may do anything when it is read


def parse_template(template: str, name: str) -> Pattern:
    """Parse a template into literal texts and columns. Raises UserError, whose message begins with `name`."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UserError(f"{name}: {error}; write {{column}}, and {{{{ or }}}} for a brace") from error
    for _, column, form, conversion in parts:
        if column is not None and (form or conversion):
            raise UserError(f"{name}: a column takes no format or conversion; write {{{column}}}")
    return [(text, column) for text, column, _, _ in parts]


def _filled(task: Task, patterns: Mapping[str, Pattern]) -> Task:
    """Fill in templates; a prompt from a template replaces any conversation."""
    filled = {}
    for key, pattern in patterns.items():
        filled[key] = "".join(
            text + (_cell(task, column, f"{key}_template") if column is not None else "") for text, column in pattern
        )
    return {key: value for key, value in task.items() if key != "messages" or "prompt" not in filled} | filled


def _cell(task: Task, column: str, place: str) -> str:
    # The name is looked up literally: "a.b" and "a[0]" are columns of that name, never an access into a value.
    if column not in task:
        raise UserError(f"{place}: {no_column(column, task)}")
    if not isinstance(task[column], str | int | float):
        raise UserError(f"{place}: column {column!r} holds a {type(task[column]).__name__}, not text or a number")
    return str(task[column])


def _of_text(task: Task) -> Task:
    """Return the task of a text to imitate as a whole: its "text" is its "response", and it has no prompt."""
    rest = {key: value for key, value in task.items() if key not in {"prompt", "messages", *REPLIES}}
    return {**rest, "response": _text(task["text"], "text")}


def _with_reply(task: Task, whole: bool) -> Task:
    """Return the task with the text to imitate as "response", or as the last message if the prompt is "messages".

    These are TRL's two forms of rows with a prompt and a completion. Assistant turns of the prompt get weight 0, unless
    the `whole` text is imitated: they are context, such as the answers of examples.
    """
    name = next((name for name in REPLIES if not _blank(task.get(name))), None)
    if name is None or (name == "response" and not isinstance(task.get("prompt"), list)):
        return task
    reply, prompt = task[name], task.get("prompt")
    rest = {key: value for key, value in task.items() if key not in REPLIES}
    if not isinstance(prompt, list):
        if isinstance(reply, list):
            raise UserError(f"the {name} holds messages and the prompt is text; make both text, or both messages")
        return {**rest, "response": reply}
    turns = reply if isinstance(reply, list) else [{"role": "assistant", "content": reply}]
    return {key: value for key, value in rest.items() if key != "prompt"} | {
        "messages": [*(prompt if whole else unlearned(prompt)), *turns]
    }


def _checked(task: Task) -> Task:
    """Return the task with valid types: null prompt and messages removed, and a prompt that is a list moved to
    "messages".
    """
    if any(name in task and task[name] is None for name in ("prompt", "messages")):
        task = {key: value for key, value in task.items() if value is not None or key not in ("prompt", "messages")}
    if isinstance(task.get("prompt"), list):
        task = {key: value for key, value in task.items() if key != "prompt"} | {"messages": task["prompt"]}
    if "prompt" in task:
        task = {**task, "prompt": (prompt := _text(task["prompt"], "prompt"))}
        if not prompt.strip():
            raise UserError("the prompt is empty")
    if "messages" in task:
        task = {**task, "messages": _messages(task["messages"])}
    if ROW_VARIABLES in task:
        task = {**task, ROW_VARIABLES: _variables(task[ROW_VARIABLES])}
    if isinstance(task.get("tools"), str):  # JSON, in which table formats keep values of varying types
        try:
            task = {**task, "tools": json.loads(task["tools"])}
        except ValueError:
            raise UserError("tools is text but not JSON: give a list of JSON schemas of functions") from None
    return task


def _variables(given: Any) -> dict[str, Any]:
    """Return the variables of a chat template; those without a value are other rows' where a table has one column."""
    if given is not None and not isinstance(given, dict):
        raise UserError(f'{ROW_VARIABLES} is {short(given)}, not an object such as {{"enable_thinking": false}}')
    return {name: value for name, value in (given or {}).items() if value is not None}


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise UserError('messages must be a list of {"role": ..., "content": ...}, with at least one')
    checked = []
    for number, message in enumerate(messages, 1):
        if isinstance(message, dict) and message.get("tool_calls"):
            message = {"content": None, **message}  # TRL's rows have no content in such a turn
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise UserError(f'message {number} must be an object with "role" and "content"')
        if message["role"] not in ROLES:
            raise UserError(f"message {number}: role {message['role']!r} is not one of {', '.join(ROLES)}")
        weight = message.get("weight")
        if weight is not None and (weight not in (0, 1) or message["role"] != "assistant"):
            raise UserError(
                f"message {number}: weight is {short(weight)}; give assistant turns 0 (context) or 1 (imitated), others none"
            )
        train = message.get("train")
        if train is not None and (type(train) is not bool or (train and message["role"] != "assistant")):
            raise UserError(
                f"message {number}: train is {short(train)}; give assistant turns true or false, others false or none"
            )
        calls = message.get("tool_calls")
        if calls is not None:
            try:
                message = {**message, "tool_calls": read_calls(calls)}
            except ValueError as error:
                raise UserError(f"message {number}: tool_calls must be a list of {CALLS}: {error}") from None
        content = "" if message["content"] is None and calls else message["content"]
        message = {**message, "content": _content(content, message["role"], f"message {number}: content")}
        # Table formats give every message all keys; templates test whether a key exists, so null values are removed.
        checked.append({key: value for key, value in message.items() if value is not None})
    return checked


def _content(content: Any, role: str, name: str) -> str | list[dict[str, Any]]:
    """Return text, or a list of parts if it contains a picture."""
    if not isinstance(content, list):
        return _text(content, name)
    try:  # table formats give every part all keys
        found = parts([{k: v for k, v in p.items() if v is not None} if isinstance(p, dict) else p for p in content])
    except PictureError as error:
        raise UserError(f"{name}: {error}") from None
    if all(part["type"] == "text" for part in found):
        return _text("".join(part["text"] for part in found), name)
    if role == "assistant":
        raise UserError(f"{name} has a picture, and models write only text: give it to another role")
    return [{**part, "text": _text(part["text"], name)} if part["type"] == "text" else part for part in found]


def _check_stop(stop: Any) -> None:
    """Check stop: null, one stop string, or several, as in a turn."""
    if stop is None:
        return
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple):
        raise UserError(f"stop must be text or a list of texts, not {type(stop).__name__}; leave it out for none")
    for each in stops:
        if not _text(each, "stop" if stops is not stop else "each stop"):
            raise UserError("stop has an empty string, at which every reply would end: leave it out")


def not_text(value: Any, what: str) -> UserError:
    """Return the error for a value that should be text; `what`: "prompt must be text"."""
    return UserError(
        f"{what}, and is {short(value)}" + ("; put it in quotes" if isinstance(value, int | float) else "")
    )


def _text(value: Any, name: str) -> str:
    """Return a plain str: a converter may return a subclass with own methods."""
    if not isinstance(value, str):
        raise not_text(value, f"{name} must be text")
    value = str.__str__(value)
    if not _is_text(value):
        raise UserError(f"{name} has half a surrogate pair, which is not a character: remove it")
    return value


def _is_text(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _pairs(task: Task) -> UserError:
    """Return the error for a row of a preference pair, where a response is needed."""
    whole = "messages" if isinstance(task["chosen"], list) else "text"
    key = "response" if {"prompt", "messages"} & task.keys() else whole
    return UserError(
        f"chosen and rejected are a preference pair, which posttrain prefer learns from; --fields.{key} chosen imitates the "
        "chosen one"
    )


def _of_messages(task: Task) -> UserError:
    """Return the error for a response that is a list of messages, where the prompt is none."""
    turns = task["response"]
    column = next((name for name, value in task.items() if value is turns and name != "response"), "response")
    if any(turn.get("role") == "user" for turn in turns):
        return UserError(
            f"the response is a whole conversation: --fields.messages {column} imitates it; rows whose response is text go "
            "into a file of their own"
        )
    return UserError("the response holds messages and the prompt is text: make both text, or both messages")


def _met(task: Task, need: Sequence[str], row: Row | None = None) -> Task:
    """Return the task with one prompt: "prompt" or "messages", whichever meets the need. `row`: its row of a file, whose
    columns errors name.
    """
    turns = task.get("response") if "response" in need else None
    if isinstance(turns, list) and turns and all(isinstance(turn, dict) and "role" in turn for turn in turns):
        raise _of_messages(task)
    if "response" in need and _blank(task.get("response")) and _is_played(task):
        return task
    missing = [key for key in need if _blank(task.get(key))]
    plain = "prompt" in task and "messages" not in need and not missing
    if "messages" in task and not plain and set(missing) <= {"prompt", "response"}:
        last = task["messages"][-1]
        said = not _blank(last["content"]) or last.get("tool_calls")
        if "response" in need and (last["role"] != "assistant" or not said):
            if {"chosen", "rejected"} <= task.keys():
                raise _pairs(task)
            raise UserError("the messages must end with the assistant turn to imitate, and it must not be empty")
        if "prompt" in need and "response" not in need and last["role"] == "assistant":
            raise UserError("the messages end with an assistant turn, which the model is to write: remove it")
        return {key: value for key, value in task.items() if key != "prompt"}
    if "response" in missing and {"chosen", "rejected"} <= task.keys():
        raise _pairs(task)
    if missing:
        row = task if row is None else row
        there = [str(key)[:40] for key, value in row.items() if not _blank(value)]
        has = quoted_names(there[:12]) + (", ..." if len(there) > 12 else "") or "nothing"
        like = {name: next((like for like in LIKE.get(name, ()) if like in there), "COLUMN") for name in missing}
        named = " ".join(f"--fields.{name} {column}" for name, column in like.items())
        if "prompt" in missing and (talk := column_of_messages(row)) is not None:
            named = f"--fields.messages {shlex.quote(talk)}"
        elif {"prompt", "response"} <= {*need} and "COLUMN" in like.values():
            named += ", or that of a text to train as a whole: --fields.text COLUMN"
        raise UserError(f"no {' and no '.join(missing)}; the row has: {has}; name its column: {named}")
    if "response" in need:
        task = {**task, "response": _text(task["response"], "response")}
    if "messages" in task and "prompt" in task:
        task = {key: value for key, value in task.items() if key != "messages"}
    return task


def _is_played(task: Task) -> bool:
    """Return whether the task is an episode to imitate: a rollout of a run, or the replies of one."""
    if isinstance(task.get("transcripts"), list) and isinstance(task.get("turns"), list):
        return True
    return is_script(task) and bool(script(task))


def is_script(task: Task) -> bool:
    """Return whether a row has the replies of an episode. In a table, other rows have that column too, but empty."""
    return isinstance(task.get("replies"), list | tuple) and bool(task["replies"])


def script(task: Task) -> Sequence[str]:
    """Return the replies of an `is_script` row. Raises UserError."""
    replies: Sequence[str] = task["replies"]
    for number, reply in enumerate(replies, 1):
        if not _text(reply, f"reply {number}"):
            raise UserError(f"reply {number} is empty")
    return replies


def _hash(value: Any) -> str:
    """Return a hash of 64 bits in hexadecimal, equal in every process and for every order of keys."""
    return hashlib.blake2b(_dumps(value).encode(), digest_size=8).hexdigest()


def _dumps(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, default=_json)
    except (ValueError, RecursionError) as error:
        raise UserError("a value contains itself, or is nested without end: rows must have plain values") from error


def _written(value: Any) -> str:
    return value if isinstance(value, str) else _dumps(value)


def _json(value: Any) -> Any:
    found = known(value, None)
    if found is None:
        raise TypeError(f"a value of type {type(value).__name__} gives no stable id")
    return found


def _code(convert: Convert | None) -> str | None:
    """Return a digest of our own code and, where rows are converted, of all modules that are not installed (the
    user's).
    """
    if convert is None:
        return _own_code()
    module = sys.modules.get(convert.__module__)
    if getattr(module, "__file__", None) is None or getattr(module, _name(convert), None) is not convert:
        return None  # defined in a notebook or by another function: no file determines its behaviour
    installed = tuple(map(str, {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}))
    found = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    files = {Path(file) for file in found if file and file.endswith(".py") and not file.startswith((*installed, OWN))}
    return digest(_own_code(), *_contents(files))


@cache
def _own_code() -> str:
    """Return a digest of the package, which does not change for a process that has loaded it."""
    return digest(*_contents(Path(OWN).rglob("*.py")))


def _contents(files: Iterable[Path]) -> list[str]:
    return [hashlib.blake2b(user_files.content(file)).hexdigest() for file in sorted(files) if file.is_file()]


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not str.strip(value))
