"""`posttrain view`: opens runs, serves their pages on this machine until Ctrl-C, or writes one of them into a file."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from secrets import token_urlsafe

from posttrain.types import UserError
from posttrain.view.run import OpenRun, names_of

HOST = "127.0.0.1"


def opened(folders: Sequence[str]) -> list[OpenRun]:
    """The runs in these folders. Raises UserError for one that holds none."""
    paths = [Path(folder).expanduser() for folder in folders]
    return [OpenRun(path, name) for path, name in zip(paths, names_of(paths), strict=True)]


def serve(folders: Sequence[str], port: int = 0, browser: bool = False) -> None:
    """Serve until interrupted. `port` 0: any that is free."""
    runs = opened(folders)
    for run in runs:
        run.begin()
    import uvicorn

    from posttrain.view.server import application

    token = token_urlsafe(12)
    with _bound(port) as bound:
        address = f"http://{HOST}:{bound.getsockname()[1]}/{token}/"
        print(f"view        {address}\nopen it in a browser of this machine; Ctrl-C ends it", flush=True)
        if browser:
            import webbrowser

            webbrowser.open(address)
        config = uvicorn.Config(
            application(runs, token),
            log_level="error",
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
        )
        try:
            uvicorn.Server(config).run(sockets=[bound])
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


def _bound(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((HOST, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise UserError(
            f"--port {port} cannot be used ({getattr(error, 'strerror', error)}): leave it out for any"
        ) from None
    return bound


if __name__ == "__main__":
    serve(sys.argv[1:])
