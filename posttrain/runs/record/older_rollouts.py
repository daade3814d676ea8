"""Rows of runs that were recorded as lines of JSON, in the form of those of today."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

from posttrain.core.json_text import json_text
from posttrain.core.types import SpanKind, StopReason
from posttrain.runs.jsonl import Maybe, checked, lines
from posttrain.runs.record.rollout_rows import Row, visit_of

_NUMBER = (int, float, type(None))
_SECONDS: dict[str, Any] = {"turns": [(int, float)], "reward": Maybe((int, float))}
_CALL: dict[str, Any] = {"tool": str, "arguments": dict, "problem": Maybe(str)}
_TURN: dict[str, Any] = {
    **dict.fromkeys(("kind", "text"), str),
    **dict.fromkeys(("transcript", "start", "length"), int),
    "reward": _NUMBER,
    "cut": Maybe(int),
    "calls": Maybe([_CALL]),
}


def _is_span(value: Any) -> bool:
    """Whether it is [kind, length, learned, version]."""
    return isinstance(value, list) and len(value) == 4 and isinstance(value[0], str) and type(value[1]) is int


def _are_integers(value: Any) -> bool:
    """Quickly, for there are millions."""
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int, float, type(None)}


_ROLLOUT: dict[str, Any] = {
    **dict.fromkeys(("group", "prompt", "text"), str),
    "stop": lambda value: value in list(StopReason),
    "reward": _NUMBER,
    "advantage": Maybe(_NUMBER),
    **dict.fromkeys(("side", "invalid"), Maybe(str)),
    "rewards": Maybe({str: _NUMBER}),
    "turns": [_TURN],
    "transcripts": [{"tokens": _are_integers, "spans": [_is_span], "logp": _are_numbers}],
}
"""What every line holds, and of which kind."""


def rows_of_lines(path: Path, step: int, kind: str) -> list[Row]:
    """The rollouts in such a file. Raises UserError with the line that is damaged."""
    members: dict[tuple[str, str], int] = {}
    found = []
    for index, (line, where, _) in enumerate(lines(path, whole=True)):
        row = of_line(checked(line, _ROLLOUT, where))
        own = row["group"], row["side"] or ""
        members[own] = members.get(own, -1) + 1
        found.append({"step": step, "index": index, "kind": kind, "member": members[own], **row})
    return found


def seconds_of_lines(path: Path) -> list[Row]:
    """The seconds beside them."""
    checks = (checked(line, _SECONDS, where) for line, where, _ in lines(path, whole=True))
    return [{"index": i, "reward": s.get("reward", 0.0), "turns": s["turns"]} for i, s in enumerate(checks)]


def of_line(line: Row) -> Row:
    """Its row, but for its place."""
    reward, valid = line["reward"], line.get("invalid") is None
    task, visit = visit_of(line["group"])
    answer, branch = line.get("answer"), line.get("branch") or {}
    stop = StopReason(line["stop"])
    return {
        "group": line["group"],
        "epoch": visit,
        "task": str(line.get("task") or task),
        "columns": json_text({} if answer is None else {"answer": answer}),
        "side": line.get("side"),
        "prompt": line["prompt"],
        "text": line["text"],
        "reward": reward,
        "invalid": line.get("invalid"),
        "parts": [{"name": name, "value": value} for name, value in (line.get("rewards") or {}).items()],
        "step_rewards": [{"at": at, "reward": value} for at, value in line.get("steps") or ()],
        "used": reward if valid else None,
        "advantage": line.get("advantage"),
        "flags": [],
        "replayed": False,
        "stop": str(stop),
        "truncated": stop.truncated,
        "answers": json_text(line["answers"]) if line.get("answers") else None,
        "branch_of": branch.get("of"),
        "branch_turns": branch.get("turns"),
        "turns": [_turn(turn) for turn in line["turns"]],
        **_tokens(line["transcripts"]),
    }


def _turn(turn: Row) -> Row:
    calls = [
        {"tool": c["tool"], "arguments": json_text(c["arguments"]), "end": c.get("end", 0), "problem": c.get("problem")}
        for c in turn.get("calls") or ()
    ]
    own = {name: turn[name] for name in ("text", "transcript", "length", "reward")}
    return {"role": turn["kind"], "first": turn["start"], **own, "cut": turn.get("cut", 0), "calls": calls}


def _tokens(transcripts: list[Row]) -> Row:
    lengths = [len(t["tokens"]) for t in transcripts]
    begins = [0, *accumulate(lengths)][:-1] if lengths else []
    spans = []
    for transcript, begin in zip(transcripts, begins, strict=True):
        for kind, length, learned, version in transcript["spans"]:
            spans.append({"kind": kind, "start": begin, "length": length, "version": version, "learned": bool(learned)})
            begin += length
    pictures = [
        {"name": name, "start": begin + start, "length": length, "grid": grid}
        for transcript, begin in zip(transcripts, begins, strict=True)
        for start, length, name, grid in transcript.get("media") or ()
    ]
    versions = sorted({s["version"] for s in spans if s["version"] is not None})
    forks = [t.get("forks", []) for t in transcripts]
    sampled = sum(s["length"] for s in spans if s["kind"] == SpanKind.SAMPLED)
    return {
        "version": versions[0] if versions else 0,
        "versions": versions,
        "sampled": sampled,
        "scored": sum(s["length"] for s in spans if s["learned"]),
        "length": sampled,
        "total": sum(lengths),
        "media": list(dict.fromkeys(p["name"] for p in pictures)),
        "tokens": [token for t in transcripts for token in t["tokens"]],
        "transcripts": lengths,
        "spans": spans,
        "pictures": pictures,
        "forks": forks if any(forks) else None,
        "engine": [value for t in transcripts for value in t["logp"]],
    }
