"""The commands that train, one for each verb of `config/verbs.py` that learns: they parse options, run, and print the
end.

Nothing heavy is imported before a run begins, so that --help answers at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from cyclopts import Parameter

from posttrain.config.resolve import AnyConfig, AnyTraining, check_bounds, validate
from posttrain.config.verbs import VERBS, Verb
from posttrain.core.extras import install, lacking
from posttrain.core.progress import watch
from posttrain.core.types import UserError
from posttrain.system import garbage

if TYPE_CHECKING:
    from posttrain.training.trainer import Run

Options = Parameter(
    name="*",
    consume_multiple=1,  # an option without a value is no option
    negative_iterable=(),
    show_default=lambda value: None if value in (None, "", (), {}) else str(value),
)
Places = Annotated[tuple[str, ...], Parameter(name="--set", negative_iterable=(), help=(
    "Change any setting of the algorithm by its place: --set surrogate.high=0.28 (posttrain algorithms NAME lists them)."
))]  # fmt: skip


def __getattr__(name: str) -> Callable[..., int]:
    """Return the command of a training verb, by the verb's name."""
    if name not in VERBS or not VERBS[name].learns:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _command(VERBS[name])


@cache
def _command(verb: Verb) -> Callable[..., int]:
    kind = verb.options
    if not kind.flags():

        def train(*, config: Any = kind()) -> int:  # noqa: B008  frozen
            return trained(config)

        train.__annotations__["config"] = Annotated[kind, Options]
        return train
    words = command_line_options(kind)

    def train_with_settings(*, config: Any = words(), set: Places = ()) -> int:  # noqa: B008  frozen
        return trained(read(kind, config, set))

    train_with_settings.__annotations__ |= {"config": Annotated[words, Options], "set": Places, "return": int}
    return train_with_settings


def command_line_options(kind: type[Any]) -> type[Any]:
    """Return a configuration class for the command line: settings of its algorithm are flags, unset by default, or
    --set.
    """
    hints = get_type_hints(kind)
    annotations: dict[str, Any] = {f.name: hints[f.name] for f in fields(kind)}
    annotations["settings"] = Annotated[dict[str, Any], Parameter(parse=False)]
    own = {f.name: f if f.default is MISSING else f.default for f in fields(kind)}
    for flag in kind.flags().values():
        annotations[flag.name] = Annotated[flag.type | None, Parameter(help=flag.help)]
        own[flag.name] = None
    body = {**own, "__annotations__": annotations, "__doc__": ""}
    return dataclass(frozen=True)(type(kind.__name__, (kind,), body))


def read(kind: type[AnyConfig], words: Any, places: Sequence[str]) -> AnyConfig:
    """Return the configuration from these words, and from settings by name."""
    given = {name: getattr(words, name) for name in words.given}
    chosen = {name: given.pop(name) for name in kind.flags() if name in given}
    if chosen or places:
        given["settings"] = {**chosen, **dict(map(_setting, places))}
    return kind(**given)


def _setting(text: str) -> tuple[str, str]:
    """Split "surrogate.high=0.28" into ("surrogate.high", "0.28")."""
    name, equals, value = text.partition("=")
    if not (name.strip() and equals):
        raise UserError(f"--set {text}: write --set PLACE=VALUE, such as --set surrogate.high=0.28")
    return name.strip(), value.strip()


def trained(config: AnyTraining) -> int:
    """Train, in this process or in several, print the result, and return the exit code."""
    check_bounds(config)
    if not config.resume:  # first, as libraries take seconds to load
        validate(config)
    if config.quiet:
        watch(None)
    from posttrain.cli.named_files import check_files
    from posttrain.runs.run_files import holds_run
    from posttrain.runs.run_folder import RunFolder, resumed

    if "RANK" not in os.environ:
        if config.resume and holds_run(Path(config.out)):
            resumed(config)  # refuses other options before torch is loaded
        else:
            RunFolder(config).close()  # refuses a folder before torch is loaded
        if not config.resume:
            check_files(config)
        if config.processes > 1:
            from posttrain.cli.launch_processes import launch

            return launch(config)
    from posttrain.training.training_run import run_training

    garbage.leave_libraries()
    run = run_training(config)
    if os.environ.get("RANK", "0") == "0":  # of several processes, only the first prints
        _print_end(config.verb, run)
    return 3 if run.stopped else 130 if run.interrupted else 0


def _print_end(verb: str, run: Run) -> None:
    from posttrain.runs.terminal.ending import lost_signal, outcome
    from posttrain.runs.terminal.printing import say

    rows = run.metrics
    named = outcome(rows, run.held_out_tasks)
    named += [f"{run.invalid:,} invalid reward{'s' * (run.invalid > 1)}"] if run.invalid else []
    ended = "stopped" if run.stopped else "interrupted" if run.interrupted else "done"
    say(*run.notes, ": ".join(filter(None, [ended, ", ".join(named)])), *lost_signal(rows))
    say(f"checkpoint  {run.checkpoint}", f"curves      {run.path / 'curves.png'}")
    path = quote(str(run.path))
    if any((run.path / "rollouts").glob("step-*")):
        say(f"rollouts    {run.path / 'rollouts'}", *_looking(path))
    if run.stopped:
        say(f"stopped     {run.stopped}")
    if run.stopped or run.interrupted:
        say(f"continue    posttrain {verb} --out {path} --resume")
    else:
        say(VERBS[verb].use.format(path=path), *_elsewhere(run.checkpoint, path))


def _elsewhere(checkpoint: Path | None, run: str) -> list[str]:
    """Return how other programs get an adapter whose base they cannot open."""
    from posttrain.models.adapters.adapter_config import is_adapter, read_adapter_config
    from posttrain.models.gguf.gguf_file import is_gguf

    if checkpoint is None or not is_adapter(checkpoint) or not is_gguf(Path(read_adapter_config(checkpoint).base)):
        return []
    return [f"elsewhere   posttrain merge {run} --out MERGED, since PEFT and vLLM do not open its base, a GGUF file"]


def _looking(path: str) -> list[str]:
    """Return the commands that show a run's rollouts: in a browser, or on the terminal where that is not installed."""
    if not lacking("view"):
        return [f"look at it  posttrain view {path}"]
    return [f"look at it  posttrain rollouts {path}", f"or          {install('view')}, then posttrain view {path}"]
