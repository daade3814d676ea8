"""Several files of rows where one is read: names for them, and how a run on all of them is written."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from posttrain.core.messages import clip

_SHOWN = 4


def names_of(files: Sequence[str]) -> list[str]:
    """Return a name for each file: its own, or that of its folder where several have the same, as train.parquet."""
    stems = [Path(file).stem for file in files]
    if len(set(stems)) < len(stems):
        stems = [Path(file).parent.name or stem for file, stem in zip(files, stems, strict=True)]
    plain = [re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-") or "part" for stem in stems]
    often, taken = Counter(plain), set(plain)
    numbers = {name: count(1) for name in often}
    names: list[str] = []
    for name in plain:
        if often[name] > 1:
            name = next(own for number in numbers[name] if (own := f"{name}-{number}") not in taken)
            taken.add(name)
        names.append(name)
    return names


def as_mixture(files: Sequence[str]) -> str:
    """Return the end of a message that names the options of a mixture of these files."""
    named = list(zip(names_of(files), files, strict=True))
    options = " ".join(f"--mixture.{name}.tasks {clip(file, 100)}" for name, file in named[:_SHOWN])
    return (
        f"--tasks is one file, a folder or a dataset: train on {len(files)} as parts of a mixture, by its options instead: "
        f"{options}{' ...' if len(named) > _SHOWN else ''}; other commands read one file at a time"
    )


def listed(source: str) -> list[str]:
    """Return the files that a list with commas, or a pattern with *, names; [] for anything else."""
    if "," in source:
        return [part.strip() for part in source.split(",") if part.strip()]
    if "*" in source and not Path(source).is_absolute():
        return sorted(str(path) for path in Path().glob(source))
    return sorted(map(str, Path(source).parent.glob(Path(source).name))) if "*" in source else []
