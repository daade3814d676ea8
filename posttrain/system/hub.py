"""Whether the Hugging Face hub can be reached, found out before its client tries for half a minute.

Where it cannot, the client is told so: what was downloaded before is still found in its cache.
"""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any
from urllib.parse import urlsplit

SECONDS = 5.0  # for a name to be looked up and a connection to be made


@contextmanager
def as_far_as_reached(*others: Any) -> Iterator[str]:
    """Within it the hub's client works offline, if it has to. Gives why: "" where the hub can be reached.

    `others`: modules that have a flag for that of their own.
    """
    from huggingface_hub import constants

    address, flagged = constants.ENDPOINT, (constants, *others)
    offline = any(module.HF_HUB_OFFLINE for module in flagged)  # the user says so
    why = "" if offline or _reached(address) else f"{urlsplit(address).hostname} cannot be reached"
    before = [module.HF_HUB_OFFLINE for module in flagged]
    try:
        for module, was in zip(flagged, before, strict=True):
            module.HF_HUB_OFFLINE = was or bool(why)
        yield why
    finally:
        for module, was in zip(flagged, before, strict=True):
            module.HF_HUB_OFFLINE = was


@cache
def _reached(address: str) -> bool:
    """Whether a connection is made to an address, or to the proxy that stands before it."""
    place = urlsplit(address)
    proxies = {} if urllib.request.proxy_bypass(place.hostname or "") else urllib.request.getproxies()
    proxy = proxies.get(place.scheme) or proxies.get("all")
    if proxy:
        place = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    found = threading.Event()

    def connect() -> None:
        with suppress(OSError, ValueError):  # no such name, nobody there
            port = place.port or (443 if place.scheme == "https" else 80)
            socket.create_connection((place.hostname or "", port), SECONDS).close()
            found.set()

    trial = threading.Thread(target=connect, daemon=True)  # a lookup of a name knows no time limit
    trial.start()
    trial.join(SECONDS)
    return found.is_set()
