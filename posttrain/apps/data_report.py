"""Report on rows before a run: their shape, the rows that a run would use, their lengths, and the text a model reads.

It uses the code of a run: the same conversions make the tasks, and the same transcripts mark trained tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from posttrain.core.conversation import Conversation, encoder_of
from posttrain.core.json_text import json_text
from posttrain.core.thoughts import reasoning_of, with_thoughts
from posttrain.core.transcripts import Mask, Transcript
from posttrain.core.types import Task, UserError
from posttrain.data.chat_prompts import AsMessages
from posttrain.data.preference_examples import plain, to_item
from posttrain.data.row_shapes import WHOLE, shape_of
from posttrain.data.rows import Rows
from posttrain.data.tasks_from_rows import Conversion, identified, key_of, question
from posttrain.envs.demonstration import demonstrate, learned_of
from posttrain.envs.play.episode import content_text
from posttrain.envs.play.load_env import opening
from posttrain.models.checkpoint_summary import Outline
from posttrain.runs.chat_choice import Chatting
from posttrain.training.row_warnings import lost_reasoning_line, marks_line

PREFERENCES = ("preference pairs", "several responses with labels", "labelled responses", "labelled steps")
PLAYED = ("rollouts of a run", "episodes to imitate")
MEASURED = 2000  # most rows whose tokens are counted, evenly spread
PERCENTILES = (0, 50, 90, 99, 100)
WITHOUT = "without information: equal responses, ties alone or empty responses"


class MarkedText(NamedTuple):
    """A part of the text that a model reads, and whether it is trained."""

    text: str
    trained: bool


class MarkedRow(NamedTuple):
    """A row as text that a model reads; several texts if the row has several responses."""

    where: str
    texts: Sequence[Sequence[MarkedText]]
    tokens: int  # of the longest one
    trained: int  # trained tokens of the longest one
    names: Sequence[str] = ()  # of the texts, if there are several: chosen, rejected


@dataclass
class DataReport:
    """Results of the report, in the order of printing."""

    shape: str
    verb: str  # verbs that learn from such rows
    columns: Mapping[str, str]  # name -> the types of its values
    rows: int
    used: int = 0  # rows that make a task
    left_out: Counter[str] = field(default_factory=Counter)  # reason -> rows
    wrong: dict[str, list[str]] = field(default_factory=dict)  # reason -> places of rows that would end a run
    merged: int = 0  # rows equal to an earlier one in every column
    prompts: int = 0  # different prompts
    measured: int = 0  # rows whose tokens were counted
    lengths: dict[str, list[int]] = field(default_factory=dict)  # part -> tokens of each measured row, sorted
    context: int | None = None  # context length of the model, in tokens
    too_long: list[str] = field(default_factory=list)  # places of measured rows that exceed the context
    examples: list[MarkedRow] = field(default_factory=list)
    lost: str = ""  # the line about reasoning that the chat template does not show
    marked: str = ""  # warning about marks of the chat template in the text of messages

    @property
    def ok(self) -> bool:
        """Return whether a run can begin with these rows."""
        return not self.wrong and self.used > 0


def report(
    rows: Rows,
    options: Mapping[str, Any],
    model: Outline | None,
    chat: Chatting,
    shown: int = 3,
    mask: Mask = "assistant",
) -> DataReport:
    """Read all rows, count the tokens of some, and keep examples.

    `options`: the fields of a `Conversion`; `shown`: the number of examples; `mask`: messages that sft trains.
    Raises UserError where the rows cannot be read, or a row cannot be laid out for the model.
    """
    first = rows[0]
    fields = options.get("fields", {})
    other = {name: value for name, value in first.items() if name not in fields.values()}  # each column counts once
    named = {**other, **{key: first.get(column) for key, column in fields.items()}}
    try:
        shape = WHOLE if "text" in fields else shape_of(plain(named))
    except UserError as error:
        raise UserError(f"{rows.where(0)}: {error}") from error
    found = DataReport(shape, _verb(shape), _columns(rows), len(rows), context=model.context if model else None)
    conversion = _conversion(shape, {**options, "whole": mask == "all"})
    places = list(_survey(rows, conversion, found))
    if shape not in PLAYED:
        _lay_out(places, rows, conversion, found, model, chat, shown, mask)
    return found


def _verb(shape: str) -> str:
    if shape in PREFERENCES:
        return "prefer, reward-model" if shape != "labelled steps" else "reward-model"
    if shape in ("prompts", "verl"):
        return "rl"
    return "sft, rl" if shape.startswith(("questions", "prompt and completion")) else "sft"


def _conversion(shape: str, options: Mapping[str, Any]) -> Conversion:
    if shape in PREFERENCES:
        return Conversion(**{**options, "convert": to_item, "left_out": WITHOUT})
    return Conversion(**{**options, "need": ("prompt",) if _verb(shape) == "rl" else ("prompt", "response")})


def _columns(rows: Rows) -> dict[str, str]:
    """Return column -> the types of its values in the first 100 rows."""
    kinds: dict[str, dict[str, None]] = {}
    for row in islice(rows, 100):
        for name, value in row.items():
            kinds.setdefault(name, {})[_kind(value)] = None
    return {name: " or ".join(own) for name, own in kinds.items()}


def _kind(value: Any) -> str:
    known = {str: "text", bool: "true or false", int: "number", float: "number", type(None): "null", dict: "object"}
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        return "messages" if {"role", "content"} <= value[0].keys() else "list of objects"
    return known.get(type(value), "list" if isinstance(value, list) else type(value).__name__)


def _survey(rows: Rows, conversion: Conversion, found: DataReport) -> Iterator[int]:
    """Yield the places of the rows that make a task; count the others in `found`."""
    keys: set[int] = set()
    asked: set[int] = set()
    for place, row in enumerate(rows):
        try:
            task = conversion(row)
            key = key_of(task, conversion.kept) if task is not None else 0
        except UserError as error:
            found.wrong.setdefault(str(error), []).append(rows.where(place))
            continue
        if task is None:
            found.left_out[conversion.left_out] += 1
        elif key in keys:
            found.merged += 1
        else:
            keys.add(key)
            found.used += 1
            if {"prompt", "messages"} & task.keys() and (prompt := question(task)) is not None:
                asked.add(hash(prompt))
            yield place
    found.prompts = len(asked)


def _spread(count: int, most: int) -> list[int]:
    """Return at most `most` numbers below `count`, evenly spread."""
    return sorted({i * (count - 1) // max(1, most - 1) for i in range(most)}) if count > most else list(range(count))


def _lay_out(
    places: Sequence[int],
    rows: Rows,
    conversion: Conversion,
    found: DataReport,
    model: Outline | None,
    chat: Chatting,
    shown: int,
    mask: Mask,
) -> None:
    """Count the tokens of evenly spread rows, and keep some of these rows as examples."""
    chosen = _spread(len(places), MEASURED if model is not None else shown)
    examples = {chosen[i] for i in _spread(len(chosen), shown)}
    lengths: dict[str, list[int]] = {}
    for number in chosen:
        row = rows[places[number]]
        where, task = rows.where(places[number]), conversion(row)
        assert task is not None, "it made a task before"
        task = identified(task, conversion.kept)
        if model is None:
            found.examples.append(MarkedRow(where, list(_written(task, mask)), 0, 0, _names(task)))
            continue
        try:
            laid_out = list(_transcripts(task, model, chat, mask))
        except UserError as error:
            found.wrong.setdefault(str(error), []).append(where)
            continue
        found.measured += 1
        for transcript in laid_out:
            trained, whole = transcript.n_scored, len(transcript)
            parts = {"prompt": whole - trained, "trained": trained, "whole": whole} if trained else {"prompt": whole}
            for name, count in parts.items():
                lengths.setdefault(name, []).append(count)
        longest = max(laid_out, key=len)
        if len(longest) + (0 if longest.n_scored else 1) > model.context:
            found.too_long.append(where)
        if number in examples:
            texts = [_pieces(transcript, model) for transcript in laid_out]
            found.examples.append(MarkedRow(where, texts, len(longest), longest.n_scored, _names(task)))
    if model is not None:
        tasks = [_asked(conversion(rows[places[number]]) or {}, chat, mask) for number in chosen]
        found.lost = lost_reasoning_line(model.tokenizer, tasks, mask)
        found.marked = marks_line(model.tokenizer, tasks)
    found.lengths = {name: sorted(counts) for name, counts in lengths.items()}


def _transcripts(task: Task, model: Outline, chat: Chatting, mask: Mask) -> Iterator[Transcript]:
    """Yield a row's transcripts as a run lays them out: one for each response, or the prompt alone."""
    ends = model.ends or ((model.tokenizer.eos_id,) if model.tokenizer.eos_id is not None else ())
    if not ends:
        raise UserError("the model names no end-of-sequence token: set eos_token_id in generation_config.json")
    asked = _asked(task, chat, mask)
    if "responses" in task:
        for response in asked["responses"]:
            yield demonstrate(_answered(asked, _whole(response)), model.tokenizer, ends)
    elif _is_answered(asked):
        yield demonstrate(asked, model.tokenizer, ends, mask)
    else:
        transcript = Transcript()
        transcript.observe(Conversation(encoder_of(model.tokenizer, task)).show(opening(asked), None))
        yield transcript


