"""The training loop: what it calls in which order, when it ends, and what an interruption is."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from posttrain.core.batch import Stats, TrainingStep
from posttrain.system.garbage import YOUNG
from posttrain.training import loop
from posttrain.training.loop import FinishedStep, interruptible, train
from posttrain.training.update_work import UpdateWork


def counted(**figures: float) -> Stats:
    stats = Stats()
    for name, value in figures.items():
        stats.add(name, value)
    return stats


A, B = (
    SimpleNamespace(layout=SimpleNamespace(tokens=torch.zeros(n), length=(n,), prefix=(-1,)), target=torch.zeros(n - 1))
    for n in (3, 4)
)


class Fake:
    """A source of two updates a step, and a learner, that note what is asked of them. A clock ticks at every look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[Any] = []
        self.now = 0.0
        monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=self.tick))

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def produce(self, number: int) -> TrainingStep:
        self.done.append(("produce", number))
        self.now += 10.0
        return TrainingStep(number, [lambda: [A], lambda: [B]], counted(reward=number))  # type: ignore[list-item]

    def update(self, batches: Any, objective: Any) -> Stats:
        self.done.append((objective, *batches))
        self.now += 100.0
        return counted(loss=1.0)

    def learned(self, step: TrainingStep, stats: Stats) -> None:
        self.done.append(("learned", step.number, stats["loss"], stats["updates"]))
        stats.add("after", 1.0)

    def run(self, first: int, steps: int, *hooks: Any, **how: Any) -> int:
        return train(self, self, "objective", hooks, first=first, steps=steps, **how)  # type: ignore[arg-type]


def test_cycles_are_looked_for_seldom_while_a_training_runs_and_as_before_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, within = gc.get_threshold(), []
    Fake(monkeypatch).run(1, 1, lambda _: within.append(gc.get_threshold()))
    assert within[0][0] == YOUNG and gc.get_threshold() == before


def test_what_a_command_has_left_out_of_the_search_stays_out_after_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.unfreeze()
    fake, within = Fake(monkeypatch), list[bool]()
    fake.run(1, 1, lambda _: within.append(gc.get_freeze_count() > 0))
    assert within == [True] and gc.get_freeze_count() == 0
    gc.freeze()
    try:
        fake.run(1, 1)
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_a_training_that_fails_leaves_collections_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.unfreeze()
    before = gc.get_threshold()

    def fail(_: FinishedStep) -> None:
        raise RuntimeError("a hook")

    with pytest.raises(RuntimeError):
        Fake(monkeypatch).run(1, 1, fail)
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


def test_every_step_is_produced_learned_from_and_told_of_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, seen = Fake(monkeypatch), list[FinishedStep]()
    assert fake.run(3, 4, seen.append) == 4
    one = [("produce", 3), ("objective", A), ("objective", B), ("learned", 3, (2.0, 2.0), (2.0, 1.0))]
    assert fake.done == [*one, ("produce", 4), *one[1:3], ("learned", 4, (2.0, 2.0), (2.0, 1.0))]
    assert [(t.step.number, t.stats["reward"], t.stats["after"]) for t in seen] == [
        (3, (3.0, 1.0), (1.0, 1.0)),
        (4, (4.0, 1.0), (1.0, 1.0)),
    ]
    assert seen[0].seconds == {"rollout": 11.0, "update": 201.0} and seen[0].work == UpdateWork(7, 5, 6 + 10)
    assert "loss" not in seen[0].step.stats  # what the source told stays as it was
    assert fake.run(5, 4) == 4


def test_a_hook_ends_training_after_the_running_step(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, ended = Fake(monkeypatch), list[int]()
    late = [lambda t: t.step.number == 2, lambda t: ended.append(t.step.number)]
    assert fake.run(1, 9, *late) == 2 and ended == [1, 2]  # all hooks hear of the last step


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_asks_once_and_the_second_one_ends_at_once_unless_it_is_the_terminal_s(number: signal.Signals) -> None:
    def own(signum: int, frame: object) -> None:
        raise AssertionError

    before, said = signal.signal(number, own), list[str]()
    threads = threading.active_count()
    try:
        with interruptible(said.append) as asked:
            assert not asked()
            os.kill(os.getpid(), number)
            time.sleep(0)
            assert asked()
            if number == signal.SIGHUP:
                os.kill(os.getpid(), number)
            else:
                os.kill(os.getpid(), signal.SIGINT)  # passed on by a launcher, of what the terminal sent to all
                time.sleep(1.2 * loop.TOGETHER)
                with pytest.raises(KeyboardInterrupt):
                    os.kill(os.getpid(), number)
                    time.sleep(0.1)
        assert signal.getsignal(number) is own and threading.active_count() == threads
        assert len(said) == 1 and "interrupted: finishing this step" in said[0]
        signal.signal(number, signal.SIG_IGN)
        with interruptible(said.append):
            assert (signal.getsignal(number) == signal.SIG_IGN) is (number == signal.SIGHUP)
    finally:
        signal.signal(number, before)


def test_thread_that_gets_no_signals_trains_without_them() -> None:
    found = []

    def work() -> None:
        with interruptible(found.append) as asked:
            found.append(asked())
        found.append("left")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False, "left"]


def test_a_run_outside_the_main_thread_leaves_signals_alone() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with interruptible(seen.append) as asked:
            seen.append(str(asked()))
        seen.append("left")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["False", "left"] and signal.getsignal(signal.SIGINT) is before
