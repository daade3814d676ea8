"""The processes of torch.distributed as a `World`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


class Processes:
    """See `posttrain.types.World`. The process group is up already: torchrun's environment, or `init_process_group`."""

    def __init__(self) -> None:
        assert dist.is_initialized(), "start the process group first"
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def sum(self, x: Tensor) -> Tensor:
        total = x.detach().clone()
        dist.all_reduce(total)
        return total

    def gather(self, x: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, x)
        return found
