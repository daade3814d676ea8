"""`--role-devices` and `--offload`: what they do on a second device, in processes of its own, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import TESTS
from sums import PAIRS, QUICK, SMALL, SUMS, nearness

import posttrain
from posttrain.cli.main import _by_name
from posttrain.core.types import UserError


def tried(which: str, *what: str) -> None:
    """Run tests in a process of their own: torch has to know the device before its first backward pass, and this process
    has made some.
    """
    files = [str(TESTS / "learners" / f"second_device_{one}.py") for one in what]
    words = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", which]
    done = subprocess.run([*words, "-o", "timeout=0", *files], capture_output=True, text=True, cwd=TESTS.parent)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.timeout(1800)
def test_on_a_second_device() -> None:
    tried("not long", "memory", "offloading", "roles", "sums")


@pytest.mark.timeout(1800)
def test_every_verb_on_a_second_device() -> None:
    tried("not long", "verbs")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_algorithm_on_a_second_device() -> None:
    tried("long", "verbs")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    posttrain.sft(SUMS, out=str(folder), steps=1, rows=4, **SMALL, **QUICK)
    return folder


SHARED = "has no effect, as this run holds no reference with weights of its own: leave it out"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"algorithm": "dr-grpo", "role_devices": {"reference": "cpu"}}, SHARED),
        ({"algorithm": "grpo", "lora": 2, "role_devices": {"reference": "cpu"}}, SHARED),
        ({"algorithm": "ppo", "critic": "shared", "role_devices": {"critic": "cpu"}}, "holds no critic with weights of its"),
        ({"algorithm": "grpo", "role_devices": {"teacher": "cpu"}}, "this run holds no teacher"),
        ({"algorithm": "grpo", "role_devices": {"judge": "cpu"}}, "this run holds no judge"),
        ({"algorithm": "grpo", "role_devices": {"critics": "cpu"}}, "has no role 'critics'; did you mean 'critic'?"),
        ({"algorithm": "grpo", "role_devices": {"reference": "1"}}, "--role-devices 1 is not a GPU of this machine"),
        ({"algorithm": "grpo", "role_devices": {"reference": "cpu,cpu"}}, "reference=cpu,cpu names 2 for 1 training"),
        ({"algorithm": "grpo", "role_devices": {"reference": "cuda"}}, "reference=cuda names no GPU: give its number"),
        ({"algorithm": "grpo", "role_devices": {"reference": "cdua"}}, "--role-devices reference=cdua cannot be used"),
        ({"algorithm": "grpo", "shard": True, "role_devices": {"reference": "cpu"}}, "--role-devices is for whole models"),
        ({"algorithm": "grpo", "shard": True, "offload": ("optimizer",)}, "micro-batches, and --shard divides them"),
        ({"algorithm": "grpo", "offload": ("optimizer",)}, "--offload optimizer has no effect on a CPU"),
        ({"algorithm": "grpo", "offload": ("optimizer", "optimizer")}, "--offload names optimizer twice"),
        ({"algorithm": "trpo", "offload": ("activations",)}, "second derivatives read the activations again and again"),
        ({"algorithm": "grpo", "optimizer": "lion", "offload": ("optimizer",)}, "has not been tried with --optimizer lion"),
    ],
)  # fmt: skip
def test_what_cannot_be_placed_is_refused_in_one_line(
    options: dict[str, Any], told: str, start: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        posttrain.rl(
            SUMS, env=nearness, model=str(start), out=str(tmp_path / "out"), steps=1, prompts=2, **QUICK, **options
        )
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_dpo_holds_no_reference_of_its_own(start: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"model": str(start), "out": str(tmp_path / "out"), "steps": 1, **QUICK}
    with pytest.raises(UserError, match=SHARED):
        posttrain.prefer(PAIRS, **how, role_devices={"reference": "cpu"})


def test_options_are_told_by_name() -> None:
    assert _by_name(["rl", "--role-devices", "reference=1", "critic=2,3"]) == [
        "rl", "--role-devices.reference=1", "--role-devices.critic=2,3",
    ]  # fmt: skip
    with pytest.raises(UserError, match="write --role-devices KEY=VALUE, such as --role-devices reference=1"):
        _by_name(["rl", "--role-devices", "reference"])
