"""The commands that show runs, algorithms, and claims of papers. See `commands`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from json import dumps
from pathlib import Path
from shlex import quote
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from posttrain.core.extras import install, lacking, runnable
from posttrain.core.messages import clip, inline, one_line, safe_json
from posttrain.core.types import UserError

if TYPE_CHECKING:
    from posttrain.algorithms.policy import Algorithm
    from posttrain.algorithms.preference import PreferenceAlgorithm
    from posttrain.algorithms.reward_model_table import RewardModelAlgorithm


def algorithms(name: str | None = None, *, json: bool = False, pages: str | None = None) -> int:
    """List the algorithms, or show one: formula, sources, differences from grpo or dpo, settings.

    Parameters
    ----------
    name
        Algorithm to show, or your own: my.py:name.
    json
        Print JSON instead.
    pages
        Write a page for every algorithm into this folder.
    """
    from posttrain.algorithms.all_algorithms import EVERY, beside, find_any
    from posttrain.algorithms.choices import FIRST
    from posttrain.algorithms.describe import (
        as_data,
        curves_in,
        describe,
        differences,
        index,
        interpretations,
        page,
        settings,
        symbols,
    )
    from posttrain.algorithms.policy_table import TABLE
    from posttrain.algorithms.preference_table import PREFERENCES
    from posttrain.algorithms.reward_model_table import REWARD_MODELS
    from posttrain.runs.terminal.printing import table

    if pages is not None:
        folder = Path(pages)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for algorithm in EVERY.values():
                text = page(algorithm, beside(algorithm), curves_in(folder, algorithm))
                (folder / f"{algorithm.name}.md").write_text(text, encoding="utf-8")
            (folder / "index.md").write_text(index(list(EVERY.values())), encoding="utf-8")
        except (OSError, ValueError) as error:  # a name that the system does not accept
            raise UserError(f"--pages {clip(pages)} cannot be written: {one_line(error)}") from error
        return 0
    if name is None:
        if json:
            print(dumps([as_data(algorithm) for algorithm in EVERY.values()], indent=1))
        else:
            table("Which one (posttrain ...)", ["you have", "start with"], [[c.have, c.command] for c in FIRST])
            _show_table("Algorithms (one of them in full: posttrain algorithms NAME)", TABLE.values())
            _show_table("From preferences, without sampling (posttrain prefer)", PREFERENCES.values())
            _show_table("Reward models (posttrain reward-model)", REWARD_MODELS.values())
        return 0
    algorithm = find_any(name)
    if json:
        print(dumps(as_data(algorithm), indent=1))
        return 0
    print("\n".join(describe(algorithm)))
    if others := differences(algorithm, beside(algorithm)):
        print(f"  differences from {beside(algorithm).name}:")
        print("\n".join(f"    {line}" for line in others))
    print("  settings (--set PLACE=VALUE; none: the run's own options decide):")
    print("\n".join(f"    {line}" for line in settings(algorithm)))
    print("\n".join([*interpretations(algorithm), symbols(algorithm)]))
    return 0


def _show_table(title: str, algorithms: Iterable[Algorithm | PreferenceAlgorithm | RewardModelAlgorithm]) -> None:
    """Print a table of algorithms, with their papers if the screen is wide enough."""
    from posttrain.algorithms.describe import cited
    from posttrain.runs.terminal.printing import table

    whole = [[r.name, r.idea, cited(r)] for r in algorithms]
    widest = sum(max(map(len, column)) for column in zip(*whole, strict=True)) + 8  # between and around the columns
    fits = get_terminal_size().columns >= widest
    table(title, ["name", "idea", "paper"] if fits else ["name", "idea"], whole if fits else [row[:2] for row in whole])


def reproduce(
    name: str | None = None,
    *,
    seeds: Annotated[tuple[int, ...], Parameter(consume_multiple=1, negative_iterable=())] = (),
    arena: str | None = None,
    out: str = "runs/reproduce",
    settings: dict[str, str] | None = None,
) -> int:
    """Test a paper's claim in a few minutes: a table with the published figures, a plot, a verdict with intervals.

    Parameters
    ----------
    name
        Experiment to run. Left out: list them.
    seeds
        Random seeds, one measurement each. Finished ones are kept. Left out: those of the experiment, three or five.
    arena
        Another arena than the experiment's own, as the list of experiments names it: other tasks, rewards and sizes.
    out
        Folder for the experiments, one subfolder each.
    settings
        Settings to change: --settings.steps 50 (table.md lists them all).
    """
    from posttrain.runs.terminal.printing import table

    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / "experiments" / "__init__.py").exists():
        raise UserError(
            "the experiments are not part of the package: run this in a clone of the repository (pip install -e .)"
        )
    sys.path.insert(0, str(checkout))
    from experiments import EXPERIMENTS, find
    from experiments.experiment import JUDGED, read_settings

    if name is None:
        rows = [[e.name, e.claim, e.paper, ", ".join(e.elsewhere)] for e in EXPERIMENTS.values()]
        table("Experiments", ["name", "claim", "paper", "other arenas"], rows)
        return 0
    experiment = find(name).there(arena) if arena else find(name)
    folder = Path(out) / experiment.folder
    finding = experiment.run(seeds or experiment.seeds, folder, read_settings(settings or {}))
    table(f"{experiment.paper}: {experiment.claim}", list(JUDGED), finding.judged)
    table("", finding.columns, finding.rows)
    print("\n".join([*finding.notes, f"verdict     {finding.verdict}"]))
    print(f"table       {folder / 'table.md'}\nplot        {finding.plot}\nfigures     {folder / 'result.json'}")
    return 0


def rollouts(
    run: str,
    *,
    step: int | None = None,
    group: str | None = None,
    number: int = 3,
    order: Literal["first", "best", "worst", "longest", "invalid"] = "first",
    held_out: bool = False,
    json: bool = False,
) -> int:
    """Print the rollouts of a step, turn by turn: prompts, replies, tool calls and results, rewards.

    Parameters
    ----------
    run
        Folder of a run, running or finished, or a file of rollouts that posttrain eval --out wrote.
    step
        Step to show. Default: the last one.
    group
        Show only this task or this group, by the name in the first line of a rollout.
    number
        Number of rollouts to show.
    order
        Order: as recorded, highest reward, lowest reward, or longest first, or
        invalid reward.
    held_out
        Show the evaluation on held-out tasks after that step.
    json
        Print one JSON line per rollout instead, as recorded: tokens, their numbers, its fate.
    """
    from posttrain.cli import input_bounds
    from posttrain.runs.record.rollout_reading import EVERY, READ, plainly
    from posttrain.runs.terminal.printing import sample as show
    from posttrain.runs.terminal.printing import say

    if number < 1:
        raise UserError(f"--number {number} must be at least 1, the number of rollouts shown")
    names = EVERY if json else READ
    with input_bounds.memory():
        rows, place, again = _rows_and_place(run, step, held_out, names, clock=not json)
    if group is not None:
        rows, place = _of_group(rows, group, place), f"{group} in {place}"
    keys: dict[str, Callable[[dict[str, Any]], float]] = {
        "best": lambda row: -math.inf if row["reward"] is None else row["reward"],
        "worst": lambda row: -math.inf if row["reward"] is None else -row["reward"],
        "invalid": lambda row: row["invalid"] is not None,
        "longest": lambda row: sum(turn["length"] for turn in row["turns"]),
    }
    if order in keys:
        rows = sorted(rows, key=keys[order], reverse=True)
    if not json:
        try:
            show(rows, number)
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            raise UserError(f"{place} has invalid values ({one_line(error)}): print it with --json") from error
        if again:
            say(f"{again} rollouts of earlier steps, replayed in this one, are not shown: they are only in its table")
        if number < len(rows):
            say(f"{number} of {len(rows):,} rollouts of {place}: --number shows more")
            if Path(run).is_dir():
                say(f"all of them {runnable(f'posttrain view {quote(run)}')}")
    for row in rows[:number] if json else ():
        print(safe_json(dumps(plainly(row), ensure_ascii=False)))
    return 0


def _rows_and_place(
    run: str, step: int | None, held_out: bool, names: Iterable[str], clock: bool
) -> tuple[list[dict[str, Any]], str, int]:
    """Return rollouts, their place, and the number of omitted replayed ones. `clock`: with seconds, if recorded."""
    from posttrain.runs.record.rollout_reading import read_file, read_rollouts, read_table, rows_of, timed_rollouts
    from posttrain.runs.run_reading import read_run, rollout_steps

    if Path(run).suffix in (".parquet", ".jsonl"):
        if step is not None or held_out:
            raise UserError(f"{run} is a file of rollouts: leave out --step and --held-out")
        return rows_of(read_file(run, names)), run, 0
    read_run(run)  # checks that it is a run
    wanted = step if step is not None else max(rollout_steps(run, held_out), default=1)
    timed = clock and not held_out  # recorded rows contain no seconds
    rows = timed_rollouts(run, wanted) if timed else read_rollouts(run, wanted, names, held_out)
    again = sum(map(bool, read_table(run, wanted, ["replayed"], held_out)["replayed"].to_pylist()))
    when = "the evaluation before the first step" if not wanted else f"the evaluation after step {wanted}"
    return rows, when if held_out else f"step {wanted}", again


def _of_group(rows: list[dict[str, Any]], name: str, place: str) -> list[dict[str, Any]]:
    """Return the rows of a group or a task. `place`: the place of the rows, for the error message."""
    from posttrain.core.messages import near_or_all

    found = [row for row in rows if name in (row["group"], row["task"])]
    if not found:
        known = list(dict.fromkeys(row["group"] for row in rows))
        raise UserError(f"there are no rollouts of {name!r} in {place}{near_or_all(name, known)}")
    return found


def view(
    runs: Annotated[list[str], Parameter(negative_iterable=())],
    /,
    *,
    port: int = 0,
    browser: bool = False,
    export: str | None = None,
    rollouts: int | None = None,
    where: str = "",
) -> int:
    """Browse runs in a web browser, from their curves to every number of a token. Running ones are followed.

    Parameters
    ----------
    runs
        Folders of runs, running or finished, and files that posttrain eval --out wrote, such as that of a suite.
    port
        Port of the pages, on this machine only (0: any free one).
    browser
        Open a web browser.
    export
        Write one run or evaluation to this HTML file instead; it opens from disk.
    rollouts
        With --export: number of rollouts in the file. Default: 200.
    where
        With --export: which rollouts, as a condition in SQL: "step > 100 and reward < 1".
    """
    if missing := lacking("view"):
        raise UserError(f"posttrain view needs {', '.join(missing)}: {install('view')}")
    from posttrain.apps.view import view_command
    from posttrain.cli import input_bounds

    if export is None:
        if where or rollouts is not None:
            option = "--where" if where else "--rollouts"
            raise UserError(f"{option} has no effect without --export FILE: add it, or leave {option} out")
        with input_bounds.memory():
            view_command.serve(runs, port, browser)
        return 0
    if rollouts is not None and rollouts < 1:
        raise UserError(f"--rollouts {rollouts} must be at least 1, the number of rollouts in the file")
    if browser or port:
        raise UserError("--export writes a file and serves nothing: leave out --port and --browser")
    with input_bounds.memory():
        size, missing = view_command.export(runs, Path(export), rollouts, where)
    print(f"exported    {export}, {size / 1e6:.1f} MB: open it in any browser")
    for line in missing:
        print(f"missing     {inline(line)}", file=sys.stderr)
    return 0


def query(
    run: str,
    sql: str,
    *,
    number: int = 40,
    timeout: float = 60.0,
    memory: float = 2.0,
    json: bool = False,
) -> int:
    """Query all rollouts of a run with SQL. Only the run's own files are read, and none is changed.

    Parameters
    ----------
    run
        Folder of a run, running or finished, or a file of rollouts that posttrain eval --out wrote.
    sql
        One SELECT statement; "show tables" and "describe rollouts" list what there is. Tables: rollouts, evals,
        tokens (a row for each: place, text, ratio, weight ...), metrics, timing, health, seconds, and rollout_index, which
        has the short columns of all rollouts and is the fastest. A part of the reward:
        part(parts, 'form'); a note: notes->>'moves'.
    number
        Maximum number of rows to show.
    timeout
        Timeout of the query, in seconds.
    memory
        Memory limit of the query, in GiB.
    json
        Print one JSON line per row instead.
    """
    from posttrain.core.json_text import json_text
    from posttrain.runs.terminal.printing import table
    from posttrain.system.bounded_process import BoundedProcess

    if number < 1:
        raise UserError(f"--number {number} must be at least 1, the number of rows shown")
    if not (0 < timeout <= 1e6 and 0 < memory <= 1e6):
        raise UserError(f"--timeout {timeout:g} and --memory {memory:g} must be above 0, and at most a million")
    late = f"the question took longer than {timeout:g} s: narrow it, or raise --timeout"
    large = "the question needs more memory than it may take: narrow it, or raise --memory"
    with closing(BoundedProcess("posttrain.apps.view.sql_worker", late, large)) as process:
        args = str(run), sql, number + 1, timeout, memory
        names, rows, left_out = process.call("asked", *args, seconds=timeout, gib=memory + 1)
    for line in left_out:
        print(inline(line), file=sys.stderr)
    more, rows = len(rows) > number, rows[:number]
    if json:
        for row in rows:
            print(safe_json(json_text(dict(zip(names, row, strict=True)))))
    else:
        cells = [
            [value if isinstance(value, int | float | None) else inline(str(value)) for value in row] for row in rows
        ]
        counted = f"{len(rows)} row{'' if len(rows) == 1 else 's'}"
        table(f"first {counted}" if more else counted, names, cells, upright=True)
    if more:
        print(f"there are more than {number:,} rows: show more with --number", file=sys.stderr)
    return 0


def audit(
    run: str | None = None,
    *,
    gold: str | None = None,
    disagreement: Annotated[tuple[str, str] | None, Parameter(negative_iterable=())] = None,
    classifier: str | None = None,
    train_classifier: str | None = None,
    sycophancy: bool = False,
    opinion: str | None = None,
    tasks: str | None = None,
    env: str | None = None,
    limit: int | None = None,
    samples: int = 4,
    steps: int = 40,
    json: bool = False,
) -> int:
    """Look for reward hacking in a run, running or finished: figures with intervals over prompts. Nothing is changed.

    A finding is a reason to read replies, not a verdict; docs/results/audit.md has the false alarms on healthy runs.

    Parameters
    ----------
    run
        Folder of a run of posttrain rl. Leave it out with --train-classifier alone.
    gold
        Gold score to compare with: a named part of the recorded reward, or a reward (my.py:reward) to score the texts with.
    disagreement
        Two parts of the reward that should agree: --disagreement HEAD_A HEAD_B.
    classifier
        File of a classifier of hacked replies, to apply to the run.
    train_classifier
        Rows with prompt, text and hacked (true or false): train the classifier and write it to --classifier.
    sycophancy
        Also probe the run's checkpoint: its tasks without and with a user's wrong opinion in the prompt.
    opinion
        Wording of the opinion; {wrong} is the wrong answer.
    tasks
        Tasks for the probe and the gold score. Default: the run's own.
    env
        Reward for the probe. Default: the run's own.
    limit
        Number of tasks in the probe, the first ones. Default: 200.
    samples
        Replies per task of the probe.
    steps
        Number of steps to read, evenly spread over the run.
    json
        Print JSON instead.
    """
    from posttrain.apps.audit.audit_command import AuditRequest, carry_out

    request = AuditRequest(
        run, gold, disagreement, classifier, train_classifier, sycophancy, opinion, tasks, env, limit, samples, steps
    )
    return carry_out(request, json)
