"""The process in which vLLM runs: vLLM's settings, requests, and the loading of weights.

    parent -> worker   first a `VLLMSetup`, then ("load", version), ("bind", (version, folder)),
                       ("poll", ([Request], steps)) or
                       ("cancel", id)
    worker -> parent   ("answer", ...) to each: None; (version, checksum) of the loaded weights; the same of adapters,
                       and the number of adapted matrices; finished Completions, and the number of tokens that the model
                       has processed so far; the number of cancelled requests. ("alive", None) about once a second while
                       it steps, ("failed", message) before it exits

The worker steps only while the parent waits in a poll, until a request has finished (or for the number of steps that
the parent asks for). Which requests run together, and so every bit of a rollout, then depends on the order of the calls
and not on timing.

On processors vLLM keeps a packed copy of a tied output head and does not update it when weights are reloaded (seen in
0.32). The model is therefore declared as untied, and the embedding is sent a second time as its head. vLLM does not
pack reloaded experts there, and would compute wrong products: they are packed by this module.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.core.protocols import Engine
from posttrain.core.types import Completion, Sampling
from posttrain.engines.request import Request, complete, reached_stop, stop_window
from posttrain.engines.throughput import Throughput
from posttrain.engines.weight_sync import (
    Offer,
    Stored,
    checksum_of,
    checksum_of_names,
    offered,
    shared_memory,
    stored_in,
)
from posttrain.models.adapters.adapter_config import ADAPTER
from posttrain.models.tensor_files import open_tensors
from posttrain.models.tokenizer.tokenizer import Tokenizer

ALIVE_SECONDS = 1.0  # time between two heartbeats
PREFILL_TOKENS = 2048  # tokens of prompts that a processor computes at once, or one longer prompt
POLL_STEPS = 8  # decoding steps in a pool after which new requests join the running ones
COLDEST = 0.01  # vLLM silently raises lower temperatures to this value
FIRST_EXPERT = re.compile(r"\.experts\.0\.(gate_proj|w1)\.weight$")
TRANSFER = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
GPU_SHARE = 0.05  # vLLM checks at its start that this share is free; it uses weights + cache_bytes


@dataclass(frozen=True)
class VLLMSetup:
    """Setup of the worker."""

    folder: str  # folder with config.json and the tokenizer
    dtype: torch.dtype  # type of weights, arithmetic and cache
    context: int
    slots: int
    cache_bytes: int  # size of the key-value cache
    eos_ids: tuple[int, ...]
    weights: tuple[Stored, ...]
    transfer: str | None = None  # vLLM's backend for weights that are sent from GPU to GPU
    lora_rank: int = 0  # maximal rank of adapters that are synced alone; 0: adapters are not synced alone


@dataclass
class _Running:
    request: Request
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)


def pack_experts(model: Any, gates: Sequence[Tensor]) -> None:
    """Make vLLM pack experts that are unpacked in its model. `gates`: gate weights of each layer's first expert."""
    for layer in model.modules() if gates else ():
        impl = getattr(getattr(getattr(layer, "quant_method", None), "moe_kernel", None), "impl", None)
        experts, weight = getattr(impl, "fused_experts", None), getattr(layer, "w13_weight", None)
        if experts is None or weight is None:
            continue
        if any(torch.equal(weight[0, : len(gate)], gate) for gate in gates):  # not packed: packing reorders numbers
            experts.process_weights_after_loading(layer)


def count_adapted(manager: Any, number: int) -> int:
    """Count the matrices of vLLM's model that use this adapter: those with a nonzero A."""
    known = manager._adapter_manager
    place = known.lora_index_to_id.index(number)
    stacks = (getattr(module, "lora_a_stacked", ()) for module in known.modules.values())
    return sum(bool(a[place].any()) for stack in stacks for a in (stack if isinstance(stack, tuple) else (stack,)))


