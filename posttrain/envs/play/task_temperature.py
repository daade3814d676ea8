"""The sampling temperature of a task, from a column of its row: see `--temperature-column`."""

from __future__ import annotations

from posttrain.core.messages import short
from posttrain.core.progress import doing
from posttrain.core.types import TEMPERATURES, Task, UserError, is_temperature
from posttrain.data.mixed_tasks import MixedTasks
from posttrain.data.rows import value_in
from posttrain.data.tasks import Stream, Tasks


def check_temperatures(tasks: Tasks | Stream | MixedTasks, column: str, trained: bool) -> None:
    """Check the column of all tasks, or of the first ones of an endless source. `trained`: whether their replies are.

    Raises UserError, in one line that names the row, for a value that is no temperature, for 0 where replies are trained,
    and if no task has a value.
    """
    doing(f"reading the column {column}")
    found = 0
    for place, task in enumerate(tasks.examples() if isinstance(tasks, Stream) else tasks):
        try:
            temperature = task_temperature(task, column)
            if temperature == 0 and trained:
                raise UserError(
                    f"--temperature-column {column} is 0, which is greedy: a trained reply needs one above 0"
                )
        except UserError as error:
            raise UserError(f"{tasks.where(place)}: {error}") from error
        found += temperature is not None
    if not found:
        try:
            value_in(tasks[0], column)
        except UserError as error:
            raise UserError(f"--temperature-column {column}: {error}") from None
        raise UserError(f"--temperature-column {column} is empty in every row: leave it out")


def task_temperature(task: Task, column: str) -> float | None:
    """Return the value of a task's column, a number or its text; None for a task whose column is empty or missing.

    Raises UserError, in one line, for anything else.
    """
    try:
        value = value_in(task, column)
    except UserError:  # JSON rows leave out what is null
        return None
    if value is None or value == "":
        return None
    try:
        temperature = float(value) if isinstance(value, str) else value
    except ValueError:
        temperature = None
    if temperature is None or not is_temperature(temperature):
        raise UserError(
            f"--temperature-column {column} is {short(value)}; expected {TEMPERATURES}, or null for --temperature"
        )
    return float(temperature)
