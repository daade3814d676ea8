"""A server that speaks as much of SGLang's HTTP as runs use: SGLang need not be installed. See `fake_server`.

As SGLang 0.5.23 does, it starts with 503, needs its key for all but /health, never fills its context, keeps the version
that it is told, ends at stop tokens only without `ignore_eos`, and dies when it has to sleep while it works.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import time
from pathlib import Path
from typing import Any

import fake_server
import numpy as np
import torch
from aiohttp import web
from fake_server import FAULT, FakeServer
from numpy.typing import NDArray

from posttrain.core.types import StopReason
from posttrain.engines.sglang.sglang_setup import MODULE
from posttrain.models.native.decoder import causal

STARTING_SECONDS = 0.2
BEHIND = 6  # tokens of its context that a prompt leaves at least


def installed(folder: Path) -> None:
    """Put a package sglang into a folder, which then has to be on the path."""
    fake_server.installed(folder, MODULE, "fake_sglang")


class Server(FakeServer):
    """The server, with the options of its command."""

    guarded = ("/",)

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options["model-path"], options["context-length"], options.get("api-key"))
        self.options, self.version, self.paused = options, "default", False
        self.released: set[str] = set()
        self.running: dict[str, asyncio.Task[Any]] = {}  # by the request's id
        self.begun = time.monotonic()
        if options.get("load-format") != "dummy":
            self.load_checkpoint(options["model-path"])

    def serve(self) -> web.Application:
        posts = {
            "/generate": self.generate,
            "/abort_request": self.abort,
            "/pause_generation": self.pause,
            "/continue_generation": self.go_on,
            "/flush_cache": self.flush,
            "/update_weights_from_disk": self.update,
            "/update_weight_version": self.rename,
            "/release_memory_occupation": self.release,
            "/resume_memory_occupation": self.occupy,
        }
        if self.options.get("enable-lora"):
            posts |= {"/load_lora_adapter": self.load_adapter, "/unload_lora_adapter": self.unload_adapter}
        gets = {"/health_generate": self.health, "/v1/models": self.models, "/server_info": self.info}
        return self.application(posts, gets)

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path.startswith("/health"):
            starting = time.monotonic() < self.begun + STARTING_SECONDS
            return web.Response(status=503 if starting else 200)
        if request.path != "/calls":
            self.calls.append(request.path)
        answer: web.StreamResponse = await (
            handler(request) if request.path == "/calls" else super().guard(request, handler)
        )
        return answer

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                f"enable_{name}": bool(self.options.get(f"enable-{name.replace('_', '-')}"))
                for name in ("deterministic_inference", "return_routed_experts")
            }
        )

    # -- weights -------------------------------------------------------------------------------------------------------

    async def pause(self, request: web.Request) -> web.Response:
        assert (await request.json())["mode"] == "abort"
        self.paused = True
        self._abort("")
        return web.json_response({"status": "ok"})

    async def go_on(self, request: web.Request) -> web.Response:
        await request.json()  # it has to have a body
        self.paused = False
        return web.json_response({"status": "ok"})

    async def flush(self, request: web.Request) -> web.Response:
        return web.Response(status=400 if self.waiting or "kv_cache" in self.released else 200)

    async def update(self, request: web.Request) -> web.Response:
        asked = await request.json()
        assert "weights" not in self.released, "it has no memory for weights"
        if asked.get("load_format") != "auto":
            return web.json_response({"success": False, "message": "Failed to get model loader"}, status=400)
        if os.environ.get(FAULT) != "old weights":
            self.load_checkpoint(asked["model_path"])
        self.version = asked["weight_version"]
        return web.json_response({"success": True, "message": ""})

    async def rename(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def release(self, request: web.Request) -> web.Response:
        if self.waiting:
            os._exit(1)
        self.released = set((await request.json())["tags"])
        await self.fall_asleep(True)
        return web.json_response(None)

    async def occupy(self, request: web.Request) -> web.Response:
        (tag,) = (await request.json())["tags"]
        self.released = self.released - {tag}
        self.sleeping = bool(self.released)
        return web.json_response(None)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _abort(self, begin: str) -> None:
        for rid, task in self.running.items():
            if rid.startswith(begin):
                task.cancel()

    async def abort(self, request: web.Request) -> web.Response:
        self._abort((await request.json())["rid"])
        return web.Response()

    async def generate(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if asked.get("top_logprobs_num"):
            return self.likeliest(asked)
        tokens, how = asked["input_ids"], asked["sampling_params"]
        if self.paused or len(tokens) >= self.context - BEHIND:
            return web.json_response({"error": {"message": "too long, or paused"}}, status=400)
        assert how["top_p"] == 1 and how["top_k"] == -1 and not how["ignore_eos"]
        sampling = {"temperature": how["temperature"], "stop": tuple(how["stop"]), "seed": how["sampling_seed"]}
        sampling["max_tokens"] = min(how["max_new_tokens"], self.context - len(tokens) - 2)
        if os.environ.get(FAULT) == "little memory":
            sampling["max_tokens"] = min(sampling["max_tokens"], 3)
        work = asyncio.create_task(self.complete(asked.get("lora_path"), tokens, how["stop_token_ids"], sampling))
        self.running[asked["rid"]] = work
        try:
            done = await work
        except asyncio.CancelledError:
            return self.reply([], [], {"type": "abort", "message": "Aborted"})
        finally:
            del self.running[asked["rid"]]
        finish: dict[str, Any] = {"type": "stop", "matched": done.tokens[-1]}
        if done.stop is StopReason.STOP:
            finish["matched"] = next(stop for stop in how["stop"] if stop in done.text)
        elif done.stop is not StopReason.EOS:
            finish = {"type": "length", "length": len(done.tokens)}
        if os.environ.get(FAULT) == "not a number":
            finish = {"type": "stop", "matched": "NaN happened"}
        asks = asked.get("return_routed_experts") and self.options.get("enable-return-routed-experts")
        found = fake_server.routes(len(tokens) + len(done.tokens) - 1) if asks else None
        return self.reply(list(done.tokens), list(done.logp), finish, found)

    def reply(
        self, tokens: list[int], logp: list[float], finish: dict[str, Any], found: NDArray[np.uint8] | None = None
    ) -> web.Response:
        version = "default" if os.environ.get(FAULT) == "no version" else self.version
        said = [[p, token, None] for p, token in zip(logp, tokens, strict=True)]
        about = {"finish_reason": finish, "weight_version": version, "output_token_logprobs": said}
        if found is not None:
            about["routed_experts"] = base64.b64encode(found.astype(np.int32).tobytes()).decode()
        return web.json_response({"text": "", "output_ids": tokens, "meta_info": about})

    def likeliest(self, asked: dict[str, Any]) -> web.Response:
        tokens = torch.tensor(asked["input_ids"])
        logits = self.model(tokens, torch.arange(len(tokens)), causal)[-1] @ self.model.head.weight.T
        if os.environ.get(FAULT) != "raw":
            logits = logits / asked["sampling_params"]["temperature"]
        logp, token = logits.log_softmax(-1).max(-1)
        return web.json_response({"meta_info": {"output_top_logprobs": [[[logp.item(), token.item(), None]]]}})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    parser.add_argument("--model-path")
    parser.add_argument("--port", type=int)
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--api-key")
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--enable-deterministic-inference", action="store_true")
    parser.add_argument("--lora-strict-loading", action="store_true")
    parser.add_argument("--enable-return-routed-experts", action="store_true")
    own = vars(parser.parse_args())
    options = {name.replace("_", "-"): value for name, value in own.items()}
    if options["config"]:
        options |= json.loads(Path(options["config"]).read_text())
        fake_server.prepare({name: value for name, value in options.items() if name != "api-key"})
    server = Server(options)
    web.run_app(server.serve(), host="127.0.0.1", port=options["port"], print=None)
