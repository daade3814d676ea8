"""Weights that learn and are stored in bfloat16: gradients and moments in float32, updates rounded at random."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.core.seeds import seed_of
from posttrain.learners.library_optimizer import Optimizer
from posttrain.learners.optimizer_chunks import gradients_in_chunks
from posttrain.models.row_shards import slices_here, whole_shape

LEFT = 16
"""Bits of a float32 that bfloat16 leaves out."""
BLOCK = 1 << 20
"""Numbers of a weight, in whole rows, whose noise is drawn at once. A process draws only the blocks of which it holds
numbers.
"""


def is_rounded(parameter: Tensor) -> bool:
    """Return whether a trained weight is stored in fewer bits than its gradient."""
    return parameter.dtype == torch.bfloat16


def widen_gradients(parameters: Iterable[nn.Parameter]) -> bool:
    """Let the gradients of weights in bfloat16 be float32. Return whether there are such weights."""
    found = [parameter for parameter in parameters if is_rounded(parameter)]
    for parameter in found:
        parameter.grad_dtype = torch.float32
    return bool(found)


def noise_of(count: int, generator: torch.Generator) -> Tensor:
    """Return the noise of so many roundings: int16 [count]."""
    words = torch.empty(-(-count // 4), dtype=torch.int64, device=generator.device)
    return words.random_(-(2**63), None, generator=generator).view(torch.int16)[:count]


def rounded_at_random(x: Tensor, noise: Tensor) -> Tensor:
    """Round float32 to bfloat16, up with the probability by which x is above the lower neighbour. Overwrites x.

    `noise`: see `noise_of`.

    The mean of many roundings is x (stochastic rounding, arXiv 1502.02551, section 3). The nearest number would be the old
    one for each change below 1/512 of a weight, so that small learning rates would learn nothing.
    """
    lost, bits = x.isnan(), x.view(torch.int32)  # a GPU's nan has all bits set, to which nothing can be added
    bits += noise.view(x.shape).to(torch.int32) & (1 << LEFT) - 1
    bits &= -1 << LEFT
    return x.to(torch.bfloat16).masked_fill_(lost, torch.nan)


class RoundedOptimizer:
    """An optimizer of weights of which some are stored in bfloat16. Implements `library_optimizer.Optimizer`.

    A step widens a chunk of the weights to float32, lets the inner optimizer change it, and rounds it again. The noise of
    the rounding follows from the number of the update and the place of a number in its whole weight. So a resumed run
    has the same bits, and processes that share a weight round it as one process does.
    """

    def __init__(
        self,
        inner: Optimizer,
        update: Callable[[], int],
        in_chunks: bool,
        weight: Callable[[nn.Parameter], Tensor] = lambda parameter: parameter,
        numbers: dict[Tensor, int] | None = None,
    ) -> None:
        """Wrap an optimizer. `update`: returns the number of updates so far. `in_chunks`: see `gradients_in_chunks`.
        `weight`: returns the tensor that knows which part of a whole weight a parameter is, see `row_shards`. `numbers`:
        of the parameters of the optimizers that have been wrapped before, if several update one model; this one's are added.
        """
        self.inner, self._update, self._in_chunks, self._weight = inner, update, in_chunks, weight
        self.param_groups = inner.param_groups
        self._numbers = {} if numbers is None else numbers
        for group in self.param_groups:
            for parameter in group["params"]:
                self._numbers[parameter] = len(self._numbers)

    @property
    def state(self) -> Mapping[Any, dict[str, Any]]:
        return self.inner.state

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        for chunk in gradients_in_chunks(self.param_groups, self._in_chunks):
            with self._widened(chunk):
                self.inner.step()

    def restore(self, parameter: nn.Parameter, stored: Mapping[str, Tensor]) -> None:
        narrow = parameter.data
        parameter.data = narrow.float() if is_rounded(narrow) else narrow
        try:
            self.inner.restore(parameter, stored)
        finally:
            parameter.data = narrow

    def moment_bytes(self) -> float:
        return self.inner.moment_bytes()

    @contextmanager
    def _widened(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Context in which these weights are float32. Their memory in bfloat16 stays where engines read it.

        If the step raises, weights that are not rounded yet keep their old numbers.
        """
        stored = {parameter: parameter.data for parameter in parameters if is_rounded(parameter)}
        try:
            for parameter, narrow in stored.items():
                parameter.data = narrow.float()
            yield
            for parameter, narrow in stored.items():
                narrow.copy_(self._rounded(parameter))
                parameter.data = narrow
        finally:
            for parameter, narrow in stored.items():
                parameter.data = narrow
            torch.autograd.graph.increment_version(list(stored))  # by which users of copies detect changes

    def _rounded(self, parameter: nn.Parameter) -> Tensor:
        """Return the weight, float32, in bfloat16."""
        weight, wide = self._weight(parameter), parameter.data.flatten(1)
        dim, slices = slices_here(weight)
        assert dim < 2 and (dim == 0 or weight.ndim == 2), "a part of rows, or of a matrix's columns"
        shape = whole_shape(weight)
        count, width = shape[0], shape[1:].numel()
        rows, columns = (slices, (slice(width),)) if dim == 0 else ((slice(0, count),), slices)
        generator, each = torch.Generator(parameter.device), max(1, BLOCK // width)
        found, at = torch.empty_like(wide, dtype=torch.bfloat16), 0
        for own in rows:
            for begin in range(own.start // each * each, own.stop, each):
                generator.manual_seed(seed_of("rounding", self._update(), self._numbers[parameter], begin))
                noise = noise_of(min(each, count - begin) * width, generator).view(-1, width)
                noise = noise[max(0, own.start - begin) : own.stop - begin]
                here = slice(at, at + len(noise))
                found[here] = rounded_at_random(wide[here], torch.cat([noise[:, part] for part in columns], 1))
                at += len(noise)
        return found.view(parameter.shape)
