"""What a step made of its rollouts, computed again by whoever has nothing but its Parquet file and the papers."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import pytest
from conftest import tiny
from pyarrow import parquet

import posttrain
from posttrain import Invalid
from posttrain.models.native.decoder_writer import save_model
from posttrain.models.tokenizer.tokenizer import Tokenizer

Row = dict[str, Any]
BUDGET, CACHE, LOW, HIGH = 6, 3, 0.2, 0.28  # tokens; of DAPO's clip
STEPS = {"dapo": 2, "distill-k1": 1}
CREDITED = ("trained", "filtered", "equal group", "not selected")


def rows_of(run: Path, step: int) -> list[Row]:
    """As any library reads them."""
    rows: list[Row] = parquet.read_table(run / "rollouts" / f"step-{step:06d}.parquet").to_pylist()
    return rows


def unequal(found: float | None, told: float | None, near: float = 1e-6) -> bool:
    if found is None or told is None:
        return found is not told
    return not math.isclose(found, told, rel_tol=near, abs_tol=near)


def dapo_contradicted(rows: list[Row]) -> Iterator[str]:
    """What of a step's rows does not follow from DAPO's equations (arXiv 2503.14476)."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["group"]].append(row)
    for group in groups.values():
        rewards = [row["reward"] for row in group if row["reward"] is not None]
        few = 2 * len(rewards) < len(group) or len(rewards) < 2
        fate = "group too small" if few else "replaced" if len(set(rewards)) == 1 else None  # eq. 11
        valid = [row for row in group if row["reward"] is not None]
        soft = [min(0.0, max(-1.0, (BUDGET - CACHE - row["sampled"]) / CACHE)) for row in valid]  # eq. 13
        used = [row["reward"] + less for row, less in zip(valid, soft, strict=True)]
        for row in group:
            if row["reward"] is None and row["fate"] != "invalid":
                yield f"{row['index']}: it is invalid"
        for row, less, own in zip(valid, soft, used, strict=True):
            advantage = (own - fmean(used)) / (stdev(used) + 1e-6) if fate is None else None
            still = "equal group" if len(set(used)) == 1 else "not selected" if not advantage else "trained"
            wanted = fate or ("filtered" if row["stop"] == "length" else still)  # section 3.4
            told = {"fate": wanted} if fate else {"fate": wanted, "shaping": less, "used": own, "advantage": advantage}
            for name, found in told.items():
                if found != row[name] and (name == "fate" or unequal(found, row[name])):
                    yield f"{row['index']}: {name} {row[name]}, and it is {found}"
    for row in rows:
        if (row["fate"] in CREDITED) != (row["advantage"] is not None):
            yield f"{row['index']}: {row['fate']}, and its advantage is {row['advantage']}"
        if row["fate"] in ("invalid", "group too small", "replaced", "filtered") and any(row["weight"] or ()):
            yield f"{row['index']}: {row['fate']}, and it has moved the weights"
    yield from _weights_contradicted(rows, lambda row: [row["advantage"]] * row["scored"], (LOW, HIGH))


def distill_contradicted(rows: list[Row]) -> Iterator[str]:
    """Of distill-k1: each token has the teacher's log-probability less the policy's own for its advantage."""
    yield from (f"{row['index']}: {row['fate']}" for row in rows if row["fate"] != "trained" or row["advantage"])
    yield from _weights_contradicted(
        rows, lambda row: [a - b for a, b in zip(row["teacher"], before(row), strict=True)], (math.inf, math.inf)
    )


def before(row: Row) -> list[float]:
    """Null where the first update alone learned from it."""
    own: list[float] = row["learner"] if row["before"] is None else row["before"]
    return own


def _weights_contradicted(
    rows: list[Row], advantages: Callable[[Row], list[float]], clip: tuple[float, float]
) -> Iterator[str]:
    """Each token weighs r A / N, and nothing where min(r A, clip(r) A) is clipped; N: tokens of its update.

    Rollouts without an advantage count among these, and do not say which update they were given to.
    """
    of_updates: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["fate"] == "trained" and row["weight"]:
            of_updates[row["why"]].append(row)
    counted = 0
    for why, batch in of_updates.items():
        tokens = [
            (row["index"], a, math.exp(new - old), weight)
            for row in batch
            for a, new, old, weight in zip(advantages(row), row["learner"], before(row), row["weight"], strict=True)
        ]
        quotients = [a * ratio / weight for _, a, ratio, weight in tokens if weight]
        moved = sum(row["scored"] for row in batch)
        implied = median(quotients) if quotients else moved  # all of them may be clipped
        n = round(implied)
        counted += n
        if abs(implied - n) > 0.01 * n or n < moved:
            yield f"{why}: divided by {implied}, and it learned from {moved} tokens"
        for index, a, ratio, weight in tokens:
            if min(abs(1 - clip[0] - ratio), abs(1 + clip[1] - ratio)) < 0.02:
                continue  # rounding decides on which side it is
            clipped = (a > 0 and ratio > 1 + clip[1]) or (a < 0 and ratio < 1 - clip[0])
            if not math.isclose(0.0 if clipped else a * ratio / n, weight, rel_tol=0.02, abs_tol=0.003 / n):
                yield f"{index}: weight {weight}, ratio {ratio}"
    given = sum(row["scored"] for row in rows if row["fate"] in CREDITED and row["fate"] != "filtered")
    if counted > given:
        yield f"updates of {counted} tokens, and there are {given}"


