"""Keeps pyarrow from importing pandas in processes that do not need it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec


class _NoPandas:
    """An import finder that refuses to import pandas."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "pandas" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        raise ModuleNotFoundError("pandas is not needed here", name=spec.name)

    def exec_module(self, module: object) -> None:
        raise AssertionError("no module was made")


@contextmanager
def without_pandas() -> Iterator[None]:
    """Context manager that refuses imports of pandas, unless pandas is already loaded.

    pyarrow imports it before the first conversion of numbers from or to an array, to recognise pandas objects: 0.3 s
    and 43 MB.
    """
    refusing = _NoPandas()
    if "pandas" not in sys.modules:  # code that looks for pandas, as DuckDB does, finds that it is not loaded
        sys.meta_path.insert(0, refusing)
    try:
        yield
    finally:
        if refusing in sys.meta_path:
            sys.meta_path.remove(refusing)
