"""Triton's interpreter for processors as vLLM's build for processors looks for it: its second model runner, from which
experts come, then runs there, each kernel in Python. No part of vLLM or Triton is replaced.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

NAME = "interpreted_triton_backend"
COMPILER = '''
from triton.backends.compiler import BaseBackend

class Interpreted(BaseBackend):
    """It never compiles: TRITON_INTERPRET=1 runs kernels in Python."""
    @staticmethod
    def supports_target(target): return target.backend == "cpu"
    def hash(self): return "interpreted"
    def parse_options(self, options): return options
    def add_stages(self, stages, options, language): raise NotImplementedError
    def load_dialects(self, context): pass
    def get_module_map(self): return {}
'''
DRIVER = """
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

class Processor(DriverBase):
    @classmethod
    def is_active(cls): return True
    def map_python_to_cpp_type(self, ty): return ty
    def get_current_target(self): return GPUTarget("cpu", "none", 1)
    def get_active_torch_device(self): raise NotImplementedError
    def get_benchmarker(self): raise NotImplementedError
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the backend into a folder, and set what servers of vLLM that a test starts need to use it."""
    package, about = folder / NAME, folder / f"{NAME}-1.dist-info"
    package.mkdir(parents=True)
    about.mkdir()
    (package / "__init__.py").touch()
    (package / "compiler.py").write_text(COMPILER)
    (package / "driver.py").write_text(DRIVER)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[triton.backends]\ncpu = {NAME}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
