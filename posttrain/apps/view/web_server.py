"""Serves the pages and their JSON to one browser of this machine: a client that knows the token in the address.

Text of models is untrusted. It leaves here as JSON and becomes text nodes in the page. Only the scripts in this package
may run, nothing may be loaded from elsewhere, and no other site may frame these pages or read a response.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from secrets import compare_digest
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from posttrain.apps.view.api import Answers
from posttrain.apps.view.evaluation_file import EvaluationFile
from posttrain.apps.view.html_export import Selection, exported
from posttrain.apps.view.open_run import OpenRun
from posttrain.apps.view.picture_files import picture as kept_picture
from posttrain.apps.view.rollout_files import RolloutPart
from posttrain.apps.view.rollout_page import text_of
from posttrain.core.types import UserError
from posttrain.runs.record.rollout_reading import plainly
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
    "referrer-policy": "no-referrer",  # the address contains the token
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
    "server": "posttrain",  # without versions
}
LONGEST = 300  # most characters of a path


def application(runs: Sequence[OpenRun], token: str, evaluations: Sequence[EvaluationFile] = ()) -> web.Application:
    """Return the web application for these runs and files of evaluations. It answers requests with the token and this
    machine's name.
    """
    answers = Answers(runs, evaluations)
    texts = _static()

    async def api(request: web.Request) -> web.Response:
        try:
            return _json(await asyncio.to_thread(answers.of, request.match_info["path"], dict(request.query)))
        except UserError as error:
            return _json({"problem": str(error)}, 400)
        except KeyError:
            raise web.HTTPNotFound from None

    async def static(request: web.Request) -> web.Response:
        name = request.match_info["path"] or "index.html"
        found = texts.get(name)
        if found is None:
            raise web.HTTPNotFound
        return _response(found, _TYPES[Path(name).suffix])

    async def whole_text(request: web.Request) -> web.Response:
        run, part, index = _run(runs, request), RolloutPart.of(request.match_info["part"]), request.match_info["index"]
        if part is None:
            raise web.HTTPNotFound
        try:
            text = await asyncio.to_thread(text_of, run.store, part, int(index))
        except UserError as error:
            return _json({"problem": str(error)}, 404)
        content = text.encode("utf-8", "backslashreplace")
        return _response(content, "text/plain; charset=utf-8", f"rollout-{part.name}.txt")

    async def picture(request: web.Request) -> web.Response:
        found = await asyncio.to_thread(kept_picture, _run(runs, request).folder, request.match_info["digest"])
        if found is None:
            raise web.HTTPNotFound
        return _response(*found)

    async def export(request: web.Request) -> web.Response:
        run = _run(runs, request)
        try:
            page = await asyncio.to_thread(exported, run, Selection.of(dict(request.query)))
        except UserError as error:
            return _json({"problem": str(error)}, 400)
        return _response(page, _TYPES[".html"], "posttrain-view.html")

    app = web.Application(middlewares=[_guard(token)])
    for path, handler in (
        ("api/{path:.*}", api),
        (r"text/{run:\d{1,9}}/{part}/{index:\d{1,9}}", whole_text),
        (r"picture/{run:\d{1,9}}/{digest}", picture),
        (r"export/{run:\d{1,9}}", export),
        ("{path:.*}", static),
    ):
        app.router.add_get("/{token}/" + path, handler)
    return app


def _static() -> dict[str, bytes]:
    """Return name -> content of every static file, so that no request names a path on the disk."""
    files = [path for path in STATIC.rglob("*") if path.suffix in _TYPES]
    return {path.relative_to(STATIC).as_posix(): path.read_bytes() for path in files}


def _run(runs: Sequence[OpenRun], request: web.Request) -> OpenRun:
    number = int(request.match_info["run"])
    if number >= len(runs):
        raise web.HTTPNotFound
    return runs[number]


def _guard(token: str) -> Middleware:
    """Return middleware that refuses requests without this machine's name and the token, and adds HEADERS to
    responses.
    """

    async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
        if len(request.path) > LONGEST:
            raise web.HTTPNotFound
        given = request.path.removeprefix("/").partition("/")[0]
        if (
            request.method not in ("GET", "HEAD")
            or refused(request.method, request.headers.items()) is not None
            or not compare_digest(given.encode("utf-8", "surrogateescape"), token.encode())
        ):
            return _json({"problem": "open the address that posttrain view printed"}, 403)
        return await handler(request)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await answered(request, handler)
        except web.HTTPNotFound:
            response = _json({"problem": "there is no such page"}, 404)
        response.headers.update(HEADERS)
        return response

    return guard


def _json(content: Any, status: int = 200) -> web.Response:
    try:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:  # nan and infinity
        text = json.dumps(plainly(content), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _response(text.encode("utf-8", "backslashreplace"), "application/json", status=status)


def _response(content: bytes, kind: str, file: str | None = None, status: int = 200) -> web.Response:
    """Return a response. `file`: the name under which a browser saves it."""
    kept = {} if file is None else {"content-disposition": f'attachment; filename="{file}"'}
    return web.Response(body=content, status=status, headers={"content-type": kind, **kept})
