"""Runs what a document shows: files are written, programs and commands are run, in the order of the page."""

from __future__ import annotations

import io
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from posttrain.cli.main import main

ROOT = Path(__file__).resolve().parents[2]

SMALLER = {
    ("--steps", "100"): "2",
    ("--steps", "120"): "3",
    ("--epochs", "5"): "0.5",
    ("--epochs", "3"): "0.2",
    ("--epochs", "10"): "0.2",
    ("--steps", "40"): "2",
    ("--steps", "20"): "2",
    ("--prompts", "32"): "4",
    ("--eval-every", "20"): "2",
    ("--held-out", "0.2"): "0.02",
}
"""Options that a page gives to real runs, and what they are in a test."""

SMALLER_IN_FILES = {
    "steps = 100": "steps = 2",
    "prompts = 32": "prompts = 4",
    "steps=100": "steps=2",
    "steps=200": "steps=2",
    "epochs=20": "epochs=0.2",
    "epochs=3": "epochs=0.2",
    "epochs=10": "epochs=0.2",
    "prompts=32": "prompts=4",
    "prompts=64": "prompts=4",
    '"held_out": 0.2': '"held_out": 0.02',
    "held_out = 0.2": "held_out = 0.02",
}

ADDED = {
    "sft": ["--quiet"],
    "prefer": ["--quiet"],
    "reward-model": ["--quiet"],
    "rl": ["--quiet", "--env-workers", "1"],
    "eval": ["--env-workers", "1"],
}
"""Options that a test gives besides, by verb."""

NOT_RUN = ("pip", "make")
"""Commands that install; that what they name exists is another test."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    line: int

    @property
    def file(self) -> str | None:
        """The name in its first line, if it is a file."""
        named = re.match(r"# ([\w.]+\.(?:py|toml))\n|\{#- ([\w.]+\.jinja) #\}\n", self.text)
        return (named[1] or named[2]) if named else None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(m[1], m[2], text[: m.start()].count("\n") + 1) for m in found]


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command, without comments."""
    for command in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(command, comments=True)
        if words:
            yield words


def run(block: Block) -> int:
    """Run a block in the current folder; returns how many programs and commands that were."""
    if block.language in ("toml", "jinja") or (block.language == "python" and block.file):
        assert block.file, f"line {block.line}: a file without a name"
        Path(block.file).write_text(smaller(block.text), encoding="utf-8")
        return 0
    if block.language == "python":
        exec(compile(smaller(block.text), f"line {block.line}", "exec"), {"__name__": "page"})
        return 1
    return sum(_run(words, block) for words in commands(block)) if block.language == "bash" else 0


def smaller(text: str) -> str:
    for written, less in SMALLER_IN_FILES.items():
        text = text.replace(written, less)
    return text


def _run(words: list[str], block: Block) -> bool:
    if words[0] in NOT_RUN:
        return False
    if words[:2] == ["python", "-m"]:
        _run_module(words[2:])
        return True
    if words[0] == "python":
        runpy.run_path(words[1], run_name="__main__")
        return True
    assert words[0] == "posttrain", f"line {block.line}: {words[0]}"
    less = [SMALLER.get((before, word), word) for before, word in zip(["", *words], words, strict=False)]
    code = main([*less[1:], *ADDED.get(words[1], ())])
    assert code == 0, f"line {block.line}: {' '.join(words)} ended with exit code {code}"
    return True


def _run_module(words: list[str]) -> None:
    """As `python -m` does it, here: `> file` takes what it prints."""
    name, *rest = words
    printed = io.StringIO()
    before, sys.argv = sys.argv, [name, *(rest[: rest.index(">")] if ">" in rest else rest)]
    try:
        with redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that it was imported before: it runs as a copy
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    finally:
        sys.argv = before
    if ">" in rest:
        Path(rest[-1]).write_text(printed.getvalue(), encoding="utf-8")
