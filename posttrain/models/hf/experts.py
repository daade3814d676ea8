"""Finds the routers of a mixture of experts in a model of transformers, records their choices, and replays them.

A router is a module whose top-k call returns the experts that another module receives. In a replay the call returns the
recorded experts instead, with the model's own scores for them, through which the gradient flows. Further processing of
these scores (a softmax before or after, a scale) remains the model's own code.

n    tokens of one call of the model    M    layers with a router    E    experts of each    k    experts per token
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

TOPK = (torch.topk, Tensor.topk)
SIGMOID = (torch.sigmoid, Tensor.sigmoid, torch.special.expit)
UNKNOWN = -1  # in place of an expert that was not recorded


@dataclass(frozen=True)
class Router:
    """The router of one layer."""

    module: str  # name in the model
    call: int  # index of the router's call among the module's top-k calls: 0, 1, ...


@dataclass(frozen=True)
class Routers:
    """Routers of a model, in the order in which tokens pass them."""

    found: tuple[Router, ...]
    experts: int  # E
    taken: int  # k

    def __len__(self) -> int:
        return len(self.found)


@dataclass
class Routed:
    """Record of routing in forward passes of one model, for the tokens whose hidden states were requested."""

    model: nn.Module
    scored: bool = False  # whether scores and shares are recorded; with gradients, this takes memory
    taken: list[Tensor] = field(default_factory=list)  # per call int64 [n, M, k]: the experts that were used
    own: list[Tensor] = field(default_factory=list)  # int64 [n, M, k]: the experts that the router chose by itself
    scores: list[Tensor] = field(default_factory=list)  # [n, M, E] logits
    shares: list[Tensor] = field(default_factory=list)  # [n, M, E] probabilities of each expert: they sum to 1

    def keep(self, call: Call, at: Tensor) -> None:
        """Record the tokens of a call at these indices, int64 [n]."""
        self.taken.append(torch.stack(call.taken, 1).index_select(0, at))
        self.own.append(torch.stack(call.own, 1).index_select(0, at))
        if self.scored:
            assert len(call.scores) == len(call.taken), "a router's scores were not seen"
            self.scores.append(torch.stack(call.scores, 1).index_select(0, at))
            self.shares.append(torch.stack(call.shares, 1).index_select(0, at))

    def reorder(self, first: int, place: Tensor) -> None:
        """Merge the calls from number `first` on into one, with the tokens at `place`, int64 [n], which may repeat."""
        for kept in (self.taken, self.own, self.scores, self.shares):
            if kept[first:]:
                kept[first:] = [torch.cat(kept[first:]).index_select(0, place)]


@dataclass
class Call:
    """Routing in a running call of the model."""

    experts: int
    given: Tensor | None  # int64 [n, M, k]; UNKNOWN: the router chooses
    scored: bool = False
    taken: list[Tensor] = field(default_factory=list)  # one tensor per layer computed so far
    own: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    shares: list[Tensor] = field(default_factory=list)
    within: list[_Choosing] = field(default_factory=list)


_call: ContextVar[Call | None] = ContextVar("call of a model with experts", default=None)
_watch: ContextVar[Routed | None] = ContextVar("routing that is watched", default=None)


@contextmanager
def watching(model: nn.Module, scored: bool = False) -> Iterator[Routed]:
    """Context in which the choices of this model's routers are recorded, in this thread."""
    routed = Routed(model, scored)
    token = _watch.set(routed)
    try:
        yield routed
    finally:
        _watch.reset(token)


def watched(model: nn.Module) -> Routed | None:
    """Return the record that is being made of this model in this thread; None if there is none."""
    watch = _watch.get()
    return watch if watch is not None and watch.model is model else None


@contextmanager
def calling(model: nn.Module, routers: Routers | None, given: Tensor | None) -> Iterator[Callable[[Tensor], None]]:
    """Context for one call of the model. Yields a function that records the tokens at given indices. `given`: experts
    to replay, [n, M, k]; None: the routers choose.
    """
    watch = watched(model)
    if routers is None or (given is None and watch is None):
        yield lambda at: None
        return
    scored = watch is not None and watch.scored
    call = Call(routers.experts, None if given is None else given.long(), scored)
    token = _call.set(call)
    try:
        yield lambda at: watch.keep(call, at) if watch is not None else None
    finally:
        _call.reset(token)