def _names(task: Task) -> list[str]:
    """Return a name for each response of preference data, by its label or comparison; none for other rows."""
    comparisons, labels = task.get("comparisons") or [], task.get("labels") or []
    if labels:
        return [f"label {', '.join(f'{label:g}' for label in own)}" for own in labels]
    if len(comparisons) == 1:
        return ["chosen" if place == comparisons[0][0] else "rejected" for place in range(2)]
    return [f"response {number}" for number in range(1, len(task.get("responses") or ()) + 1)]


def _asked(task: Task, chat: Chatting, mask: Mask) -> Task:
    """Return the task as the model gets it: as messages if chat is on."""
    return AsMessages(chat.system, "response" in task, mask == "all")(task) if chat.on else task


def _is_answered(task: Task) -> bool:
    if task.get("messages"):
        return bool(task["messages"][-1]["role"] == "assistant")
    return "response" in task


def _whole(response: str | Sequence[str]) -> str:
    """Return a response as one text; steps are joined, each with its line end."""
    return response if isinstance(response, str) else "".join(f"{step}\n" for step in response)


def _written(task: Task, mask: Mask) -> Iterator[list[MarkedText]]:
    """Yield the texts of a row without a chat template, one for each response."""
    whole = mask == "all"
    prompt = [MarkedText(task["prompt"], whole and "response" in task)] if isinstance(task.get("prompt"), str) else []
    messages = task.get("messages") or ()
    for message, learned in zip(messages, learned_of(messages, mask), strict=True):
        trained = learned or (whole and message["role"] != "assistant")
        calls = [json_text(call.get("function", call)) for call in message.get("tool_calls") or ()]
        said = "\n".join(filter(None, [with_thoughts(reasoning_of(message) or "", content_text(message)), *calls]))
        prompt += [
            MarkedText(f"{message['role']}: ", False),
            *([MarkedText(said, trained)] if said else []),
            MarkedText("\n", False),
        ]
    responses = task.get("responses") or [task.get("response", "")]
    for response in map(_whole, responses):
        yield [*prompt, MarkedText(response, True)] if response else prompt


def _answered(task: Task, text: str) -> Task:
    """Return the prompt of a task with this response; only the response is trained."""
    if task.get("messages") is None:
        return {"prompt": task["prompt"], "response": text}
    context = [{**m, "weight": 0} if m["role"] == "assistant" else m for m in task["messages"]]
    tools = {"tools": task["tools"]} if task.get("tools") is not None else {}
    return {"messages": [*context, {"role": "assistant", "content": text}], **tools}


def _pieces(transcript: Transcript, model: Outline) -> list[MarkedText]:
    decode = model.tokenizer.decode
    found = []
    for span in transcript.spans:
        tokens = transcript.tokens[span.start : span.start + span.length]
        found.append(MarkedText(decode(tokens), span.learned))
    return found


def percentiles(counts: Sequence[int]) -> list[int]:
    """Return the nearest-rank percentiles `PERCENTILES` of sorted counts."""
    return [counts[max(0, -(-p * len(counts) // 100) - 1)] for p in PERCENTILES]
