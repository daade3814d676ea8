"""The real instruct model, where `make real-model` has put it."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipe_modules import recipe_module

places = recipe_module("real_model")


def real_model() -> Path:
    """The model; a test that asks for it without one is skipped."""
    path: Path | None = places.found()
    if path is None:
        pytest.skip(str(places.ABSENT))
    return path
