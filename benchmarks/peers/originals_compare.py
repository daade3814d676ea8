"""Compares what every update of an original and of its imported recipe did; prints the tables of docs/results/imports.md.

    python benchmarks/peers/originals_compare.py FOLDER

A difference is allowed where the recipe tells it: `told.toml` has the words by which it does. Fails for any other, and for
words without a difference. Recipes are imported again: their values must be those of the runs, their comments may be better.
"""

from __future__ import annotations

import json
import math
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import verl_compare
from originals import ORIGINALS, Original
from verl_ours import imported
from verl_runs import VERL_RUNS

from posttrain.apps.migration.migrate import recipe_for

ROUNDING = {"float32": 2e-4, "bfloat16": 1e-1}
"""Products -> the relative difference of a loss or of a gradient's norm that is rounding."""
ON_POLICY = 1.0  # what a difference of losses of replies is relative to: on policy they are 0 but for rounding
RANDOM = 0.2  # relative difference of gradient norms of adapters, which begin at random
FIRST = 3  # updates whose losses are compared: after them weights differ by rounding, and order may
SHOWN, UPDATES = ("dpo full", "grpo script"), 10  # runs whose first updates are a table, and how many
VERL_NUMBERS = {
    "losses": ("loss", ON_POLICY),
    "policy losses": ("policy loss", ON_POLICY),
    "KL": ("kl", 1e-2),
    "entropy": ("entropy", 1.0),
    "shares clipped": ("clipped", 1.0),
    "gradient norms": ("grad_norm", 1e-12),
}
"""Quantity of all updates of a run of verl -> its name, and what a difference is at least relative to."""
FACTS = (
    "optimizer",
    "betas",
    "eps",
    "weight decay",
    "numbers trained",
    "numbers decayed",
    "clip",
    "products",
    "weights",
)
SAME_OPTIMIZER = {"adamw_torch_fused": "adamw", "adamw_torch": "adamw"}
TOLD: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("told.toml").read_text(encoding="utf-8"))
"""Run -> quantity -> words of its recipe. Both may have *."""


@dataclass(frozen=True)
class Finding:
    """One quantity of one run, on both sides. `same`: equal, or apart by rounding."""

    run: str
    quantity: str
    theirs: str
    ours: str
    same: bool


def _told(run: str, quantity: str) -> str | None:
    for runs, quantities in TOLD.items():
        for pattern, words in quantities.items():
            if fnmatch(run, runs) and fnmatch(quantity, pattern):
                return words
    return None


def _rows(update: dict[str, Any]) -> Counter[Any]:
    return Counter((tuple(tokens), tuple(trained)) for tokens, trained in update["rows"])


def _apart(theirs: list[float], ours: list[float], least: float = 1e-12) -> float:
    """The largest difference, relative to the other side's number or to `least`."""
    return max((abs(a - b) / max(abs(a), least) for a, b in zip(theirs, ours, strict=False)), default=math.inf)


def _shown(apart: float) -> str:
    return f"{apart:.0e}" if apart else "equal"


