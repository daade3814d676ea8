"""Converts the outcomes of a step's rollouts to tables, one column at a time.

One row at a time would be easier to read, and was tried: with some fifty objects per rollout, it delayed the training
in parallel, through the interpreter and its garbage collection, by three times the time of its own work.

Only the table of seconds depends on the clock. Values without a form in a table are replaced: infinite rewards by null,
half a surrogate pair by its escape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.core.json_text import json_text, plain
from posttrain.core.rollouts import Outcome, PlayedTurn, Rollout
from posttrain.core.transcripts import SpanKind, Transcript
from posttrain.core.types import Invalid, Reasoned, ToolCall, bare
from posttrain.runs.record.rollout_rows import visit_of
from posttrain.runs.record.schema import ASKED, COMPARED, NUMBERS, ROLLOUTS, SECONDS
from posttrain.runs.record.table_writer import array, numbers

_PROMPT, _SAMPLED = SpanKind.PROMPT, SpanKind.SAMPLED  # looking them up takes longer than using them
Columns = dict[str, Any]
"""Column name -> array, or list of the rows' values."""


def rollouts_table(step: int, outcomes: Sequence[Outcome], kind: str) -> pa.Table:
    """Return the table of `schema.ROLLOUTS`, with a row per outcome, in order."""
    rollouts = [outcome.rollout for outcome in outcomes]
    columns = {
        **_placed(step, outcomes, kind),
        **_said(rollouts),
        **_rewarded(outcomes),
        "turns": _turns(rollouts),
        **_transcripts(rollouts),
        **_numbers(outcomes),
    }
    return _table(columns, ROLLOUTS)


def seconds_table(outcomes: Iterable[Outcome]) -> pa.Table:
    """Return the table of `schema.SECONDS`: durations of turns and rewards. Replayed rollouts took their time in
    another step.
    """
    played = [(index, o.rollout) for index, o in enumerate(outcomes) if not o.replayed]
    took = np.array([turn.seconds for _, rollout in played for turn in rollout.turns], dtype=np.float64)
    columns = {
        "index": [index for index, _ in played],
        "reward": pa.array(np.round([rollout.seconds for _, rollout in played], 4), pa.float64()),
        "turns": _lists(SECONDS.field("turns").type, [len(r.turns) for _, r in played], pa.array(took.round(4))),
    }
    return _table(columns, SECONDS)


def _numbers(outcomes: Sequence[Outcome]) -> Columns:
    """Return the columns of numbers per scored token; most are empty for all or nearly all rollouts."""
    known = {name for outcome in outcomes for name in outcome.numbers}
    found: Columns = {name: pa.nulls(len(outcomes), ROLLOUTS.field(name).type) for name in (*NUMBERS, "kept")}
    compared = [o.numbers.get("after") is not None for o in outcomes]
    for name in known - {"kept"}:
        found[name] = numbers([o.numbers.get(name) for o in outcomes], compared if name in COMPARED else ())
    if "kept" in known:
        kept = [o.numbers.get("kept") for o in outcomes]
        found["kept"] = [None if own is None else np.array(own, dtype=bool) for own in kept]
    return found


