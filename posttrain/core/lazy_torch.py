"""torch for modules that are imported where it is not needed, such as for --help: loaded at its first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class _Deferred:
    """A placeholder for a module that is not loaded yet."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


if TYPE_CHECKING:
    import torch as torch
else:
    torch = _Deferred("torch")
