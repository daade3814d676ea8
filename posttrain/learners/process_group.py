"""The processes of torch.distributed as a `World`, and functions to join them.

Before each collective every process reports through the store, a separate channel, that it is ready. So if a process
has failed or hangs, the others get an error with the reason, and none waits in a collective that cannot end.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from posttrain.core.protocols import Lasting, World
from posttrain.core.types import UserError
from posttrain.models.gpu_placement import GPUPlacement
from posttrain.system.child_processes import MEETING

FAILED = "failed"  # the store's entry for the first failure: exit code and reason
HEARD = "heard"  # the store's entry that the first process ends, and so prints the reason
HEARD_SECONDS = 5.0  # for the first process to notice a failure; it may wait on a GPU for the process that has failed
LEAVE_SECONDS = 5.0  # for a process that has failed to leave the group
FIRST_PAUSE, LONGEST_PAUSE = 0.0001, 0.01  # seconds between checks for readiness


class Elsewhere(UserError):
    """Raised when another process of the run has failed. `code`: the resulting exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Processes:
    """Processes of torch.distributed; implements `posttrain.core.protocols.World`."""

    def __init__(
        self,
        store: Store | None = None,
        timeout: float = 600.0,
        group: Any = None,
        name: str = "",
        lasting: Store | None = None,
    ) -> None:
        """Wrap an initialised process group. `store`: store shared by the processes; None: readiness is not checked.

        `timeout`: seconds within which the other processes have to reach each call. `group`: group of
        torch.distributed, with the `name` under which its calls are counted; None: all processes. `lasting`: a store
        that outlives a restart.
        """
        assert dist.is_initialized(), "start the process group first"
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._store, self._timeout, self._calls = store, timeout, 0
        self._group, self._name, self._apart, self._lasting = group, name, 0, lasting
        self._ranks = dist.get_process_group_ranks(group)  # in the run, by rank in this group

    def sum(self, x: Tensor) -> Tensor:
        self._wait_for_all()
        total = x.detach().clone()
        with_peers(lambda: dist.all_reduce(total, group=self._group))
        return total

    def gather(self, x: Any) -> list[Any]:
        self._wait_for_all()
        found: list[Any] = [None] * self.size
        with_peers(lambda: dist.all_gather_object(found, x, group=self._group))
        return found

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Context for collectives that are not calls of this world; all processes have to make the same ones.

        It begins when all processes have reached it. Raises UserError if a process is lost before its end.
        """
        self._wait_for_all()
        with self.noticing():
            yield

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Context that raises UserError if a process is lost in a collective within it. It waits for nobody."""
        try:
            yield
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> UserError:
        """Return the error for a broken collective, with the reason if the other process has reported one."""
        try:
            if (failed := self._failure()) is not None:
                return failed
        except RuntimeError:  # the process that serves the store is gone as well
            pass
        return gone(error)

    def _failure(self) -> Elsewhere | None:
        """Return the first failure of a process; None if there is none yet."""
        if self._store is None or not self._store.check([FAILED]):
            return None
        code, _, why = self._store.get(FAILED).decode().partition(" ")
        return Elsewhere(why, int(code))

    def __deepcopy__(self, memo: Any) -> Processes:
        return self  # models refer to the processes that compute them, and copies of a model have the same ones

    def divided(self, groups: Sequence[Sequence[int]]) -> Processes:
        """Return this process's own group of all processes. All have to call this with the same groups, by rank."""
        self._wait_for_all()
        self._apart += 1
        timeout = timedelta(seconds=self._timeout)
        made = [dist.new_group(list(ranks), timeout=timeout) for ranks in groups]
        place = next(place for place, ranks in enumerate(groups) if self.rank in ranks)
        return Processes(self._store, self._timeout, made[place], f"{self._name}{self._apart}.{place}.")

    # -- calls within a meeting: see `posttrain.models.peers.Peers`

    def total(self, x: Tensor) -> Tensor:
        found = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(found, group=self._group)
        return found

    def stacked(self, x: Tensor) -> Tensor:
        found = x.new_empty((self.size, *x.shape))
        dist.all_gather(list(found.unbind()), x.detach().contiguous(), group=self._group)
        return found

    def exchanged(self, x: Tensor) -> Tensor:
        found = torch.empty_like(x)
        dist.all_to_all_single(found, x.detach(), group=self._group)
        return found

    def dealt(self, x: Tensor, sent: Sequence[int], got: Sequence[int]) -> Tensor:
        found = x.new_empty((sum(got), *x.shape[1:]))
        dist.all_to_all_single(found, x.detach().contiguous(), list(got), list(sent), group=self._group)
        return found

    def apart(self) -> Processes:
        """Return a view of the same processes that counts its calls separately; an error of one view is one of all."""
        self._wait_for_all()
        self._apart += 1
        group = dist.new_group(timeout=timedelta(seconds=self._timeout))
        return Processes(self._store, self._timeout, group, f"{self._name}{self._apart}.")

    def fail(self, error: BaseException) -> None:
        """Report, to other processes and to other threads of this one, the reason why this process makes no more calls.
        The first report counts. A UserError of which the first process does not hear is marked as unheard.
        """
        global _failed
        _failed = True
        if self._store is None:
            return
        code = error.code if isinstance(error, UserError) else 1
        why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        told = f"{code} process {self.rank}: {why}"
        try:
            if self.rank == 0:
                self._store.set(HEARD, "")
            first = not isinstance(error, Elsewhere) and self._store.compare_set(FAILED, "", told) == told.encode()
            # over Gloo the first process notices when this one ends, over NCCL it may wait for it for ever
            if first and isinstance(error, UserError) and not error.unheard and "nccl" in dist.get_backend_config():
                error.unheard = not self._is_heard()
        except RuntimeError:  # the process that serves the store is gone, which all others detect
            return

    def _is_heard(self) -> bool:
        """Return whether the first process has heard of a failure, or does within a short time."""
        assert self._store is not None
        end = time.monotonic() + HEARD_SECONDS
        while not (heard := self._store.check([HEARD])) and time.monotonic() < end:
            time.sleep(LONGEST_PAUSE)
        return heard

    def mark(self, name: str) -> None:
        if self._lasting is not None:
            self._lasting.set(name, "")

    def marked(self, name: str) -> bool:
        return self._lasting is not None and bool(self._lasting.check([name]))

    def _wait_for_all(self) -> None:
        """Wait until all processes have reached this call. Raises UserError if one does not."""
        if self._store is None:
            return
        self._calls += 1
        pause, end = FIRST_PAUSE, time.monotonic() + self._timeout
        try:
            call = f"{self._name}{self._calls}"
            entries = {f"{call}/{r}": place for r, place in enumerate(self._ranks)}
            self._store.set(f"{call}/{self.rank}", "")
            while not self._store.check(list(entries)):  # one message to the store, however many processes there are
                if (failed := self._failure()) is not None:
                    raise failed
                if time.monotonic() > end:
                    missing = [str(place) for entry, place in entries.items() if not self._store.check([entry])]
                    said = ", ".join(missing)
                    raise Elsewhere(f"process {said} did not respond within {self._timeout:g} s (--collective-timeout)")
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            if self._calls > 2:  # all others have read that entry
                self._store.delete_key(f"{self._name}{self._calls - 2}/{self.rank}")
        except RuntimeError as error:
            raise Elsewhere(f"the first process of the run is gone ({' '.join(str(error).split())[:100]})") from error


