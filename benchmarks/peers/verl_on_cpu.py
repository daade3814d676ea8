"""Lets verl's trainer run on a processor, with given replies, and records its updates: every process of verl imports it.

verl imports the modules that VERL_USE_EXTERNAL_MODULES names, which is its way to add a platform. Put in are a platform
without an accelerator, the registration of verl's own FSDP engine for it, and, in place of an inference server, a client
that returns the replies of GIVEN_REPLIES by their prompts. What is trained is written to WRITTEN_UPDATES.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _nothing(*given: Any, **named: Any) -> int:
    return 0


@PlatformRegistry.register(platform="processor")
class Processor(PlatformBase):
    """A processor as a platform. Ray counts it as a GPU, of which it is told that there is one."""

    device_name = "cpu"
    vendor_name = "processor"
    device_module = SimpleNamespace(
        **dict.fromkeys(("empty_cache", "synchronize", "set_device", "manual_seed", "manual_seed_all"), _nothing),
        **dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), _nothing),
        **dict.fromkeys(("reset_peak_memory_stats", "ipc_collect", "current_device"), _nothing),
        mem_get_info=lambda *_: (0, 0),
        get_device_name=lambda *_: "CPU",
        is_available=lambda: False,
        device_count=lambda: 1,
    )  # fmt: skip
    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False


import verl.workers.rollout.base as rollout_base  # noqa: E402  they need the platform
import verl.workers.rollout.llm_server as llm_server  # noqa: E402
from verl.trainer.ppo.v1 import trainer_base  # noqa: E402
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer  # noqa: E402
from verl.workers import engine_workers  # noqa: E402
from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp import FSDPEngineWithLMHead, transformer_impl  # noqa: E402
from verl.workers.rollout.replica import TokenOutput  # noqa: E402


class Unsampled(rollout_base.BaseRollout):
    """The worker's side of an inference engine that there is none of: it takes the weights and drops them."""

    async def resume(self, tags: list[str]) -> None:
        return None

    async def release(self) -> None:
        return None

    async def update_weights(self, weights: Any, **named: Any) -> None:
        for _ in weights:
            pass


class GivenReplies(llm_server.LLMServerClient):
    """Answers a prompt with its replies in GIVEN_REPLIES, one after another."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.replies: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)
        for prompt, reply in json.loads(Path(os.environ["GIVEN_REPLIES"]).read_text()):
            self.replies[tuple(prompt)].append(reply)

    async def generate(self, request_id: str, *, prompt_ids: list[int], **named: Any) -> TokenOutput:
        reply = self.replies[tuple(prompt_ids)].pop(0)  # an unknown prompt is an error: its tokens differ from ours
        steps = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), 0)
        return TokenOutput(token_ids=reply, stop_reason="completed", extra_fields={**steps, "num_cached_tokens": 0})


class GivenServers(llm_server.LLMServerManager):
    """A manager of no servers."""

    rollout_replica_class = None

    async def _initialize_llm_servers(self, start_rank: int | None = None) -> None:
        self.rollout_replicas, self.server_handles, self.server_addresses = [], [], []

    async def _init_global_load_balancer(self) -> None:
        return None

    def get_client(self, client_cls: Any = None, **named: Any) -> GivenReplies:
        return GivenReplies(self.config)


def _swap(owner: Any, name: str, new: Any) -> None:
    setattr(owner, name, new(getattr(owner, name)))


def _in_order(old: Any) -> Any:
    """Rollouts in the order of the rows and, of a row, of its replies, where verl has them as they are completed."""

    def batch(self: Any, *given: Any) -> Any:
        found = old(self, *given)
        order = sorted(range(len(found.keys)), key=lambda k: [int(part) for part in found.keys[k].split("_")])
        found.reorder(order)
        return found

    return batch


def _numbered(old: Any) -> Any:
    """Rows named by their number, which `_in_order` sorts by, instead of at random."""

    def fetch(self: Any) -> Any:
        batch = old(self)
        first = getattr(self, "_rows_fetched", 0)
        self._rows_fetched = first + len(batch)
        for k in range(len(batch)):
            batch["uid"][k] = str(first + k)
        return batch

    return fetch


def _recorded(old: Any) -> Any:
    """An update of the actor, with its learning rate, rows and metrics appended to WRITTEN_UPDATES."""

    def train(self: Any, data: Any, loss_function: Any) -> Any:
        group = self.optimizer.param_groups[0]
        rows = [[tokens.tolist(), _after_prompt(tokens, mask)] for tokens, mask in _unpadded(data)]
        found = old(self, data, loss_function)
        metrics = {n: m.aggregate() if hasattr(m, "aggregate") else m for n, m in found["metrics"].items()}
        update = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
        update |= {"loss": float(sum(found["loss"])), "lr": float(group["lr"]), "rows": rows}
        update["clipped"] = _by_token(found["metrics"]["actor/pg_clipfrac"].values, rows)
        update["advantages"] = [float(row[0]) for row in data["advantages"].unbind()]
        facts = {
            "optimizer": type(self.optimizer).__name__.lower(),
            "betas": list(group["betas"]),
            "eps": group["eps"],
            "weight decay": group["weight_decay"],
            "numbers decayed": sum(p.numel() for g in self.optimizer.param_groups for p in g["params"] if g["weight_decay"]),
            "numbers trained": sum(p.numel() for g in self.optimizer.param_groups for p in g["params"]),
            "clip": self.optimizer_config.clip_grad,
            "products": str(self._autocast_dtype).removeprefix("torch."),
            "weights": str(group["params"][0].dtype).removeprefix("torch."),
        }  # fmt: skip
        with Path(os.environ["WRITTEN_UPDATES"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"update": update, "facts": facts}) + "\n")
        return found

    return train


def _by_token(shares: list[float], rows: list[list[Any]]) -> float:
    """The mean over tokens of what verl has of each micro-batch, of whose shares it logs the plain mean."""
    size = len(rows) // len(shares)
    tokens = [sum(sum(trained) for _, trained in rows[k * size : (k + 1) * size]) for k in range(len(shares))]
    return sum(share * count for share, count in zip(shares, tokens, strict=True)) / sum(tokens)


def _unpadded(data: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield from zip(data["input_ids"].unbind(), data["response_mask"].unbind(), strict=True)


def _after_prompt(tokens: torch.Tensor, mask: torch.Tensor) -> list[int]:
    """1 for each token that is trained; the mask is of the reply's tokens, which come last."""
    return [0] * (len(tokens) - len(mask)) + mask.int().tolist()


EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(FSDPEngineWithLMHead)
rollout_base._ROLLOUT_REGISTRY["vllm", "async"] = "verl_on_cpu.Unsampled"
trainer_base.LLMServerManager = GivenServers
_swap(engine_workers, "initialize_global_process_group_ray", lambda old: partial(old, backend="gloo"))
_swap(transformer_impl, "CPUOffloadPolicy", lambda old: lambda pin_memory: old(pin_memory=False))
_swap(trainer_base.PPOTrainer, "_fetch_one_gen_batch", _numbered)
_swap(ReplayBuffer, "_materialize_batch", _in_order)
_swap(FSDPEngineWithLMHead, "train_batch", _recorded)
