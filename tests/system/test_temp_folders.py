"""What a killed process leaves in the temporary folder is swept by the next one, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from posttrain.core.types import UserError
from posttrain.runs import lock
from posttrain.runs.lock import Lock, in_use
from posttrain.system import temp_folders
from posttrain.system.temp_folders import TempFolder, sweep, temp_log

OWNER = """
import sys, time
from posttrain.system.temp_folders import TempFolder, temp_log
print(TempFolder("engine").name if len(sys.argv) > 1 else temp_log("vllm")[1], flush=True)
kept = TempFolder("kept")
print(kept.name, flush=True)
print(temp_log("kept")[1], flush=True)
time.sleep(100)
"""


@pytest.fixture(autouse=True)
def own_temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(temp_folders, "YOUNG_SECONDS", -60.0)


def test_what_a_killed_process_leaves_is_swept_and_what_a_living_one_has_stays(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        _, folder, log = (Path(owner.stdout.readline().strip()) for _ in range(3))
    (folder / "weights").write_text("x")
    strangers = [tmp_path / name for name in ("posttrain-mine", "other-engine-1", "posttrain-notes.log.txt")]
    strangers[0].mkdir()
    strangers[1].mkdir()
    strangers[2].write_text("mine")
    with TempFolder("engine") as own:
        assert folder.is_dir() and log.is_file() and Path(own).is_dir()
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        sweep()
        assert not folder.exists() and not log.exists() and Path(own).is_dir()
    assert not Path(own).exists() and all(path.exists() for path in strangers)


def test_young_folders_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temp_folders, "YOUNG_SECONDS", 60.0)
    (tmp_path / "posttrain-engine-1").mkdir()
    (tmp_path / "posttrain-engine-1" / temp_folders.OWNER).touch()
    sweep()
    assert (tmp_path / "posttrain-engine-1").is_dir()


def test_a_log_is_locked_as_long_as_a_process_writes_it() -> None:
    descriptor, name = temp_log("vllm")
    writer = subprocess.Popen(["sleep", "100"], stdout=descriptor)
    os.close(descriptor)
    sweep()
    assert Path(name).exists()
    writer.kill()
    writer.wait()
    sweep()
    assert not Path(name).exists()


def test_a_deleted_lock_admits_no_second_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "DYING_SECONDS", 0.1)
    held = Lock(tmp_path)
    (tmp_path / lock.NAME).unlink()
    assert in_use(tmp_path)
    with pytest.raises(UserError, match="is in use by another process"):
        Lock(tmp_path)
    held.release()
    assert not in_use(tmp_path)
    Lock(tmp_path).release()
