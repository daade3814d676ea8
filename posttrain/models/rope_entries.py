"""Rotary embeddings in a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def written_rope(theta: float, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the entries of a config.json for rotary embeddings, under the names of transformers 5 and those before.

    Programs that read the older names alone, such as converters to GGUF, would otherwise assume a theta of 10,000.
    """
    found = {"rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": theta}, "rope_theta": theta}
    return {**found, "rope_scaling": dict(scaling)} if scaling else found
