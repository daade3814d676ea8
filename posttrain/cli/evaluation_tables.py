"""The tables that `posttrain eval` prints: of an evaluation, and with --suite of the parts of a suite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.config.inference import Evaluation
from posttrain.config.resolve import check_bounds
from posttrain.core.intervals import told
from posttrain.core.types import UserError
from posttrain.runs.terminal.printing import say, table
from posttrain.training.harness_figures import Figures, harness_figures
from posttrain.training.rollout_figures import headline, rates
from posttrain.training.text_loss import TEXT_LOSS
from posttrain.training.verbs import suite
from posttrain.training.verbs.evaluate import Evaluated, write_figures

HEAD = ["part", "tasks", "accuracy or reward", "length", "cut off", "invalid", "distribution"]
WIDTH, SPACE, DIGITS = 80, 3, 6
"""Columns of a terminal, those between two columns of a table, and the most that a mean takes."""
BESIDE, PART = ("tool_calls", "valid_calls", "successful_calls", "cost"), "part/"  # of `rates`
Row = tuple[list[Any], Mapping[str, Any]]  # the first cells of a row, and the `ModelComparison.wins` of its last ones


def show_figures(config: Evaluation, found: Evaluated) -> None:
    """Print the figures of an evaluation, its comparisons, and the reasons for missing intervals."""
    called = short_names([config.model, *config.against])
    sides = [(config.model, found.figures), *((one.model, one.figures) for one in found.against)]
    names = [name for name, figure in found.figures.items() if isinstance(figure, dict)]
    rows = [[name, *(_cell(own[name]) if name in own else None for _, own in sides)] for name in names]
    title = f"{found.figures['tasks']} tasks, {config.samples} sample{'s'[: config.samples - 1]} each"
    table(title, ["", *(called[model] for model, _ in sides)], rows, upright=len(sides) > 2)
    if found.against:
        gaps = list(dict.fromkeys(name for one in found.against for name in one.differences))
        head = ["minus", *gaps]
        cells = [
            [_cell(one.differences[gap]) if gap in one.differences else None for gap in gaps] for one in found.against
        ]
        compared = [([called[one.model], *own], one.wins) for one, own in zip(found.against, cells, strict=True)]
        _compared(_minus(config), head, compared)
        rated = [
            ([called[one.model], _cell(one.win_rate)], one.win_rate["wins"]) for one in found.against if one.win_rate
        ]
        _compared(_win_rate(config), ["against", "win rate"], rated, "win rate")
    reasons: dict[str, dict[str, None]] = {}  # reason for a missing interval -> names of its figures
    for name, figure in _all_figures(found, names):
        if "why" in figure:
            reasons.setdefault(figure["why"], {})[name] = None
    say(*(f"{', '.join(of)}: {why}" for why, of in reasons.items()), *found.notes)
    for model, rollouts in [(config.model, found.rollouts), *((one.model, one.rollouts) for one in found.against)]:
        name = called[model] if called[model] == model else f"{called[model]} ({model})"
        say(f"{name}: {_rates(rates(rollouts, config.price))}")
    if found.cost is not None:
        say(f"cost        {found.cost:.4g}, of judges")
    if found.harness:
        _harness_table(config, found.harness)


def _rates(found: Mapping[str, float]) -> str:
    """Return rates as text: "length 12.5 tokens, 1.0% cut off, 0.0% invalid, 1.5 tool calls (90.0% well-formed)", and the
    means of the named parts of the reward.
    """
    text = f"length {found['length']:.4g} tokens, {found['truncated']:.1%} cut off, {found['invalid']:.1%} invalid"
    if "tool_calls" in found:
        text += f", {found['tool_calls']:.4g} tool calls ({found['valid_calls']:.1%} well-formed"
        text += (
            f", {found['successful_calls']:.1%} of those answered succeeded)" if "successful_calls" in found else ")"
        )
    if "cost" in found:
        text += f", cost {found['cost']:.4g}"
    parts = {name.removeprefix(PART): mean for name, mean in found.items() if name.startswith(PART)}
    if parts:
        text += "; " + ", ".join(f"{name} {mean:.4g}" for name, mean in parts.items())
    return text


def _all_figures(found: Evaluated, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the figure of everything that the tables show."""
    for figures in (found.figures, *(one.figures for one in found.against)):
        yield from ((name, figures[name]) for name in names if name in figures)
    for one in found.against:
        yield from ((f"difference in {name}", figure) for name, figure in one.differences.items())
        yield from [("win rate", one.win_rate)] if one.win_rate else []


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """Return path -> the fewest last parts of it that no other path has."""
    parts = {path: path.rstrip("/").split("/") for path in paths}
    found = {}
    for path, own in parts.items():
        others = [other for name, other in parts.items() if name != path]
        unlike = (n for n in range(1, len(own)) if all(own[-n:] != other[-n:] for other in others))
        found[path] = "/".join(own[-next(unlike, len(own)) :])
    return found


