"""Guess-the-number, learned: imitation of a careless player, then reinforcement learning on whether the number is found.

    python recipes/guess.py [--seeds 0 1 2] [--out runs/guess]

The task is to find a number below 20 to 64 in five guesses. A binary search finds one of 31. The demonstrations are of a
player who guesses any possible number, and every third time any number at all. From there a decoder of 0.1 M parameters is
trained on the environment `guess`, with only its reward: by GRPO, which credits all guesses of a game alike, by GiGPO,
which also compares guesses behind the same guesses and hints, and by HGPO, which compares guesses behind the same last one,
two and three hints. The result is the share of numbers found in games that are in
no training row, at temperature 1. Figures go to OUT/results.json, whole episodes too.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pages import over_seeds, with_seeds
from results_file import ResultsFile

import posttrain
from posttrain import Rollout
from posttrain.core.transcripts import SpanKind
from posttrain.core.types import Task
from posttrain.envs.builtin.guess import halves, hint_at, tasks

LEAST, LIMIT, GUESSES = 10, 40, 5
STEPS = 200
ARMS: dict[str, dict[str, Any]] = {
    "GRPO": {"algorithm": "grpo"},
    "GiGPO": {
        "algorithm": "gigpo",
        "settings": {"turn_state": "history", "aggregate": "sequence-mean"},
    },
    "HGPO": {"algorithm": "hgpo", "settings": {"aggregate": "sequence-mean"}},
}
"""Way to train -> options of `posttrain.rl`, with GRPO's weights of tokens."""
DEMONSTRATIONS = 12  # games of the careless player for each game to train on
SMALL: dict[str, Any] = {"threads": 1, "quiet": True, "overwrite": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", default="runs/guess")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    out = Path(options.out)
    results = ResultsFile(out)
    for seed in options.seeds:
        results.add(str(seed), one(out / f"seed-{seed}", seed, options.steps))
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
    found: dict[str, Any] = {"games": len(held_out), "train": len(train), "best": best(held_out)}
    checkpoints = {"start": start.path}
    for arm, how in ARMS.items():
        run = posttrain.rl(
            train, "guess", str(start.path), out=str(out / arm), steps=steps, prompts=32, group=16, max_tokens=4, lr=3e-4,
            betas=(0.9, 0.95), warmup=10, schedule="linear", kl=0.0, eval_tasks=lines(out / "held_out.jsonl", held_out),
            eval_every=20, eval_samples=4, env_workers=1, seed=seed, **how, **SMALL,
        )  # fmt: skip
        assert not run.interrupted, "an interrupted run is no result"
        points = [
            {"step": line["step"], "found": line["eval/accuracy"]} for line in run.metrics if "eval/accuracy" in line
        ]
        found[f"{arm} curve"], checkpoints[arm] = points, run.path
    for name, path in checkpoints.items():
        played = posttrain.evaluate(held_out, "guess", str(path), samples=8, k=(1,), max_tokens=4, threads=1, seed=seed)
        found[name] = played.figures["accuracy"]["mean"]
        found[f"{name} guesses"] = sum(len(r.turns) // 2 for r in played.rollouts) / len(played.rollouts)
        found[f"{name} kept hints"] = hints_kept(played.rollouts)
        found[f"{name} episodes"] = [episode(rollout) for rollout in played.rollouts[:: len(played.rollouts) // 12]]
    return found


def hints_kept(rollouts: Sequence[Rollout]) -> float:
    """The share of the guesses after the first that contradict none of the hints before them."""
    kept = count = 0
    for rollout in rollouts:
        low, high, answer = 0, rollout.task["limit"], int(rollout.task["answer"])
        guesses = [turn.text.strip() for turn in rollout.turns if turn.kind is SpanKind.SAMPLED]
        for place, guess in enumerate(guesses):
            number = int(guess) if guess.isdigit() else -1
            if place:
                count += 1
                kept += low <= number < high
            hint = hint_at(guess, answer)
            low = max(low, number + 1) if hint == "higher" else low
            high = min(high, number) if hint == "lower" else high
    return kept / count


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
    """Markdown: of each arm the mean over seeds with its 95% interval (Student) and every seed, and the gain over GRPO."""
    columns = {"": "found", " guesses": "guesses", " kept hints": "guesses that keep to the hints"}
    rows = [f"| | {' | '.join(columns.values())} |", "|---" * (len(columns) + 1) + "|"]
    for arm in ("start", *ARMS):
        cells = []
        for name in columns:
            values = [f[arm + name] for f in results.values()]
            cells.append(with_seeds(values))
        rows.append(f"| {arm} | {' | '.join(cells)} |")
    first, *others = ARMS
    for arm in others:
        gains = [f[arm] - f[first] for f in results.values()]
        rows += ["", f"{arm} above {first}, seed by seed: {over_seeds(gains, '+.3f')}."]
    return "\n".join(rows)


if __name__ == "__main__":
    main()
