"""The figures of a recipe in OUT/results.json, written as soon as each is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class ResultsFile(dict[str, Any]):
    """Figures by name, beginning with those that the file of this folder has already."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._file = out / "results.json"
        super().__init__(json.loads(self._file.read_text()) if self._file.exists() else {})

    def add(self, name: str, figures: Any) -> None:
        """Add or replace figures, and write the file."""
        self[name] = figures
        draft = self._file.with_suffix(".draft")
        draft.write_text(json.dumps(self, indent=1) + "\n")
        draft.replace(self._file)

    def once(self, name: str, make: Callable[[], Any]) -> None:
        """Add what `make` returns, and print it, unless the file had these figures."""
        if name not in self:
            self.add(name, make())
            print(f"{name}: {self[name]}", flush=True)
