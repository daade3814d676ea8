"""Hints name only commands that run here, or how to install what they need: decided in one place."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator

import pytest
from places import ROOT

from posttrain.cli.training_commands import _looking
from posttrain.core.extras import NEEDED, install, installed, runnable

FILES = sorted((ROOT / "posttrain").rglob("*.py"))
OWN = ("cli/main.py", "cli/argument_errors.py", "apps/view/")
"""What speaks of these commands where they are being used already."""
DECIDED = ("_looking", "view", "query")
"""Functions that ask first, or are these commands."""


def texts(tree: ast.AST) -> Iterator[str]:
    """Texts in code: those of `runnable(...)` and docstrings aside."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "runnable":
            continue
        if isinstance(node, ast.FunctionDef) and node.name in DECIDED:
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        yield from texts(node)


@pytest.mark.parametrize("absent", [None, "duckdb"])
def test_a_run_ends_with_a_hint_that_runs(absent: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if not all(map(installed, NEEDED["view"])):
        pytest.skip("the extra view is not installed")
    if absent is None:
        assert _looking("runs/a") == ["look at it  posttrain view runs/a"]
        assert runnable("posttrain query runs/a") == "posttrain query runs/a"
        return
    monkeypatch.setitem(sys.modules, absent, None)
    assert _looking("runs/a") == [
        "look at it  posttrain rollouts runs/a",
        "or          pip install 'duckdb>=2,<3', then posttrain view runs/a",
    ]
    assert runnable("posttrain view runs/a") == "posttrain view runs/a (after pip install 'duckdb>=2,<3')"
    assert runnable("posttrain query runs/a").endswith(")") == (absent in NEEDED["query"])
    assert runnable("posttrain chat runs/a") == "posttrain chat runs/a"


def test_no_hint_names_a_command_that_may_not_run() -> None:
    for file in FILES:
        name = str(file.relative_to(ROOT / "posttrain"))
        if name.startswith(OWN):
            continue
        for text in texts(ast.parse(file.read_text(encoding="utf-8"))):
            found = re.search(rf"posttrain ({'|'.join(NEEDED)})\b", text)
            assert not found, f"{name}: {text}"


def test_every_extra_that_is_named_exists_and_brings_what_is_needed() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set()
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        named |= set(re.findall(r"\binstall\(['\"](\w+)['\"]\)", text)) | set(
            re.findall(r'\bneed\("\w+", "(\w+)"\)', text)
        )
        assert file.name == "extras.py" or "posttrain[" not in text, (
            f"{file}: how extras are installed is said in one place"
        )
    assert len(named) > 5 and named <= set(extras)
    assert {re.split(r"[<>=\[]", one)[0] for one in extras["view"]} == {lib for libs in NEEDED.values() for lib in libs}
    for extra, packages in extras.items():
        if extra not in ("dev", "docs"):
            assert install(extra).split()[2:] == [f"'{package}'" for package in packages]
