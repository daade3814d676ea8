"""Functions of the user that observe a run. They get copies, so that they cannot change a result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, overload

import torch

from posttrain.core.rollouts import Rollout
from posttrain.core.types import StopRun, UserError
from posttrain.system.user_code import describe_error, load_named, source_file

METHODS = ("on_step", "on_evaluation", "on_checkpoint")


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
            function = getattr(hook, method, hook if method == "on_step" and not _methods(hook) else None)
            if function is None:
                continue
            name = getattr(hook, "__name__", type(hook).__name__)
            try:  # each gets its own metrics, so that a hook cannot change those of the next
                with torch.enable_grad():  # the mode that a hook leaves ends with it
                    function(*(dict(value) if isinstance(value, dict) else value for value in given))
            except StopRun as asked:
                self.stop = self.stop or f"hook {name}: {str(asked) or 'no reason is given'}"
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # the user's code may raise anything
                message = f"hook {name} failed, and the run continues: {describe_error(error, source_file(function))}"
                failed += [message] if message not in self._shown else []
                self._shown.add(message)
        return failed


def _methods(hook: Any) -> list[str]:
    return [name for name in METHODS if callable(getattr(hook, name, None))]


def _opened(given: Any) -> Any:
    hook = load_named(given) if isinstance(given, str) else given
    if isinstance(hook, type):
        try:
            hook = hook()
        except Exception as error:
            raise UserError(f"--hook {given}: {describe_error(error, None)}") from error
    if not callable(hook) and not _methods(hook):
        raise UserError(
            f"--hook {given} is not a hook: write a function (step, metrics, rollouts), or {', '.join(METHODS)}"
        )
    return hook
