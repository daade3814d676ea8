"""Guess-the-number, learned: imitation of a careless player, then GRPO on whether the number is found.

    python recipes/guess.py [--seeds 0 1 2] [--out runs/guess]

The task is to find a number below 20 to 64 in five guesses. A binary search finds one of 31. The demonstrations are of a
player who guesses any possible number, and every third time any number at all. From there GRPO trains a decoder of 0.1 M
parameters on the environment `guess`, with only its reward. The result is the share of numbers found in games that are in
no training row, at temperature 1. Figures go to OUT/results.json, whole episodes too.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import posttrain
from posttrain.core.intervals import student_interval
from posttrain.core.types import Task
from posttrain.envs.builtin.guess import halves, hint_at, tasks

LEAST, LIMIT, GUESSES = 10, 40, 5
STEPS = 200
DEMONSTRATIONS = 12  # games of the careless player for each game to train on
SMALL: dict[str, Any] = {"threads": 1, "quiet": True, "overwrite": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", default="runs/guess")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for seed in options.seeds:
        results[str(seed)] = one(out / f"seed-{seed}", seed, options.steps)
        path.write_text(json.dumps(results, indent=1) + "\n")
    print(report(results))


def one(out: Path, seed: int, steps: int) -> dict[str, Any]:
    """Train and measure one seed."""
    train, held_out = games(False), games(True)
    rng = random.Random(seed)
    rows = [shown(task, careless(task, rng)) for task in train for _ in range(DEMONSTRATIONS)]
    start = posttrain.sft(
        rows, out=str(out / "sft"), hidden=96, layers=2, heads=4, context=128, tokenizer="characters", epochs=6, rows=32,
        lr=3e-3, warmup=50, seed=seed, **SMALL,
    )  # fmt: skip
    run = posttrain.rl(
        train, "guess", str(start.path), out=str(out / "rl"), steps=steps, prompts=32, group=16, max_tokens=4, lr=3e-4,
        betas=(0.9, 0.95), warmup=10, schedule="linear", kl=0.0, eval_tasks=lines(out / "held_out.jsonl", held_out),
        eval_every=20, eval_samples=4, env_workers=1, seed=seed, **SMALL,
    )  # fmt: skip
    curve = [{"step": line["step"], "found": line["eval/accuracy"]} for line in run.metrics if "eval/accuracy" in line]
    found: dict[str, Any] = {"games": len(held_out), "train": len(train), "best": best(held_out), "curve": curve}
    for name, path in (("before", start.path), ("after", run.path)):
        played = posttrain.evaluate(held_out, "guess", str(path), samples=8, k=(1,), max_tokens=4, threads=1, seed=seed)
        found[name] = played.figures["accuracy"]["mean"]
        found[f"{name} replies"] = sum(len(r.turns) // 2 for r in played.rollouts) / len(played.rollouts)
        found[f"{name} episodes"] = [episode(rollout) for rollout in played.rollouts[:: len(played.rollouts) // 12]]
    return found


def games(held_out: bool) -> list[Task]:
    """All games of one of the two parts."""
    drawn = tasks(700 if not held_out else 76, 0, limit=LIMIT, guesses=GUESSES, held_out=held_out)
    return [{**task, "replies": None} for task in drawn if task["limit"] >= LEAST]


def best(held_out: list[Task]) -> float:
    """The share that a search by halves finds."""
    found = [len(halves(int(task["answer"]), task["limit"])) <= GUESSES for task in held_out]
    return sum(found) / len(found)


def careless(task: Task, rng: random.Random) -> list[str]:
    """The guesses of a player who names any possible number, and every third time any number at all."""
    low, high, said = 0, task["limit"], list[str]()
    while len(said) < GUESSES and (not said or said[-1] != task["answer"]):
        guess = rng.randrange(task["limit"]) if rng.random() < 1 / 3 else rng.randrange(low, high)
        said.append(str(guess))
        hint = hint_at(said[-1], int(task["answer"]))
        low, high = (max(low, guess + 1), high) if hint == "higher" else (low, min(high, guess))
        if low >= high:
            break
    return said


def shown(task: Task, guesses: list[str]) -> dict[str, str]:
    """A whole game as a text to imitate, the hints in it included."""
    response = f"{guesses[0]}\n"
    for before, guess in pairwise(guesses):
        response += f"{hint_at(before, int(task['answer']))}: {guess}\n"
    return {"prompt": f"A number below {task['limit']}: ", "response": response}


def lines(path: Path, rows: list[Task]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def episode(rollout: Any) -> str:
    return "".join(turn.text for turn in rollout.turns).strip() + f"   [{rollout.task['answer']}: {rollout.reward:g}]"


def report(results: dict[str, Any]) -> str:
    """A Markdown table: a row a seed, then the mean gain with its 95% interval (Student)."""
    rows = ["| seed | games | halves find | before | after | guesses before | after |", "|---|---|---|---|---|---|---|"]
    for seed, f in results.items():
        guesses = f"{f['before replies']:.2f} | {f['after replies']:.2f}"
        rows.append(f"| {seed} | {f['games']} | {f['best']:.3f} | {f['before']:.3f} | {f['after']:.3f} | {guesses} |")
    gains = [f["after"] - f["before"] for f in results.values()]
    rows += ["", "| step | " + " | ".join(f"seed {seed}" for seed in results) + " |", "|---" * (len(results) + 1) + "|"]
    for points in zip(*(f["curve"] for f in results.values()), strict=True):
        rows.append(f"| {points[0]['step']} | " + " | ".join(f"{point['found']:.3f}" for point in points) + " |")
    if len(gains) > 1:
        rows += [
            "",
            f"Gain {sum(gains) / len(gains):+.3f} {student_interval(gains).text('+.3f')} over seeds {', '.join(results)}",
        ]
    return "\n".join(rows)


if __name__ == "__main__":
    main()
