"""The content of a recorded row: names in it, and its conversion back to transcripts."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from posttrain.core.transcripts import SpanKind, Transcript

Row = dict[str, Any]


def visit_of(group: str) -> tuple[str, int]:
    """Return the task and the visit in the name of a group: "17#2"."""
    task, _, visit = group.rpartition("#")
    return (task, int(visit)) if task and visit.isdecimal() and visit.isascii() else (group, 0)


def said_by(turn: Mapping[str, Any], prompt: str, text: str) -> str:
    """Return the text of a turn. It is stored once if it is the row's whole prompt or text."""
    said: str | None = turn["text"]
    return (prompt if turn["role"] == SpanKind.PROMPT else text) if said is None else said


def transcripts_of(row: Mapping[str, Any]) -> list[Transcript]:
    """Return the transcripts of a row. Unrecorded data, such as routed experts, are missing.

    Raises ValueError, LookupError or TypeError for other rows.
    """
    if sum(row["transcripts"]) != len(row["tokens"]):
        raise ValueError(f"transcripts of {sum(row['transcripts'])} tokens, and there are {len(row['tokens'])}")
    sampled = iter(row["engine"] or ())
    found, spans = [], list(row["spans"])
    for begin, length in zip([0, *accumulate(row["transcripts"])][:-1], row["transcripts"], strict=True):
        own = [s for s in spans if begin <= s["start"] < begin + length]
        if sum(s["length"] for s in own) != length:
            raise ValueError(f"spans of {sum(s['length'] for s in own):,} tokens, and there are {length:,}")
        count = sum(s["length"] for s in own if s["kind"] == SpanKind.SAMPLED)
        transcript = Transcript.from_dict(
            {
                "tokens": list(row["tokens"][begin : begin + length]),
                "spans": [[s["kind"], s["length"], s["learned"], s["version"]] for s in own],
                "temperature": [s["temperature"] for s in own],
                "logp": [value for _, value in zip(range(count), sampled, strict=False)],
                "media": [
                    [p["start"] - begin, p["length"], p["name"], p["grid"]]
                    for p in row["pictures"] or ()
                    if begin <= p["start"] < begin + length
                ],
            }
        )
        found.append(transcript)
    for transcript, forks in zip(found, row["forks"] or (), strict=False):
        transcript.forks = tuple(forks)
    return found
