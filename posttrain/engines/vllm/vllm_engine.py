"""vLLM as a rollout engine in a separate process, whose weights are synced in place.

The process must confirm every weight sync with version and checksum, and every call has a timeout. If the process dies,
fails or times out, the run ends with a message of one line, and never continues without it. The process is a plain
interpreter, so that vLLM's settings of torch and of the environment do not affect the run, and scripts need no
`__main__` guard. When this process ends in any way, vLLM's process and all that it started end too (see
`posttrain.system.child_processes`).

vLLM's log-probabilities differ a little from the learner's: the metrics `sampler/kl`, `sampler/gap` and `sampler/ess`
measure the difference in every step, and an algorithm's correction compensates for it.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from posttrain.core.protocols import Counting, Engine, Model, Paced
from posttrain.core.types import Completion, Sampling, UserError
from posttrain.engines.engine_process import EngineProcess
from posttrain.engines.model_manifest import HEAD, backbone_of, with_head
from posttrain.engines.request import Request
from posttrain.engines.vllm.adapter_sync import AdapterSync
from posttrain.engines.vllm.vllm_worker import COLDEST, VLLMSetup
from posttrain.engines.weight_probe import LIMIT, LIMIT_BFLOAT16, WeightProbe
from posttrain.engines.weight_sync import SharedMemory, WeightLayout
from posttrain.models.gpu_placement import visible_name
from posttrain.models.json_files import write_json
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.system.temp_folders import TempFolder

WORKER = "posttrain.engines.vllm.vllm_worker:main"
BLOCK = 128  # tokens in a block of vLLM's cache on processors: the largest supported size
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no further process: this one is isolated already
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the run's number of threads, not bound to processors
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class VLLMEngine:
    """vLLM in a separate process; implements `posttrain.core.protocols.Engine`. It must be closed: it has a process.

    `slots`: maximum of concurrent requests. `precision`: type of weights, arithmetic and cache. `cache_gib`: maximal
    size of the key-value cache in GiB. `start_seconds`, `load_seconds`, `step_seconds`: timeouts of vLLM's start, of a
    weight sync and of one decoding step. `poll_steps`: decoding steps after which `poll` returns even without a
    completion; None: it returns only with a completion, and results depend only on the order of the calls.
    `adapter_alone`: send the frozen weights of an adapted model once, and then only its adapters; otherwise send all
    weights, merged. Raises UserError if vLLM is not installed or does not start; so do all methods after it has died,
    failed or exceeded a timeout.
    """

    backend = "vLLM"
    batch_invariant = False

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        slots: int = 256,
        precision: str = "float32",
        *,
        cache_gib: float = 4.0,
        start_seconds: float = 600.0,
        load_seconds: float = 120.0,
        step_seconds: float = 120.0,
        poll_steps: int | None = None,
        adapter_alone: bool = False,
        gpu: int | None = None,
    ) -> None:
        """Start the process. `gpu`: number of its GPU; None: the processor."""
        require_vllm()
        self.alone = AdapterSync(model) if adapter_alone else None
        self.load_seconds, self.step_seconds, self.poll_steps = load_seconds, step_seconds, poll_steps
        self.context, self.vocab, self.version = model.config.context, model.config.vocab, 0
        base = model if self.alone is None else self.alone.base_of(model)
        self.shared = SharedMemory(vllm_layout(base, dtype_of(precision)))
        self._submitted: list[Request] = []
        self._running = 0  # number of requests in the process
        self.computed = 0  # tokens that the model has processed, without those from vLLM's prefix cache
        self._pace: dict[str, float] = {}
        self.probe = WeightProbe(model, LIMIT_BFLOAT16 if precision == "bfloat16" else LIMIT)
        self.deviation, self._probe_tokens = 0.0, 0  # tokens processed for the weight probe
        with TempFolder("vllm") as folder:
            eos, dtype = prepare(folder, base, tokenizer), self.shared.weight_layout.dtype
            cache = cache_bytes(model, slots, dtype, cache_gib)
            room = 0 if self.alone is None else self.alone.room
            setup = VLLMSetup(
                folder, dtype, self.context, slots, cache, eos, tuple(self.shared.weight_layout.stored), lora_rank=room
            )
            try:
                self.process = _Process(self.shared.descriptor, gpu)
            finally:
                self.shared.close()  # the mapped memory remains valid
            try:
                self.process.ask(setup, "starting", start_seconds)
                if self.alone is not None:
                    self._sync_all(base, 0)
                self.load(model, 0)
            except BaseException:  # also for an interruption, since the caller has no engine to close yet
                self.process.close()
                raise

    def load(self, weights: Any, version: int) -> None:
        """Sync weights. Return when vLLM has confirmed version and checksum."""
        assert not self._submitted and not self._running, "weights change between batches of rollouts, not within one"
        if self.alone is None:
            self._sync_all(weights, version)
        else:
            self._sync_adapters(self.alone, weights, version)
        self.version = version
        self._run_probe(weights)

    def _sync_all(self, weights: Any, version: int) -> None:
        """Sync all weights, in place."""
        checksum = self.shared.weight_layout.write(weights, self.shared.memory)
        answer = self.process.ask(("load", version), f"loading weights of version {version}", self.load_seconds)
        if answer != (version, checksum):
            self.process.fail(f"loaded version {answer[0]} with checksum {answer[1]:08x}, not {checksum:08x}")

    def _sync_adapters(self, alone: AdapterSync, weights: Any, version: int) -> None:
        """Sync the adapters alone."""
        folder, (checksum, matrices) = alone.write(weights)
        loaded = self.process.ask(
            ("bind", (version, folder)), f"loading adapters of version {version}", self.load_seconds
        )
        if loaded[:2] != (version, checksum):
            self.process.fail(f"loaded version {loaded[0]} with checksum {loaded[1]:08x}, not {checksum:08x}")
        if loaded[2] != matrices:
            self.process.fail(f"has adapters in {loaded[2]} of {matrices} matrices, after loading version {version}")

    def _run_probe(self, weights: Any) -> None:
        """Compare sampled log-probabilities with the learner's, since the checksum covers the received bytes, not the
        weights in use.
        """
        self.probe.look(weights)
        before = self.computed
        for place, (prompt, sampling) in enumerate(self.probe.requests()):
            self.submit(place, prompt, sampling)
        found: dict[int, Completion] = {}
        while self._running or self._submitted:
            found.update({completion.id: completion for completion in self.poll()})
        self._probe_tokens, self.computed = self._probe_tokens + self.computed - before, before
        self.deviation, wrong = self.probe.deviation(found, had_previous=self.version > 0)
        if wrong:
            self.process.fail(f"{wrong}, after loading version {self.version}")

    def counts(self) -> dict[str, float]:
        """Return `probe_gap`: the maximal difference to the learner in the last weight sync, in nats."""
        return {"probe_gap": self.deviation}

    def submit(self, id: int, prompt: Sequence[int], sampling: Sampling, keep: bool = False) -> None:
        """Queue one request. Raises UserError if the prompt leaves no room for a reply. `keep` has no effect: vLLM has
        a prefix cache.
        """
        if 0 < sampling.temperature < COLDEST:
            raise UserError(f"vLLM samples at temperature 0 or {COLDEST} and above, not at {sampling.temperature}")
        if sampling.epsilon:
            raise UserError("vLLM does not sample with --epsilon-greedy: leave out --engine vllm, or --epsilon-greedy")
        request = Request(id, tuple(prompt), sampling)
        self._submitted.append(request.check(self.context, self.vocab))

    def forget(self, id: int) -> None:
        pass

    def copy(self, id: int, to: int, tokens: int) -> None:
        pass

    def cancel(self, id: int) -> None:
        submitted = [request for request in self._submitted if request.id != id]
        if len(submitted) == len(self._submitted):
            self._running -= self.process.ask(("cancel", id), "ending a request", self.step_seconds)
        self._submitted = submitted

    def poll(self) -> list[Completion]:
        """Decode until a request has finished, or for `poll_steps` steps; [] if no request is running or waiting."""
        requests, self._submitted = self._submitted, []
        self._running += len(requests)
        if not self._running:
            return []
        done: list[Completion]
        done, computed, self._pace = self.process.ask(
            ("poll", (requests, self.poll_steps)), "sampling", self.step_seconds
        )
        self.computed = computed - self._probe_tokens
        if other := {c.version for c in done} - {self.version}:
            self.process.fail(f"sampled with weights of version {other.pop()}, not {self.version}")
        self._running -= len(done)
        return done

    def pace(self) -> dict[str, float]:
        return self._pace

    def close(self) -> None:
        """End the process and drop its requests. May be called twice."""
        self._submitted.clear()
        self.process.close()
        if self.alone is not None:
            self.alone.close()


class _Process(EngineProcess):
    """The parent's end of the process in which vLLM runs."""

    def __init__(self, memory_fd: int, gpu: int | None) -> None:
        self.dead = ""
        visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": visible_name(gpu)}
        super().__init__(WORKER, "vllm", [memory_fd], {**environment(), **visible})
        self.connection: Connection[Any, Any] = Connection(os.dup(self.socket.fileno()))

    def ask(self, message: object, doing: str, seconds: float) -> Any:
        """Send a message and return the answer. After `seconds` or an error, end the process and raise UserError."""
        if self.dead:
            raise UserError(f"the vLLM process {self.dead}")
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        try:
            self.connection.send(message)
            while self.connection.poll(seconds):
                kind, value = self.connection.recv()
                if kind == "failed":
                    self.fail(f"failed while {doing}: {value}")
                if kind == "answer":
                    return value
        except BlockingIOError:  # the process hangs while it reads or writes
            pass
        except (EOFError, OSError):
            self.fail(f"died while {doing} ({self.exit_code()})")
        self.fail(f"timed out after {seconds:g} s while {doing}")

    def fail(self, what: str) -> NoReturn:
        """End the process, keep its log, and raise UserError."""
        self.dead = f"{what}; its output is in {self.log}"
        self.kill()
        raise UserError(f"the vLLM process {self.dead}")

    def close(self) -> None:
        if not self.dead:
            self.dead = "is closed"
            self.connection.close()
            self.leave()

    def kill(self) -> None:
        self.connection.close()
        super().kill()


