"""The servers that a run starts: their process, and what they read: config.json, tokenizer, sizes, weights."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from posttrain.core.protocols import Model
from posttrain.core.types import UserError
from posttrain.engines.engine_process import EngineProcess
from posttrain.engines.model_manifest import HEAD, backbone_of, with_head
from posttrain.engines.servers.server_client import ServedRun, ServerClient
from posttrain.engines.weight_sync import Transport, WeightLayout
from posttrain.models.adapters.lora import LoRA
from posttrain.models.free_memory import ALLOCATOR
from posttrain.models.gpu_placement import visible_name
from posttrain.models.json_files import read_json, write_json
from posttrain.models.tokenizer.tokenizer import Tokenizer

SERVER = "posttrain.engines.servers.server_setup:main"
COMMAND = "POSTTRAIN_SERVER_COMMAND"  # environment variable with the arguments of Python, as JSON
PACKAGES = str(Path(__file__).parents[3])  # where a server finds this package
FIXES = (
    (
        "architectures? .*(not supported|failed to be inspected|was supported)|does not recognize this architecture",
        "it cannot sample from this model: leave out --engine {package}, or install a version that can",
    ),
    (
        "unrecognized arguments|invalid choice|unexpected keyword",
        "install {program} as the guide says (docs/guides/vllm.md)",
    ),
    ("[Ww]orld size|attention heads.*divisible|tp_size|tensor.parallel", "give another --engine-tensor-parallel"),
    (
        "[Ff]ree memory on device|out of memory",
        "give it GPUs of its own (--engine-devices), or a smaller --engine-cache",
    ),
    (
        "max seq len|cache blocks|KV cache|[Nn]ot enough memory",
        "give a larger --engine-cache, or more GPUs of each server (--engine-tensor-parallel)",
    ),
)
"""Parts of the errors of servers, and what a user can do about them."""
BLOCK = 128  # tokens in a block of vLLM's cache on processors: the largest supported size


@dataclass(frozen=True)
class ServerSetup(ABC):
    """Setup that all servers of a run share; a subclass for each program."""

    client: ClassVar[type[ServerClient]]
    package: ClassVar[str]  # that has to be installed
    install: ClassVar[str]  # how to install it
    shares_memory: ClassVar[bool]  # servers that the run starts read weights from its memory, others a checkpoint

    folder: str  # with config.json and the tokenizer
    dtype: torch.dtype  # of weights, arithmetic and cache
    context: int
    slots: int
    cache_bytes: int | None  # of keys and values on each GPU; None: what the server finds free
    threads: int
    seed: int = 0  # of requests without a seed of their own
    lora_rank: int = 0  # maximal rank of adapters that are synced alone; 0: adapters are not synced alone
    transfer: str | None = None  # how weights are sent from GPU to GPU
    seeds: bool = False  # whether requests have seeds of their own
    token_bytes: int = 1  # of cache_bytes for each token
    lora_targets: tuple[str, ...] = ()  # ends of the names of the matrices that have adapters
    routed_experts: bool = False  # whether the server returns the experts of its tokens
    pictures: bool = False  # whether prompts have pictures

    @abstractmethod
    def start(
        self, run: ServedRun, place: Path, gpus: Sequence[int], sleeps: bool
    ) -> tuple[EngineProcess, ServerClient]:
        """Start a server. `place`: of its files, a path without a suffix; `gpus`: none on a processor; `sleeps`: free GPU
        memory between the phases of a step.
        """

    @classmethod
    def gpu_transport(cls, backend: str, layout: WeightLayout, seconds: float) -> Transport:
        """Return the transport of weights from GPU to GPU."""
        raise NotImplementedError("options refuse it")

    @classmethod
    @abstractmethod
    def adapt(cls, config: dict[str, Any], tokenizer_config: dict[str, Any], eos_ids: Sequence[int]) -> None:
        """Change what a server reads as config.json and tokenizer_config.json. `eos_ids`: the ends of a reply."""

    @classmethod
    def rank_of(cls, lora: LoRA) -> int:
        """Return the rank for which a server makes room."""
        return lora.rank

    @classmethod
    def lacks(cls, lora: LoRA, names: Sequence[str]) -> str | None:
        """Return what of a model's adapters a server does not support. `names`: the last parts of those of the adapted
        matrices.
        """
        return "DoRA" if lora.dora else None

    @classmethod
    def fix(cls, error: str) -> str:
        """Return what a user can do about an error in a server's log; "" if that is not known."""
        known = (fix for part, fix in FIXES if re.search(part, error))
        return next(known, "").format(package=cls.package, program=cls.client.program)

    def environment(self, command: Sequence[str], gpus: Sequence[int], sleeps: bool) -> dict[str, str | None]:
        """Return the environment variables of a server, in addition to those of this process; None: without this one."""
        own: dict[str, str | None] = {
            COMMAND: json.dumps(command),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(self.threads),
            "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), PACKAGES))),
            # expandable segments, which suit a learner, do not work with the memory that a sleeping server frees
            **dict.fromkeys(ALLOCATOR if sleeps else ()),
        }
        return {**own, "CUDA_VISIBLE_DEVICES": ",".join(map(visible_name, gpus))} if gpus else own


