"""An optimizer class of a library, or of the user, as the learner steps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from posttrain.core.types import UserError
from posttrain.learners.optimizer_chunks import wide_bytes
from posttrain.system.user_code import describe_error, source_file

TRIED = 256
"""Rows and columns of the matrix with which a class is tried."""


EXACT = {int: torch.int64, float: torch.float64}
"""Type in which a number of an optimizer's state is stored."""


class Optimizer(Protocol):
    """An optimizer that the learner can step.

    `param_groups`: as in torch; `state`: parameter -> its tensors and numbers, by name.
    """

    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> Mapping[Any, dict[str, Any]]: ...

    def zero_grad(self) -> None: ...

    def step(self) -> None: ...

    def restore(self, parameter: nn.Parameter, stored: Mapping[str, Tensor]) -> None:
        """Set the state of a parameter to what a checkpoint has stored, numbers as tensors without dimensions.

        Raises KeyError for a name that the state cannot have.
        """
        ...

    def moment_bytes(self) -> float:
        """Return the bytes of the state once every parameter has been updated."""
        ...


class LibraryOptimizer:
    """An optimizer with the interface of torch.optim.

    Weight decay is decoupled whatever the class (arXiv 1711.05101): a step first multiplies by 1 - lr * decay, as torch's
    AdamW and Muon do. The class itself is created with a decay of 0.
    """

    def __init__(
        self, name: str, kind: Callable[..., Any], groups: Sequence[dict[str, Any]], lr: float, options: dict[str, Any]
    ) -> None:
        """Create `kind` for parameter groups as in `AdamW`. Raises UserError, which names `name`, if it cannot be used."""
        self.param_groups = [{"lr": lr, **group} for group in groups if group["params"]]
        self._name, self._kind, self._options = name, kind, options
        self._tried = self._try()
        self._inner = self._create([{"params": list(group["params"])} for group in self.param_groups])

    @property
    def state(self) -> Mapping[Any, dict[str, Any]]:
        state: Mapping[Any, dict[str, Any]] = self._inner.state if self._inner is not None else {}
        return state

    def zero_grad(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for own, group in zip(self._inner.param_groups if self._inner else (), self.param_groups, strict=True):
            own["lr"] = group["lr"]
            moved = [p for p in group["params"] if p.grad is not None]
            if moved and group["weight_decay"]:
                torch._foreach_mul_(moved, 1 - group["lr"] * group["weight_decay"])
            torch.autograd.graph.increment_version(moved)  # kernels of libraries do not, see `AdamW.step`
        if self._inner is not None:
            self._guarded(self._inner.step)

    def restore(self, parameter: nn.Parameter, stored: Mapping[str, Tensor]) -> None:
        assert self._inner is not None
        # without these torch keeps "step" on the processor
        there = self._options.get("capturable") or self._options.get("fused")
        ordered = {**{name: stored[name] for name in self._tried if name in stored}, **stored}  # as the class made it
        self._inner.state[parameter] = {
            name: tensor.item()
            if isinstance(self._tried.get(name), int | float)
            else tensor.to("cpu" if name == "step" and not there else parameter.device)
            for name, tensor in ordered.items()
        }

    def moment_bytes(self) -> float:
        found = sum(value.nbytes for value in self._tried.values() if isinstance(value, Tensor))
        return found / (4 * TRIED**2) * sum(wide_bytes(p) for group in self.param_groups for p in group["params"])

    def _try(self) -> dict[str, Any]:
        """Update one matrix, float32 [TRIED, TRIED]. Return its state. Raises UserError if no checkpoint could hold it."""
        matrix = nn.Parameter(torch.ones(TRIED, TRIED))
        matrix.grad = torch.ones(TRIED, TRIED)
        tried = self._create([{"params": [matrix]}])
        if lacking := [name for name in ("param_groups", "state", "step") if not hasattr(tried, name)]:
            raise UserError(f"--optimizer {self._name} is no optimizer of torch: it has no {lacking[0]}")
        tried.param_groups[0]["lr"] = 0.0
        before = _numbers(tried)
        self._guarded(torch.no_grad()(tried.step))
        state: dict[str, Any] = dict(tried.state.get(matrix, {}))
        odd = [name for name, value in state.items() if type(value) not in (Tensor, int, float)]
        odd += [name for name, value in _numbers(tried).items() if before.get(name) != value]
        if odd:
            raise UserError(
                f"--optimizer {self._name} keeps {odd[0]!r} where no checkpoint would hold it: of an optimizer's state, "
                "tensors and numbers of each weight are saved; choose another"
            )
        return state

    def _create(self, groups: list[dict[str, Any]]) -> Any:
        return self._guarded(lambda: self._kind(groups, lr=1.0, **self._options)) if groups else None

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise UserError(f"--optimizer {self._name}: {describe_error(error, source_file(self._kind))}") from error


def _numbers(optimizer: Any) -> dict[str, float]:
    """Return the numbers that an optimizer keeps beside the state of its weights: in itself and in its first group."""
    # an attribute that is true once a step is done, as in bitsandbytes, is no state: a resumed run sets it again
    own = {name: value for name, value in vars(optimizer).items() if not isinstance(value, bool)}
    both = {**own, **optimizer.param_groups[0]}
    return {name: value for name, value in both.items() if isinstance(value, int | float)}


def stored_state(name: str, value: Any) -> Tensor:
    """Return a value of an optimizer's state as a checkpoint holds it. Raises UserError for one that it cannot hold."""
    if isinstance(value, Tensor):
        return value
    if type(value) not in EXACT:
        raise UserError(
            f"the optimizer keeps {name!r} of type {type(value).__name__}, and a checkpoint holds only tensors and "
            "numbers: correct its class, or choose another --optimizer"
        )
    return torch.tensor(value, dtype=EXACT[type(value)])
