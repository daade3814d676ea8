"""Learning curves of GRPO by posttrain and by TRL: one model, the same prompts in the same order, as many replies.

    python -m recipes.real.beside_trl [--seeds 0 1 2] [--out runs/real/beside_trl] [--docs docs]

TRL has an environment of its own: make -C benchmarks/peers ../../runs/peers/env-trl/ready, or another one with --trl.

SmolLM2-135M-Instruct learns one-digit sums and products in its chat template (the task of `posttrain demo --real`). Both
sides have the same options, float32 and one thread. The same code measures the checkpoints of both, on 40 questions that
were held out. posttrain goes first; TRL gets the prompts of its steps. A finished run is not repeated. Seeds decide which
questions are held out, and what is sampled on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import posttrain
from posttrain.cli.demo_command import questions
from posttrain.cli.real_model import fetched
from posttrain.core.intervals import student_interval
from posttrain.models.checkpoint_folder import load_model
from posttrain.models.native.decoder import Decoder
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer
from posttrain.runs.record.rollout_reading import read_rollouts
from posttrain.runs.run_files import CHECKPOINTS, step_name
from posttrain.runs.run_reading import read_timing
from recipes.pages import over_seeds, write_page
from recipes.real.study import ROOT
from recipes.results_file import ResultsFile

HELD_OUT, SAMPLES = 40, 4
PROMPTS, GROUP, LONGEST, RATE, EVERY = 8, 8, 24, 1e-5, 5
SIDES = ("posttrain", "TRL")
Found = dict[str, Any]


def ours(out: Path, model: str, seed: int, steps: int) -> None:
    run = posttrain.rl(
        questions("+*", range(10), seed)[HELD_OUT:], "verify:numeric", model, algorithm="grpo", out=str(out), overwrite=True,
        seed=seed, steps=steps, prompts=PROMPTS, group=GROUP, max_tokens=LONGEST, kl=0.0, lr=RATE, save_every=EVERY,
        keep=1 + steps // EVERY, threads=1, quiet=True,
    )  # fmt: skip
    assert not run.interrupted, "an interrupted run is no result"


def theirs(out: Path, python: Path, model: str, seed: int, steps: int, beside: Path) -> None:
    """Train with TRL on the prompts of the other side's steps."""
    out.mkdir(parents=True, exist_ok=True)
    known = {task["id"]: task for task in questions("+*", range(10), seed)}
    rows = []
    for step in range(1, steps + 1):
        asked = dict.fromkeys(rollout["task"] for rollout in read_rollouts(beside, step, ("task",)))
        assert len(asked) == PROMPTS
        prompts = [(known[name]["prompt"], known[name]["answer"]) for name in asked]
        rows += [{"prompt": [{"role": "user", "content": text}], "answer": answer} for text, answer in prompts]
    settings = out / "settings.json"
    given = {
        **{"model": model, "out": str(out), "seed": seed, "steps": steps, "every": EVERY, "rows": rows, "threads": 1},
        **{"prompts": PROMPTS, "group": GROUP, "batch": 16, "max_tokens": LONGEST, "lr": RATE},
    }
    settings.write_text(json.dumps(given))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with (out / "output.txt").open("w") as log:
        command = [str(python), str(Path(__file__).with_name("trl_grpo.py")), str(settings)]
        subprocess.run(command, check=True, env=environment, stdout=log, stderr=subprocess.STDOUT)


def accuracy(model: str, seed: int) -> float:
    """On the held-out questions, at temperature 1."""
    asked = questions("+*", range(10), seed)[:HELD_OUT]
    found = posttrain.evaluate(
        asked, "verify:numeric", model, samples=SAMPLES, k=(1,), max_tokens=LONGEST, threads=1, env_workers=0
    )
    return float(found.figures["accuracy"]["mean"])


def checkpoint(out: Path, side: str, step: int) -> Path:
    return out / CHECKPOINTS / step_name(step) if side == SIDES[0] else out / f"checkpoint-{step}"


