"""Seconds of GRPO and SFT steps of a real model, beside another checkout. Its prompts share a system message and examples.

    git worktree add ../before COMMIT
    python benchmarks/speed/real_step.py --other ../before      # some six minutes on two idle cores

Each round asks both checkouts for the same work, the first one changing from round to round; ratios are taken within a
round. GRPO: 8 questions x 8 replies of at most 16 tokens a step. SFT: 8 rows a step. Prefill: 48 prompts, a token each.

    python benchmarks/speed/real_step.py --other ../before --searcher runs/real/search/sft-0

GRPO of Search-R1 alone, 8 questions x 8 rollouts a step, from the SFT checkpoint of `recipes.real.search`, with its index.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
STEPS = 4  # of which the first is thrown away


def serve(tasks: str, precision: str, searcher: str | None) -> dict[str, float]:
    """The work, with the posttrain that Python finds first."""
    import posttrain
    from posttrain.cli.real_model import fetched

    rows = [json.loads(line) for line in Path(tasks).read_text().splitlines()]
    common: dict[str, Any] = {"quiet": True, "seed": 0, "precision": precision, "save_every": 1000, "steps": STEPS}
    if searcher:
        env, index = "search-qa,topk=1,shown=800,searches=1,chat=true", str(Path(searcher).parent / "index")
        size = {"prompts": 8, "group": 8, "max_tokens": 48, "kl": 0.0, "lr": 1e-6}
        with tempfile.TemporaryDirectory() as place:
            posttrain.rl(rows, env, searcher, algorithm="grpo", retriever=(index,), out=f"{place}/rl", **size, **common)
            return _times(Path(place) / "rl", {"rollouts": "seconds/rollout", "update": "seconds/update"})
    model, reward = str(fetched()), "verify:f1,answer=reply"
    found = {}
    with tempfile.TemporaryDirectory() as place:
        size = {"prompts": 8, "group": 8, "max_tokens": 16, "kl": 0.0, "lr": 1e-6}
        posttrain.rl(rows, reward, model, algorithm="grpo", out=f"{place}/rl", **size, **common)
        found |= _times(Path(place) / "rl", {"GRPO, rollouts": "seconds/rollout", "GRPO, update": "seconds/update"})
        posttrain.sft(rows, model=model, out=f"{place}/sft", rows=8, lr=1e-6, chat=True, **common)
        found |= _times(Path(place) / "sft", {"SFT, update": "seconds/update"})
    began = time.perf_counter()
    posttrain.evaluate(rows[:1], reward, model, samples=1, k=(1,), max_tokens=1, precision=precision)
    loaded = time.perf_counter()
    posttrain.evaluate(rows[:49], reward, model, samples=1, k=(1,), max_tokens=1, precision=precision)
    found["prefill of 48 prompts"] = time.perf_counter() - loaded - (loaded - began)
    return found


def _times(run: Path, names: dict[str, str]) -> dict[str, float]:
    lines = [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()][1:]
    return {shown: statistics.mean(line[name] for line in lines) for shown, name in names.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--other", type=Path, help="the checkout to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument(
        "--searcher", help="checkpoint that searches: measure GRPO of Search-R1 from it, and nothing else"
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        print(json.dumps(serve(given.serve, given.precision, given.searcher)))
        return
    sys.path.insert(0, str(ROOT))
    from recipes import search_qa
    from recipes.real.reading import questions

    with tempfile.TemporaryDirectory() as place:
        tasks = Path(place) / "tasks.jsonl"
        data = Namespace(data=given.data)
        rows, _ = search_qa.questions(given.data / "retrieval", None) if given.searcher else questions(data)
        tasks.write_text("".join(json.dumps(row) + "\n" for row in rows[:: len(rows) // 64][:64]))
        sides = [ROOT, given.other.resolve()] if given.other else [ROOT]
        rounds = []
        for number in range(given.rounds):
            order = sides if number % 2 == 0 else sides[::-1]
            rounds.append({side: asked(side, tasks, given) for side in order})
            print(rounds[-1], flush=True)
    print(f"| {given.precision} | here | there | there / here |\n|---|---|---|---|")
    for name in rounds[0][ROOT]:
        times = [[one[side][name] for one in rounds] for side in sides]
        ratios = [b / a for a, b in zip(times[0], times[-1], strict=True)]
        cells = [f"{statistics.median(x):.2f} s [{min(x):.2f}, {max(x):.2f}]" for x in times]
        print(
            f"| {name} | {' | '.join(cells)} | {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}] |"
        )


def asked(checkout: Path, tasks: Path, given: Namespace) -> dict[str, float]:
    command = [sys.executable, str(HERE), "--serve", str(tasks), "--precision", given.precision]
    command += ["--searcher", given.searcher] if given.searcher else []
    ran = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(checkout)}, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
