"""What the record of single tokens costs: python benchmarks/record/cost.py [--rounds 12]

Each case is one run of GRPO. Every gradient of it is computed four times, with the tap of each level of --record in turn
and in an order that changes, so that levels are compared on the same rollouts, weights and moments of the machine; then
once more for the run itself. In the same way each step's table is made and written at every level. Times are of the
process (CPU seconds, one thread): others on the machine do not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import posttrain
from posttrain.core.batch import Batch, Stats
from posttrain.core.protocols import Objective
from posttrain.core.rollouts import Outcome
from posttrain.core.token_probe import TokenSink
from posttrain.envs.builtin import arithmetic
from posttrain.learners.local_learner import LocalLearner
from posttrain.runs.record.rollout_tables import rollouts_table
from posttrain.runs.record.table_writer import write_table
from posttrain.runs.run_record import RunRecord
from posttrain.training.sources.ledger import Ledger
from posttrain.training.sources.rl_source import RLSource
from posttrain.training.sources.token_recording import GROUPS

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
LEVELS = ("tokens", "sample", "full")
GOALS = {"sample": 1.0, "full": 3.0}  # % of a step, over "tokens"


class Watch:
    """CPU seconds by what they went into."""

    def __init__(self, group: int, folder: Path) -> None:
        self.group, self.folder = group, folder
        self.spent: dict[str, list[float]] = defaultdict(list)
        self.apart = 0.0  # on measuring
        self.turn = 0
        self.bytes: dict[str, int] = {}

    @contextmanager
    def measuring(self) -> Any:
        begin = time.process_time()
        yield
        self.apart += time.process_time() - begin

    def levels(self) -> list[str]:
        self.turn += 1
        cut = self.turn % len(LEVELS)
        return [*LEVELS[cut:], *LEVELS[:cut]]

    def tapped(self, batches: Sequence[Batch], level: str) -> tuple[TokenSink, list[Batch]]:
        """The same micro-batches, with the tap of that level: these runs' own have all rollouts at theirs."""
        places = {place // self.group for batch in batches if batch.tap for place, _, _ in batch.tap.spans}
        kept = set(sorted(places)[:: max(1, len(places) // GROUPS)][:GROUPS]) if level == "sample" else places
        sink, found = TokenSink(), []
        for batch in batches:
            if level == "tokens" or batch.tap is None:
                found.append(replace(batch, tap=None))
                continue
            spans = tuple(span for span in batch.tap.spans if span[0] // self.group in kept)
            found.append(replace(batch, tap=replace(batch.tap, sink=sink, spans=spans)))
        return sink, found


def watched(watch: Watch, level: str) -> Any:
    """The methods that are measured, in place of their own."""
    accumulate, produce, learned = LocalLearner._accumulate, RLSource.produce, RLSource.learned
    update, rollouts = LocalLearner.update, RunRecord.rollouts

    def accumulated(self: LocalLearner, batches: Sequence[Batch], objective: Objective, stats: Stats) -> None:
        with watch.measuring():
            for level in watch.levels():
                sink, own = watch.tapped(batches, level)
                self.optimizer.zero_grad()
                begin = time.process_time()
                accumulate(self, own, objective, Stats())
                sink.settle()
                watch.spent[f"update {level}"].append(time.process_time() - begin)
            self.optimizer.zero_grad()
        accumulate(self, batches, objective, stats)

    def timed(name: str, method: Any) -> Any:
        def call(self: Any, *args: Any) -> Any:
            begin, apart = time.process_time(), watch.apart
            found = method(self, *args)
            watch.spent[name].append(time.process_time() - begin - (watch.apart - apart))
            return found

        return call

    def written(self: RunRecord, step: int, outcomes: Sequence[Outcome], kind: str = "rl") -> None:
        groups = sorted({o.rollout.group for o in outcomes if o.numbers})[:GROUPS]
        with watch.measuring():
            for level in watch.levels():
                few = [o if level == "full" or (level == "sample" and o.rollout.group in groups) else replace(o, numbers={})
                       for o in outcomes]  # fmt: skip
                begin = time.process_time()
                write_table(watch.folder / f"{level}.parquet", rollouts_table(step, few, kind))
                watch.spent[f"table {level}"].append(time.process_time() - begin)
                watch.bytes[level] = (watch.folder / f"{level}.parquet").stat().st_size
        rollouts(self, step, outcomes, kind)

    stack = [
        *([patch.object(LocalLearner, "_accumulate", accumulated)] if level == "full" else []),
        patch.object(LocalLearner, "update", timed("update", update)),
        patch.object(RLSource, "produce", timed("produce", produce)),
        patch.object(RLSource, "learned", timed("learned", learned)),
        *([patch.object(RunRecord, "rollouts", written)] if level == "full" else []),
        *(patch.object(Ledger, name, timed("account", getattr(Ledger, name)))
          for name in ("credit", "choose", "feed", "settle", "outcomes")),
    ]  # fmt: skip
    return stack


def demo(out: Path, rounds: int) -> dict[str, Any]:
    """The demo's step: 128 prompts x 8 replies of some four tokens, 0.1 M parameters, a vocabulary of characters."""
    rows = arithmetic.tasks(8800, 0, digits=1, operands=4)
    start = posttrain.sft(
        rows[:600], out=str(out / "sft"), threads=1, hidden=64, layers=2, heads=4, context=32, tokenizer="characters",
        epochs=3, rows=64, lr=5e-3, quiet=True,
    )  # fmt: skip
    how = {"prompts": 128, "minibatches": 2, "max_tokens": 4, "kl": 0.0, "lr": 7e-4}
    return {"rows": rows, "env": "arithmetic", "model": str(start.path), "steps": rounds, **how}


def gsm8k(out: Path, rounds: int) -> dict[str, Any]:
    """GSM8K with 5 M parameters and a vocabulary of 4,096: 16 prompts x 8 replies of at most 128 tokens, a reference."""
    rows = [json.loads(line) for line in (DATA / "gsm8k" / "train.jsonl").read_text().splitlines()[:400]]
    how = {"prompts": 16, "max_tokens": 128, "lr": 1e-5, "prompt_template": "{question}\n"}
    return {"rows": rows, "env": spread, "model": str(DATA / "models" / "gsm8k-5m"), "steps": rounds, **how}


def spread(task: posttrain.Task, reply: str) -> float:
    return len(set(reply)) / 50


def measured(case: Any, rounds: int) -> dict[str, Any]:
    """The run of all levels, and the account that a run of each level keeps."""
    found = ran(case, rounds, "full")
    for level in LEVELS:
        found[f"{level} account"] = ran(case, rounds, level)["account"] if level != "full" else found.pop("account")
    return found


def ran(case: Any, rounds: int, level: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        given = case(out, rounds)
        watch = Watch(8, out)
        rows, env, model = (given.pop(name) for name in ("rows", "env", "model"))
        stack = watched(watch, level)
        for entry in stack:
            entry.start()
        try:
            posttrain.rl(
                rows, env, model, out=str(out / "rl"), algorithm="grpo", group=8, threads=1, env_workers=0, quiet=True,
                record=level, save_every=10_000, **given,
            )  # fmt: skip
        finally:
            for entry in stack:
                entry.stop()
    return figures(watch, rounds, level)


def figures(watch: Watch, rounds: int, level: str) -> dict[str, Any]:
    """Per cent of a step's CPU time; the first step warms up."""
    spent = {name: values[len(values) // rounds :] for name, values in watch.spent.items()}
    steps = rounds - 1
    step = sum(sum(spent[name]) for name in ("produce", "update", "learned")) / steps
    extra: dict[str, Any] = {"seconds of a step": step, "account": 100 * sum(spent["account"]) / steps / step}
    if level != "full":
        return extra
    for level in ("sample", "full"):
        for what in ("update", "table"):
            own, base = spent[f"{what} {level}"], spent[f"{what} tokens"]
            each = len(own) / steps  # updates of a step
            added = statistics.median(a - b for a, b in zip(own, base, strict=True)) * each
            extra[f"{level} {what}"] = 100 * added / step
    extra["table tokens"] = 100 * sum(spent["table tokens"]) / steps / step
    extra["bytes"] = dict(watch.bytes)
    return extra


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--cases", nargs="*", default=["demo", "gsm8k"])
    options = parser.parse_args()
    for name in options.cases:
        found = measured({"demo": demo, "gsm8k": gsm8k}[name], options.rounds)
        print(f"{name}: a step {found['seconds of a step']:.3f} CPU s")
        for key, value in found.items():
            print(f"  {key}: {value if isinstance(value, dict) else f'{value:.2f}'}")


if __name__ == "__main__":
    main()
