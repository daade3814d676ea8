"""HTTP client of one vLLM server, which its pool uses like a connection to an engine (see `pool_protocol.Wire`).

Messages of the pool become calls of vLLM's server: requests are token ids at /inference/v1/generate, weights come by
/collective_rpc, /load_lora_adapter or vLLM's weight transfer. Answers become messages. A thread does the work.

vLLM ends a reply at a stop string that its own tokenizer finds. Where the reply really ends is decided here, with the
run's tokenizer, token by token, so that stop strings mean the same with every engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import aiohttp

from posttrain.core.messages import one_line
from posttrain.engines.pool.pool_protocol import Gone, Message, Wire, decode_sampling, encode_completion
from posttrain.engines.request import Request, complete, tokens_to_stop
from posttrain.engines.vllm.server_setup import LOGPROBS
from posttrain.models.tokenizer.tokenizer import Tokenizer

COLDEST = 0.01  # vLLM silently raises lower temperatures to this value
LOOK_SECONDS = 0.2  # between questions whether the server has started
REACH_SECONDS = 10.0  # for a server that runs already to answer
CLOSE_SECONDS = 5.0
ADAPTER = "posttrain-version-"  # name of an adapter as the server calls it, before the version
NEEDED = {
    "/inference/v1/generate": "--enable-scale-out",
    "/v1/load_lora_adapter": "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
}
"""Path of a call that a server lacks -> what gives it. Others come with VLLM_SERVER_DEV_MODE=1."""
KEY = "VLLM_API_KEY"  # environment variable with the key of the server, as vLLM itself calls it
WORK = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")  # metrics that grow while a server works


@dataclass(frozen=True)
class ServedRun:
    """Facts about the run that a client needs."""

    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    context: int
    slots: int
    alive: float  # seconds between two looks whether the server works
    seeds: bool  # sample each request with its own seed
    layout: dict[str, Any]  # of the weights that are offered in memory

    def parameters(self, request: Request) -> dict[str, Any]:
        """Return vLLM's sampling parameters of a request."""
        how = request.sampling
        assert not how.epsilon, "options refuse it"
        return {
            "temperature": how.temperature,
            "top_p": how.top_p,
            "top_k": how.top_k,
            "max_tokens": request.budget(self.context),
            "stop_token_ids": list(self.eos_ids),
            "ignore_eos": True,  # only the stop tokens above end a reply
            "logprobs": 0,  # only of the sampled token
            "stop": list(how.stop),
            "detokenize": bool(how.stop),
            "skip_special_tokens": False,
            **({"seed": how.seed} if self.seeds else {}),
        }


