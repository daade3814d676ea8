"""The published shapes of rows: their names, and the conversion of those of other trainers.

    ShareGPT    conversations: [{"from": "human", "value": ...}, {"from": "gpt", ...}], perhaps system and tools
    Alpaca      instruction, input, output; perhaps system and history: [[instruction, output], ...]
    ms-swift    query, response; perhaps system and history: [[query, response], ...]
    verl        data_source, prompt (messages), reward_model {"ground_truth": ...}, extra_info

A shape is recognised by its columns, for each row, and only if the row has no prompt or messages of its own (verl's
rows have a prompt). A history of pairs is read beside a prompt too. The columns are kept, for rewards. Every error is a
UserError of one line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.core.messages import short
from posttrain.core.types import ROLES, Task, UserError
from posttrain.data.response_columns import LISTS, are_objects
from posttrain.data.row_files import Row

FROM = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "model": "assistant", "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "assistant",
}  # fmt: skip
"""Speakers of ShareGPT -> roles."""


def shape_of(row: Row) -> str:
    """Return the name of a row's shape, for messages."""
    there = _there(row)
    name = next(name for name, fits in SHAPES if fits(there))
    if name != "questions":
        return name
    asked, reply = (next((like for like in LIKE[key] if like in there), None) for key in ("prompt", "response"))
    if reply is None:
        return f"questions: --fields.prompt {asked} reads them as prompts"
    return f"questions: --fields.prompt {asked} --fields.response {reply} reads them as prompts and responses"


def _there(row: Row) -> set[str]:
    there = {name for name, value in row.items() if value is not None and value != ""}
    if "messages" in there and quality(row.get("label")) is None:  # a topic, not whether the last reply is good
        there.discard("label")
    if any(are_objects(row.get(name)) for name in LISTS):
        there.add("responses")
    return there


def quality(label: Any) -> float | None:
    """Return the quality of a response by its label, from 0 to 1; None for anything but a boolean, 1, 0, -1 (as 0) or a
    probability.
    """
    if not isinstance(label, bool | int | float) or not (label == -1 or 0 <= label <= 1):
        return None
    return max(0.0, float(label))


def _shaped_like(*columns: str) -> Callable[[set[str]], bool]:
    return lambda there: there.issuperset(columns)


LIKE = {
    "prompt": ("question", "query", "problem", "instruction", "input"),
    "response": ("response", "completion", "solution", "output", "answer", "code", "summary", "target"),
}
"""Key of a task -> columns that other rows have in its place, the likeliest first."""
WHOLE = "language modeling"
NOT_BESIDE_TEXT = {
    *LIKE["prompt"],
    *LIKE["response"],
    "label",
    "labels",
    "score",
    "conversation",
    "dialogue",
    "dialog",
    "chat",
}
"""Columns, in small letters, beside which a text is not all that there is to imitate."""

SHAPES: Sequence[tuple[str, Callable[[set[str]], bool]]] = (
    ("verl", _shaped_like("data_source", "reward_model", "prompt")),
    ("rollouts of a run", _shaped_like("transcripts", "turns")),
    ("preference pairs", _shaped_like("chosen", "rejected")),
    ("ShareGPT", _shaped_like("conversations")),
    ("several responses with labels", lambda there: "responses" in there),
    ("labelled steps", lambda there: "prompt" in there and bool({"steps", "completions"} & there)),
    (
        "labelled responses",
        lambda there: (
            (bool({"response", "completion"} & there) and bool({"label", "score"} & there))
            or there.issuperset({"messages", "label"})
        ),
    ),
    ("episodes to imitate", _shaped_like("replies")),
    ("conversations with tools", _shaped_like("messages", "tools")),
    ("conversations", _shaped_like("messages")),
    ("prompt and completion", lambda there: "prompt" in there and bool({"response", "completion"} & there)),
    ("prompts", _shaped_like("prompt")),
    ("Alpaca", _shaped_like("instruction")),
    ("ms-swift", lambda there: "query" in there and bool({"response", "history"} & there)),
    ("questions", lambda there: any(name in there for name in LIKE["prompt"])),
    (WHOLE, lambda there: "text" in there and NOT_BESIDE_TEXT.isdisjoint(map(str.lower, there))),
    ("unknown", lambda there: True),
)
"""Name -> whether a row with these nonempty columns has the shape; the first match decides."""
CONVERTED = {
    "verl": "prompt from 'prompt', answer from 'reward_model.ground_truth'",
    "ShareGPT": "messages from 'conversations'",
    "Alpaca": "prompt from 'instruction' and 'input', response from 'output'",
    "ms-swift": "prompt from 'history' and 'query', response from 'response'",
}
"""Shapes that are converted -> the columns that the conversion reads."""
MESSAGES = ("messages", "prompt", "chosen", "rejected", "response", "completion")
"""Columns of messages: a list of them, one of them, or turns of ShareGPT."""


