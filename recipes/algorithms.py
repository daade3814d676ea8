"""Two tasks that every algorithm must learn, several seeds each: a table, and a curve per algorithm.

    python recipes/algorithms.py [--task worked-sums] [--rows grpo rloo] [--seeds 0 1 2] [--processes 2]
    python recipes/algorithms.py --variants [--task worked-sums] [--seeds 0 1 2]

`common_tasks` describes the tasks, and holds the settings. The start of a seed is trained once, and each (algorithm, seed)
is a process of its own. A finished one with the same settings is not repeated (delete its folder to repeat it). `report`
alone only writes the page again, between its marks: a table of the runs that there are. `--variants` runs the variants of
`common_tasks` and the algorithms that they change, and writes only the table of variants, between marks of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from common_tasks import TASKS, VARIANTS, CommonTask
from pages import over_seeds, write_page

import posttrain
from posttrain.algorithms.policy_table import TABLE
from posttrain.core.types import UserError
from posttrain.runs.curves import COLOURS
from posttrain.runs.run_reading import read_metrics, read_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PRACTISED = [name for name, row in TABLE.items() if row.teacher is None and row.branching is None]
HERE = Path(__file__).resolve()
DOCS = HERE.parents[1] / "docs"
PLACES = {"sums": ("curves", "algorithms"), "worked-sums": ("curves-worked-sums", "algorithms-worked-sums")}
"""Task -> the folder of its curves in docs/algorithms, and its page in docs/results."""

# -- the start ---------------------------------------------------------------------------------------------------------


def start(out: Path, common: CommonTask, seed: int) -> None:
    """Write the tasks of a seed and the common start of all algorithms."""
    folder = _start(out, seed)
    folder.mkdir(parents=True, exist_ok=True)
    tasks = common.practice(seed)
    shown = common.demonstrations(tasks, seed)
    for name, rows in (("practice", tasks), ("unseen", common.unseen(seed)), ("demonstrations", shown)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    begun = posttrain.sft(shown, out=str(folder / "sft"), overwrite=True, seed=seed, **common.imitation)
    assert not begun.interrupted, "half a start is none"
    (folder / "settings.json").write_text(json.dumps(dict(common.imitation)))  # last: the rest is whole


# -- one row, one seed -------------------------------------------------------------------------------------------------


def learn(out: Path, common: CommonTask, row: str, seed: int) -> None:
    """Train one algorithm or variant with one seed, measure it against its start, and write result.json."""
    folder, begun = out / row / f"seed-{seed}", _start(out, seed)
    options = {k: v.format(start=begun) if isinstance(v, str) else v for k, v in common.settings(row).items()}
    env = options.pop("env")
    held_out, algorithm = str(begun / "unseen.jsonl"), VARIANTS[row].row if row in VARIANTS else row
    begin = time.process_time()
    run = posttrain.rl(
        str(begun / "practice.jsonl"), env, str(begun / "sft"), algorithm=algorithm,
        out=str(folder / "rl"), overwrite=True, seed=seed, eval_tasks=held_out, **options,
    )  # fmt: skip
    assert not run.interrupted, "an interrupted run is no result"
    seconds = time.process_time() - begin  # with one thread that is what it takes on an idle machine
    found = posttrain.evaluate(
        held_out, env, str(run.path), against=str(begun / "sft"),
        samples=4, k=(1,), max_tokens=options["max_tokens"], env_workers=0, threads=1,
    )  # fmt: skip
    record = read_run(run.path)
    shutil.rmtree(run.path / "rollouts")  # of all rows and seeds together they are gigabytes
    result = {
        **{"row": row, "seed": seed, "settings": common.settings(row), "steps": options["steps"]},
        **{"before": found.against[0].figures["accuracy"]["mean"], "after": found.figures["accuracy"]["mean"]},
        "interval": [found.figures["accuracy"]["low"], found.figures["accuracy"]["high"]],
        "seconds": round(seconds, 1),
        "curve": [(m["step"], m["eval/accuracy"]) for m in read_metrics(run.path) if "eval/accuracy" in m],
        **{name: record[name] for name in ("end", "git", "versions", "machine")},
    }
    (folder / "result.json").write_text(json.dumps(result) + "\n")


# -- all of them -------------------------------------------------------------------------------------------------------


def run_all(out: Path, common: CommonTask, rows: Sequence[str], seeds: Sequence[int], processes: int) -> list[str]:
    """Make the starts, then every algorithm with every seed, some processes at a time. Returns the failures."""
    todo = [seed for seed in seeds if _read(_start(out, seed) / "settings.json") != _plain(common.imitation)]
    print(f"{len(todo)} starts to make")
    words = ["--task", common.name, "--seeds"]
    failed = _parallel([(_start(out, seed), ["start", *words, str(seed)]) for seed in todo], out, processes)
    if failed:
        return failed
    pairs = [
        (out / row / f"seed-{seed}", ["learn", "--rows", row, *words, str(seed)])
        for seed in seeds
        for row in rows
        if _read(out / row / f"seed-{seed}" / "result.json").get("settings") != _plain(common.settings(row))
    ]
    print(f"{len(pairs)} runs to do, {len(rows) * len(seeds) - len(pairs)} are there")
    return _parallel(pairs, out, processes)


def _parallel(jobs: Sequence[tuple[Path, list[str]]], out: Path, processes: int) -> list[str]:
    """Run this script with the words of each job, its output in log.txt of its folder. Returns the failures."""

    def one(job: tuple[Path, list[str]]) -> str:
        folder, words = job
        folder.mkdir(parents=True, exist_ok=True)
        # Idle threads that spin would take the processor from the other process.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        begin = time.perf_counter()
        with (folder / "log.txt").open("w") as log:
            command = [sys.executable, str(HERE), *words, "--out", str(out.parent)]
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment).returncode
        accuracy = _read(folder / "result.json").get("after", "") if not code else f"FAILED, see {folder}/log.txt"
        print(f"{folder.relative_to(out)}  {time.perf_counter() - begin:.0f} s  {accuracy}", flush=True)
        return str(folder) if code else ""

    with ThreadPoolExecutor(processes) as pool:
        return [folder for folder in pool.map(one, jobs) if folder]


def _start(out: Path, seed: int) -> Path:
    return out / "start" / f"seed-{seed}"


def _read(path: Path) -> dict[str, Any]:
    """{} where there is nothing, or half of it."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """As it is read back from JSON."""
    content: dict[str, Any] = json.loads(json.dumps(values))
    return content


# -- the report --------------------------------------------------------------------------------------------------------

Results = dict[str, dict[int, dict[str, Any]]]
"""Row or variant -> seed -> result, rows in the order of the table, then variants."""


def collect(out: Path) -> Results:
    """The results so far, also written to results.json."""
    found: Results = {}
    for row in (*TABLE, *VARIANTS):
        seeds = {int(path.parent.name.removeprefix("seed-")): _read(path) for path in out.glob(f"{row}/*/result.json")}
        if seeds:
            found[row] = dict(sorted(seeds.items()))
    flat = [result for seeds in found.values() for result in seeds.values()]
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(flat, indent=1) + "\n")
    return found


def report(common: CommonTask, results: Results, docs: Path) -> Path:
    """Write the page of a task with its pictures, and its variants. Raises UserError without results."""
    results, variants = (
        {name: seeds for name, seeds in results.items() if (name in VARIANTS) is of} for of in (False, True)
    )
    if not results:
        raise UserError("no run is finished yet: run recipes/algorithms.py without `report` first")
    folder, name = PLACES[common.name]
    for made in ("results", f"algorithms/{folder}"):
        (docs / made).mkdir(parents=True, exist_ok=True)
    for row, seeds in results.items():
        draw({row: seeds}, docs / "algorithms" / folder / f"{row}.png", 1, (6.4, 3.6), common.target)
    draw(results, docs / "results" / f"{name}.png", 5, (2.6, 1.9), common.target)
    learned = [row for row, seeds in results.items() if min(r["after"] for r in seeds.values()) > common.target]
    told = ", ".join(f"{name} {_word(value)}" for name, value in common.common.items())
    text = [
        f"# Every algorithm on {common.name.replace('-', ' ')}",
        "",
        *origin(f"--task {common.name}", results),
        "",
        *common.text,
        "",
        f"{len(learned)} of {len(results)} algorithms end above {common.target} with every seed.",
        "",
        *table(common, results),
        "",
        f"Common settings: {told}.",
        "",
        f"![Held-out accuracy over steps]({name}.png)",
    ]
    page = write_page(docs / "results" / f"{name}.md", text)
    return report_variants(common, {**results, **variants}, docs) if variants else page


def report_variants(common: CommonTask, results: Results, docs: Path) -> Path:
    """Write the variants' part of the page of a task. Raises UserError without results of variants."""
    variants = {name: seeds for name, seeds in results.items() if name in VARIANTS}
    if not variants:
        raise UserError("no variant is finished yet: run recipes/algorithms.py --variants without `report` first")
    compared = {VARIANTS[name].compared for name in variants}
    text = [
        "## Variants",
        "",
        *origin(f"--variants --task {common.name}", {n: s for n, s in results.items() if n in {*variants, *compared}}),
        "",
        "Options that change one component of an algorithm, with its settings otherwise. Differences are seed by seed, from",
        "the same starts.",
        "",
        *variant_table(results),
    ]
    return write_page(docs / "results" / f"{PLACES[common.name][1]}.md", text, "variants")


