"""The notebooks run from their first cell to the last one, and hold no results of somebody's own run."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT, smaller

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def run_cell(text: str, names: dict[str, Any]) -> Any:
    """Run a cell as a notebook does; return the value of its last expression."""
    tree = ast.parse(text)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None


def test_there_are_notebooks() -> None:
    assert [file.stem for file in NOTEBOOKS] == ["first-reward", "preferences"]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_every_cell_of_a_notebook_runs(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "notebook"}
    values: list[Any] = []
    notebook = json.loads(file.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"] and cell["execution_count"] is None
            values.append(run_cell(smaller("".join(cell["source"])), names))
    assert sum(value is not None for value in values) >= 3, "every step shows what came of it"
