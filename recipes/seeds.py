"""Run a recipe for several seeds and write down the results: every seed, the mean, an interval.

    python recipes/seeds.py wordproblems --seeds 0 1 2 --also ../shared/data/wordproblems/svamp.jsonl

For each seed: recipes/NAME.py (if there is one; it prepares data), then the verbs of recipes/NAME.toml in order. Runs go
to runs/NAME/seed-K/, the figures to runs/NAME/results.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from results_file import ResultsFile

from posttrain.core.intervals import student_interval, told

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--also", help="further tasks to evaluate on, all of them")
    parser.add_argument("--threads", default="2")
    options = parser.parse_args()
    results = ResultsFile(Path("runs") / options.recipe)
    for seed in options.seeds:
        results.add(str(seed), one(options, seed))
    print(report(results))


def one(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """All verbs of the recipe with this seed."""
    recipe = tomllib.loads((HERE / f"{options.recipe}.toml").read_text())
    folder = Path("runs") / options.recipe / f"seed-{seed}"
    config = ["--config", str(HERE / f"{options.recipe}.toml"), "--threads", options.threads]
    found: dict[str, Any] = {"seconds": {}}

    def run(name: str, *words: str) -> None:
        begin = time.perf_counter()
        subprocess.run([sys.executable, *words], check=True)
        found["seconds"][name] = round(time.perf_counter() - begin, 1)

    tasks: dict[str, list[str]] = {}
    if (HERE / f"{options.recipe}.py").exists():
        prepared = str(folder / "tasks.jsonl")
        run("data", str(HERE / f"{options.recipe}.py"), "--seed", str(seed), "--out", prepared)
        tasks = {verb: ["--tasks", prepared] for verb in (["sft"] if "sft" in recipe else ["rl", "eval"])}
    own = ["--seed", str(seed)]
    if "sft" in recipe:
        run("sft", *_verb("sft"), *config, *own, *tasks.get("sft", []), "--out", str(folder / "sft"), "--overwrite")
    start = str(folder / "sft") if "sft" in recipe else recipe["rl"]["model"]
    rest = ["--model", start, "--out", str(folder / "rl"), "--overwrite"]
    run("rl", *_verb("rl"), *config, *own, *tasks.get("rl", []), *rest)
    both = ["--model", str(folder / "rl"), "--against", start, *own, "--split-seed", str(seed)]
    run(
        "eval",
        *_verb("eval"),
        *config,
        *both,
        *tasks.get("eval", []),
        "--out",
        str(folder / "eval.json"),
        "--overwrite",
    )
    found["eval"] = _figures(folder / "eval.json")
    if options.also:
        also = ["--tasks", options.also, "--held-out", "0", "--out", str(folder / "also.json"), "--overwrite"]
        run("also", *_verb("eval"), *config, *both, *also)
        found["also"] = _figures(folder / "also.json")
    return found


def report(results: dict[str, Any]) -> str:
    """A Markdown table: a row a seed and set of tasks, then the mean gain over seeds with its 95% interval (Student)."""
    lines = ["| seed | tasks | before | after | difference | 95% interval | seconds |", "|---|---|---|---|---|---|---|"]
    for name in ("eval", "also"):
        gains = []
        for seed, found in sorted(results.items(), key=lambda item: int(item[0])):
            if name not in found:
                continue
            f = found[name]
            gain = f["difference"]
            gains.append(gain["mean"])
            tasks = f"{'held-out' if name == 'eval' else 'also'} ({f['tasks']})"
            lines.append(
                f"| {seed} | {tasks} | {f['before']:.3f} | {f['after']:.3f} "
                f"| {gain['mean']:+.3f} | {told(gain, '+.3f').partition(' ')[2]} | {sum(found['seconds'].values()):.0f} |"
            )
        if len(gains) > 1:
            lines.append(f"| all | | | | {sum(gains) / len(gains):+.3f} | {student_interval(gains).text('+.3f')} | |")
    return "\n".join(lines)


def _verb(verb: str) -> list[str]:
    return ["-m", "posttrain", verb]


def _figures(path: Path) -> dict[str, Any]:
    """Of accuracy where the environment has a success threshold, else of the reward."""
    content = json.loads(path.read_text())
    [other] = content["against"]
    name = "accuracy" if "accuracy" in content["figures"] else "reward"
    return {
        "of": name,
        "tasks": content["figures"]["tasks"],
        "before": other["figures"][name]["mean"],
        "after": content["figures"][name]["mean"],
        "difference": other["differences"][name],
    }


if __name__ == "__main__":
    main()
