"""An engine that listens for the pools of runs, one after the other, and samples with the weights of each."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

from posttrain.core.messages import one_line
from posttrain.core.types import UserError
from posttrain.engines.pool.pool_protocol import Gone, Wire, host_and_port, keep_alive, prove
from posttrain.engines.pool.replica import LocalHost, serve_pool

LOOK_SECONDS = 0.5  # between checks for a stop signal
MOST_UNPROVEN = 64  # maximum of connections that have not yet proved that they have the token


def listen(setup: dict[str, Any], address: str, token: bytes, say: Callable[[str], None]) -> NoReturn:
    """Serve pools until an interruption. `setup`: the result of `replicas.setup_of`. Raises UserError if the address is
    in use.
    """
    host, port = host_and_port(address, "--listen")
    had: tuple[Any, LocalHost] | None = None  # (layout of the weights, engine), kept for a pool that reconnects

    def hosted(told: dict[str, Any]) -> LocalHost:
        nonlocal had
        if had is None or had[0] != told["layout"]:
            had = None
            had = told["layout"], LocalHost({**setup, "layout": told["layout"]})
        return had[1]

    try:
        server = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(f"--listen {address} cannot be bound: {one_line(error)}") from error
    with server:
        say(f"listens at  {host}:{server.getsockname()[1]}")
        proven: SimpleQueue[tuple[socket.socket, str]] = SimpleQueue()
        threading.Thread(target=_accept, args=(server, token, proven, say), name="meeting", daemon=True).start()
        while True:
            try:
                end, peer = proven.get(timeout=LOOK_SECONDS)
            except Empty:  # gives this thread a chance to handle a signal that another thread received
                continue
            say(f"a pool      {peer}")
            try:
                serve_pool(Wire(end), hosted)
                say("disconnected")
            except UserError as error:
                say(f"disconnected: {error}")
            finally:
                end.close()


def _accept(
    server: socket.socket, token: bytes, proven: SimpleQueue[tuple[socket.socket, str]], say: Callable[[str], None]
) -> None:
    """Accept connections that prove that they have the token. No connection waits for a slow one.

    If too many are unproven, the oldest one of the peer with the most of them is closed: valid peers need
    milliseconds.
    """
    unproven: dict[socket.socket, str] = {}  # the oldest first
    changing = threading.Lock()

    def meet(end: socket.socket, peer: str) -> None:
        try:
            keep_alive(end)
            prove(end, token, listening=True)
            proven.put((end, peer))
        except (Gone, OSError) as error:
            say(f"refused     {peer}: {one_line(error)}")
            end.close()
        finally:
            with changing:
                unproven.pop(end, None)

    while True:
        try:
            end, address = server.accept()
        except OSError:  # the server is closed, a peer has gone, or no file descriptor is free
            if server.fileno() < 0:
                return
            time.sleep(LOOK_SECONDS)
            continue
        peer = address[0]
        with changing:
            if len(unproven) >= MOST_UNPROVEN:
                [(most, _)] = Counter(unproven.values()).most_common(1)
                oldest = next(other for other, own in unproven.items() if own == most)
                unproven.pop(oldest)
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread then ends
            unproven[end] = peer
        threading.Thread(target=meet, args=(end, peer), daemon=True).start()
