"""Sandboxes of Daytona. Written to the documented interface of daytona 0.226.1, never run against the service."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.sandbox.containers import ContainerLimits
from posttrain.sandbox.remote.remote_sandbox import RemoteSandbox


class DaytonaSandbox(RemoteSandbox):
    """A sandbox of Daytona."""

    SERVICE, LIBRARY = "Daytona", "daytona"
    KEY = "set DAYTONA_API_KEY to a key of https://app.daytona.io/dashboard/keys"
    VARIABLES = ("DAYTONA_API_KEY", "DAYTONA_JWT_TOKEN")
    REFUSALS = ("DaytonaAuthenticationError", "DaytonaForbiddenError")

    def __init__(self, client: Any, sandbox: Any) -> None:
        """Use `start`. `client`: a daytona.AsyncDaytona; `sandbox`: one that it created."""
        super().__init__(sandbox)
        self._client = client

    @classmethod
    async def _create(
        cls, source: Path | str, seconds: float, limits: ContainerLimits, environment: Mapping[str, str]
    ) -> DaytonaSandbox:
        from daytona import AsyncDaytona, CreateSandboxFromImageParams, Image, Resources

        image: Any = source
        if isinstance(source, Path):
            image = Image.from_dockerfile(source / "Dockerfile", strict_context=True)
        asked = CreateSandboxFromImageParams(
            image=image,
            os_user="root",
            env_vars=dict(environment),
            labels={"program": "posttrain"},
            resources=Resources(cpu=math.ceil(limits.cpus), memory=math.ceil(limits.memory / 1024)),
            network_block_all=not limits.network,
            auto_stop_interval=0,  # a policy may think for longer than the 15 minutes that Daytona gives
            ttl_minutes=math.ceil(limits.life / 60),
            ephemeral=True,
        )
        client = AsyncDaytona()
        try:
            return cls(client, await client.create(asked, timeout=seconds))
        except BaseException:
            await client.close()
            raise

    async def _execute(self, words: list[str], seconds: int) -> tuple[int, bytes] | None:
        from daytona import DaytonaConnectionError, DaytonaTimeoutError

        try:
            ran = await self._sandbox.process.exec(shlex.join(words), timeout=seconds)
        except DaytonaTimeoutError as error:
            if isinstance(error, DaytonaConnectionError):
                raise
            return None
        return ran.exit_code, ran.result.encode()

    async def _upload(self, content: bytes, path: str) -> None:
        await self._sandbox.fs.upload_file(content, path)

    async def _delete(self) -> None:
        try:
            await self._sandbox.delete()
        finally:
            await self._client.close()
