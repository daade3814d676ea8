"""Uploads files to a repository of the hub in one commit: all of them are there afterwards, or none.

Large files are put there before the commit that names them; those that are there already are not put again, so a second
attempt goes on where the first one ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain.apps.publishing.hub_folder import CARD
from posttrain.apps.publishing.model_card import RUN_KEY
from posttrain.core.messages import one_line
from posttrain.core.types import UserError
from posttrain.system.hub import HubName, as_far_as_reached, meaning

SILENCE = 120.0  # seconds without a byte from the hub after which an upload ends
KEPT = (".gitattributes", "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE")
"""Files of a repository that no push deletes."""


@contextmanager
def asking(target: HubName) -> Iterator[Any]:
    """Yield the hub's client. Within it, its errors are UserErrors; so is a hub that cannot be reached, or no token."""
    from huggingface_hub import HfApi, constants, get_token

    with as_far_as_reached() as unreached:
        if unreached:
            raise UserError(
                f"{unreached}: nothing was pushed to {target.name}; see what would be pushed with --dry-run"
            )
        if not get_token():
            raise UserError(f"a push needs a token that may write: create one at {constants.ENDPOINT}/settings/tokens and "
                            "set HF_TOKEN, or run hf auth login")  # fmt: skip
        try:
            with _bounded():
                yield HfApi()
        except UserError:
            raise
        except Exception as error:  # the network, the token, the name: any of many types
            why = meaning(error, target) or f"the hub refused the upload: {one_line(error)}"
            if isinstance(error, LookupError | TypeError | AttributeError):  # of the client, which reads the answer
                why = f"{constants.ENDPOINT} did not answer like a hub ({one_line(error)}): check HF_ENDPOINT"
            raise UserError(f"{target} was not pushed: {why}") from None


@contextmanager
def _bounded() -> Iterator[None]:
    """Let the client of the hub wait no longer than `SILENCE` for an answer: of itself it waits without end."""
    from huggingface_hub import get_session

    client = get_session()
    before, client.timeout = client.timeout, SILENCE
    try:
        yield
    finally:
        client.timeout = before


def upload(
    target: HubName, files: Mapping[str, Path | bytes], identity: str, message: str, private: bool, replace: bool
) -> str:
    """Upload the files; returns the address of the repository. Files of an earlier push that are no longer there go.

    `identity`: of the run; where the repository holds anything else, `replace` must be given. Raises UserError.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, constants

    with asking(target) as client:
        client.create_repo(target.name, private=private or None, repo_type="model", exist_ok=True)
        branch = target.revision or "main"
        fresh = branch != "main" and _branch(client, target.name, branch)
        there = [name for name in client.list_repo_files(target.name, revision=branch) if name not in KEPT]
        if there and not (replace or fresh or _identity(client, target.name, branch, there) == identity):
            raise UserError(
                f"{target} holds other files already ({', '.join(there[:3])}{' ...' if there[3:] else ''}): choose "
                "another name, --revision BRANCH, or --replace, which keeps them in its history"
            )
        added = [CommitOperationAdd(name, str(c) if isinstance(c, Path) else c) for name, c in files.items()]
        gone = [CommitOperationDelete(name) for name in there if name not in files]
        client.create_commit(target.name, [*added, *gone], commit_message=message, revision=branch)
        return f"{constants.ENDPOINT}/{target.name}" + (f"/tree/{branch}" if branch != "main" else "")


def _branch(client: Any, name: str, branch: str) -> bool:
    """Make a branch, unless it is there; returns whether it was made: it then holds a copy of main."""
    if any(ref.name == branch for ref in client.list_repo_refs(name).branches):
        return False
    client.create_branch(name, branch=branch)
    return True


def _identity(client: Any, name: str, branch: str, there: list[str]) -> str | None:
    """Return the run that the model card of a repository names."""
    from huggingface_hub import metadata_load

    if CARD not in there:
        return None
    found = metadata_load(client.hf_hub_download(name, CARD, revision=branch)) or {}
    return str(found[RUN_KEY]) if RUN_KEY in found else None