def _minus(config: Evaluation) -> str:
    called = short_names([config.model, *config.against])
    return f"{called[config.model]} minus other models, task by task"


def _win_rate(config: Evaluation) -> str:
    scorer = config.scorer or "the scorer"  # parts of a suite may each have their own
    return f"How often {scorer} prefers the reply of {short_names([config.model, *config.against])[config.model]}, ties half"


def _compared(title: str, head: Sequence[str], rows: Sequence[Row], what: str = "") -> None:
    """Print one row for each comparison, if there are any."""
    if not rows:
        return
    what = what or " or ".join(dict.fromkeys(wins["by"] for _, wins in rows))
    several = len(rows) > 1  # then p is corrected
    title += f"\nwon, lost, tied: tasks, by {what}; p: sign test"
    title += f"\np corrected: for {len(rows)} comparisons, by Holm's method" if several else ""
    columns = [*head, "won", "lost", "tied", "p", *(["p corrected"] if several else []), "verdict"]
    keys = ["won", "lost", "tied", "p", *(["p_holm"] if several else []), "verdict"]
    table(title, columns, [[*cells, *(wins[key] for key in keys)] for cells, wins in rows], upright=True)


def evaluate_harness(config: Evaluation) -> int:
    """Evaluate one or several models with a harness alone, print the table, and return the exit code."""
    check_bounds(config)
    if not config.model:
        raise UserError("--model is missing: give the folder of a checkpoint or of a run")
    found = harness_figures(config)
    _harness_table(config, found)
    if config.out:
        write_figures(Path(config.out), {"harness": found})
        say(f"figures     {config.out}")
    return 0


def _harness_table(config: Evaluation, found: Mapping[str, Figures]) -> None:
    """Print the figures of a harness: a row for each task and figure, a column for each model."""
    rows = []
    for task, figures in found[config.model].items():
        for name in figures:
            sides = [found[model][task][name] for model in (config.model, *config.against)]
            rows.append([task, name, *(_with_error(side) for side in sides)])
    called = short_names([config.model, *config.against])
    table(f"{config.harness}, with standard errors", ["task", "", *called.values()], rows, upright=True)
    say(*(f"{name}: {path}" for path, name in called.items() if name != path))


def _with_error(figure: Mapping[str, float | None]) -> str:
    error = figure["stderr"]
    return f"{figure['mean']:.4f}" + ("" if error is None else f" ± {error:.4f}")


def evaluate_suite(config: Evaluation) -> int:
    """Evaluate one or several models on a suite, print the tables, and return the exit code."""

    def part(name: str, found: Evaluated) -> None:
        say(f"{name:<12}{told(headline(found.figures))}", *(f"{'':<12}[{name}] {note}" for note in found.notes))

    try:
        found = suite.evaluate_suite(config, part)
    except suite.UnfinishedSuite as error:
        _suite_tables(config, error.done)
        raise
    _suite_tables(config, found)
    if config.out:
        say(f"figures     {config.out}; of each part, with its rollouts: {suite.beside(Path(config.out), 'PART')}")
    return 0


