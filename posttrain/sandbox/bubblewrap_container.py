"""A container made of bubblewrap's jails, for images whose programs this machine has.

Its files are a folder of this machine, which is the root of every command's jail. /usr is this machine's, read-only; /bin,
/lib and the like are mounted anew for each command, so no command can change the programs of the next. There is no network.
A process ends with the command that started it.
"""

from __future__ import annotations

import asyncio
import io
import os
import resource
import secrets
import shlex
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from posttrain.core.messages import clip, inline
from posttrain.core.types import UserError
from posttrain.sandbox import bubblewrap, capabilities, filesystem, seccomp
from posttrain.sandbox.bubblewrap import SYSTEM, Finished
from posttrain.sandbox.containers import SHELL, START_SECONDS, ContainerError, ContainerLimits, finished, packed
from posttrain.sandbox.jail import NOBODY
from posttrain.sandbox.plain_images import PATH, ImageStep, PlainImage, python_version, read_plain_image

NAME = "bubblewrap"
LARGEST_FILE = 1 << 30  # bytes
DESCRIPTORS = 1024
PROCESSES = 128  # processes and threads of a command; each of them may have the memory of a container
HOME, PYTHON = "/root", "/opt/python/bin"  # images of Python have `python`, which Debian and Ubuntu call python3
_ACCOUNTS = {"passwd": f"root:x:0:0:root:{HOME}:/bin/sh\n", "group": "root:x:0:\n"}
_PLACE = 'case {to} in */) mkdir -p {to};; *) mkdir -p "$(dirname {to})";; esac && {move} && rm -rf {from_}'


