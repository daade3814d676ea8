"""A sandbox of a service, with the methods of a container on this machine.

A service's client runs one shell command at a time and uploads bytes. Everything else is a script around the policy's
command: another user, the folder, the variables, the limit of time, and the bounds of the output. So all services
behave alike, and a command that leaves a process behind does not hold its own call.

The sandbox has a longest life, after which the service deletes it: nothing else does if this process is killed.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from posttrain.core.extras import install, installed
from posttrain.core.messages import clip, inline
from posttrain.core.types import UserError
from posttrain.sandbox.bubblewrap import Finished
from posttrain.sandbox.containers import LONGEST_COMMAND, START_SECONDS, ContainerError, ContainerLimits, packed

GRACE_SECONDS = 15.0  # beyond a command's limit, for the service to answer
KILLED = 137  # the exit code of a command that was killed
_TOO_LONG = Finished(126, b"the command is too long\n", None)

_SCRIPT = """\
output=$(mktemp) || exit 125
shell=$(command -v bash || command -v sh)
if command -v timeout > /dev/null; then limit="timeout -s KILL {seconds}"; fi
({prepare}{run}) > "$output" 2>&1 < /dev/null
code=$?
if [ $(wc -c < "$output") -le {most} ]; then cat "$output"; else head -c {half} "$output"; tail -c {half} "$output"; fi
rm -f "$output"
exit $code"""
_AS_IT_IS = '$limit "$shell" -c "$0"'
_AS_USER = 'su -s "$shell" -c "exec $limit \\"$shell\\" -c \\"\\$0\\"" {user} "$0"'


class RemoteSandbox(ABC):
    """A running sandbox of a service. It belongs to one event loop."""

    SERVICE: ClassVar[str]
    LIBRARY: ClassVar[str]  # of the client, and the extra that installs it
    KEY: ClassVar[str]  # what a user sets, in words
    VARIABLES: ClassVar[tuple[str, ...]]  # environment variables, one of which holds it
    REFUSALS: ClassVar[tuple[str, ...]]  # the client's exceptions of an account that may not do this

    def __init__(self, sandbox: Any) -> None:
        """Use `start`. `sandbox`: one that the client created."""
        self._sandbox = sandbox

    # -- what a service's client does

    @classmethod
    def has_key(cls) -> bool:
        """Return whether this machine has a key of the service. Asks nobody."""
        return any(os.environ.get(name) for name in cls.VARIABLES)

    @classmethod
    @abstractmethod
    async def _create(
        cls, source: Path | str, seconds: float, limits: ContainerLimits, environment: Mapping[str, str]
    ) -> RemoteSandbox:
        """Create a sandbox of an image's name, or of a folder with a Dockerfile, in which commands run as root."""

    @abstractmethod
    async def _execute(self, words: list[str], seconds: int) -> tuple[int, bytes] | None:
        """Run a program, and return its exit code and output; None if it had not ended after `seconds`."""

    @abstractmethod
    async def _upload(self, content: bytes, path: str) -> None:
        """Write a file."""

    @abstractmethod
    async def _delete(self) -> None:
        """Delete the sandbox."""

    # -- what a container does

    @classmethod
    def check(cls) -> None:
        """Raise UserError, with the fix, without the client or a key."""
        if not installed(cls.LIBRARY):
            raise UserError(f"the client of {cls.SERVICE} is not installed: {install(cls.LIBRARY)}")
        if not cls.has_key():
            raise UserError(f"there is no key for {cls.SERVICE}: {cls.KEY}")

    @classmethod
    async def start(
        cls, source: Path | str, build_seconds: float, limits: ContainerLimits, environment: Mapping[str, str]
    ) -> RemoteSandbox:
        """Start a sandbox of an image's name, or of a folder with a Dockerfile.

        Raises ContainerError, or UserError if the service refuses the account.
        """
        seconds = build_seconds + START_SECONDS
        with cls._reported("starts no sandbox"):
            async with asyncio.timeout(seconds):
                return await cls._create(source, seconds, limits, environment)

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

        After `seconds` it is killed with its process group. Raises ContainerError if the service fails.
        """
        limit = math.ceil(seconds)
        words = ["sh", "-c", script(limit, user, folder, environment or {}, most), command]
        if len(shlex.join(words)) > LONGEST_COMMAND:
            return _TOO_LONG
        began = time.monotonic()
        with self._reported("does not run a command"):
            async with asyncio.timeout(limit + 2 * GRACE_SECONDS):
                ran = await self._execute(words, limit + int(GRACE_SECONDS))
        if ran is None:
            return Finished(KILLED, b"", "life")
        over = "life" if ran[0] == KILLED and time.monotonic() - began >= limit else None
        return Finished(ran[0], ran[1], over)

    async def copy_in(self, source: Path, target: str) -> None:
        """Copy the content of a folder of this machine into a folder of the sandbox. Raises ContainerError."""
        place = shlex.quote(f"/tmp/posttrain-{secrets.token_hex(8)}.tar")
        with self._reported(f"does not take the files of {source.name}"):
            async with asyncio.timeout(START_SECONDS):
                await self._upload(packed(source, "."), place)
        folder = shlex.quote(target)
        unpacked = await self.run(
            f"mkdir -p {folder} && tar -xf {place} -C {folder} && rm -f {place}", START_SECONDS, user="0"
        )
        if unpacked.exit:
            reason = clip(inline(unpacked.output.decode(errors="replace").strip()), 200)
            raise ContainerError(f"the files of {source.name} cannot be copied into the sandbox: {reason}")

    async def close(self) -> None:
        """Delete the sandbox. If that fails, it ends with its longest life."""
        with suppress(Exception):
            async with asyncio.timeout(START_SECONDS):
                await self._delete()

    @classmethod
    @contextmanager
    def _reported(cls, fault: str) -> Iterator[None]:
        """Raise what the client raises as ContainerError, or as UserError if the account is the reason."""
        try:
            yield
        except (UserError, ContainerError):
            raise
        except Exception as error:
            reason = clip(inline(str(error) or type(error).__name__), 300)
            if any(kind.__name__ in cls.REFUSALS for kind in type(error).__mro__):
                raise UserError(f"{cls.SERVICE} refuses this account ({reason}): {cls.KEY}") from error
            raise ContainerError(f"{cls.SERVICE} {fault}: {reason}") from error


def script(seconds: int, user: str | None, folder: str | None, environment: Mapping[str, str], most: int) -> str:
    """Return a shell script that runs the command in its `$0`, as root or as another user.

    The images need `mktemp`, `wc`, `head` and `tail`; without `timeout` only the service's own limit ends a command.
    """
    prepare = "".join(f"export {name}={shlex.quote(value)}; " for name, value in environment.items())
    prepare += f"cd {shlex.quote(folder)} || exit 126; " if folder else ""
    if user in (None, "0", "root"):
        run = _AS_IT_IS
    else:
        assert user is not None
        numeric = user.isdecimal()
        run = _AS_USER.format(user=f'"$(getent passwd {user} | cut -d: -f1)"' if numeric else shlex.quote(user))
    return _SCRIPT.format(seconds=seconds, prepare=prepare, run=run, most=most, half=most // 2)
