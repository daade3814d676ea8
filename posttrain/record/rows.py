"""What a row says of a rollout: its names and numbers as the table has them.

Nothing of it depends on the clock. What could not stand in a table is made to: infinite rewards are null, a half of a
surrogate pair becomes its escape.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from posttrain.runs.files import plain
from posttrain.types import Invalid, Outcome, PlayedTurn, Rollout, SpanKind, ToolCall, Transcript

Row = dict[str, Any]


def rows_of(step: int, outcomes: Sequence[Outcome], kind: str) -> list[Row]:
    """A row each, in their order."""
    members: dict[tuple[str, str], int] = {}
    columns: dict[int, str] = {}  # by the identity of a task: a group shares its own
    found = []
    for index, outcome in enumerate(outcomes):
        rollout = outcome.rollout
        count = members.get(rollout.compared, 0)
        members[rollout.compared] = count + 1
        member = count if outcome.member is None else outcome.member
        own = columns.setdefault(id(rollout.task), "")
        if not own:
            own = columns[id(rollout.task)] = as_json({k: _shown(v) for k, v in rollout.task.items() if k != "id"})
        head = {"step": step, "index": index, "kind": kind, "member": member, "columns": own}
        fate = None if kind == "eval" else str(outcome.fate)
        found.append({**head, **_of_rollout(rollout), **_of_outcome(outcome), "fate": fate})
    return found


def _shown(value: Any) -> Any:
    """A task's column without what is no text and no number: of bytes, how many they are."""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value)} bytes"
    if isinstance(value, Mapping):
        return {name: _shown(item) for name, item in value.items()}
    return [_shown(item) for item in value] if isinstance(value, list | tuple) else value


def seconds_of(outcomes: Iterable[Outcome]) -> list[Row]:
    """What turns and rewards took."""
    return [
        {"index": index, "reward": round(o.rollout.seconds, 4), "turns": [round(t.seconds, 4) for t in o.rollout.turns]}
        for index, o in enumerate(outcomes)
        if not o.replayed  # that was another step's time
    ]


def visit_of(group: str) -> tuple[str, int]:
    """The task and the visit that a group is named after: "17#2"."""
    task, _, visit = group.rpartition("#")
    return (task, int(visit)) if task and visit.isdecimal() and visit.isascii() else (group, 0)


_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def as_json(value: Any) -> str:
    """Anything as JSON in one line."""
    return _JSON.encode(plain(value))


def finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _of_outcome(outcome: Outcome) -> Row:
    reward, shaping, penalty = outcome.rollout.reward, finite(outcome.shaping), finite(outcome.penalty)
    used = None if isinstance(reward, Invalid) else finite(reward + outcome.shaping - outcome.penalty)
    return {
        "shaping": shaping,
        "penalty": penalty,
        "used": used,
        "advantage": finite(outcome.advantage),
        "why": outcome.why or None,
        "flags": list(outcome.flags),
        "replayed": outcome.replayed,
        "label": None if outcome.label is None else as_json(outcome.label),
        **outcome.numbers,
    }


def _of_rollout(rollout: Rollout) -> Row:
    reward = rollout.reward
    invalid = (reward.reason, str(reward.kind)) if isinstance(reward, Invalid) else (None, None)
    task, visit = visit_of(rollout.group)
    return {
        "group": rollout.group,
        "epoch": visit,
        "task": str(rollout.task.get("id", task)),
        "side": rollout.side or None,
        "prompt": rollout.prompt,
        "text": rollout.text,
        "reward": None if isinstance(reward, Invalid) else finite(reward),
        "invalid": invalid[0],
        "invalid_kind": invalid[1],
        "parts": [{"name": name, "value": finite(value)} for name, value in rollout.rewards.items()],
        "step_rewards": [{"at": at, "reward": finite(value)} for at, value in rollout.steps],
        "stop": str(rollout.stop),
        "truncated": rollout.stop.truncated,
        "notes": as_json(rollout.notes) if rollout.notes else None,
        "answers": as_json([_answer(*said) for said in rollout.answers]) if rollout.answers else None,
        "branch_of": rollout.branch.of if rollout.branch else None,
        "branch_turns": rollout.branch.turns if rollout.branch else None,
        "branch_taken": list(rollout.branch.taken) if rollout.branch else None,
        "turns": [_turn(turn, rollout) for turn in rollout.turns],
        **of_transcripts(rollout.transcripts),
    }


