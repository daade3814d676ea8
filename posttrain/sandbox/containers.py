"""Containers of Docker or Podman, in which a policy works and its tests run, through the engines' command line programs.

A container shares no file with this machine and has no network unless it is asked for. It lives as long as its
standard input: the `run` command stays attached, with a pipe that only this process holds. When this process ends, in
whatever way, the pipe closes, the container's first process reads the end and stops, and the engine removes the
container (`--rm`). Where the engine's helpers were killed too, a label names the owner, and `remove_abandoned` removes
containers whose owner is no longer there.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import io
import os
import resource
import secrets
import shutil
import signal
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from posttrain.core import user_files
from posttrain.core.messages import clip, inline, near_or_all
from posttrain.core.types import UserError
from posttrain.sandbox.bubblewrap import Finished

PROGRAMS = ("docker", "podman")  # in the order in which they are tried
SERVICES = {"e2b": "E2BSandbox", "daytona": "DaytonaSandbox", "modal": "ModalSandbox"}  # in `remote`, used if named
CHOICE = "POSTTRAIN_CONTAINERS"  # the environment variable that names one of them
OWNER = "posttrain.owner"  # the label of a container with the process that owns it
ANSWER_SECONDS = 20.0  # for an engine to answer a question
START_SECONDS = 120.0  # for a container to start, and for files to be copied
READY = "posttrain: the container is ready"
DROPPED = ("NET_RAW", "MKNOD", "AUDIT_WRITE")  # rights that engines give by default, and that no task needs
LONGEST_COMMAND = 100_000  # bytes: Linux passes at most 128 KiB as one argument

_CWD = tempfile.gettempdir()  # of the engine's program: Podman's monitor writes marks into the folder it starts in
_FIRST = f"echo '{READY}'; exec cat > /dev/null"
SHELL = 'exec 2>&1; command -v bash > /dev/null && exec bash -c "$0"; exec sh -c "$0"'
"""Runs its argument in bash if the image has it. Both streams are one, in the order of writing."""


class ContainerError(Exception):
    """The engine or the container failed; the message describes it."""


@dataclass(frozen=True)
class ContainerEngine:
    """An engine that answers."""

    program: str  # docker or podman
    version: str

    def __str__(self) -> str:
        return f"{self.program} {self.version}"


@dataclass(frozen=True)
class ContainerLimits:
    """Limits of one container."""

    memory: int = 2048  # MiB, of all its processes; no swap beyond it
    cpus: float = 1.0
    processes: int = 1024  # processes and threads
    network: bool = False
    life: float = 3600.0  # seconds, of a sandbox at a service; a container ends with its process


# -- the engine --------------------------------------------------------------------------------------------------------


@cache
def find_engine() -> ContainerEngine:
    """Return the engine that is installed and answers, or the one that POSTTRAIN_CONTAINERS names.

    Raises UserError, with the reason of each and the fix, if there is none.
    """
    chosen = os.environ.get(CHOICE)
    if chosen is not None and chosen not in PROGRAMS:
        raise UserError(f"{CHOICE} is {chosen!r}{near_or_all(chosen, [*PROGRAMS, *SERVICES])}")
    reasons = []
    for program in PROGRAMS if chosen is None else (chosen,):
        found = _tried(program)
        if isinstance(found, ContainerEngine):
            return found
        reasons.append(found)
    fix = "start it, or install podman (on Debian and Ubuntu: apt install podman)"
    raise UserError(f"no container can be started here: {'; '.join(reasons)}; {fix}")


def _tried(program: str) -> ContainerEngine | str:
    """Return the engine of a program, or the reason why it cannot be used."""
    if shutil.which(program) is None:
        return f"{program} is not installed"
    form = "{{.Server.Version}}" if program == "docker" else "{{.Client.Version}}"
    asked = [program, "version", "--format", form]
    if program == "podman":
        asked = [program, "info", "--format", "{{.Version.Version}}"]  # `version` answers without a working storage
    try:
        ran = subprocess.run(asked, capture_output=True, text=True, errors="replace", timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        return f"{program} does not answer within {ANSWER_SECONDS:g} s"
    except OSError as error:
        return f"{program} cannot be run ({error.strerror})"
    version = ran.stdout.strip()
    if ran.returncode == 0 and version and "\n" not in version:
        return ContainerEngine(program, version)
    return f"{program} is installed and does not work ({_last_line(ran.stderr or ran.stdout) or 'it gives no reason'})"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return clip(inline(lines[-1]), 200) if lines else ""


# -- images ------------------------------------------------------------------------------------------------------------


def folder_digest(folder: Path) -> str:
    """Return a hash of all files of a folder: names, rights to execute, contents, and targets of links."""
    found = hashlib.blake2b(digest_size=12)
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        kind = "l" if stat.S_ISLNK(mode) else "d" if stat.S_ISDIR(mode) else "x" if mode & stat.S_IXUSR else "f"
        content = os.readlink(path).encode() if kind == "l" else b"" if kind == "d" else user_files.content(path)
        for part in (kind.encode(), str(path.relative_to(folder)).encode(), content):
            found.update(len(part).to_bytes(8, "big") + part)
    return found.hexdigest()


@asynccontextmanager
async def locked_image(name: str) -> AsyncIterator[None]:
    """Let one process of this user at a time look for an image and build it."""
    lock = Path(tempfile.gettempdir()) / f"posttrain-image-{os.geteuid()}-{name}.lock"
    with user_files.opened(lock, "ab") as held:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            await asyncio.sleep(0.2)
        yield


async def built_image(engine: ContainerEngine, folder: Path, seconds: float) -> str:
    """Return the name of the image of a folder with a Dockerfile. It is built if this content never was.

    Processes that need the same image wait for the one that builds it. Raises ContainerError with the last line of the
    build.
    """
    digest = folder_digest(folder)
    name = f"localhost/posttrain-task:{digest}"
    async with locked_image(digest):
        if (await _called(engine, ["image", "inspect", name], ANSWER_SECONDS)).exit == 0:
            return name
        arguments = ["build", "--tag", name, "--file", str(folder / "Dockerfile"), str(folder)]
        built = await _called(engine, arguments, seconds)
    if built.over:
        raise ContainerError(f"the image was not built within {seconds:g} s")
    if built.exit:
        raise ContainerError(f"the image cannot be built: {_last_line(built.output.decode(errors='replace'))}")
    return name


# -- containers --------------------------------------------------------------------------------------------------------


class Container:
    """A running container. It belongs to one event loop, and ends with this process."""

    def __init__(self, engine: ContainerEngine, name: str, process: asyncio.subprocess.Process) -> None:
        """Use `start`."""
        self.engine, self.name = engine, name
        self._process = process

    @staticmethod
    async def start(
        engine: ContainerEngine, image: str, limits: ContainerLimits, environment: Mapping[str, str] | None = None
    ) -> Container:
        """Start a container of an image, which is pulled if this machine does not have it. Raises ContainerError."""
        name = f"posttrain-{secrets.token_hex(8)}"
        arguments = [*_run_arguments(name, limits, environment or {}), image, "sh", "-c", _FIRST]
        process = await _begun(engine, arguments, asyncio.subprocess.PIPE)
        container = Container(engine, name, process)
        try:
            async with asyncio.timeout(START_SECONDS):
                await container._wait_ready()
        except BaseException as error:
            await container.close()
            if isinstance(error, TimeoutError):
                raise ContainerError(f"the container did not start within {START_SECONDS:g} s") from None
            raise
        return container

    async def _wait_ready(self) -> None:
        assert self._process.stdout is not None
        shown = ""
        while line := (await self._process.stdout.readline()).decode(errors="replace"):
            if READY in line:
                return
            shown = line.strip() or shown
        raise ContainerError(f"the container does not start: {clip(inline(shown), 300) or 'it ends at once'}")

    @property
    def ended(self) -> bool:
        """Whether the container has stopped: everything in it is lost."""
        return self._process.returncode is not None

    async def run(
        self,
        command: str,
        seconds: float,
        *,
        user: str | None = None,
        folder: str | None = None,
        environment: Mapping[str, str] | None = None,
        most: int = 1 << 20,
    ) -> Finished:
        """Run a shell command, and return its exit code with its output, of which `most` bytes are kept.

        After `seconds` it is killed with every other process of the container. Raises ContainerError if the container
        has ended, or ends meanwhile.
        """
        arguments = ["exec", *(("--user", user) if user else ()), *(("--workdir", folder) if folder else ())]
        for name, value in (environment or {}).items():
            arguments += ["--env", f"{name}={value}"]
        found = await _called(self.engine, [*arguments, self.name, "sh", "-c", SHELL, command], seconds, most)
        if found.over == "life":
            await self._kill_all()
        if self.ended:
            raise ContainerError("the container has ended")
        return found

    async def copy_in(self, source: Path, target: str) -> None:
        """Copy the content of a folder of this machine into a folder of the container. Raises ContainerError."""
        copied = await _called(self.engine, ["cp", f"{source}/.", f"{self.name}:{target}"], START_SECONDS)
        if copied.exit or copied.over:
            reason = _last_line(copied.output.decode(errors="replace")) or "it takes too long"
            raise ContainerError(f"the files of {source.name} cannot be copied into the container: {reason}")

    async def close(self) -> None:
        """Remove the container, whatever runs in it. May be called twice."""
        assert self._process.stdin is not None
        self._process.stdin.close()  # it ends by this alone if nobody is left to remove it
        await asyncio.shield(self._removed())

    async def _removed(self) -> None:
        await _called(self.engine, ["rm", "--force", self.name], START_SECONDS)
        await _end(self._process)

    async def _kill_all(self) -> None:
        """Kill all processes but the first, which the system protects from its own container."""
        await _called(self.engine, ["exec", "--user", "0", self.name, "sh", "-c", "kill -9 -1"], ANSWER_SECONDS)


def _run_arguments(name: str, limits: ContainerLimits, environment: Mapping[str, str]) -> list[str]:
    """Return the arguments of the engine that start a container."""
    found = ["run", "--rm", "--interactive", "--name", name, "--label", f"{OWNER}={_owner()}"]
    found += ["--memory", f"{limits.memory}m", "--memory-swap", f"{limits.memory}m", "--cpus", f"{limits.cpus:g}"]
    found += ["--pids-limit", str(limits.processes), "--security-opt", "no-new-privileges"]
    for right in DROPPED:
        found += ["--cap-drop", right]
    if not limits.network:
        found += ["--network", "none"]
    for variable, value in environment.items():
        found += ["--env", f"{variable}={value}"]
    return found


async def _begun(engine: ContainerEngine, arguments: Sequence[str], stdin: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        engine.program,
        *arguments,
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        preexec_fn=_full_limits,
        cwd=_CWD,
    )


async def _called(engine: ContainerEngine, arguments: Sequence[str], seconds: float, most: int = 1 << 20) -> Finished:
    """Run the engine's program. Of long output the beginning and the end are kept, `most` bytes in all."""
    return await finished(await _begun(engine, arguments, asyncio.subprocess.DEVNULL), seconds, most)


