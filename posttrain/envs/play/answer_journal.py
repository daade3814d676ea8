"""Journal of the answers that a run got from services, kept in its folder so that a resumed run repeats them byte for
byte.

When a run is resumed, valid answers hold. An Invalid holds for its step if that step was finished; if an outage ended
the step, the service is asked again. A line of `answers.jsonl` is one of

    {"step": 3, "question": digest, "service": name, "answer": ...} or "invalid": reason and "kind" in its place
    {"begun": 4}                                                    all steps before it are finished

An answer may have `said`, its reasons. They may be long, so they are not held in memory but read again when needed.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from posttrain.core import user_files
from posttrain.core.types import Invalid, InvalidKind, Reasoned, UserError, bare

ANSWERS = "answers.jsonl"
"""The file in the folder of a run. The order of its lines depends on timing; no result of a run does."""
EVERYBODYS = "answers*.jsonl"
"""Pattern of all journals: further processes of a run write files of their own."""


@dataclass(frozen=True)
class _Line:
    """The place of an answer with reasons in a journal."""

    path: Path
    start: int  # byte


class AnswerJournal:
    """Answers by step and question. The first answer opens the file, or continues that of an older attempt."""

    def __init__(self, folder: Path, resumed: bool, rank: int = 0) -> None:
        """Read the journals of a resumed run; raises UserError if that fails. `rank`: of this process in the run."""
        self.path = folder / (f"answers.{rank}.jsonl" if rank else ANSWERS)
        self.valid: dict[str, Any] = {}  # question -> the latest valid answer, or its _Line
        self._of_step: dict[tuple[int, str], Any] = {}
        self._file: BinaryIO | None = None
        self._size = 0  # bytes of complete lines of an older attempt
        if resumed:
            for path in sorted(folder.glob(EVERYBODYS)):
                size = self._read(path)
                self._size = size if path == self.path else self._size

    def recall(self, step: int, question: str) -> tuple[bool, Any]:
        """Return whether there is an answer for this step, and the answer."""
        of_step = (step, question) in self._of_step
        found = self._of_step[step, question] if of_step else self.valid.get(question)
        return of_step or question in self.valid, _read_again(found) if isinstance(found, _Line) else found

    def note(self, step: int, question: str, service: str, answer: Any) -> None:
        """Store an answer. It survives a kill of the run after this call."""
        found, reasoned = bare(answer), isinstance(answer, Reasoned)
        told = {"invalid": found.reason, "kind": found.kind} if isinstance(found, Invalid) else {"answer": found}
        said = {"said": list(answer.said)} if reasoned else {}
        start = self._write({"step": step, "question": question, "service": service, **told, **said})
        if not isinstance(found, Invalid):
            self.valid[question] = _Line(self.path, start) if reasoned else answer

    def begin(self, step: int) -> None:
        """Record that all steps before this one are finished."""
        if self._file is not None or self._size:  # without answers there is nothing to keep
            self._write({"begun": step}, safe=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, line: dict[str, Any], safe: bool = False) -> int:
        """Write a line and return the byte at which it begins.

        `safe`: wait until everything written would survive a power cut.
        """
        try:
            if self._file is None:
                self._file = user_files.opened(self.path, "r+b" if self._size else "wb")
                self._file.truncate(self._size)
                self._file.seek(self._size)
            start = self._file.tell()
            self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
            if safe:
                os.fsync(self._file.fileno())
            return start
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror or error}") from error

    def _read(self, path: Path) -> int:
        """Read the journal of one process; return the bytes of its complete lines."""
        invalid: dict[tuple[int, str], Any] = {}
        begun = size = 0
        try:
            with user_files.opened(path) as file:
                for line in user_files.lines(file):
                    if not line.endswith(b"\n"):  # the process was killed while it wrote
                        break
                    row = json.loads(line)
                    if "begun" in row:
                        begun = max(begun, int(row["begun"]))
                    else:
                        place = int(row["step"]), str(row["question"])
                        invalid.pop(place, None)
                        self._of_step.pop(place, None)
                        found = _answer(row)
                        kept = _Line(path, size) if isinstance(found, Reasoned) else found
                        if isinstance(bare(found), Invalid):
                            invalid[place] = kept
                        else:
                            self.valid[place[1]] = self._of_step[place] = kept
                    size += len(line)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            raise UserError(
                f"{path} is damaged after byte {size}: put a copy of it back, or delete it, so that the rest of the run "
                "asks its services again"
            ) from error
        self._of_step.update((place, answer) for place, answer in invalid.items() if place[0] < begun)
        return size


def _answer(row: dict[str, Any]) -> Any:
    """Return the answer of a line."""
    found = Invalid(str(row["invalid"]), InvalidKind(row["kind"])) if "invalid" in row else row["answer"]
    return Reasoned(found, tuple(map(str, row["said"]))) if "said" in row else found


def _read_again(line: _Line) -> Any:
    try:
        with user_files.opened(line.path) as file:
            file.seek(line.start)
            return _answer(json.loads(file.readline()))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{line.path} was changed during the run, after byte {line.start}: {error}") from error