def with_peers(call: Callable[[], Any]) -> None:
    """Run a collective. If a peer is killed during it, the broken connection raises an error."""
    try:
        call()
    except RuntimeError as error:
        raise gone(error) from error


def gone(error: RuntimeError) -> UserError:
    """Return the error for a broken collective. NCCL also fails by itself, and the reason ends a long message."""
    said = " ".join(str(error).split())
    if "NCCL error" in said and "ncclRemoteError" not in said:
        found = re.search(r"Last error: (.+)", said) or re.search(r"NCCL version \S+ (.+)", said)
        own = UserError(f"NCCL failed: {found[1][:300] if found else said[:300]} (with NCCL_DEBUG=INFO it says more)")
        own.code = 1
        return own
    return Elsewhere(f"another process of the run is gone ({said[:100]})")


_failed = False  # whether a run of this process has failed
_runs = count()
"""Number of runs in this process: each run's calls have names of their own."""


def joined(
    device: str, timeout: float, learner_devices: tuple[int, ...] = (), role_devices: tuple[int, ...] = ()
) -> Processes:
    """Join the processes of a run, which torchrun or --processes has started. For the devices see `GPUPlacement`."""
    kept = _shared_store(timeout)
    # torchrun's store outlives a restart, and entries of the previous attempt must not be read again
    attempt = _attempt(kept, timeout) if _kept_by_torchrun() else 0
    store = PrefixStore(f"posttrain {attempt}", kept)
    if not dist.is_initialized():
        dist.init_process_group(
            backend(gpus_of_all(device, GPUPlacement.here(learner_devices, (), role_devices), store)),
            store=PrefixStore("group", store),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=timeout),
        )
        atexit.register(_leave)  # their threads must not outlive the interpreter
    return Processes(PrefixStore(f"run {next(_runs)}", store), timeout, lasting=PrefixStore("posttrain", kept))


