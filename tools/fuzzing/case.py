"""What one malformed input is: a command line in a folder, and what is known of it without asking the code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol


@dataclass(frozen=True)
class Case:
    """A command to run in a folder that holds its files.

    `broken` is what an independent look says: True must be refused, False must be accepted, None nobody but the code
    knows. `names`: a refusal must hold one of them, such as the file that was damaged.
    """

    words: list[str]
    what: str  # what was done to the valid sample, for whoever reads a failure
    broken: bool | None = None
    names: tuple[str, ...] = ()
    typed: str = ""  # standard input
    codes: tuple[int, ...] = (0, 2)  # exit codes that may be right: 3 where a run may be stopped by its health check
    prints: bool = False  # the user's own code writes to the terminal: the one line of a refusal is then the last


class Make(Protocol):
    """Writes the files of a case into an empty folder. Random numbers come from the generator that it is given alone."""

    def __call__(self, random: Random, place: Path, samples: Path) -> Case: ...


@dataclass(frozen=True)
class Kind:
    """A family of cases. `share`: of all inputs of a run, relative to the other kinds."""

    make: Make
    share: int
