"""Tasks of plain images run in jails of bubblewrap where there is no engine; others are refused with their line."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from container_engines import forget_engines

from posttrain.cli.main import main
from posttrain.core.types import UserError
from posttrain.sandbox import capabilities
from posttrain.sandbox.bubblewrap_container import BubblewrapContainer
from posttrain.sandbox.containers import CHOICE, ContainerError, ContainerLimits
from posttrain.sandbox.plain_images import PATH, python_version, read_plain_image

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="jails are Linux's")
SET = Path(__file__).parents[1] / "plain_tasks"
LIMITS = ContainerLimits(memory=256)


@pytest.fixture
def jails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where the jails' folders are; the test is skipped where none can be made."""
    if (reason := BubblewrapContainer.unusable()) is not None:
        pytest.skip(reason)
    place = Path("/tmp") / f"posttrain-test-{os.getpid()}"  # the parents of pytest's own are closed to other users
    place.mkdir(mode=0o755)
    monkeypatch.setattr("tempfile.tempdir", str(place))
    monkeypatch.setenv(CHOICE, "bubblewrap")
    forget_engines()
    yield place
    forget_engines()
    assert list(place.iterdir()) == [], "every container's files are deleted with it"
    place.rmdir()


def inside(body: Callable[[BubblewrapContainer], Coroutine[Any, Any, Any]], source: Path | str = "debian:12") -> Any:
    """The result of a function of a container."""

    async def run() -> Any:
        container = await BubblewrapContainer.start(source, 60, LIMITS, {"COLOUR": "blue"})
        try:
            return await body(container)
        finally:
            await container.close()

    return asyncio.run(run())


def printed(*commands: str, source: Path | str = "debian:12") -> list[str]:
    """Return the outputs of commands that run in one container, in their order."""

    async def body(container: BubblewrapContainer) -> list[str]:
        return [(await container.run(command, 30)).output.decode() for command in commands]

    found: list[str] = inside(body, source)
    return found


def context(tmp_path: Path, dockerfile: str, **files: str) -> Path:
    folder = tmp_path / "environment"
    folder.mkdir(exist_ok=True)
    (folder / "Dockerfile").write_text(dockerfile)
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder


# -- what is read ------------------------------------------------------------------------------------------------------


def test_folders_files_variables_and_commands_are_taken_over_in_their_order(tmp_path: Path) -> None:
    folder = context(
        tmp_path,
        "# syntax=docker/dockerfile:1\nFROM docker.io/library/ubuntu:24.04 as base\nENV A=1 \\\n  # within\n  B='x y'\n"
        "ENV PATH=/app/bin:$PATH\nWORKDIR /app\nWORKDIR ${A}\nCOPY a.txt b.txt to\nRUN mkdir here && \\\n  ls\nUSER root\n"
        'CMD ["sh"]\n',
        **{"a.txt": "a", "b.txt": "b"},
    )
    image = read_plain_image(folder)
    assert image.variables == {"A": "1", "B": "x y", "PATH": f"/app/bin:{PATH}"} and image.folder == "/app/1"
    made, inner, copied, ran = image.steps
    assert (made.folder, inner.folder) == ("/app", "/app/1")
    assert copied.target == "/app/1/to/" and [path.name for path in copied.sources] == ["a.txt", "b.txt"]
    assert ran.command.split() == ["mkdir", "here", "&&", "ls"] and ran.where == f"{folder / 'Dockerfile'}:10: "


@pytest.mark.parametrize(
    ("dockerfile", "told"),
    {
        "FROM debian\nRUN apt-get update \\\n && apt-get install -y vim\n": ":2: RUN apt-get update",
        "FROM debian\nRUN true && pip install numpy\n": ":2: RUN true && pip install numpy",
        "FROM node:22\n": ":1: FROM node:22 (not debian, ubuntu or python)",
        "FROM python:3-alpine\n": ":1: FROM python:3-alpine (not debian, ubuntu or python)",
        "FROM python:2.7\n": f":1: FROM python:2.7 (has Python {python_version()} in /usr here)",
        "FROM debian AS a\n\nFROM debian\n": ":3: FROM debian (one FROM, in the first line)",
        "ARG A=1\nFROM debian\n": ":1: ARG A=1 (one FROM",
        "FROM debian\nCOPY none .\n": ":2: COPY none . (no such file in environment)",
        "FROM debian\nCOPY --from=a /x /x\n": ":2: COPY --from=a /x /x",
        "FROM debian\nCOPY ../x /x\n": ":2: COPY ../x /x",
        "FROM debian\nUSER worker\n": ":2: USER worker",
        "FROM debian\nENTRYPOINT sh\n": ":2: ENTRYPOINT sh",
        "FROM debian\nRUN <<END\nls\nEND\n": ":2: RUN <<END",
        "FROM debian\nWORKDIR ${A:-/x}\n": ":2: WORKDIR ${A:-/x} (such variables are not read)",
        "FROM debian\nENV A\n": ":2: ENV A",
    }.items(),
)
def test_a_line_that_needs_another_image_is_refused_with_its_number(dockerfile: str, told: str, tmp_path: Path) -> None:
    if python_version() is None and "python:2" in dockerfile:
        told = ":1: FROM python:2.7 (has none in /usr here)"
    with pytest.raises(UserError) as refused:
        read_plain_image(context(tmp_path, dockerfile))
    assert told in str(refused.value) and "\n" not in str(refused.value)


# -- whole tasks -------------------------------------------------------------------------------------------------------


