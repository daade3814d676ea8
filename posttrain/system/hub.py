"""Tests whether the Hugging Face hub can be reached, before its client tries for half a minute.

Where it cannot, the client is set to offline: models that were downloaded before are still found in its cache.
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
    """Set the hub's client to offline within it, if necessary. Yields why: "" where the hub can be reached.

    `others`: modules that have such a flag of their own.
    """
    from huggingface_hub import constants

    address, flagged = constants.ENDPOINT, (constants, *others)
    offline = any(module.HF_HUB_OFFLINE for module in flagged)  # set by the user
    why = "" if offline or reached(address) else f"{urlsplit(address).hostname} cannot be reached"
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
    """Return whether a connection can be made to an address, or to the proxy before it, within so many seconds."""
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

    trial = threading.Thread(target=connect, daemon=True)  # a lookup of a name has no timeout
    trial.start()
    trial.join(seconds)
    return found.is_set()
