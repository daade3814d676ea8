"""AdamW with torch's fused kernel.

Creating torch.optim's own class imports torch's compiler, which takes longer than the first steps of a small run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.learners.optimizer_chunks import wide_bytes


class AdamW:
    """Adam with decoupled weight decay (arXiv 1711.05101, algorithm 2). A parameter without a gradient does not change.

    `groups`: each has "params", "weight_decay" and further entries of the caller; "lr" may change between steps.
    `state`: parameter -> step, exp_avg and exp_avg_sq, named as in torch.
    """

    MOMENTS = ("step", "exp_avg", "exp_avg_sq")

    def __init__(self, groups: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        self.param_groups = [{"lr": lr, **group} for group in groups]
        self.betas, self.eps = betas, eps
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}

    def zero_grad(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            if not moved:
                continue
            states = [self.begin(p) for p in moved]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1.0)
            torch._fused_adamw_(
                moved,
                [p.grad for p in moved],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                steps,
                lr=group["lr"],
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=group["weight_decay"],
                eps=self.eps,
                amsgrad=False,
                maximize=False,
            )
            # the kernel does not increment the version, by which users of copies detect changes
            torch.autograd.graph.increment_version(moved)

    def restore(self, parameter: nn.Parameter, stored: Mapping[str, Tensor]) -> None:
        """Set the state of a parameter. Raises KeyError for names or shapes that it cannot have."""
        if odd := stored.keys() ^ set(self.MOMENTS):
            raise KeyError(min(odd))
        for name, place in self.begin(parameter).items():
            if stored[name].shape != place.shape:
                raise KeyError(name)
            place.copy_(stored[name])

    def moment_bytes(self) -> float:
        """Return the bytes of the state once every parameter has been updated."""
        return 2.0 * sum(wide_bytes(p) for group in self.param_groups for p in group["params"])

    def begin(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the state of a parameter, which is zeros before its first step."""
        if parameter not in self.state:
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
        return self.state[parameter]
