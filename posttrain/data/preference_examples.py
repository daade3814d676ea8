"""Converts rows of preference data, in every published format, to tasks with responses.

The result has a prompt (or messages); "responses", each a text, or a list of texts where steps are judged; and either
"comparisons", lists of [better, worse, share, margin], or "labels", a list of numbers for each response.

    prompt, chosen, rejected           pairs; with "margin", or "score_chosen" and "score_rejected", whose difference it is
    chosen, rejected                   pairs whose texts (hh-rlhf, TRL) or messages (UltraFeedback) begin with one prompt
    prompt, responses, pairs, preferred    K responses, pairs of them, and for each 1: the first, 2: the second, 0: neither
    prompt, responses, comparisons     ... or [better, worse], [better, worse, share] or [better, worse, share, margin]
    prompt, responses, ranks           ... or a rank for each, 1 the best, equal ones tied
    prompt, responses, scores          ... or a number for each, the higher the better (null: unknown)
    prompt, response, label            one response that is good (true, 1) or bad (false, 0, -1)
    prompt, response, score            one response and a number
    prompt, response_a, response_b, winner    two responses, and response_a, response_b or tie
    prompt, completions (or responses)    ... each {"response": ..., "overall_score": ...} (UltraFeedback)
    messages, label (or score)         ... where the response is the last of the messages
    prompt, steps, mistake_index       a solution in steps, and the first that is wrong (null: none)
    prompt, steps (or completions), labels    ... or a label for each of them

A column "stops" (of pairs "chosen_stop" and "rejected_stop", of one response "response_stop" or "stop") gives the
reason why each response ended, as sampling records it in "samples"; one whose stop is "length" was truncated, and is
trained without an end-of-sequence token.

Cells of tables are text: a number, true or false, or a JSON list is parsed in columns that contain such values.

Rows without information are left out: equal responses, only ties, empty responses. In a solution with a mistake, the steps
after the first mistake are left out, as their labels are unknown. Any other fault is a UserError of one line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from posttrain.core.conversation import ROW_VARIABLES
from posttrain.core.messages import in_row
from posttrain.core.thoughts import reasoning_of, with_thoughts
from posttrain.core.types import StopReason, Task, UserError
from posttrain.data.response_columns import gathered
from posttrain.data.row_files import Row
from posttrain.data.row_shapes import LIKE, quality
from posttrain.data.tasks_from_rows import not_text

Said = dict[str, Any]  # responses, cut (whether each was cut off), comparisons, labels
TURN = "\n\nAssistant:"  # of hh-rlhf: the last one begins the response
MOST = 64  # responses of a prompt
CUT = tuple(str(stop) for stop in StopReason if stop.truncated)
LARGEST = 1e9  # largest absolute value: squares and sums of larger ones overflow float32
SAYING = ("margin", "score_chosen", "score_rejected", "score", "scores", "label", "labels", "ranks", "comparisons", "pairs",
          "preferred", "mistake_index", "responses", "steps", "completions")  # fmt: skip
"""Columns that contain no plain text."""
FORMS = (
    "chosen and rejected; responses with pairs, comparisons, ranks or scores; response (or messages) with label or score; "
    "steps"
)


def to_item(row: Row) -> Task | None:
    """Convert a row to a task; None for a row without information."""
    prompt, said = _read(row)
    if said is None:
        return None
    kept = {name: value for name, value in row.items() if name in ("id", "source", "dataset", ROW_VARIABLES)}
    return {**kept, **prompt, **said}


def plain(row: Row) -> Row:
    """Parse the values of a row: every cell of a CSV file is text, and an empty cell is a missing value. Responses in
    other columns are gathered (see `response_columns.py`).
    """
    texts = {name: row[name] for name in SAYING if isinstance(row.get(name), str)}
    return gathered({**row, **{name: _value(text) for name, text in texts.items()}} if texts else row)


def _value(text: str) -> Any:
    """Parse a cell: as JSON, as Python's True or False, otherwise as text."""
    if not text.strip():
        return None
    lowered = text.strip().lower()
    try:
        return json.loads(lowered if lowered in ("true", "false") else text)
    except (ValueError, RecursionError):
        return text


def to_compared(row: Row) -> Task | None:
    """Convert a row that must have comparisons of responses to a prompt."""
    task = to_item(row)
    if task is not None and not task["comparisons"]:
        raise UserError(
            "the row labels a single response, and this algorithm needs comparisons: give chosen and rejected, or use "
            "--algorithm kto"
        )
    return task


