"""Rollouts as training state: conversion to JSON data and back of everything that is trained on or recorded.

It leaves out their tasks, which are the run's own rows, identified by the group, and times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.core.json_text import plain
from posttrain.core.rollouts import Branch, Piece, PlayedTurn, Rollout
from posttrain.core.transcripts import SpanKind, Transcript
from posttrain.core.types import Invalid, InvalidKind, Reasoned, StopReason, Task, ToolCall, bare


def stored(rollout: Rollout) -> dict[str, Any]:
    """Return a rollout as JSON data, which `restored` converts back."""
    return {
        "group": rollout.group,
        "side": rollout.side,
        "reward": _verdict(rollout.reward),
        "rewards": dict(rollout.rewards),
        "steps": [list(step) for step in rollout.steps],
        "stop": str(rollout.stop),
        "transcripts": [transcript.as_dict() for transcript in rollout.transcripts],
        "turns": [_turn(turn) for turn in rollout.turns],
        "text": rollout.text,
        "prompt": rollout.prompt,
        "asked": rollout.asked,
        "answers": [[name, _answer(answer)] for name, answer in rollout.answers],
        "pieces": [[p.length, p.member, p.reply] for p in rollout.pieces],
        "notes": dict(rollout.notes),
        "greedy": rollout.greedy,
        "baseline": rollout.baseline,
        "branch": [rollout.branch.of, rollout.branch.turns, list(rollout.branch.taken)] if rollout.branch else None,
    }


def restored(row: Mapping[str, Any], task: Task) -> Rollout:
    """Return the rollout of `stored` data. Raises ValueError, LookupError or TypeError if the row is invalid."""
    return Rollout(
        task,
        row["group"],
        [Transcript.from_dict(transcript) for transcript in row["transcripts"]],
        _judged(row["reward"]),
        dict(row["rewards"]),
        [(int(place), float(reward)) for place, reward in row["steps"]],
        StopReason(row["stop"]),
        [_played(turn) for turn in row["turns"]],
        row["text"],
        row["prompt"],
        [(name, _answered(answer)) for name, answer in row["answers"]],
        row["side"],
        [Piece(*piece) for piece in row["pieces"]],
        Branch(row["branch"][0], row["branch"][1], tuple(row["branch"][2])) if row["branch"] else None,
        dict(row["notes"]),
        row["asked"],
        bool(row["greedy"]),
        None if row["baseline"] is None else float(row["baseline"]),
    )


def _verdict(reward: float | Invalid) -> Any:
    return [reward.reason, str(reward.kind)] if isinstance(reward, Invalid) else reward


def _judged(verdict: Any) -> Any:
    return Invalid(verdict[0], InvalidKind(verdict[1])) if isinstance(verdict, list) else verdict


def _answer(answer: Any) -> dict[str, Any]:
    said = {"said": list(answer.said)} if isinstance(answer, Reasoned) else {}
    answer = bare(answer)
    return {**({"invalid": _verdict(answer)} if isinstance(answer, Invalid) else {"answer": answer}), **said}


def _answered(row: Mapping[str, Any]) -> Any:
    answer = _judged(row["invalid"]) if "invalid" in row else row["answer"]
    return Reasoned(answer, tuple(row["said"])) if "said" in row else answer


def _turn(turn: PlayedTurn) -> list[Any]:
    calls = [[c.name, plain(dict(c.arguments)), c.end, c.problem, c.id] for c in turn.calls]
    where = turn.transcript, turn.start, turn.length
    return [str(turn.kind), turn.text, *where, turn.reward, turn.cut, calls, turn.temperature, [*turn.answered]]


def _played(turn: list[Any]) -> PlayedTurn:
    kind, text, transcript, start, length, reward, cut, calls, temperature, (answers, failed) = turn
    called = tuple(ToolCall(*call) for call in calls)
    where = transcript, start, length
    told: dict[str, Any] = {"temperature": temperature, "answered": (answers, failed)}
    return PlayedTurn(SpanKind(kind), text, *where, reward, cut=cut, calls=called, **told)