class BubblewrapContainer:
    """Files, and jails that share them. It belongs to one event loop."""

    def __init__(self, base: Path, held: int, limits: ContainerLimits) -> None:
        """Use `start`. `base`: a folder for it; `held`: the descriptor whose lock marks its owner as alive."""
        self.root, self.limits = base / "root", limits
        self._held = held
        self._folder = "/"
        self._variables = {"PATH": f"{PATH}:{PYTHON}", "HOME": HOME, "LANG": "C.UTF-8"}

    @staticmethod
    def unusable() -> str | None:
        """Return the reason why no jail can be made here; None if one can."""
        try:
            bubblewrap.check()
        except UserError as error:
            return str(error)
        return None

    @staticmethod
    def check(source: Path | str, network: bool, users: Iterable[str | None] = ()) -> PlainImage:
        """Return the image. Raises UserError for one that needs other programs, a network or another user than root."""
        if network:
            raise UserError("task.toml asks for a network")
        if others := [user for user in users if user not in (None, "0", "root")]:
            raise UserError(f"task.toml asks for the user {others[0]}")
        return read_plain_image(source)

    @classmethod
    async def start(
        cls, source: Path | str, build_seconds: float, limits: ContainerLimits, environment: Mapping[str, str]
    ) -> BubblewrapContainer:
        """Start a container of an image's name, or of a folder with a Dockerfile. Raises ContainerError, UserError."""
        if limits.network:
            raise ContainerError("jails of bubblewrap have no network: leave it out, or use Docker or Podman")
        image = read_plain_image(source)
        base, held = capabilities.held_folder(0o711 if os.geteuid() == 0 else 0o700)
        container = cls(Path(base), held, limits)
        try:
            container._furnish()
            async with asyncio.timeout(build_seconds):
                for step in image.steps:
                    await container._build(step, build_seconds)
        except BaseException as error:
            await container.close()
            if isinstance(error, TimeoutError):
                raise ContainerError(f"the image was not built within {build_seconds:g} s") from None
            raise
        container._folder = image.folder
        container._variables |= {**image.variables, **environment}
        return container

    def _furnish(self) -> None:
        """Make the folders and files that every system has."""
        for name, mode in {"tmp": 0o1777, "var/tmp": 0o1777, "etc": 0o755, HOME[1:]: 0o700, PYTHON[1:]: 0o755}.items():
            (self.root / name).mkdir(parents=True)
            (self.root / name).chmod(mode)
        for name, content in _ACCOUNTS.items():
            (self.root / "etc" / name).write_text(content)
        if python := shutil.which("python3", path=PATH):
            (self.root / PYTHON[1:] / "python").symlink_to(python)
        if os.geteuid() == 0:
            for path in (self.root, *self.root.rglob("*")):
                os.chown(path, NOBODY, NOBODY, follow_symlinks=False)

    async def _build(self, step: ImageStep, seconds: float) -> None:
        """Carry out a line of the Dockerfile. Raises ContainerError with the line."""
        if not (step.sources or step.command):
            ran = await self.run(f"mkdir -p {shlex.quote(step.folder)}", START_SECONDS)
        for source in step.sources:
            place, to = f"/tmp/posttrain-{secrets.token_hex(8)}", shlex.quote(step.target)
            ran = await self._unpacked(packed(source, "." if source.is_dir() else source.name), place)
            move = f"mkdir -p {to} && cp -r {place}/. {to}" if source.is_dir() else f"cp {place}/* {to}"
            ran = ran if ran.exit else await self.run(_PLACE.format(to=to, move=move, from_=place), START_SECONDS)
        if step.command:
            ran = await self.run(step.command, seconds, folder=step.folder, environment=step.variables)
        if ran.exit or ran.over:
            told = clip(inline(ran.output.decode(errors="replace").strip()[-200:]), 200) or f"exit code {ran.exit}"
            raise ContainerError(f"{step.where}{clip(inline(step.command), 80)}: {told}")

    async def run(
        self,
        command: str,
        seconds: float,
        *,
        user: str | None = None,
        folder: str | None = None,
        environment: Mapping[str, str] | None = None,
        most: int = 1 << 20,
        stdin: int = asyncio.subprocess.DEVNULL,
    ) -> Finished:
        """Run a shell command, and return its exit code with its output, of which `most` bytes are kept.

        After `seconds` it is killed with every process that it started. Only root is there as `user`.
        """
        variables = {**self._variables, **(environment or {})}
        inner = ["/bin/sh", "-c", bubblewrap.WITH_LIMIT, str(PROCESSES), "/bin/sh", "-c", SHELL, command]
        with ExitStack() as opened:
            filter = os.memfd_create("posttrain")
            opened.callback(os.close, filter)
            os.write(filter, seccomp.program(processes=True, commands=True))
            os.lseek(filter, 0, os.SEEK_SET)
            process = await asyncio.create_subprocess_exec(
                *self._arguments(variables, folder or self._folder, filter),
                "--",
                *inner,
                stdin=stdin,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=[filter],
                preexec_fn=self._limit,
                env={},
                **_owner(),
            )
        return await finished(process, seconds, most)

    def _arguments(self, variables: Mapping[str, str], folder: str, filter: int) -> list[str]:
        """Return the arguments of bwrap."""
        wrapper = shutil.which("bwrap")
        assert wrapper is not None
        found = [wrapper, "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
        found += ["--uid", "0", "--gid", "0", "--hostname", "task", "--bind", str(self.root), "/"]
        for path in SYSTEM:
            if os.path.exists(path):
                found += ["--ro-bind", os.path.realpath(path), path]
        found += ["--ro-bind", "/dev/null", "/etc/ld.so.preload", "--proc", "/proc", "--dev", "/dev"]
        for name, value in variables.items():
            found += ["--setenv", name, value]
        return [*found, "--seccomp", str(filter), "--chdir", folder]

    def _limit(self) -> None:
        most = {
            resource.RLIMIT_AS: self.limits.memory << 20,
            resource.RLIMIT_FSIZE: LARGEST_FILE,
            resource.RLIMIT_NOFILE: DESCRIPTORS,
            resource.RLIMIT_CORE: 0,
        }
        for kind, value in most.items():
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))

    async def copy_in(self, source: Path, target: str) -> None:
        """Copy the content of a folder of this machine into a folder of the container. Raises ContainerError."""
        ran = await self._unpacked(packed(source, "."), target)
        if ran.exit or ran.over:
            reason = clip(inline(ran.output.decode(errors="replace").strip()), 200)
            raise ContainerError(f"the files of {source.name} cannot be copied into the container: {reason}")

    async def _unpacked(self, archive: bytes, target: str) -> Finished:
        folder = shlex.quote(target)
        with os.fdopen(os.memfd_create("posttrain"), "w+b") as file:
            file.write(archive)
            file.seek(0, io.SEEK_SET)
            unpack = f"mkdir -p {folder} && tar -x --no-same-owner -f - -C {folder}"
            return await self.run(unpack, START_SECONDS, stdin=file.fileno())

    async def close(self) -> None:
        """Delete the files. May be called twice."""
        if self._held >= 0:
            filesystem.remove(str(self.root.parent))
            os.close(self._held)
            self._held = -1


def _owner() -> dict[str, Any]:
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


def about_machine() -> str:
    """Describe the programs that all these containers have."""
    with open("/etc/os-release") as file:
        told = dict(line.strip().split("=", 1) for line in file if "=" in line)
    system = told.get("PRETTY_NAME", "Linux").strip('"')
    return f"bubblewrap, with the programs of this machine ({system}, Python {python_version() or 'none'})"
