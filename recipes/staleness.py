"""The cost of learning from older rollouts: three algorithms, several --async-steps, with a correction and without.

    python recipes/staleness.py [--seeds 0 1 2] [--out runs/staleness]

The model and the sums are those of cli/demo_command.py, with fewer steps. `ratio`: the ratio is to the policy that sampled;
`truncate`: it starts at 1, and a truncated weight corrects for the sampling policy. The results are the accuracy on sums
that are in no training row, and the staleness of the rollouts. Figures go to OUT/results.json; finished ones are not run
again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from results_file import ResultsFile

import posttrain
from posttrain.cli.demo_command import demonstrations
from posttrain.core.intervals import student_interval
from posttrain.core.types import Task
from posttrain.envs.builtin import arithmetic

ROWS, AHEAD = ("grpo", "gspo", "cispo"), (0, 1, 2, 4)
SMALL: dict[str, Any] = {"threads": 1, "quiet": True, "overwrite": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", default="runs/staleness")
    options = parser.parse_args()
    out = Path(options.out)
    results = ResultsFile(out)
    for seed in options.seeds:
        practice, start = prepared(out, seed)
        for row, ahead, accounting in kinds(options.rows):
            make = partial(one, practice, start, out, row, ahead, accounting, seed, options.steps)
            results.once(f"{row} {accounting} {ahead} {seed}", make)
    print(report(results, options.rows, options.seeds))


def prepared(out: Path, seed: int) -> tuple[list[Task], str]:
    """The training sums and the start, as in the demo; they and unseen sums are written to `out` too."""
    out.mkdir(parents=True, exist_ok=True)
    practice = arithmetic.tasks(8800, seed, digits=1, operands=4)
    unseen = arithmetic.tasks(500, seed, digits=1, operands=4, held_out=True)
    for name, tasks in (("practice", practice), ("unseen", unseen)):
        (out / f"{name}-{seed}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return practice, imitated(practice, out / f"start-{seed}", seed)


def kinds(rows: Sequence[str]) -> list[tuple[str, int, str]]:
    """(row, steps ahead, the correction). With no steps ahead both are the same."""
    return [
        (row, ahead, accounting)
        for row in rows
        for ahead in AHEAD
        for accounting in ("ratio", "truncate")
        if ahead or accounting == "ratio"
    ]


def imitated(practice: Sequence[Task], out: Path, seed: int) -> str:
    """A model that has imitated some of them."""
    if not (out / "run.json").exists() or "final" not in json.loads((out / "run.json").read_text()):
        posttrain.sft(
            demonstrations(practice), out=str(out), seed=seed, hidden=64, layers=2, heads=4, context=32,
            tokenizer="characters", epochs=10, rows=64, lr=5e-3, warmup=20, **SMALL,
        )  # fmt: skip
    return str(out)


def one(
    practice: Sequence[Task], start: str, out: Path, row: str, ahead: int, accounting: str, seed: int, steps: int
) -> dict[str, Any]:
    """Train and measure one run. The cap is the algorithm's default; two minibatches let the ratio move within a step."""
    settings = {"correction": accounting if accounting == "truncate" else "none"} if ahead else {}
    run = posttrain.rl(
        practice, "arithmetic", start, out=str(out / "run"), algorithm=row, async_steps=ahead, steps=steps, prompts=64,
        group=8, minibatches=2, max_tokens=4, kl=0.0, lr=7e-4, betas=(0.9, 0.95), warmup=10, schedule="linear",
        eval_tasks=str(out / f"unseen-{seed}.jsonl"), eval_every=steps // 6, eval_samples=4, save_every=steps,
        env_workers=0, seed=seed, settings=settings, **SMALL,
    )  # fmt: skip
    lines = run.metrics
    curve = [[line["step"], line["eval/accuracy"]] for line in lines if "eval/accuracy" in line]
    late = lines[len(lines) // 2 :]

    def mean(name: str) -> float | None:
        found = [line[name] for line in late if name in line]
        return sum(found) / len(found) if found else None

    behind = {name: mean(name) for name in ("staleness", "sampler/kl", "sampler/ess", "clipped")}
    return {"accuracy": curve[-1][1], "curve": curve, **behind}


def report(results: dict[str, Any], rows: Sequence[str], seeds: Sequence[int]) -> str:
    """A Markdown table: a line each kind, its seeds, mean and 95% interval (Student), and that of its loss of accuracy."""
    head = "| algorithm | async steps | correction | accuracy of each seed | mean | difference to synchronous "
    found = [f"{head}| KL to sampler | effective share |", "|---|---|---|---|---|---|---|---|"]
    for row, ahead, accounting in kinds(rows):
        own = [results[f"{row} {accounting} {ahead} {seed}"] for seed in seeds]
        base = [results[f"{row} ratio 0 {seed}"]["accuracy"] for seed in seeds]
        values = [each["accuracy"] for each in own]
        lost = [value - other for value, other in zip(values, base, strict=True)]
        each = ", ".join(f"{value:.3f}" for value in values)
        kl, share = (sum(r[name] or 0.0 for r in own) / len(own) for name in ("sampler/kl", "sampler/ess"))
        beside = _with_interval(lost, "+") if ahead else ""
        found.append(
            f"| {row} | {ahead} | {accounting if ahead else ''} | {each} | {_with_interval(values)} | {beside} | {kl:.2g} "
            f"| {share:.3f} |"
        )
    return "\n".join(found)


def _with_interval(values: Sequence[float], sign: str = "") -> str:
    return f"{sum(values) / len(values):{sign}.3f} {student_interval(values).text(f'{sign}.3f')}"


if __name__ == "__main__":
    main()
