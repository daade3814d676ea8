"""Bounds of what a command may take, where what it reads or is asked may be anybody's."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from posttrain.core.types import UserError

LEAST = 4.0  # GiB


@contextmanager
def memory(gib: float | None = None) -> Iterator[None]:
    """Limit the memory that the process may allocate within it; None: half of the machine's, so that a few bytes that
    claim to be billions stop nothing but this command.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    if gib is None:
        gib = max(LEAST, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**31)
    with suppress(OSError, ValueError, OverflowError):  # there are systems without
        with open("/proc/self/statm") as own:
            mapped = int(own.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        most = mapped + int(gib * 2**30)
        if before[0] == resource.RLIM_INFINITY or most < before[0]:
            resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    except MemoryError as error:
        raise UserError(f"that takes more than {gib:.1f} GiB of memory: ask for less") from error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