def require_vllm() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise UserError(
            "vLLM is not installed: pip install vllm (on a machine without a GPU see `make test-vllm`), "
            "or use the embedded engine"
        )


def environment() -> dict[str, str]:
    """Return the environment variables of vLLM's process, in addition to those of this process."""
    return {**ENVIRONMENT, "OMP_NUM_THREADS": str(torch.get_num_threads())}


def prepare(folder: str, model: Model, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Write config.json and the tokenizer into a folder for vLLM. Return the ids that end a reply."""
    tokenizer.save(folder)
    write_json(Path(folder) / "config.json", {**backbone_of(model).described(), "tie_word_embeddings": False})
    return tuple(model.eos_ids or ((tokenizer.eos_id,) if tokenizer.eos_id is not None else ()))


def vllm_layout(model: Model, dtype: torch.dtype) -> WeightLayout:
    """Return the layout of a model's weights; a tied head has the position of the embedding."""
    loaded = backbone_of(model)
    return WeightLayout(model, dtype, checkpoint_tensors, (loaded.embedding_name, HEAD) if loaded.tied else None)


def dtype_of(precision: str) -> torch.dtype:
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def checkpoint_tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint, with the output head even if it is tied (see `vllm_worker`)."""
    return with_head(backbone_of(model))


def cache_bytes(model: Model, slots: int, dtype: torch.dtype, most_gib: float) -> int:
    """Return the bytes of keys and values for `slots` full contexts, in whole blocks, and for one block that vLLM keeps
    free; at most `most_gib` GiB.
    """
    token = backbone_of(model).kept_numbers * dtype.itemsize
    return min(token * BLOCK * (slots * -(-model.config.context // BLOCK) + 1), int(most_gib * 2**30))


if TYPE_CHECKING:
    _proof: Callable[..., Engine] = VLLMEngine
    _paced: Callable[..., Paced] = VLLMEngine
    _counting: Callable[..., Counting] = VLLMEngine
