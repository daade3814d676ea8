"""`posttrain import`: converts a command, configuration or script of TRL, verl or OpenRLHF to a recipe."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from posttrain.core import user_files
from posttrain.core.messages import clip, one_line, safe
from posttrain.core.types import UserError


def import_recipe(
    source: str,
    *,
    out: str | None = None,
    devices: int | None = None,
    rows: int | None = None,
    trainer: str | None = None,
) -> int:
    """Write a recipe for a run of TRL, verl or OpenRLHF: quantities converted, each line with its reason.

    Parameters
    ----------
    source
        File of the run: a shell script or text with a command of TRL, verl or OpenRLHF; a Python script or
        notebook of TRL; or a YAML configuration of TRL. Nothing in it is run.
    out
        File for the recipe; it must not exist yet. Default: print the recipe.
    devices
        Number of processes (GPUs) of that run: TRL's batch size is per process. Default: as in the command.
    rows
        Number of rows of its dataset: turns epochs into steps. Default: not known.
    trainer
        Trainer of TRL that a YAML configuration is for: grpo, rloo, dpo, kto, orpo, cpo, sft or reward. Default: by its
        options.
    """
    from posttrain.apps.migration.migrate import recipe_for

    for name, number in (("--devices", devices), ("--rows", rows)):
        if number is not None and not 1 <= number <= 10**12:
            raise UserError(f"{name} must be at least 1, not {number}")
    draft = recipe_for(source, devices, rows, trainer)
    text = draft.toml(Path(source).name, out or "recipe.toml")
    if out is None:
        print(text, end="")
        return 0
    try:
        _write(out, text)
    except FileExistsError:
        raise UserError(f"{clip(out)} is there already: choose another name for --out, or delete it") from None
    missing = sum(map(len, draft.without.values()))
    print(f"wrote       {out}: {len(draft.lines)} options")
    for name, content in draft.run.files.items():
        place = str(Path(out).parent / name)
        try:
            _write(place, content)
            print(f"wrote       {place}: what {clip(Path(source).name)} has of it; read it")
        except FileExistsError:
            print(f"kept        {place}, which is there already")
    if missing:
        print(
            f"left out    {missing} option{'s'[: missing - 1]} of {draft.run.framework}: listed at the end of the recipe"
        )
    for note in draft.run.notes:
        print(f"check       {safe(note)}")
    for line in draft.before_the_first_run():
        print(f"first       {safe(line)}")
    print(f"run it      posttrain {draft.verb} --config {quote(str(Path(out)))}")
    return 0


def _write(place: str, text: str) -> None:
    """Write a new file. Raises FileExistsError if it is there, and UserError if it cannot be written."""
    try:
        with user_files.opened(place, "xb") as file:
            file.write(text.encode("utf-8", "replace"))
    except FileExistsError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"--out {clip(place)} cannot be written: {one_line(error)}") from error
