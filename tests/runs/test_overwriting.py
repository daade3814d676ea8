"""An overwritten run is lost only when the run that replaces it has written a step."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sums import QUICK, SMALL, SUMS

import posttrain
from posttrain.core.types import UserError
from posttrain.learners.local_learner import LocalLearner
from posttrain.runs import run_files
from posttrain.runs.run_files import ASIDE, holds_run, put_back, set_aside
from posttrain.runs.run_reading import read_metrics

OPTIONS: dict[str, Any] = {"rows": 4, **SMALL, **QUICK}


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


def trained(folder: Path, steps: int, seed: int, **options: Any) -> posttrain.Run:
    return posttrain.sft(SUMS, out=str(folder), steps=steps, seed=seed, **{**OPTIONS, **options})


@pytest.fixture
def earlier(tmp_path: Path) -> tuple[Path, dict[str, bytes]]:
    """A run with a file of the user's between its own."""
    trained(tmp_path / "run", 2, 0, save_every=1)
    (tmp_path / "run" / "checkpoints" / "notes.txt").write_text("mine")
    return tmp_path / "run", files(tmp_path / "run")


@pytest.fixture
def fails_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make an update, by its number, fail."""

    def planted(number: int) -> None:
        update, done = LocalLearner.update, list[int]()

        def failing(self: LocalLearner, *batches: Any) -> Any:
            done.append(1)
            if len(done) == number:
                raise UserError("the disk is full")
            return update(self, *batches)

        monkeypatch.setattr(LocalLearner, "update", failing)

    return planted


def test_a_run_that_ends_before_its_first_step_leaves_the_earlier_one(
    earlier: tuple[Path, dict[str, bytes]], fails_at: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, before = earlier
    fails_at(1)
    with pytest.raises(UserError, match="the disk is full"):
        trained(folder, 3, 1, overwrite=True)
    assert files(folder) == before
    assert "holds the earlier run again, as the one that was to replace it wrote no step" in capsys.readouterr().err
    assert trained(folder, 3, 0, resume=True, save_every=1).metrics[-1]["step"] == 3


def test_a_run_that_has_written_a_step_replaces_the_earlier_one(
    earlier: tuple[Path, dict[str, bytes]], fails_at: Any
) -> None:
    folder, before = earlier
    fails_at(2)
    with pytest.raises(UserError, match="the disk is full"):
        trained(folder, 3, 1, overwrite=True)
    assert [row["step"] for row in read_metrics(folder)] == [0, 1] and not (folder / ASIDE).exists()
    left = files(folder)
    assert left["checkpoints/notes.txt"] == b"mine" and left["run.json"] != before["run.json"]
    assert "checkpoints/step-000002/model.safetensors" not in left


KILLED = """
import os, signal, sys
sys.path[:0] = {path!r}
from test_overwriting import trained
from pathlib import Path
from posttrain.learners.local_learner import LocalLearner
LocalLearner.update = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
trained(Path({folder!r}), 3, 1, overwrite=True)
"""


def test_after_a_kill_before_the_first_step_the_next_command_finds_the_earlier_run(
    earlier: tuple[Path, dict[str, bytes]],
) -> None:
    folder, before = earlier
    code = KILLED.format(path=[str(Path(__file__).parent), *sys.path], folder=str(folder))
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    assert (folder / ASIDE / "run.json").read_bytes() == before["run.json"] != (folder / "run.json").read_bytes()
    with pytest.raises(UserError, match="already holds a run"):
        trained(folder, 3, 1)
    assert files(folder) == before


class Killed(BaseException):
    """The end of a process in the middle of its work."""


def interrupted(monkeypatch: pytest.MonkeyPatch, at: int) -> list[str]:
    """End at the change number `at` of a folder. Return the list of changes, which grows."""
    changes: list[str] = []

    def counted(change: Any) -> Any:
        def made(*given: Any, **named: Any) -> Any:
            changes.append(change.__name__)
            if len(changes) == at:
                raise Killed
            return change(*given, **named)

        return made

    for name in ("rename", "rmdir", "unlink", "mkdir"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    monkeypatch.setattr(run_files.shutil, "rmtree", counted(shutil.rmtree))
    return changes


@pytest.mark.parametrize("within", ["setting aside", "putting back"])
def test_wherever_a_move_is_interrupted_the_next_one_completes_it(
    within: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def old(folder: Path) -> dict[str, bytes]:
        for name in ("run.json", "metrics.jsonl", "rollouts/step-000001.parquet", "checkpoints/step-000001/a/b"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name)
        (folder / "rollouts" / "mine").write_text("mine")
        return files(folder)

    def new(folder: Path) -> None:
        for name in ("run.json", "timing.jsonl"):
            (folder / name).write_text("new")
        (folder / "evals").mkdir()

    for at in range(1, 100):
        folder = tmp_path / f"{at}"
        before = old(folder)
        if within == "putting back":
            set_aside(folder)
            assert not holds_run(folder)
            new(folder)
        with monkeypatch.context() as patched:
            changes = interrupted(patched, at)
            try:
                (set_aside if within == "setting aside" else put_back)(folder)
            except Killed:
                assert len(changes) == at
        assert put_back(folder) or files(folder) == before
        assert files(folder) == before and not (folder / ASIDE).exists() and not (folder / "evals").exists()
        if len(changes) < at:
            break
    assert at > 6


def test_a_run_that_cannot_begin_gives_its_folder_back(
    earlier: tuple[Path, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, before = earlier

    def fail(start: Any) -> str:
        raise UserError("the model cannot be downloaded")

    with monkeypatch.context() as patched:
        patched.setattr("posttrain.runs.run_folder.day_of", fail)
        with pytest.raises(UserError, match="cannot be downloaded"):
            trained(folder, 2, 1, overwrite=True)
    assert files(folder) == before
    assert trained(folder, 1, 1, overwrite=True).metrics
