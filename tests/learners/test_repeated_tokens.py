"""Scored tokens that are the same token after the same tokens are computed once, and each has its own share in the loss."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import update_cases
from update_cases import ROWS, credit, feed, gradient, new_case

from posttrain.algorithms.policy import Algorithm
from posttrain.core.rollouts import Rollout


def with_equal_replies(generator: torch.Generator, groups: int, size: int) -> list[Rollout]:
    """Rollouts of which the second of each group has the reply of the first, and the third all but its last tokens."""
    rollouts = new_rollouts(generator, groups, size)
    for first in range(0, len(rollouts), size):
        own = rollouts[first].transcripts
        rollouts[first + 1].transcripts = copy.deepcopy(own)
        rollouts[first + 2].transcripts = copy.deepcopy(own)
        rollouts[first + 2].transcripts[0].tokens[-3:] = [3, 4, 5]
    return rollouts


new_rollouts = update_cases.new_rollouts


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_gradient_of_every_algorithm_is_the_same_with_equal_tokens_computed_once(
    row: Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update_cases, "new_rollouts", with_equal_replies)
    case = new_case(row)
    found = credit(row, update_cases.board(case, case.rollouts), update_cases.old_of(case, case.rollouts))
    batches = feed(case, case.rollouts, found, [range(len(case.rollouts))])
    rows = [b.repeats.first.numel() / len(b.at) for b in batches if b.repeats is not None]
    assert not any(found.fed) or (rows and min(rows) < 0.9)
    once, apart = gradient(case, batches), gradient(case, [replace(b, repeats=None) for b in batches])
    assert once[0] == pytest.approx(apart[0], rel=1e-12, abs=1e-14)
    torch.testing.assert_close(once[1], apart[1], rtol=1e-10, atol=1e-13)
