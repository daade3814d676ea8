"""The Hugging Face hub: names of its repositories, a test whether it can be reached, and its errors in one line.

The test comes first, because the hub's client retries for half a minute. If the hub cannot be reached, the client is
set to offline, and still finds downloaded models in its cache.
"""

from __future__ import annotations

import errno
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from posttrain.core.messages import inline, one_line

SECONDS = 1.5  # for looking up a name and making a connection
MOST = 5  # names of cached models or datasets in a message


class HubName(NamedTuple):
    """A repository of the hub, at a branch, tag or commit (None: the latest state of its main branch)."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


def hub_name(text: str) -> HubName | None:
    """Return the repository of a text "org/name" or "org/name@revision"; None for other texts."""
    found = re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?", text)
    return HubName(found[1], found[2]) if found else None


def name_in_address(text: str) -> str:
    """Return org/name of a text such as hf:org/name, hf://datasets/org/name or the address of its page; else "".

    "" too for kinds of pages that hold neither, and for a name without an organisation.
    """
    kinds = "(?!(?:datasets|models|spaces|docs|collections|papers)/)"
    start = r"(?:hf:|https?:/+huggingface\.co/)/*(?:datasets/|models/)?"
    found = re.match(rf"{start}{kinds}(\w[\w.-]*/\w[\w.-]*)", text)
    return found[1] if found else ""


@contextmanager
def as_far_as_reached(*others: Any) -> Iterator[str]:
    """Context manager that sets the hub's client to offline if necessary. Yields the reason, or "" if the hub is used.

    `others`: modules with an own flag HF_HUB_OFFLINE.
    """
    from huggingface_hub import constants

    address, flagged = constants.ENDPOINT, (constants, *others)
    offline = any(module.HF_HUB_OFFLINE for module in flagged)  # set by the user
    why = "HF_HUB_OFFLINE is set" if offline else ""
    if not (offline or reached(address)):
        why = f"{urlsplit(address).hostname} cannot be reached"
    before = [module.HF_HUB_OFFLINE for module in flagged]
    try:
        for module, was in zip(flagged, before, strict=True):
            module.HF_HUB_OFFLINE = was or bool(why)
        yield why
    finally:
        for module, was in zip(flagged, before, strict=True):
            module.HF_HUB_OFFLINE = was


@cache
def reached(address: str, seconds: float = SECONDS) -> bool:
    """Return whether a connection to an address, or to the proxy before it, can be made within `seconds`."""
    place = urlsplit(address)
    proxies = {} if urllib.request.proxy_bypass(place.hostname or "") else urllib.request.getproxies()
    proxy = proxies.get(place.scheme) or proxies.get("all")
    if proxy:
        place = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    found = threading.Event()

    def connect() -> None:
        with suppress(OSError, ValueError):  # unknown name, no answer
            port = place.port or (443 if place.scheme == "https" else 80)
            socket.create_connection((place.hostname or "", port), seconds).close()
            found.set()

    trial = threading.Thread(target=connect, daemon=True)  # in a thread, as looking up a name has no timeout
    trial.start()
    trial.join(seconds)
    return found.is_set()


def problem(error: BaseException, of: HubName, kind: str = "model") -> str:
    """Return the reason why the hub returned no model or dataset, with the fix, in one line."""
    return (
        meaning(error, of, kind)
        or f"the {kind} {of} could not be downloaded from the hub: {one_line(error.__cause__ or error)}"
    )


def meaning(error: BaseException, of: HubName, kind: str = "model") -> str | None:
    """Return the meaning of an error of the hub's client for a repository, with the fix; None if the error is unknown.

    `kind`: model or dataset. The error's causes are searched too: the client wraps some errors.
    """
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    return next((text for each in chain if (text := _meaning(each, of, kind)) is not None), None)


def _meaning(error: BaseException, of: HubName, kind: str) -> str | None:
    from huggingface_hub import constants, errors, get_token

    page, token = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{of.name}", get_token()
    status = getattr(getattr(error, "response", None), "status_code", None)
    # the library datasets gives this error a cause only for a missing revision
    missing = type(error).__name__ == "DatasetNotFoundError" and not str(error).startswith("Revision")
    if isinstance(error, errors.GatedRepoError) or (missing and "gated" in str(error)):
        whose = "with the account of your token" if token else "and set HF_TOKEN to a token of that account"
        return f"{of.name} is gated: accept its licence at {page} {whose}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{of.name} has no revision {of.revision or 'main'}: its branches and tags are at {page}"
    if missing or isinstance(error, errors.RepositoryNotFoundError):
        private = "or it is private, and your token may not read it" if token else "or it is private: set HF_TOKEN then"
        return f"the hub has no {kind} {of.name}; correct the name ({private})"
    if status == 401:
        return f"the hub refuses your token (HF_TOKEN): make a new one at {constants.ENDPOINT}/settings/tokens"
    if status == 403:
        return f"your token (HF_TOKEN) has no access to {of.name}: grant it access, or use another token"
    if status is not None and (status == 429 or status >= 500):
        return f"the hub failed with status {status} for {of.name}: repeat the command later"
    if status is not None and status >= 400:
        told = getattr(error, "server_message", None) or one_line(error).partition(" for url ")[0]
        return f"the hub refused the request for {of.name} ({status}): {inline(told)}"
    if type(error).__name__ in ("ReadTimeout", "WriteTimeout", "ConnectTimeout", "PoolTimeout"):
        return "the hub does not answer: repeat the command later; finished files are kept"
    if type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "requests"):
        return f"the connection to the hub broke ({one_line(error)}): repeat the command; finished files are kept"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        cache = Path(constants.HF_HUB_CACHE)
        return f"{of.name} cannot be written to {cache} ({error.strerror}): make room there, or set HF_HOME"
    return None


def cached_names() -> list[str]:
    """Return the names of the models in the hub's cache, complete or not."""
    from huggingface_hub import constants

    with suppress(OSError):
        found = sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*/snapshots/*"))
        return list(dict.fromkeys(place.parents[1].name.split("--", 1)[1].replace("--", "/") for place in found))
    return []


def cached_list() -> str:
    """Return the names of `cached_names` as the end of a message."""
    names = cached_names()
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return f"the cache has {', '.join(names[:MOST])}{more}" if names else "the cache is empty"
