"""A server that speaks as much of vLLM's HTTP as runs use: vLLM need not be installed.

It checks the key of VLLM_API_KEY, loads adapters, and receives weights (`fake_transfer`). See `fake_server`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_server
import numpy as np
from aiohttp import web
from fake_server import FAULT, FakeServer
from fake_transfer import join, received

from posttrain.core.types import StopReason
from posttrain.engines.vllm.vllm_client import VLLMClient
from posttrain.engines.vllm.vllm_setup import MODULE
from posttrain.engines.vllm.worker_extension import WorkerExtension
from posttrain.models.adapters.adapter_writer import adapters

TRANSFER = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")


def installed(folder: Path) -> None:
    """Put a package vllm into a folder, which then has to be on the path."""
    fake_server.installed(folder, MODULE, "fake_vllm")
    transfer = folder / "vllm" / "distributed" / "weight_transfer"
    transfer.mkdir(parents=True)
    for place in (transfer.parent, transfer):
        (place / "__init__.py").touch()
    for file in ("base.py", "nccl_engine.py"):
        (transfer / file).write_text("from fake_transfer import *\n")


class Server(FakeServer, WorkerExtension):
    """The server, and the one worker of it, which stands for `processes` of tensor parallelism."""

    guarded = ("/v1", "/inference")  # as in vLLM

    def __init__(self, folder: str, context: int, processes: int, with_adapters: bool, records: bool = False) -> None:
        super().__init__(folder, context, os.environ.get(VLLMClient.key))
        self.records = records  # whether it returns experts
        self.processes, self.with_adapters = processes, with_adapters
        self.peers: list[Any] = []  # connections to the trainer

    def reload_weights(self, weights_iterator: Any = None, weights_path: str = "") -> None:
        if weights_iterator is not None:
            self.load_tensors(weights_iterator)
        else:
            self.load_checkpoint(weights_path)

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

    def serve(self) -> web.Application:
        posts = {"/inference/v1/generate": self.generate, "/collective_rpc": self.remote}
        posts |= dict.fromkeys(("/pause", "/resume", "/reset_prefix_cache", "/sleep", "/wake_up"), self.note)
        posts |= {f"/{name}": self.transfer for name in TRANSFER}
        if self.with_adapters:
            posts |= {"/v1/load_lora_adapter": self.load_adapter, "/v1/unload_lora_adapter": self.unload_adapter}
        gets = {"/v1/models": self.models, "/metrics": self.metrics, "/server_info": self.info}
        if os.environ.get(FAULT) != "no size":
            gets["/get_world_size"] = self.world_size
        return self.application(posts, gets)

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

    async def info(self, request: web.Request) -> web.Response:
        mode = "raw_logprobs" if os.environ.get(FAULT) == "raw" else "processed_logprobs"
        routed = {"enable_return_routed_experts": self.records}
        return web.json_response(
            {"vllm_config": {"model_config": {"logprobs_mode": mode}, "aux_output_config": routed}}
        )

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=f'# HELP\nvllm:generation_tokens_total{{engine="0"}} {self.worked}\n')

    async def note(self, request: web.Request) -> web.Response:
        self.calls.append(request.path_qs)
        if request.path in ("/sleep", "/wake_up"):
            await self.fall_asleep(request.path == "/sleep")
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
        sampling = {name: how[name] for name in ("temperature", "top_p", "top_k", "max_tokens", "seed") if name in how}
        adapter = None if asked["model"] == "policy" else asked["model"]
        sampling["stop"] = tuple(how["stop"])
        done = await self.complete(adapter, asked["token_ids"], how["stop_token_ids"], sampling)
        content = [{"token": f"token_id:{t}", "logprob": p} for t, p in zip(done.tokens, done.logp, strict=True)]
        reason = "length" if done.stop in (StopReason.LENGTH, StopReason.CONTEXT) else "stop"
        choice = {"index": 0, "token_ids": list(done.tokens), "logprobs": {"content": content}, "finish_reason": reason}
        found = fake_server.routes(len(asked["token_ids"]) + len(done.tokens) - 1) if self.records else None
        if found is not None:
            np.save(written := io.BytesIO(), found)
            choice["routed_experts"] = base64.b64encode(written.getvalue()).decode()
        return web.json_response({"choices": [choice]})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--uds")
    parser.add_argument("--port", type=int)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--enable-return-routed-experts", action="store_true")
    own, rest = parser.parse_known_args()
    fake_server.prepare(rest)
    records = own.enable_return_routed_experts
    server = Server(own.model, own.max_model_len, own.tensor_parallel_size, own.enable_lora, records)
    web.run_app(server.serve(), path=own.uds, host=None if own.uds else "127.0.0.1", port=own.port, print=None)
