"""Containers of Docker or Podman: which engine is used, what a container may do, and that none outlives its process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import stand_in_engine
from container_engines import BASE, REAL, STAND_IN, engine_of, forget_engines

from posttrain.cli.main import main
from posttrain.core.types import UserError
from posttrain.sandbox import bubblewrap, containers
from posttrain.sandbox.containers import (
    CHOICE,
    Container,
    ContainerEngine,
    ContainerError,
    ContainerLimits,
    built_image,
    find_engine,
    folder_digest,
    remove_abandoned,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="containers are Linux's")
SECONDS = 60.0

HOLDS = """
import asyncio, sys
from pathlib import Path
from posttrain.sandbox.containers import *
async def main():
    engine = find_engine()
    container = await Container.start(engine, await built_image(engine, Path(sys.argv[1]), 60), ContainerLimits())
    print(container.name, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.fixture(params=(STAND_IN, REAL))
def engine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ContainerEngine]:
    with engine_of(request.param, tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ContainerEngine]:
    with engine_of(REAL, tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture
def context(tmp_path: Path) -> Path:
    folder = tmp_path / "context"
    folder.mkdir()
    (folder / "Dockerfile").write_text(f"FROM {BASE}\nWORKDIR /app\nCOPY a .\n")
    (folder / "a").write_text("a\n")
    return folder


def inside(
    engine: ContainerEngine,
    context: Path,
    body: Callable[[Container], Coroutine[Any, Any, Any]],
    limits: ContainerLimits | None = None,
) -> Any:
    """Return what `body` returns for a container."""

    async def run() -> Any:
        container = await Container.start(
            engine, await built_image(engine, context, SECONDS), limits or ContainerLimits()
        )
        try:
            return await body(container)
        finally:
            await container.close()
            await container.close()

    return asyncio.run(run())


def printed(
    engine: ContainerEngine, context: Path, command: str, limits: ContainerLimits | None = None, **how: Any
) -> str:
    async def body(container: Container) -> str:
        return (await container.run(command, SECONDS, **how)).output.decode().strip()

    found: str = inside(engine, context, body, limits)
    return found


def names(engine: ContainerEngine) -> str:
    listed = [engine.program, "ps", "--all", "--format", "{{.Names}}"]
    return subprocess.run(listed, capture_output=True, text=True, check=True).stdout


# -- the engine --------------------------------------------------------------------------------------------------------


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is the whole PATH."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv(CHOICE, raising=False)
    forget_engines()
    bubblewrap.check.cache_clear()
    yield tmp_path / "bin"
    forget_engines()


def test_the_first_engine_that_answers_is_used_unless_one_is_named(bin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(bin, "docker", "echo 27.1")
    program(bin, "podman", "echo 5.0")
    assert str(find_engine()) == "docker 27.1"
    find_engine.cache_clear()
    monkeypatch.setenv(CHOICE, "podman")
    assert str(find_engine()) == "podman 5.0"
    find_engine.cache_clear()
    monkeypatch.delenv(CHOICE)
    program(bin, "docker", "echo 'Cannot connect to the Docker daemon.' >&2; exit 1")
    assert str(find_engine()) == "podman 5.0"


def test_without_an_engine_the_reason_of_each_and_the_fix_are_one_line(
    bin: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program(bin, "docker", "echo; echo 'Cannot connect to the Docker daemon.' >&2; exit 1")
    where = Path(__file__).parents[1] / "harbor_tasks"
    assert main(["check", "--env", f"harbor:{where}"]) == 2
    assert capsys.readouterr().err == (
        "posttrain: no container can be started here: docker is installed and does not work (Cannot connect to the Docker "
        "daemon.); podman is not installed; start it, or install podman (on Debian and Ubuntu: apt install podman); tasks "
        "of a plain Debian, Ubuntu or Python need bubblewrap alone: programs that are not Python run in bubblewrap, which "
        "is not installed: install it (on Debian and Ubuntu: apt install bubblewrap), so that bwrap is found\n"
    )
    for name, told in {
        "pod": "POSTTRAIN_CONTAINERS is 'pod'; did you mean 'podman'?",
        "podman": "podman is not installed",
    }.items():
        monkeypatch.setenv(CHOICE, name)
        with pytest.raises(UserError) as refused:
            find_engine()
        assert told in str(refused.value)


def test_an_image_is_named_by_the_whole_content_of_its_folder(context: Path) -> None:
    seen = [folder_digest(context)]
    for change in (
        lambda: (context / "a").write_text("b\n"),
        lambda: (context / "a").chmod(0o755),
        lambda: (context / "a").rename(context / "b"),
        lambda: (context / "empty").mkdir(),
        lambda: (context / "link").symlink_to("b"),
    ):
        change()
        seen.append(folder_digest(context))
    assert len(set(seen)) == len(seen)


# -- commands ----------------------------------------------------------------------------------------------------------


def test_a_command_has_its_exit_code_both_streams_and_the_files_of_earlier_ones(
    engine: ContainerEngine, context: Path
) -> None:
    async def body(container: Container) -> Any:
        first = await container.run("cat a; echo err >&2; echo kept > b; exit 7", SECONDS)
        second = await container.run('cat b; echo "$X"', SECONDS, environment={"X": 'it\'s $HOME; "x"'})
        return first.exit, first.output, second.output

    assert inside(engine, context, body) == (7, b"a\nerr\n", b'kept\nit\'s $HOME; "x"\n')


def test_of_long_output_the_beginning_and_the_end_are_kept(engine: ContainerEngine, context: Path) -> None:
    command = "echo begins; head -c 300000 /dev/zero | tr '\\0' .; echo; echo ends"
    output = printed(engine, context, command, most=1000)
    assert output.startswith("begins\n...") and output.endswith("...\nends") and len(output) <= 1000


def test_a_container_that_ended_is_an_error(engine: ContainerEngine, context: Path) -> None:
    async def body(container: Container) -> None:
        await container.close()
        with pytest.raises(ContainerError, match="the container has ended"):
            await container.run("true", SECONDS)

    inside(engine, context, body)


def test_a_container_that_does_not_start_is_an_error_with_the_engines_reason(engine: ContainerEngine) -> None:
    async def begun() -> None:
        await Container.start(engine, "localhost/posttrain-no-such-image", ContainerLimits())

    with pytest.raises(ContainerError, match="the container does not start: ."):
        asyncio.run(begun())


# -- what only a real engine shows -------------------------------------------------------------------------------------


def test_a_container_has_no_network_and_sees_neither_files_nor_processes_of_this_machine(
    real: ContainerEngine, context: Path, tmp_path: Path
) -> None:
    assert (
        printed(real, context, "ip -o addr | grep -v ' lo ' | wc -l; ls /app; ps -o comm | head -2 | tail -1")
        == "0\na\ncat"
    )
    assert "No such file" in printed(real, context, f"ls {tmp_path}")


def test_a_container_keeps_to_its_memory_and_number_of_processes(real: ContainerEngine, context: Path) -> None:
    limits = ContainerLimits(memory=64, processes=20)
    assert "Killed" in printed(real, context, "head -c 200000000 /dev/zero | tail | wc -c", limits)
    forks = "for n in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25; do sleep 5 & done; wait"
    assert "fork" in printed(real, context, forks, limits)


def test_a_policy_cannot_end_its_container_and_a_stopped_command_leaves_no_process(
    real: ContainerEngine, context: Path
) -> None:
    async def body(container: Container) -> Any:
        await container.run("kill -9 1; kill 1; sleep 500 &", SECONDS)
        stopped = await container.run("sleep 501", 5)
        return stopped.over, (await container.run("ps -o args", SECONDS)).output.decode()

    over, processes = inside(real, context, body)
    assert over == "life" and "sleep 50" not in processes and "cat" in processes


def test_a_command_may_run_as_another_user_without_roots_rights(real: ContainerEngine, context: Path) -> None:
    assert printed(real, context, "id -u; touch /x || echo refused", user="1000").split("\n")[0] == "1000"
    assert "refused" in printed(real, context, "touch /x || echo refused", user="1000")


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_container_ends_with_its_process_however_that_ends(
    number: int, engine: ContainerEngine, context: Path
) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDS, str(context)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        name = holder.stdout.readline().strip()
        assert _exists(engine, context, name)
        remove_abandoned(engine)
        assert _exists(engine, context, name), "its owner is alive"
    finally:
        holder.send_signal(number)
        holder.communicate()
    end = time.monotonic() + SECONDS
    while _exists(engine, context, name) and time.monotonic() < end:
        time.sleep(0.1)
    assert not _exists(engine, context, name)


def _exists(engine: ContainerEngine, context: Path, name: str) -> bool:
    if engine.version == "0.stand-in":
        return name in stand_in_engine.containers(context.parent / "engine")
    return name in names(engine)


def test_what_a_dead_process_left_is_removed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen(["true"])
    own = containers._owner()
    home, _, _ = own.rpartition("/")[0].rpartition("/")
    gone.wait()
    with engine_of(STAND_IN, tmp_path, monkeypatch) as engine:
        for name, owner in {
            "ours": own,
            "dead": f"{home}/{gone.pid}/{own.rpartition('/')[2]}",
            "reused": f"{home}/{os.getpid()}/1",
            "elsewhere": f"another-start/1/{gone.pid}/1",
            "unknown": "x",
        }.items():
            (tmp_path / "engine" / "containers" / name).mkdir(parents=True)
            (tmp_path / "engine" / "containers" / name / "label").write_text(owner)
        assert remove_abandoned(engine) == 2
        assert stand_in_engine.containers(tmp_path / "engine") == ["elsewhere", "ours", "unknown"]