def main(socket_fd: int) -> NoReturn:
    """Become the server. The socket to the parent closes."""
    command = json.loads(os.environ.pop(COMMAND))
    os.execv(sys.executable, [sys.executable, "-m", *command])


def words_of(given: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command; those that are True have no value."""
    return [word for name, value in given.items() for word in (f"--{name}", *([] if value is True else [str(value)]))]


def require(kind: type[ServerSetup]) -> None:
    """Raise UserError if the server's program is not installed."""
    found = importlib.util.find_spec(kind.package)
    if found is None or found.origin is None:
        raise UserError(
            f"{kind.client.program} is not installed: {kind.install}, name servers that run elsewhere (--engine-url), or "
            f"leave out --engine {kind.package}"
        )


def prepare(kind: type[ServerSetup], folder: Path, model: Model, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> None:
    """Write config.json and the tokenizer into a folder for servers."""
    tokenizer.save(folder)
    config, tokenizer_config = dict(backbone_of(model).described()), read_json(folder / "tokenizer_config.json")
    kind.adapt(config, tokenizer_config, eos_ids)
    write_json(folder / "config.json", config)
    write_json(folder / "tokenizer_config.json", tokenizer_config)


def server_layout(model: Model, dtype: torch.dtype) -> WeightLayout:
    """Return the layout of a model's weights; a tied head has the position of the embedding."""
    loaded = backbone_of(model)
    return WeightLayout(model, dtype, checkpoint_tensors, (loaded.embedding_name, HEAD) if loaded.tied else None)


def checkpoint_tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint, with the output head even if it is tied."""
    return with_head(backbone_of(model))


def token_bytes(model: Model, dtype: torch.dtype, gpus: int = 1) -> int:
    """Return the bytes of a token's keys and values on each of `gpus` GPUs.

    With tensor parallelism the heads of keys and values are divided. If there are fewer than GPUs, each has one.
    """
    heads = getattr(model.config, "kv_heads", 1)  # those of transformers may differ by layer: the whole is enough
    return -(-backbone_of(model).kept_numbers // min(gpus, heads)) * dtype.itemsize


def cache_bytes(model: Model, slots: int, dtype: torch.dtype, most_gib: float, gpus: int = 1) -> int:
    """Return the bytes of keys and values of each of `gpus` GPUs for `slots` full contexts, in whole blocks, and for one
    block that vLLM keeps free; at most `most_gib` GiB.
    """
    tokens = BLOCK * (slots * -(-model.config.context // BLOCK) + 1)
    return min(tokens * token_bytes(model, dtype, gpus), int(most_gib * 2**30))
