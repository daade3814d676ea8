"""Several things at once, of which none goes on without the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What they return, in order. Where one fails, or this is cancelled, all others are."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