def of_transcripts(transcripts: Sequence[Transcript]) -> Row:
    """Their tokens end to end, and what counts them."""
    lengths = [len(t) for t in transcripts]
    placed = list(zip(transcripts, [0, *accumulate(lengths)][:-1] if lengths else [], strict=True))
    versions = sorted({s.version for t in transcripts for s in t.spans if s.version is not None})
    pictures = [
        {"name": m.digest, "start": at + m.start, "length": m.length, "grid": list(m.grid)}
        for t, at in placed
        for m in t.media
    ]
    return {
        "version": versions[0] if versions else 0,
        "versions": versions,
        "sampled": sum(t.n_sampled for t in transcripts),
        "scored": sum(t.n_scored for t in transcripts),
        "length": sum(lengths),
        "media": list(dict.fromkeys(p["name"] for p in pictures)),
        "tokens": _joined((t.tokens for t in transcripts), np.int32),
        "transcripts": lengths,
        "spans": [
            {"kind": str(s.kind), "start": at + s.start, "length": s.length, "version": s.version, "learned": s.learned}
            for t, at in placed
            for s in t.spans
        ],
        "pictures": pictures,
        "forks": [list(t.forks) for t in transcripts] if any(t.forks for t in transcripts) else None,
        "engine": _joined((t.logp for t in transcripts), np.float32),
    }


def _joined(lists: Iterable[Sequence[float]], kind: Any) -> np.ndarray:
    found = [np.array(values, dtype=kind) for values in lists]
    return np.concatenate(found) if found else np.zeros(0, dtype=kind)


def _turn(turn: PlayedTurn, rollout: Rollout) -> Row:
    """Without its seconds: they depend on the clock, and rollouts do not. Nor is what is said twice: see `said_by`."""
    whole = {SpanKind.PROMPT: rollout.prompt, SpanKind.SAMPLED: rollout.text}.get(turn.kind)
    return {
        "role": str(turn.kind),
        "text": None if turn.text == whole else turn.text,
        "transcript": turn.transcript,
        "first": turn.start,
        "length": turn.length,
        "reward": finite(turn.reward),
        "cut": turn.cut,
        "calls": [_call(call) for call in turn.calls],
    }


def said_by(turn: Mapping[str, Any], prompt: str, text: str) -> str:
    """What a turn of a row says: where it is all of the row's prompt, or of its text, it is not written again."""
    said: str | None = turn["text"]
    return (prompt if turn["role"] == SpanKind.PROMPT else text) if said is None else said


def _call(call: ToolCall) -> Row:
    return {"tool": call.name, "arguments": as_json(dict(call.arguments)), "end": call.end, "problem": call.problem}


def _answer(service: str, answer: Any) -> Row:
    """What a service said in an episode."""
    said = {"invalid": answer.reason} if isinstance(answer, Invalid) else {"answer": answer}
    return {"service": service, **said}


def transcripts_of(row: Mapping[str, Any]) -> list[Transcript]:
    """The transcripts of a row that was read; what is not kept of them, such as routed experts, is missing.

    Raises ValueError, LookupError or TypeError if the row is none.
    """
    if sum(row["transcripts"]) != len(row["tokens"]):
        raise ValueError(f"transcripts of {sum(row['transcripts'])} tokens, and there are {len(row['tokens'])}")
    sampled = iter(row["engine"] or ())
    found, spans = [], list(row["spans"])
    for begin, length in zip([0, *accumulate(row["transcripts"])][:-1], row["transcripts"], strict=True):
        own = [s for s in spans if begin <= s["start"] < begin + length]
        count = sum(s["length"] for s in own if s["kind"] == SpanKind.SAMPLED)
        transcript = Transcript.from_dict(
            {
                "tokens": list(row["tokens"][begin : begin + length]),
                "spans": [[s["kind"], s["length"], s["learned"], s["version"]] for s in own],
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
