"""A stand-in for the servers of E2B and Daytona, and for the calls of Modal: a sandbox is this machine, without limits.

It can prove what the real clients send and the treatment of what they return, not what a service does with it.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import os
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from aiohttp import web

Seen = list[tuple[str, Any]]
"""Method and path, or the name of a call; and what was given with it."""


def _ran(arguments: list[str], given: dict[str, str], limit: float) -> tuple[int, bytes] | None:
    try:
        ran = subprocess.run(arguments, capture_output=True, env={**os.environ, **given}, timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    return ran.returncode, ran.stdout


class Server:
    """The servers of E2B and Daytona in one."""

    def __init__(self) -> None:
        self.seen: Seen = []
        self.url = ""
        self.given: dict[str, str] = {}  # the variables of the sandbox
        self.refuses = False  # every account
        self.built = False
        self.gone = False  # the sandbox
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Server:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def sent(self, what: str) -> Any:
        """Return what was given with the only request of that method and path."""
        (found,) = (given for name, given in self.seen if name == what)
        return found

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        name = f"{request.method} {request.path}"
        if request.path.endswith(("/files", "/files/bulk-upload")):
            return await self._upload(request)
        body = await request.read()
        if request.path == "/process.Process/Start":
            return await self._e2b_process(request, json.loads(body[5:]))
        given = json.loads(body) if body else None
        self.seen.append((name, given))
        if self.refuses:
            return web.json_response({"code": 401, "message": "the key is unknown"}, status=401)
        if self.gone and name == "GET /health":
            return web.Response(status=502)
        if name.startswith("GET /templates/aliases/"):
            if self.built:
                return web.json_response({"templateID": "t", "public": False})
            return web.json_response({"code": 404, "message": "no such template"}, status=404)
        if name == "POST /sandbox":
            self.given = given["env"]
        if name == "POST /toolbox/s1/process/execute":
            ran = await asyncio.to_thread(_ran, ["sh", "-c", given["command"]], self.given, given["timeout"])
            if ran is None:
                return web.json_response({"statusCode": 408, "message": "the command took too long"}, status=408)
            return web.json_response({"exitCode": ran[0], "result": ran[1].decode(errors="replace")})
        if name == "POST /v2/sandboxes":
            self.given = given["envVars"]
        status, answer = self._fixed(request.path).get(name, (404, {"code": 404, "message": f"no {name}"}))
        return web.json_response(answer, status=status) if status != 204 else web.Response(status=204)

    def _fixed(self, path: str) -> dict[str, tuple[int, Any]]:
        daytona = {
            "id": "s1", "organizationId": "o", "name": "s1", "user": "root", "env": {}, "labels": {}, "public": False,
            "networkBlockAll": True, "kvm": False, "target": "us", "cpu": 1, "gpu": 0, "memory": 1, "disk": 1,
            "state": "started", "toolboxProxyUrl": f"{self.url}/toolbox",
        }  # fmt: skip
        build = {"templateID": "t", "buildID": "b", "public": False, "names": [], "tags": [], "aliases": []}
        status = {"templateID": "t", "buildID": "b", "status": "ready", "logs": [], "logEntries": []}
        sandbox = {
            "templateID": "t",
            "sandboxID": "s1",
            "clientID": "c",
            "envdVersion": "0.5.0",
            "envdAccessToken": "x",
        }
        return {
            "POST /sandbox": (200, daytona),
            "DELETE /sandbox/s1": (200, {**daytona, "state": "destroyed"}),
            "POST /v3/templates": (202, build),
            "POST /v2/templates/t/builds/b": (202, {}),
            "GET /templates/t/builds/b/status": (200, status),
            "POST /v2/sandboxes": (201, sandbox),
            "DELETE /sandboxes/s1": (204, None),
            "GET /health": (204, None),
        }

    async def _upload(self, request: web.Request) -> web.Response:
        """Write the file of either client: a part of a form with its path as name, or in the query."""
        async for part in await request.multipart():
            content = await part.read()
            if part.filename:
                path = request.query.get("path", unquote(part.filename))
                Path(path).write_bytes(content)
                self.seen.append(("upload", path))
        return web.json_response([{"name": "f", "path": "f", "type": "file"}])

    async def _e2b_process(self, request: web.Request, given: dict[str, Any]) -> web.Response:
        self.seen.append(("run", given))
        process = given["process"]
        limit = float(request.headers["Connect-Timeout-Ms"]) / 1000
        ran = await asyncio.to_thread(_ran, [process["cmd"], *process["args"]], self.given, limit)
        events: list[dict[str, Any]] = [{"event": {"start": {"pid": 7}}}]
        end: dict[str, Any] = {}
        if ran is None:
            end = {"error": {"code": "deadline_exceeded", "message": "the command took too long"}}
        else:
            events.append({"event": {"data": {"stdout": base64.b64encode(ran[1]).decode()}}})
            events.append({"event": {"end": {"exitCode": ran[0], "exited": True, "status": f"exit {ran[0]}"}}})
        frames = [(0, event) for event in events] + [(2, end)]
        text = b"".join(
            struct.pack(">BI", flag, len(raw := json.dumps(frame).encode())) + raw for flag, frame in frames
        )
        return web.Response(body=text, content_type="application/connect+json")


# -- Modal, whose client speaks no HTTP --------------------------------------------------------------------------------


class _Checked:
    """A call that a real function would accept; `.aio` is the call, as in Modal's client."""

    def __init__(self, real: Any, act: Callable[..., Any], seen: Seen, bound: bool = False) -> None:
        self._real, self._act, self._seen, self._bound = inspect.signature(real), act, seen, bound
        self._name = real.__name__.removeprefix("blocking_")

    def __call__(self, *given: Any, **named: Any) -> Any:
        self._real.bind(*([None] if self._bound else []), *given, **named)
        self._seen.append((self._name, (given, named)))
        return self._act(*given, **named)

    async def aio(self, *given: Any, **named: Any) -> Any:
        return self(*given, **named)