class ServerClient(Wire):
    """The connection to one server."""

    def __init__(self, run: ServedRun, address: str, path: str | None = None) -> None:
        """`address`: that of the server; `path`: of its socket, if it listens on none of the network. A server without a
        path runs already.
        """
        here, self._there = socket.socketpair()
        super().__init__(here)
        self.run, self.address, self.path = run, address.rstrip("/"), path
        self.version = -1  # of the weights; -1: none yet
        self.model = ""  # name by which requests ask for the model, or for its adapter
        self._asleep: set[str] = set()  # what of the GPU's memory the server has freed, by vLLM's tags
        self._base: int | None = None  # checksum of the weights below an adapter that the server has
        self._gone: Gone | None = None  # why the server cannot be used any more
        self._answers: SimpleQueue[Message] = SimpleQueue()
        self._replies: dict[int, asyncio.Task[None]] = {}  # by the request's id
        self._turn = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._ending = self._loop.create_task(self._work())
        self._thread = threading.Thread(target=self._run, name=f"calls {address}", daemon=True)
        self._thread.start()

    # -- what the pool calls -------------------------------------------------------------------------------------------

    def send(self, *message: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._take, *message)

    def flush(self) -> None:
        pass

    def receive(self) -> list[Message]:
        with suppress(BlockingIOError):
            self.socket.recv(1 << 16)
        found: list[Message] = []
        with suppress(Empty):
            while True:
                found.append(self._answers.get_nowait())
        if self._gone is not None and not found:
            raise self._gone
        return found

    def close(self) -> None:
        """End all calls. May be called twice."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._ending.cancel)
        self._thread.join(CLOSE_SECONDS)
        self.socket.close()
        self._there.close()

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._ending)
        self._loop.close()

    async def _work(self) -> None:
        key = os.environ.get(KEY)
        # a connection for each call: vLLM closes idle ones after seconds, perhaps while the next call begins
        how: Any = {"limit": 0, "force_close": True}
        connector = aiohttp.TCPConnector(**how) if self.path is None else aiohttp.UnixConnector(self.path, **how)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limit = aiohttp.ClientTimeout(total=None)  # the pool has its own
        async with (
            aiohttp.ClientSession(connector=connector, headers=headers, timeout=limit, read_bufsize=1 << 20) as session,
            asyncio.TaskGroup() as self._tasks,
        ):
            self._session = session
            self._start(self._hello())
            await self._watch()

    def _take(self, what: str, *more: Any) -> None:
        """Begin with a message of the pool."""
        if what == "submit":
            _, id, *_ = more
            self._replies[id] = self._start(self._sample(*more))
            self._replies[id].add_done_callback(lambda task: self._forget(id, task))
        elif what == "cancel":
            if (task := self._replies.get(more[0])) is not None:
                task.cancel()  # closes its connection, which vLLM takes as the end of the request
        elif what in ("load", "transfer", "sleep"):
            self._start(self._in_turn(getattr(self, f"_{what}")(*more)))
        else:
            assert what in ("forget", "copy"), what  # vLLM's prefix cache evicts by itself

    def _forget(self, id: int, task: asyncio.Task[None]) -> None:
        if self._replies.get(id) is task:  # else the next request of this id is there already
            del self._replies[id]

    def _start(self, work: Coroutine[Any, Any, Message | None]) -> asyncio.Task[None]:
        async def told() -> None:
            try:
                if (answer := await work) is not None:
                    self._tell(answer)
            except Exception as error:  # whatever a server answers
                self._gone = error if isinstance(error, Gone) else Gone(f"it failed: {type(error).__name__}: {error}")
                self._wake()

        return self._tasks.create_task(told())

    async def _in_turn(self, work: Coroutine[Any, Any, Message | None]) -> Message | None:
        async with self._turn:
            return await work

    def _tell(self, message: Message) -> None:
        self._answers.put(message)
        self._wake()

    def _wake(self) -> None:
        """End the wait of the pool."""
        with suppress(OSError):
            self._there.send(b".", socket.MSG_DONTWAIT)

    async def _watch(self) -> None:
        """Send a heartbeat whenever the server has processed tokens."""
        before = None
        while True:
            await asyncio.sleep(self.run.alive)
            if not self._replies:
                continue
            with suppress(aiohttp.ClientError, OSError, TimeoutError, Gone):
                async with asyncio.timeout(self.run.alive * 4):
                    lines = (await self._call("GET", "/metrics")).decode().splitlines()
                now = [line for line in lines if line.startswith(WORK)]
                if now != before:
                    self._tell(["alive"])
                before = now

    async def _hello(self) -> Message:
        """Wait until the server answers, and return its properties."""
        end = self._loop.time() + REACH_SECONDS
        while True:
            try:
                async with asyncio.timeout(REACH_SECONDS if self.path is None else None):
                    await self._call("GET", "/health")
                break
            except (aiohttp.ClientError, OSError) as error:
                if self.path is None and self._loop.time() > end:
                    why = one_line(error) or f"no answer within {REACH_SECONDS:g} s"
                    raise Gone(f"it cannot be reached: {why}") from error
            await asyncio.sleep(LOOK_SECONDS)
        if self.path is None:  # we started others as they have to be
            told = (await self._json("GET", "/server_info?config_format=json"))["vllm_config"]["model_config"]
            if told["logprobs_mode"] != LOGPROBS:
                raise Gone(f"it was started with another --logprobs-mode than {LOGPROBS}: start it with that one")
        (model, *adapters) = (await self._json("GET", "/v1/models"))["data"]
        for adapter in adapters:  # of a run, or of a connection, that was lost: its name could not be loaded again
            if adapter["id"].startswith(ADAPTER):
                await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": adapter["id"]})
        self.model = self.name = model["id"]
        about = {"coldest": COLDEST, "slots": self.run.slots, "context": model["max_model_len"]}
        return ["hello", {"backend": "vLLM", "batch_invariant": False, **about}]

    async def _sample(
        self, ticket: int, id: int, prompt: Sequence[int], own: Sequence[int], sampling: dict[str, Any], keep: bool
    ) -> Message:
        request, version = Request(id, (*prompt, *own), decode_sampling(sampling)), self.version
        body = {
            "model": self.model,
            "token_ids": [*prompt, *own],
            "sampling_params": self.run.parameters(request),
            "stream": False,
        }
        [choice] = (await self._json("POST", "/inference/v1/generate", body))["choices"]
        tokens, logp = choice["token_ids"], [float(told["logprob"]) for told in choice["logprobs"]["content"]]
        if choice["finish_reason"] not in ("stop", "length"):
            raise ValueError(f"a reply ended with {choice['finish_reason']!r}")
        how, eos_ids = request.sampling, self.run.eos_ids
        count = tokens_to_stop(self.run.tokenizer, request.begun, tokens, how.stop) if how.stop else None
        # vLLM's tokenizer may see a stop string in bytes that ours does not read as text
        stopped = count is not None or (choice["finish_reason"] == "stop" and tokens[-1] not in eos_ids)
        done = complete(
            request,
            tokens[:count],
            logp[:count] if how.temperature else [0.0] * len(tokens[:count]),  # greedy sampling is a point distribution
            stopped=stopped,
            eos_ids=eos_ids,
            tokenizer=self.run.tokenizer,
            version=version,
        )
        return ["done", ticket, encode_completion(done)]

    # -- weights -------------------------------------------------------------------------------------------------------

    async def _load(self, offer: dict[str, Any]) -> Message:
        """Load what was offered. Return version and checksum as the server read them."""
        await self._wake_up("weights")
        await self._call("POST", "/pause?mode=abort")  # ends cancelled requests of which vLLM has not heard yet
        version, checksum = offer["version"], offer["checksum"]
        if "adapter" in offer:
            version, checksum = await self._load_adapter(offer)
        elif "file" in offer:
            version, checksum = await self._load_tensors(offer)
        elif "folder" in offer:
            await self._remote("reload_weights", weights_path=offer["folder"])
        await self._wake_up("kv_cache")
        await self._call("POST", "/reset_prefix_cache")
        await self._call("POST", "/resume")
        self.version = version
        return ["loaded", version, checksum]

    async def _load_tensors(self, offer: dict[str, Any]) -> tuple[int, int]:
        told = await self._remote("posttrain_load", layout=self.run.layout, offer=offer)
        read = {(version, checksum) for version, checksum in told}
        if len(read) > 1:
            raise Gone(f"its processes loaded different weights: {sorted(read)}")
        return read.pop()

    async def _load_adapter(self, offer: dict[str, Any]) -> tuple[int, int]:
        """Load an adapter, and the weights below it if this server does not have them yet."""
        base = offer["base"]
        if base is not None and self._base != base["checksum"]:
            _, self._base = await self._load_tensors(base)
            if self._base != base["checksum"]:
                raise Gone(f"it loaded a base with checksum {self._base:08x}, not {base['checksum']:08x}")
        if self.model != self.name:
            await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": self.model})
        name = f"{ADAPTER}{offer['version']}"
        await self._call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": offer["adapter"]})
        self.model = name
        if base is None:  # a server without our extension
            return offer["version"], offer["checksum"]
        for read, matrices in await self._remote("posttrain_adapter", folder=offer["adapter"]):
            if matrices != offer["matrices"]:
                raise Gone(f"it has adapters in {matrices} of {offer['matrices']} matrices")
            if read != offer["checksum"]:
                return offer["version"], read
        return offer["version"], offer["checksum"]

    async def _transfer(self, method: str, info: Any) -> Message:
        """Carry out one call of vLLM's weight transfer."""
        await self._wake_up("weights")
        if method == "start_weight_update":  # requests that vLLM still computes would read weights that are moved
            await self._call("POST", "/pause?mode=abort")
        names = {"init_weight_transfer_engine": "init_info", "update_weights": "update_info"}
        if method == "get_world_size":
            return ["transferred", (await self._json("GET", f"/{method}"))["world_size"]]
        await self._call("POST", f"/{method}", {names[method]: info} if method in names else {})
        return ["transferred", None]

    async def _sleep(self) -> Message:
        """Free the server's GPU memory until the next weights."""
        await self._call("POST", "/sleep?level=2")
        self._asleep, self._base = {"weights", "kv_cache"}, None  # it has no weights at all then
        return ["slept"]

    async def _wake_up(self, tag: str) -> None:
        """Allocate memory of this kind again."""
        if tag in self._asleep:
            await self._call("POST", f"/wake_up?tags={tag}")
            self._asleep.discard(tag)

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    async def _remote(self, method: str, **arguments: Any) -> Any:
        """Call a method of vLLM's workers, and return the result of each."""
        body = {"method": method, "kwargs": arguments, "timeout": None}
        return (await self._json("POST", "/collective_rpc", body))["results"]

    async def _json(self, method: str, path: str, body: Any = None) -> Any:
        return json.loads(await self._call(method, path, body))

    async def _call(self, method: str, path: str, body: Any = None) -> bytes:
        """Return the content of a response. Raises Gone for another status than 200."""
        async with self._session.request(method, f"{self.address}{path}", json=body) as response:
            content = await response.read()
        if response.status != 200:
            place = path.partition("?")[0]
            told = content[:300].decode(errors="replace")
            raise Gone(f"{place}: {response.status} {told}{way(place, response.status, told)}")
        return content


def way(path: str, status: int, told: str) -> str:
    """Return what a user can do about a refused call; nothing if that is not known."""
    if status == 401:
        return f"; set {KEY} to the key of the server"
    if status == 404 and "Not Found" in told:  # the call itself, not a model or an adapter
        return f"; start it with {NEEDED.get(path, 'VLLM_SERVER_DEV_MODE=1')}"
    return ""
