"""A checkpoint is there whole or not at all, and one that was damaged is never used."""

from __future__ import annotations

import errno
import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.core.types import UserError
from posttrain.runs import checkpoint, run_files


def write(folder: Path, text: str = "weights") -> None:
    (folder / "model.safetensors").write_text(text * 20)
    (folder / "training").mkdir()
    (folder / "training" / "state.json").write_text("{}")


def save(run: Path, step: int, keep: int = 9) -> Path:
    return checkpoint.Draft(run, step, lambda folder: write(folder, f"weights {step}")).finish(keep)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None and checkpoint.listed(tmp_path) == []
    saved = [save(tmp_path, step) for step in (2, 10, 100)]
    assert checkpoint.newest(tmp_path) == saved[-1] and checkpoint.step_of(saved[-1]) == 100
    assert all(checkpoint.damaged(path) is None for path in saved)


@pytest.mark.parametrize("file", ["model.safetensors", "training/state.json", "manifest.json"])
def test_any_flipped_byte_is_detected_or_without_effect(tmp_path: Path, file: str) -> None:
    folder = save(tmp_path, 3)
    before = json.loads((folder / "manifest.json").read_text())
    whole = (folder / file).read_bytes()
    places = random.Random(0)
    for place in range(len(whole)):
        content = bytearray(whole)
        content[place] ^= 1 << places.randrange(8)
        (folder / file).write_bytes(content)
        if checkpoint.damaged(folder) is None:  # a blank of the manifest may become another one
            assert file == "manifest.json" and json.loads(content) == before


@pytest.mark.parametrize("file", ["model.safetensors", "training/state.json", "manifest.json"])
def test_missing_and_truncated_files_are_detected_and_the_checkpoint_before_is_used(tmp_path: Path, file: str) -> None:
    before, last = save(tmp_path, 1), save(tmp_path, 2)
    whole = (last / file).read_bytes()
    (last / file).unlink()
    said: list[str] = []
    assert checkpoint.newest(tmp_path, said.append) == before
    (last / file).write_bytes(whole[:-1])
    assert checkpoint.newest(tmp_path, said.append) == before
    (last / file).write_bytes(whole)
    assert checkpoint.newest(tmp_path, said.append) == last
    assert len(said) == 2 and all(file in line and "using the previous one, if any" in line for line in said)


def test_checkpoint_under_the_name_of_another_step_is_detected(tmp_path: Path) -> None:
    before, last = save(tmp_path, 1), save(tmp_path, 2)
    last.rename(last.with_name("step-000007"))
    assert checkpoint.newest(tmp_path) == before


@pytest.mark.parametrize("damage", ["nothing", "[]", '{"step": 1}', '{"step": 1, "files": ["a"]}', '{"files": {}}'])
def test_manifest_that_is_none_is_detected(tmp_path: Path, damage: str) -> None:
    folder = save(tmp_path, 1)
    (folder / "manifest.json").write_text(damage)
    assert checkpoint.damaged(folder) == "manifest.json cannot be read"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), UserError),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), UserError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (AssertionError("ours"), AssertionError),
    ],
)
def test_failed_save_leaves_what_was_there_and_no_half(
    tmp_path: Path, error: BaseException, expected: type[BaseException]
) -> None:
    first = save(tmp_path, 1)

    def fail(folder: Path) -> None:
        write(folder)
        raise error

    with pytest.raises(expected) as raised:
        checkpoint.Draft(tmp_path, 2, fail).finish(keep=1)
    assert expected is not UserError or "\n" not in str(raised.value)
    assert checkpoint.newest(tmp_path) == first and checkpoint.damaged(first) is None
    save(tmp_path, 2)  # a draft that was left is no obstacle
    assert names(tmp_path) == ["step-000001", "step-000002"]


