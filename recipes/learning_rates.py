"""Compares learning rates of GRPO with a real model, on the task of the real demo: full fine-tuning and LoRA.

    python recipes/learning_rates.py [--seeds 0 1] [--out runs/learning-rates]

Every run has 15 steps of 8 prompts x 8 replies from SmolLM2-135M-Instruct: one-digit sums and products, asked in its chat
template. The result is the accuracy on 40 questions that were held out, 4 replies each at temperature 1. Runs that are
there already are not repeated. Writes its part of docs/results/learning-rates.md with --page.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pages import write_page

import posttrain
from posttrain.cli.demo_command import questions
from posttrain.cli.real_model import fetched
from posttrain.core.intervals import student_interval

WAYS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "full": ({}, (1e-6, 3e-6, 1e-5, 3e-5)),
    "LoRA, rank 16": ({"lora": 16}, (1e-5, 1e-4, 1e-3)),
}
HELD_OUT = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path, default=Path("runs/learning-rates"))
    parser.add_argument("--model", help="another model: a folder or a GGUF file")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--page", type=Path, help="page of results whose marked part is replaced")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "results.json"
    found: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    model = options.model or str(fetched())
    for seed in options.seeds:
        for way, (how, rates) in WAYS.items():
            for rate in rates:
                name = f"{way} {rate:g} {seed}"
                if name not in found:
                    found[name] = one(options.out / name.replace(" ", "-"), model, seed, rate, options.steps, how)
                    file.write_text(json.dumps(found, indent=1) + "\n")
    lines = table(found, options.seeds)
    print("\n".join(lines))
    if options.page:
        write_page(options.page, lines)


def one(out: Path, model: str, seed: int, rate: float, steps: int, how: dict[str, Any]) -> dict[str, float]:
    """Train once. Return accuracy on the held-out questions, and the reward and entropy of the last three steps."""
    asked = questions("+*", range(10), seed)
    run = posttrain.rl(
        asked[HELD_OUT:], "verify:numeric", model, algorithm="grpo", out=str(out), overwrite=True, seed=seed,
        steps=steps, prompts=8, group=8, max_tokens=24, kl=0.0, lr=rate, save_every=steps, eval_every=0, **how,
    )  # fmt: skip
    played = posttrain.evaluate(
        asked[:HELD_OUT], "verify:numeric", str(run.path), samples=4, k=(1,), max_tokens=24, seed=seed
    )
    last = run.metrics[-3:]
    return {
        "accuracy": played.figures["accuracy"]["mean"],
        "reward": sum(row["reward"] for row in last) / len(last),
        "entropy": sum(row["entropy"] for row in last) / len(last),
    }


def table(found: dict[str, dict[str, Any]], seeds: list[int]) -> list[str]:
    """A row for each way and rate: each seed's held-out accuracy, their mean with its 95% interval, reward, entropy."""
    columns = ["", "lr", *(f"seed {seed}" for seed in seeds), "mean", "reward, last 3 steps", "entropy"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for way, (_, rates) in WAYS.items():
        for rate in rates:
            runs = [found[name] for seed in seeds if (name := f"{way} {rate:g} {seed}") in found]
            if len(runs) < len(seeds):
                continue
            values = [run["accuracy"] for run in runs]
            mean = f"{sum(values) / len(values):.2f}" + (
                f" {student_interval(values).text('.2f')}" if values[1:] else ""
            )
            others = [f"{sum(run[name] for run in runs) / len(runs):.2f}" for name in ("reward", "entropy")]
            lines.append(f"| {' | '.join([way, f'{rate:g}', *(f'{v:.2f}' for v in values), mean, *others])} |")
    return lines


if __name__ == "__main__":
    main()
