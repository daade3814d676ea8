"""What became of a case, and whether that is right: one line and exit code 2, or a command that works."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from fuzzing.case import Case

VERDICTS = ("traceback", "hang", "crash", "exit code", "accepted", "refused", "lines", "message", "harm")
"""Ways to fail: an exception left the command; it did not end; its process died; a code that means something else; a broken
input was taken; a sound one was not; more than one line; a line that does not say where; a run that left nonsense."""

LONGEST = 700  # characters of a message; one that quotes a page is not read


@dataclass(frozen=True)
class Ended:
    """How a command ended. `code` None: with an exception."""

    code: int | None
    said: str  # on standard error
    traceback: str = ""


def judge(case: Case, ended: Ended, place: Path) -> tuple[str, str] | None:
    """(one of VERDICTS, details) if that is not right, else None."""
    if ended.code is None:
        return "traceback", ended.traceback
    if "Traceback (most recent call last)" in ended.said and not case.prints:
        return "traceback", ended.said
    if ended.code not in case.codes:
        return "exit code", f"{ended.code}: {ended.said}"
    if ended.code == 2:
        return _judge_refusal(case, ended.said)
    if case.broken:
        return "accepted", f"exit code {ended.code}: {ended.said}"
    if ended.code == 0 and (harm := _harm(case, place)):
        return "harm", harm
    return None


def _judge_refusal(case: Case, said: str) -> tuple[str, str] | None:
    if case.words[:1] == ["check"] and (case.prints or not said.strip()):
        return None  # its report stands on standard output
    lines = said.splitlines() if not case.prints else said.splitlines()[-1:]
    lines = [line for line in lines if not line.startswith("posttrain: warning: ")] or lines[-1:]
    if len(lines) != 1 or not lines[0].startswith("posttrain: "):
        return "lines", said
    if case.broken is False:
        return "refused", said
    line = lines[0]
    if len(line) > LONGEST or len(line) < 20:
        return "message", f"{len(line)} characters: {said}"
    if re.search(r"object at 0x|<class |\[Errno|\(os error|PanicException", line):
        return "message", f"not for people: {said}"
    options = [word.partition("=")[0] for word in case.words if word.startswith("--")]  # one may be wrong too
    if case.names and not any(name in line for name in (*case.names, *options)):
        return "message", f"names none of {', '.join(case.names)}: {said}"
    return None


def _harm(case: Case, place: Path) -> str | None:
    """What is wrong with the run that a training command left: weights or figures that are not finite."""
    if case.words[:1] not in (["sft"], ["rl"]):
        return None
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    for file in sorted(place.glob("**/checkpoints/*/*.safetensors")):
        try:
            tensors = load_file(file) if file.is_file() and file.stat().st_size < 1 << 28 else {}
        except SafetensorError:
            if file.name in case.what:  # what was damaged on purpose
                continue
            raise
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                return f"{file.relative_to(place)}: {name} is not finite"
    for file in place.glob("**/metrics.jsonl"):
        if file.name in case.what or not file.is_file():
            continue
        for line in file.read_text().splitlines():
            figures = json.loads(line)
            wrong = [n for n, value in figures.items() if isinstance(value, float) and not math.isfinite(value)]
            if wrong:
                return f"{file.relative_to(place)}: {wrong[0]} is {figures[wrong[0]]}"
    return None
