"""Signs of silent defects that no curve shows: trained tokens that the policy did not write, tokens with a gradient
although they were clipped, prompts that contain the answer.

Each is reported only where the record proves it; nothing is reported where other explanations are possible.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from posttrain.apps.view.rollout_files import File
from posttrain.apps.view.rollout_store import Store
from posttrain.config.verbs import learning
from posttrain.core.json_text import parsed
from posttrain.core.seeds import seed_of
from posttrain.core.types import UserError
from posttrain.runs.record.rollout_reading import read_file
from posttrain.runs.run_reading import divides_by_sampler

LOOKED = 8  # most parts of a run whose tokens are read
TOKENS = 400_000  # tokens of a part beyond which only kinds of spans are read
FOREIGN = ("prompt", "observation", "tool")  # kinds of spans that neither the policy nor a demonstration wrote
ANSWERS = ("answer", "solution", "target", "label", "gold", "expected", "ground_truth")
SOME = (0.05, 0.95)  # bounds on the share of tasks, beyond chance, within which a leak is a sign

_PICTURE = re.compile(r"\[sha256:[0-9a-f]{64}\]")
_PASSES = re.compile(r"updates per step: (\d+)(?:, in (\d+) epochs of \d+)?")
_CLIP = re.compile(r"\[ min\(r A, clip\(r, ([\d.]+), ([\d.]+)\) A\) \]")
# relative tolerance of equal pushes, rounded to eleven bits; least distance of different ratios
_ALIKE, _APART = 0.008, 0.04


# -- where trained tokens come from ------------------------------------------------------------------------------------


def origins(store: Store) -> dict[str, int]:
    """Return kind of span -> number of its trained tokens, in a sample of steps from first to last."""
    found: dict[str, int] = {}
    for file in looked_at(store):
        with suppress(UserError):  # damaged files are reported by the step's page
            for kind, count in _origins(str(file.path), file.stamp):
                found[kind] = found.get(kind, 0) + count
    return found


def looked_at(store: Store) -> list[File]:
    """Return at most `LOOKED` files of training steps, evenly spread."""
    files = [file for part, file in sorted(store.files.items()) if not part.held_out]
    if len(files) <= LOOKED:
        return files
    return [files[round(i * (len(files) - 1) / (LOOKED - 1))] for i in range(LOOKED)]


@lru_cache(maxsize=256)
def _origins(path: str, stamp: tuple[int, int]) -> tuple[tuple[str, int], ...]:
    table = read_file(Path(path), ("kind", "fate", "spans"), None)
    trained = pc.fill_null(pc.equal(table["fate"], "trained"), True)  # null: not recorded
    table = table.filter(pc.and_(trained, pc.is_in(table["kind"], pa.array(learning("demonstrations", "rollouts")))))
    spans = table["spans"].combine_chunks().flatten()
    spans = spans.filter(pc.fill_null(spans.field("learned"), False))
    kinds = spans.field("kind").dictionary_encode()
    lengths = spans.field("length").to_numpy(zero_copy_only=False)
    counted = np.bincount(kinds.indices.to_numpy(), weights=lengths, minlength=len(kinds.dictionary))
    return tuple(sorted(zip(kinds.dictionary.to_pylist(), map(int, counted), strict=True)))


# -- pushed though clipped ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def passes(objective: tuple[str, ...]) -> tuple[float, float, int] | None:
    """Return (lowest ratio, greatest ratio, passes over a token) if the clip of these rows is checkable; else None."""
    clip = next(filter(None, map(_CLIP.search, objective)), None)
    exact = any(line.strip().startswith("ratio r: exp(lp - old)") for line in objective)
    updates = next(filter(None, map(_PASSES.search, objective)), None)
    if clip is None or updates is None or not exact or divides_by_sampler({"objective": list(objective)}):
        return None
    return float(clip[1]), float(clip[2]), int(updates[2] or 1)


def pushed(row: Mapping[str, Any], objective: Sequence[str]) -> NDArray[np.int64]:
    """Return the scored tokens whose last pass had a gradient although the clip should have removed it.

    With one pass a clipped token has no push at all. With two, the first pass had a ratio of 1 in rollouts of the
    step's first update: there a push is w A (1 + r) where nothing is clipped, which gives w, and w A where the second
    is clipped. Two tokens whose ratios moved must agree on w, else the rollout is not of a first update. For other
    rollouts, and for more passes, the ratios in between are not recorded, so nothing is reported.
    """
    none, rule = np.zeros(0, dtype=np.int64), passes(tuple(objective))
    columns = [row.get(name) for name in ("weight", "learner", "before")]
    if rule is None or any(c is None for c in columns) or row.get("token_advantage") is not None or row.get("flags"):
        return none
    if not row.get("advantage") or row.get("fate") != "trained":
        return none
    weight, learner, before = (np.asarray(column, dtype=np.float64) for column in columns)
    if not len(weight) == len(learner) == len(before):
        return none
    ratio, (low, high, count) = np.exp(learner - before), rule
    push = weight / row["advantage"]  # w times the sum of the ratios that were not clipped
    clipped = ratio < low * (1 - _ALIKE) if row["advantage"] < 0 else ratio > high * (1 + _ALIKE)
    if count == 1:
        return np.flatnonzero(clipped & (np.abs(push) > 0))
    inside = (ratio > low * (1 + _ALIKE)) & (ratio < high * (1 - _ALIKE))
    # first updates cannot be distinguished from others
    if count != 2 or (inside & (np.abs(ratio - 1) > _APART)).sum() < 2:
        return none
    each = push[inside] / (1 + ratio[inside])
    w = float(np.median(each))
    if not w > 0 or np.abs(each / w - 1).max() > _ALIKE:
        return none
    both = np.abs(push / (w * (1 + ratio)) - 1) < _ALIKE
    return np.flatnonzero(clipped & both & (ratio > _APART))


def pushed_in(file: File, objective: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Return (index of the rollout, position of the token) of all such tokens of a part."""
    if passes(tuple(objective)) is None:
        return ()
    try:
        return _pushed(str(file.path), file.stamp, tuple(objective))
    except UserError:
        return ()


