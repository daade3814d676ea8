"""docs/architecture.md names only what exists: a new engineer follows it from name to name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/architecture.md"
PATH = re.compile(r"[\w./-]+(\.(py|md|toml|svg)|/)")
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?")
PARTS = ("posttrain", "tests", "experiments", "recipes", "benchmarks", "tools", "docs")
GUIDES = {"mine.py", "soft.py", "tracker.py"}
"""Files that a reader of the guides writes."""


def spans() -> list[str]:
    return re.findall(r"`([^`\n]+)`", PAGE.read_text())


def names() -> tuple[set[str], dict[str, set[str]], dict[str, list[str]]]:
    """All names that the package defines, those within each class, and the names of its bases."""
    every: set[str] = set()
    members: dict[str, set[str]] = defaultdict(set)
    bases: dict[str, list[str]] = defaultdict(list)
    for file in (ROOT / "posttrain").rglob("*.py"):
        every |= {file.stem, *file.relative_to(ROOT).parts[1:-1]}
        for node in ast.walk(ast.parse(file.read_text())):
            every |= _defined(node)
            if isinstance(node, ast.ClassDef):
                members[node.name] |= set().union(*map(_defined, ast.walk(node)))
                bases[node.name] += [
                    base.id for base in node.bases if isinstance(base, ast.Name) and base.id != node.name
                ]
    return every, members, bases


def _defined(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return {node.id if isinstance(node, ast.Name) else node.attr}
    return {node.arg} if isinstance(node, ast.arg) else set()


def test_every_path_exists() -> None:
    paths = [span for span in spans() if PATH.fullmatch(span) and span not in GUIDES]
    assert len(paths) > 40
    files = [f"/{file.relative_to(ROOT)}" for part in PARTS for file in (ROOT / part).rglob("*") if file.is_file()]
    assert [path for path in paths if not any(_names(file, path) for file in files)] == []


def _names(file: str, path: str) -> bool:
    """Whether a path on the page, from any folder on, is that of a file, or of a folder above it."""
    return f"/{path}" in file if path.endswith("/") else file.endswith(f"/{path}")


def test_every_name_is_defined() -> None:
    every, members, bases = names()
    found = {match[0] for span in spans() if (match := re.match(NAME, span)) and re.fullmatch(r"[\w.]+(\(.*\))?", span)}
    found = {name for name in found if not PATH.fullmatch(name)}
    assert len(found) > 80

    def has(owner: str, name: str) -> bool:
        return name in members[owner] or any(has(base, name) for base in bases[owner])

    def known(name: str) -> bool:
        owner, _, member = name.partition(".")
        return has(owner, member) if member and owner in members else {owner, member or owner} <= every

    assert sorted(name for name in found if not known(name)) == []
