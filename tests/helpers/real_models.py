"""The real instruct model, where `make real-model` has put it."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.cli.real_model import ABSENT, found


def real_model() -> Path:
    """The model; a test that asks for it without one is skipped."""
    path = found()
    if path is None:
        pytest.skip(ABSENT)
    return path
