"""A server that speaks the Hugging Face hub's API, as far as its client asks: repositories in memory, one process.

Files with one of the endings of `LARGE` are stored as the hub stores large ones: their content is put to an address of its
own before the commit that names them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

LARGE = (".safetensors", ".png", ".parquet")
TOKEN = "hf_right"
READS = "hf_reads"  # a token that may not write

Files = dict[str, bytes]


@dataclass
class Repository:
    """The files of each commit, and the branches."""

    files: Files = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.commit("main", self.files)

    def commit(self, branch: str, files: Files) -> str:
        content = [(name, hashlib.sha1(data).hexdigest()) for name, data in sorted(files.items())]
        name = hashlib.sha1(json.dumps([len(self.commits), content]).encode()).hexdigest()
        self.commits[name] = dict(files)
        self.branches[branch] = name
        return name

    def at(self, revision: str) -> str | None:
        """The commit of a branch, or of its own name."""
        return self.branches.get(revision, revision if revision in self.commits else None)

    def now(self, branch: str = "main") -> Files:
        return self.commits[self.branches[branch]]


@dataclass
class ModelHub:
    """The repositories by name; those of datasets begin with "datasets/"."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    stored: Files = field(default_factory=dict)  # large files by their hash
    seen: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, range
    cut: dict[str, int] = field(default_factory=dict)  # ending of a file -> bytes after which its sending breaks off
    refuse: dict[str, int] = field(
        default_factory=dict
    )  # beginning of a path -> status of every answer to it; 0: it comes late
    address: str = ""

    def asked(self, part: str) -> list[str]:
        """The requests whose path contains this, as "GET /path"."""
        return [f"{method} {path}" for method, path, _ in self.seen if part in path]