def reshaped(row: Row) -> Row:
    """Return the row with the columns of this package if it has such a shape; any other row unchanged."""
    texts = {name: row[name] for name in ("messages", "conversations") if isinstance(row.get(name), str)}
    row = _with_lists({**row, **{name: _parsed(text) for name, text in texts.items()}} if texts else row)
    there = _there(row)
    if not {"prompt", "messages"} & there:
        if "conversations" in there:
            return _of_sharegpt(row)
        if "instruction" in there:
            return _of_alpaca(row)
        if "query" in there and {"response", "history"} & there:
            return _after_history(row, _text(row["query"], "query"))
    elif "query" in there and row.get("prompt") == row["query"] and _are_pairs(row.get("history") or []):
        return _after_history(row, row["prompt"])  # --fields.prompt query
    elif isinstance(row.get("prompt"), str) and "response" in there and _are_pairs(row.get("history")):
        return _after_history({**row, "system": None}, row["prompt"])  # rows of ChatGLM have no system message
    elif _shaped_like("data_source", "reward_model", "prompt")(there) and "answer" not in row:
        return _of_verl(row)
    return row


def column_of_messages(row: Row) -> str | None:
    """Return the first column of a row that is a list of messages, or of turns of ShareGPT; None without one."""
    return next(
        (name for name, value in row.items() if isinstance(value, list) and value and all(map(_is_turn, value))), None
    )


def _with_lists(row: Row) -> Row:
    """Return the row with lists of messages where a column has one message, or has turns of ShareGPT."""
    changed: dict[str, Any] = {}
    for name in MESSAGES:
        value = row.get(name)
        alone = _is_turn(value)
        turns = [value] if alone else value
        if isinstance(turns, list) and any(map(_is_turn, turns)) and (alone or not all(map(_is_ours, turns))):
            changed[name] = [_message(turn, f"{name}: turn {number}") for number, turn in enumerate(turns, 1)]
    return {**row, **changed} if changed else row


def _is_turn(value: Any) -> bool:
    return isinstance(value, Mapping) and ({"role", "content"} <= value.keys() or {"from", "value"} <= value.keys())


def _is_ours(turn: Any) -> bool:
    return isinstance(turn, Mapping) and "role" in turn and not _is_alias(turn["role"])


def _is_alias(role: Any) -> bool:
    return isinstance(role, str) and role in FROM and role not in ROLES


def _of_verl(row: Row) -> Row:
    """Add the ground truth as "answer" if it is text or a number, for verifiers that read that column."""
    model = row["reward_model"]
    truth = model.get("ground_truth") if isinstance(model, Mapping) else None
    return {**row, "answer": str(truth)} if isinstance(truth, str | int | float) else row


def _of_alpaca(row: Row) -> Task:
    prompt = _text(row["instruction"], "instruction")
    if given := _text(row.get("input") or "", "input"):
        prompt = f"{prompt}\n{given}"
    output = row.get("output")
    answer = {} if output is None else {"response": _text(output, "output")}
    return _after_history(row, prompt) | answer


def _after_history(row: Row, prompt: str) -> Task:
    """Return the row with its prompt after the system message and the earlier turns, if it has any."""
    history, system = _parsed(row.get("history")) or [], row.get("system")
    if not history and not system:
        return {**row, "prompt": prompt}
    messages = [{"role": "system", "content": _text(system, "system")}] if system else []
    if not isinstance(history, list | tuple):
        raise UserError(f"history must be a list of [instruction, output], and is {short(history)}")
    for number, pair in enumerate(history, 1):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise UserError(f"history: entry {number} is {short(pair)}; it must be [instruction, output]")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            messages.append({"role": role, "content": _text(text, f"history: entry {number}")})
    return {**row, "prompt": [*messages, {"role": "user", "content": prompt}]}


def _are_pairs(history: Any) -> bool:
    """Return whether a column is a history of turns, which may be empty, and no other list of that name."""
    pairs = _parsed(history)
    return isinstance(pairs, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in pairs
    )


def _parsed(value: Any) -> Any:
    """Return a list that a cell of a table has as JSON; anything else unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _of_sharegpt(row: Row) -> Task:
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns:
        raise UserError(f'conversations must be a list of {{"from": ..., "value": ...}}, and is {short(turns)}')
    system = row.get("system")
    messages = [{"role": "system", "content": _text(system, "system")}] if system else []
    messages += [_message(turn, f"conversations: turn {number}") for number, turn in enumerate(turns, 1)]
    return {**row, "messages": messages}


def _message(turn: Any, where: str) -> dict[str, Any]:
    if isinstance(turn, Mapping) and "role" in turn:
        if not _is_alias(turn["role"]):
            return dict(turn)
        if turn["role"] != "function_call":
            return {**turn, "role": FROM[turn["role"]]}
        turn = {"from": turn["role"], "value": turn.get("content")}
    if not isinstance(turn, Mapping) or not {"from", "value"} <= turn.keys():
        raise UserError(f'{where} must be an object with "from" and "value", and is {short(turn)}')
    role = FROM.get(turn["from"]) if isinstance(turn["from"], str) else None
    if role is None:
        raise UserError(f"{where}: from is {short(turn['from'])}; it must be one of {', '.join(FROM)}")
    text = _text(turn["value"], f"{where}: value")
    if turn["from"] != "function_call":
        weight = {} if turn.get("weight") is None else {"weight": turn["weight"]}
        return {"role": role, "content": text, **weight}
    try:
        call = json.loads(text)
        called = {"name": call["name"], "arguments": call["arguments"]}
    except (ValueError, LookupError, TypeError, RecursionError):
        raise UserError(
            f'{where}: a function_call must be JSON such as {{"name": "search", "arguments": {{}}}}, and is {short(text)}'
        ) from None
    return {"role": role, "content": None, "tool_calls": [{"type": "function", "function": called}]}


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{name} must be text, and is {short(value)}")
    return value