def origin(words: str, results: Results) -> list[str]:
    """The command, and when, on what and for how long it ran."""
    flat = [result for seeds in results.values() for result in seeds.values()]
    first, revisions = flat[0], sorted({_revision(result) for result in flat})
    seeds = " ".join(map(str, sorted({r["seed"] for r in flat})))
    return [
        f"    python recipes/algorithms.py {words} --seeds {seeds}",
        "",
        f"{max(r['end'] for r in flat)[:10]}, revision {', '.join(revisions)}, {first['machine']['platform']}, "
        f"{first['machine']['cores']} cores, one thread a run, Python {first['versions']['python']}, "
        f"torch {first['versions']['torch']}, float32. {len(flat)} runs, {sum(r['seconds'] for r in flat) / 60:.0f} minutes "
        "of one core.",
    ]


def table(common: CommonTask, results: Results) -> list[str]:
    """A Markdown table, one line per algorithm. Gains over GRPO are of the same seeds, whose starts differ."""
    columns = ["algorithm", "before", "after, each seed", "after, mean and 95% interval", "minus grpo, seed by seed",
               "steps", "seconds", "settings of its own"]  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row, seeds in results.items():
        found = list(seeds.values())
        before, after = ([r[name] for r in found] for name in ("before", "after"))
        own = ", ".join(f"{name} {_word(value)}" for name, value in common.own.get(row, {}).items())
        gained = "" if row == "grpo" else gain(seeds, results.get("grpo", {}))
        seconds = f"{np.mean([r['seconds'] for r in found]):.0f}"
        cells = [f"[{row}](../algorithms/{row}.md)", _figures(before), _figures(after), over_seeds(after), gained]
        lines.append(f"| {' | '.join([*cells, str(found[0]['steps']), seconds, own])} |")
    return lines


