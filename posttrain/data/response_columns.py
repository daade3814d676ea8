"""Brings responses that other data sets spread over columns or objects into the columns of preference data.

    response_a, response_b, winner        -> responses, pairs, preferred
    response, rejected_response           -> chosen, rejected (ms-swift)
    completions (or responses), each {"response": ..., "overall_score": ...}    -> responses, scores (UltraFeedback)

Every error is a UserError of one line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.core.messages import short
from posttrain.core.types import UserError
from posttrain.data.row_files import Row

TEXTS = ("response", "text", "content", "completion", "output")
SCORES = ("overall_score", "score", "reward", "rating")
WINNERS = ("winner", "preference")
SIDES = ("response_a", "response_b")
LISTS = ("responses", "completions")


def gathered(row: Row) -> Row:
    """Return the row with its responses in the columns of preference data; a row that has these is unchanged."""

    def there(*names: str) -> bool:
        return all(row.get(name) is not None for name in names)

    if there("chosen") or there("rejected"):
        return row
    if there("response", "rejected_response"):
        taken = ("response", "rejected_response")
        return {**_without(row, taken), "chosen": row["response"], "rejected": row["rejected_response"]}
    if there(*SIDES) and not there("responses"):
        name = next((name for name in WINNERS if there(name)), None)
        told = {} if name is None else {"pairs": [[0, 1]], "preferred": [_winner(row[name], name)]}
        return {**_without(row, (*SIDES, *WINNERS)), "responses": [row[side] for side in SIDES], **told}
    found = next((name for name in LISTS if are_objects(row.get(name))), None)
    return row if found is None else {**_without(row, (found,)), **_of_objects(row[found], found)}


def are_objects(value: Any) -> bool:
    """Return whether a column has an object for each response."""
    return isinstance(value, list) and bool(value) and all(isinstance(entry, Mapping) for entry in value)


def _without(row: Row, names: Sequence[str]) -> Row:
    return {name: value for name, value in row.items() if name not in names}


def _winner(value: Any, name: str) -> int:
    """Return 1 for the first response, 2 for the second, 0 for a tie."""
    said = value.strip().lower() if isinstance(value, str) else ""
    for place, side in enumerate("ab", 1):
        if said in (side, f"response_{side}", f"model_{side}", f"assistant_{side}"):
            return place
    if said.startswith("tie") or said.startswith("both"):
        return 0
    raise UserError(f"{name} is {short(value)}; it must be response_a, response_b or tie")


def _of_objects(entries: Sequence[Mapping[str, Any]], name: str) -> Row:
    """Return responses, and their scores if any entry has one."""
    texts, scores = [], []
    for number, entry in enumerate(entries, 1):
        key = next((key for key in TEXTS if isinstance(entry.get(key), str)), None)
        if key is None:
            has = ", ".join(map(str, entry)) or "nothing"
            raise UserError(f"{name}: entry {number} has {has}, and no text: name it response, beside its score")
        texts.append(entry[key])
        scores.append(next((_number(entry[key]) for key in SCORES if entry.get(key) is not None), None))
    told = any(score is not None for score in scores)
    return {"responses": texts, **({"scores": scores} if told else {})}


def _number(score: Any) -> Any:
    """Return a score that is text as a number, or None if it is n/a; anything else unchanged."""
    if not isinstance(score, str):
        return score
    try:
        return float(score)
    except ValueError:
        return None if score.strip().lower() in ("", "n/a", "na", "none", "null") else score