def scored(task: posttrain.Task, reply: str) -> float | Invalid:
    return Invalid("none of these") if set("7359kz") & set(reply) else float(len(reply) % 3 == 1)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[Row]]]:
    out = tmp_path_factory.mktemp("rederived")
    tokenizer = Tokenizer.train(["0123456789+-*/= .abcdefghijklmnopqrstuvwxyz<>"], 64, "characters")
    for name, seed in (("start", 0), ("teacher", 1)):
        save_model(tiny(tokenizer, seed=seed), out / name, tokenizer)
    tasks = [{"id": f"{n}", "prompt": f"{n}="} for n in range(12)]
    how: dict[str, Any] = {
        "record": "full",
        "env_workers": 0,
        "threads": 1,
        "quiet": True,
        "max_tokens": BUDGET,
        "stop": tuple("0248ace="),
    }
    posttrain.rl(
        tasks, scored, str(out / "start"), out=str(out / "dapo"), algorithm="dapo", steps=STEPS["dapo"], prompts=6, group=3,
        overlong_cache=CACHE, minibatches=3, lr=4e-2, **how,
    )  # fmt: skip
    posttrain.distill(
        tasks, str(out / "start"), teacher=str(out / "teacher"), out=str(out / "distill-k1"), algorithm="distill-k1",
        steps=STEPS["distill-k1"], prompts=4, group=2, lr=1e-2, minibatches=2, **how,
    )  # fmt: skip
    return {name: [rows_of(out / name, step) for step in range(1, last + 1)] for name, last in STEPS.items()}


CONTRADICTED = {"dapo": dapo_contradicted, "distill-k1": distill_contradicted}


@pytest.mark.parametrize("name", STEPS)
def test_fates_advantages_and_weights_follow_from_the_file_alone(steps: dict[str, list[list[Row]]], name: str) -> None:
    for rows in steps[name]:
        assert list(CONTRADICTED[name](rows)) == []
    every = [row for rows in steps[name] for row in rows]
    assert any(row["before"] is None and row["why"].startswith("in update 1 of") for row in every)
    assert any(row["before"] for row in every)
    if name == "dapo":
        assert {row["fate"] for row in every} >= {*CREDITED, "replaced", "invalid", "group too small"} - {"equal group"}
        ratios = [
            math.exp(new - old)
            for row in every
            if row["fate"] == "trained" and row["advantage"] > 0
            for new, old in zip(row["learner"], before(row), strict=True)
        ]
        assert any(1.22 < ratio < 1.26 for ratio in ratios) and max(ratios) > 1.3, "on both sides of the higher clip"


PLANTED: dict[str, tuple[str, str, Callable[[Row], Any]]] = {
    "another fate": ("trained", "fate", lambda row: "filtered"),
    "a group that was kept": ("replaced", "fate", lambda row: "trained"),
    "an advantage of other rewards": ("trained", "advantage", lambda row: row["advantage"] + 0.05),
    "no penalty for length": ("filtered", "used", lambda row: row["reward"]),
    "a weight without its ratio": ("trained", "weight", lambda row: [2 * w for w in row["weight"]]),
    "a filtered one that moved something": ("filtered", "weight", lambda row: [0.1] * row["scored"]),
    "stale weights before": ("trained", "before", lambda row: [x - 0.5 for x in before(row)]),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_error_is_found(steps: dict[str, list[list[Row]]], planted: str) -> None:
    fate, name, wrong = PLANTED[planted]
    rows = copy.deepcopy(next(rows for rows in steps["dapo"] if any(row["fate"] == fate for row in rows)))
    row = next(row for row in rows if row["fate"] == fate)
    row[name] = wrong(row)
    assert list(dapo_contradicted(rows))
