"""PyPI's torchvision beside a torch for processors, for servers of vLLM that a test starts.

vLLM imports it for Qwen-VL's processors. It has no build for processors alone: its Python code, with the transforms, works,
and its compiled operators do not load. Two of these are declared, or it could not be imported; vLLM calls neither.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "torchvision"  # see the Makefile
DECLARED = '''
import importlib.abc, sys

class Declare(importlib.abc.MetaPathFinder):
    """Declares torchvision's operators before its import."""
    def find_spec(self, name, path, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch
            self.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            kept.append(self)
        return None

kept = []
sys.meta_path.insert(0, Declare())
'''


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put into a folder what the servers import at their start."""
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(DECLARED)
    paths = [str(folder), str(FOLDER), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