class Worker:
    """vLLM with its weights, their version, and its requests."""

    def __init__(self, setup: VLLMSetup, memory: Tensor, connection: Connection[Any, Any] | None = None) -> None:
        from vllm import EngineArgs, LLMEngine

        self.setup, self.memory, self.connection = setup, memory, connection
        self.tokenizer = Tokenizer.load(setup.folder)
        self.version = -1  # no weights yet
        self.adapter: Any = None  # vLLM's LoRARequest
        self.running: dict[str, _Running] = {}
        self.asked = 0
        self.computed = 0  # tokens that the model has processed, of finished requests
        self.pace = Throughput()
        self.heard = time.monotonic()
        gpu, more = torch.cuda.is_available(), {}
        if setup.transfer is not None:
            from vllm.config.weight_transfer import WeightTransferConfig

            more["weight_transfer_config"] = WeightTransferConfig(backend=setup.transfer)
        if setup.lora_rank:
            more |= {"enable_lora": True, "max_lora_rank": setup.lora_rank, "max_loras": 1, "max_cpu_loras": 1}
        if not gpu:  # compiling takes longer than it saves
            from torch import _dynamo

            _dynamo.config.disable = True
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=setup.folder,
                load_format="dummy",  # weights come by weight sync
                skip_tokenizer_init=True,  # vLLM gets and returns tokens; text comes from our own tokenizer
                generation_config="vllm",  # no file: defaults of sampling must not come from one
                logprobs_mode="processed_logprobs",  # of the sampled distribution, with the temperature applied
                dtype=str(setup.dtype).removeprefix("torch."),
                max_model_len=setup.context,
                max_num_seqs=setup.slots,
                kv_cache_memory_bytes=setup.cache_bytes,
                gpu_memory_utilization=GPU_SHARE,
                # vLLM 0.32 rewinds the random generator of a request whose prompt it computes in pieces, which fails on
                # a processor: there prompts are computed in one piece
                enable_chunked_prefill=gpu,
                max_num_batched_tokens=None if gpu else max(setup.context, PREFILL_TOKENS),
                enforce_eager=not gpu,
                disable_log_stats=True,
                **more,
            )
        )

    def answer(self, what: str, value: Any) -> Any:
        """Return the answer to a message."""
        if what == "poll":
            return self.poll(*value)
        if what == "bind":
            return self.bind(*value)
        return self.cancel(value) if what == "cancel" else self.load(value)

    def load(self, version: int) -> tuple[int, int]:
        """Load the weights in the shared memory, in place. Return the version and the checksum of the weights read."""
        assert not self.running, "weights change between batches of rollouts, not within one"
        checksum, dtype = 0, self.setup.dtype

        def weights() -> Iterator[tuple[str, Tensor]]:
            nonlocal checksum
            for stored in self.setup.weights:
                checksum = stored.checksum(self.memory, dtype, checksum)
                yield stored.name, stored.tensor_in(self.memory, dtype)

        self.engine.collective_rpc(lambda worker: worker.reload_weights(weights_iterator=weights()))
        if not torch.cuda.is_available():
            gates = [s.tensor_in(self.memory, dtype) for s in self.setup.weights if FIRST_EXPERT.search(s.name)]
            self.engine.collective_rpc(lambda worker: pack_experts(worker.model_runner.get_model(), gates))
        self.set_version(version)
        return version, checksum

    def bind(self, version: int, folder: str) -> tuple[int, int, int]:
        """Load the adapters of a folder. Return version, checksum of the adapters read, number of adapted matrices."""
        from vllm.lora.request import LoRARequest

        assert not self.running, "weights change between batches of rollouts, not within one"
        if self.adapter is not None:
            self.engine.remove_lora(self.adapter.lora_int_id)
        number = 1 if self.adapter is None else self.adapter.lora_int_id + 1
        self.adapter = LoRARequest(f"version {version}", number, folder)
        if not self.engine.add_lora(self.adapter):
            raise RuntimeError("vLLM did not take the adapter")
        with open_tensors(Path(folder) / ADAPTER) as stored:
            checksum = checksum_of((name, stored.get_tensor(name)) for name in sorted(stored.keys()))
        (bound,) = self.engine.collective_rpc(lambda worker: count_adapted(worker.model_runner.lora_manager, number))
        self.set_version(version)
        return version, checksum, bound

    def set_version(self, version: int) -> None:
        """Set a new version of the weights, and drop the prefix cache computed with the old one."""
        forgotten = self.engine.reset_prefix_cache()
        assert forgotten, "prompts computed with the old weights are still in use"
        self.version = version

    def poll(self, requests: Sequence[Request], steps: int | None) -> tuple[list[Completion], int, dict[str, float]]:
        """Submit requests, and step until a request has finished, at most `steps` times. Return (completions, tokens
        processed so far, counters of throughput).
        """
        for request in requests:
            self._submit(request)
        done: list[Completion] = []
        taken = 0
        while self.running and not done and taken != steps:
            taken += 1
            began, count = time.perf_counter(), len(self.running)
            outputs = self.engine.step()
            seconds = time.perf_counter() - began
            if taken == 1 and requests:  # it prefills prompts, while other requests may continue
                self.pace.read(sum(len(request.prompt) for request in requests), seconds)
            else:
                self.pace.decoded(count, seconds)
            for output in outputs:
                done += self._collect(output)
            if self.connection is not None and time.monotonic() - self.heard > ALIVE_SECONDS:
                self.connection.send(("alive", None))
                self.heard = time.monotonic()
        return done, self.computed, self.pace.counts()

    def cancel(self, id: int) -> int:
        """Cancel a request. Return the number of cancelled requests: 0 if it has finished."""
        names = [name for name, running in self.running.items() if running.request.id == id]
        self.engine.abort_request(names)
        for name in names:
            del self.running[name]
        return len(names)

    def _submit(self, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        how = request.sampling
        assert not how.epsilon, "options refuse it"
        params = SamplingParams(
            temperature=how.temperature,
            top_p=how.top_p,
            top_k=how.top_k,
            seed=how.seed,
            max_tokens=request.budget(self.setup.context),
            stop_token_ids=list(self.setup.eos_ids),
            ignore_eos=True,  # only the stop tokens above end a reply
            logprobs=0,  # only of the sampled token
            flat_logprobs=True,
            detokenize=False,
            # a stop string may end a request at any token; without one, intermediate outputs are not needed
            output_kind=RequestOutputKind.DELTA if how.stop else RequestOutputKind.FINAL_ONLY,
        )
        self.asked += 1
        name = str(self.asked)
        self.running[name] = _Running(request)
        prompt = {"prompt_token_ids": list(request.prompt)}
        self.engine.add_request(name, prompt, params, lora_request=self.adapter)

    def _collect(self, output: Any) -> list[Completion]:
        """Collect the tokens that a request sampled since the last step. Return [its completion] if it has ended."""
        (new,) = output.outputs
        running = self.running[output.request_id]
        running.tokens += new.token_ids
        running.logp += new.logprobs.logprobs
        how = running.request.sampling
        reply = [*running.request.begun, *running.tokens]
        stopped = bool(how.stop) and reached_stop(self.tokenizer, reply[-stop_window(how.stop) :], how.stop)
        if not stopped and not output.finished:
            return []
        if not output.finished:
            self.engine.abort_request([output.request_id])
        del self.running[output.request_id]
        known = output.num_cached_tokens or 0  # tokens of the prompt from vLLM's prefix cache
        self.computed += len(running.request.prompt) - known + len(running.tokens) - 1
        # greedy sampling is a point distribution, as in the embedded engine
        logp = running.logp if how.temperature else [0.0] * len(running.tokens)
        return [
            complete(
                running.request,
                running.tokens,
                logp,
                stopped=stopped,
                eos_ids=self.setup.eos_ids,
                tokenizer=self.tokenizer,
                version=self.version,
            )
        ]


class VLLMHost:
    """vLLM as an engine of a pool (see `posttrain.engines.pool.replica`). It steps even if the pool does not listen."""

    batch_invariant = False
    backend = "vLLM"

    def __init__(self, setup: dict[str, Any], memory: Tensor | None) -> None:
        dtype, stored = stored_in(setup["layout"])
        known = setup["folder"], dtype, setup["context"], setup["slots"], setup["cache_bytes"]
        self.memory, self.told = memory, 0
        kind = VLLMSetup(*known, tuple(setup["eos_ids"]), stored, setup.get("transfer"))
        self.worker = Worker(kind, torch.empty(0))

    @property
    def engine(self) -> Engine:
        return self

    def hello(self) -> dict[str, Any]:
        setup = self.worker.setup
        return {"coldest": COLDEST, "slots": setup.slots, "context": setup.context}

    def transfer(self, method: str, info: Any) -> None:
        if method not in TRANSFER:
            raise ValueError(f"{method} is no part of a transfer")
        if method == "update_weights":
            self.told = checksum_of_names(info["names"], info["dtype_names"], info["shapes"])
        self.worker.engine.collective_rpc(method, args=() if info is None else (info,))

    def take(self, offer: Offer) -> tuple[int, int]:
        if self.worker.setup.transfer is not None:  # the weights came by `transfer`
            self.worker.set_version(offer["version"])
            return offer["version"], self.told
        self.worker.memory = offered(offer, self.memory)
        return self.worker.load(offer["version"])

    def submit(self, id: int, prompt: Sequence[int], sampling: Sampling, keep: bool = False) -> None:
        setup, request = self.worker.setup, Request(id, tuple(prompt), sampling)
        self.worker._submit(request.check(setup.context, 1 << 62))  # the pool has checked the vocabulary

    def poll(self) -> list[Completion]:
        return self.worker.poll((), POLL_STEPS)[0]

    def cancel(self, id: int) -> None:
        self.worker.cancel(id)

    def forget(self, id: int) -> None:  # vLLM's prefix cache evicts by itself
        pass

    def copy(self, id: int, to: int, tokens: int) -> None:
        pass

    def load(self, weights: Any, version: int) -> None:
        raise NotImplementedError("weights come by offers")

    def close(self) -> None:
        pass


def main(socket_fd: int, memory_fd: int) -> None:
    """Answer the messages of the socket. `socket_fd`, `memory_fd`: the socket, the shared memory with the weights."""
    connection: Connection[Any, Any] = Connection(socket_fd)
    try:
        worker = Worker(connection.recv(), shared_memory(memory_fd), connection)
        connection.send(("answer", None))
        while True:
            what, value = connection.recv()
            connection.send(("answer", worker.answer(what, value)))
            worker.heard = time.monotonic()
    except (EOFError, ConnectionError):
        os._exit(0)  # the parent has ended or closed the socket; vLLM's own shutdown takes seconds
    except Exception as error:
        connection.send(("failed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))
        raise
