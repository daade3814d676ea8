"""Keeps pyarrow from loading pandas in processes that need none of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec


class _NoPandas:
    """Finds pandas, and refuses to load it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "pandas" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        raise ModuleNotFoundError("pandas is not needed here", name=spec.name)

    def exec_module(self, module: object) -> None:
        raise AssertionError("no module was made")


@contextmanager
def without_pandas() -> Iterator[None]:
    """Refuse to import pandas meanwhile, unless it is loaded already.

    pyarrow imports it before the first numbers go to or from an array, to recognise pandas' own: 0.3 s and 43 MB.
    """
    refusing = _NoPandas()
    if "pandas" not in sys.modules:  # code that looks for it, as DuckDB does, finds that it is not loaded
        sys.meta_path.insert(0, refusing)
    try:
        yield
    finally:
        if refusing in sys.meta_path:
            sys.meta_path.remove(refusing)