def variant_table(results: Results) -> list[str]:
    """A Markdown table, one line per variant that has run."""
    columns = ["variant", "options", "after, each seed", "after, mean and 95% interval", "minus", "difference", "seeds",
               "seconds"]  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name in (name for name in VARIANTS if name in results):
        variant, seeds = VARIANTS[name], results[name]
        options = " ".join(f"--{key.replace('_', '-')} {_word(value)}" for key, value in variant.options.items())
        linked = f"[{variant.row}](../algorithms/{variant.row}.md)"
        after = [r["after"] for r in seeds.values()]
        seconds = f"{np.mean([r['seconds'] for r in seeds.values()]):.0f}"
        gained = gain(seeds, results.get(variant.compared, {}))
        cells = [
            name,
            f"{linked} `{options.replace(' True', '')}`",
            _figures(after),
            over_seeds(after),
            variant.compared,
            gained,
        ]
        lines.append(f"| {' | '.join([*cells, ' '.join(map(str, seeds)), seconds])} |")
    return lines


def gain(seeds: Mapping[int, Mapping[str, Any]], beside: Mapping[int, Mapping[str, Any]]) -> str:
    """The mean difference over the seeds that both have, with its interval; "" if there are none."""
    gains = [r["after"] - beside[seed]["after"] for seed, r in seeds.items() if seed in beside]
    return over_seeds(gains, "+.3f") if gains else ""


