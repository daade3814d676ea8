"""Settings of a part, and its findings: tables, single figures, failures.

A part writes all that it has found after each finding, so that a crash or its time limit loses nothing. torch is imported
where a part needs it: the process that only starts them and writes the report does not.
"""

from __future__ import annotations

import gc
import json
import subprocess
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tables import Table

from posttrain.models.gpu_speed import DENSE_BF16

ROOT = Path(__file__).resolve().parents[2]
DATASHEET = dict(DENSE_BF16)["H200"]
"""FLOP/s of dense bfloat16 products, from the datasheets of H100 and H200 (SXM)."""
CEILINGS = "ceilings.json"
SQUARE = 8192
COPIED = 1 << 31  # bytes


@dataclass(frozen=True)
class Setting:
    """Settings of a part."""

    device: str
    tiny: bool  # does it run at all? its figures are worth nothing
    place: Path  # models and runs
    out: Path  # findings
    rounds: int
    long: bool
    until: float  # by time.monotonic(), which all processes share: when it is killed

    @property
    def cuda(self) -> bool:
        return self.device != "cpu"

    def left(self) -> float:
        """Seconds until this part is stopped."""
        return self.until - time.monotonic()

    def wait(self) -> None:
        if self.cuda:
            import torch

            torch.cuda.synchronize()

    def run_folder(self, name: str) -> Path:
        return self.place / "runs" / name


@dataclass
class Findings:
    """Findings of a part so far, kept in a file."""

    file: Path
    tables: list[Table] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # one line each

    def table(self, title: str, *columns: str, notes: tuple[str, ...] = ()) -> Table:
        self.tables.append(Table(title, columns, notes=list(notes)))
        return self.tables[-1]

    def write(self) -> None:
        found = {name: getattr(self, name) for name in ("figures", "notes", "failures")}
        draft = self.file.with_suffix(".draft")
        draft.write_text(json.dumps({**found, "tables": [asdict(table) for table in self.tables]}))
        draft.replace(self.file)

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """One of several findings: an error in it is noted, and the others go on."""
        try:
            yield
        except Exception as error:  # whatever it is, it belongs into the report
            traceback.print_exc()  # to the part's log
            self.failures.append(f"{what}: {said(error)}")
        finally:
            self.write()
        import torch

        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def commit() -> str:
    changed = " and changes" if output_of("git", "status", "--porcelain", "--untracked-files=no") else ""
    return (output_of("git", "rev-parse", "--short=12", "HEAD") or "unknown") + changed


def output_of(*command: str) -> str:
    try:
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return ran.stdout.strip()


def said(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


class Watch:
    """The most memory that tensors took on the card since this was made."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        if setting.cuda:
            import torch

            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def most(self) -> float:
        """In GB, 10^9 bytes; nan on a processor."""
        if not self.setting.cuda:
            return float("nan")
        import torch

        return torch.cuda.max_memory_allocated() / 1e9


def ceilings(setting: Setting) -> dict[str, float]:
    """The card's own limits as measured: FLOP/s of bfloat16 products, bytes/s of copies. Measured once a folder."""
    file = setting.out / CEILINGS
    if not file.exists():
        import torch
        from flops import product_peak

        side = 256 if setting.tiny else SQUARE
        seconds = 0.02 if setting.tiny else 1.0
        found = {
            "product": product_peak([(side,) * 3], torch.bfloat16, setting.device, seconds),
            "copy": _copying(setting),
        }
        file.write_text(json.dumps(found))
    measured: dict[str, float] = json.loads(file.read_text())
    return measured


def _copying(setting: Setting) -> float:
    """Bytes/s that a copy on the device reads and writes."""
    import torch
    from side import timed

    source = torch.zeros((1 << 20) if setting.tiny else COPIED, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)

    def copy() -> None:
        for _ in range(10):
            target.copy_(source)
        setting.wait()

    copy()
    return 2 * 10 * source.numel() / min(timed(copy) for _ in range(5))


def read(file: Path) -> dict[str, Any]:
    """Return the findings that a part has written; none if it wrote nothing."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found