def test_check_proves_a_task_in_a_jail(jails: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if python_version() is None:
        pytest.skip("needs a Python in /usr")
    assert main(["check", "--env", f"harbor:{SET}"]) == 0
    shown = capsys.readouterr().out
    assert "containers: bubblewrap, with the programs of this machine" in shown
    assert "1 of 1 solutions get full reward\n1 of 1 tasks give no full reward for doing nothing" in shown


def test_without_an_engine_a_task_that_needs_more_is_refused_in_one_line(
    jails: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker, online = '[agent]\nuser = "worker"\n', '[environment]\nnetwork_mode = "public"\n'
    for number, (run, toml, told) in enumerate(
        (
            ("apt-get install -y vim", "", "{file}:2: RUN apt-get install -y vim"),
            ("ls", worker, "task.toml asks for the user worker"),
            ("ls", online, "task.toml asks for a network"),
        )
    ):
        task = tmp_path / str(number) / "edit"
        (task / "tests").mkdir(parents=True)
        for name, content in {"task.toml": toml, "instruction.md": "Edit.", "tests/test.sh": ""}.items():
            (task / name).write_text(content)
        file = context(task, f"FROM debian\nRUN {run}\n") / "Dockerfile"
        assert main(["check", "--env", f"harbor:{task.parent}"]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith(f"posttrain: task edit: {told.format(file=file)}: this needs a container"), said


# -- containers --------------------------------------------------------------------------------------------------------


def test_files_stay_from_command_to_command_and_nothing_else_does(jails: Path) -> None:
    first, second, third = printed(
        "echo kept > /root/file; (sleep 60 &); cd /tmp; X=1; echo $COLOUR", "cat /root/file; pwd; echo [$X]; id -u",
        "cat /proc/[0-9]*/comm | grep -c sleep",
    )  # fmt: skip
    assert (first, second, third) == ("blue\n", "kept\n/\n[]\n0\n", "0\n")


def test_a_command_sees_no_file_of_this_machine_and_no_network(jails: Path) -> None:
    listed, own, network = printed(
        "ls -d / /home /work /etc/shadow " + str(Path(__file__)), "cat /etc/passwd",
        "exec 3<>/dev/tcp/127.0.0.1/80 || cat /proc/net/dev",
    )  # fmt: skip
    assert listed.count("No such file or directory") == 4 and own == "root:x:0:0:root:/root:/bin/sh\n"
    assert "eth" not in network and "Operation not permitted" in network


def test_no_command_changes_the_programs_of_the_next(jails: Path) -> None:
    forged = "echo forged > /tmp/sh; rm -rf /bin; mv /bin /b; mkdir /bin; cp /tmp/sh /bin/sh; cp /tmp/sh /usr/bin/ls"
    _, after = printed(
        f"{forged}; mv /etc /other; mkdir /etc; echo /tmp/sh > /etc/ld.so.preload", "sh -c 'echo real'; ls /"
    )
    assert after.startswith("real\n") and "bin" in after and "forged" not in after


def test_time_memory_processes_and_output_are_limited(jails: Path) -> None:
    async def body(container: BubblewrapContainer) -> None:
        slow = await container.run("sleep 60", 1.0)
        assert slow.over == "life"
        large = await container.run("head -c 400000000 /dev/zero | sort -S 390M | wc -c", 30)
        assert b"memory" in large.output
        many = await container.run("for i in $(seq 300); do sleep 5 & done; jobs | wc -l", 20)
        assert b"Resource temporarily unavailable" in many.output
        long = await container.run("yes | head -c 3000000; exit 3", 30, most=1000)
        assert long.exit == 3 and len(long.output) <= 1000

    inside(body)


def test_files_that_are_copied_in_cannot_leave_through_a_link(jails: Path, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test.sh").write_text("echo ran")
    (tmp_path / "tests" / "test.sh").chmod(0o755)
    outside = jails / "outside"

    async def body(container: BubblewrapContainer) -> None:
        await container.run(f"ln -s {outside} /tests; ln -s ../../.. up", 10)
        with pytest.raises(ContainerError, match="cannot be copied"):
            await container.copy_in(tmp_path / "tests", "/tests")
        await container.copy_in(tmp_path / "tests", f"/up{outside}")
        assert (await container.run(f"{outside}/test.sh", 10)).output == b"ran\n"

    inside(body)
    assert not outside.exists()


def test_lines_of_a_dockerfile_do_what_docker_does(jails: Path, tmp_path: Path) -> None:
    folder = context(
        tmp_path,
        "FROM debian\nWORKDIR /app\nCOPY a.txt .\nCOPY a.txt new/b.txt\nCOPY a.txt b.txt both\nCOPY data kept/\nENV A=1\n"
        "RUN echo $A > c.txt\nWORKDIR data\n",
        **{"a.txt": "a", "b.txt": "b"},
    )
    (folder / "data").mkdir()
    (folder / "data" / "d.txt").write_text("d")
    found, place = printed("cd /app; find . -type f | sort; cat c.txt", "pwd", source=folder)
    assert found.split() == ["./a.txt", "./both/a.txt", "./both/b.txt", "./c.txt", "./kept/d.txt", "./new/b.txt", "1"]
    assert place == "/app/data\n"
    with pytest.raises(ContainerError, match=r"Dockerfile:2: cat none: cat: none: No such file"):
        printed(source=context(tmp_path, "FROM debian\nRUN cat none\n"))


def test_files_of_a_killed_owner_are_deleted_later(jails: Path) -> None:
    left = jails / f"{capabilities.PREFIX}{os.geteuid()}-left"
    (left / "root" / "app").mkdir(parents=True)
    if os.geteuid() == 0:
        os.chown(left / "root", 65534, 65534)
    main(["check", "--env", f"harbor:{SET}"])
    assert not left.exists()