class _Holder:
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


def put_modal_in_place(patch: Any) -> Seen:
    """Put stand-ins in the place of Modal's calls; each takes only what the installed client takes. Return the calls."""
    import modal
    from modal.container_process import ContainerProcess
    from modal.io_streams import StreamReader
    from modal.sandbox.sandbox import SandboxFilesystem

    seen: Seen = []

    def execute(*words: str, timeout: int, text: bool) -> _Holder:
        ran = _ran(list(words), {}, timeout)
        code, output = (-1, b"") if ran is None else ran
        stdout = _Holder(read=_Checked(StreamReader.read, lambda: output, seen, True))
        return _Holder(stdout=stdout, wait=_Checked(ContainerProcess.wait, lambda: code, seen, True))

    def write(content: bytes, path: str) -> None:
        Path(path).write_bytes(content)

    sandbox = _Holder(
        exec=_Checked(modal.Sandbox.exec, execute, seen, True),
        terminate=_Checked(modal.Sandbox.terminate, lambda: None, seen, True),
        detach=_Checked(modal.Sandbox.detach, lambda: None, seen, True),
        filesystem=_Holder(write_bytes=_Checked(SandboxFilesystem.write_bytes, write, seen, True)),
    )
    real = modal.Sandbox.create, modal.App.lookup, modal.Image.from_dockerfile, modal.Image.from_registry
    create, lookup, from_dockerfile, from_registry = real
    patch.setattr(modal.Sandbox, "create", _Checked(create, lambda *_, **__: sandbox, seen))
    patch.setattr(modal.App, "lookup", _Checked(lookup, lambda *_, **__: "the app", seen))
    patch.setattr(modal.Image, "from_dockerfile", _Checked(from_dockerfile, lambda *_, **__: "a built image", seen))
    patch.setattr(modal.Image, "from_registry", _Checked(from_registry, lambda *_, **__: "a pulled image", seen))
    return seen
