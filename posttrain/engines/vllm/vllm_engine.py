"""vLLM as rollout engine: a process of its own, to which weights are handed over in place.

Decided here: every weight sync carries a version and a checksum which the process must give back, and everything it is asked
has a time limit. When it dies, fails or takes too long, the run ends with one line that says so, and never goes on with
what is left. The process is a plain interpreter, so vLLM's settings of torch and of the environment stay out of the run,
and scripts need no `__main__` guard. It ends with this one, however that ends, and so does all that vLLM starts (see
`posttrain.system.child_processes`).

vLLM's numbers differ a little from the learner's: `sampler/kl`, `sampler/gap` and `sampler/ess` of every step say by how
much, and an algorithm's correction accounts for it.
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
from posttrain.engines.model_manifest import HEAD, announced, with_head
from posttrain.engines.request import Request
from posttrain.engines.vllm.adapter_sync import AdapterSync
from posttrain.engines.vllm.vllm_worker import COLDEST, VLLMSetup
from posttrain.engines.weight_probe import LIMIT, LIMIT_BFLOAT16, WeightProbe
from posttrain.engines.weight_sync import Laid, SharedMemory
from posttrain.models.json_files import write_json
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.system.temp_folders import TempFolder

WORKER = "posttrain.engines.vllm.vllm_worker:main"
BLOCK = 128  # tokens in a block of vLLM's cache on processors, the largest of its sizes
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the process is the separation: no further one
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the run's number of threads, on whatever processors are free
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class VLLMEngine:
    """See `posttrain.core.protocols.Engine`. Close it: it holds a process.

    `slots`: how many requests run at once. `precision`: of weights, arithmetic and cache. `cache_gib`: most memory of the
    key-value cache. `start_seconds`, `load_seconds`, `step_seconds`: time limits of vLLM's start, of a weight sync of
    weights and of one decoding step. `poll_steps`: decoding steps after which `poll` returns with nothing; None: it does
    so with a completion only, and then results follow from the order of the calls. `adapter_alone`: the frozen weights of an
    adapted model go over once, and behind that its adapters; else all weights, merged. Raises UserError if vLLM is not
    installed or does not start; so do all methods when it has died, failed or overstepped a limit.
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
    ) -> None:
        require_vllm()
        self.alone = AdapterSync(model) if adapter_alone else None
        self.load_seconds, self.step_seconds, self.poll_steps = load_seconds, step_seconds, poll_steps
        self.context, self.vocab, self.version = model.config.context, model.config.vocab, 0
        base = model if self.alone is None else self.alone.base_of(model)
        self.shared = SharedMemory(laid_for_vllm(base, dtype_of(precision)))
        self._submitted: list[Request] = []
        self._owed = 0  # requests that the process has
        self.computed = 0  # tokens that went through the model: without those that vLLM's prefix cache had
        self._pace: dict[str, float] = {}
        self.canary = WeightProbe(model, LIMIT_BFLOAT16 if precision == "bfloat16" else LIMIT)
        self.deviation, self._sung = 0.0, 0  # tokens that went through the model for the canary alone
        with TempFolder("vllm") as folder:
            eos, dtype = prepare(folder, base, tokenizer), self.shared.laid.dtype
            cache = cache_bytes(model, slots, dtype, cache_gib)
            room = 0 if self.alone is None else self.alone.room
            setup = VLLMSetup(
                folder, dtype, self.context, slots, cache, eos, tuple(self.shared.laid.stored), lora_rank=room
            )
            try:
                self.process = _Process(self.shared.descriptor)
            finally:
                self.shared.close()  # the memory stays as long as it is mapped
            try:
                self.process.ask(setup, "starting", start_seconds)
                if self.alone is not None:
                    self._hand_over(base, 0)
                self.load(model, 0)
            except BaseException:  # an interruption, too, may come before there is anybody to close us
                self.process.close()
                raise

    def load(self, weights: Any, version: int) -> None:
        """Hand over weights. Returns when vLLM has them and says so with version and checksum."""
        assert not self._submitted and not self._owed, "weights change between batches of rollouts, not within one"
        if self.alone is None:
            self._hand_over(weights, version)
        else:
            self._bind(self.alone, weights, version)
        self.version = version
        self._sing(weights)

    def _hand_over(self, weights: Any, version: int) -> None:
        """All weights, in place."""
        checksum = self.shared.laid.write(weights, self.shared.memory)
        answer = self.process.ask(("load", version), f"taking over weights of version {version}", self.load_seconds)
        if answer != (version, checksum):
            self.process.fail(f"took over version {answer[0]} with checksum {answer[1]:08x}, not {checksum:08x}")

    def _bind(self, alone: AdapterSync, weights: Any, version: int) -> None:
        """The adapters alone."""
        folder, (checksum, matrices) = alone.write(weights)
        told = self.process.ask(
            ("bind", (version, folder)), f"taking over adapters of version {version}", self.load_seconds
        )
        if told[:2] != (version, checksum):
            self.process.fail(f"took over version {told[0]} with checksum {told[1]:08x}, not {checksum:08x}")
        if told[2] != matrices:
            self.process.fail(f"has adapters in {told[2]} of {matrices} matrices, after it took over version {version}")

    def _sing(self, weights: Any) -> None:
        """Compare what is sampled with what the learner says: a checksum is of bytes that arrived, not of what is used."""
        self.canary.look(weights)
        before = self.computed
        for place, (prompt, sampling) in enumerate(self.canary.requests()):
            self.submit(place, prompt, sampling)
        found: dict[int, Completion] = {}
        while self._owed or self._submitted:
            found.update({completion.id: completion for completion in self.poll()})
        self._sung, self.computed = self._sung + self.computed - before, before
        self.deviation, wrong = self.canary.deviation(found, knew=self.version > 0)
        if wrong:
            self.process.fail(f"{wrong}, after it took over version {self.version}")

    def counts(self) -> dict[str, float]:
        """`canary`: most nats off the learner, of the last weight sync."""
        return {"canary": self.deviation}

    def submit(self, id: int, prompt: Sequence[int], sampling: Sampling, keep: bool = False) -> None:
        """Queue one request. Raises UserError if the prompt leaves no room for a reply. vLLM's own prefix cache keeps."""
        if 0 < sampling.temperature < COLDEST:
            raise UserError(f"vLLM samples at temperature 0 or {COLDEST} and above, not at {sampling.temperature}")
        request = Request(id, tuple(prompt), sampling)
        self._submitted.append(request.check(self.context, self.vocab))

    def forget(self, id: int) -> None:
        pass

    def copy(self, id: int, to: int, tokens: int) -> None:
        pass

    def cancel(self, id: int) -> None:
        submitted = [request for request in self._submitted if request.id != id]
        if len(submitted) == len(self._submitted):
            self._owed -= self.process.ask(("cancel", id), "ending a request", self.step_seconds)
        self._submitted = submitted

    def poll(self) -> list[Completion]:
        """Decode until a request has finished, or for `poll_steps`; [] when nothing is running or waiting."""
        requests, self._submitted = self._submitted, []
        self._owed += len(requests)
        if not self._owed:
            return []
        done: list[Completion]
        done, computed, self._pace = self.process.ask(
            ("poll", (requests, self.poll_steps)), "sampling", self.step_seconds
        )
        self.computed = computed - self._sung
        if other := {c.version for c in done} - {self.version}:
            self.process.fail(f"sampled with weights of version {other.pop()}, not {self.version}")
        self._owed -= len(done)
        return done

    def pace(self) -> dict[str, float]:
        return self._pace

    def close(self) -> None:
        """End the process; requests in it are lost. May be called twice."""
        self._submitted.clear()
        self.process.close()
        if self.alone is not None:
            self.alone.close()


