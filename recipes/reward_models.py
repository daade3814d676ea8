"""Reward models on real preferences, several seeds each: a table beside rules of length and a bag of words.

    python recipes/reward_models.py --data ../shared/data [--seeds 0 1 2] [--only pairs k-wise] [--out runs/reward-models]

All start from stories260K after one epoch of its own kind of instructions. A fifth of the prompts is held out, by the
seed. Experiments: pairs, K-wise comparisons (all of a prompt as one element, and as rankings), steps of solutions, and
InstructGPT's reason for K-wise batches: a model overfits to comparisons that are shuffled into single pairs.

A finished run with the same settings is not repeated (delete its folder to repeat it). The text between the marks of the
page is written anew each time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pages import write_page

import posttrain
from posttrain.core.intervals import student_interval
from posttrain.core.types import Task
from posttrain.data.preference_examples import to_item
from posttrain.data.tasks import hold_out, to_tasks
from posttrain.runs.run_reading import read_run
from posttrain.services.reward_model_service import RewardModelService

DOCS = Path(__file__).resolve().parents[1] / "docs"
HELD_OUT = 0.2
SOLUTIONS = 300  # of each file of solutions in steps, the first ones
RANKED = 60  # prompts whose comparisons are learned by heart
SEEN = 40  # training prompts whose comparisons are asked for afterwards
IMITATION: dict[str, Any] = {"epochs": 1, "lr": 1e-3, "rows": 16}
COMMON: dict[str, Any] = {"held_out": HELD_OUT, "lr": 1e-3, "rows": 8, "epochs": 1, "save_every": 10**6}
QUIET: dict[str, Any] = {"threads": 1, "quiet": True, "overwrite": True}

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Experiment:
    """A run of each seed, and the title of its table."""

    group: str
    name: str
    rows: Callable[[Path], Rows]
    settings: dict[str, Any] = field(default_factory=dict)
    by_heart: bool = False  # whether training comparisons are asked for afterwards


# -- rows --------------------------------------------------------------------------------------------------------------


def read(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def pairs(data: Path) -> Rows:
    return read(data / "preferences" / "pairs.jsonl")


def ranked(data: Path) -> Rows:
    return read(data / "preferences" / "kwise.jsonl")


def few(data: Path) -> Rows:
    return ranked(data)[:RANKED]


def shuffled(data: Path) -> Rows:
    """One row per comparison, so that those of a prompt are in different batches."""
    return [
        {"prompt": row["prompt"], "chosen": row["responses"][pair[p - 1]], "rejected": row["responses"][pair[2 - p]]}
        for row in few(data)
        for pair, p in zip(row["pairs"], row["preferred"], strict=True)
        if p
    ]


def solutions(name: str) -> Callable[[Path], Rows]:
    def rows(data: Path) -> Rows:
        found = read(data / "process" / f"{name}.jsonl")
        return [{**row, "prompt": row["input"]} for row in found if not wrong_after_all(name, row)][:SOLUTIONS]

    return rows


def wrong_after_all(name: str, row: dict[str, Any]) -> bool:
    """Labelled as without mistake, but with a wrong answer; only answers of arithmetic are comparable as text."""
    return name == "multistep_arithmetic" and row["mistake_index"] is None and row["answer"] != row["target"]


FILES = ("multistep_arithmetic", "tracking_shuffled_objects", "dyck_languages")
EXPERIMENTS = [
    Experiment("pairs", "mean over the reply", pairs, {"pooling": "mean"}),
    Experiment("pairs", "last token", pairs),
    Experiment("k-wise", "k-wise", ranked, {"algorithm": "k-wise", "pooling": "mean"}),
    Experiment("k-wise", "plackett-luce", ranked, {"algorithm": "plackett-luce", "pooling": "mean"}),
    *(Experiment("steps", name, solutions(name), {"algorithm": "outcome"}) for name in FILES),
    *(
        Experiment("by heart", f"{name}, {epochs} epochs", rows, {**own, "pooling": "mean", "epochs": epochs}, by_heart=True)
        for name, rows, own in (
            ("one element a prompt", few, {"algorithm": "k-wise", "rows": 8}),
            ("shuffled pairs", shuffled, {"algorithm": "bradley-terry", "rows": 40}),  # as many updates an epoch
        )
        for epochs in (1, 3)
    ),
]  # fmt: skip


# -- runs --------------------------------------------------------------------------------------------------------------


def start(out: Path, data: Path) -> Path:
    """stories260K, once it has read instructions: one for all."""
    folder = out / "start"
    if not (folder / "report.txt").exists():
        rows = str(data / "sft" / "instructions.jsonl")
        posttrain.sft(rows, model=str(data / "models" / "stories260K"), out=str(folder), **IMITATION, **QUIET)
        (folder / "report.txt").write_text("whole\n")
    return folder


def learn(experiment: Experiment, seed: int, out: Path, data: Path) -> dict[str, Any]:
    folder = out / experiment.group / experiment.name.replace(" ", "-").replace(",", "") / f"seed-{seed}"
    settings = {**COMMON, **experiment.settings}
    done = folder / "result.json"
    if done.exists() and (result := json.loads(done.read_text()))["settings"] == settings:
        return dict(result)
    begin = time.process_time()
    rows = experiment.rows(data)
    run = posttrain.reward_model(rows, str(start(out, data)), out=str(folder), seed=seed, **settings, **QUIET)
    report, record = json.loads((run.path / "report.json").read_text()), read_run(run.path)
    result = {
        "settings": settings, "seed": seed, **{name: record[name] for name in ("end", "git", "versions", "machine")},
        "prompts": report["prompts"], "figures": {name: f["mean"] for name, f in report["figures"].items()},
    }  # fmt: skip
    if experiment.by_heart:
        assert run.checkpoint is not None
        result["figures"]["accuracy on training prompts"] = seen(run.checkpoint, few(data), seed)
    result["seconds"] = round(time.process_time() - begin, 1)
    done.write_text(json.dumps(result) + "\n")
    return result


def seen(checkpoint: Path, rows: Rows, seed: int) -> float:
    """Accuracy on comparisons of prompts that were trained on."""
    training, _ = hold_out(to_tasks(rows, convert=to_item, split_seed=seed), HELD_OUT, seed)
    service = RewardModelService(checkpoint)
    won: list[float] = []
    for task in list(training)[:SEEN]:
        found = _scores(service, task)
        margins = [
            found[int(b)] - found[int(w)] for b, w, _, _ in task["comparisons"] if {int(b), int(w)} <= found.keys()
        ]
        won += [0.5 if m == 0 else float(m > 0) for m in margins]
    return float(np.mean(won))


def _scores(service: RewardModelService, task: Task) -> dict[int, float]:
    """Of the responses that fit, by their place."""
    for id, response in enumerate(task["responses"]):
        service.submit(id, {"prompt": task["prompt"], "response": response})
    answers = dict(service.poll())
    while len(answers) < len(task["responses"]):
        answers |= dict(service.poll())
    return {id: answer for id, answer in answers.items() if isinstance(answer, float)}


# -- the page ----------------------------------------------------------------------------------------------------------

Results = dict[str, dict[str, list[dict[str, Any]]]]
"""Group -> name -> results, one a seed."""

TOLD = {
    "pairs": "1,100 pairs (prompt, chosen, rejected; six are equal and left out). transformers can load a reward model "
    "that scores the last token, and none that takes the mean over the reply.",
    "k-wise": "500 prompts with 4 responses and 6 comparisons each, ties left out.",
    "steps": f"The first {SOLUTIONS} solutions of each file, cut after their first mistake; every step is scored at its "
    "end. Of the arithmetic solutions that are labelled as without mistake, 18 of 62 end in a wrong answer: they are left "
    "out. `always the commoner`: every step gets the more frequent label. Solutions of more than 512 tokens, the model's "
    "limit, are left out too: of shuffled objects 178 of 300, and the files of logical deduction (none of 300 fits) and "
    "word sorting (6).",
    "by heart": f"Of the first {RANKED} prompts with comparisons. One element a prompt: 8 prompts per update. Shuffled: "
    "each comparison is a pair of its own, 40 per update, and those of a prompt are in different batches.",
}


def page(results: Results, docs: Path, seeds: Sequence[int]) -> Path:
    flat = [r for names in results.values() for own in names.values() for r in own]
    first, revisions = flat[0], sorted({(r["git"] or {"revision": "unknown"})["revision"][:8] for r in flat})
    minutes = sum(r["seconds"] for r in flat) / 60
    only = "" if len(results) == len(TOLD) else f" --only {' '.join(repr(g) if ' ' in g else g for g in results)}"
    common = ", ".join(f"{name} {value}" for name, value in COMMON.items())
    lines = [
        "# Reward models",
        "",
        f"    python recipes/reward_models.py --seeds {' '.join(map(str, seeds))}{only}",
        "",
        f"{max(r['end'] for r in flat)[:10]}, revision {', '.join(revisions)}, {first['machine']['platform']}, "
        f"{first['machine']['cores']} cores, one thread, Python {first['versions']['python']}, torch "
        f"{first['versions']['torch']}, float32. {len(flat)} runs, {minutes:.0f} minutes of a core.",
        "",
        "All runs start from stories260K (260,032 parameters) after one epoch of 1,100 instructions. A fifth of the prompts",
        "is held out, chosen by the seed, which also sets the initial head and the order. Common",
        f"settings, chosen on seed 0: {common}. Intervals are Student's 95% over seeds.",
    ]
    for group, names in results.items():
        lines += ["", f"## {group.capitalize()}", "", TOLD[group], "", *table(names)]
    return write_page(docs / "results" / "reward-models.md", lines)


def table(names: dict[str, list[dict[str, Any]]]) -> list[str]:
    """A line an experiment, a column a figure: each seed, the mean, its interval."""
    columns = list(dict.fromkeys(name for own in names.values() for r in own for name in r["figures"]))
    lines = [f"| | held-out prompts | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for name, own in names.items():
        cells = [figure([r["figures"][column] for r in own if column in r["figures"]]) for column in columns]
        lines.append(f"| {name} | {', '.join(str(r['prompts']) for r in own)} | {' | '.join(cells)} |")
    return lines


def figure(values: Sequence[float]) -> str:
    if not values:
        return ""
    each = ", ".join(f"{value:.3f}" for value in values)
    if len(values) < 2:
        return each
    return f"{each}: **{np.mean(values):.3f}** {student_interval(values).text()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=sorted(TOLD), default=list(TOLD))
    parser.add_argument("--out", type=Path, default=Path("runs/reward-models"))
    parser.add_argument("--docs", type=Path, default=DOCS, help="where the page goes")
    options = parser.parse_args()
    found: Results = {}
    for experiment in (e for e in EXPERIMENTS if e.group in options.only):
        for seed in options.seeds:
            result = learn(experiment, seed, options.out, options.data)
            found.setdefault(experiment.group, {}).setdefault(experiment.name, []).append(result)
            shown = {name: round(value, 3) for name, value in result["figures"].items()}
            print(experiment.group, experiment.name, seed, shown, f"{result['seconds']} s", flush=True)
    print(page(found, options.docs, options.seeds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