def to_judged(row: Row) -> Task | None:
    """Convert a row with good and bad responses, given as labels or as comparisons."""
    task = to_item(row)
    if task is None:
        return None
    if any(isinstance(response, list) for response in task["responses"]):
        raise UserError(
            "the row labels the steps of a solution, and this algorithm needs a label of the whole response"
        )
    for label in (label for labels in task["labels"] for label in labels):
        if not 0 <= label <= 1:
            raise UserError(f"the score is {label:g}, and this algorithm needs a label: true or false, 1 or 0")
    return task


def _read(row: Row) -> tuple[dict[str, Any], Said | None]:
    """Return the prompt of a row, and the labels of its responses."""
    row = plain(row)
    if _there(row, "chosen") or _there(row, "rejected"):
        for name in ("chosen", "rejected"):
            if not _there(row, name):
                raise UserError(f"no {name}; a pair needs both chosen and rejected")
        return _pair(row)
    prompt = _prompt(row)
    if _there(row, "responses"):
        return prompt, _several(row)
    for name in ("steps", "completions"):
        if _there(row, name):
            return prompt, _steps(row, name)
    for name in ("response", "completion"):
        if _there(row, name):
            return prompt, _single(row, name)
    if _there(row, "messages") and (_there(row, "label") or _there(row, "score")):
        asked, reply = _last_reply(row["messages"], "messages")
        if not asked:
            raise UserError("messages has only the response: put the prompt's messages before it")
        return {"messages": asked}, _single({**row, "response": reply}, "response")
    there = ", ".join(str(name)[:40] for name in list(row)[:12])
    raise UserError(
        f"the row has {there}; a row of preferences has a prompt and one of: {FORMS}; name other columns with "
        "--fields.prompt COLUMN, --fields.chosen COLUMN and so on"
    )


def asked(row: Row) -> dict[str, Any]:
    """Return only the prompt of a row with responses."""
    return said_of(row)[0]


def said_of(row: Row) -> tuple[dict[str, Any], list[str], str]:
    """Return the prompt of a row, its responses, and the name of their column.

    Raises UserError if it has no responses, or if these are steps.
    """
    row = plain(row)
    if _there(row, "chosen") and _there(row, "rejected"):
        return *_two(row), "chosen"
    if _there(row, "responses"):
        return _prompt(row), _texts(row["responses"]), "responses"
    for name in ("response", "completion"):
        if _there(row, name):
            return _prompt(row), [_reply(row[name], name)], name
    there = ", ".join(str(name)[:40] for name in list(row)[:12])
    raise UserError(
        f"the row has {there}, and no responses: make them with posttrain sample, or give chosen and rejected "
        "(--fields.chosen COLUMN for another column name)"
    )


def comparisons_of(row: Row, count: int) -> list[list[float]]:
    """Return [better, worse, share, margin] for a row's responses, including equal and empty ones."""
    row = plain(row)
    if _there(row, "chosen"):
        return [[0, 1, 1.0, _margin(row)]]
    ways: dict[str, Callable[[Any, int], list[list[float]]]] = {
        "comparisons": _given,
        "ranks": lambda values, count: _by_value(values, count, "ranks", -1.0),
        "scores": lambda values, count: _by_value(values, count, "scores", 1.0),
    }
    if _there(row, "pairs") and _there(row, "preferred"):
        return _preferred(row["pairs"], row["preferred"], count)
    for name, read in ways.items():
        if _there(row, name):
            return read(row[name], count)
    raise UserError(
        "responses without labels: add pairs and preferred, or comparisons, ranks or scores; or, beside response_a and "
        "response_b, a winner"
    )


# -- pairs -------------------------------------------------------------------------------------------------------------


def _pair(row: Row) -> tuple[dict[str, Any], Said | None]:
    prompt, texts = _two(row)
    cut = [row.get(name) in CUT for name in ("chosen_stop", "rejected_stop")]
    return prompt, _compared(texts, cut, [[0, 1, 1.0, _margin(row)]])


def _two(row: Row) -> tuple[dict[str, Any], list[str]]:
    """Return the prompt of a pair, and its two responses."""
    chosen, rejected = row["chosen"], row["rejected"]
    if type(chosen) is not type(rejected):
        raise UserError("chosen and rejected must both be text, or both messages")
    if isinstance(chosen, str):
        return _texts_apart(row, chosen, rejected)
    if isinstance(chosen, list):
        return _messages_apart(row, chosen, rejected)
    raise not_text(chosen, "chosen must be text or a list of messages")


