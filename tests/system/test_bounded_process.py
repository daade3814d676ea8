"""What is asked in another process ends within its time and its memory, and the next call is answered."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from places import TESTS

from posttrain.core.types import UserError
from posttrain.system import bounded_process
from posttrain.system.bounded_process import BoundedProcess

# -- what runs there ---------------------------------------------------------------------------------------------------

held: list[Any] = []


def keep(value: Any) -> int:
    held.append(value)
    return len(held)


def sleep() -> None:
    ctypes.PyDLL(None).sleep(60)  # which holds the interpreter's lock: no thread could end it


def fill(count: int) -> int:
    return len(bytes(count))


def die() -> None:
    os._exit(1)


def refuse() -> None:
    raise UserError("no")


def fail() -> None:
    raise KeyError("oops")


def read(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def place() -> str:
    import tempfile

    return tempfile.mkdtemp()


# -- here --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[BoundedProcess]:
    monkeypatch.syspath_prepend(str(TESTS / "helpers"))
    made = BoundedProcess("test_bounded_process")
    yield made
    made.close()


def call(process: BoundedProcess, function: str, *args: Any, **limits: Any) -> Any:
    return process.call(function, *args, **{"seconds": 60.0, "gib": 0.5, **limits})


def test_it_stays_between_calls_and_starts_anew_after_one_that_does_not_end(
    process: BoundedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_process, "GRACE_SECONDS", 0.0)
    assert [call(process, "keep", value) for value in "ab"] == [1, 2]
    with pytest.raises(UserError, match=r"longer than 0\.1 s"):
        call(process, "sleep", seconds=0.1)
    assert call(process, "keep", "c") == 1


def test_a_call_takes_no_more_memory_than_it_may(process: BoundedProcess) -> None:
    with pytest.raises(UserError, match=r"more than 0\.5 GiB"):
        call(process, "fill", 2**30)
    assert call(process, "fill", 2**30, gib=1.5) == 2**30
    with pytest.raises(UserError, match="memory"):
        call(process, "die")
    assert call(process, "keep", "a") == 1


def test_what_is_refused_there_is_refused_here_and_nothing_else_comes_over(process: BoundedProcess) -> None:
    with pytest.raises(UserError, match="^no$"):
        call(process, "refuse")
    with pytest.raises(UserError, match="KeyError"):
        call(process, "fail")


def test_it_gets_copies_of_descriptors(process: BoundedProcess, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    with (tmp_path / "file").open("rb") as file:
        assert call(process, "read", descriptors=[file.fileno()]) == b"content"


def test_what_it_leaves_in_its_temporary_folder_goes_with_it(process: BoundedProcess) -> None:
    made = Path(call(process, "place"))
    assert made.is_dir()
    process.close()
    assert not made.exists() and not made.parent.exists()
