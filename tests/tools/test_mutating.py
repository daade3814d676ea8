"""The tool that makes small mistakes: where it makes them, and that a running process takes them over."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import mutants as tool
import pytest
from mutating.operators import Mutant, mutants
from mutating.trial import change

SOURCE = b'''
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    LIMIT = 3


def share(reward: list[float], number: int = 2) -> float:
    """A docstring \xe2\x80\x94 1 + 1."""
    assert len(reward) > 0
    if number < 1:
        raise ValueError(f"{number + 1}")
    return sum(
        reward[:number]
    ) / len(reward)


class Group:
    size = seed_of(7, "group")

    def __repr__(self) -> str:
        return "1" * 2

    def order(self, x):
        return x.detach().clamp(-1, self.size).masked_fill(x > 0, 0.0)
'''


def made(kind: str) -> set[tuple[str, str]]:
    return {(" ".join(m.before.split()), " ".join(m.after.split())) for m in mutants("m.py", SOURCE) if m.kind == kind}


def test_mistakes_are_of_every_kind_that_a_place_allows_and_in_no_words_for_readers() -> None:
    whole = "sum( reward[:number] ) / len(reward)"
    assert made("denominator") == {
        (whole, "(sum(reward[:number]) )"),
        (whole, "(sum(reward[:number]) / (len(reward) + 1) )"),
        (whole, "(sum(reward[:number]) / (len(reward) - 1) )"),
    }
    assert ("reward[:number]", "reward[:]") in made("slice")
    assert made("comparison") == {(a, f"({b})") for a, b in (
        ("number < 1", "number <= 1"), ("number < 1", "number > 1"), ("x > 0", "x >= 0"), ("x > 0", "x < 0"),
    )}  # fmt: skip
    assert ('seed_of(7, "group")', "seed_of('group')") in made("seed")
    assert made("detach") == {("x.detach()", "x")}
    assert ("x.detach().clamp(-1, self.size)", "x.detach().clamp(min=-1)") in made("bound")
    assert len(made("mask")) == 1
    assert {m.within for m in mutants("m.py", SOURCE)} == {None, "share", "Group.order"}


def test_every_mistake_leaves_the_other_lines_where_they_were() -> None:
    for mutant in mutants("m.py", SOURCE):
        assert mutant.stands(SOURCE)
        assert mutant.applied(SOURCE).count(b"\n") == SOURCE.count(b"\n")
        assert mutant.before.encode() == SOURCE[slice(*mutant.span)] and mutant.applied(SOURCE) != SOURCE
    assert len({m.id for m in mutants("m.py", SOURCE)}) == len(mutants("m.py", SOURCE))


def test_running_module_takes_over_what_its_file_now_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = b"class Sum:\n    def of(self, a, b):\n        return a + b\n"
    file = tmp_path / "running.py"
    file.write_bytes(source)
    spec = importlib.util.spec_from_file_location("running", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "running", module)
    spec.loader.exec_module(module)
    one = module.Sum()
    assert one.of(5, 3) == 8 and not change(str(file))
    (mutant,) = (m for m in mutants("running.py", source) if m.kind == "arithmetic")
    assert isinstance(mutant, Mutant)
    file.write_bytes(mutant.applied(source))
    assert change(str(file)) and one.of(5, 3) == 2


def test_mistake_that_runs_at_import_is_tried_with_tests_of_the_tables_and_one_in_a_function_is_not() -> None:
    table, share = (
        next(m for m in mutants("algorithms/policy_table.py", SOURCE) if m.within == within)
        for within in (None, "share")
    )
    assert {"pages", "objective"} <= set(tool.unrecorded(table))
    assert tool.unrecorded(share) == []
    (sharded, *_) = mutants("learners/fsdp.py", SOURCE)
    assert "sharding" in tool.unrecorded(sharded)