async def finished(process: asyncio.subprocess.Process, seconds: float, most: int) -> Finished:
    """Wait for a program of which standard output is a pipe; kill it after `seconds`."""
    output, over = bytearray(), None
    try:
        async with asyncio.timeout(seconds):
            assert process.stdout is not None
            while more := await process.stdout.read(1 << 16):
                output += more
                if len(output) > most:
                    del output[most // 2 : len(output) - (most - most // 2)]
            await process.wait()
    except TimeoutError:
        over = "life"
    finally:
        await asyncio.shield(_end(process))
    code = process.returncode
    assert code is not None
    return Finished(code if code >= 0 else 128 - code, bytes(output), over)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the engine's program if it still runs, and close its pipes: `wait` would wait for others that hold them.

    The signal is sent directly, since `kill` and `close` of asyncio may take the exit code from asyncio's own watcher.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    transport: Any = process._transport  # type: ignore[attr-defined]  # asyncio gives no other way to its pipes
    for number in (0, 1):
        if (pipe := transport.get_pipe_transport(number)) is not None:
            pipe.close()
    await process.wait()


def _full_limits() -> None:
    """Lift the limit of memory of a worker of environments: Podman's containers would inherit it."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def packed(source: Path, name: str) -> bytes:
    """Return a file, or the content of a folder, as a tar archive of root's files. `name`: of the file, or "."."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as file:
        file.add(source, name, filter=_of_root)
    return archive.getvalue()


def _of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


# -- what earlier processes left ---------------------------------------------------------------------------------------


def remove_abandoned(engine: ContainerEngine) -> int:
    """Remove the containers of processes of this machine that are no longer there; return their number."""
    listed = _asked(
        engine, ["ps", "--all", "--filter", f"label={OWNER}", "--format", f'{{{{.ID}}}} {{{{.Label "{OWNER}"}}}}']
    )
    pairs = [line.split() for line in listed.splitlines()]
    gone = [pair[0] for pair in pairs if len(pair) == 2 and _is_abandoned(pair[1])]
    if gone:
        _asked(engine, ["rm", "--force", *gone])
    return len(gone)


def _asked(engine: ContainerEngine, arguments: Sequence[str]) -> str:
    with suppress(OSError, subprocess.TimeoutExpired):
        ran = subprocess.run(
            [engine.program, *arguments], capture_output=True, text=True, errors="replace", timeout=START_SECONDS
        )
        return ran.stdout if ran.returncode == 0 else ""
    return ""


def _owner() -> str:
    """Return a name of this process that no other one ever has: of the machine's start, of its numbers, of its own."""
    return f"{_home()}/{os.getpid()}/{_began(os.getpid())}"


def _home() -> str:
    """Return a name of the numbering of processes: the start of the machine, and the namespace of process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    started = _system_file(str(boot)) if boot.exists() else ""
    with suppress(OSError):
        return f"{started}/{os.readlink('/proc/self/ns/pid').strip('pid:[]')}"
    return f"{started}/"


def _began(pid: int) -> str | None:
    """Return when a process began, in the system's ticks; None if there is none of that number."""
    with suppress(OSError):
        return _system_file(f"/proc/{pid}/stat").rpartition(")")[2].split()[19]
    return None


def _system_file(path: str) -> str:
    """Return the text of a file of /proc, whose size the system gives as 0."""
    with user_files.opened(path) as file:
        return file.read().decode(errors="replace").strip()


def _is_abandoned(owner: str) -> bool:
    """Return whether the owner was a process of this machine that has ended."""
    home, _, process = owner.rpartition("/")[0].rpartition("/")
    began = owner.rpartition("/")[2]
    return home == _home() and process.isdecimal() and _began(int(process)) != began