class _Process(EngineProcess):
    """Our end of the process in which vLLM runs."""

    def __init__(self, memory_fd: int) -> None:
        self.dead = ""
        super().__init__(WORKER, "vllm", [memory_fd], environment())
        self.connection: Connection[Any, Any] = Connection(os.dup(self.socket.fileno()))

    def ask(self, message: object, doing: str, seconds: float) -> Any:
        """The answer to a message. `seconds`: the longest silence. Raises UserError, and ends the process, without one."""
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
        except BlockingIOError:  # it has stopped in the middle of reading or writing
            pass
        except (EOFError, OSError):
            self.fail(f"died while {doing} ({self.exit_code()})")
        self.fail(f"was silent for {seconds:g} s while {doing}")

    def fail(self, what: str) -> NoReturn:
        """Raises UserError; the process is ended and its output kept."""
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
    """What vLLM's process is to find in its environment, besides ours."""
    return {**ENVIRONMENT, "OMP_NUM_THREADS": str(torch.get_num_threads())}


def prepare(folder: str, model: Model, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Write into a folder what vLLM reads before it gets weights; returns the ids that end a reply."""
    tokenizer.save(folder)
    write_json(Path(folder) / "config.json", {**announced(model).described(), "tie_word_embeddings": False})
    return tuple(model.eos_ids or ((tokenizer.eos_id,) if tokenizer.eos_id is not None else ()))


def laid_for_vllm(model: Model, dtype: torch.dtype) -> Laid:
    """A tied head lies where the embedding does."""
    told = announced(model)
    return Laid(model, dtype, handed_over, (told.embedding_name, HEAD) if told.tied else None)


def dtype_of(precision: str) -> torch.dtype:
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def handed_over(model: Model) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint, with the output head even where it is the embedding (see `vllm_worker`)."""
    return with_head(announced(model))


def cache_bytes(model: Model, slots: int, dtype: torch.dtype, most_gib: float) -> int:
    """Keys and values of as many full contexts as run at once, in whole blocks, and one block that vLLM keeps free."""
    token = announced(model).kept_numbers * dtype.itemsize
    return min(token * BLOCK * (slots * -(-model.config.context // BLOCK) + 1), int(most_gib * 2**30))


if TYPE_CHECKING:
    _proof: Callable[..., Engine] = VLLMEngine
    _paced: Callable[..., Paced] = VLLMEngine
    _counting: Callable[..., Counting] = VLLMEngine
