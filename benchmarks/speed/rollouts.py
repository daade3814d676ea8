"""Measure the cost of Python per rollout: steps of 1,024 short rollouts of a tiny decoder, scored by a plain reward.

    git worktree add ../before COMMIT
    python benchmarks/speed/rollouts.py --other ../before --rounds 12      # some two minutes

Processor time is counted, not the clock, of the training process with its threads and of the workers that score, so that
others on the machine matter little. With --other both checkouts take turns, the first one changing from round to round, and
ratios are taken within a round. The network is so small that its arithmetic hardly counts: the command says what is left.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from processes import ROOT
from side import Line
from tables import Figure

HERE = Path(__file__).resolve()
PROMPTS, GROUP = 128, 8
SERVE = "--serve"  # what a side is called with, and the folder that it works in


class Rival:
    """A process that trains with the package of a checkout, and stands still until it is asked."""

    def __init__(self, root: Path, place: Path) -> None:
        reading, writing = os.pipe()
        place.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "BENCH_ANSWERS": str(writing)}
        with (place / "log.txt").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, HERE, SERVE, place], stdin=subprocess.PIPE, stdout=log, stderr=log,
                pass_fds=[writing], env=environment, cwd=place,
            )  # fmt: skip
        os.close(writing)
        self.place, self.answers = place, os.fdopen(reading)
        self.hear()  # its first step is done

    def hear(self) -> dict[str, float]:
        """Milliseconds a rollout, by who spent them."""
        line = self.answers.readline()
        if not line:
            sys.exit((self.place / "log.txt").read_text()[-2000:])
        found: dict[str, float] = json.loads(line)
        return found

    def ask(self, steps: int) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(f'{{"steps": {steps}}}\n'.encode())
        self.process.stdin.flush()
        return self.hear()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def serve(place: Path) -> None:
    """Train for ever in this process, and be measured."""
    import posttrain
    from posttrain.envs.builtin import arithmetic
    from posttrain.training import trainer

    line, original = Line(), trainer.train
    tasks = arithmetic.tasks(2000, 0, digits=1, operands=4)
    shape: dict[str, Any] = {"hidden": 16, "layers": 1, "heads": 2, "context": 16, "tokenizer": "characters"}
    common: dict[str, Any] = {"overwrite": True, "seed": 0, "threads": 1, "quiet": True}
    begun = posttrain.sft(tasks, out=str(place / "sft"), epochs=2, rows=64, lr=5e-3, **shape, **common)
    left, steps, before = 1, 1, _spent()

    def after(_: Any) -> None:
        nonlocal left, steps, before
        left -= 1
        if left:
            return
        per = 1000 / (steps * PROMPTS * GROUP)
        line.answer(**{name: (spent - before[name]) * per for name, spent in _spent().items()})
        asked = line.asked()
        if asked is None:
            raise SystemExit
        left = steps = asked["steps"]
        before = _spent()

    def train(learner: Any, source: Any, objective: Any, hooks: Sequence[Any], **options: Any) -> int:
        return original(learner, source, objective, [*hooks, after], **options)

    trainer.train = train  # type: ignore[assignment]
    posttrain.rl(
        tasks, f"{HERE.with_name('rewards.py')}:signal", str(begun.path), algorithm="grpo", out=str(place / "rl"),
        steps=1_000_000, save_every=1_000_000, prompts=PROMPTS, group=GROUP, max_tokens=4, kl=0.0, lr=1e-6, **common,
    )  # fmt: skip


def _spent() -> dict[str, float]:
    """Seconds of processor time so far, and of the clock."""
    own, ticks, parents = os.getpid(), dict[int, int](), dict[int, int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            told = stat.read_text().rpartition(")")[2].split()
            pid = int(stat.parent.name)
            parents[pid], ticks[pid] = int(told[1]), int(told[11]) + int(told[12])

    def descends(pid: int) -> bool:
        parent = parents.get(pid, 0)
        return parent == own or (parent != 0 and descends(parent))

    workers = sum(spent for pid, spent in ticks.items() if descends(pid)) / os.sysconf("SC_CLK_TCK")
    return {"trainer": time.process_time(), "workers": workers, "clock": time.perf_counter()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--other", type=Path, help="the checkout to compare with")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5, help="of a round")
    parser.add_argument("--place", type=Path, default=ROOT / "runs" / "rollouts", help="models, logs and runs")
    options = parser.parse_args()
    place = options.place.absolute()
    roots = {"this": ROOT, **({"other": options.other.absolute()} if options.other else {})}
    rivals = {name: Rival(root, place / name) for name, root in roots.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in rivals}
    for number in range(options.rounds):
        for name in list(rivals)[:: 1 if number % 2 else -1]:
            found[name].append(rivals[name].ask(options.steps))
    for rival in rivals.values():
        rival.end()
    print("| milliseconds a rollout | " + " | ".join([*rivals, *["this / other"] * (len(rivals) > 1)]) + " |")
    print("| --- " * (1 + len(rivals) + (len(rivals) > 1)) + "|")
    for what in ("trainer", "workers", "both", "clock"):
        figures = [Figure.of([_value(lap, what) for lap in laps]) for laps in found.values()]
        ratio = [figures[0].over(figures[1])] if len(figures) > 1 else []
        print(f"| {what} | " + " | ".join(map(str, [*figures, *ratio])) + " |")


def _value(lap: dict[str, float], what: str) -> float:
    return lap["trainer"] + lap["workers"] if what == "both" else lap[what]


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        serve(Path(sys.argv[2]))
    else:
        main()