def backend(gpus: Sequence[str]) -> str:
    """Return torch.distributed's backends for processes on these GPUs, one name per process; "": no GPU.

    If processes share a GPU, as in a trial on a small machine, Gloo sums through the host's memory, since NCCL refuses
    shared GPUs.
    """
    if not all(gpus):
        return "gloo"
    return "cpu:gloo,cuda:gloo" if len(set(gpus)) < len(gpus) else "cpu:gloo,cuda:nccl"


def gpus_of_all(device: str, placement: GPUPlacement, store: Store) -> list[str]:
    """Return the GPU of every process, by a name that is unique over all machines; "": no GPU.

    Numbers are not unique: a batch system may show each process only its own GPU, which is then number 0 in each.
    """
    own = ""
    if device.startswith("cuda") or (device == "auto" and placement.gpus):
        _, _, number = device.partition(":")
        gpu = int(number) if number.isdigit() else placement.learner() if placement.gpus else 0
        own = str(torch.cuda.get_device_properties(gpu).uuid) if placement.gpus > gpu else f"{gpu}"
    store.set(f"gpu/{os.environ['RANK']}", own or "none")
    names = [store.get(f"gpu/{rank}").decode() for rank in range(int(os.environ["WORLD_SIZE"]))]
    return ["" if name == "none" else name for name in names]


def _leave() -> None:
    if dist.is_initialized():
        if _failed:  # NCCL waits for processes that may be waiting for this one
            faulthandler.dump_traceback_later(LEAVE_SECONDS, exit=True, file=os.open(os.devnull, os.O_WRONLY))
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
    _shared_store.cache_clear()
    _attempt.cache_clear()


def _kept_by_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@cache
def _attempt(kept: Store, timeout: float) -> int:
    return attempt_of(kept, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout)


def attempt_of(kept: Store, rank: int, size: int, timeout: float) -> int:
    """Return the number of this start by torchrun, the same in all processes.

    torchrun's own number differs between machines: it counts a restart where a process has failed, but not where
    processes restart because of another machine. So the first process counts, and invites each other process by a name
    that is new in every start, since entries of old starts may still be in the store.
    """
    store, end, name = PrefixStore("posttrain starts", kept), time.monotonic() + timeout, uuid4().hex
    attempt = store.add("number", 1) if rank == 0 else 0
    if rank:
        store.set(f"here/{rank}", name)
    missing = set(range(1, size)) if rank == 0 else {0}
    invited: dict[int, bytes] = {}
    while missing:
        if rank and store.check([f"invited/{rank}"]):
            invitation = store.get(f"invited/{rank}").decode().split()
            if invitation[0] == name:
                store.set(f"in/{invitation[1]}/{rank}", "")
                return int(invitation[1])
        for other in sorted(missing) if not rank else ():
            if store.check([f"in/{attempt}/{other}"]):
                missing.discard(other)
            elif store.check([f"here/{other}"]) and (there := store.get(f"here/{other}")) != invited.get(other):
                store.set(f"invited/{other}", there.decode() + f" {attempt}")
                invited[other] = there
        if time.monotonic() > end:
            raise Elsewhere(
                f"process {', '.join(map(str, sorted(missing)))} did not join within {timeout:g} s (--collective-timeout)"
            )
        time.sleep(LONGEST_PAUSE)
    return attempt


@cache
def _shared_store(timeout: float) -> Store:
    """Return the store of the first process, or torchrun's."""
    # an open socket, passed only to the first process: a port that is merely free might be taken before it is opened
    meeting = os.environ.pop(MEETING, None) if os.environ["RANK"] == "0" else None
    kept: Store = dist.TCPStore(  # type: ignore[attr-defined]  # it is imported there by a star
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=os.environ["RANK"] == "0" and not _kept_by_torchrun(),
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=None if meeting is None else int(meeting),
    )
    return kept


if TYPE_CHECKING:
    _proof: Callable[..., World] = Processes
    _lasting: Callable[..., Lasting] = Processes