def _table(columns: Columns, schema: pa.Schema) -> pa.Table:
    made = [columns[field.name] for field in schema]
    arrays = [c if isinstance(c, pa.Array) else array(c, f.type) for c, f in zip(made, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def _placed(step: int, outcomes: Sequence[Outcome], kind: str) -> Columns:
    members: dict[tuple[str, str], int] = {}
    columns: dict[int, str] = {}  # by the identity of a task, which the rollouts of a group share
    member, own = [], []
    for outcome in outcomes:
        task, compared = outcome.rollout.task, outcome.rollout.group_and_side
        count = members.get(compared, 0)
        members[compared] = count + 1
        member.append(count if outcome.member is None else outcome.member)
        if id(task) not in columns:
            columns[id(task)] = json_text(plain({name: value for name, value in task.items() if name != "id"}, _size))
        own.append(columns[id(task)])
    return {
        "step": [step] * len(outcomes),
        "index": list(range(len(outcomes))),
        "kind": [kind] * len(outcomes),
        "member": member,
        "columns": own,
        "fate": [None if kind == "eval" else o.fate for o in outcomes],
    }


def _size(value: bytes) -> str:
    """Return a text in place of bytes in a task, as a picture's would be repeated in every rollout."""
    return f"{len(value)} bytes"


def _said(rollouts: Sequence[Rollout]) -> Columns:
    visits = [visit_of(r.group) for r in rollouts]
    return {
        "group": [r.group for r in rollouts],
        "epoch": [visit for _, visit in visits],
        "task": [str(r.task.get("id", task)) for r, (task, _) in zip(rollouts, visits, strict=True)],
        "side": [r.side or None for r in rollouts],
        "prompt": [r.prompt for r in rollouts],
        "asked": [r.asked[:ASKED] or None for r in rollouts],
        "text": [r.text for r in rollouts],
        "stop": [r.stop for r in rollouts],
        "truncated": [r.stop.truncated for r in rollouts],
        "notes": [json_text(r.notes) if r.notes else None for r in rollouts],
        "answers": [json_text([_answer(*a) for a in r.answers]) if r.answers else None for r in rollouts],
        "branch_of": [r.branch.of if r.branch else None for r in rollouts],
        "branch_turns": [r.branch.turns if r.branch else None for r in rollouts],
        "branch_taken": [list(r.branch.taken) if r.branch else None for r in rollouts],
    }


def _answer(service: str, answer: Any) -> dict[str, Any]:
    """Return a service's answer in an episode."""
    found = bare(answer)
    told = {"invalid": found.reason} if isinstance(found, Invalid) else {"answer": found}
    return {"service": service, **told, **({"said": answer.said} if isinstance(answer, Reasoned) else {})}


def _rewarded(outcomes: Sequence[Outcome]) -> Columns:
    rewards = [o.rollout.reward for o in outcomes]
    given = _floats(None if isinstance(reward, Invalid) else reward for reward in rewards)
    shaping, penalty = _floats(o.shaping for o in outcomes), _floats(o.penalty for o in outcomes)
    invalid = [reward if isinstance(reward, Invalid) else None for reward in rewards]
    parts = [o.rollout.rewards for o in outcomes]
    named = {"name": list(chain(*parts)), "value": _finite(_floats(chain(*(own.values() for own in parts))))}
    steps = [[{"at": at, "reward": float(r)} for at, r in o.rollout.steps] for o in outcomes]
    return {
        "reward": _finite(given),
        "invalid": [why and why.reason for why in invalid],
        "invalid_kind": [why and why.kind for why in invalid],
        "parts": _lists(ROLLOUTS.field("parts").type, [len(own) for own in parts], named),
        "step_rewards": [
            [{**s, "reward": s["reward"] if np.isfinite(s["reward"]) else None} for s in own] for own in steps
        ],
        "shaping": _finite(shaping),
        "penalty": _finite(penalty),
        "used": _finite(given + shaping - penalty),
        "advantage": _finite(_floats(o.advantage for o in outcomes)),
        "why": [o.why or None for o in outcomes],
        "flags": [list(o.flags) for o in outcomes],
        "replayed": [o.replayed for o in outcomes],
        "label": [None if o.label is None else json_text(o.label) for o in outcomes],
    }


def _turns(rollouts: Sequence[Rollout]) -> pa.Array:
    """Return the turns without their seconds, which depend on the clock."""
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    columns = {
        "role": [t.kind for t in turns],
        "text": [_own_text(turn, rollout) for rollout in rollouts for turn in rollout.turns],
        "transcript": [t.transcript for t in turns],
        "first": [t.start for t in turns],
        "length": [t.length for t in turns],
        "reward": _finite(_floats(t.reward for t in turns)),
        "cut": [t.cut for t in turns],
        "calls": [[_call(call) for call in t.calls] for t in turns],
        "temperature": [t.temperature for t in turns],
    }
    return _lists(ROLLOUTS.field("turns").type, [len(r.turns) for r in rollouts], columns)


def _own_text(turn: PlayedTurn, rollout: Rollout) -> str | None:
    """Return the text of a turn, or None if the row stores it already: see `rollout_rows.said_by`."""
    whole = rollout.prompt if turn.kind is _PROMPT else rollout.text if turn.kind is _SAMPLED else None
    return None if turn.text == whole else turn.text


def _call(call: ToolCall) -> dict[str, Any]:
    return {"tool": call.name, "arguments": json_text(dict(call.arguments)), "end": call.end, "problem": call.problem}


def _transcripts(rollouts: Sequence[Rollout]) -> Columns:
    """Return the concatenated tokens of the transcripts, and the length of each."""
    every = [t for rollout in rollouts for t in rollout.transcripts]
    begins = [begin for rollout in rollouts for begin, _ in _laid(rollout)]
    spans = [span for t in every for span in t.spans]
    columns = {
        "kind": [span.kind for span in spans],
        "start": [begin + span.start for begin, t in zip(begins, every, strict=True) for span in t.spans],
        "length": [span.length for span in spans],
        "version": [span.version for span in spans],
        "learned": [span.learned for span in spans],
        "temperature": [span.temperature for span in spans],
    }
    sampled, scored = [r.n_sampled for r in rollouts], [r.n_scored for r in rollouts]
    total = [sum([len(t.tokens) for t in r.transcripts]) for r in rollouts]
    counts = [sum([len(t.spans) for t in r.transcripts]) for r in rollouts]
    versions = [sorted({s.version for t in r.transcripts for s in t.spans if s.version is not None}) for r in rollouts]
    pictures = [_pictures(r) for r in rollouts] if any(t.media for t in every) else [[]] * len(rollouts)
    forks = [[list(t.forks) for t in r.transcripts] for r in rollouts] if any(t.forks for t in every) else []
    tokens = np.fromiter(chain.from_iterable([t.tokens for t in every]), np.int32, sum(total))
    engine = np.fromiter(chain.from_iterable([t.logp for t in every]), np.float32, sum(sampled))
    return {
        "sampled": sampled,
        "scored": scored,
        "total": total,
        "versions": versions,
        "pictures": pictures,
        "forks": [own if any(own) else None for own in forks] or [None] * len(rollouts),
        "length": [own or learned for own, learned in zip(sampled, scored, strict=True)],
        "version": [own[0] if own else 0 for own in versions],
        "media": [list(dict.fromkeys(p["name"] for p in own)) for own in pictures],
        "tokens": _lists(ROLLOUTS.field("tokens").type, total, pa.array(tokens)),
        "transcripts": [[len(t.tokens) for t in r.transcripts] for r in rollouts],
        "spans": _lists(ROLLOUTS.field("spans").type, counts, columns),
        "engine": _lists(ROLLOUTS.field("engine").type, sampled, pa.array(engine)),
    }


def _laid(rollout: Rollout) -> Iterator[tuple[int, Transcript]]:
    """Yield the transcripts, each with the number of tokens before it."""
    return zip(accumulate([len(t.tokens) for t in rollout.transcripts], initial=0), rollout.transcripts)  # noqa: B905


def _pictures(rollout: Rollout) -> list[Columns]:
    return [
        {"name": m.digest, "start": begin + m.start, "length": m.length, "grid": list(m.grid)}
        for begin, transcript in _laid(rollout)
        for m in transcript.media
    ]


def _lists(kind: pa.ListType, counts: Sequence[int], values: pa.Array | Columns) -> pa.Array:
    """Return lists with these numbers of values, taken in order; for structures, `values` has a column per field."""
    if isinstance(values, dict):
        fields = list(kind.value_type)
        made = [v if isinstance(v := values[f.name], pa.Array) else array(v, f.type) for f in fields]
        values = pa.StructArray.from_arrays(made, fields=fields)
    return pa.ListArray.from_arrays(pa.array(np.cumsum([0, *counts]), pa.int32()), values, type=kind)


def _floats(values: Iterable[float | None]) -> np.ndarray:
    """Replace None by NaN."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _finite(values: np.ndarray) -> pa.Array:
    """Replace NaN and infinity by null."""
    return pa.array(values, pa.float64(), mask=~np.isfinite(values))
