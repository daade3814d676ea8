"""The command `posttrain view`: opens runs and serves their pages on this machine until Ctrl-C, or exports one to a
file.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from secrets import token_urlsafe

from posttrain.apps.view.open_run import OpenRun, names_of
from posttrain.core import user_files
from posttrain.core.types import UserError
from posttrain.system.http_front import HOST, bound
from posttrain.system.without_pandas import without_pandas

QUESTIONS = 40  # requests that are handled at once, each in a thread
GRACE_SECONDS = 4.0  # seconds in which open requests may finish when the server stops


def opened(folders: Sequence[str]) -> list[OpenRun]:
    """Return the runs in these folders. Raises UserError for one that holds none."""
    paths = [Path(folder).expanduser() for folder in folders]
    return [OpenRun(path, name) for path, name in zip(paths, names_of(paths), strict=True)]


def serve(folders: Sequence[str], port: int = 0, browser: bool = False) -> None:
    """Serve the pages until interrupted. `port` 0: any free port."""
    with _lighter():
        _serve(opened(folders), port, browser)


def _serve(runs: Sequence[OpenRun], port: int, browser: bool) -> None:
    token = token_urlsafe(12)
    with bound(HOST, port) as listening:
        listening.listen()  # a browser that is faster than the imports below waits, and is not refused
        for run in runs:  # only now: if the port is taken, a reading thread would be cut off
            run.begin()
        address = f"http://{HOST}:{listening.getsockname()[1]}/{token}/"
        print(f"view        {address}\nopen it in a browser of this machine; Ctrl-C ends it", flush=True)
        if browser:
            import webbrowser

            webbrowser.open(address)
        try:
            asyncio.run(_answer(runs, token, listening))
        finally:
            for run in runs:
                run.close()


async def _answer(runs: Sequence[OpenRun], token: str, listening: socket.socket) -> None:
    from posttrain.apps.view.web_server import application
    from posttrain.system.http_server import serving, stop_signal

    stopped = stop_signal()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(QUESTIONS))
    async with serving(application(runs, token), listening, shutdown_timeout=GRACE_SECONDS):
        try:
            await stopped
            raise KeyboardInterrupt
        finally:
            threading.Thread(target=_leave, args=(runs,), daemon=True).start()


def export(folders: Sequence[str], file: Path, rollouts: int, where: str) -> tuple[int, list[str]]:
    """Write one run to an HTML file; return its size in bytes, and notes on missing parts."""
    if len(folders) != 1:
        raise UserError("--export writes one run: name one folder")
    from posttrain.apps.view.html_export import Selection, gathered, packed

    selection = Selection.of({"rollouts": str(rollouts)}, where)
    if not file.absolute().parent.is_dir():
        raise UserError(f"--export {file}: there is no folder {file.absolute().parent}")
    [run] = opened(folders)
    if where:
        try:
            run.check_condition(where)
        except UserError as error:
            raise UserError(f"--where: {error}") from None
    run.read()
    run.store.read_texts()
    kept, missing = gathered(run, selection)
    page = packed(kept)
    try:
        user_files.writable(file).write_bytes(page)
    except OSError as error:
        raise UserError(f"--export {file} cannot be written: {error.strerror or error}") from None
    return len(page), missing


def _leave(runs: Sequence[OpenRun]) -> None:
    """End the process after some seconds: a query that no interrupt reaches may still be running."""
    time.sleep(GRACE_SECONDS)
    for run in runs:
        run.store.close()
    os._exit(130)


@contextmanager
def _lighter() -> Iterator[None]:
    """Keep pyarrow from importing pandas and from using its own allocator.

    The allocator keeps freed memory: 80 MB more, and page faults to match.
    """
    import pyarrow

    before = pyarrow.default_memory_pool()
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    try:
        with without_pandas():
            yield
    finally:
        pyarrow.set_memory_pool(before)


if __name__ == "__main__":
    serve(sys.argv[1:])
