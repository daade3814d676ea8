"""The only training loop: a source of steps and an objective. Everything else is a hook after a step."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue

from posttrain.core.batch import Stats, TrainingStep
from posttrain.core.protocols import Learner, Objective, Source
from posttrain.system.garbage import YOUNG
from posttrain.training.update_work import UpdateWork

TOGETHER = 0.5  # seconds in which signals are one request to stop

Hook = Callable[["FinishedStep"], bool | None]
"""Function that is called after a step, and returns True to end training."""


@dataclass(frozen=True)
class FinishedStep:
    """A finished step, as hooks get it."""

    step: TrainingStep
    stats: Stats  # statistics of source and updates
    seconds: dict[str, float]  # "rollout" (the source), "update"
    between: float = 0.0  # seconds between the previous step's update and this step: its record, evaluation, checkpoint
    work: UpdateWork = UpdateWork()


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Context without models, rows and libraries in collections: full ones would traverse them every few steps."""
    gc.collect()
    is_own, before = gc.get_freeze_count() > 0, gc.get_threshold()  # a command leaves libraries out until it ends
    gc.freeze()
    gc.set_threshold(YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not is_own:
            gc.unfreeze()


@_rare_collections()
def train(
    learner: Learner,
    source: Source,
    objective: Objective,
    hooks: Sequence[Hook],
    *,
    first: int,
    steps: int,
    phase: Callable[[int, str], AbstractContextManager[None]] = lambda number, name: nullcontext(),
) -> int:
    """Run steps `first` to `steps`, or fewer if a hook ends training; return the number of the last one done.

    `phase` returns a context manager for each phase of a step, "rollout" and "update".
    """
    number, updated = first - 1, time.perf_counter()
    while number < steps:
        number += 1
        begin, work = time.perf_counter(), UpdateWork()
        with phase(number, "rollout"):
            step = source.produce(number)
        produced = time.perf_counter()
        stats = Stats(step.stats)
        with phase(number, "update"):
            made = 0
            for build in step.updates:
                batches = build()
                work = work.adding(batches)
                found = learner.update(batches, objective)
                stats.merge(found)
                made += 1
                if step.enough(found):
                    break
            stats.add("updates", made)
        source.learned(step, stats)
        between, updated = begin - updated, time.perf_counter()
        seconds = {"rollout": produced - begin, "update": updated - produced}
        ended = [hook(FinishedStep(step, stats, seconds, between, work)) for hook in hooks]
        if any(ended):
            break
    return number


@contextmanager
def interruptible(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Context manager in which Ctrl-C, SIGTERM or the end of the terminal (SIGHUP) ends the run after the current step.

    A second Ctrl-C or SIGTERM ends it at once, unless it follows within `TOGETHER` seconds: a launcher (or timeout) passes
    on what the terminal sent to the whole group. SIGHUP arrives twice, from the terminal and from its shell, and stays
    ignored if it was (nohup). Handlers only set a flag, since they interrupt anything, printing included; `say` is
    called from a thread.
    """
    asked = 0.0  # when the first signal arrived
    told: SimpleQueue[str | None] = SimpleQueue()

    def ask(signum: int, frame: object) -> None:
        nonlocal asked
        now = time.monotonic()
        if asked and signum != signal.SIGHUP and now - asked > TOGETHER:
            raise KeyboardInterrupt
        if not asked:
            asked = now
            told.put(
                "interrupted: finishing this step, then saving (press again to stop at once; the last checkpoint stays)"
            )

    def tell() -> None:
        while (text := told.get()) is not None:
            say(text)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    teller = threading.Thread(target=tell, name="signals", daemon=True)
    teller.start()
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        told.put(None)
        teller.join()
