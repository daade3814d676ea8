"""`posttrain push`: a checkpoint with a model card to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from posttrain.core.types import UserError


def push(
    folder: str,
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    checkpoint: str | None = None,
    base: str | None = None,
    eval: Annotated[tuple[str, ...], Parameter(consume_multiple=1, negative_iterable=())] = (),
    replace: bool = False,
    dry_run: bool = False,
    out: str | None = None,
) -> int:
    """Upload a checkpoint to the Hugging Face hub with a model card: base, algorithm, data, figures, curves, command.

    Neither rollouts, optimizer state nor rows are uploaded. The token is that of HF_TOKEN, or of hf auth login.

    Parameters
    ----------
    folder
        Folder of a run, or of a checkpoint.
    repository
        Repository of the hub: org/name. It is made if it is not there.
    private
        Make the repository private, if it is new.
    revision
        Branch to push to; it is made if it is not there. Default: main.
    checkpoint
        Step of the run's checkpoint, or best: by held-out accuracy, reward or loss. Default: the newest.
    base
        Model of the hub that training began with, where the run began with a local folder: org/name.
    eval
        Files of figures, as posttrain eval --out writes them, for the model card.
    replace
        Replace files of the repository that another run or person has put there; its history keeps them.
    dry_run
        Upload nothing: write the files into a folder, and list them.
    out
        Folder for the files of --dry-run. Default: hub/ORG/NAME.
    """
    from posttrain.apps.publishing.push import carry_out, prepared, write

    if out is not None and not dry_run:
        raise UserError("--out is the folder of --dry-run: leave it out, or give both")
    ready = prepared(folder, repository, revision, checkpoint, base, eval, ask=not dry_run)
    print("\n".join(ready.lines()))
    if dry_run:
        written = Path(out) if out is not None else Path("hub") / ready.target.name
        write(ready, written)
        print(f"folder      {written}: nothing was uploaded")
        return 0
    print(f"pushed      {carry_out(ready, private, replace)}")
    return 0
