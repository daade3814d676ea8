"""The page on the first run as a new user makes it: its files and its two training commands, with their real options.

python tests/helpers/first_run.py      (in an empty folder; the Dockerfile's test does it)
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from documents import ROOT, blocks, commands

VERBS = ("sft", "rl")


def main() -> None:
    page = ROOT / "docs" / "start" / "first-run.md"
    found = blocks(page)
    for block in found:
        if block.file in ("sums.py", "my.py"):
            Path(block.file).write_text(block.text, encoding="utf-8")
    first = next(block for block in found if block.language == "bash" and "posttrain sft" in block.text)
    for words in commands(first):
        if words[0] == "python":
            subprocess.run([sys.executable, *words[1:]], check=True)
        elif words[:1] == ["posttrain"] and words[1] in VERBS:
            print(f"$ {shlex.join(words)}", flush=True)
            subprocess.run([sys.executable, "-m", *words, "--quiet"], check=True)
    made = [Path("runs") / verb / "checkpoints" for verb in VERBS]
    assert all(any(folder.glob("step-*")) for folder in made), "a run has left no checkpoint"


if __name__ == "__main__":
    main()
