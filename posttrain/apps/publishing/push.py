"""`posttrain push`: a checkpoint and its model card as a repository of the hub, or as a folder that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.apps.publishing import hub_folder, upload
from posttrain.apps.publishing.card_figures import rows
from posttrain.apps.publishing.hub_folder import CARD, Files, files_of
from posttrain.apps.publishing.model_card import card
from posttrain.apps.publishing.published_run import Published, find, license_of
from posttrain.core.messages import clip, one_line
from posttrain.core.types import UserError
from posttrain.runs.run_files import CURVES
from posttrain.system.hub import HubName, hub_name


@dataclass(frozen=True)
class Push:
    """A push as it is ready to be carried out."""

    target: HubName
    published: Published
    files: Files

    @property
    def message(self) -> str:
        """The message of the commit."""
        published = self.published
        return f"{published.identity}, step {published.step}" if published.run else published.identity

    def lines(self) -> list[str]:
        """Return what is pushed: the checkpoint, the repository, and each file with its size."""
        total = hub_folder.readable(sum(map(hub_folder.size_of, self.files.values())))
        first, *others = hub_folder.listed(self.files)
        return [
            f"checkpoint  {self.published.folder}",
            f"repository  {self.target}, {len(self.files)} files, {total}",
            f"files       {first}",
            *(f"            {line}" for line in others),
        ]


def prepared(
    source: str,
    repository: str,
    revision: str | None = None,
    checkpoint: str | None = None,
    base: str | None = None,
    evaluations: Sequence[str] = (),
    ask: bool = True,
) -> Push:
    """Collect the files and write the card. `ask`: the hub, for the licence of the base. Raises UserError."""
    named = hub_name(repository)
    if named is None or (named.revision and revision):
        raise UserError(
            f"{clip(repository)} is not a repository of the hub: write org/name, and give a branch with --revision"
        )
    target = HubName(named.name, revision or named.revision)
    _check_name(target)
    published = find(source, checkpoint, base)
    files = files_of(published)
    text = card(published, target, license_of(published, ask), rows(published, evaluations), CURVES in files)
    return Push(target, published, {CARD: text.encode(), **files})


def _check_name(target: HubName) -> None:
    """Raise UserError for a name that the hub does not take."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(target.name)
    except HFValidationError as error:
        raise UserError(f"{clip(target.name)} is not a valid name on the hub: {one_line(error)}") from None
    if hub_name(str(target)) is None or ".." in str(target):
        raise UserError(
            f"--revision {clip(str(target.revision))} is not the name of a branch: use letters, digits, - _ . and /"
        )


def carry_out(push: Push, private: bool = False, replace: bool = False) -> str:
    """Upload; returns the address of the repository. Raises UserError, for Ctrl-C too: nothing was uploaded then."""
    try:
        return upload.upload(push.target, push.files, push.published.identity, push.message, private, replace)
    except KeyboardInterrupt:
        raise UserError(f"interrupted: {push.target} is unchanged; repeat the command to continue") from None


def write(push: Push, out: Path) -> None:
    """Write the files that would be uploaded into a new folder. Raises UserError."""
    hub_folder.write(push.files, out)
