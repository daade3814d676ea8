"""Weights that learn and are stored in bfloat16: gradients and moments in float32, updates rounded at random."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.core.seeds import seed_of
from posttrain.learners.library_optimizer import Optimizer
from posttrain.learners.optimizer_chunks import gradients_in_chunks

LEFT = 16
"""Bits of a float32 that bfloat16 leaves out."""
BLOCK = 1 << 20
"""Numbers of a weight whose noise is drawn at once. A process draws only the blocks of which it holds numbers."""


def is_rounded(parameter: Tensor) -> bool:
    """Return whether a trained weight is stored in fewer bits than its gradient."""
    return parameter.dtype == torch.bfloat16


def widen_gradients(parameters: Iterable[nn.Parameter]) -> bool:
    """Let the gradients of weights in bfloat16 be float32. Return whether there are such weights."""
    found = [parameter for parameter in parameters if is_rounded(parameter)]
    for parameter in found:
        parameter.grad_dtype = torch.float32
    return bool(found)


@dataclass(frozen=True)
class ShardRange:
    """The part of a weight that this process holds, of its numbers in the order of rows."""

    first: int  # place of the first number
    whole: int  # numbers of the whole weight


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
        shard_range: Callable[[nn.Parameter], ShardRange] = lambda parameter: ShardRange(0, parameter.numel()),
    ) -> None:
        """Wrap an optimizer. `update`: returns the number of updates so far. `in_chunks`: see `gradients_in_chunks`.
        `shard_range`: returns the part of its whole weight that a parameter is.
        """
        self.inner, self._update, self._in_chunks, self._shard_range = inner, update, in_chunks, shard_range
        self.param_groups = inner.param_groups
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        self._places = {parameter: place for place, parameter in enumerate(every)}

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
        held, wide, generator = (
            self._shard_range(parameter),
            parameter.data.reshape(-1),
            torch.Generator(parameter.device),
        )
        found = torch.empty_like(wide, dtype=torch.bfloat16)
        end = held.first + len(wide)
        for begin in range(held.first // BLOCK * BLOCK, end, BLOCK):
            last = min(begin + BLOCK, held.whole)
            generator.manual_seed(seed_of("rounding", self._update(), self._places[parameter], begin))
            noise = noise_of(last - begin, generator)[max(0, held.first - begin) : end - begin]
            here = slice(max(begin, held.first) - held.first, min(last, end) - held.first)
            found[here] = rounded_at_random(wide[here], noise)
        return found.view(parameter.shape)
