"""Is this checkout slower than another one? The same work in both, taking turns.

    git worktree add ../before COMMIT
    python benchmarks/speed/two_checkouts.py --other ../before --rounds 7      # some 15 minutes on two idle cores

Each round asks both checkouts for each piece of work, the first one changing from round to round; ratios are taken within a
round, so that a machine that becomes slower does so for both. Exit code 1 if the median of a ratio is above --limit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from plan import Rival
from processes import HERE, ROOT, Machine, Side, Sides
from tables import Figure, number
from work import CASES, MAX_TOKENS

RIVALS = (Rival("5m"), Rival("27m"))
SERVED: dict[str, dict[str, Any]] = {
    **{f"sampling, {case}": {"do": "sample", "case": case} for case in CASES},
    "update": {"do": "update"},
    "sampling, 8 replies of 16 to a prompt of 900": {"do": "prompt", "length": 900, "reply": 16, "group": 8},
}
"""Piece of work -> what is asked of a side that serves."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--other", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--limit", type=float, default=1.05, help="the largest ratio of times, this over other")
    parser.add_argument("--models", nargs="+", choices=[r.name for r in RIVALS], default=[r.name for r in RIVALS])
    parser.add_argument("--place", type=Path, default=ROOT / "runs" / "before", help="models, logs and runs")
    options = parser.parse_args()
    python = Path(sys.executable)
    ours = Machine(python, python, python, options.place.absolute() / "this", options.threads)
    other = replace(ours, place=options.place.absolute() / "other", root=options.other.absolute())
    for machine in (ours, other):
        made = [python, HERE / "models.py", machine.place / "models"]
        subprocess.run(made, check=True, env=ours.environment(), cwd=ROOT)
    print("| model, work | this, seconds | other, seconds | this / other |\n| --- | --- | --- | --- |", flush=True)
    slower = []
    for rival in (r for r in RIVALS if r.name in options.models):
        for work, seconds in measured(ours, other, rival, options.rounds).items():
            this, that = (Figure.of(values) for values in seconds)
            ratio = this.over(that)
            print(f"| {rival.name}, {work} | {this} | {that} | {ratio} |", flush=True)
            if ratio.median > options.limit:
                slower.append(f"{rival.name}, {work}: {number(ratio.median)}")
    print("slower: " + "; ".join(slower) if slower else f"nothing takes more than {options.limit:g} times as long")
    return 1 if slower else 0


def measured(ours: Machine, other: Machine, rival: Rival, rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Piece of work -> seconds a round, of this checkout and of the other one."""
    found: dict[str, tuple[list[float], list[float]]] = {}

    def ask(pair: tuple[Side, Side], name: str, number: int, key: str = "seconds", **request: Any) -> None:
        for place in (0, 1) if number % 2 else (1, 0):
            answer = pair[place].ask(**request)
            per = answer["tokens"] if name.startswith(("grpo", "sft")) else 1
            found.setdefault(name, ([], []))[place].append(answer[key] / per)

    def both(part: str, **settings: Any) -> tuple[Side, Side]:
        this, that = (
            sides.start("posttrain", part, model=machine.model(rival.model), precision=rival.precision, **settings)
            for sides, machine in ((here, ours), (there, other))
        )
        return this, that

    with Sides(ours) as here, Sides(other) as there:
        served = both("serve")
        for number in range(rounds + 1):
            for name, request in SERVED.items():
                ask(served, name, number, "sampling" if request["do"] == "prompt" else "seconds", **request)
    with Sides(ours) as here, Sides(other) as there:
        steps = {kind: both("grpo", reward=kind, max_tokens=MAX_TOKENS[rival.model]) for kind in ("signal", "sparse")}
        for number in range(rounds + 1):
            for kind, pair in steps.items():
                ask(pair, f"grpo per token, {kind}", number)
    with Sides(ours) as here, Sides(other) as there:
        pair = both("sft", rows=1000)
        for number in range(rounds + 1):
            ask(pair, "sft per token", number, steps=2)
    return {name: (this[1:], that[1:]) for name, (this, that) in found.items()}  # without the first round


if __name__ == "__main__":
    sys.exit(main())