def _texts_apart(row: Row, chosen: str, rejected: str) -> tuple[dict[str, Any], list[str]]:
    if _there(row, "prompt") or _there(row, "messages"):
        prompt = _prompt(row)
        whole = prompt.get("prompt")
        if isinstance(whole, str) and chosen.startswith(whole) and rejected.startswith(whole):  # both repeat the prompt
            return prompt, [chosen[len(whole) :], rejected[len(whole) :]]
        return prompt, [chosen, rejected]
    ends = [text.rfind(TURN) + len(TURN) for text in (chosen, rejected)]
    if max(ends) < len(TURN) and not any(_there(row, name) for name in LIKE["prompt"]):
        ends = [_end_of_shared_words(chosen, rejected)] * 2
    elif min(ends) < len(TURN) or chosen[: ends[0]] != rejected[: ends[1]]:
        ends = [0]
    if not all(ends):
        raise UserError(
            "no prompt, and chosen and rejected do not begin with the same one; name the column: --fields.prompt COLUMN"
        )
    return {"prompt": chosen[: ends[0]]}, [chosen[ends[0] :], rejected[ends[1] :]]


def _end_of_shared_words(chosen: str, rejected: str) -> int:
    """Return where the last white space of the common beginning of two texts begins; 0 if there is none. TRL divides at the
    first letter that differs, which may be within a word.
    """
    last = 0
    for place, (letter, other) in enumerate(zip(chosen, rejected, strict=False)):
        if letter != other:
            break
        last = place if letter.isspace() else last
    return len(chosen[:last].rstrip())


def _messages_apart(row: Row, chosen: list[Any], rejected: list[Any]) -> tuple[dict[str, Any], list[str]]:
    """Split messages that end with the response. Earlier messages are the prompt, unless the row has a prompt."""
    texts = [_last_reply(messages, name)[1] for name, messages in (("chosen", chosen), ("rejected", rejected))]
    if len(chosen) == len(rejected) == 1:
        return _prompt(row), texts
    if chosen[:-1] != rejected[:-1]:
        raise UserError("the messages of chosen and rejected differ before the last one: they must share the prompt")
    return {"messages": chosen[:-1]}, texts


