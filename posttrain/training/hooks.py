"""Functions of the user that observe a run. They get copies, so that they cannot change a result."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch

from posttrain.core.messages import inline, message_of
from posttrain.core.rollouts import Rollout
from posttrain.core.types import StopRun, UserError
from posttrain.system.user_code import describe_error, is_of_kind, load_named, source_file

METHODS = ("on_step", "on_evaluation", "on_checkpoint")
_NEVER_RUN = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)


class RolloutCopies(Sequence[Rollout]):
    """Rollouts for a hook, copied one by one when accessed."""

    def __init__(self, rollouts: Iterable[Rollout]) -> None:
        self._rollouts = list(rollouts)

    def __len__(self) -> int:
        return len(self._rollouts)

    @overload
    def __getitem__(self, place: int) -> Rollout: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Rollout]: ...
    def __getitem__(self, place: int | slice) -> Rollout | Sequence[Rollout]:
        return deepcopy(self._rollouts[place])


class Hooks:
    """The hooks of a run: functions, called after each step, or objects with any of `METHODS`."""

    def __init__(self, given: Sequence[Any]) -> None:
        """`given`: hooks, or names of them (my.py:watch). A class is instantiated.

        Raises UserError for an invalid hook.
        """
        self._hooks = [_opened(hook) for hook in given]
        self._shown: set[str] = set()
        self.stop: str | None = None  # reason of a hook that asked to stop the run

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def step(self, step: int, metrics: Mapping[str, float], rollouts: Iterable[Rollout]) -> list[str]:
        """Call the hooks after a step. Return messages about hooks that failed, each once in a run."""
        return self._call("on_step", step, dict(metrics), RolloutCopies(rollouts))

    def evaluation(self, step: int, metrics: Mapping[str, float], rollouts: Iterable[Rollout]) -> list[str]:
        """Call the hooks after an evaluation; step 0 is before training."""
        held_out = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        return self._call("on_evaluation", step, held_out, RolloutCopies(rollouts))

    def checkpoint(self, path: Path) -> list[str]:
        """Call the hooks once a checkpoint is on disk."""
        return self._call("on_checkpoint", path)

    def _call(self, method: str, *given: Any) -> list[str]:
        failed = []
        for hook in self._hooks:
            function = hook.functions.get(method)
            if function is None:
                continue
            try:  # each gets its own metrics, so that a hook cannot change those of the next
                with _torch_kept():
                    function(*(dict(value) if isinstance(value, dict) else value for value in given))
            except StopRun as asked:
                self.stop = self.stop or f"hook {hook.name}: {inline(message_of(asked)) or 'no reason is given'}"
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # the user's code may raise anything
                why = describe_error(error, source_file(function))
                message = f"hook {hook.name} failed, and the run continues: {why}"
                failed += [message] if message not in self._shown else []
                self._shown.add(message)
        return failed


@dataclass(frozen=True)
class _Hook:
    name: str
    functions: Mapping[str, Callable[..., Any]]  # by the method's name


@contextmanager
def _torch_kept() -> Iterator[None]:
    """Context manager after which torch's settings are what they were before it."""
    dtype, threads, device = torch.get_default_dtype(), torch.get_num_threads(), torch.get_default_device()
    try:
        with torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(device)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def _opened(given: Any) -> _Hook:
    hook = load_named(given) if isinstance(given, str) else given
    try:
        hook = hook() if isinstance(hook, type) else hook
        found = {name: getattr(hook, name, None) for name in METHODS}
        name = inline(str(getattr(hook, "__name__", type(hook).__name__)))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's code may raise anything
        raise UserError(f"--hook {given}: {describe_error(error, None)}") from error
    functions = {name: function for name, function in found.items() if callable(function)}
    if not functions and callable(hook):
        functions = {"on_step": hook}
    if not functions:
        raise UserError(
            f"--hook {given} is not a hook: write a function (step, metrics, rollouts), or {', '.join(METHODS)}"
        )
    for method, function in functions.items():
        if any(is_of_kind(function, kind) for kind in _NEVER_RUN):
            raise UserError(
                f"--hook {given}: {method if function is not hook else name} is written with async def or yield, and "
                "would never run: write it with def, and without yield"
            )
    return _Hook(name, functions)
