"""The processes of a run as a mesh: groups of neighbours compute the same micro-batches, and the groups share them out.

With tensor parallelism T and context parallelism C a group has T x C processes. Process ((g C) + c) T + t has part t of
the weights, and part c of the tokens of the micro-batches of group g.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from posttrain.learners.process_group import Processes


@dataclass(frozen=True)
class ProcessMesh:
    """The groups that a process belongs to."""

    groups: Processes  # one process of each group: they share the micro-batches
    same: Processes  # those with the same part of the weights: their gradients are summed
    group: Processes  # those that compute the same micro-batches
    tensor: Processes | None  # those of the group with other parts of the weights; None: no tensor parallelism
    context: Processes | None  # those of the group with other tokens; None: no context parallelism


@cache
def open_mesh(world: Processes, tensor: int, context: int) -> ProcessMesh:
    """Divide the processes of a run. All have to call this. `tensor`, `context`: sizes, whose product divides theirs."""
    each, ranks = tensor * context, range(world.size)
    assert world.size % each == 0, f"{world.size} processes, {tensor} x {context} of each micro-batch"
    first = ranks[::each]
    within = [range(start, start + each) for start in first]
    same = [ranks[part::tensor] for part in range(tensor)]
    return ProcessMesh(
        world.divided([ranks[place::each] for place in range(each)]),
        world if tensor == 1 else world.divided(same),
        world.divided(within),
        world.divided([r for group in within for r in _rows(group, tensor)]) if tensor > 1 else None,
        world.divided([group[part::tensor] for group in within for part in range(tensor)]) if context > 1 else None,
    )


def _rows(ranks: range, size: int) -> list[range]:
    return [ranks[start : start + size] for start in range(0, len(ranks), size)]
