"""When Python looks for cyclic garbage in the processes of posttrain: seldom, and not among loaded libraries.

PyTorch and what comes with it are some 400,000 objects that stay until the end. By default Python traverses them again
and again while they are loaded, and once more before the process ends: a quarter of the time that `import torch` takes.
"""

from __future__ import annotations

import gc

YOUNG = 50_000  # allocations before Python collects cycles; a step of training makes that many temporary objects

_own = False  # whether this process is one of posttrain's, rather than a program of the user that imports it


def search_seldom() -> None:
    """Let Python look for garbage seldom from now on. Called first in a process of posttrain's own."""
    global _own
    _own = True
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])


def leave_libraries() -> None:
    """Exempt everything loaded so far from the search, in a process of posttrain's own. Called before the user's code is
    loaded, whose objects are collected as usual.
    """
    if _own:
        gc.freeze()