def test_only_the_newest_stay(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-000004", "step-000005"]


def test_saving_an_earlier_step_takes_the_place_of_damaged_later_ones(tmp_path: Path) -> None:
    """A run that goes on from step 1, past a damaged step 4, may save step 2 next: that one is to stay."""
    save(tmp_path, 1)
    (save(tmp_path, 4) / "model.safetensors").unlink()
    saved = save(tmp_path, 2, keep=1)
    assert checkpoint.newest(tmp_path) == saved and names(tmp_path) == ["step-000002"]


def test_a_kill_while_old_checkpoints_are_deleted_leaves_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    deleting = shutil.rmtree

    def killed(folder: Path, **how: Any) -> None:
        if (folder / "model.safetensors").exists():
            (folder / "model.safetensors").unlink()
            raise KeyboardInterrupt
        deleting(folder, **how)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 4, keep=2)
    monkeypatch.undo()
    assert [path.name for path in checkpoint.listed(tmp_path)] == ["step-000003", "step-000004"]
    assert all(checkpoint.damaged(path) is None for path in checkpoint.listed(tmp_path))
    checkpoint.delete_drafts(tmp_path)
    assert names(tmp_path) == ["step-000003", "step-000004"]


def test_a_checkpoint_is_not_saved_where_the_run_no_longer_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run is no longer there: put it back"):
        save(tmp_path / "run", 1)
    assert not (tmp_path / "run").exists()


def test_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    (save(tmp_path, 4) / "model.safetensors").unlink()
    assert checkpoint.damaged(save(tmp_path, 4)) is None


def test_state_and_random_generator_come_back(tmp_path: Path) -> None:
    torch.manual_seed(5)
    checkpoint.save_state({"source": {"cursor": 7}})(tmp_path)
    drawn = torch.rand(9)
    torch.manual_seed(6)
    assert checkpoint.load_state(tmp_path) == {"source": {"cursor": 7}}
    assert torch.equal(torch.rand(9), drawn)


def test_run_stands_for_its_newest_checkpoint_and_any_other_folder_for_itself(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    saved = save(run, 3)
    assert checkpoint.resolve(str(run)) == run
    (run / "run.json").write_text("{}")
    assert checkpoint.resolve(str(run)) == saved
    (saved / "manifest.json").unlink()
    with pytest.raises(UserError, match="all damaged"):
        checkpoint.resolve(str(run))
    shutil.rmtree(saved)
    with pytest.raises(UserError, match="without a checkpoint"):
        checkpoint.resolve(str(run))


def test_a_damaged_newest_checkpoint_is_warned_of_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard output has the figures, which may go into a file."""
    earlier, last = save(tmp_path, 3), save(tmp_path, 4)
    (tmp_path / "run.json").write_text("{}")
    (last / "manifest.json").unlink()
    assert checkpoint.resolve(str(tmp_path)) == earlier
    said = capsys.readouterr()
    assert "posttrain: warning: checkpoint" in said.err and "step-000004 is damaged" in said.err and not said.out


def test_checkpoints_are_in_the_order_of_their_steps_and_strangers_are_none(tmp_path: Path) -> None:
    """As text, step-1000000 comes before step-999999."""
    for step in (999_999, 1_000_000):
        save(tmp_path, step)
    for stranger in ("step-x", "step-12", "notes", "step-000007.old"):
        (tmp_path / "checkpoints" / stranger).mkdir()
    (tmp_path / "checkpoints" / "step-000008").write_text("a file")
    assert [path.name for path in checkpoint.listed(tmp_path)] == ["step-999999", "step-1000000"]
    said: list[str] = []
    newest = checkpoint.newest(tmp_path, said.append)
    assert newest is not None and checkpoint.step_of(newest) == 1_000_000 and not said


@pytest.mark.parametrize("name", ["../../outside", "/etc/hostname", "a\0b", ""])
def test_manifest_does_not_lead_out_of_its_checkpoint(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 1)
    (tmp_path / "outside").write_text("x")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.damaged(folder) is not None


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"torch_rng": 5}', '{"torch_rng": "zz"}', '{"torch_rng": "00"}', "[" * 10**5, "\xff", '"x"'],
)
def test_state_that_is_none_is_one_line_with_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "state.json").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match="state.json is damaged .*: delete its checkpoint") as raised:
        checkpoint.load_state(tmp_path)
    assert "\n" not in str(raised.value)


def test_checkpoint_takes_its_name_after_all_of_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def spy(name: str, act: Callable[..., object]) -> Callable[..., object]:
        def noted(*arguments: object) -> object:
            order.append(name)
            return act(*arguments)

        return noted

    monkeypatch.setattr(checkpoint, "sync", spy("sync", run_files.sync))
    monkeypatch.setattr(Path, "rename", spy("rename", Path.rename))
    save(tmp_path, 1)
    assert order == ["sync"] * 5 + ["rename", "sync"]  # three files, two folders; then the list of names
