"""Sandboxes of services: what the real clients of E2B and Daytona send to a stand-in server, that Modal's client takes
every call, and that all of them behave as a container on this machine. No service was ever reached.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from sandbox_services import Seen, Server, put_modal_in_place

from posttrain.cli.main import main
from posttrain.core.types import UserError
from posttrain.sandbox import container_choice
from posttrain.sandbox.containers import CHOICE, SERVICES, ContainerError, ContainerLimits
from posttrain.sandbox.remote import remote_sandbox
from posttrain.sandbox.remote.remote_sandbox import RemoteSandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes run Linux, and so does their stand-in")
LIMITS = ContainerLimits(memory=2999, cpus=1.5, life=7199.5)  # none is a number that every service takes
KEYS = ("E2B_API_KEY", "DAYTONA_API_KEY", "DAYTONA_JWT_TOKEN", "MODAL_TOKEN_ID", "MODAL_OAUTH_REFRESH_TOKEN")


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """A folder with a Dockerfile."""
    folder = tmp_path / "environment"
    folder.mkdir()
    (folder / "Dockerfile").write_text("FROM debian:13\nCOPY data.txt .\n")
    (folder / "data.txt").write_text("1")
    return folder


@pytest.fixture(params=sorted(SERVICES))
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The name of a service, whose client is installed and has a key."""
    pytest.importorskip(request.param, reason=f"needs the client of {request.param}: pip install {request.param}")
    for name in KEYS:
        monkeypatch.setenv(name, "a-key")
    monkeypatch.setenv("MODAL_TOKEN_SECRET", "a-secret")
    monkeypatch.setenv(CHOICE, request.param)
    yield request.param


@asynccontextmanager
async def reached(service: str, patch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Server, Seen]]:
    """Let the client of a service reach its stand-in."""
    async with Server() as server:
        for name in ("E2B_API_URL", "E2B_SANDBOX_URL", "DAYTONA_API_URL"):
            patch.setenv(name, server.url)
        patch.setenv("E2B_HTTP_VERSION", "1.1")
        yield server, put_modal_in_place(patch) if service == "modal" else server.seen


def inside(
    service: str,
    patch: pytest.MonkeyPatch,
    source: Path | str,
    use: Callable[[RemoteSandbox], Coroutine[Any, Any, Any]],
    limits: ContainerLimits = LIMITS,
) -> tuple[Any, Server, Seen]:
    async def started() -> tuple[Any, Server, Seen]:
        async with reached(service, patch) as (server, seen):
            folder, image = (source, None) if isinstance(source, Path) else (Path("nowhere"), source)
            sandbox = await container_choice.start(image, folder, 60, limits, {"COLOUR": "blue"})
            assert isinstance(sandbox, RemoteSandbox)
            try:
                found = await use(sandbox)
            finally:
                await sandbox.close()
            return found, server, seen

    return asyncio.run(started())


# -- what is sent ------------------------------------------------------------------------------------------------------


async def nothing(sandbox: RemoteSandbox) -> None:
    pass


