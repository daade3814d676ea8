"""The command `posttrain view`: opens runs and files of evaluations, and serves their pages on this machine until Ctrl-C,
or exports one to a file.
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

from posttrain.apps.view.evaluation_file import EvaluationFile
from posttrain.apps.view.open_run import OpenRun, names_of
from posttrain.core import user_files
from posttrain.core.types import UserError
from posttrain.runs.run_files import RUN
from posttrain.system.http_front import HOST, bound
from posttrain.system.without_pandas import without_pandas

QUESTIONS = 40  # requests that are handled at once, each in a thread
GRACE_SECONDS = 4.0  # seconds in which open requests may finish when the server stops


def divided(paths: Sequence[str]) -> tuple[list[str], list[EvaluationFile]]:
    """Return the folders among these paths, and the content of those that are files of `eval --out`."""
    own = [Path(path).expanduser() for path in paths]
    files = [path for path in own if path.suffix == ".json" and path.name != RUN and path.is_file()]
    return [str(path) for path in own if path not in files], [EvaluationFile.read(path) for path in files]


def opened(folders: Sequence[str]) -> list[OpenRun]:
    """Return the runs in these folders. Raises UserError for one that holds none."""
    paths = [Path(folder).expanduser() for folder in folders]
    return [OpenRun(path, name) for path, name in zip(paths, names_of(paths), strict=True)]


def serve(paths: Sequence[str], port: int = 0, browser: bool = False) -> None:
    """Serve the pages until interrupted. `port` 0: any free port."""
    with _lighter():
        folders, evaluations = divided(paths)
        _serve(opened(folders), evaluations, port, browser)


def _serve(runs: Sequence[OpenRun], evaluations: Sequence[EvaluationFile], port: int, browser: bool) -> None:
    token = token_urlsafe(12)
    with bound(HOST, port) as listening:
        listening.listen()  # a browser that is faster than the imports below waits, and is not refused
        for run in runs:  # only now: if the port is taken, a reading thread would be cut off
            run.begin()
        chosen = listening.getsockname()[1]
        address = f"http://{HOST}:{chosen}/{token}/"
        print(f"view        {address}\nopen it in a browser of this machine; Ctrl-C ends it", flush=True)
        if (host := _reached()) and not browser:
            print(f"from yours  ssh -L {chosen}:localhost:{chosen} {host}, then open the address there", flush=True)
        if browser:
            import webbrowser

            webbrowser.open(address)
        try:
            asyncio.run(_answer(runs, evaluations, token, listening))
        finally:
            for run in runs:
                run.close()


def _reached() -> str:
    """Return the address at which ssh reached this machine; "" if the user is not here by ssh."""
    words = os.environ.get("SSH_CONNECTION", "").split()  # client's address and port, then the server's
    return words[2] if len(words) == 4 else ""


async def _answer(
    runs: Sequence[OpenRun], evaluations: Sequence[EvaluationFile], token: str, listening: socket.socket
) -> None:
    from posttrain.apps.view.web_server import application
    from posttrain.system.http_server import serving, stop_signal

    stopped = stop_signal()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(QUESTIONS))
    async with serving(application(runs, token, evaluations), listening, shutdown_timeout=GRACE_SECONDS):
        try:
            await stopped
            raise KeyboardInterrupt
        finally:
            threading.Thread(target=_leave, args=(runs,), daemon=True).start()


def export(paths: Sequence[str], file: Path, rollouts: int | None, where: str) -> tuple[int, list[str]]:
    """Write one run, or one file of an evaluation, to an HTML file; return its size in bytes, and notes on missing
    parts. `rollouts` None: 200.
    """
    if len(paths) != 1:
        raise UserError("--export writes one run or one file of an evaluation: name one")
    from posttrain.apps.view.html_export import ROLLOUTS, Selection, figures_of, gathered, packed

    selection = Selection.of({"rollouts": str(ROLLOUTS if rollouts is None else rollouts)}, where)
    if not file.absolute().parent.is_dir():
        raise UserError(f"--export {file}: there is no folder {file.absolute().parent}")
    folders, evaluations = divided(paths)
    if evaluations:
        if where or rollouts is not None:
            option = "--where" if where else "--rollouts"
            raise UserError(f"{option} has no effect on a file of figures: leave it out")
        return _written(file, packed(figures_of(evaluations[0]))), []
    [run] = opened(folders)
    if where:
        try:
            run.check_condition(where)
        except UserError as error:
            raise UserError(f"--where: {error}") from None
    run.read()
    run.store.read_texts()
    kept, missing = gathered(run, selection)
    return _written(file, packed(kept)), missing


def _written(file: Path, page: bytes) -> int:
    """Write the page, and return its size in bytes."""
    try:
        return user_files.writable(file).write_bytes(page)
    except OSError as error:
        raise UserError(f"--export {file} cannot be written: {error.strerror or error}") from None


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