def of_trl(own: Original, ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[Finding]:
    """The findings of a run of TRL."""

    def finding(quantity: str, a: Any, b: Any, same: bool | None = None) -> Finding:
        return Finding(own.name, quantity, str(a), str(b), a == b if same is None else same)

    for fact in FACTS:
        a, b = theirs[fact], ours[fact]
        yield finding(fact, SAME_OPTIMIZER.get(a, a) if fact == "optimizer" else a, b)
    mine, other = ours["updates"], theirs["updates"]
    yield finding("updates", len(other), len(mine))
    rates = [[u["lr"] for u in updates] for updates in (other, mine)]
    apart = _apart(*rates) if len(mine) == len(other) else math.inf
    yield finding("learning rates", _ends(rates[0]), _ends(rates[1]), apart < 1e-6)
    if ours["steps"]:
        yield from _of_replies(own, ours, theirs)
        pass_ = len(ours["steps"][0]) // ours["options"].get("epochs", 1)
        whole = list(range(min(pass_, FIRST)))
    else:
        sizes = [[len(u["rows"]) for u in updates] for updates in (other, mine)]
        yield finding("rows of the updates", _counts(sizes[0]), _counts(sizes[1]))
        same = [_rows(a) == _rows(b) for a, b in zip(other, mine, strict=False)]
        trained = [sum(sum(m) for u in updates for _, m in u["rows"]) for updates in (other, mine)]
        yield finding("trained tokens", trained[0], trained[1], all(same) and len(mine) == len(other))
        whole = [k for k, equal in enumerate(same) if equal][:FIRST] or list(range(FIRST))
    limit = ROUNDING[theirs["products"]]
    for name, quantity in (("loss", "loss"), ("grad_norm", "gradient norm")):
        a, b = ([u[name] for u in updates] for updates in (other, mine))
        last = len(mine) == len(other) and not ours["steps"]
        limit = max(limit, RANDOM) if name == "grad_norm" and "lora" in ours["options"] else limit
        if last:
            yield finding(
                f"{quantity}, last update", _numbers(a[-1:]), _numbers(b[-1:]), _apart(a[-1:], b[-1:]) < limit
            )
        a, b = ([x[k] for k in whole if k < len(x)] for x in (a, b))
        least = ON_POLICY if ours["steps"] and name == "loss" else 1e-12
        yield finding(quantity, _numbers(a), _numbers(b), _apart(a, b, least) < limit)


def _of_replies(own: Original, ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[Finding]:
    """Compare a generation of GRPO or RLOO and its updates: prompts, replies, rollouts of an update."""
    step, made = ours["steps"][0], theirs["generations"]
    passes = ours["options"].get("epochs", 1)
    replies = [r for update in step[: len(step) // passes] for r in update]
    prompts = len({tuple(r["prompt_ids"]) for r in replies})
    per_step = len(theirs["updates"]) / len(made)
    for quantity, a, b in (
        ("prompts of a step", made[0]["prompts"], prompts),
        ("replies of a step", made[0]["replies"], len(replies)),
        ("updates of a step", f"{per_step:g}", f"{len(step):g}"),
        ("rollouts of an update", len(theirs["updates"][0]["rows"]), len(step[0])),
    ):
        yield Finding(own.name, quantity, str(a), str(b), a == b)
    both = [{(tuple(t), tuple(m)) for t, m in theirs["updates"][0]["rows"]},
            {(tuple(r["prompt_ids"] + r["reply_ids"]), (0,) * len(r["prompt_ids"]) + (1,) * len(r["reply_ids"]))
             for r in step[0]}]  # fmt: skip
    counted = [str(sum(sum(m) for _, m in rows)) for rows in both]
    yield Finding(own.name, "trained tokens", *counted, both[0] == both[1])


def _ends(rates: list[float]) -> str:
    return f"{rates[0]:.3g} ... {rates[-1]:.3g}"


def _counts(sizes: list[int]) -> str:
    return ", ".join(f"{size} x {times}" for size, times in Counter(sizes).items())


def _numbers(values: list[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)


def of_configuration(folder: Path) -> Iterator[Finding]:
    """The findings of verl's and OpenRLHF's published commands: quantities, and losses on the cases."""
    recipes, ours = json.loads((folder / "recipes.json").read_text()), np.load(folder / "ours.npz")
    for peer in ("verl", "openrlhf"):
        asked, losses = json.loads((folder / f"{peer}-quantities.json").read_text()), np.load(folder / f"{peer}.npz")
        for run, found in asked.items():
            if run == "version":
                continue
            own = recipes[run]
            for quantity, theirs in found.items():
                if quantity == "learning rates":
                    same = len(theirs) == len(own[quantity]) and _apart(theirs, own[quantity]) < 1e-6
                    yield Finding(run, quantity, _ends(theirs), _ends(own[quantity]), same)
                elif quantity in own:
                    yield Finding(run, quantity, str(theirs), str(own[quantity]), theirs == own[quantity])
            reused = own.get("updates of a step", 1) > 1
            keys = [key for key in losses if key.split("|")[0] == run and (reused or "on policy" in key)]
            if keys:
                apart = max(float((abs(losses[k] - ours[k]) / np.maximum(1, abs(losses[k]))).max()) for k in keys)
                yield Finding(run, "loss and gradient", "", _shown(apart), apart < 1e-6)


def of_verl(run: str, ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[Finding]:
    """The findings of a run of verl's trainer: its optimizer, and every update."""

    def finding(quantity: str, a: Any, b: Any, same: bool) -> Finding:
        return Finding(run, quantity, str(a), str(b), same)

    for fact in FACTS:
        yield finding(fact, theirs[fact], ours[fact], theirs[fact] == ours[fact])
    other, mine = verl_compare.both_sides(ours, theirs)
    yield finding("updates", len(other), len(mine), len(other) == len(mine))
    counts = [sum(sum(trained) for u in theirs["updates"] for _, trained in u["rows"])]
    counts.append(sum(len(r["reply_ids"]) for step in ours["steps"] for u in step for r in u))
    yield finding("trained tokens", *counts, verl_compare.same_rows(ours, theirs))
    rates = [[u["lr"] for u in side] for side in (other, mine)]
    yield finding("learning rates", _ends(rates[0]), _ends(rates[1]), _apart(*rates) < 1e-6)
    values = verl_compare.advantages(ours, theirs)
    yield finding("advantages", _ends(values[0]), _ends(values[1]), _apart(*values, 1.0) < 1e-5)
    for quantity, (name, least) in VERL_NUMBERS.items():
        a, b = ([u[name] for u in side] for side in (other, mine))
        yield finding(quantity, _ends(a), _ends(b), _apart(a, b, least) < ROUNDING["float32"])


def recipe_of(own: Original, place: Path, ran: dict[str, Any]) -> str:
    """The recipe as it is imported now. Its values are those of the run."""
    trainer = own.trainer if own.file == "run.yaml" else None
    draft = recipe_for(str(place / own.file), own.devices, own.rows, trainer)
    table = json.loads(json.dumps({option: value for option, (value, _) in draft.lines.items()}))
    assert table == ran["options"], f"{own.name}: the importer has changed since the run: run it again"
    return draft.toml(own.file, "recipe.toml")


def page(findings: list[Finding], recipes: dict[str, str]) -> Iterator[str]:
    """Yield the tables, as Markdown."""
    runs = list(dict.fromkeys(finding.run for finding in findings))
    same = sum(finding.same for finding in findings)
    told = len(findings) - same
    yield f"{len(runs)} runs, {len(findings)} quantities: {same} equal, {told} different and named in the recipe."
    yield "\n| run | equal | loss, TRL | loss, posttrain | gradient norm, TRL | gradient norm, posttrain |"
    yield "|---|---|---|---|---|---|"
    for run in runs:
        own = {f.quantity: f for f in findings if f.run == run}
        if "gradient norm" in own:
            loss, norm = own["loss"], own["gradient norm"]
            equal = f"{sum(f.same for f in own.values())} of {len(own)}"
            yield f"| {run} | {equal} | {loss.theirs} | {loss.ours} | {norm.theirs} | {norm.ours} |"
    yield "\n## Differences, and how the recipe names them\n"
    yield "| run | quantity | original | posttrain | message in the recipe |\n|---|---|---|---|---|"
    for f in findings:
        if not f.same:
            words = _told(f.run, f.quantity) or "NOT TOLD"
            yield f"| {f.run} | {f.quantity} | {f.theirs} | {f.ours} | {words} |"
    yield "\n## All quantities\n"
    for run in runs:
        equal = [
            f for f in findings if f.run == run and f.same and not f.quantity.startswith(("loss", "gradient norm"))
        ]
        yield f"- **{run}**: {', '.join(f'{f.quantity} {f.ours}'.strip() for f in equal)}."


def first_updates(run: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a table of the first updates of both sides, as Markdown."""
    yield f"\n### {run}\n"
    yield "| update | rate, TRL | here | loss, TRL | here | gradient norm, TRL | here |\n|---|---|---|---|---|---|---|"
    for number, (a, b) in enumerate(zip(theirs[:UPDATES], ours, strict=False), 1):
        cells = (
            f"{side[name]:.{digits}g}" for name, digits in (("lr", 3), ("loss", 6), ("grad_norm", 5)) for side in (a, b)
        )
        yield f"| {number} | {' | '.join(cells)} |"


def finished(runs: Iterable[Any], folder: Path) -> Iterator[tuple[Any, Path, Any, Any]]:
    """Yield (run, its folder, ours, theirs) of the runs that both sides have made."""
    for run in runs:
        place = folder / run.folder
        if (place / "theirs.json").exists():
            ours, theirs = (json.loads((place / f"{side}.json").read_text()) for side in ("ours", "theirs"))
            yield run, place, ours, theirs
        else:
            print(f"{run.name}: not run", file=sys.stderr)


def main(folder: Path) -> int:
    findings, recipes, tables = [], {}, list[str]()
    for own, place, ours, theirs in finished(ORIGINALS, folder):
        recipes[own.name] = recipe_of(own, place, ours)
        findings += of_trl(own, ours, theirs)
        if own.name in SHOWN:
            tables += first_updates(own.name, ours["updates"], theirs["updates"])
    for verl_run, place, ours, theirs in finished(VERL_RUNS, folder):
        recipes[verl_run.name] = imported(verl_run, place).toml("run.sh", "recipe.toml")
        findings += of_verl(verl_run.name, ours, theirs)
        tables += verl_compare.steps_table(verl_run, ours, theirs)
    if (folder / "openrlhf-quantities.json").exists():
        found = json.loads((folder / "recipes.json").read_text())
        recipes |= {run: own["recipe"] for run, own in found.items()}
        findings += of_configuration(folder)
    print("\n".join([*page(findings, recipes), "\n## The first updates", *tables]))
    wrong = []
    for f in findings:
        words = _told(f.run, f.quantity)
        if not f.same and words is None:
            wrong.append(f"{f.run}: {f.quantity} differs ({f.theirs}, here {f.ours}), and the recipe does not tell it")
        elif not f.same and words not in recipes[f.run]:
            wrong.append(f"{f.run}: {f.quantity} differs, and its recipe has no {words!r}")
    apart = [f for f in findings if not f.same]
    for runs, quantities in TOLD.items():
        for pattern in quantities:
            ran = any(fnmatch(f.run, runs) for f in findings)
            if ran and not any(fnmatch(f.run, runs) and fnmatch(f.quantity, pattern) for f in apart):
                wrong.append(f"told.toml: {runs}: {pattern}: no difference")
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