def _last_reply(messages: Any, name: str) -> tuple[list[Any], str]:
    """Split messages into those before the last one, and the text of that one, which must be a reply."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        raise UserError(f'{name} must end with a message {{"role": "assistant", "content": ...}}')
    return messages[:-1], _said(last)


def _said(message: Row) -> Any:
    """Return the content of a message, preceded by reasoning from a field of its own."""
    content = message.get("content")
    return with_thoughts(reasoning_of(message) or "", content) if isinstance(content, str) else content


def _margin(row: Row) -> float:
    if _there(row, "margin"):
        return _number(row["margin"], "margin")
    if _there(row, "score_chosen") and _there(row, "score_rejected"):
        return _number(row["score_chosen"], "score_chosen") - _number(row["score_rejected"], "score_rejected")
    return 0.0


# -- several responses -------------------------------------------------------------------------------------------------


def _several(row: Row) -> Said | None:
    responses = _texts(row["responses"])
    return _compared(responses, _cut(row, len(responses)), comparisons_of(row, len(responses)))


def _cut(row: Row, count: int) -> list[bool]:
    """Return whether each response was truncated: by "stops", or by the records of sampling."""
    stops, notes = row.get("stops"), row.get("samples")
    if stops is None and isinstance(notes, list) and all(isinstance(note, dict) for note in notes):
        stops = [note.get("stop") for note in notes] if len(notes) == count else None
    stops = stops or [None] * count
    if not isinstance(stops, list) or len(stops) != count:
        raise UserError(f"stops must be a list of {count}, one for each response")
    return [stop in CUT for stop in stops]


def _texts(responses: Any) -> list[str]:
    if not isinstance(responses, list) or not all(isinstance(text, str) for text in responses):
        raise UserError("responses must be a list of texts")
    if not 0 < len(responses) <= MOST:
        raise UserError(f"a row must have 1 to {MOST} responses, and has {len(responses)}")
    return responses


def _preferred(pairs: Any, preferred: Any, count: int) -> list[list[float]]:
    if not isinstance(pairs, list) or not isinstance(preferred, list) or len(pairs) != len(preferred):
        raise UserError("pairs and preferred must be lists of the same length")
    found = []
    for pair, which in zip(pairs, preferred, strict=True):
        first, second = _places(pair, count, "pairs")
        if which not in (0, 1, 2):
            raise UserError(
                f"preferred has {in_row(which)}; it must be 1 for the first of a pair, 2 for the second, 0 for a tie"
            )
        if which:
            found.append([first, second, 1.0, 0.0] if which == 1 else [second, first, 1.0, 0.0])
    return found


def _given(comparisons: Any, count: int) -> list[list[float]]:
    if not isinstance(comparisons, list):
        raise UserError("comparisons must be a list of [better, worse]")
    found = []
    for each in comparisons:
        several = isinstance(each, list) and 2 <= len(each) <= 4
        better, worse = _places(each[:2] if several else each, count, "comparisons")
        rest = [_number(value, "a comparison's share or margin") for value in each[2:4]]
        share, margin = [*rest, *(1.0, 0.0)[len(rest) :]]
        if share < 0:
            raise UserError(f"a comparison's share is {share:g}; it must be at least 0")
        if share:
            found.append([better, worse, share, margin])
    return found


def _by_value(values: Any, count: int, name: str, sign: float) -> list[list[float]]:
    """Return [better, worse, share, margin] for all pairs with different values; the margin of scores is their
    difference. Responses without a value are in no pair.
    """
    if not isinstance(values, list) or len(values) != count:
        raise UserError(f"{name} must be a list of {count} numbers, one for each response")
    known = {
        i: sign * _number(value, f"value {i + 1} of {name}") for i, value in enumerate(values) if value is not None
    }
    found = []
    for i, j in combinations(known, 2):
        if known[i] != known[j]:
            better, worse = (i, j) if known[i] > known[j] else (j, i)
            margin = known[better] - known[worse] if name == "scores" else 0.0
            found.append([better, worse, 1.0, margin])
    return found


def _places(pair: Any, count: int, name: str) -> list[int]:
    whole = isinstance(pair, list) and len(pair) == 2 and all(type(place) is int for place in pair)
    if not whole or not all(0 <= place < count for place in pair) or pair[0] == pair[1]:
        raise UserError(f"{name} has {pair!r:.40}; each must be two different places of responses, 0 to {count - 1}")
    return list(pair)


def _compared(responses: Sequence[str], cut: Sequence[bool], comparisons: list[list[float]]) -> Said | None:
    """Return labelled responses, without comparisons of equal or empty texts; None if none is left."""
    told = [c for c in comparisons if responses[int(c[0])] != responses[int(c[1])]]
    told = [c for c in told if all(responses[int(place)].strip() for place in c[:2])]
    if not told:
        return None
    used = sorted({int(place) for c in told for place in c[:2]})
    place = {old: new for new, old in enumerate(used)}
    moved: list[list[float]] = [[place[int(b)], place[int(w)], share, margin] for b, w, share, margin in told]
    return {
        "responses": [responses[old] for old in used],
        "cut": [cut[old] for old in used],
        "comparisons": moved,
        "labels": [],
    }


# -- labels ------------------------------------------------------------------------------------------------------------


def _single(row: Row, name: str) -> Said | None:
    text = _reply(row[name], name)
    if not text.strip():
        return None
    said = {"responses": [text], "cut": [row.get("response_stop", row.get("stop")) in CUT], "comparisons": []}
    if _there(row, "label"):
        return {**said, "labels": [[_label(row["label"], "label")]]}
    if _there(row, "score"):
        return {**said, "labels": [[_number(row["score"], "score")]]}
    raise UserError(f"a {name} without a label: add a label (true or false) or a score, or give chosen and rejected")


def _reply(value: Any, name: str) -> str:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        value = _said(value[0])
    if not isinstance(value, str):
        raise not_text(value, f"{name} must be text")
    return value


def _steps(row: Row, name: str) -> Said | None:
    steps = row[name]
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) and step.strip() for step in steps):
        raise UserError(f"{name} must be a list of texts that are not empty, one a step")
    if "mistake_index" in row:
        first = row["mistake_index"]
        if first is not None and (type(first) is not int or not 0 <= first < len(steps)):
            raise UserError(
                f"mistake_index is {first!r:.40}; it must be null or the place of a step, 0 to {len(steps) - 1}"
            )
        steps = steps if first is None else steps[: first + 1]
        labels = [float(place != first) for place in range(len(steps))]
    elif _there(row, "labels"):
        given = row["labels"]
        if not isinstance(given, list) or len(given) != len(steps):
            raise UserError(f"labels must be a list of {len(steps)}, one for each step")
        labels = [_label(label, f"label {place}") for place, label in enumerate(given, 1)]
    else:
        raise UserError(f"{name} without labels: add labels, one for each, or mistake_index")
    return {"responses": [list(steps)], "cut": [False], "comparisons": [], "labels": [labels]}


def _label(value: Any, name: str) -> float:
    if (found := quality(value)) is None:
        raise UserError(f"{name} is {in_row(value)}; it must be true or false, 1 or 0 (or -1), or a probability")
    return found


# -- pieces ------------------------------------------------------------------------------------------------------------


def _there(row: Row, name: str) -> bool:
    return row.get(name) is not None


def _prompt(row: Row) -> dict[str, Any]:
    """Return the prompt with the keys of tasks. It is checked later, as in all tasks."""
    return {name: row[name] for name in ("prompt", "messages") if _there(row, name)}


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
        raise UserError(f"{name} must be a finite number of at most {LARGEST:g} in size, not {in_row(value)}")
    return float(value)
