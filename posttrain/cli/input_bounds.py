"""Memory limits of commands whose input or requests are untrusted."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from posttrain.core.types import UserError

LEAST = 4.0  # GiB


@contextmanager
def memory(gib: float | None = None) -> Iterator[None]:
    """Context manager that limits the memory of this process; None: to half of the machine's. A few bytes that claim to
    be billions then stop only this command.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    if gib is None:
        gib = max(LEAST, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**31)
    with suppress(OSError, ValueError, OverflowError):  # not supported by all systems
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
