"""The command `posttrain show`: a run in a page, the runs of a folder in a table, two runs side by side."""

from __future__ import annotations

import os
from json import dumps
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from posttrain.core.messages import one_line, safe_json
from posttrain.core.types import UserError

if TYPE_CHECKING:
    from posttrain.apps.show.run_summary import RunSummary


def show(runs: Annotated[list[str], Parameter(negative_iterable=())], /, *, json: bool = False) -> int:
    """Show a run in a page, the runs of a folder in a table, or two runs side by side. Running ones too.

    Parameters
    ----------
    runs
        Folder of a run, a folder of runs, or two runs to compare: A B.
    json
        Print JSON instead: all options, figures and findings.
    """
    from posttrain.system.without_pandas import without_pandas

    if len(runs) > 2:
        raise UserError("posttrain show compares two runs, A and B: name two, or the folder that holds them")
    with without_pandas():
        from posttrain.apps.show.run_summary import ANY_FAULT, runs_in
        from posttrain.runs.run_files import RUN

        folders = [Path(run).expanduser() for run in runs]
        try:
            if len(folders) == 2:
                return _compare(folders[0], folders[1], json)
            within = [] if os.path.lexists(folders[0] / RUN) else runs_in(folders[0])
            return _list(folders[0], within, json) if within else _page(folders[0], json)
        except ANY_FAULT as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{' '.join(runs)}: invalid values in the record ({one_line(error)})") from error


def _page(folder: Path, json: bool) -> int:
    from posttrain.apps.show.run_summary import RunSummary
    from posttrain.apps.show.summary_page import page

    run = RunSummary.read(folder)
    print(safe_json(dumps(run.as_data(), indent=1, ensure_ascii=False)) if json else "\n".join(page(run)))
    return 0


def _list(folder: Path, within: list[Path], json: bool) -> int:
    from posttrain.apps.show.run_summary import RunSummary
    from posttrain.apps.show.summary_page import listing
    from posttrain.runs.terminal.printing import say, table

    found: list[tuple[Path, RunSummary | str]] = []
    for one in within:
        try:
            found.append((one, RunSummary.read(one, replies=False)))
        except UserError as error:
            found.append((one, str(error)))
    if json:
        data = [{"run": str(one), "damaged": run} if isinstance(run, str) else run.as_data() for one, run in found]
        print(safe_json(dumps(data, indent=1, ensure_ascii=False)))
        return 0
    table(f"Runs in {folder}, the newest first", *listing(found, folder))
    for _, run in found:
        for problem in [run] if isinstance(run, str) else run.problems[:1]:
            say(f"damaged     {problem}")
    say(f"one of them: posttrain show {quote(str(within[0]))}; two side by side: posttrain show A B")
    return 0


def _compare(a: Path, b: Path, json: bool) -> int:
    from posttrain.apps.show.run_summary import RunSummary, compared
    from posttrain.apps.show.summary_page import side_by_side
    from posttrain.runs.run_options import differing
    from posttrain.runs.terminal.printing import say, table

    one, other = RunSummary.read(a), RunSummary.read(b)
    if json:
        both = {"a": one.as_data(), "b": other.as_data()}
        data = {**both, "options": differing(one.about, other.about), "difference": compared(one, other)}
        print(safe_json(dumps(data, indent=1, ensure_ascii=False)))
        return 0
    options, figures, lines = side_by_side(one, other)
    say(f"A           {a}", f"B           {b}")
    if options[1]:
        table("\nOptions that differ", *options)
    else:
        say("options     the same")
    table("\nFigures", *figures)
    say(*lines, *(f"damaged     {problem}" for run in (one, other) for problem in run.problems))
    return 0
