"""Sandboxes of E2B. Written to the documented interface of e2b 2.63.0, never run against the service.

E2B starts a sandbox from a template, which has the processors and the memory: each image with its limits is one, built
once. E2B itself runs commands by /bin/bash, so an image must have it.
"""

from __future__ import annotations

import hashlib
import math
import shlex
from collections.abc import Mapping
from pathlib import Path

from posttrain.sandbox.containers import ContainerLimits, folder_digest, locked_image
from posttrain.sandbox.remote.remote_sandbox import RemoteSandbox


class E2BSandbox(RemoteSandbox):
    """A sandbox of E2B."""

    SERVICE, LIBRARY = "E2B", "e2b"
    KEY = "set E2B_API_KEY to a key of https://e2b.dev/dashboard"
    VARIABLES = ("E2B_API_KEY",)
    REFUSALS = ("AuthenticationException",)

    @classmethod
    async def _create(
        cls, source: Path | str, seconds: float, limits: ContainerLimits, environment: Mapping[str, str]
    ) -> E2BSandbox:
        from e2b import AsyncSandbox

        template = await _template(source, limits)
        sandbox = await AsyncSandbox.create(
            template,
            timeout=math.ceil(limits.life),
            envs=dict(environment),
            metadata={"program": "posttrain"},
            allow_internet_access=limits.network,
        )
        return cls(sandbox)

    async def _execute(self, words: list[str], seconds: int) -> tuple[int, bytes] | None:
        from e2b import CommandExitException, TimeoutException

        try:
            ran = await self._sandbox.commands.run(shlex.join(words), user="root", timeout=seconds)
        except CommandExitException as error:
            return error.exit_code, error.stdout.encode()
        except TimeoutException:
            if not await self._sandbox.is_running():
                raise
            return None
        return ran.exit_code, ran.stdout.encode()

    async def _upload(self, content: bytes, path: str) -> None:
        await self._sandbox.files.write(path, content, user="root")

    async def _delete(self) -> None:
        await self._sandbox.kill()


async def _template(source: Path | str, limits: ContainerLimits) -> str:
    """Return the name of the template of an image with its limits. It is built if the account has none."""
    from e2b import AsyncTemplate

    content = folder_digest(source) if isinstance(source, Path) else hashlib.blake2b(source.encode()).hexdigest()[:24]
    cpus, memory = math.ceil(limits.cpus), limits.memory + limits.memory % 2  # E2B takes even numbers of MiB
    name = f"posttrain-{content}-{cpus}-{memory}"
    async with locked_image(name):
        if not await AsyncTemplate.exists(name):
            if isinstance(source, Path):
                made = AsyncTemplate(file_context_path=source).from_dockerfile(str(source / "Dockerfile"))
            else:
                made = AsyncTemplate().from_image(source)
            await AsyncTemplate.build(made, name, cpu_count=cpus, memory_mb=memory)
    return name
