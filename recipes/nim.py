"""Nim by self-play: imitation of a player who moves at random, then GRPO in which both sides are the policy.

    python recipes/nim.py [--seeds 0 1 2] [--out runs/nim]

Games have 2 to 12 stones, of which up to 2 or 3 may be taken at once; taking the last one wins. The demonstrations are
games of two players who make any legal move. From there a decoder of 0.1 M parameters plays against itself: each game
gives two rollouts, and wins are compared with losses on the same side of the same game. No training data contains a good
move on purpose. The results are measured from starts that it was not trained on, at temperature 1. They are its win rate
as the first player, against perfect play from those that perfect play would win, and against random play; and the share of
its moves that are perfect play's where one of them wins. Figures go to OUT/results.json, whole games too.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from results_file import ResultsFile

import posttrain
from posttrain.core.intervals import student_interval
from posttrain.core.types import Task

STONES, MOST = 12, 3
STEPS = 400
DEMONSTRATIONS = 120  # random games for each start to train on
SMALL: dict[str, Any] = {"threads": 1, "quiet": True, "overwrite": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", default="runs/nim")
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
    rows = [{**task, "replies": at_random(task, rng)} for task in train for _ in range(DEMONSTRATIONS)]
    for number, row in enumerate(rows):
        row["id"] = f"{row['id']} {number}"
    start = posttrain.sft(
        rows, env="nim", out=str(out / "sft"), hidden=96, layers=2, heads=4, context=512, tokenizer="characters", epochs=3,
        rows=32, lr=3e-3, warmup=50, seed=seed, **SMALL,
    )  # fmt: skip
    run = posttrain.rl(
        train, "nim", str(start.path), out=str(out / "rl"), steps=steps, prompts=8, group=24, max_tokens=3, lr=1e-3,
        betas=(0.9, 0.95), warmup=10, schedule="linear", kl=0.05,
        eval_tasks=lines(out / "held_out.jsonl", against(winnable(held_out), "perfect", 8)), eval_every=50, eval_samples=1,
        env_workers=1, seed=seed, **SMALL,
    )  # fmt: skip
    curve = [{"step": line["step"], "reward": line["eval/reward"]} for line in run.metrics if "eval/reward" in line]
    found: dict[str, Any] = {"starts": len(held_out), "winnable": len(winnable(held_out)), "curve": curve}
    for name, path in (("before", start.path), ("after", run.path)):
        for opponent, some in (("perfect", winnable(held_out)), ("random", held_out)):
            played = posttrain.evaluate(
                against(some, opponent, 16), "nim", str(path), samples=1, k=(1,), max_tokens=3, threads=1, seed=seed
            )
            found[f"{name} {opponent}"] = played.figures["accuracy"]["mean"]
            found[f"{name} {opponent} games"] = [episode(rollout) for rollout in played.rollouts[:: len(some) * 4]]
            if opponent == "random":
                found[f"{name} moves"] = good_moves(played.rollouts)
    return found


def games(held_out: bool) -> list[Task]:
    """All starts of one of the two parts; every fourth is held out. Later positions occur in both parts."""
    starts = [(stones, most) for stones in range(2, STONES + 1) for most in range(2, MOST + 1)]
    return [
        {"id": f"{stones} stones, 1 to {most}", "stones": stones, "most": most}
        for stones, most in starts
        if ((stones + most) % 4 == 0) == held_out
    ]


def winnable(starts: list[Task]) -> list[Task]:
    """Those that perfect play wins."""
    return [task for task in starts if task["stones"] % (task["most"] + 1)]


def against(starts: list[Task], opponent: str, games: int) -> list[Task]:
    """So many games from each start; the opponent draws anew in each."""
    return [
        {**task, "id": f"{task['id']}, game {game}", "against": opponent, "seed": game}
        for task in starts
        for game in range(games)
    ]


def at_random(task: Task, rng: random.Random) -> list[str]:
    """The moves of a game of two players who make any legal move."""
    left, said = task["stones"], list[str]()
    while left:
        said.append(str(rng.randint(1, min(task["most"], left))) + "\n")
        left -= int(said[-1])
    return said


def good_moves(rollouts: list[Any]) -> float:
    """The share of perfect play's moves among those made where perfect play would win."""
    good = []
    for rollout in rollouts:
        shown = [turn.text for turn in rollout.turns]
        for before, said in zip(shown[::2], shown[1::2], strict=False):
            left = int(before.split(" left")[0].split()[-1])
            if best := left % (rollout.task["most"] + 1):
                good.append(said.strip() == str(best))
    return sum(good) / len(good)


def lines(path: Path, rows: list[Task]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def episode(rollout: Any) -> str:
    return "".join(turn.text for turn in rollout.turns).strip().replace("\n", " | ") + f"   [{rollout.reward:g}]"


def report(results: dict[str, Any]) -> str:
    """A Markdown table: a row a seed, then the means with their 95% intervals (Student)."""
    names = ("perfect", "random", "moves")
    rows = [
        "| seed | beats perfect play, before | after | beats random play, before | after | good moves, before | after |",
        "|---" * 7 + "|",
    ]
    for seed, f in results.items():
        figures = " | ".join(f"{f[f'{when} {name}']:.3f}" for name in names for when in ("before", "after"))
        rows.append(f"| {seed} | {figures} |")
    if len(results) > 1:
        means = []
        for name in names:
            for when in ("before", "after"):
                values = [f[f"{when} {name}"] for f in results.values()]
                means.append(f"{sum(values) / len(values):.3f} {student_interval(values).text()}")
        rows.append(f"| mean | {' | '.join(means)} |")
    rows += ["", "| step | " + " | ".join(f"seed {seed}" for seed in results) + " |", "|---" * (len(results) + 1) + "|"]
    for points in zip(*(f["curve"] for f in results.values()), strict=True):
        rows.append(f"| {points[0]['step']} | " + " | ".join(f"{point['reward']:.3f}" for point in points) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
