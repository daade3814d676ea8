"""Recipes as modules: they are scripts, which nothing installs."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from places import ROOT

FOLDER = ROOT / "recipes"
# Where recipes find what they share with others; last, for some names are also those of tests.
sys.path += [str(FOLDER), str(ROOT)]


def recipe_module(name: str) -> ModuleType:
    """The recipe of that name, run up to its `main`; real.NAME is one of recipes/real."""
    if name.startswith("real."):
        return importlib.import_module(f"recipes.{name}")
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", FOLDER / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
