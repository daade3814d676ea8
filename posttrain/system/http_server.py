"""Serves aiohttp applications on bound sockets, for all HTTP servers here. `http_front` decides which requests it
accepts.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from aiohttp import web

QUIET = logging.getLogger("posttrain.system.http_server")
"""Log for aiohttp's messages about malformed requests. It is discarded: the clients get an error."""
QUIET.addHandler(logging.NullHandler())
QUIET.propagate = False


@asynccontextmanager
async def serving(application: web.Application, listening: socket.socket, **how: Any) -> AsyncIterator[int]:
    """Serve the application on a bound socket, and yield its port. Closes the socket at the end. `how`: for
    `web.AppRunner`.
    """
    runner = web.AppRunner(
        application,
        access_log=None,
        logger=QUIET,
        handler_cancellation=True,  # stops the work for a client that disconnects
        auto_decompress=False,  # a few kilobytes may become gigabytes, which would be read even after a refusal
        **how,
    )
    try:
        await runner.setup()
        await web.SockSite(runner, listening, backlog=1024).start()
        yield listening.getsockname()[1]
    finally:
        await runner.cleanup()
        listening.close()


def stop_signal() -> asyncio.Future[None]:
    """Return a future that is done at the first Ctrl-C, SIGTERM or SIGHUP that is not ignored (nohup, scripts' &).

    It works in the main thread only.

    A handler that raises KeyboardInterrupt does not suffice: if raised within a finalizer or the callback of a weak
    reference (closing a connection runs both), Python prints the exception and continues.
    """
    loop = asyncio.get_running_loop()
    heard: asyncio.Future[None] = loop.create_future()

    def hear() -> None:
        if not heard.done():
            heard.set_result(None)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        with suppress(ValueError, RuntimeError):  # not in the main thread
            if signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, hear)
    return heard
