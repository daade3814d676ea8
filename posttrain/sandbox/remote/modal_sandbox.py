"""Sandboxes of Modal. Written to the documented interface of modal 1.6.4, never run against the service."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from posttrain.sandbox.containers import ContainerLimits
from posttrain.sandbox.remote.remote_sandbox import RemoteSandbox

APP = "posttrain"  # of the account: Modal starts every sandbox in an app
NOT_ENDED = -1  # what `wait` returns after the limit of a command


class ModalSandbox(RemoteSandbox):
    """A sandbox of Modal."""

    SERVICE, LIBRARY = "Modal", "modal"
    KEY = "run `modal setup`, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"
    VARIABLES = ("MODAL_TOKEN_ID", "MODAL_OAUTH_REFRESH_TOKEN")
    REFUSALS = ("AuthError", "PermissionDeniedError")

    @classmethod
    def has_key(cls) -> bool:
        config = os.path.expanduser(os.environ.get("MODAL_CONFIG_PATH") or "~/.modal.toml")
        return super().has_key() or os.path.exists(config)

    @classmethod
    async def _create(
        cls, source: Path | str, seconds: float, limits: ContainerLimits, environment: Mapping[str, str]
    ) -> ModalSandbox:
        import modal

        if isinstance(source, Path):
            image = modal.Image.from_dockerfile(source / "Dockerfile", context_dir=source)
        else:
            image = modal.Image.from_registry(source)
        life = math.ceil(limits.life)
        sandbox = await modal.Sandbox.create.aio(
            "sleep",
            str(life),
            app=await modal.App.lookup.aio(APP, create_if_missing=True),
            image=image,
            env=dict(environment),
            timeout=life,
            cpu=(limits.cpus, limits.cpus),
            memory=(limits.memory, limits.memory),
            block_network=not limits.network,
        )
        return cls(sandbox)

    async def _execute(self, words: list[str], seconds: int) -> tuple[int, bytes] | None:
        process = await self._sandbox.exec.aio(*words, timeout=seconds, text=False)
        output = await process.stdout.read.aio()
        code = await process.wait.aio()
        return None if code == NOT_ENDED else (code, output)

    async def _upload(self, content: bytes, path: str) -> None:
        await self._sandbox.filesystem.write_bytes.aio(content, path)

    async def _delete(self) -> None:
        await self._sandbox.terminate.aio()
        await self._sandbox.detach.aio()
