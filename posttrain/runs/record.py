"""Writes what a run leaves behind, for people and for any tool to read: see `posttrain.runs.files`.

It decides the form of these files and when they are safe on disk. It never reads a tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.runs.events import Events
from posttrain.runs.files import (
    HEALTH,
    METRICS,
    ROLLOUTS,
    RUN,
    SECONDS,
    TENSORBOARD,
    TIMING,
    Folder,
    holds_run,
    json_document,
    json_line,
    naming,
    number,
    plain,
    replace,
    rollout_file,
    seconds_file,
    step_of,
    sync,
)
from posttrain.runs.provenance import circumstances, now
from posttrain.runs.reading import Row, read_run, read_steps
from posttrain.types import Invalid, Outcome, PlayedTurn, Rollout, SpanKind, ToolCall, Transcript, UserError


class Record:
    """The record of one run, open for writing. Only one process writes it: whoever has the folder's lock."""

    def __init__(self, folder: Path, run: Row, step: int) -> None:
        """Use `create` or `resume`. `run`: what run.json holds; `step`: the last one that is kept, -1 in a new run."""
        self.folder = folder
        self._run = run
        self._metrics = _Journal(folder / METRICS, step)
        self._timing = _Journal(folder / TIMING, step)
        self._unsynced: list[Path] = []  # files that are not yet known to be on disk
        self._events: Events | None = None
        self._kept = step

    @classmethod
    def create(cls, folder: Folder, config: Mapping[str, Any], command: str, extra: Mapping[str, Any]) -> Record:
        """Begin a run in `folder`: new, or without a run in it (UserError).

        `command` is the verb, such as "rl"; `config` all settings as resolved, with "seed"; `extra` what else run.json
        should say, such as {"objective": "the formula"}.
        """
        path = Path(folder)
        if holds_run(path):
            raise UserError(f"{path} already holds a run: pass --resume to continue it, or another --out")
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file: pass a folder as --out")
        run = {"verb": command, "start": now(), **circumstances(), "seed": config.get("seed"), "config": config}
        assert not run.keys() & extra.keys(), f"extra repeats {sorted(run.keys() & extra.keys())}"
        path.mkdir(parents=True, exist_ok=True)
        run = plain({**run, **extra})
        replace(path / RUN, json_document(run))
        return cls(path, run, -1)

    @classmethod
    def resume(
        cls,
        folder: Folder,
        step: int,
        config: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        noted: Mapping[str, Any] | None = None,
    ) -> Record:
        """Continue a run from its checkpoint of `step`: what was recorded of later steps is deleted.

        `config`: all settings as they are from now on, if some were changed; `extra` replaces what `create` was given;
        `noted`: what is worth knowing of this resumption.
        """
        path = Path(folder)
        run = read_run(path)
        again = {"step": step, "start": now(), **circumstances(), **(noted or {})}
        kept = {name: value for name, value in run.items() if name not in ("end", "final", "resumes")}
        kept |= {**(extra or {}), "config": run["config"] if config is None else config}
        run = plain({**kept, "resumes": [*run.get("resumes", []), again]})
        replace(path / RUN, json_document(run))
        for folder in (ROLLOUTS, SECONDS):
            unfinished = [p for p in path.glob(f"{folder}/*.jsonl.tmp") if not p.is_dir()]
            later = [p for p in path.glob(f"{folder}/*.jsonl") if (step_of(p.stem) or 0) > step and p.is_file()]
            for file in (*later, *unfinished):
                file.unlink()
        return cls(path, run, step)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One line of metrics.jsonl; once a step. What depends on the clock belongs in `timing`."""
        self._metrics.append(step, values)
        self._draw(step, values)

    def timing(self, step: int, values: Mapping[str, float]) -> None:
        """One line of timing.jsonl; once a step."""
        self._timing.append(step, values)
        self._draw(step, values)

    def health(self, findings: Iterable[tuple[int, str, str]], anew: bool = False) -> None:
        """Add lines to health.jsonl: (step, name, message) of what was found. `anew`: it holds nothing else."""
        path = self.folder / HEALTH
        content = b"".join(json_line({"step": s, "name": name, "message": told}) for s, name, told in findings)
        if anew:
            if content or path.exists():
                replace(path, content)
        elif content:
            with path.open("ab") as file:
                file.write(content)
            self._unsynced.append(path)

    def rollouts(self, step: int, rollouts: Sequence[Outcome]) -> None:
        """Write the rollouts of a step, each with its advantage, and the seconds of their turns beside them.

        Both files appear whole or not at all, the seconds first: whoever finds the rollouts finds them too.
        """
        times, path = seconds_file(self.folder, step), rollout_file(self.folder, step)
        rows = (
            (o.rollout, {"id": f"{step}/{place}"}, {"advantage": None if o.advantage is None else number(o.advantage)})
            for place, o in enumerate(rollouts)
        )
        for file in (times, path):
            file.parent.mkdir(exist_ok=True)
        write_rollouts(times, (_seconds(outcome.rollout) for outcome in rollouts))
        write_rollouts(path, ({**first, **as_row(rollout), **last} for rollout, first, last in rows))
        self._unsynced += [times, path]

    def flush(self) -> None:
        """Return once all JSON written so far would outlive a power cut. Call it before a checkpoint is saved."""
        self._metrics.sync()
        self._timing.sync()
        if self._events:
            self._events.flush()
        for path in (*self._unsynced, *{path.parent for path in self._unsynced}, self.folder):
            sync(path)
        self._unsynced.clear()

    def close(self, final: Mapping[str, Any]) -> None:
        """Note the end of the run and its final figures in run.json."""
        self.flush()
        self._metrics.close()
        self._timing.close()
        if self._events:
            self._events.close()
        replace(self.folder / RUN, json_document({**self._run, "end": now(), "final": final}))

    def _draw(self, step: int, values: Mapping[str, float]) -> None:
        """Pass on to TensorBoard, which hides what an earlier attempt wrote of the steps since the resume."""
        if self._events is None:
            # The suffix, because two attempts may begin within one second, which is all their names would tell.
            suffix = f".{len(self._run.get('resumes', []))}"
            self._events = Events(self.folder / TENSORBOARD, self._kept + 1, suffix)
        self._events.add(step, values)


class Unwritten(Record):
    """The record of a process that writes none: another one of the same run does."""

    def __init__(self) -> None:
        pass

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def timing(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def health(self, findings: Iterable[tuple[int, str, str]], anew: bool = False) -> None:
        pass

    def rollouts(self, step: int, rollouts: Sequence[Outcome]) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self, final: Mapping[str, Any]) -> None:
        pass


class _Journal:
    """A file of one JSON line a step, in the order of the steps. Opening it removes what lies after step `last`."""

    def __init__(self, path: Path, last: int) -> None:
        self._last, size = -1, 0
        for row, end in read_steps(path, last) if last >= 0 else ():
            self._last, size = row["step"], end
        self._path, self._file = path, path.open("ab")
        self._file.truncate(size)

    def append(self, step: int, values: Mapping[str, float]) -> None:
        assert step > self._last, f"a line for step {step} after step {self._last}: one line a step, in order"
        assert "step" not in values
        with naming(self._path):
            self._file.write(json_line({"step": step, **{name: number(values[name]) for name in sorted(values)}}))
            self._file.flush()
        self._last = step

    def sync(self) -> None:
        with naming(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def write_rollouts(path: Path, rows: Iterable[Row]) -> None:
    """One line of JSON each. The file appears whole or not at all."""
    unfinished = path.with_name(path.name + ".tmp")
    with naming(path), unfinished.open("wb") as file:
        for row in rows:
            file.write(json_line(row))
    unfinished.replace(path)


def as_row(rollout: Rollout) -> Row:
    """A rollout as a line of JSON holds it."""
    reward = rollout.reward
    verdict = {"reward": None, "invalid": reward.reason} if isinstance(reward, Invalid) else {"reward": number(reward)}
    return {
        "group": rollout.group,
        **({"side": rollout.side} if rollout.side else {}),
        "prompt": rollout.prompt,
        "text": rollout.text,
        "answer": plain(rollout.task.get("answer", rollout.task.get("answers"))),
        **verdict,
        "rewards": {name: number(value) for name, value in rollout.rewards.items()},
        "steps": [[position, number(value)] for position, value in rollout.steps],
        "stop": str(rollout.stop),
        **({"answers": [_answer(*said) for said in rollout.answers]} if rollout.answers else {}),
        "version": rollout.version,
        **({"branch": {"of": rollout.branch.of, "turns": rollout.branch.turns}} if rollout.branch else {}),
        "turns": [_turn(turn) for turn in rollout.turns],
        "transcripts": [_transcript(transcript) for transcript in rollout.transcripts],
    }


def _seconds(rollout: Rollout) -> Row:
    """What its turns took, and its reward."""
    return {"turns": [round(turn.seconds, 4) for turn in rollout.turns], "reward": round(rollout.seconds, 4)}


def _answer(service: str, answer: Any) -> Row:
    """What a service said in an episode."""
    said = {"invalid": answer.reason} if isinstance(answer, Invalid) else {"answer": plain(answer)}
    return {"service": service, **said}


def _turn(turn: PlayedTurn) -> Row:
    """Without its seconds: they depend on the clock, and rollouts do not."""
    return {
        "kind": str(turn.kind),
        "text": turn.text,
        "reward": number(turn.reward),
        "transcript": turn.transcript,
        "start": turn.start,
        "length": turn.length,
        **({"cut": turn.cut} if turn.cut else {}),
        **({"calls": [_call(call) for call in turn.calls]} if turn.calls else {}),
    }


def _call(call: ToolCall) -> Row:
    wrong = {} if call.problem is None else {"problem": call.problem}
    return {"tool": call.name, "arguments": plain(dict(call.arguments)), "end": call.end, **wrong}


def _transcript(transcript: Transcript) -> Row:
    """As training state holds it, with log-probabilities of half the digits, and without routed experts,
    which are of no use to a reader. "sampled": [first, number] of each run of sampled tokens."""
    row = transcript.as_dict()
    sampled = [[s.start, s.length] for s in transcript.spans if s.kind is SpanKind.SAMPLED]
    shown = {name: value for name, value in row.items() if name not in ("logp", "experts")}
    return {**shown, "sampled": sampled, "logp": list(map(_short, transcript.logp))}


def _short(value: float) -> float | None:
    """A float32 as the shortest decimal that reads back as the same float32: half the digits of its float64 form."""
    return number(float(str(np.float32(value))))
