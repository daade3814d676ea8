"""Serves the pages and their answers to one browser of this machine: whoever knows the token in the address.

What models wrote is a stranger's text. It leaves here as JSON and becomes text nodes there; no script but the files beside
this one may run, nothing may be loaded from elsewhere, and no other site may frame these pages or read an answer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from secrets import compare_digest
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from posttrain.apps.view.api import Answers
from posttrain.apps.view.html_export import Selection, exported
from posttrain.apps.view.open_run import OpenRun
from posttrain.apps.view.picture_files import picture as kept_picture
from posttrain.apps.view.rollout_files import RolloutPart
from posttrain.apps.view.rollout_page import text_of
from posttrain.core.types import UserError
from posttrain.system.http_front import refused

STATIC = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}  # fmt: skip
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",  # the address has the token in it
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
LONGEST = 300  # characters of a path: no page has a longer one


def application(runs: Sequence[OpenRun], token: str) -> ASGIApp:
    """The pages about these runs, for requests that name the token and this machine."""
    answers = Answers(runs)
    texts = _static()

    async def api(request: Request) -> Response:
        path, query = request.path_params["path"], dict(request.query_params)
        try:
            return _json(await run_in_threadpool(answers.of, path, query))
        except UserError as error:
            return _json({"problem": str(error)}, 400)
        except KeyError:
            return _json({"problem": "there is no such page"}, 404)

    async def static(request: Request) -> Response:
        name = request.path_params.get("path") or "index.html"
        found = texts.get(name)
        if found is None:
            return _json({"problem": "there is no such page"}, 404)
        return Response(found, media_type=_TYPES[Path(name).suffix])

    async def whole_text(request: Request) -> Response:
        run, part, index = (
            _run(runs, request),
            RolloutPart.of(request.path_params["part"]),
            request.path_params["index"],
        )
        if run is None or part is None or index >= 1 << 31:
            return _json({"problem": "there is no such rollout"}, 404)
        try:
            text = await run_in_threadpool(text_of, run.store, part, index)
        except UserError as error:
            return _json({"problem": str(error)}, 404)
        disposition = {"content-disposition": f'attachment; filename="rollout-{part.name}.txt"'}
        return Response(text.encode("utf-8", "backslashreplace"), 200, disposition, "text/plain; charset=utf-8")

    async def picture(request: Request) -> Response:
        run, digest = _run(runs, request), request.path_params["digest"]
        found = await run_in_threadpool(kept_picture, run.folder, digest) if run else None
        if found is None:
            return _json({"problem": "there is no such picture"}, 404)
        return Response(found[0], media_type=found[1])

    async def export(request: Request) -> Response:
        run = _run(runs, request)
        if run is None:
            return _json({"problem": "there is no such run"}, 404)
        try:
            page = await run_in_threadpool(exported, run, Selection.of(dict(request.query_params)))
        except UserError as error:
            return _json({"problem": str(error)}, 400)
        disposition = {"content-disposition": 'attachment; filename="posttrain-view.html"'}
        return Response(page, 200, disposition, "text/html; charset=utf-8")

    routes = [
        Route("/api/{path:path}", api),
        Route("/text/{run:int}/{part}/{index:int}", whole_text),
        Route("/picture/{run:int}/{digest}", picture),
        Route("/export/{run:int}", export),
        Route("/{path:path}", static),
    ]
    return _Guard(Starlette(routes=routes), token)


def _static() -> dict[str, bytes]:
    """Every file that may be asked for, by its name: nothing of a request ever names a path of the disk."""
    files = [path for path in STATIC.rglob("*") if path.suffix in _TYPES]
    return {path.relative_to(STATIC).as_posix(): path.read_bytes() for path in files}


def _run(runs: Sequence[OpenRun], request: Request) -> OpenRun | None:
    number = request.path_params["run"]
    return runs[number] if number < len(runs) else None


class _Guard:
    """Lets in who names this machine and the token, and puts the headers on every answer."""

    def __init__(self, inner: ASGIApp, token: str) -> None:
        self._inner, self._token = inner, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return

        async def dressed(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *own]}
            await send(message)

        if len(scope["path"]) > LONGEST:
            await _json({"problem": "there is no such page"}, 404)(scope, receive, dressed)
            return
        token, _, rest = str(scope["path"]).removeprefix("/").partition("/")
        if (
            scope["method"] not in ("GET", "HEAD")
            or refused(scope["method"], _headers(scope)) is not None
            or not compare_digest(token.encode(), self._token.encode())
        ):
            await _json({"problem": "open the address that posttrain view printed"}, 403)(scope, receive, dressed)
            return
        path = "/" + rest
        await self._inner({**scope, "path": path, "raw_path": path.encode()}, receive, dressed)


def _headers(scope: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]


def _json(content: Any, status: int = 200) -> Response:
    try:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:  # numbers that JSON does not have
        text = json.dumps(_finite(content), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode("utf-8", "backslashreplace"), status, media_type="application/json")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