def _suite_tables(config: Evaluation, found: suite.EvaluatedSuite) -> None:
    """Print the tables of a suite, or of the parts of it that are done."""
    say("")
    called = short_names([config.model, *config.against])
    apart = any(not told["in_distribution"] for told in found.parts.values())
    width = len(HEAD) if apart else len(HEAD) - 1  # without the last column the others fit 80 columns
    table(config.model, HEAD[:width], [_line(name, told, told)[:width] for name, told in found.parts.items()])
    for place, model in enumerate(config.against):
        table(model, HEAD[:width], [_line(n, told["against"][place], told)[:width] for n, told in found.parts.items()])
    for place, model in enumerate((config.model, *config.against)):
        own = {name: told if place == 0 else told["against"][place - 1] for name, told in found.parts.items()}
        _further(called[model], own)
    if config.against:
        each = [(name, one) for name, told in found.parts.items() for one in told["against"]]
        rows = [([name, called[one["model"]], _cell(headline(one["differences"]))], one["wins"]) for name, one in each]
        _compared(_minus(config), ["part", "minus", "difference"], rows)
        lost = [(name, called[one["model"]], one["differences"].get(TEXT_LOSS)) for name, one in each]
        rows_of_texts = [[name, model, _cell(gap)] for name, model, gap in lost if gap is not None]
        if rows_of_texts:
            title = f"{called[config.model]} minus other models: {TEXT_LOSS}, nats per token (lower is better)"
            table(title, ["part", "minus", "difference"], rows_of_texts, upright=True)
        rated = [(name, called[one["model"]], one["win_rate"]) for name, one in each if "win_rate" in one]
        rows = [([name, model, _cell(rate)], rate["wins"]) for name, model, rate in rated]
        _compared(_win_rate(config), ["part", "against", "win rate"], rows, "win rate")
    for name, average in found.averages.items():
        label = f"mean of {average['parts']} part{'s'[: average['parts'] - 1]}{'' if name == 'all' else f' {name}'}"
        say(f"{label}: {told(average)}")
        for one in average.get("against", ()):
            rate = f"; win rate {told(one['win_rate'])}" if "win_rate" in one else ""
            say(f"    {called[one['model']]}: {told(one['figures'])}; difference {told(one['difference'])}{rate}")
    if found.costs:
        each_cost = ", ".join(f"{name} {cost:.4g}" for name, cost in found.costs.items())
        say(f"cost        {sum(found.costs.values()):.4g}, of judges: {each_cost}")


def _further(model: str, sides: Mapping[str, dict[str, Any]]) -> None:
    """Print the means for which the first table of a model has no room: pass@k and the like, as far as it has them."""
    cells = {part: _means(side) for part, side in sides.items()}
    names = list(dict.fromkeys(name for own in cells.values() for name in own))
    while names:
        room, columns = WIDTH - max(map(len, ("part", *cells))), list[str]()
        while names and (not columns or room >= len(names[0]) + SPACE):
            columns.append(names.pop(0))
            room -= max(len(columns[-1]), DIGITS) + SPACE
        table(f"{model}, means", ["part", *columns], [[part, *map(own.get, columns)] for part, own in cells.items()])


def _means(side: dict[str, Any]) -> dict[str, float]:
    """Return the means of a side of a part beside those of the first table, with the named parts of its rewards."""
    first = ("reward", "accuracy")
    means = {name: one["mean"] for name, one in side["figures"].items() if isinstance(one, dict) and name not in first}
    calls = {name.replace("_", " "): side["rates"][name] for name in BESIDE if name in side["rates"]}
    parts = {name.removeprefix(PART): rate for name, rate in side["rates"].items() if name.startswith(PART)}
    return means | calls | parts


def _line(name: str, side: dict[str, Any], part: dict[str, Any]) -> list[Any]:
    """Return the row of a part. `side`: what one of the models did."""
    figures, own = side["figures"], side["rates"]
    place = "in" if part["in_distribution"] else "out"
    return [
        name,
        figures["tasks"],
        _cell(headline(figures)),
        own["length"],
        f"{own['truncated']:.1%}",
        f"{own['invalid']:.1%}",
        place,
    ]


def _cell(figure: dict[str, Any]) -> str:
    return f"{figure['mean']:.3f}" if figure.get("why") else told(figure)