def _revision(result: Mapping[str, Any]) -> str:
    git = result["git"]
    return f"{git['revision'][:8]}{' with changes' if git['dirty'] else ''}" if git else "unknown"


def _figures(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def draw(results: Results, path: Path, columns: int, size: tuple[float, float], target: float) -> None:
    """One panel per algorithm: held-out accuracy over steps, seeds thin, their mean thick, lowest to highest shaded."""
    from matplotlib.figure import Figure

    lines = -(-len(results) // columns)
    figure = Figure((size[0] * columns, size[1] * lines), 100, layout="constrained")
    for place, (row, seeds) in enumerate(results.items(), 1):
        axes = figure.add_subplot(lines, columns, place)
        _panel(axes, row, [result["curve"] for result in seeds.values()], target)
        if place + columns > len(results):
            axes.set_xlabel("step", fontsize=9, color="#555555")
        if columns == 1:
            axes.set_ylabel("held-out accuracy, temperature 1", fontsize=9, color="#555555")
    figure.savefig(path)


def _panel(axes: Axes, title: str, curves: Sequence[Sequence[tuple[int, float]]], target: float) -> None:
    steps = sorted(set.intersection(*({step for step, _ in curve} for curve in curves)))
    values = np.array([[dict(curve)[step] for step in steps] for curve in curves])  # [seeds, points]
    axes.axhline(target, color="#888888", linewidth=0.9, linestyle="--")
    axes.fill_between(steps, values.min(0), values.max(0), color=COLOURS[0], alpha=0.18, linewidth=0)
    for curve in values:
        axes.plot(steps, curve, color=COLOURS[0], linewidth=0.6, alpha=0.5)
    axes.plot(steps, values.mean(0), color=COLOURS[0], linewidth=1.8)
    axes.set_title(f"{title}   {values[:, -1].mean():.3f}", loc="left", fontsize=10, color="#222222")
    axes.set_ylim(min(0.4, float(values.min())), 1.0)
    axes.grid(linewidth=0.5, color="#e6e6e6")
    axes.tick_params(length=0, labelsize=8, labelcolor="#555555")
    axes.spines[:].set_visible(False)


# -- the command -------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("stage", nargs="?", default="all", choices=("all", "start", "learn", "report"))
    names = [*TABLE, *VARIANTS]
    parser.add_argument("--rows", nargs="+", choices=names, metavar="ROW", help="algorithms, or names of variants")
    parser.add_argument("--variants", action="store_true", help="all variants, and the algorithms that they change")
    parser.add_argument("--task", default="sums", choices=tuple(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, of one thread each")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where the report goes")
    options = parser.parse_args()
    compared = list(dict.fromkeys(variant.row for variant in VARIANTS.values()))
    options.rows = options.rows or ([*compared, *VARIANTS] if options.variants else PRACTISED)
    common, out = TASKS[options.task], options.out / options.task
    here: dict[str, Callable[[str, int], None]] = {
        "start": lambda _row, seed: start(out, common, seed),
        "learn": lambda row, seed: learn(out, common, row, seed),
    }
    if options.stage in here:
        for row in options.rows if options.stage == "learn" else [""]:
            for seed in options.seeds:
                here[options.stage](row, seed)
        return 0
    failed = []
    if options.stage == "all":
        failed = run_all(out, common, options.rows, options.seeds, options.processes)
    written = report_variants if options.variants else report
    print(written(common, collect(out), options.docs))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