def test_e2b_builds_a_template_once_for_an_image_with_its_limits(
    context: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("e2b", reason="needs the client of E2B: pip install e2b")
    monkeypatch.setenv("E2B_API_KEY", "a-key")
    monkeypatch.setenv(CHOICE, "e2b")
    (context / "Dockerfile").write_text("FROM debian:13\nRUN touch /a\n")
    _, server, _ = inside("e2b", monkeypatch, context, nothing)
    asked, built = server.sent("POST /v3/templates"), server.sent("POST /v2/templates/t/builds/b")
    assert (asked["cpuCount"], asked["memoryMB"], built["fromImage"]) == (2, 3000, "debian:13")
    assert asked["name"].startswith("posttrain-") and asked["name"].endswith("-2-3000")
    made = server.sent("POST /v2/sandboxes")
    assert (made["templateID"], made["timeout"], made["envVars"]) == (asked["name"], 7200, {"COLOUR": "blue"})
    assert made["allow_internet_access"] is False
    assert [name for name, _ in server.seen][-1] == "DELETE /sandboxes/s1"

    async def known() -> list[str]:
        async with reached("e2b", monkeypatch) as (other, seen):
            other.built = True
            await (await container_choice.start("debian:13", context, 60, ContainerLimits(network=True), {})).close()
            assert other.sent("POST /v2/sandboxes")["allow_internet_access"] is True
            return [name.split("/posttrain")[0] for name, _ in seen]

    assert asyncio.run(known()) == ["GET /templates/aliases", "POST /v2/sandboxes", "DELETE /sandboxes/s1"]


def test_daytona_gets_the_dockerfile_the_limits_and_a_longest_life(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("daytona", reason="needs the client of Daytona: pip install daytona")
    monkeypatch.setenv("DAYTONA_API_KEY", "a-key")
    monkeypatch.setenv(CHOICE, "daytona")
    _, server, _ = inside("daytona", monkeypatch, "debian:13", nothing)
    made = server.sent("POST /sandbox")
    assert made["buildInfo"]["dockerfileContent"].strip() == "FROM debian:13"
    assert (made["cpu"], made["memory"], made["user"], made["env"]) == (2, 3, "root", {"COLOUR": "blue"})
    assert made["networkBlockAll"] is True
    assert (made["ttlMinutes"], made["autoStopInterval"], made["autoDeleteInterval"]) == (120, 0, 0)
    assert "DELETE /sandbox/s1" in dict(server.seen)
    _, server, _ = inside("daytona", monkeypatch, "debian:13", nothing, ContainerLimits(network=True))
    assert server.sent("POST /sandbox")["networkBlockAll"] is False


@pytest.mark.parametrize("folder", [True, False])
def test_modal_takes_every_call_by_its_signature(folder: bool, context: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("modal", reason="needs the client of Modal: pip install modal")
    monkeypatch.setenv("MODAL_TOKEN_ID", "a-key")
    monkeypatch.setenv(CHOICE, "modal")
    with monkeypatch.context() as patch:
        _, _, seen = inside("modal", patch, context if folder else "debian:13", nothing)
    names = [name for name, _ in seen]
    image = "from_dockerfile" if folder else "from_registry"
    assert names == [image, "lookup", "create", "terminate", "detach"]
    asked = dict(seen)["create"]
    assert asked[0] == ("sleep", "7200") and asked[1]["app"] == "the app"
    limits = [asked[1][name] for name in ("cpu", "memory", "timeout", "block_network", "env")]
    assert limits == [(1.5, 1.5), (2999, 2999), 7200, True, {"COLOUR": "blue"}]
    *_, seen = inside("modal", monkeypatch, "debian:13", nothing, ContainerLimits(network=True))
    assert dict(seen)["create"][1]["block_network"] is False


# -- what comes of it --------------------------------------------------------------------------------------------------


def test_a_command_has_its_exit_code_both_streams_its_folder_and_variables(
    service: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def use(sandbox: RemoteSandbox) -> list[Any]:
        told = await sandbox.run(
            'pwd; echo "it\'s $SHAPE"; echo wrong >&2; exit 3',
            20,
            folder=str(tmp_path),
            environment={"SHAPE": "a 'round' one"},
        )
        long = await sandbox.run("seq 100000", 20, most=100)
        return [told, long, await sandbox.run("x" * 200_000, 20)]

    (told, long, refused), _, _ = inside(service, monkeypatch, "debian:13", use)
    assert (told.exit, told.over) == (3, None)
    assert told.output.decode() == f"{tmp_path}\nit's a 'round' one\nwrong\n"
    assert long.output.startswith(b"1\n2\n") and long.output.endswith(b"\n100000\n") and len(long.output) == 100
    assert (refused.exit, refused.output) == (126, b"the command is too long\n")


def test_a_command_ends_at_its_limit_with_what_it_printed_and_holds_its_call_no_longer(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(sandbox: RemoteSandbox) -> list[Any]:
        stopped = await sandbox.run("echo before; sleep 60", 1)
        began = time.monotonic()
        left = await sandbox.run("sleep 40 & echo at once", 60)
        assert time.monotonic() - began < 30, "a process that stays behind does not hold the call"
        return [stopped, left, await sandbox.run("kill -9 $$", 20)]

    (stopped, left, killed), _, _ = inside(service, monkeypatch, "debian:13", use)
    assert (stopped.over, stopped.output) == ("life", b"before\n")
    assert (left.over, left.output) == (None, b"at once\n")
    assert (killed.over, killed.exit) == (None, 137), "killed for another reason than its time"


def test_without_the_program_timeout_the_services_own_limit_ends_a_command(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_sandbox, "GRACE_SECONDS", 1.0)
    monkeypatch.setattr(remote_sandbox, "_SCRIPT", remote_sandbox._SCRIPT.replace("command -v timeout", "false"))

    async def use(sandbox: RemoteSandbox) -> Any:
        return await sandbox.run("sleep 5", 1), await sandbox.run("echo alive", 5)

    (stopped, after), _, _ = inside(service, monkeypatch, "debian:13", use)
    assert (stopped.over, after.output) == ("life", b"alive\n")


def test_a_sandbox_that_is_gone_is_a_fault_and_no_limit_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("e2b", reason="needs the client of E2B: pip install e2b")
    monkeypatch.setenv("E2B_API_KEY", "a-key")
    monkeypatch.setenv(CHOICE, "e2b")
    monkeypatch.setattr(remote_sandbox, "GRACE_SECONDS", 1.0)
    monkeypatch.setattr(remote_sandbox, "_SCRIPT", remote_sandbox._SCRIPT.replace("command -v timeout", "false"))

    async def asked() -> None:
        async with reached("e2b", monkeypatch) as (server, _):
            sandbox = await container_choice.start("debian:13", Path("nowhere"), 60, LIMITS, {})
            server.gone = True
            await sandbox.run("sleep 5", 1)

    with pytest.raises(ContainerError, match="E2B does not run a command: "):
        asyncio.run(asked())


def test_files_arrive_with_their_rights(service: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source, target = tmp_path / "tests", tmp_path / "inside" / "tests"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "run.sh").write_text("echo ran")
    (source / "deep" / "run.sh").chmod(0o755)

    async def use(sandbox: RemoteSandbox) -> Any:
        await sandbox.copy_in(source, str(target))
        with pytest.raises(ContainerError, match="the files of tests cannot be copied into the sandbox: "):
            await sandbox.copy_in(source, "/proc/none")
        return await sandbox.run(f"{target}/deep/run.sh", 20)

    ran, _, _ = inside(service, monkeypatch, "debian:13", use)
    assert ran.output == b"ran\n"


@pytest.mark.skipif(shutil.which("su") is None or os.geteuid() != 0, reason="needs su, and root as in a sandbox")
@pytest.mark.parametrize("user", ["nobody", "65534"])
def test_another_user_is_asked_of_su_in_the_image(user: str, tmp_path: Path) -> None:
    text = remote_sandbox.script(5, user, "/", {"SHAPE": "a 'round' one"}, 1000)
    ran = subprocess.run(["sh", "-c", text, 'id -un; echo "$SHAPE"; exit 4'], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (4, "nobody\na 'round' one\n")


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_without_the_client_or_a_key_the_fix_is_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for key in (*KEYS, "MODAL_CONFIG_PATH"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(CHOICE, name)
    asked = ["check", "--env", f"harbor:{Path(__file__).parents[1] / 'harbor_tasks'}"]
    monkeypatch.setattr(remote_sandbox, "installed", lambda library: False)
    assert main(asked) == 2
    (told,) = capsys.readouterr().err.strip().splitlines()
    assert f"is not installed: pip install '{name}>=" in told
    monkeypatch.setattr(remote_sandbox, "installed", lambda library: True)
    assert main(asked) == 2
    (told,) = capsys.readouterr().err.strip().splitlines()
    assert "there is no key for " in told and ("API_KEY" in told or "MODAL_TOKEN_ID" in told)


def test_a_refused_account_is_a_users_error_and_another_fault_the_containers(
    monkeypatch: pytest.MonkeyPatch, context: Path
) -> None:
    for name, said in (("e2b", "E2B refuses this account"), ("daytona", "Daytona refuses this account")):
        pytest.importorskip(name, reason=f"needs the client of {name}: pip install {name}")
        monkeypatch.setenv("E2B_API_KEY", "a-key")
        monkeypatch.setenv("DAYTONA_API_KEY", "a-key")
        monkeypatch.setenv(CHOICE, name)

        async def asked(name: str = name) -> None:
            async with reached(name, monkeypatch) as (server, _):
                server.refuses = True
                await container_choice.start("debian:13", context, 60, LIMITS, {})

        with pytest.raises(UserError, match=said):
            asyncio.run(asked())
    for name in ("E2B_API_URL", "DAYTONA_API_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with pytest.raises(ContainerError, match="Daytona starts no sandbox: "):
        asyncio.run(container_choice.start("debian:13", context, 60, LIMITS, {}))


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_refusals_are_exceptions_of_the_client(name: str) -> None:
    errors = {"e2b": "e2b.exceptions", "daytona": "daytona", "modal": "modal.exception"}[name]
    known = pytest.importorskip(errors, reason=f"needs the client of {name}: pip install {name}")
    kind = getattr(import_module(f"posttrain.sandbox.remote.{name}_sandbox"), SERVICES[name])
    assert kind.REFUSALS
    for refusal in kind.REFUSALS:
        with pytest.raises(UserError, match=f"{kind.SERVICE} refuses this account"), kind._reported("is away"):
            raise getattr(known, refusal)("no")
