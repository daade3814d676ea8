"""The command of an SGLang server that a run starts.

SGLang listens on a port, so each server gets a key of its own, in a file that only this user can read: a key among the
words of a command is visible to everybody on the machine.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from posttrain.engines.engine_process import EngineProcess
from posttrain.engines.servers.server_client import ServedRun
from posttrain.engines.servers.server_setup import SERVER, ServerSetup
from posttrain.engines.sglang.sglang_client import SGLangClient
from posttrain.models.adapters.lora import LoRA
from posttrain.models.json_files import write_json

MODULE = "sglang.launch_server"
SPARE = 8  # tokens of its context that SGLang leaves empty, six of them behind a prompt
HOST = "127.0.0.1"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Matrices for which SGLang has adapters."""
TOGETHER = (({"k_proj", "v_proj"}, {"q_proj", "v_proj"}), ({"q_proj"}, {"v_proj"}), ({"up_proj"}, {"gate_proj"}))
"""If one of the first has an adapter, SGLang needs one for each of the second, or silently ignores the first."""


class SGLangSetup(ServerSetup):
    """Setup of SGLang servers."""

    client = SGLangClient
    package = "sglang"
    install = "pip install sglang (it needs a GPU)"
    shares_memory = False

    def start(
        self, run: ServedRun, place: Path, gpus: Sequence[int], sleeps: bool
    ) -> tuple[EngineProcess, SGLangClient]:
        port, key, file = free_port(), secrets.token_urlsafe(), place.with_suffix(".yaml")
        write_json(file, {**self.options(gpus, sleeps), "host": HOST, "port": port, "api-key": key})  # JSON is YAML
        # a file has no place for this option: its value may be given or not
        strict = ["--lora-strict-loading"] if self.lora_rank else []  # it refuses adapters of matrices that it lacks
        command = [MODULE, "--config", str(file), *strict]
        process = EngineProcess(SERVER, self.package, self.environment(command, gpus, sleeps))
        return process, SGLangClient(run, f"http://{HOST}:{port}", own=True, key=key)

    @classmethod
    def adapt(cls, config: dict[str, Any], tokenizer_config: dict[str, Any], eos_ids: Sequence[int]) -> None:
        # SGLang also ends replies at the ends of the model and of the tokenizer, whatever a request names
        config["eos_token_id"] = list(eos_ids) or None
        tokenizer_config.pop("eos_token", None)

    @classmethod
    def lacks(cls, lora: LoRA, names: Sequence[str]) -> str | None:
        if other := [name for name in names if name not in TARGETS]:
            return f"adapters of {', '.join(other)}"
        for one, others in TOGETHER:
            if one & set(names) and (missing := sorted(others - set(names))):
                return f"adapters of {', '.join(sorted(one & set(names)))} without {' and '.join(missing)}"
        return "rsLoRA" if lora.rslora else super().lacks(lora, names)

    def options(self, gpus: Sequence[int], sleeps: bool) -> dict[str, Any]:
        """Return the options of the server, but for its address. `gpus`: none on a processor."""
        given: dict[str, Any] = {
            "model-path": self.folder,
            "load-format": "dummy",  # weights come by weight sync
            "sampling-defaults": "openai",  # no file: defaults of sampling must not come from one
            "dtype": str(self.dtype).removeprefix("torch."),
            "context-length": self.context + SPARE,
            "max-running-requests": self.slots,
            "random-seed": self.seed,
            "log-level": "warning",
            "enable-memory-saver": sleeps,
            "enable-deterministic-inference": self.seeds,  # seeds have no effect without it
            "enable-lora": bool(self.lora_rank),
            "enable-return-routed-experts": self.routed_experts,
        }
        if self.cache_bytes is not None:
            given["max-total-tokens"] = self.cache_bytes // self.token_bytes
        if self.dtype is torch.float32:
            given["attention-backend"] = "triton"  # the default ones compute 16 bits only
        if len(gpus) > 1:
            given["tp-size"] = len(gpus)
        if self.lora_rank:
            given |= {"max-lora-rank": self.lora_rank, "lora-target-modules": list(self.lora_targets)}
            given["max-loras-per-batch"] = 2  # the adapter, and none for /health_generate
        return given if gpus else {**given, "device": "cpu"}

    def environment(self, command: Sequence[str], gpus: Sequence[int], sleeps: bool) -> dict[str, str | None]:
        own: dict[str, str | None] = {
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        }
        return super().environment(command, gpus, sleeps) | own


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
