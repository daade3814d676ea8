"""Recipes as modules: they are scripts, which nothing installs."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from places import ROOT

FOLDER = ROOT / "recipes"
sys.path.append(
    str(FOLDER)
)  # where a recipe finds what it shares with others; last, for some names are also those of tests


def recipe_module(name: str) -> ModuleType:
    """The recipe of that name, run up to its `main`."""
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", FOLDER / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