def seconds(out: Path, side: str, step: int) -> float:
    """Of training until this step was done: sampling and updates, without evaluation."""
    if side == SIDES[0]:
        timing = read_timing(out)
        return float(sum(t["seconds/rollout"] + t["seconds/update"] for t in timing if t["step"] <= step))
    lines = [json.loads(line) for line in (out / "clock.jsonl").read_text().splitlines()]
    return float(next(line["seconds"] for line in lines if line["step"] == step))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=ROOT / "runs/real/beside_trl")
    parser.add_argument("--trl", type=Path, default=ROOT / "runs/peers/env-trl", help="TRL's environment")
    parser.add_argument("--docs", type=Path, help="folder of the documents: writes the page and the picture")
    options = parser.parse_args()
    found = ResultsFile(options.out)
    model = options.out / "model"
    if not (model / "config.json").exists():
        decoder = load_model(fetched())
        assert isinstance(decoder, Decoder)
        save_model(decoder, model, Tokenizer.load(fetched()))
    for seed in options.seeds:
        for side in SIDES:
            if f"{side} {seed}" not in found:
                out = options.out / f"{side.lower()}-{seed}"
                if side == SIDES[0]:
                    ours(out, str(model), seed, options.steps)
                else:
                    python = options.trl / "bin" / "python"
                    theirs(out, python, str(model), seed, options.steps, options.out / f"{SIDES[0]}-{seed}")
                found.once(f"{side} {seed}", partial(curve, out, side, model, seed, options.steps))
    lines = table(found, options.seeds)
    print("\n".join(lines))
    if options.docs:
        draw(found, options.seeds, options.docs / "results" / "learning-beside-trl.png")
        write_page(options.docs / "results" / "learning-beside-trl.md", lines)


def curve(out: Path, side: str, model: Path, seed: int, steps: int) -> Found:
    """Accuracy and seconds of the start and of every checkpoint."""
    places = range(EVERY, steps + 1, EVERY)
    values = [accuracy(str(checkpoint(out, side, step)), seed) for step in places]
    return {
        "step": [0, *places],
        "accuracy": [accuracy(str(model), seed), *values],
        "seconds": [0.0, *(seconds(out, side, step) for step in places)],
    }


def table(found: Found, seeds: Sequence[int]) -> list[str]:
    """Accuracy by step and side, and the seconds of a step."""
    steps = found[f"{SIDES[0]} {seeds[0]}"]["step"]
    lines = [f"| | {' | '.join(f'after {step}' for step in steps)} | seconds a step |", "|---" * (len(steps) + 2) + "|"]
    for side in SIDES:
        own = [found[f"{side} {seed}"] for seed in seeds]
        cells = [over_seeds([curve["accuracy"][place] for curve in own]) for place in range(len(steps))]
        per_step = over_seeds([curve["seconds"][-1] / steps[-1] for curve in own], ".1f")
        lines.append(f"| {side} | {' | '.join(cells)} | {per_step} |")
    last = [[found[f"{side} {seed}"]["accuracy"][-1] for side in SIDES] for seed in seeds]
    ratio = [[found[f"{side} {seed}"]["seconds"][-1] for side in SIDES] for seed in seeds]
    lines += [
        "",
        f"At the end, seed by seed: posttrain minus TRL {over_seeds([a - b for a, b in last], '+.3f')} "
        f"({', '.join(f'{a:.3f} and {b:.3f}' for a, b in last)}). TRL takes "
        f"{over_seeds([b / a for a, b in ratio], '.1f')} times as long.",
    ]
    return lines


def draw(found: Found, seeds: Sequence[int], file: Path) -> None:
    """Accuracy by replies and by minutes: mean over seeds with its 95% interval."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    by_reply, by_minute = figure.subplots(1, 2, sharey=True)
    for side, colour in zip(SIDES, ("#1f6feb", "#d1570a"), strict=True):
        own = [found[f"{side} {seed}"] for seed in seeds]
        steps = own[0]["step"]
        means, low, high = [], [], []
        for place in range(len(steps)):
            values = [curve["accuracy"][place] for curve in own]
            interval = student_interval(values)
            means.append(sum(values) / len(values))
            low.append(interval.low)
            high.append(interval.high)
        minutes = [sum(curve["seconds"][place] for curve in own) / len(own) / 60 for place in range(len(steps))]
        for axes, places in ((by_reply, [step * PROMPTS * GROUP for step in steps]), (by_minute, minutes)):
            axes.plot(places, means, color=colour, label=side)
            axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
    by_reply.set(xlabel="sampled replies", ylabel="held-out accuracy", ylim=(0, 1))
    by_minute.set(xlabel="minutes of training, one thread")
    by_reply.legend(frameon=False, loc="lower right")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
