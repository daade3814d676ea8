"""Files of rollouts as runs left them before there were tables: a line of JSON for each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.core.types import Invalid, Outcome, Rollout, SpanKind

__all__ = ["line_of", "write_lines"]


def write_lines(path: Path, step: int, outcomes: Sequence[Outcome]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [line_of(f"{step}/{place}", outcome) for place, outcome in enumerate(outcomes)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def line_of(name: str, outcome: Outcome) -> dict[str, Any]:
    """What stood in a line."""
    rollout, reward = outcome.rollout, outcome.rollout.reward
    verdict = {"reward": None, "invalid": reward.reason} if isinstance(reward, Invalid) else {"reward": reward}
    branch = {"branch": {"of": rollout.branch.of, "turns": rollout.branch.turns}} if rollout.branch else {}
    return {
        "id": name,
        "group": rollout.group,
        **({"side": rollout.side} if rollout.side else {}),
        "prompt": rollout.prompt,
        "text": rollout.text,
        "answer": rollout.task.get("answer"),
        **verdict,
        "rewards": rollout.rewards,
        "steps": [list(step) for step in rollout.steps],
        "stop": str(rollout.stop),
        "version": rollout.version,
        **branch,
        "turns": [_turn(rollout, place) for place in range(len(rollout.turns))],
        "transcripts": [
            {
                **transcript.as_dict(),
                "sampled": [[s.start, s.length] for s in transcript.spans if s.kind is SpanKind.SAMPLED],
            }
            for transcript in rollout.transcripts
        ],
        "advantage": outcome.advantage,
    }


def _turn(rollout: Rollout, place: int) -> dict[str, Any]:
    turn = rollout.turns[place]
    calls = [{"tool": c.name, "arguments": dict(c.arguments), "end": c.end} for c in turn.calls]
    return {
        "kind": str(turn.kind),
        "text": turn.text,
        "reward": turn.reward,
        "transcript": turn.transcript,
        "start": turn.start,
        "length": turn.length,
        **({"cut": turn.cut} if turn.cut else {}),
        **({"calls": calls} if calls else {}),
    }
