"""An inference server with the embedded engine behind it: what the stand-ins for vLLM and SGLang share.

It is what the real program's module runs where `installed` has put a package of that name. The environment variable
FAKE_SERVER names what goes wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web
from numpy.typing import NDArray

from posttrain.core.types import Completion, Sampling
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.models.adapters.adapter_folder import read_adapter
from posttrain.models.adapters.lora import decoder_of
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.models.weight_files import write_weights
from posttrain.system.temp_folders import TempFolder

FAULT = "FAKE_SERVER"
NO_START, NO_LOAD = "ends at its start: ", "ends at new weights: "  # faults, followed by what is in the log
SLOW_SECONDS = 0.3  # of a slow server to fall asleep


def routes(tokens: int) -> NDArray[np.uint8] | None:
    """Experts that the stand-ins return: [tokens, 3 layers, 2 of 4], others for each token and layer."""
    fault = os.environ.get(FAULT)
    if fault == "no experts":
        return None
    first = np.arange(tokens + (fault == "more experts"))[:, None] + np.arange(3)
    found = np.stack([first % 4, (first + 1) % 4], -1).astype(np.uint8)
    return found * (fault != "empty experts")


def end_if(fault: str) -> None:
    """End the process as one that has failed, if that is the fault."""
    if (own := os.environ.get(FAULT, "")).startswith(fault):
        print(own.removeprefix(fault), flush=True)
        os._exit(1)


def installed(folder: Path, module: str, stand_in: str) -> None:
    """Put a package into a folder, which then has to be on the path. `module`: what its server runs; `stand_in`: the
    module of these helpers whose `main` that is.
    """
    *above, name = module.split(".")
    package = folder.joinpath(*above)
    package.mkdir(parents=True)
    for number in range(len(above)):
        folder.joinpath(*above[: number + 1], "__init__.py").touch()
    start = (
        f"from posttrain.system.garbage import search_seldom\nsearch_seldom()\nfrom {stand_in} import main\nmain()\n"
    )
    (package / f"{name}.py").write_text(start)


class FakeServer:
    """The server. A subclass has the calls of a program."""

    guarded: tuple[str, ...] = ()  # beginnings of the paths that need the key

    def __init__(self, folder: str, context: int, key: str | None) -> None:
        self.key, self.context = key, context
        self.adapters: dict[str, Any] = {}  # name -> model with this adapter
        self.own = TempFolder("fake-server")  # other servers read the same folder
        self.folder = Path(shutil.copytree(folder, self.own.name, dirs_exist_ok=True))
        self.tokenizer = Tokenizer.load(folder)
        self.model: Any = None
        self.engine: LocalEngine | None = None
        self.calls: list[str] = []
        self.waiting: dict[int, asyncio.Future[Completion]] = {}
        self.asked = self.worked = 0
        self.sleeping = False

    def load_tensors(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        end_if(NO_LOAD)
        tensors = {name: tensor.clone() for name, tensor in weights}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        write_weights(shapes, tensors.items(), self.folder, torch.float32)
        self.model, self.engine = load_model(self.folder), None

    def load_checkpoint(self, path: str) -> None:
        end_if(NO_LOAD)
        if os.path.realpath(path) != os.path.realpath(self.folder):
            for file in Path(path).glob("*.safetensors"):
                (self.folder / file.name).write_bytes(file.read_bytes())
        self.model, self.engine = load_model(self.folder), None

    def application(
        self, posts: Mapping[str, Callable[..., Any]], gets: Mapping[str, Callable[..., Any]]
    ) -> web.Application:
        application = web.Application(client_max_size=1 << 28, middlewares=[self.guard])
        application.add_routes([web.post(path, handler) for path, handler in posts.items()])
        gets = {"/health": self.health, "/calls": self.said, **gets}
        application.add_routes([web.get(path, handler) for path, handler in gets.items()])
        application.on_startup.append(self.begin)
        return application

    async def begin(self, application: web.Application) -> None:
        self.working = asyncio.create_task(self.work())

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Refuse calls without the key where prompts and models are."""
        guarded = self.key is not None and request.path.startswith(self.guarded)
        if guarded and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def said(self, request: web.Request) -> web.Response:
        return web.json_response(self.calls)

    async def models(self, request: web.Request) -> web.Response:
        adapters = [{"id": name, "parent": "policy"} for name in self.adapters]
        return web.json_response({"data": [{"id": "policy", "max_model_len": self.context}, *adapters]})

    async def load_adapter(self, request: web.Request) -> web.Response:
        asked = await request.json()
        name = asked["lora_name"]
        self.calls.append(f"load {name}")
        if name in self.adapters:
            return web.json_response({"error": f"{name} has been loaded already"}, status=400)
        model = load_model(self.folder)
        read_adapter(decoder_of(model), Path(asked["lora_path"]))
        self.adapters[name] = model
        return web.json_response({"success": True})

    async def unload_adapter(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        self.calls.append(f"unload {name}")
        if self.adapters.pop(name, None) is None:
            return web.json_response({"error": f"{name} cannot be found"}, status=404)
        return web.json_response({"success": True})

    async def fall_asleep(self, asleep: bool) -> None:
        if os.environ.get(FAULT) == "slow sleep":
            await asyncio.sleep(SLOW_SECONDS)
        self.sleeping = asleep

    async def complete(
        self, adapter: str | None, tokens: list[int], eos_ids: list[int], how: dict[str, Any]
    ) -> Completion:
        """Return a reply. `adapter`: its name; `how`: of `Sampling`, whose seed may be left out."""
        assert not self.sleeping, "it has no weights"
        model = self.model if adapter is None else self.adapters[adapter]
        if self.engine is None or self.engine.model is not model:
            model.eos_ids = tuple(eos_ids)
            self.engine = LocalEngine(model, self.tokenizer, slots=8)
        self.asked += 1
        id = self.asked
        self.waiting[id] = asyncio.get_running_loop().create_future()
        self.engine.submit(id, tokens, Sampling(**{"seed": id, **how}))
        try:
            return await self.waiting[id]
        except asyncio.CancelledError:
            self.engine.cancel(id)
            raise
        finally:
            self.waiting.pop(id, None)

    async def work(self) -> None:
        while True:
            await asyncio.sleep(0 if self.waiting else 0.002)
            self.worked += bool(self.waiting)
            for done in self.engine.poll() if self.waiting and self.engine is not None else ():
                if (place := self.waiting.get(done.id)) is not None and not place.done():
                    place.set_result(done)


def prepare(what: object) -> None:
    """Begin as a server's process does: with a process for its engine, and a line in its log."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)  # the engine
    print("fake server with", json.dumps(what), flush=True)
    end_if(NO_START)
    if os.environ.get(FAULT) == "slow start":
        time.sleep(1000)
    torch.set_num_threads(1)