class _Problem(Exception):
    def __init__(self, status: int, text: str, code: str = "") -> None:
        self.status, self.text, self.code = status, text, code


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _entry(name: str, data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
    return (
        {**found, "lfs": {"oid": _sha(data), "size": len(data), "pointerSize": 134}} if name.endswith(LARGE) else found
    )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: ModelHub

    def log_message(self, *words: Any) -> None:
        pass

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        path = unquote(urlsplit(self.path).path)
        self.hub.seen.append((self.command, path, self.headers.get("Range") or ""))
        try:
            for start, status in list(self.hub.refuse.items()):
                if path.startswith(start):
                    threading.Event().wait(0 if status else 2.0)
                    raise _Problem(status or 503, "refused")
            self._route(path, body)
        except _Problem as problem:
            headers = {"X-Error-Code": problem.code, "X-Error-Message": problem.text}
            self._send(problem.status, json.dumps({"error": problem.text}).encode(), headers)

    do_GET = do_HEAD = do_POST = do_PUT = _answer

    def _send(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None, cut: int = 0) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:cut] if cut else data)
        if cut:
            self.close_connection = True

    def _json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _user(self, writes: bool = False) -> str:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in (TOKEN, READS):
            raise _Problem(401, "Invalid credentials in Authorization header")
        if writes and token != TOKEN:
            raise _Problem(403 if token else 401, "You don't have the rights to write here")
        return token

    def _repository(self, name: str) -> Repository:
        found = self.hub.repositories.get(name)
        if found is None or (found.private and self._user() != TOKEN):
            raise _Problem(404 if self._user() else 401, "Repository not found", "RepoNotFound")
        return found

    def _route(self, path: str, body: bytes) -> None:
        if path == "/api/whoami-v2":
            if not self._user():
                raise _Problem(401, "Invalid username or password.")
            return self._json({"name": "org", "type": "user", "orgs": []})
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if found := re.fullmatch(r"/lfs/(\w+)", path):
            return self._put(found[1], body)
        if found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            self._user(writes=True)
            return self._batch(json.loads(body))
        if found := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/([\w-]+)(?:/(.+))?)?", path):
            name = found[2] if found[1] == "model" else f"datasets/{found[2]}"
            return self._of_repository(name, found[3] or "revision", found[4] or "main", body)
        if found := re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._file(found[1], found[2], found[3])
        raise _Problem(404, f"no such address: {path}")

    def _create(self, told: dict[str, Any]) -> None:
        self._user(writes=True)
        if told.get("organization") == "others":
            raise _Problem(403, "You don't have the rights to create a model under the namespace others")
        name = f"{told.get('organization') or 'org'}/{told['name']}"
        if name in self.hub.repositories:
            body = json.dumps({"error": "You already created this model repo", "url": f"{self.hub.address}/{name}"})
            return self._send(409, body.encode(), {"X-Error-Message": "You already created this model repo"})
        self.hub.repositories[name] = Repository(
            {".gitattributes": b"*\n"}, private=told.get("visibility") == "private"
        )
        self._json({"url": f"{self.hub.address}/{name}"})

    def _of_repository(self, name: str, what: str, rest: str, body: bytes) -> None:
        repository = self._repository(name)
        if what == "refs":
            branches = [
                {"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": commit}
                for branch, commit in repository.branches.items()
            ]
            return self._json({"branches": branches, "converts": [], "tags": []})
        if what == "branch":
            self._user(writes=True)
            if rest in repository.branches:
                raise _Problem(409, "Reference already exists")
            repository.branches[rest] = repository.branches["main"]
            return self._json({})
        revision, _, folder = (rest, "", "") if repository.at(rest) else rest.partition("/")
        commit = repository.at(revision)
        if commit is None:
            raise _Problem(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        files = repository.commits[commit]
        if what == "revision":
            siblings = [{"rfilename": file} for file in sorted(files)]
            told = {
                "id": name.removeprefix("datasets/"),
                "sha": commit,
                "siblings": siblings,
                "tags": [],
                "downloads": 0,
            }
            return self._json({**told, "private": repository.private, "gated": "auto" if repository.gated else False})
        if what == "tree":
            inside = {file: data for file, data in files.items() if file.startswith(f"{folder}/" if folder else "")}
            if folder and not inside:
                raise _Problem(404, f"{folder} does not exist", "EntryNotFound")
            return self._json([_entry(file, data) for file, data in sorted(inside.items())])
        if what == "paths-info":
            form = dict(part.split("=") for part in body.decode().split("&")) if b"=" in body[:9] else json.loads(body)
            paths = [form["paths"]] if isinstance(form["paths"], str) else form["paths"]
            return self._json([_entry(path, files[path]) for path in map(unquote, paths) if path in files])
        self._user(writes=True)
        if what == "preupload":
            asked = [file["path"] for file in json.loads(body)["files"]]
            return self._json({"files": [self._mode(file, files) for file in asked]})
        assert what == "commit", what
        self._commit(name, revision, [json.loads(line) for line in body.splitlines()])

    def _mode(self, name: str, files: Files) -> dict[str, Any]:
        large = name.endswith(LARGE)
        there = {"oid": (_sha if large else _oid)(files[name])} if name in files else {}
        return {"path": name, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, **there}

    def _batch(self, told: dict[str, Any]) -> None:
        objects = []
        for wanted in told["objects"]:
            upload = {"upload": {"href": f"{self.hub.address}/lfs/{wanted['oid']}"}}
            objects.append({**wanted, **({} if wanted["oid"] in self.hub.stored else {"actions": upload})})
        self._json({"transfer": "basic", "objects": objects})

    def _put(self, name: str, body: bytes) -> None:
        assert _sha(body) == name
        self.hub.stored[name] = body
        self._send(200)

    def _commit(self, name: str, branch: str, lines: list[dict[str, Any]]) -> None:
        repository = self.hub.repositories[name]
        files = dict(repository.now(branch))
        for line in lines:
            told = line["value"]
            if line["key"] == "header":
                repository.messages.append(told["summary"])
            elif line["key"] == "file":
                files[told["path"]] = base64.b64decode(told["content"])
            elif line["key"] == "lfsFile":
                files[told["path"]] = self.hub.stored[told["oid"]]
            else:
                assert line["key"] == "deletedFile", line
                del files[told["path"]]
        commit = repository.commit(branch, files)
        self._json({"commitUrl": f"{self.hub.address}/{name}/commit/{commit}", "commitOid": commit, "success": True})

    def _file(self, name: str, revision: str, file: str) -> None:
        repository = self._repository(name)
        if repository.gated and self._user() != TOKEN:
            status = 403 if self._user() else 401
            raise _Problem(
                status, f"Access to model {name} is restricted and you are not in the authorized list.", "GatedRepo"
            )
        commit = repository.at(revision)
        if commit is None:
            raise _Problem(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        data = repository.commits[commit].get(file)
        if data is None:
            raise _Problem(404, "Entry not found", "EntryNotFound")
        headers = {
            "ETag": f'"{_sha(data)}"',
            "X-Repo-Commit": commit,
            "X-Linked-Size": str(len(data)),
            "Accept-Ranges": "bytes",
        }
        cut = next((n for ending, n in self.hub.cut.items() if file.endswith(ending)), 0)
        if part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(part[1]), int(part[2] or len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            return self._send(206, data[first : last + 1], headers, cut)
        self._send(200, data, headers, cut)


@contextmanager
def model_hub(**repositories: Repository) -> Iterator[ModelHub]:
    """A hub that is served."""
    hub = ModelHub(dict(repositories))
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use(patch: pytest.MonkeyPatch, address: str, cache: Any, token: str = "") -> None:
    """Let the client of this process talk to that address, with a cache of its own."""
    from huggingface_hub import constants

    from posttrain.models import hub_download
    from posttrain.system import hub

    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        patch.delenv(name, raising=False)
    if token:
        patch.setenv("HF_TOKEN", token)
    patch.setattr(constants, "ENDPOINT", address)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_TOKEN_PATH", str(cache) + "-token")
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.reached.cache_clear()
    hub_download.FOUND.clear()
