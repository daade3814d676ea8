"""Files of a run, to compare two runs and to wait for one."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path


def traces(run: Path) -> dict[str, str]:
    """The checksum of everything that must be repeated: metrics, rollouts, and all of every checkpoint."""
    files = [run / "metrics.jsonl", *run.glob("rollouts/*"), *run.glob("checkpoints/**/*")]
    return {str(p.relative_to(run)): sha256(p.read_bytes()).hexdigest() for p in files if p.is_file()}


def there(*paths: Path) -> Callable[[], bool]:
    return lambda: any(path.exists() for path in paths)