def repeating() -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which part of the current call can be recomputed later, with the same experts and without
    recording.
    """
    call = _call.get()
    if call is None:
        return nullcontext
    known = call.experts, call.given, call.scored  # without the `Call`, whose record would keep tensors alive

    @contextmanager
    def again() -> Iterator[None]:
        token = None if _call.get() is not None else _call.set(Call(*known))  # the forward pass still has its call
        try:
            yield
        finally:
            if token is not None:
                _call.reset(token)

    return again


# -- within a router ---------------------------------------------------------------------------------------------------


class _Choosing(TorchFunctionMode):
    """Records the top-k call of one router, and replaces its result if experts are given."""

    def __init__(self, call: Call, layer: int, choice: int) -> None:
        super().__init__()
        self.call, self.layer, self.choice = call, layer, choice
        self.seen, self.sigmoid = 0, False
        self.scores: Tensor | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function in TOPK:
            self.seen += 1
            return self._chosen(args[0], found) if self.seen == self.choice + 1 else found
        if function is nn.functional.linear and found.shape[-1] == self.call.experts:
            self.scores = found.flatten(0, -2)
        elif function in SIGMOID and found.shape[-1] == self.call.experts:
            self.sigmoid = True
        return found

    def _chosen(self, values: Tensor, found: Any) -> Any:
        call = self.call
        call.own.append(found.indices)
        taken = found.indices
        if call.given is not None:
            given = call.given[:, self.layer]
            taken = torch.where(given == UNKNOWN, taken, given)
            found = torch.return_types.topk((values.gather(-1, taken), taken))
        call.taken.append(taken)
        if call.scored and self.scores is not None:
            scores = self.scores.to(torch.promote_types(self.scores.dtype, torch.float32))
            call.scores.append(scores)
            call.shares.append(_normal(scores.sigmoid()) if self.sigmoid else scores.softmax(-1))
        return found


def _normal(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True)


def _enter(layer: int, choice: int, module: nn.Module, arguments: Any) -> None:
    call = _call.get()
    if call is not None:
        call.within.append(_Choosing(call, layer, choice))
        call.within[-1].__enter__()


def _leave(module: nn.Module, arguments: Any, result: Any) -> None:
    call = _call.get()
    if call is not None and call.within:
        call.within.pop().__exit__(None, None, None)


def attach(inner: nn.Module, routers: Routers) -> None:
    """Install the hooks that record and control the routers. They hold no reference to a module, so they also work in
    copies of the model.
    """
    modules = dict(inner.named_modules())
    for layer, router in enumerate(routers.found):
        modules[router.module].register_forward_pre_hook(partial(_enter, layer, router.call))
        modules[router.module].register_forward_hook(_leave, always_call=True)


# -- finding them ------------------------------------------------------------------------------------------------------


@dataclass
class _Choice:
    """A top-k call that was observed."""

    router: Router
    indices: Tensor
    experts: int


class _Looking(TorchFunctionMode):
    """Observes every top-k call over rows, and the innermost module that makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.calls: dict[str, int] = {}  # index of each module's latest top-k call since it was entered
        self.choices: list[_Choice] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function in TOPK and self.stack:
            name = self.stack[-1]
            number = self.calls[name] = self.calls.get(name, -1) + 1
            if found.indices.ndim == 2:
                self.choices.append(_Choice(Router(name, number), found.indices, args[0].shape[-1]))
        return found

    def enter(self, name: str, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Router | None:
        """Return the router whose choice is among the arguments of this module; None if there is none."""
        self.stack.append(name)
        self.calls.pop(name, None)
        given = [x for x in (*arguments, *named.values()) if isinstance(x, Tensor) and x.dtype == torch.int64]
        for choice in reversed(self.choices):
            if any(x.shape == choice.indices.shape and torch.equal(x, choice.indices) for x in given):
                return choice.router
        return None


def find_routers(inner: nn.Module, run: Callable[[], Any]) -> Routers | None:
    """Find the routers in a forward pass, `run`. None: there are none, or layers differ in the count of experts."""
    look = _Looking()
    found: dict[str, Router] = {}  # module that receives experts -> their router

    def before(name: str, module: nn.Module, arguments: Any, named: Any) -> None:
        router = look.enter(name, module, arguments, named)
        if router is not None:
            found[name] = router

    def behind(module: nn.Module, arguments: Any, result: Any) -> None:
        look.stack.pop()

    hooks = []
    for name, module in inner.named_modules():
        hooks.append(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
        hooks.append(module.register_forward_hook(behind, always_call=True))
    try:
        with torch.no_grad(), look:
            run()
    finally:
        for hook in hooks:
            hook.remove()
    routers = tuple(dict.fromkeys(found.values()))
    sizes = {(c.experts, c.indices.shape[-1]) for c in look.choices if c.router in routers}
    if len(sizes) != 1:
        return None
    [(experts, taken)] = sizes
    return Routers(routers, experts, taken)
