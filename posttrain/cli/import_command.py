"""`posttrain import`: converts a command, configuration or script of TRL, verl or OpenRLHF to a recipe."""

from __future__ import annotations

import re
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
    draft = recipe_for(source, devices, rows, trainer, "" if out is None else _beside(out))
    text = draft.toml(Path(source).name, out or "recipe.toml")
    if out is None:
        print(text, end="")
        return 0
    for name, content in draft.run.files.items():
        _refuse_others(name, content)
    try:
        _write(out, text)
    except FileExistsError:
        raise UserError(f"{clip(out)} is there already: choose another name for --out, or delete it") from None
    missing = sum(map(len, draft.without.values()))
    print(f"wrote       {out}: {len(draft.lines)} options")
    for name, content in draft.run.files.items():
        try:
            _write(name, content)
            print(f"wrote       {name}: what {clip(Path(source).name)} has of it; read it")
        except FileExistsError:
            print(f"kept        {name}: it has the same content")
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


def _beside(out: str) -> str:
    """Return the beginning of the names of files that belong to a recipe, as env can have it, where options have letters
    of their own.
    """
    path = Path(out)
    stem = re.sub(r"\W+", "_", path.stem)
    return f"{path.parent}/{stem}_" if path.parent != Path() else f"{stem}_"


def _refuse_others(name: str, content: str) -> None:
    """Raise UserError if another file than the one to be written is there, or if env cannot have its name."""
    if not re.fullmatch(r"[\w/.-]+", name):
        raise UserError(f"--out is in a folder that env cannot name, {clip(name)}: use letters, digits, - and _")
    try:
        with user_files.opened(name, "rb") as file:
            same = file.read(len(content.encode("utf-8", "replace")) + 1) == content.encode("utf-8", "replace")
    except OSError:
        return
    if not same:
        raise UserError(f"{clip(name)} is there already, with another content: choose another --out, or delete it")


def _write(place: str, text: str) -> None:
    """Write a new file. Raises FileExistsError if it is there, and UserError if it cannot be written."""
    try:
        with user_files.opened(place, "xb") as file:
            file.write(text.encode("utf-8", "replace"))
    except FileExistsError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"--out {clip(place)} cannot be written: {one_line(error)}") from error
