"""A server that speaks as much of vLLM's HTTP as runs use, with the embedded engine behind it: vLLM need not be installed.

It is what `vllm serve` runs where `installed` has put a package of that name. It checks the key of VLLM_API_KEY, loads
adapters, and receives weights (`fake_transfer`). The environment variable FAKE_VLLM names what goes wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from aiohttp import web
from fake_transfer import join, received

from posttrain.core.types import Sampling, StopReason
from posttrain.engines.local.local_engine import LocalEngine
from posttrain.engines.vllm.server_client import KEY
from posttrain.engines.vllm.server_setup import MODULE
from posttrain.engines.vllm.worker_extension import WorkerExtension
from posttrain.models.adapters.adapter_folder import read_adapter
from posttrain.models.adapters.adapter_writer import adapters
from posttrain.models.adapters.lora import decoder_of
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.models.weight_files import write_weights
from posttrain.system.temp_folders import TempFolder

FAULT = "FAKE_VLLM"
SLOW_SECONDS = 0.3  # of a slow server to fall asleep
TRANSFER = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")


def installed(folder: Path) -> None:
    """Put a package vllm into a folder, which then has to be on the path."""
    *above, name = MODULE.split(".")
    package = folder.joinpath(*above)
    package.mkdir(parents=True)
    for number in range(len(above)):
        folder.joinpath(*above[: number + 1], "__init__.py").touch()
    start = "from posttrain.system.garbage import search_seldom\nsearch_seldom()\nfrom fake_vllm import main\nmain()\n"
    (package / f"{name}.py").write_text(start)
    transfer = folder / "vllm" / "distributed" / "weight_transfer"
    transfer.mkdir(parents=True)
    for place in (transfer.parent, transfer):
        (place / "__init__.py").touch()
    for file in ("base.py", "nccl_engine.py"):
        (transfer / file).write_text("from fake_transfer import *\n")


class Server(WorkerExtension):
    """The server, and the one worker of it, which stands for `processes` of tensor parallelism."""

    def __init__(self, folder: str, context: int, processes: int, with_adapters: bool) -> None:
        self.processes, self.with_adapters = processes, with_adapters
        self.adapters: dict[str, Any] = {}  # name -> model with this adapter
        self.peers: list[Any] = []  # connections to the trainer
        self.own, self.context = TempFolder("fake-vllm"), context  # other servers read the same folder
        self.folder = Path(shutil.copytree(folder, self.own.name, dirs_exist_ok=True))
        self.tokenizer = Tokenizer.load(folder)
        self.engine: LocalEngine | None = None
        self.calls: list[str] = []
        self.waiting: dict[int, asyncio.Future[Any]] = {}
        self.asked = self.worked = 0
        self.sleeping = False

    def reload_weights(self, weights_iterator: Any = None, weights_path: str = "") -> None:
        if weights_iterator is not None:
            tensors = {name: tensor.clone() for name, tensor in weights_iterator}
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            write_weights(shapes, tensors.items(), self.folder, torch.float32)
        elif os.path.realpath(weights_path) != os.path.realpath(self.folder):
            for file in Path(weights_path).glob("*.safetensors"):
                (self.folder / file.name).write_bytes(file.read_bytes())
        self.model, self.engine = load_model(self.folder), None

    @property
    def model_runner(self) -> Any:
        """As much of vLLM's runner as tells which matrices have the adapter."""
        (model,) = self.adapters.values()
        places = [(adapter, place) for adapter in adapters(model) for place in adapter.places]
        modules = {
            str(number): SimpleNamespace(lora_a_stacked=(adapter.a[place.inner][None],))
            for number, (adapter, place) in enumerate(places)
        }
        return SimpleNamespace(
            lora_manager=SimpleNamespace(_adapter_manager=SimpleNamespace(lora_index_to_id=[1], modules=modules))
        )

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    def application(self) -> web.Application:
        application = web.Application(client_max_size=1 << 28, middlewares=[self.guard])
        posts = {"/inference/v1/generate": self.generate, "/collective_rpc": self.remote}
        posts |= dict.fromkeys(("/pause", "/resume", "/reset_prefix_cache", "/sleep", "/wake_up"), self.note)
        posts |= {f"/{name}": self.transfer for name in TRANSFER}
        if self.with_adapters:
            posts |= {"/v1/load_lora_adapter": self.load_adapter, "/v1/unload_lora_adapter": self.unload_adapter}
        application.add_routes([web.post(path, handler) for path, handler in posts.items()])
        gets = {"/health": self.health, "/v1/models": self.models, "/metrics": self.metrics, "/calls": self.said}
        gets["/server_info"] = self.info
        if os.environ.get(FAULT) != "no size":
            gets["/get_world_size"] = self.world_size
        application.add_routes([web.get(path, handler) for path, handler in gets.items()])
        application.on_startup.append(self.begin)
        return application

    async def begin(self, application: web.Application) -> None:
        self.working = asyncio.create_task(self.work())

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """As vLLM does, refuse calls without the key where prompts and models are."""
        key = os.environ.get(KEY)
        guarded = key is not None and request.path.startswith(("/v1", "/inference"))
        if guarded and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def world_size(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": self.processes})

    async def transfer(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        asked = await request.json()
        if "init_info" in asked:
            try:
                self.peers = await asyncio.to_thread(join, asked["init_info"], self.processes)
            except ValueError as error:
                return web.json_response({"error": str(error)}, status=500)
        elif "update_info" in asked:
            await asyncio.to_thread(self.reload_weights, received(asked["update_info"], self.peers))
        return web.json_response({})

    async def load_adapter(self, request: web.Request) -> web.Response:
        asked = await request.json()
        name = asked["lora_name"]
        self.calls.append(f"load {name}")
        if name in self.adapters:
            return web.json_response({"error": f"{name} has been loaded already"}, status=400)
        model = load_model(self.folder)
        read_adapter(decoder_of(model), Path(asked["lora_path"]))
        self.adapters[name] = model
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        self.calls.append(f"unload {name}")
        if self.adapters.pop(name, None) is None:
            return web.json_response({"error": f"{name} cannot be found"}, status=404)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def said(self, request: web.Request) -> web.Response:
        return web.json_response(self.calls)

    async def info(self, request: web.Request) -> web.Response:
        mode = "raw_logprobs" if os.environ.get(FAULT) == "raw" else "processed_logprobs"
        return web.json_response({"vllm_config": {"model_config": {"logprobs_mode": mode}}})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=f'# HELP\nvllm:generation_tokens_total{{engine="0"}} {self.worked}\n')

    async def models(self, request: web.Request) -> web.Response:
        adapters = [{"id": name, "parent": "policy"} for name in self.adapters]
        return web.json_response({"data": [{"id": "policy", "max_model_len": self.context}, *adapters]})

    async def note(self, request: web.Request) -> web.Response:
        self.calls.append(request.path_qs)
        if request.path in ("/sleep", "/wake_up"):
            if os.environ.get(FAULT) == "slow sleep":
                await asyncio.sleep(SLOW_SECONDS)
            self.sleeping = request.path == "/sleep"
        return web.Response()

    async def remote(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.calls.append(asked["method"])
        assert not self.sleeping, "it has no memory for weights"
        result = getattr(self, asked["method"])(**asked["kwargs"])
        if os.environ.get(FAULT) == "other bytes":
            result[1] ^= 1
        return web.json_response({"results": [result]})

    async def generate(self, request: web.Request) -> web.Response:
        asked = await request.json()
        how = asked["sampling_params"]
        assert not self.sleeping, "it has no weights"
        model: Any = self.model if asked["model"] == "policy" else self.adapters[asked["model"]]
        if self.engine is None or self.engine.model is not model:
            model.eos_ids = tuple(how["stop_token_ids"])
            self.engine = LocalEngine(model, self.tokenizer, slots=8)
        self.asked += 1
        id = self.asked
        sampling = Sampling(
            how["temperature"], how["top_p"], how["top_k"], how["max_tokens"], tuple(how["stop"]), how.get("seed", id)
        )
        self.waiting[id] = asyncio.get_running_loop().create_future()
        self.engine.submit(id, asked["token_ids"], sampling)
        try:
            done = await self.waiting[id]
        except asyncio.CancelledError:
            self.engine.cancel(id)
            raise
        finally:
            self.waiting.pop(id, None)
        content = [{"token": f"token_id:{t}", "logprob": p} for t, p in zip(done.tokens, done.logp, strict=True)]
        reason = "length" if done.stop in (StopReason.LENGTH, StopReason.CONTEXT) else "stop"
        choice = {"index": 0, "token_ids": list(done.tokens), "logprobs": {"content": content}, "finish_reason": reason}
        return web.json_response({"request_id": str(id), "choices": [choice]})

    async def work(self) -> None:
        while True:
            await asyncio.sleep(0 if self.waiting else 0.002)
            self.worked += bool(self.waiting)
            for done in self.engine.poll() if self.waiting and self.engine is not None else ():
                if (place := self.waiting.get(done.id)) is not None and not place.done():
                    place.set_result(done)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--uds")
    parser.add_argument("--port", type=int)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--enable-lora", action="store_true")
    own, rest = parser.parse_known_args()
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)  # the engine
    print("fake vLLM with", json.dumps(rest), flush=True)
    if os.environ.get(FAULT) == "slow start":
        time.sleep(1000)
    torch.set_num_threads(1)
    server = Server(own.model, own.max_model_len, own.tensor_parallel_size, own.enable_lora)
    web.run_app(server.application(), path=own.uds, host=None if own.uds else "127.0.0.1", port=own.port, print=None)
