"""`posttrain view`: opens runs, serves their pages on this machine until Ctrl-C, or writes one of them into a file."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_urlsafe
from typing import TYPE_CHECKING

from posttrain.types import UserError
from posttrain.view.run import OpenRun, names_of

if TYPE_CHECKING:
    import uvicorn

HOST = "127.0.0.1"
PATIENCE = 4.0  # seconds in which what is being answered may be answered, once the server is to end


def opened(folders: Sequence[str]) -> list[OpenRun]:
    """The runs in these folders. Raises UserError for one that holds none."""
    paths = [Path(folder).expanduser() for folder in folders]
    return [OpenRun(path, name) for path, name in zip(paths, names_of(paths), strict=True)]


def serve(folders: Sequence[str], port: int = 0, browser: bool = False) -> None:
    """Serve until interrupted. `port` 0: any that is free."""
    _lighten()
    runs = opened(folders)
    token = token_urlsafe(12)
    with _bound(port) as bound:
        bound.listen()  # whoever is quicker than the imports below waits, and is not refused
        for run in runs:  # not before: a thread that reads would be cut off where the port is taken
            run.begin()
        address = f"http://{HOST}:{bound.getsockname()[1]}/{token}/"
        print(f"view        {address}\nopen it in a browser of this machine; Ctrl-C ends it", flush=True)
        if browser:
            import webbrowser

            webbrowser.open(address)
        import uvicorn

        from posttrain.view.server import application

        config = uvicorn.Config(
            application(runs, token),
            log_level="error",
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
        )
        try:
            server = uvicorn.Server(config)
            threading.Thread(target=_leave, args=(server, runs), daemon=True).start()
            server.run(sockets=[bound])
        finally:
            for run in runs:
                run.close()


def export(folders: Sequence[str], file: Path, rollouts: int, where: str) -> int:
    """Write one run into one file; its size in bytes."""
    if len(folders) != 1:
        raise UserError("--export writes one run: name one folder")
    from posttrain.view.export import Selection, exported

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
    if run.store.problem is not None:
        raise UserError(run.store.problem)
    run.store.read_texts()
    page = exported(run, selection)
    try:
        file.write_bytes(page)
    except OSError as error:
        raise UserError(f"--export {file} cannot be written: {error.strerror or error}") from None
    return len(page)


def _leave(server: uvicorn.Server, runs: Sequence[OpenRun]) -> None:
    """End the process some seconds after it was asked to: it may be at a question that no interrupt reaches."""
    while not server.should_exit:
        time.sleep(0.5)
    time.sleep(PATIENCE)
    for run in runs:
        run.store.close()
    os._exit(130)


def _lighten() -> None:
    """Keep pyarrow from what it does not need here.

    It imports pandas before it makes its first array, to tell pandas' own apart: 0.3 s and 43 MB. Its own allocator holds
    on to what has been freed: 80 MB more, and as many pages to be made.
    """
    import pyarrow

    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    if "pandas" not in sys.modules:
        sys.modules["pandas"] = None  # type: ignore[assignment]  # importing it fails, and pyarrow asks once
        with suppress(Exception):
            pyarrow.array([0])
        del sys.modules["pandas"]


def _bound(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((HOST, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise UserError(
            f"--port {port} cannot be used ({getattr(error, 'strerror', 'ports end at 65535')}): leave it out for any"
        ) from None
    return bound


if __name__ == "__main__":
    serve(sys.argv[1:])
