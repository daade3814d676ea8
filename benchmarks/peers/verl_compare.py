"""Compares what every update of verl's own run and of its imported recipe did: the findings and tables of a run."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from verl_runs import VERL_RUNS, VerlRun

SHOWN: dict[str, tuple[int, str]] = {
    "learning rate": (3, "lr"),
    "policy loss": (5, "policy loss"),
    "KL": (5, "kl"),
    "gradient norm": (5, "grad_norm"),
    "clipped": (3, "clipped"),
}
"""Column of the table of steps -> digits, and the quantity."""
FROZEN = 2  # steps that the test of posttrain repeats
VECTOR = Path(__file__).resolve().parents[2] / "tests" / "vectors" / "verl_steps.json"


def quantities(update: dict[str, Any], coefficients: tuple[float, float]) -> dict[str, float]:
    """Return an update of either side under common names. `coefficients`: of the KL and of the entropy bonus."""
    kl, entropy = coefficients
    if "actor/pg_loss" in update:
        found = {"kl": update["kl_loss"], "entropy": update.get("actor/entropy_loss", 0.0)}
        found["clipped"] = update["clipped"]
        policy = update["actor/pg_loss"]
    else:
        found = {"kl": update["kl"], "entropy": update.get("entropy/policy", 0.0)}
        found["clipped"] = update["ratio/clipped_low"] + update["ratio/clipped_high"]
        policy = update["loss"] - kl * found["kl"] + entropy * found["entropy"]
    return {**{n: update[n] for n in ("lr", "loss", "grad_norm")}, **found, "policy loss": policy}


def both_sides(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Return the quantities of verl's updates and of ours."""
    coefficients = ours["options"].get("kl", 0.0), ours["options"].get("entropy", 0.0)
    return tuple([quantities(u, coefficients) for u in side["updates"]] for side in (theirs, ours))  # type: ignore[return-value]


def same_rows(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Return whether every update has the same rollouts, token by token, with the same tokens trained."""
    own = [
        Counter(json.dumps([r["prompt_ids"] + r["reply_ids"], _mask(r)]) for r in update)
        for step in ours["steps"]
        for update in step
    ]
    return own == [Counter(json.dumps(row) for row in update["rows"]) for update in theirs["updates"]]


def _mask(rollout: dict[str, Any]) -> list[int]:
    return [0] * len(rollout["prompt_ids"]) + [1] * len(rollout["reply_ids"])


def advantages(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Return the advantage of every rollout, verl's and ours, in the same order: replies of a prompt may change places."""
    found: tuple[list[float], list[float]] = ([], [])
    for update, own in zip(theirs["updates"], [u for step in ours["steps"] for u in step], strict=True):
        by_row = {tuple(tokens): value for (tokens, _), value in zip(update["rows"], update["advantages"], strict=True)}
        found[0].extend(by_row[(*r["prompt_ids"], *r["reply_ids"])] for r in own)
        found[1].extend(r["advantage"] for r in own)
    return found


def vector(own: VerlRun, ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Return the first steps as tests/vectors/verl_steps.json has them: options, rollouts, and what verl computed."""
    names = {"loss": "loss", "lr": "lr", "grad_norm": "grad_norm", "kl": "kl", "entropy": "entropy/policy"}
    numbers = iter(both_sides(ours, theirs)[0])
    steps = []
    for step in ours["steps"][:FROZEN]:
        updates = []
        for update in step:
            rollouts = [[r["prompt_ids"], r["reply_ids"], r["reward"]] for r in update]
            found = next(numbers)
            shown = {name: float(f"{found[key]:.7g}") for key, name in names.items()}
            updates.append({"rollouts": rollouts, "numbers": {**shown, "clipped": found["clipped"]}})
        steps.append(updates)
    places = ("train_files", "val_files", "path", "logger")
    options = {name: value for name, value in own.options(Path()).items() if not name.endswith(places)}
    return {"verl": theirs["versions"]["verl"], "options": options, "steps": steps}


def steps_table(own: VerlRun, ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[str]:
    """Yield a table of the steps, each the mean of its updates, as Markdown."""
    size = len(ours["steps"][0])
    sides = both_sides(ours, theirs)
    yield f"\n### {own.name}\n"
    yield f"| step | {' | '.join(f'{name}, verl | here' for name in SHOWN)} |\n|{'---|' * (1 + 2 * len(SHOWN))}"
    for first in range(0, len(sides[0]), size):
        cells = (
            f"{_mean([u[name] for u in side[first : first + size]]):.{digits}g}"
            for digits, name in SHOWN.values()
            for side in sides
        )
        yield f"| {first // size + 1} | {' | '.join(cells)} |"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main(folder: Path) -> None:
    """Print the tables, and write the first steps of the last run for the test."""
    for own in VERL_RUNS:
        place = folder / own.folder
        ours, theirs = (json.loads((place / f"{side}.json").read_text()) for side in ("ours", "theirs"))
        print("\n".join(steps_table(own, ours, theirs)))
    VECTOR.write_text(json.dumps(vector(own, ours, theirs), separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
