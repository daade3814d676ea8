"""HTTP client of one inference server, which its pool uses like a connection to an engine (see `pool_protocol.Wire`).

Messages of the pool become calls of the server, and its answers become messages. A thread does the work. The calls of
each program are in a subclass: `vllm.vllm_client`, `sglang.sglang_client`.

A server ends a reply at a stop string that its own tokenizer finds. Where the reply really ends is decided here, with
the run's tokenizer, token by token, so that stop strings mean the same with every engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from abc import abstractmethod
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

import aiohttp
import numpy as np
from numpy.typing import NDArray

from posttrain.core.messages import one_line
from posttrain.core.transcripts import Media
from posttrain.engines.pool.pool_protocol import Gone, Message, Wire, decode_sampling, encode_completion
from posttrain.engines.request import Request, complete, tokens_to_stop
from posttrain.engines.servers.routed_layers import RoutedLayers
from posttrain.models.tokenizer.tokenizer import Tokenizer

RETURN_EXPERTS = "start it with --enable-return-routed-experts"
LOOK_SECONDS = 0.2  # between questions whether the server has started
REACH_SECONDS = 10.0  # for a server that runs already to answer
CLOSE_SECONDS = 5.0
ADAPTER = "posttrain-version-"  # name of an adapter as the server calls it, before the version


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
    routed: RoutedLayers | None = None  # None: experts are not recorded


@dataclass(frozen=True)
class Sampled:
    """A reply as the server ended it."""

    tokens: list[int]
    logp: list[float]
    cut: bool  # at the maximum of tokens; else at a stop token or a stop string
    experts: NDArray[np.integer] | None = None  # see `RoutedLayers.split`, if they are recorded


class NotReady(Gone):
    """Raised for a call that a server does not answer yet, since it is starting."""


class ServerClient(Wire):
    """The connection to one server."""

    program: ClassVar[str]  # name as users know it
    key: ClassVar[str]  # environment variable with the key of a server that runs already
    min_temperature: ClassVar[float]  # lowest temperature above 0 that the server applies
    truncated_logp = True  # whether log-probabilities are those after top-p and top-k
    adapter_calls = ""  # what the paths of calls for adapters begin with

    def __init__(
        self, run: ServedRun, address: str, path: str | None = None, *, own: bool = False, key: str = ""
    ) -> None:
        """`address`: that of the server; `path`: of its socket, if it listens on none of the network. `own`: the run has
        started it, as it has to be; `key`: which then has to be given with each call.
        """
        here, self._there = socket.socketpair()
        super().__init__(here)
        self.run, self.address, self.path, self.own = run, address.rstrip("/"), path, own or path is not None
        self._key = key or os.environ.get(self.key)
        self.version = -1  # of the weights; -1: none yet
        self.name = self.model = ""  # by which requests ask for the model; for the model or its adapter
        self._asleep: set[str] = set()  # what of the GPU's memory the server has freed, by its tags
        self._base: int | None = None  # checksum of the weights below an adapter that the server has
        self._gone: Gone | None = None  # why the server cannot be used any more
        self._answers: SimpleQueue[Message] = SimpleQueue()
        self._replies: dict[int, asyncio.Task[None]] = {}  # by the request's id
        self._turn = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._ending = self._loop.create_task(self._work())
        self._thread = threading.Thread(target=self._run, name=f"calls {address}", daemon=True)
        self._thread.start()

    # -- the calls of a program ----------------------------------------------------------------------------------------

    @abstractmethod
    async def check(self) -> None: ...  # raises Gone for a server that was started in a way that a run cannot use
    @abstractmethod
    async def sample(self, request: Request) -> Sampled: ...
    async def abandon(self, id: int) -> None: ...  # ends a request whose connection was closed
    @abstractmethod
    async def progress(self) -> object: ...  # returns something else whenever the server has worked
    @abstractmethod
    async def pause(self) -> None: ...  # ends all requests, and begins no further one
    @abstractmethod
    async def resume(self) -> None: ...  # forgets all prefixes, and begins requests
    @abstractmethod
    async def read_weights(self, offer: dict[str, Any]) -> tuple[int, int]: ...  # returns (version, checksum) as read
    @abstractmethod
    async def finish_adapter(self, offer: dict[str, Any]) -> int: ...  # after it was loaded: returns its checksum
    @abstractmethod
    async def sleep(self) -> None: ...  # frees the server's GPU memory for weights and cache
    @abstractmethod
    async def wake_up(self, tag: str) -> None: ...  # allocates it again. `tag`: weights, kv_cache

    async def transfer(self, method: str, info: Any) -> Any:
        """Carry out a call of a weight transfer from GPU to GPU, and return its answer."""
        raise NotImplementedError("options refuse it")

    @classmethod
    @abstractmethod
    def remedy(cls, path: str) -> str: ...  # what gives a server a call that it lacks

    @classmethod
    def way(cls, path: str, status: int, answer: str) -> str:
        """Return what a user can do about a refused call; nothing if that is not known."""
        if status == 401:
            return f"; set {cls.key} to the key of the server"
        # the call itself, not a model or an adapter
        return f"; {cls.remedy(path)}" if status == 404 and "Not Found" in answer else ""

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
        # a connection for each call: servers close idle ones after seconds, perhaps while the next call begins
        how: Any = {"limit": 0, "force_close": True}
        connector = aiohttp.TCPConnector(**how) if self.path is None else aiohttp.UnixConnector(self.path, **how)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        limit = aiohttp.ClientTimeout(total=None)  # the pool has its own
        async with (
            aiohttp.ClientSession(connector=connector, headers=headers, timeout=limit, read_bufsize=1 << 20) as session,
            asyncio.TaskGroup() as self._tasks,
        ):
            self._session = session
            self._start(self._wait_until_started())
            await self._watch()

    def _take(self, what: str, *more: Any) -> None:
        """Begin with a message of the pool."""
        if what == "submit":
            _, id, *_ = more
            self._replies[id] = self._start(self._sample(*more))
            self._replies[id].add_done_callback(lambda task: self._forget(id, task))
        elif what == "cancel":
            if (task := self._replies.get(more[0])) is not None:
                task.cancel()  # closes its connection
                self._start(self.abandon(more[0]))
        elif what in ("load", "transfer", "sleep"):
            self._start(self._in_turn(getattr(self, f"_{what}")(*more)))
        else:
            assert what in ("forget", "copy"), what  # the server's prefix cache evicts by itself

    def _forget(self, id: int, task: asyncio.Task[None]) -> None:
        if self._replies.get(id) is task:  # else the next request of this id is there already
            del self._replies[id]

    def _start(self, work: Coroutine[Any, Any, Message | None]) -> asyncio.Task[None]:
        async def run() -> None:
            try:
                if (answer := await work) is not None:
                    self._tell(answer)
            except Exception as error:  # whatever a server answers
                self._gone = error if isinstance(error, Gone) else Gone(f"it failed: {type(error).__name__}: {error}")
                self._wake()

        return self._tasks.create_task(run())

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
        """Send a heartbeat whenever the server has worked."""
        before = None
        while True:
            await asyncio.sleep(self.run.alive)
            if not self._replies:
                continue
            with suppress(aiohttp.ClientError, OSError, TimeoutError, Gone):
                async with asyncio.timeout(self.run.alive * 4):
                    now = await self.progress()
                if now != before:
                    self._tell(["alive"])
                before = now

    async def _wait_until_started(self) -> Message:
        """Wait until the server answers, and return its properties."""
        end = self._loop.time() + REACH_SECONDS
        while True:
            try:
                async with asyncio.timeout(None if self.own else REACH_SECONDS):
                    await self._call("GET", "/health")
                break
            except (aiohttp.ClientError, OSError, NotReady) as error:
                if not self.own and self._loop.time() > end:
                    why = one_line(error) or f"no answer within {REACH_SECONDS:g} s"
                    raise Gone(f"it cannot be reached: {why}") from error
            await asyncio.sleep(LOOK_SECONDS)
        if not self.own:
            await self.check()
        (model, *others) = (await self._json("GET", "/v1/models"))["data"]
        for adapter in others:  # of a run, or of a connection, that was lost: its name could not be loaded again
            if adapter["id"].startswith(ADAPTER):
                await self._drop_adapter(adapter["id"])
        self.model = self.name = model["id"]
        about: dict[str, Any] = {"min_temperature": self.min_temperature, "truncated_logp": self.truncated_logp}
        about |= {"backend": self.program, "batch_invariant": False}
        return ["started", {**about, "slots": self.run.slots, "context": model["max_model_len"]}]

    async def _sample(
        self, ticket: int, id: int, prompt: Sequence[int], own: Sequence[int], sampling: dict[str, Any], keep: bool,
        pictures: Sequence[Sequence[Any]] = (),
    ) -> Message:  # fmt: skip
        media = tuple(Media(*picture) for picture in pictures)
        request, version = Request(id, (*prompt, *own), decode_sampling(sampling), media=media), self.version
        found = await self.sample(request)
        tokens, logp, how, eos_ids = found.tokens, found.logp, request.sampling, self.run.eos_ids
        count = tokens_to_stop(self.run.tokenizer, request.begun, tokens, how.stop) if how.stop else None
        # the server's tokenizer may see a stop string in bytes that ours does not read as text
        stopped = count is not None or (not found.cut and tokens[-1] not in eos_ids)
        done = complete(
            request,
            tokens[:count],
            logp[:count] if how.temperature else [0.0] * len(tokens[:count]),  # greedy sampling is a point distribution
            stopped=stopped,
            eos_ids=eos_ids,
            tokenizer=self.run.tokenizer,
            version=version,
        )
        return ["done", ticket, [*encode_completion(done), *self._routes(request, found, len(done.tokens))]]

    def _routes(self, request: Request, found: Sampled, sampled: int) -> Sequence[NDArray[np.int16]]:
        """Return the experts of the `sampled` tokens and of the prompt, if they are recorded. Raises Gone without them."""
        if self.run.routed is None:
            return ()
        if found.experts is None:
            raise Gone(f"it returned no experts: {RETURN_EXPERTS}")
        return self.run.routed.split(found.experts, request.given, request.given + len(found.tokens) - 1, sampled)

    # -- weights -------------------------------------------------------------------------------------------------------

    async def _load(self, offer: dict[str, Any]) -> Message:
        """Load what was offered. Return version and checksum as the server read them."""
        await self._wake_up("weights")
        await self.pause()  # ends cancelled requests of which the server has not heard yet
        version, checksum = await (self._load_adapter(offer) if "adapter" in offer else self.read_weights(offer))
        await self._wake_up("kv_cache")
        await self.resume()
        self.version = version
        return ["loaded", version, checksum]

    async def _load_adapter(self, offer: dict[str, Any]) -> tuple[int, int]:
        """Load an adapter, and the weights below it if this server does not have them yet."""
        base = offer["base"]
        if base is not None and self._base != base["checksum"]:
            _, self._base = await self.read_weights(base)
            if self._base != base["checksum"]:
                raise Gone(f"it loaded a base with checksum {self._base:08x}, not {base['checksum']:08x}")
        if self.model != self.name:
            await self._drop_adapter(self.model)
        self.model = f"{ADAPTER}{offer['version']}"
        call = f"{self.adapter_calls}/load_lora_adapter"
        await self._call("POST", call, {"lora_name": self.model, "lora_path": offer["adapter"]})
        return offer["version"], await self.finish_adapter(offer)

    async def _drop_adapter(self, name: str) -> None:
        await self._call("POST", f"{self.adapter_calls}/unload_lora_adapter", {"lora_name": name})

    async def _transfer(self, method: str, info: Any) -> Message:
        await self._wake_up("weights")
        return ["transferred", await self.transfer(method, info)]

    async def _sleep(self) -> Message:
        """Free the server's GPU memory until the next weights."""
        await self.sleep()
        self._asleep, self._base = {"weights", "kv_cache"}, None  # it has no weights at all then
        return ["slept"]

    async def _wake_up(self, tag: str) -> None:
        if tag in self._asleep:
            await self.wake_up(tag)
            self._asleep.discard(tag)

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    async def _json(self, method: str, path: str, body: Any = None) -> Any:
        return json.loads(await self._call(method, path, body))

    async def _call(self, method: str, path: str, body: Any = None) -> bytes:
        """Return the content of a response. Raises Gone for another status than 200."""
        async with self._session.request(method, f"{self.address}{path}", json=body) as response:
            content = await response.read()
        if response.status != 200:
            place = path.partition("?")[0]
            answer = content[:300].decode(errors="replace")
            kind = NotReady if response.status == 503 else Gone
            raise kind(f"{place}: {response.status} {answer}{self.way(place, response.status, answer)}")
        return content