@lru_cache(maxsize=256)
def _pushed(path: str, stamp: tuple[int, int], objective: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    names = ("index", "fate", "flags", "advantage", "token_advantage", "weight", "learner", "before", "spans")
    scored = read_file(Path(path), ("scored",), None)["scored"].to_pylist()
    if sum(count or 0 for count in scored) > TOKENS:
        return ()
    found = []
    table = read_file(Path(path), names, None)
    for row in table.filter(pc.is_valid(table["weight"])).to_pylist():  # most rows have no weight
        learned = [s for s in row["spans"] or () if s["learned"]]
        if sum(s["length"] for s in learned) == len(row["weight"]):  # else damaged, as the step's page reports
            at = [n for s in learned for n in range(s["start"], s["start"] + s["length"])]
            found += [(row["index"], at[place]) for place in pushed(row, objective)]
    return tuple(found)


# -- prompts that contain the answer -----------------------------------------------------------------------------------


def contains_answer(prompt: str | None, columns: Mapping[str, Any] | None) -> bool:
    """Return whether a prompt contains its task's answer, as a word or a number of its own.

    Answers of one character do not count: "What is 6 * 1?" leaks nothing.
    """
    return _contains(prompt or "", _answer(columns))


def _contains(prompt: str, answer: str | None) -> bool:
    return (
        answer is not None and len(answer) > 1 and re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", prompt) is not None
    )


def _answer(columns: Mapping[str, Any] | None) -> str | None:
    for name in ANSWERS:
        answer = (columns or {}).get(name)
        if isinstance(answer, str | int | float) and not isinstance(answer, bool) and str(answer).strip():
            return str(answer).strip()
    return None


def leaks(store: Store) -> float | None:
    """Return the share of tasks whose prompts contain their answers; None if it is within chance, or close to all
    tasks.

    The tasks are those of a sample of steps.
    """
    tasks: set[tuple[str, str | None]] = set()
    for file in looked_at(store):
        with suppress(UserError):
            tasks |= _tasks(str(file.path), file.stamp)
    if not tasks:
        return None
    share = telling(tasks)
    sure = SOME[0] + 2 * math.sqrt(share * (1 - share) / len(tasks))
    return share if share <= SOME[1] and share - by_chance(tasks) >= sure else None


def by_chance(tasks: Collection[tuple[str, str | None]]) -> float:
    """Return the share of prompts that contain another task's answer, as the numbers of word problems often do."""
    listed = sorted(tasks, key=lambda task: seed_of("by chance", task[0]))  # neighbours have nothing in common
    others = [(p, listed[(at + by) % len(listed)][1]) for by in (1, 7, 61) for at, (p, _) in enumerate(listed)]
    return sum(_contains(prompt, answer) for prompt, answer in others) / len(others)


def telling(tasks: Collection[tuple[str, str | None]]) -> float:
    """Return the share of (prompt, answer) pairs whose prompt contains its answer.

    Prompts that occur with several answers do not count: "circle or square?" with one picture or another.
    """
    answers: dict[str, set[str | None]] = {}
    for prompt, answer in tasks:
        answers.setdefault(_PICTURE.sub("", prompt), set()).add(answer)
    alone = [len(answers[_PICTURE.sub("", prompt)]) == 1 and _contains(prompt, answer) for prompt, answer in tasks]
    return sum(alone) / len(alone)


@lru_cache(maxsize=256)
def _tasks(path: str, stamp: tuple[int, int]) -> frozenset[tuple[str, str | None]]:
    """Return the (prompt, answer) pairs of a part; rows without columns are left out."""
    table = read_file(Path(path), ("prompt", "columns"), None)
    pairs = set(zip(table["prompt"].to_pylist(), table["columns"].to_pylist(), strict=True))
    return frozenset((p or "", _answer(_columns(c))) for p, c in pairs if c is not None)


def _columns(text: str) -> dict[str, Any]:
    found = parsed(text)
    return found if isinstance(found, dict) else {}
