"""A real instruct model from its GGUF file: the numbers of transformers, whichever way it goes."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_models import real_model
from recipe_modules import recipe_module

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


def test_log_probabilities_and_greedy_replies_are_those_of_transformers(data: Path) -> None:
    """`python recipes/exactness.py` does the same with 200 texts."""
    path = real_model()
    found = recipe_module("exactness").compare(path, 4, lambda line: None)
    for way in ("Decoder", "Backed"):
        assert max(found[f"{way}, float32"].text) < 1e-4
        tokens, odd = found[f"{way}, replies"]
        assert tokens > 20 and not odd
        own, theirs = (found[f"{name}, bfloat16"] for name in (way, "transformers itself"))
        assert own.sum < 1.5 * theirs.sum
