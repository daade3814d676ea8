"""Where Python looks for cyclic garbage in posttrain's own processes, and in programs that import it."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from posttrain.cli import named_files, training_commands
from posttrain.config.training import SFT
from posttrain.core.types import UserError
from posttrain.system import garbage
from posttrain.system.child_processes import Child, pair
from posttrain.training import training_run


def tell(descriptor: int) -> None:
    """Send the collector's threshold and whether anything is frozen. A child process runs this."""
    os.write(descriptor, json.dumps([gc.get_threshold()[0], gc.get_freeze_count() > 0]).encode())


@pytest.fixture
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_a_child_process_looks_for_garbage_seldom_and_not_among_what_it_has_loaded() -> None:
    ours, theirs = pair()
    with ours, theirs:
        child = Child(f"{__name__}:tell", [theirs.fileno()])
        ours.settimeout(60)
        assert json.loads(ours.recv(100)) == [garbage.YOUNG, True]
        child.kill()


def test_a_command_looks_for_garbage_seldom() -> None:
    code = "import gc, sys\nfrom posttrain.cli import main\nsys.argv[1:] = ['--version']\n"
    code += "main.main = lambda: print(gc.get_threshold()[0]) or 0\nmain.entry()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == garbage.YOUNG


@pytest.mark.parametrize("own", [True, False])
def test_a_command_leaves_libraries_out_before_it_loads_the_users_code_and_a_program_of_the_user_does_not(
    own: bool, thawed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list[bool]()

    def run(config: Any) -> None:
        left.append(gc.get_freeze_count() > 0)
        raise UserError("ended")

    monkeypatch.setattr(named_files, "check_files", lambda config: None)
    monkeypatch.setattr(garbage, "_own", own)
    monkeypatch.setattr(training_run, "run_training", run)
    with pytest.raises(UserError, match="ended"):
        training_commands.trained(SFT(tasks="sums.jsonl", out="never"))
    assert left == [own]
